"""Top-k indices to physical rows: resident, hot, or to be fetched; the hot map, its LRU order, and the plan.

The rule stands in `pallas_kernels.ref.resolve_topk`. A fully resident request passes through with its map untouched.
"""

from flax import struct
from jaxtyping import Array, Bool, Int32

from hisparse_jax.config import MAX_HOT_SLOTS, ConfigError
from hisparse_jax.hot_map import HotMap
from pallas_kernels import resolve_topk as kernel
from pallas_kernels.ref import Resolution

RESIDENT, NEWEST, HOT_HITS, MISSES, INVALID = range(5)
"""Columns of `Resolved.counts`."""


class Resolved(struct.PyTreeNode):
    """Where the selected entries of one step stand, and what to fetch first. `R = Q * K` references of one request.

    Rows count `block * row_step + slot` relative to the layer's own page. Host rows, slots and rows are the same in every
    layer that follows the one resolved here; pools, offsets and bytes are not: a follower carries the plan out verbatim
    with its own pool and offset. A scan may stack them over steps, in front.

    rows: i32[B, Q, K]     row of each reference, in its own column, or -1; every element is written.
    num_valid: i32[B, Q]   how many of `rows` are not -1; -1 may stand anywhere, so this is no prefix length.
    host_rows: i32[B, R]   the plan in miss order, then -1: host row,
    dest_rows: i32[B, R]   row of the hot slot it goes to,
    slots: i32[B, R]       and that slot.
    num_misses: i32[B]     length of the plan, which is the number of rows copied.
    counts: i32[B, 5]      resident, newest, hot hits, misses, invalid; sum = valid query rows * K.
    num_homeless: i32[B]   entries that are valid and found in no tier: an error, counted as invalid.
    """

    rows: Int32[Array, "*steps B Q K"]
    num_valid: Int32[Array, "*steps B Q"]
    host_rows: Int32[Array, "*steps B R"]
    dest_rows: Int32[Array, "*steps B R"]
    slots: Int32[Array, "*steps B R"]
    num_misses: Int32[Array, "*steps B"]
    counts: Int32[Array, "*steps B 5"]
    num_homeless: Int32[Array, "*steps B"]


def resolve_topk(
    topk: Int32[Array, "B Q K"],
    num_entries: Int32[Array, "B Q"],
    row_valid: Bool[Array, "B Q"],
    first_new: Int32[Array, " B"],
    resident: Int32[Array, "B P"],
    host: Int32[Array, "B P"],
    hot: Int32[Array, "B HP"],
    hot_map: HotMap,
    *,
    page_entries: int,
    row_step: int,
    num_host_blocks: int,
    implementation: str | None = None,
) -> tuple[Resolved, HotMap]:
    """Resolves one layer's selections. All query rows of a request are one replacement transaction.

    topk              entry numbers, -1 = none, in any order.
    num_entries       entries that exist for each query row: an index from there on is invalid.
    row_valid         False for padding rows: output -1, map and LRU untouched, not counted.
    first_new         entries from here on were written in this step: counted as newest, never read from the host.
    resident, host    block tables of the layer's group, 0 = no block there.
    hot               blocks of the hot region, `ceil(S / page_entries)`; a request owns all of them or has none.
    hot_map           of this layer, `[B, S]`.

    Raises `ConfigError` where one transaction overflows the slots.
    """
    check_sizes(topk, hot, hot_map, page_entries, row_step)
    result = kernel.resolve_topk(
        topk,
        num_entries,
        row_valid,
        first_new,
        resident,
        host,
        hot,
        hot_map.slot_host,
        hot_map.lru,
        page_entries=page_entries,
        row_step=row_step,
        num_host_blocks=num_host_blocks,
        implementation=implementation,
    )
    return as_resolved(result)


def as_resolved(result: Resolution) -> tuple[Resolved, HotMap]:
    """A kernel's results, apart from the new map."""
    *resolved, slot_host, lru = result
    return Resolved(*resolved), HotMap(slot_host=slot_host, lru=lru)


def check_sizes(topk: Array, hot: Array, hot_map: HotMap, page_entries: int, row_step: int) -> None:
    """Raises `ConfigError` where a transaction overflows the slots, or rows could not be told apart."""
    num_slots, needed = hot_map.lru.shape[-1], topk.shape[1] * topk.shape[2]
    if num_slots < needed:
        raise ConfigError(f"num_hot_slots={num_slots} holds {num_slots}, one transaction needs {needed}; raise num_hot_slots.")
    if num_slots > MAX_HOT_SLOTS:
        raise ConfigError(f"num_hot_slots={num_slots} exceeds {MAX_HOT_SLOTS}: slot numbers are int16; lower num_hot_slots.")
    if hot.shape[1] * page_entries < num_slots:
        raise ConfigError(
            f"a hot region of {hot.shape[1]} pages holds {hot.shape[1] * page_entries} rows, num_hot_slots={num_slots}; "
            f"give it {-(-num_slots // page_entries)} pages."
        )
    if row_step < page_entries:
        raise ConfigError(f"row_step={row_step} is below page_entries={page_entries}: two rows would share a number.")
