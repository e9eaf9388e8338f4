"""Attention of decode steps over fp8 entry rows, read where they stand: a sliding window, selected rows of a paged cache, a sink.

`ffi/sparse_attention.cu` reads each row once and keeps neither scores nor keys in memory. There is no Pallas kernel: the Triton
lowering of JAX 0.11 keeps byte offsets of an array of 2 to 4 GiB in 32 signed bits.
"""

import functools

import jax
import numpy as np
from jaxtyping import Array, BFloat16, Float32, Int32, UInt8

from pallas_kernels import cuda_kernels, ref
from pallas_kernels.choice import choose

IMPLEMENTATIONS = ("xla", "cuda")
"""What `implementation` names; None is the platform's default."""

CHANNELS, ROW_BYTES = 512, 584
"""Of the fp8 entry row: 448 e4m3 values, 64 bf16 values; then 7 ue8m0 scales of 64 values each, and a zero byte."""

ALIGN = 16
"""Bytes that strides and offsets are multiples of: those of the CUDA kernel's loads."""

MAX_ROWS = 65_535
"""Query rows of one call, all requests together."""


def fits(num_rows: int, channels: int, row_bytes: int, *, stride: int, offset: int) -> bool:
    """Whether the CUDA kernel takes these shapes: `num_rows` query rows, all requests together."""
    return (channels, row_bytes) == (CHANNELS, ROW_BYTES) and not (stride % ALIGN or offset % ALIGN) and num_rows <= MAX_ROWS


@functools.partial(jax.jit, static_argnames=("window_width", "page_entries", "offset", "row_step", "implementation"))
def sparse_attention(
    q: BFloat16[Array, "R T H c"],
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
    implementation: str | None = None,
) -> BFloat16[Array, "R T H c"]:
    """One softmax over window, selected rows and sink; keys are values, scores are scaled by `c ** -0.5`.

    q          queries, rotated.
    window     packed rows of the last positions; position p stands at `p mod W`, those of this step among them.
    positions  of each query: it sees `window_width <= W` positions up to its own, from 0 on. Below 0: padding, which gives zeros.
    rows       of the slab, `block * row_step + slot`: row `slot` of the page at byte `offset` of `block`. -1, the null block and
               what lies beyond the slab or the page are no keys.
    lengths    columns of `rows` from there on are no keys, whatever they hold.
    sink       one more score of each head, of no value: a query without any key gives zeros (NaN where the sink is -inf).

    Sums are float32. Probabilities are rounded to bf16 before the value product, by CUDA relative to a score so far that stands
    at most 8 / log2(e) below the largest, so that values past 1e33, which no cache holds, overflow there before they are divided.
    Raises `ValueError` where rows are none of fp8, the window is wider than its ring, or a page leaves its block.
    Source: DeepSeek V4's published inference code; rows and pages as FlashMLA has them.
    """
    ring, row_bytes, channels, stride = *window.shape[1:], q.shape[3], slab.shape[1]
    if (channels, row_bytes) != (CHANNELS, ROW_BYTES):
        raise ValueError(f"rows are {CHANNELS} channels in {ROW_BYTES} bytes; here are {channels} channels, {row_bytes} bytes.")
    if not 0 <= window_width <= ring:
        raise ValueError(f"{window_width=} positions do not stand in a ring of {ring}; make the ring as wide.")
    if not 0 < page_entries <= row_step or (rows.shape[2] and not 0 <= offset <= stride - page_entries * ROW_BYTES):
        raise ValueError(
            f"a page of {page_entries=} rows of {ROW_BYTES} bytes at byte {offset} leaves its block of {stride} bytes, or its "
            f"rows share numbers: {row_step=}. Give the place that the layout has."
        )
    place = dict(window_width=window_width, page_entries=page_entries, offset=offset, row_step=row_step)

    def xla(*operands):
        return ref.sparse_attention(*operands, **place)

    def cuda(q, window, positions, slab, rows, lengths, sink):
        num_rows = q.shape[0] * q.shape[1]
        if not fits(num_rows, channels, row_bytes, stride=stride, offset=offset):
            raise ValueError(
                f"implementation='cuda' takes strides and offsets that are multiples of {ALIGN}, and {MAX_ROWS} query rows; here "
                f"are {stride=}, {offset=}, {num_rows} query rows. Choose 'xla'."
            )
        call = jax.ffi.ffi_call(cuda_kernels.require("sparse_attention"), jax.ShapeDtypeStruct(q.shape, q.dtype))
        numbers = {name: np.int64(number) for name, number in place.items()}
        return call(q, window, positions, slab, rows, lengths, sink, **numbers)

    offered = dict(xla=xla, cuda=cuda)
    return choose("sparse_attention", implementation, offered, q, window, positions, slab, rows, lengths, sink)
