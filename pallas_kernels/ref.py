"""The reference of every kernel: plain `jnp`, on arrays of one memory space. Also what a CPU runs."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Float32, Int16, Int32, UInt8

from pallas_kernels.windows import read_windows, row_parts, write_windows

MISS = -1
NULL_BLOCK = 0

ENTRY_VALUE_BYTES, ENTRY_SCALE_BYTES = 576, 8
"""Of a packed fp8 entry row: its values, then its scales."""


def topk_select(scores: Float[Array, "*rows N"], lengths: Int32[Array, "*rows"], k: int) -> Int32[Array, "*rows {k}"]:
    """The set of the `k` largest of `scores[..., :length]`: ascending entry numbers, then -1.

    Invalid columns stand last in a row and score -inf, so a stable top-k prefers every candidate to them, also one that
    scores -inf itself. NaN ranks with -inf.
    """
    size = scores.shape[-1]
    column = jax.lax.broadcasted_iota(jnp.int32, scores.shape, scores.ndim - 1)
    scores = scores.astype(jnp.float32)
    scores = jnp.where(scores == 0, 0.0, scores)
    scores = jnp.where((column < lengths[..., None]) & ~jnp.isnan(scores), scores, -jnp.inf)
    _, best = jax.lax.top_k(scores, min(k, size))
    best = jnp.sort(jnp.where(best < lengths[..., None], best, size), axis=-1)
    best = jnp.where(best < size, best, MISS)
    unused = [(0, 0)] * (best.ndim - 1) + [(0, k - best.shape[-1])]
    return jnp.pad(best, unused, constant_values=MISS)


def sinkhorn(matrix: Float32[Array, "*batch n n"], iterations: int, eps: float) -> Float32[Array, "*batch n n"]:
    """Columns and rows divided by their sums plus `eps` in turn; `iterations` column passes, the first and the last."""

    def columns(m):
        return m / (m.sum(axis=-2, keepdims=True) + eps)

    def both(_, m):
        return columns(m / (m.sum(axis=-1, keepdims=True) + eps))

    return jax.lax.fori_loop(0, iterations - 1, both, columns(matrix))


def index_scores(
    slab: UInt8[Array, "N stride"],
    blocks: Int32[Array, "R P"],
    queries: Float[Array, "R T H d"],
    weights: Float32[Array, "R T H"],
    *,
    page_entries: int,
    offset: int,
) -> Float32[Array, "R T columns"]:
    """`sum_h weights[h] * relu(queries[h] . key) * scale` of every entry of whole pages; 0 in null or unknown ones."""
    channels, (requests, pages) = queries.shape[-1], blocks.shape
    block = jnp.where(blocks > NULL_BLOCK, blocks, slab.shape[0])

    def read(first: int, width: int, dtype):
        found = read_windows(slab, block, jnp.full_like(block, offset + first), width * page_entries)
        size = jnp.dtype(dtype).itemsize
        found = found.reshape(requests, pages * page_entries, width // size, *((size,) if size > 1 else ()))
        return jax.lax.bitcast_convert_type(found, dtype).astype(jnp.float32)

    keys, scale = read(0, channels, jnp.float8_e4m3fn), read(channels * page_entries, 4, jnp.float32)
    highest = jax.lax.Precision.HIGHEST
    dots = jnp.einsum("rthd,rnd->rthn", queries.astype(jnp.float32), keys, precision=highest)
    return jnp.einsum("rth,rthn->rtn", weights, jax.nn.relu(dots), precision=highest) * scale[:, None, :, 0]


def sparse_attention(
    q: Float[Array, "R T H c"],
    window: UInt8[Array, "R W row_bytes"],
    positions: Int32[Array, "R T"],
    slab: UInt8[Array, "N stride"],
    rows: Int32[Array, "R T K"],
    lengths: Int32[Array, "R T"],
    sink: Float32[Array, " H"],
    *,
    window_width: int,
    page_entries: int,
    offset: int,
    row_step: int,
) -> Float[Array, "R T H c"]:
    """Attention over the last `window_width` positions, the first `lengths` of `rows` and a sink; zeros at positions below 0."""
    values, scales = row_parts(ENTRY_VALUE_BYTES, ENTRY_SCALE_BYTES, page_entries)
    at = positions[..., None] - jnp.arange(window_width, dtype=jnp.int32)[None, None, ::-1]
    recent = jnp.take_along_axis(window[:, None], (at % window.shape[1])[..., None], axis=2)
    block, slot = jnp.where(rows < 0, 0, rows // row_step), rows % row_step
    real = (block > NULL_BLOCK) & (block < slab.shape[0]) & (slot < page_entries)
    real &= jnp.arange(rows.shape[2])[None, None, :] < lengths[..., None]
    block, slot = jnp.where(real, block, slab.shape[0]), jnp.where(real, slot, 0)
    parts = [read_windows(slab, block, offset + base + width * slot, width) for _, base, width in (values, scales)]
    keys = entry_numbers(jnp.concatenate((recent, jnp.concatenate(parts, axis=-1)), axis=2))
    is_key = jnp.concatenate((at >= 0, real), axis=2)
    keys = jnp.where(is_key[..., None], keys, 0)
    highest = jax.lax.Precision.HIGHEST
    scores = jnp.einsum("rthc,rtnc->rthn", q.astype(jnp.float32), keys, precision=highest) * q.shape[-1] ** -0.5
    scores = jnp.where(is_key[:, :, None], scores, -jnp.inf)
    sinks = jnp.broadcast_to(sink[None, None, :, None], (*scores.shape[:3], 1))
    weights = jax.nn.softmax(jnp.concatenate((scores, sinks), axis=-1), axis=-1)[..., :-1]
    out = jnp.einsum("rthn,rtnc->rthc", weights.astype(q.dtype).astype(jnp.float32), keys, precision=highest)
    return jnp.where((positions >= 0)[..., None, None], out, 0).astype(q.dtype)


def entry_numbers(rows: UInt8[Array, "*batch row_bytes"]) -> Float32[Array, "*batch channels"]:
    """The numbers of packed fp8 entry rows: 448 e4m3 values with a power-of-two scale for 64 of them, then 64 bf16 values."""
    nope, tile, batch = 448, 64, rows.shape[:-1]
    scale = jax.lax.bitcast_convert_type(rows[..., ENTRY_VALUE_BYTES:-1].astype(jnp.int32) << 23, jnp.float32)
    values = jax.lax.bitcast_convert_type(rows[..., :nope], jnp.float8_e4m3fn).astype(jnp.float32)
    scaled = (values.reshape(*batch, -1, tile) * scale[..., None]).reshape(*batch, nope)
    rope = jax.lax.bitcast_convert_type(rows[..., nope:ENTRY_VALUE_BYTES].reshape(*batch, -1, 2), jnp.bfloat16)
    return jnp.concatenate((scaled, rope.astype(jnp.float32)), axis=-1)


class Resolution(NamedTuple):
    """What `resolve_topk` gives. R = Q * K references of one request, row by row, column by column.

    rows: i32[B, Q, K]      row of each reference, `block * row_step + slot`, or -1. Every element is written.
    num_valid: i32[B, Q]    how many of `rows` are valid; -1 may stand anywhere among them.
    host_rows: i32[B, R]    the plan, in miss order, then -1: host row to read,
    dest_rows: i32[B, R]    row to write it to,
    slots: i32[B, R]        and the hot slot that row is.
    num_misses: i32[B]      length of the plan.
    counts: i32[B, 5]       resident, newest, hot hits, misses, invalid; they sum to valid rows * K.
    num_homeless: i32[B]    valid entries found nowhere (an error; counted as invalid).
    slot_host: i32[B, S]    the new map.
    lru: i16[B, S]          the new order.
    """

    rows: Int32[Array, "B Q K"]
    num_valid: Int32[Array, "B Q"]
    host_rows: Int32[Array, "B R"]
    dest_rows: Int32[Array, "B R"]
    slots: Int32[Array, "B R"]
    num_misses: Int32[Array, " B"]
    counts: Int32[Array, "B 5"]
    num_homeless: Int32[Array, " B"]
    slot_host: Int32[Array, "B S"]
    lru: Int16[Array, "B S"]


def resolve_topk(
    topk: Int32[Array, "B Q K"],
    num_entries: Int32[Array, "B Q"],
    row_valid: Bool[Array, "B Q"],
    first_new: Int32[Array, " B"],
    resident: Int32[Array, "B P"],
    host: Int32[Array, "B P"],
    hot: Int32[Array, "B HP"],
    slot_host: Int32[Array, "B S"],
    lru: Int16[Array, "B S"],
    *,
    page_entries: int,
    row_step: int,
    num_host_blocks: int,
) -> Resolution:
    """Where each selected entry stands, and which rows must be fetched first; requests do not touch one another.

    Entry j (page p, place o in it) of a valid row, in this order: j < 0 or j >= num_entries -> -1; resident block of p
    -> its row; host block h of p -> host row g = h * page_entries + o, which must stand in a hot slot: a hit where the
    map names g, else a miss. Anything else is homeless: -1, counted, no slot spent. So is an entry that must be fetched
    without a whole hot region, and one from first_new on (written in this step), which is never read from the host.

    All rows of one request are one transaction. Distinct g in order of first reference: miss i takes the i-th slot of
    the LRU order without the slots hit. New order: unused victims | slots loaded, in miss order | slots hit, in their
    old order. S >= Q * K guarantees that nothing hit or loaded here is a victim here.
    """
    one = functools.partial(_resolve_request, page_entries=page_entries, row_step=row_step, num_host_blocks=num_host_blocks)
    return jax.vmap(one)(topk, num_entries, row_valid, first_new, resident, host, hot, slot_host, lru)


def _resolve_request(
    topk, num_entries, row_valid, first_new, resident, host, hot, slot_host, lru, *, page_entries, row_step, num_host_blocks
) -> Resolution:
    num_refs, num_slots = topk.size, slot_host.size
    order = jnp.arange(num_refs, dtype=jnp.int32)

    wanted = ((topk >= 0) & (topk < num_entries[:, None]) & row_valid[:, None]).reshape(-1)
    entry = jnp.where(wanted, topk.reshape(-1), 0)
    page, place = entry // page_entries, entry % page_entries
    in_table = wanted & (page < resident.size)
    page = jnp.minimum(page, resident.size - 1)
    resident_block = jnp.where(in_table, resident[page], NULL_BLOCK)
    host_block = jnp.where(in_table, host[page], NULL_BLOCK)
    is_resident = resident_block > NULL_BLOCK
    is_new = entry >= first_new
    fetchable = (host_block > NULL_BLOCK) & (host_block < num_host_blocks) & jnp.all(hot > NULL_BLOCK)
    needs_slot = ~is_resident & fetchable & ~is_new
    host_row = jnp.where(needs_slot, host_block * page_entries + place, MISS)

    first, is_met = _first_equal(jnp.concatenate((slot_host, host_row)))
    first, was_hit = first[num_slots:], is_met[:num_slots] & (slot_host >= 0)
    is_hit = needs_slot & (first < num_slots)
    is_miss = needs_slot & (first == num_slots + order)
    num_misses = jnp.sum(is_miss, dtype=jnp.int32)
    missing_ref = _order_of(~is_miss)  # the references that miss, in order, then the others
    miss_number = _order_of(missing_ref)  # the inverse permutation

    slots = lru.astype(jnp.int32)
    _, by_use = jax.lax.sort((was_hit[slots], slots), num_keys=1, is_stable=True)  # stale slots, then slots hit; old order
    num_stale = num_slots - jnp.sum(was_hit, dtype=jnp.int32)
    rank = jnp.arange(num_slots, dtype=jnp.int32)
    new_lru = by_use[jnp.where(rank < num_stale, (rank + num_misses) % jnp.maximum(num_stale, 1), rank)]

    slot = jnp.where(is_hit, first, by_use[miss_number[jnp.clip(first - num_slots, 0, num_refs - 1)]])
    hot_row = hot[slot // page_entries] * row_step + slot % page_entries
    row = jnp.where(is_resident, resident_block * row_step + place, jnp.where(needs_slot, hot_row, MISS))

    planned = order < num_misses
    plan_host = jnp.where(planned, host_row[missing_ref], MISS)
    plan_slot = jnp.where(planned, by_use[order], MISS)
    plan_dest = jnp.where(planned, hot[plan_slot // page_entries] * row_step + plan_slot % page_entries, MISS)
    miss_of_slot = _order_of(by_use)
    new_map = jnp.where(miss_of_slot < num_misses, plan_host[jnp.minimum(miss_of_slot, num_refs - 1)], slot_host)

    valid = row >= 0
    num_newest = jnp.sum(is_resident & is_new)
    num_resident = jnp.sum(is_resident) - num_newest
    num_hits = jnp.sum(needs_slot) - num_misses
    num_invalid = jnp.sum(row_valid) * topk.shape[1] - jnp.sum(valid)
    return Resolution(
        rows=row.reshape(topk.shape),
        num_valid=jnp.sum(valid.reshape(topk.shape), axis=1, dtype=jnp.int32),
        host_rows=plan_host,
        dest_rows=plan_dest,
        slots=plan_slot,
        num_misses=num_misses,
        counts=jnp.stack((num_resident, num_newest, num_hits, num_misses, num_invalid)).astype(jnp.int32),
        num_homeless=jnp.sum(wanted & ~valid, dtype=jnp.int32),
        slot_host=new_map,
        lru=new_lru.astype(lru.dtype),
    )


def _order_of(keys: Int32[Array, " n"] | Bool[Array, " n"]) -> Int32[Array, " n"]:
    """The stable argsort; of a permutation, its inverse."""
    return jnp.argsort(keys, stable=True).astype(jnp.int32)


def _first_equal(keys: Int32[Array, " n"]) -> tuple[Int32[Array, " n"], Bool[Array, " n"]]:
    """Index of the first key equal to each key, and whether a later key equals it. O(n log n), by one stable sort."""
    place = jnp.arange(keys.size, dtype=jnp.int32)
    ordered, by_key = jax.lax.sort((keys, place), num_keys=1, is_stable=True)
    starts_run = jnp.concatenate((jnp.ones(1, bool), ordered[1:] != ordered[:-1]))
    goes_on = jnp.concatenate((~starts_run[1:], jnp.zeros(1, bool)))
    run_start = jax.lax.cummax(jnp.where(starts_run, place, 0))
    back = _order_of(by_key)
    return by_key[run_start][back], goes_on[back]


def gather_rows(
    pool: UInt8[Array, "H page_bytes"],
    dest: UInt8[Array, "N stride"],
    host_rows: Int32[Array, " M"],
    dest_rows: Int32[Array, " M"],
    *,
    value_bytes: int,
    scale_bytes: int,
    page_entries: int,
    offset: int,
    row_step: int,
) -> UInt8[Array, "N stride"]:
    """Row `host_rows[i]` of `pool` to row `dest_rows[i]` of `dest`; -1 in either: nothing. Beyond the pool: zeros."""
    wanted = (host_rows >= 0) & (dest_rows >= 0)
    dest_block = jnp.where(wanted, dest_rows // row_step, dest.shape[0])
    host_block = jnp.where(wanted, host_rows // page_entries, pool.shape[0])
    for _, base, width in row_parts(value_bytes, scale_bytes, page_entries):
        part = read_windows(pool, host_block, base + width * (host_rows % page_entries), width)
        dest = write_windows(dest, dest_block, offset + base + width * (dest_rows % row_step), part)
    return dest


def store_entry(
    pool: UInt8[Array, "H page_bytes"],
    rows: UInt8[Array, "M row_bytes"],
    host_rows: Int32[Array, " M"],
    *,
    value_bytes: int,
    scale_bytes: int,
    page_entries: int,
) -> UInt8[Array, "H page_bytes"]:
    """Packed row i to row `host_rows[i]` of `pool`; -1 and rows beyond the pool: nothing."""
    block = jnp.where(host_rows >= 0, host_rows // page_entries, pool.shape[0])
    for start, base, width in row_parts(value_bytes, scale_bytes, page_entries):
        pool = write_windows(pool, block, base + width * (host_rows % page_entries), rows[:, start : start + width])
    return pool


def copy_pages(
    pool: UInt8[Array, "H page_bytes"],
    slab: UInt8[Array, "N stride"],
    slab_blocks: Int32[Array, " M"],
    host_blocks: Int32[Array, " M"],
    *,
    offset: int,
    page_bytes: int,
) -> UInt8[Array, "H page_bytes"]:
    """The page at byte `offset` of slab block i to host block i; null or beyond its pool in either: nothing."""
    wanted = (slab_blocks > NULL_BLOCK) & (slab_blocks < slab.shape[0]) & (host_blocks > NULL_BLOCK)
    pages = read_windows(slab, slab_blocks, jnp.full_like(slab_blocks, offset), page_bytes)
    return write_windows(pool, jnp.where(wanted, host_blocks, pool.shape[0]), jnp.zeros_like(host_blocks), pages)
