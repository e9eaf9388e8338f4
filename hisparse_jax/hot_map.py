"""Which host row each hot slot holds, and in which order slots are given up."""

import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Bool, Int16, Int32

from hisparse_jax.config import MAX_HOT_SLOTS, ConfigError
from hisparse_jax.status import MISS, NULL_BLOCK


class HotMap(struct.PyTreeNode):
    """Map and LRU order of the hot slots, per request and layer. No host row stands twice in one map.

    slot_host: i32[..., B, S]  host row in the slot, or -1: free.
    lru: i16[..., B, S]        a permutation of the slots; the front is the next victim.
    """

    slot_host: Int32[Array, "*layers B S"]
    lru: Int16[Array, "*layers B S"]


def init_hot_map(*shape: int) -> HotMap:
    """All slots free, in ascending order. `shape` is `(..., B, S)`; S is at most 32,768, since slot numbers are int16."""
    if shape[-1] > MAX_HOT_SLOTS:
        raise ConfigError(f"num_hot_slots={shape[-1]} exceeds {MAX_HOT_SLOTS}: slot numbers are int16; lower num_hot_slots.")
    order = jnp.arange(shape[-1], dtype=jnp.int16)
    return HotMap(slot_host=jnp.full(shape, MISS, jnp.int32), lru=jnp.broadcast_to(order, shape))


def reset_requests(hot_map: HotMap, mask: Bool[Array, " B"]) -> HotMap:
    """The requests in `mask` as after `init_hot_map`, in every layer; the others untouched."""
    fresh = init_hot_map(*hot_map.lru.shape)
    lead = (1,) * (hot_map.lru.ndim - 2)
    mask = mask.reshape(*lead, -1, 1)
    return HotMap(slot_host=jnp.where(mask, fresh.slot_host, hot_map.slot_host), lru=jnp.where(mask, fresh.lru, hot_map.lru))


def forget_host_blocks(hot_map: HotMap, blocks: Int32[Array, " M"], page_entries: int) -> HotMap:
    """Frees every slot, of any request and layer, that holds a row of one of these host blocks; its LRU place stays.

    Due before the first use of a host block that got a new owner. Null blocks in the list mean nothing. O(slots * M).
    """
    held = jnp.where(hot_map.slot_host >= 0, hot_map.slot_host // page_entries, NULL_BLOCK)
    return _forget(hot_map, (held > NULL_BLOCK) & _member(held, blocks))


def forget_host_rows(hot_map: HotMap, rows: Int32[Array, " M"]) -> HotMap:
    """Frees every slot that holds one of these host rows; its LRU place stays. Due after a row was written again.

    -1 in the list means nothing. O(slots * M).
    """
    return _forget(hot_map, (hot_map.slot_host >= 0) & _member(hot_map.slot_host, rows))


def _forget(hot_map: HotMap, mask: Bool[Array, "*layers B S"]) -> HotMap:
    return hot_map.replace(slot_host=jnp.where(mask, MISS, hot_map.slot_host))


def _member(values: Int32[Array, "*shape"], items: Int32[Array, " M"]) -> Bool[Array, "*shape"]:
    return jnp.any(values[..., None] == items.reshape(*(1,) * values.ndim, -1), axis=-1)
