"""Preemption, return, publication at V4-Flash's geometry: 64 requests of 131,072 tokens, 8 places, 40 GiB slab, 64 GiB of pools.

Some layers of each kind stand for 43; pages are spilled lazily, which copies most. Pools, parking pages and slab stay in place.
"""

import dataclasses
import inspect

import jax
import jax.numpy as jnp
from h200 import assert_in_place, compile_for_h200, spec

from hisparse_jax import parking, prefix_places
from hisparse_jax.config import CacheConfig, preset
from hisparse_jax.layout import CacheLayout, plan_layout
from hisparse_jax.parking import Parking, assemble_parking
from hisparse_jax.parking_ledger import most_resident
from hisparse_jax.state import TieredState, assemble_state

FLASH = dataclasses.replace(preset("v4-flash"), num_hidden_layers=4, compress_ratios=(0, 4, 128, 4))
PLACES = 8
DEVICE_TEMP = 256 * 2**20


def state_specs(layout: CacheLayout) -> TieredState:
    pools = tuple(spec((layout.host_blocks, layout.page_bytes), jnp.uint8, "pinned_host") for _ in layout.model.c4_layers)
    slab = spec((layout.gpu_blocks, layout.stride), jnp.uint8)
    rest = jax.eval_shape(lambda: assemble_state(layout, jnp.zeros((1, 1), jnp.uint8), ()))
    return jax.tree.map(lambda x: spec(x.shape, x.dtype), rest).replace(slab=slab, pools=pools)


def parking_specs(layout: CacheLayout) -> Parking:
    rest = jax.eval_shape(lambda: assemble_parking(layout, (), jnp.zeros((1, 1), jnp.uint8)))
    sizes = [sum(place.page_bytes for place in group) for group in layout.base_groups]
    return jax.tree.map(lambda x: spec(x.shape, x.dtype), rest).replace(
        pages=tuple(spec((layout.parking_blocks, size), jnp.uint8, "pinned_host") for size in sizes),
        snapshots=spec((PLACES + 1, layout.snapshot_bytes), jnp.uint8, "pinned_host"),
    )


def ids(count: int) -> jax.ShapeDtypeStruct:
    return spec((count,), jnp.int32, "pinned_host")


cache = CacheConfig(
    max_model_len=131_072, max_requests=64, gpu_pool_bytes=40 * 2**30, host_pool_bytes=64 * 2**30, backup="spill",
    parked_requests=PLACES // 2, parked_pages=1_024, cached_prefixes=PLACES // 2, cached_pages=1_024,
)  # fmt: skip
layout = plan_layout(FLASH, cache)
state, lot, number, row = state_specs(layout), parking_specs(layout), spec((), jnp.int32), (ids(1), ids(1))
pages, back = ids(layout.max_pages), ids(most_resident(layout.max_pages, layout.hot_pages, layout.cache.tail_pages))
base, resident = (pages,) * layout.num_base_groups, (pages,) * layout.num_resident_groups
for name, *rest in (
    ("_copy_out", number, row, base, pages, resident, pages),
    ("_plan_resume", number, number),
    ("_copy_back", number, row, resident, pages, pages, base, back, (back,) * layout.num_resident_groups),
    ("_plan_publish", number, number, number),
):
    function = inspect.unwrap(getattr(parking, name, None) or getattr(prefix_places, name))
    compiled = compile_for_h200(lambda *args, f=function: f(*args, layout=layout), state, lot, *rest, donate=(0, 1))
    print(name, compiled.stats)
    assert_in_place(compiled, state.slab, *state.pools, *lot.pages, lot.snapshots)
    assert compiled.stats.temp_size_in_bytes < DEVICE_TEMP, f"{name}: {compiled.stats.temp_size_in_bytes / 2**20:.1f} MiB"
