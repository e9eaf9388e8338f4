"""Whole pages from the slab to the host pool, planned inside a loop (lazy spill). Reference: `ref.copy_pages`.

One program of one warpgroup copies a piece of 4,096 bytes of one page; the last piece overlaps the one before it. By CUDA
(`ffi/copy_pages.cu`) a warp copies 2,048 bytes, and null pairs cost no program.
`page_bytes` each way per page; addresses are 64-bit. The pool is the only result.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Int32, UInt8

from pallas_kernels import cuda_kernels, ref
from pallas_kernels.host_pool import by_platform, like, on_device_view
from pallas_kernels.windows import common_alignment, copy_window

PIECE_BYTES = 4_096
NUM_PROGRAMS = 264
"""By CUDA: blocks of eight warps that share the pieces of all pages."""


def _kernel(slab, slab_blocks, host_blocks, pool, *, offset: int, page_bytes: int, piece_bytes: int, align: int):
    page, piece = jax.lax.axis_index("page"), jax.lax.axis_index("piece")
    slab_block, host_block = slab_blocks[page], host_blocks[page]
    in_slab = (slab_block > 0) & (slab_block < slab.shape[0])

    @pl.when(in_slab & (host_block > 0) & (host_block < pool.shape[0]))
    def _():
        start = jnp.minimum(piece * piece_bytes, page_bytes - piece_bytes)
        copy_window(slab, slab_block, offset + start, pool, host_block, start, piece_bytes, align=align)


@functools.partial(jax.jit, static_argnames=("offset", "page_bytes", "implementation", "interpret"))
def copy_pages(
    pool: UInt8[Array, "H page_bytes"],
    slab: UInt8[Array, "N stride"],
    slab_blocks: Int32[Array, " M"],
    host_blocks: Int32[Array, " M"],
    *,
    offset: int,
    page_bytes: int,
    implementation: str | None = None,
    interpret: bool = False,
) -> UInt8[Array, "H page_bytes"]:
    """Copies the page at byte `offset` of slab block `slab_blocks[i]` to host block `host_blocks[i]`.

    Returns the pool alone, which aliases the operand. The null block (0) or a block beyond its pool in either list:
    nothing. Host blocks must be distinct. The next write to a copied slab block must depend on the result.
    """
    static = dict(offset=offset, page_bytes=page_bytes)
    if not host_blocks.size:
        return pool

    def xla(pool, slab, slab_blocks, host_blocks):
        return like(pool, ref.copy_pages(on_device_view(pool), slab, slab_blocks, host_blocks, **static))

    def pallas(pool, slab, slab_blocks, host_blocks):
        result = jax.new_ref(pool)
        piece_bytes = min(page_bytes, PIECE_BYTES)
        align = common_alignment(page_bytes, piece_bytes, slab.shape[1], offset)
        plgpu.kernel(
            functools.partial(_kernel, **static, piece_bytes=piece_bytes, align=align),
            out_type=(),
            grid=(*host_blocks.shape, pl.cdiv(page_bytes, piece_bytes)),
            grid_names=("page", "piece"),
            interpret=plgpu.InterpretGPUParams() if interpret else None,
        )(slab, slab_blocks, host_blocks, result)
        return like(pool, jax.freeze(result))

    def cuda(pool, slab, slab_blocks, host_blocks):
        call = jax.ffi.ffi_call(cuda_kernels.require("copy_pages"), jax.typeof(pool), input_output_aliases={0: 0})
        return call(pool, slab, slab_blocks, host_blocks, offset=np.int64(offset), num_blocks=np.int64(NUM_PROGRAMS))

    return by_platform("copy_pages", implementation, xla, pallas, cuda, pool, slab, slab_blocks, host_blocks)
