"""Resolve, and the copy of what it misses, as one op: `resolve_topk`, then `gather_rows` by its plan.

By CUDA one kernel does both (`ffi/resolve_and_gather.cu`): a block resolves its request and has the missing rows cross the link
while it writes the results. Rows it cannot take (not in words of 16 bytes, or longer than 1,024), and every other implementation,
run the two ops. The results are the same bytes either way.
"""

import functools

import jax
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Int16, Int32, UInt8

from pallas_kernels import cuda_kernels, host_pool
from pallas_kernels.gather_rows import gather_rows
from pallas_kernels.ref import Resolution
from pallas_kernels.resolve_topk import MAX_REFERENCES, MAX_SLOTS, resolve_topk, result_types
from pallas_kernels.windows import check_page

MAX_VALUE_BYTES, WORD_BYTES = 1_024, 16
"""Of the CUDA kernel: the longest row it copies, and in words of what size."""


def fits(pool, slab, num_refs: int, num_slots: int, *, value_bytes: int, scale_bytes: int, offset: int) -> bool:
    """Whether the CUDA kernel takes these shapes."""
    aligned = not any(n % WORD_BYTES for n in (pool.shape[1], slab.shape[1], value_bytes, offset))
    return (
        aligned
        and value_bytes <= MAX_VALUE_BYTES
        and scale_bytes in (0, 8)
        and num_refs <= min(num_slots, MAX_REFERENCES)
        and num_slots <= MAX_SLOTS
    )


@functools.partial(
    jax.jit,
    static_argnames=(
        "value_bytes",
        "scale_bytes",
        "page_entries",
        "offset",
        "row_step",
        "num_host_blocks",
        "implementation",
    ),
)
def resolve_and_gather(
    pool: UInt8[Array, "H page_bytes"],
    slab: UInt8[Array, "N stride"],
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
    value_bytes: int,
    scale_bytes: int,
    page_entries: int,
    offset: int,
    row_step: int,
    num_host_blocks: int,
    implementation: str | None = None,
) -> tuple[UInt8[Array, "N stride"], Resolution]:
    """The slab with the plan carried out at byte `offset` of its blocks, and what `resolve_topk` gives.

    Slab, map and LRU order are updated in place: donate them. `pool` is only read and has at least `num_host_blocks` blocks.
    Operands and rows are those of `resolve_topk` and `gather_rows`. `implementation`: None takes the one kernel on CUDA where
    it is built and the shapes fit it; "cuda" demands it; "xla" and "pallas" run the two ops that way.
    """
    static = dict(page_entries=page_entries, row_step=row_step)
    row = dict(value_bytes=value_bytes, scale_bytes=scale_bytes, offset=offset)
    operands = (pool, slab, topk, num_entries, row_valid, first_new, resident, host, hot, slot_host, lru)
    check_page("the pool", pool.shape[1], value_bytes, scale_bytes, page_entries)
    check_page("the slab", slab.shape[1], value_bytes, scale_bytes, page_entries, offset)
    if num_host_blocks > pool.shape[0]:
        raise ValueError(f"{num_host_blocks=} exceeds the {pool.shape[0]} blocks of the pool.")

    def apart(how, pool, slab, *tables):
        plan = resolve_topk(*tables, num_host_blocks=num_host_blocks, implementation=how, **static)
        rows = plan.host_rows.reshape(-1), plan.dest_rows.reshape(-1)
        return gather_rows(pool, slab, *rows, plan.num_misses, implementation=how, **row, **static), plan

    def fused(*operands):
        call = jax.ffi.ffi_call(
            cuda_kernels.require("resolve_and_gather"),
            [jax.typeof(slab), *result_types(topk, slot_host, lru)],
            input_output_aliases={1: 0, 9: 9, 10: 10},
        )
        sizes = static | row | dict(num_host_blocks=num_host_blocks)
        new_slab, *results = call(*operands, **{name: np.int64(size) for name, size in sizes.items()})
        results = Resolution(*results)
        return new_slab, results._replace(rows=results.rows.reshape(topk.shape))

    can_fuse = fits(pool, slab, topk.shape[1] * topk.shape[2], slot_host.shape[1], **row)
    if implementation == "cuda":
        if not can_fuse:
            raise ValueError(
                f"the kernel takes rows of at most {MAX_VALUE_BYTES} bytes in words of {WORD_BYTES}, with 8 bytes of scales or "
                f"none; {value_bytes=}, {scale_bytes=}, {offset=}, page {pool.shape[1]}, block {slab.shape[1]}: choose another "
                "implementation, or None."
            )
        return fused(*operands)
    is_there = host_pool.CUDA_PREFERENCE[0] == "cuda" and "resolve_and_gather" in cuda_kernels.registered()
    if implementation is None and can_fuse and is_there:
        return lax.platform_dependent(*operands, cpu=functools.partial(apart, "xla"), cuda=fused)
    return apart(implementation, *operands)
