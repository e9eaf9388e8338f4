"""Import and export at V4-Flash's geometry: a chunk of pages to and from a 64 GiB host pool, a parking pool, the snapshots.

A load changes its pool in place; an export reads it where it is and gives back the chunk alone.
"""

import inspect

import jax.numpy as jnp
from h200 import assert_in_place, compile_for_h200, copies_of, spec

from hisparse_jax import images
from hisparse_jax.config import CacheConfig, preset
from hisparse_jax.layout import plan_layout

cache = CacheConfig(
    max_model_len=131_072, max_requests=64, gpu_pool_bytes=40 * 2**30, host_pool_bytes=64 * 2**30, parked_requests=8,
    parked_pages=2_048,
)  # fmt: skip
layout = plan_layout(preset("v4-flash"), cache)
(group,) = layout.base_groups
for blocks, size, chunk in (
    (layout.host_blocks, layout.page_bytes, images.CHUNK_PAGES),
    (layout.parking_blocks, sum(place.page_bytes for place in group), images.CHUNK_PAGES),
    (cache.parked_requests + 1, layout.snapshot_bytes, 1),
):
    pool, pages = spec((blocks, size), jnp.uint8, "pinned_host"), spec((chunk + 1, size), jnp.uint8)
    ids = spec((chunk,), jnp.int32, "pinned_host")
    load = compile_for_h200(inspect.unwrap(images._load), pool, pages, ids, ids, donate=0)
    assert_in_place(load, pool)
    unload = compile_for_h200(inspect.unwrap(images._unload), pool, pages, ids, ids, donate=1)
    assert not copies_of(unload.hlo, pool), unload.hlo
    stats = unload.stats
    assert not stats.host_temp_size_in_bytes and not stats.host_output_size_in_bytes, stats
    assert stats.temp_size_in_bytes < 2**20 and stats.alias_size_in_bytes >= (chunk + 1) * size, stats
    print(blocks, size, load.stats, stats)
