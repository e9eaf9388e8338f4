"""Scores of a paged cache's entries against index queries, for fp8 index rows. Reference: `ref.index_scores`.

`ffi/index_scores.cu` reads each key once, where it stands: no array over heads x entries exists, nor a copy of the keys. There is
no Pallas kernel: the Triton lowering of JAX 0.11 keeps byte offsets of an array of 2 to 4 GiB in 32 signed bits.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Float32, Int32, UInt8

from pallas_kernels import cuda_kernels, ref
from pallas_kernels.choice import choose

IMPLEMENTATIONS = ("xla", "cuda")
"""What `implementation` names; None is the platform's default."""

HEADS = {128: (8, 16, 32, 64), 256: (8, 16, 32)}
"""Of the CUDA kernel, by channels: the heads of a query that a warp's registers hold."""

ALIGN = 16
"""Bytes of its loads, and entries that it scores at a time."""

MAX_ROWS = 65_535
"""Query rows of one call, all requests together."""


def fits(num_rows: int, heads: int, channels: int, *, stride: int, page_entries: int, offset: int) -> bool:
    """Whether the CUDA kernel takes these shapes: `num_rows` query rows, all requests together."""
    aligned = not any(n % ALIGN for n in (stride, page_entries, offset))
    return aligned and heads in HEADS.get(channels, ()) and num_rows <= MAX_ROWS


@functools.partial(jax.jit, static_argnames=("page_entries", "offset", "implementation"))
def index_scores(
    slab: UInt8[Array, "N stride"],
    blocks: Int32[Array, "R P"],
    queries: Float[Array, "R T H d"],
    weights: Float32[Array, "R T H"],
    lengths: Int32[Array, " R"],
    *,
    page_entries: int,
    offset: int,
    implementation: str | None = None,
) -> Float32[Array, "R T columns"]:
    """`sum_h weights[h] * relu(queries[h] . key) * scale` of every entry of `P` pages: columns = P * page_entries.

    Entry e of request r stands in page `blocks[r, e // page_entries]`, whose first byte is `offset` of that block of the slab:
    the e4m3 values of all its rows, then a float32 scale each. `queries` are e4m3 numbers in any dtype that holds them.
    Columns from `lengths` on hold anything; so entries of a page that is null or beyond the slab, which score 0, need no mask.
    Source: DeepSeek V4's published inference code; pages as DeepGEMM has them.
    """

    def xla(slab, blocks, queries, weights, lengths):
        return ref.index_scores(slab, blocks, queries, weights, page_entries=page_entries, offset=offset)

    def cuda(slab, blocks, queries, weights, lengths):
        requests, rows, heads, channels = queries.shape
        if not fits(requests * rows, heads, channels, stride=slab.shape[1], page_entries=page_entries, offset=offset):
            raise ValueError(
                f"implementation='cuda' takes {HEADS} heads by channels and multiples of {ALIGN}; here are {heads} heads of "
                f"{channels}, {page_entries=}, {offset=}, stride {slab.shape[1]}, {requests * rows} query rows. Choose 'xla'."
            )
        scores = jax.ShapeDtypeStruct((requests, rows, blocks.shape[1] * page_entries), jnp.float32)
        call = jax.ffi.ffi_call(cuda_kernels.require("index_scores"), scores)
        packed = jax.lax.bitcast_convert_type(queries.astype(jnp.float8_e4m3fn), jnp.uint8)
        return call(slab, blocks, packed, weights, lengths, page_entries=np.int64(page_entries), offset=np.int64(offset))

    return choose("index_scores", implementation, dict(xla=xla, cuda=cuda), slab, blocks, queries, weights, lengths)
