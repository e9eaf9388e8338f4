"""The k best entries of each row of index scores, as a set. Reference: `ref.topk_select`.

One Pallas program takes a row: the k-th largest score by bisection over its bits, at most 32 counts of the row, then each
selected entry to its place by a prefix sum. A row of one tile is read once and kept; a longer one is read in every pass.
`ffi/topk_select.cu` reads a row once, `4 * N` bytes, twice beyond 32,768 scores a block; one block takes a row, or some share it.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt
from jaxtyping import Array, Float, Int32

from pallas_kernels import cuda_kernels, ref
from pallas_kernels.choice import choose

MAX_TILE = 32_768
"""Scores that a Pallas program keeps in registers."""

CTA_CANDIDATES, MAX_CTAS, CTAS = 65_536, 4, 132
"""Of the CUDA kernel: a row that one block takes by itself, blocks that share a longer one at most, and how many fill a GPU.
More blocks a row were slower on an H200 (docs/measurements.md): they meet at a barrier that costs a microsecond."""

_NO_CANDIDATE = np.iinfo(np.int32).min
_WORST = 0x807FFFFF - 2**32  # the key of -inf


def _keys(scores) -> jax.Array:
    """int32 in the order of the scores; NaN is -inf, -0.0 is 0.0."""
    scores = scores.astype(jnp.float32)
    scores = jnp.where(scores == 0, 0.0, jnp.where(scores != scores, -jnp.inf, scores))
    bits = jax.lax.bitcast_convert_type(scores, jnp.int32)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


def _kernel(scores_ref, lengths_ref, selected_ref, *, size: int, k: int, tile: int):
    row, num_tiles = pl.program_id(0), pl.cdiv(size, tile)
    length = jnp.clip(lengths_ref[row], 0, size)
    lane = jnp.arange(tile, dtype=jnp.int32)

    def read(index):
        column = index * tile + lane
        scores = plt.load(scores_ref.at[row, pl.ds(index * tile, tile)], mask=column < length, other=0.0)
        return jnp.where(column < length, _keys(scores), _NO_CANDIDATE)

    kept = read(0) if num_tiles == 1 else None

    def over_tiles(step, start):
        if kept is not None:
            return step(0, kept, start)
        return jax.lax.fori_loop(0, num_tiles, lambda index, carry: step(index, read(index), carry), start)

    def count(is_counted):
        return over_tiles(lambda _, keys, total: total + jnp.sum(is_counted(keys).astype(jnp.int32)), jnp.int32(0))

    best = over_tiles(lambda _, keys, best: jnp.maximum(best, jnp.max(keys)), jnp.int32(_WORST))

    def halve(bounds):  # at least k keys reach `low`; fewer than k exceed `high`
        low, high = bounds
        middle = (low | high) - ((low ^ high) >> 1)
        reached = count(lambda keys: keys >= middle)
        return jnp.where(reached >= k, middle, low), jnp.where(reached > k, high, jnp.where(reached == k, middle, middle - 1))

    low = jnp.int32(_WORST)  # what a row with at most k candidates keeps, and so all of them
    kth, _ = jax.lax.while_loop(lambda bounds: bounds[0] < bounds[1], halve, (low, jnp.where(length > k, best, low)))
    num_ties = k - count(lambda keys: keys > kth)

    def emit(index, keys, carry):
        placed, tied = carry
        is_tie = keys == kth
        tie_number = tied + jnp.cumsum(is_tie.astype(jnp.int32))
        chosen = (keys > kth) | (is_tie & (tie_number <= num_ties))
        place = placed + jnp.cumsum(chosen.astype(jnp.int32))
        plt.store(selected_ref.at[row, jnp.where(chosen, place - 1, k)], index * tile + lane, mask=chosen)
        return placed + jnp.sum(chosen.astype(jnp.int32)), tied + jnp.sum(is_tie.astype(jnp.int32))

    over_tiles(emit, (jnp.int32(0), jnp.int32(0)))
    column = jnp.arange(pl.next_power_of_2(k), dtype=jnp.int32)
    unused = (column >= length) & (column < k)
    plt.store(selected_ref.at[row, jnp.where(unused, column, k)], jnp.full_like(column, ref.MISS), mask=unused)


def _ctas_per_row(num_rows: int, size: int) -> int:
    """One block a row, several for long rows while they leave no block waiting."""
    ctas = 1
    while ctas < MAX_CTAS and size > CTA_CANDIDATES and 2 * ctas * num_rows <= CTAS:
        ctas *= 2
    return ctas


@functools.partial(jax.jit, static_argnames=("k", "implementation", "tile", "num_warps", "ctas_per_row", "interpret"))
def topk_select(
    scores: Float[Array, "*rows N"],
    lengths: Int32[Array, "*rows"],
    k: int,
    *,
    implementation: str | None = None,
    tile: int | None = None,
    num_warps: int | None = None,
    ctas_per_row: int | None = None,
    interpret: bool = False,
) -> Int32[Array, "*rows {k}"]:
    """Entry numbers of the `k` largest scores among the first `lengths` of each row: ascending, then -1.

    Exact. Ties go to the lower entry number; -0.0 equals 0.0; NaN ranks with -inf. A row with fewer than `k` candidates
    selects all of them. Columns from `lengths` on may hold anything. A length outside 0..N counts as the nearest bound.

    Raises `ValueError` where `k` is negative or `lengths` are not one a row.
    `tile` (a power of two) and `num_warps` shape the Pallas program, `ctas_per_row` (1 to 8) the CUDA one; `interpret=True`
    runs the Pallas program on a CPU.
    """
    *rows, size = scores.shape
    if k < 0 or lengths.shape != tuple(rows):
        raise ValueError(f"{k=} must not be negative, and lengths have a number for each of {rows} rows, not {lengths.shape}.")
    num_rows = int(np.prod(rows))
    if not (num_rows and size and k):
        return jnp.full((*rows, k), ref.MISS, jnp.int32)

    def xla(scores, lengths):
        return ref.topk_select(scores, lengths, k)

    def pallas(scores, lengths):
        width = tile or min(pl.next_power_of_2(size), MAX_TILE)
        return pl.pallas_call(
            functools.partial(_kernel, size=size, k=k, tile=width),
            out_shape=jax.ShapeDtypeStruct((num_rows, k), jnp.int32),
            grid=(num_rows,),
            compiler_params=None if interpret else plt.CompilerParams(num_warps=num_warps or min(32, max(4, width // 1_024))),
            interpret=interpret,
            name="topk_select",
        )(scores.reshape(num_rows, size), lengths.reshape(num_rows)).reshape(*rows, k)

    def cuda(scores, lengths):
        call = jax.ffi.ffi_call(cuda_kernels.require("topk_select"), jax.ShapeDtypeStruct((num_rows, k), jnp.int32))
        ctas = np.int64(ctas_per_row or _ctas_per_row(num_rows, size))
        return call(scores.reshape(num_rows, size), lengths.reshape(num_rows), ctas_per_row=ctas).reshape(*rows, k)

    return choose("topk_select", implementation, dict(xla=xla, pallas=pallas, cuda=cuda), scores, lengths)
