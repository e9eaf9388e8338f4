"""Carries plans out: rows from the host to hot slots or to a staging buffer, rows and pages from the GPU to the host.

Moving never decides: which bytes go where was planned by `resolve`, by the coordinator, or by the block tables. One
host pool is one C4 layer's, `u8[H, page_bytes]`; sizes are static. An op that writes a pool returns nothing else.
"""

import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Bool, Int32, UInt8

from hisparse_jax import library  # noqa: F401 - from here on its CUDA kernels are found
from hisparse_jax.hot_map import HotMap
from hisparse_jax.pages import entry_rows
from hisparse_jax.resolve import Resolved, as_resolved, check_sizes
from hisparse_jax.rows import RowFormat
from hisparse_jax.status import MISS
from pallas_kernels import copy_pages, gather_rows, resolve_and_gather, store_entry


def swap_in(
    slab: UInt8[Array, "N stride"],
    pool: UInt8[Array, "H page_bytes"],
    resolved: Resolved,
    fmt: RowFormat,
    *,
    page_entries: int,
    offset: int,
    row_step: int,
    implementation: str | None = None,
) -> UInt8[Array, "N stride"]:
    """Copies the plan's host rows to their hot slots in the layer's page at `offset`; the slab is updated in place.

    A follower passes its leader's `resolved` with its own pool and offset.
    """
    return gather_rows.gather_rows(
        pool,
        slab,
        resolved.host_rows.reshape(-1),
        resolved.dest_rows.reshape(-1),
        resolved.num_misses.reshape(-1),
        value_bytes=fmt.value_bytes,
        scale_bytes=fmt.scale_bytes,
        page_entries=page_entries,
        offset=offset,
        row_step=row_step,
        implementation=implementation,
    )


def resolve_and_swap_in(
    slab: UInt8[Array, "N stride"],
    pool: UInt8[Array, "H page_bytes"],
    topk: Int32[Array, "B Q K"],
    num_entries: Int32[Array, "B Q"],
    row_valid: Bool[Array, "B Q"],
    first_new: Int32[Array, " B"],
    resident: Int32[Array, "B P"],
    host: Int32[Array, "B P"],
    hot: Int32[Array, "B HP"],
    hot_map: HotMap,
    fmt: RowFormat,
    *,
    page_entries: int,
    offset: int,
    row_step: int,
    num_host_blocks: int,
    implementation: str | None = None,
) -> tuple[UInt8[Array, "N stride"], Resolved, HotMap]:
    """`resolve_topk` of a layer, then `swap_in` by its plan; one kernel on CUDA where it is built. `(slab, resolved, map)`.

    The same bytes as the two calls, which a layer that follows another's plan still makes apart.
    """
    check_sizes(topk, hot, hot_map, page_entries, row_step)
    slab, result = resolve_and_gather.resolve_and_gather(
        pool,
        slab,
        topk,
        num_entries,
        row_valid,
        first_new,
        resident,
        host,
        hot,
        hot_map.slot_host,
        hot_map.lru,
        value_bytes=fmt.value_bytes,
        scale_bytes=fmt.scale_bytes,
        page_entries=page_entries,
        offset=offset,
        row_step=row_step,
        num_host_blocks=num_host_blocks,
        implementation=implementation,
    )
    return slab, *as_resolved(result)


class Staged(struct.PyTreeNode):
    """Rows of the host tier that a prefill chunk selected, in a compact buffer of whole pages.

    pages: u8[C, page_bytes]  row i is slot `i % page_entries` of page `i // page_entries`; unused rows are zeros.
    rows: i32[T, K]           row of `pages` for each reference (`row_step = page_entries`), -1 where it is not staged.
    num_staged: i32[]         how many rows were copied.
    num_homeless: i32[]       references that are valid and stand in no tier: an error.
    """

    pages: UInt8[Array, "*steps C page_bytes"]
    rows: Int32[Array, "*steps T K"]
    num_staged: Int32[Array, "*steps"]
    num_homeless: Int32[Array, "*steps"]


