"""Everything a tiered run keeps from call to call, as one pytree, donated to each."""

import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Int32, UInt8

from hisparse_jax.coordinator import Ledger, init_ledger
from hisparse_jax.device_memory import check_slab_budget
from hisparse_jax.host_memory import check_host_budget, make_host_pool
from hisparse_jax.hot_map import HotMap, init_hot_map
from hisparse_jax.layer_state import LayerState, init_layer_states
from hisparse_jax.layout import CacheLayout
from hisparse_jax.sequences import Sequences, committed, init_sequences
from hisparse_jax.tiered import Traffic, init_traffic


class TieredState(struct.PyTreeNode):
    """State of both tiers.

    slab: u8[N, stride]             all GPU pages: index keys, C128 entries, resident C4 pages, hot regions.
    pools: u8[H, page_bytes] each   one pool of host pages per C4 layer, in pinned host memory.
    hot_maps: HotMap each           what each hot slot holds, one per C4 layer.
    homeless: i32[B]                selected entries found in no tier since the start: zero, or the run is broken.
    """

    sequences: Sequences
    layers: tuple[LayerState, ...]
    slab: UInt8[Array, "N stride"]
    pools: tuple[UInt8[Array, "H page_bytes"], ...]
    ledger: Ledger
    hot_maps: tuple[HotMap, ...]
    traffic: Traffic
    homeless: Int32[Array, " B"]


def init_state(layout: CacheLayout) -> TieredState:
    """An empty cache of `layout`. Slab and host memory, that of the parking included, are checked before any of it is taken."""
    check_slab_budget(layout)
    check_host_budget(layout.host_bytes + layout.parking_bytes)
    pools = tuple(make_host_pool(layout.host_blocks, layout.page_bytes) for _ in layout.model.c4_layers)
    rest = committed(assemble_state(layout, jnp.zeros((layout.gpu_blocks, layout.stride), jnp.uint8), ()))
    return rest.replace(pools=pools)


def assemble_state(
    layout: CacheLayout, slab: UInt8[Array, "N stride"], pools: tuple[UInt8[Array, "H page_bytes"], ...]
) -> TieredState:
    """An empty cache around a slab and host pools that exist already, or are only specified (`jax.eval_shape`)."""
    batch = layout.cache.max_requests
    return TieredState(
        sequences=init_sequences(batch),
        layers=init_layer_states(layout),
        slab=slab,
        pools=pools,
        ledger=init_ledger(
            num_blocks=layout.gpu_blocks,
            num_host_blocks=layout.host_blocks,
            num_base=layout.num_base_groups,
            num_resident=layout.num_resident_groups,
            batch=batch,
            max_pages=layout.max_pages,
            hot_pages=layout.hot_pages,
            tail_pages=layout.cache.tail_pages,
        ),
        hot_maps=tuple(init_hot_map(batch, layout.num_hot_slots) for _ in layout.model.c4_layers),
        traffic=init_traffic(batch),
        homeless=jnp.zeros(batch, jnp.int32),
    )
