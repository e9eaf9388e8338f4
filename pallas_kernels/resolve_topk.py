"""Three-way resolve of top-k indices with LRU replacement, tables in and tables out. Reference: `ref.resolve_topk`."""

import functools

import jax
from jaxtyping import Array, Bool, Int16, Int32

from pallas_kernels import ref


@functools.partial(jax.jit, static_argnames=("page_entries", "row_step", "num_host_blocks", "implementation"))
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
    implementation: str = "xla",
) -> ref.Resolution:
    """Rows of the selected entries, the swap-in plan, and the new map and LRU order; see `ref.resolve_topk`."""
    if implementation != "xla":
        raise ValueError(f"{implementation=} is unknown; choose 'xla'.")
    return ref.resolve_topk(
        topk,
        num_entries,
        row_valid,
        first_new,
        resident,
        host,
        hot,
        slot_host,
        lru,
        page_entries=page_entries,
        row_step=row_step,
        num_host_blocks=num_host_blocks,
    )
