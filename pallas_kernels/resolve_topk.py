"""Three-way resolve of top-k indices with LRU replacement, tables in and tables out. Reference: `ref.resolve_topk`.

One Pallas program takes a request. It compares every reference with every slot and with every reference, a tile at a time:
`R * (S + R)` comparisons, no table and no atomics. What one lane needs from another goes through scratch in global memory.
A request that wants no hot slot reads neither map nor LRU. `ffi/resolve_kernel.h` looks slots up in a table of the
references, in shared memory.
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt
from jaxtyping import Array, Bool, Int16, Int32

from pallas_kernels import cuda_kernels, ref
from pallas_kernels.choice import choose
from pallas_kernels.ref import MISS, Resolution

MAX_REFERENCES, MAX_SLOTS = 4_096, 32_768
"""Of one request: what the kernels hold on chip."""


def _kernel(
    topk_ref,
    num_entries_ref,
    row_valid_ref,
    first_new_ref,
    resident_ref,
    host_ref,
    hot_ref,
    old_map_ref,
    old_lru_ref,
    rows_ref,
    num_valid_ref,
    host_rows_ref,
    dest_rows_ref,
    slots_ref,
    num_misses_ref,
    counts_ref,
    num_homeless_ref,
    map_ref,
    lru_ref,
    needed_ref,
    number_ref,
    is_hit_ref,
    victims_ref,
    *,
    top_k: int,
    page_entries: int,
    row_step: int,
    num_host_blocks: int,
    tile: int,
    wait: Callable[[], None],
):
    request = pl.program_id(0)
    num_refs, num_slots, num_pages = topk_ref.shape[1], old_map_ref.shape[1], resident_ref.shape[1]

    def load(array, index, mask, other=0):
        return plt.load(array.at[request, jnp.where(mask, index, 0)], mask=mask, other=other)

    def store(array, index, value, mask):  # the column past the end is where nothing goes
        plt.store(array.at[request, jnp.where(mask, index, array.shape[1])], value, mask=mask)

    def total(flags):
        return jnp.sum(flags.astype(jnp.int32))

    reference = jnp.arange(pl.next_power_of_2(num_refs), dtype=jnp.int32)
    inside = reference < num_refs
    line = reference // top_k
    entry = load(topk_ref, reference, inside, MISS)
    is_valid_row = load(row_valid_ref, line, inside) != 0
    wanted = (entry >= 0) & (entry < load(num_entries_ref, line, inside)) & is_valid_row
    page, place = entry // page_entries, entry % page_entries
    known = wanted & (page < num_pages)
    resident_block, host_block = load(resident_ref, page, known), load(host_ref, page, known)
    hot_page = jnp.arange(pl.next_power_of_2(hot_ref.shape[1]), dtype=jnp.int32)
    owns_region = jnp.min(load(hot_ref, hot_page, hot_page < hot_ref.shape[1], 1)) > 0
    is_resident, is_new = resident_block > 0, entry >= first_new_ref[request]
    needs_slot = ~is_resident & (host_block > 0) & (host_block < num_host_blocks) & ~is_new & owns_region
    host_row = jnp.where(needs_slot, host_block * page_entries + place, MISS)
    num_needing = total(needs_slot)

    def tiles(size):
        return jnp.where(num_needing > 0, jnp.int32(pl.cdiv(size, tile)), jnp.int32(0))

    def find_hits(index, slot):
        column = index * tile + jnp.arange(tile, dtype=jnp.int32)
        held = load(old_map_ref, column, column < num_slots, MISS)
        equal = (host_row[:, None] == held[None, :]) & (held >= 0)[None, :]
        store(is_hit_ref, column, jnp.max(equal.astype(jnp.int32), axis=0), column < num_slots)
        return jnp.maximum(slot, jnp.max(jnp.where(equal, column[None, :], MISS), axis=1))

    slot = jax.lax.fori_loop(0, tiles(num_slots), find_hits, jnp.full_like(reference, MISS))
    store(needed_ref, reference, host_row, inside)
    wait()

    def find_first(index, first):
        column = index * tile + jnp.arange(tile, dtype=jnp.int32)
        needed = load(needed_ref, column, column < num_refs, MISS)
        equal = host_row[:, None] == needed[None, :]
        return jnp.minimum(first, jnp.min(jnp.where(equal, column[None, :], num_refs), axis=1))

    first = jax.lax.fori_loop(0, tiles(num_refs), find_first, jnp.full_like(reference, num_refs))
    missing = needs_slot & (slot < 0)
    loads = missing & (first == reference)
    number = jnp.cumsum(loads.astype(jnp.int32)) - 1
    num_misses = total(loads)
    store(number_ref, reference, number, inside)

    rank = jnp.arange(pl.next_power_of_2(num_slots), dtype=jnp.int32)
    ranked = (rank < num_slots) & (num_needing > 0)
    by_age = load(old_lru_ref, rank, ranked).astype(jnp.int32)
    stale = ranked & (load(is_hit_ref, by_age, ranked, 1) == 0)
    stale_rank = jnp.cumsum(stale.astype(jnp.int32)) - 1
    num_stale = total(stale)
    loaded = stale & (stale_rank < num_misses)
    to = jnp.where(loaded, num_stale - num_misses + stale_rank, stale_rank - num_misses)
    to = jnp.where(stale, to, num_stale + rank - stale_rank - 1)
    store(victims_ref, stale_rank, by_age, loaded)
    wait()  # the old order is read, victims and numbers are written
    store(lru_ref, to, by_age.astype(jnp.int16), ranked)

    victim = load(victims_ref, load(number_ref, first, missing), missing)
    slot = jnp.where(missing, victim, slot)
    hot_row = load(hot_ref, slot // page_entries, needs_slot) * row_step + slot % page_entries
    row = jnp.where(is_resident, resident_block * row_step + place, jnp.where(needs_slot, hot_row, MISS))
    store(rows_ref, reference, row, inside)
    store(map_ref, slot, host_row, loads)
    for array, value in ((host_rows_ref, host_row), (dest_rows_ref, hot_row), (slots_ref, slot)):
        store(array, number, value, loads)
        store(array, reference, jnp.full_like(reference, MISS), inside & (reference >= num_misses))

    valid = is_resident | needs_slot
    for q in range(num_refs // top_k):
        num_valid_ref[request, q] = total(valid & (line == q))
    num_newest = total(is_resident & is_new)
    counts_ref[request, 0] = total(is_resident) - num_newest
    counts_ref[request, 1] = num_newest
    counts_ref[request, 2] = num_needing - num_misses
    counts_ref[request, 3] = num_misses
    counts_ref[request, 4] = total(is_valid_row & inside & ~valid)
    num_misses_ref[request] = num_misses
    num_homeless_ref[request] = total(wanted & ~valid)


def result_types(topk: jax.Array, slot_host: jax.Array, lru: jax.Array) -> list[jax.ShapeDtypeStruct]:
    """Shapes of the results of a kernel, in the order of `Resolution`; `rows` as `[B, R]`."""
    batch, query_rows, top_k = topk.shape
    num_refs = query_rows * top_k
    widths = [(num_refs,), (query_rows,), (num_refs,), (num_refs,), (num_refs,), (), (5,), ()]
    tables = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (slot_host, lru)]
    return [*(jax.ShapeDtypeStruct((batch, *width), jnp.int32) for width in widths), *tables]


@functools.partial(
    jax.jit,
    static_argnames=("page_entries", "row_step", "num_host_blocks", "implementation", "tile", "num_warps", "interpret"),
)
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
    implementation: str | None = None,
    tile: int = 32,
    num_warps: int = 16,
    interpret: bool = False,
) -> ref.Resolution:
    """Rows of the selected entries, the swap-in plan, and the new map and LRU order; see `ref.resolve_topk`.

    The kernels update map and LRU in place: donate both, or XLA copies them first. They take at most `MAX_REFERENCES` per
    request and no fewer slots than references. `tile` and `num_warps` shape the Pallas program; `interpret=True` runs it on
    a CPU.
    """
    batch, query_rows, top_k = topk.shape
    num_refs, num_slots = query_rows * top_k, slot_host.shape[1]
    static = dict(page_entries=page_entries, row_step=row_step, num_host_blocks=num_host_blocks)
    operands = (topk, num_entries, row_valid, first_new, resident, host, hot, slot_host, lru)
    out_types = result_types(topk, slot_host, lru)

    def resolution(results):
        results = Resolution(*results)
        return results._replace(rows=results.rows.reshape(topk.shape))

    def check():
        if num_refs > min(num_slots, MAX_REFERENCES) or num_slots > MAX_SLOTS:
            raise ValueError(
                f"the kernels take {MAX_REFERENCES} references and {MAX_SLOTS} slots per request, and no fewer slots than "
                f"references; {num_refs=}, {num_slots=}: use fewer query rows, or implementation='xla'."
            )

    def xla(*operands):
        return ref.resolve_topk(*operands, **static)

    def pallas(*operands):
        check()
        topk, num_entries, row_valid, *others = operands
        wait = (lambda: None) if interpret else plt.debug_barrier  # interpreted, a program has one thread
        scratch = [jax.ShapeDtypeStruct((batch, n), jnp.int32) for n in (num_refs, num_refs, num_slots, num_refs)]
        results = pl.pallas_call(
            functools.partial(_kernel, top_k=top_k, tile=tile, wait=wait, **static),
            out_shape=[*out_types, *scratch],
            grid=(batch,),
            input_output_aliases={7: 8, 8: 9},
            compiler_params=None if interpret else plt.CompilerParams(num_warps=num_warps),
            interpret=interpret,
            name="resolve_topk",
        )(topk.reshape(batch, num_refs), num_entries, row_valid.astype(jnp.int32), *others)
        return resolution(results[: len(out_types)])

    def cuda(*operands):
        check()
        call = jax.ffi.ffi_call(cuda_kernels.require("resolve_topk"), out_types, input_output_aliases={7: 8, 8: 9})
        return resolution(call(*operands, **{name: np.int64(size) for name, size in static.items()}))

    if num_refs > min(num_slots, MAX_REFERENCES) and implementation is None:
        implementation = "xla"
    return choose("resolve_topk", implementation, dict(xla=xla, pallas=pallas, cuda=cuda), *operands)