def stage_rows(
    pool: UInt8[Array, "H page_bytes"],
    topk: Int32[Array, "T K"],
    num_entries: Int32[Array, " T"],
    resident: Int32[Array, " P"],
    host: Int32[Array, " P"],
    fmt: RowFormat,
    *,
    page_entries: int,
    implementation: str | None = None,
) -> Staged:
    """Gathers what one request's prefill chunk selected and does not hold on the GPU; map and LRU stay alone.

    `T` query rows of one request, each with its own bound: indices outside `0 ... num_entries - 1` select nothing. The
    distinct entries without a resident block are staged in ascending order, at most `min(T * K, P * page_entries)`.
    Source: vLLM stages prefill rows in a separate buffer, since they exceed what a hot region holds.
    """
    num_host_rows = pool.shape[0] * page_entries
    max_entries = resident.size * page_entries
    max_staged = min(topk.size, max_entries)
    wanted = (topk >= 0) & (topk < num_entries[:, None])
    selected = jnp.zeros(max_entries, bool).at[jnp.where(wanted, topk, max_entries).reshape(-1)].set(True, mode="drop")

    entries = jnp.arange(max_entries, dtype=jnp.int32)
    host_row = entry_rows(entries[None], host[None], page_entries=page_entries, row_step=page_entries)[0]
    on_gpu = entry_rows(entries[None], resident[None], page_entries=page_entries, row_step=page_entries)[0] >= 0
    staged = selected & ~on_gpu & (host_row >= 0) & (host_row < num_host_rows)
    number = jnp.cumsum(staged, dtype=jnp.int32)  # up to and including this entry

    order = jnp.arange(max_staged, dtype=jnp.int32)
    planned = order < number[-1]
    entry = jnp.zeros(max_staged, jnp.int32).at[jnp.where(staged, number - 1, max_staged)].set(entries, mode="drop")
    pages = gather_rows.gather_rows(
        pool,
        jnp.zeros((-(-max_staged // page_entries), fmt.page_bytes(page_entries)), jnp.uint8),
        jnp.where(planned, host_row[entry], MISS),
        jnp.where(planned, order, MISS),
        number[-1:],
        value_bytes=fmt.value_bytes,
        scale_bytes=fmt.scale_bytes,
        page_entries=page_entries,
        offset=0,
        row_step=page_entries,
        implementation=implementation,
    )
    known = wanted & (topk < max_entries)
    at = jnp.where(known, topk, 0)
    rows = jnp.where(known & staged[at], number[at] - 1, MISS)
    num_homeless = jnp.sum(wanted & ~(known & (staged | on_gpu)[at]), dtype=jnp.int32)
    return Staged(pages=pages, rows=rows, num_staged=number[-1], num_homeless=num_homeless)


def back_up_rows(
    pool: UInt8[Array, "H page_bytes"],
    data: UInt8[Array, "M row_bytes"],
    host_rows: Int32[Array, " M"],
    fmt: RowFormat,
    *,
    page_entries: int,
    implementation: str | None = None,
) -> UInt8[Array, "H page_bytes"]:
    """Write-through: the packed rows just stored on the slab, to their host rows too. -1 skips."""
    return store_entry.store_entry(
        pool,
        data,
        host_rows,
        value_bytes=fmt.value_bytes,
        scale_bytes=fmt.scale_bytes,
        page_entries=page_entries,
        implementation=implementation,
    )


def back_up_pages(
    pool: UInt8[Array, "H page_bytes"],
    slab: UInt8[Array, "N stride"],
    slab_blocks: Int32[Array, " M"],
    host_blocks: Int32[Array, " M"],
    fmt: RowFormat,
    *,
    page_entries: int,
    offset: int,
    implementation: str | None = None,
) -> UInt8[Array, "H page_bytes"]:
    """Lazy spill: whole pages of this layer from slab blocks to host blocks. A null block in either list skips."""
    return copy_pages.copy_pages(
        pool,
        slab,
        slab_blocks,
        host_blocks,
        offset=offset,
        page_bytes=fmt.page_bytes(page_entries),
        implementation=implementation,
    )
