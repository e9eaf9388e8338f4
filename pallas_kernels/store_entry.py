"""Packed rows to host pages, the write-through of one layer. Reference: `ref.store_entry`.

One program of one warpgroup (by CUDA: one warp) stores one row in two windows. The pool is the only result: a call that
also returned the slab does not compile. `row_bytes` each way per row; addresses are 64-bit.
"""

import functools

import jax
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Int32, UInt8

from pallas_kernels import cuda_kernels, ref
from pallas_kernels.host_pool import by_platform, like, on_device_view
from pallas_kernels.windows import check_page, common_alignment, copy_window, row_parts


def _kernel(rows, host_rows, pool, *, parts, page_entries: int, align: int):
    index = jax.lax.axis_index("row")
    host_row = host_rows[index]

    @pl.when((host_row >= 0) & (host_row < pool.shape[0] * page_entries))
    def _():
        for start, base, width in parts:
            target = base + width * (host_row % page_entries)
            copy_window(rows, index, start, pool, host_row // page_entries, target, width, align=align)


@functools.partial(jax.jit, static_argnames=("value_bytes", "scale_bytes", "page_entries", "implementation", "interpret"))
def store_entry(
    pool: UInt8[Array, "H page_bytes"],
    rows: UInt8[Array, "M row_bytes"],
    host_rows: Int32[Array, " M"],
    *,
    value_bytes: int,
    scale_bytes: int,
    page_entries: int,
    implementation: str | None = None,
    interpret: bool = False,
) -> UInt8[Array, "H page_bytes"]:
    """Writes packed row i to row `host_rows[i]` of `pool` and returns the pool alone, which aliases the operand.

    Host row g: block `g // page_entries`, slot `g % page_entries`, values and scales as `gather_rows` finds them. -1 and
    rows beyond the pool are skipped; the others must be distinct. A later read must depend on the result.
    Raises `ValueError` where a page leaves its block.
    """
    static = dict(page_entries=page_entries)
    if not host_rows.size:
        return pool
    check_page("the pool", pool.shape[1], value_bytes, scale_bytes, page_entries)

    def xla(pool, rows, host_rows):
        stored = ref.store_entry(
            on_device_view(pool), rows, host_rows, value_bytes=value_bytes, scale_bytes=scale_bytes, **static
        )
        return like(pool, stored)

    def pallas(pool, rows, host_rows):
        result, parts = jax.new_ref(pool), row_parts(value_bytes, scale_bytes, page_entries)
        align = common_alignment(pool.shape[1], rows.shape[1], *(n for part in parts for n in part))
        plgpu.kernel(
            functools.partial(_kernel, parts=parts, align=align, **static),
            out_type=(),
            grid=host_rows.shape,
            grid_names=("row",),
            interpret=plgpu.InterpretGPUParams() if interpret else None,
        )(rows, host_rows, result)
        return like(pool, jax.freeze(result))

    def cuda(pool, rows, host_rows):
        call = jax.ffi.ffi_call(cuda_kernels.require("store_entry"), jax.typeof(pool), input_output_aliases={0: 0})
        sizes = dict(value_bytes=value_bytes, scale_bytes=scale_bytes, page_entries=page_entries)
        return call(pool, rows, host_rows, **{name: np.int64(size) for name, size in sizes.items()})

    return by_platform("store_entry", implementation, xla, pallas, cuda, pool, rows, host_rows)
