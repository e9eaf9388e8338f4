"""The k best entries of each row of index scores, as a set. Reference: `ref.topk_select`."""

import functools

import jax
from jaxtyping import Array, Float, Int32

from pallas_kernels import ref


@functools.partial(jax.jit, static_argnames=("k", "implementation"))
def topk_select(
    scores: Float[Array, "*rows N"], lengths: Int32[Array, "*rows"], k: int, *, implementation: str = "xla"
) -> Int32[Array, "*rows {k}"]:
    """Entry numbers of the `k` largest scores among the first `lengths` of each row: ascending, then -1.

    Exact. Ties go to the lower entry number; -0.0 equals 0.0; NaN ranks with -inf. A row with fewer than `k` candidates
    selects all of them. Columns from `lengths` on may hold anything. A length outside 0..N counts as the nearest bound.
    """
    if implementation != "xla":
        raise ValueError(f"{implementation=} is unknown; choose 'xla'.")
    return ref.topk_select(scores, lengths, k)
