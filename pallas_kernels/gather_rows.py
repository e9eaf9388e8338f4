"""Rows of host pages to rows of the slab or of a staging buffer. Reference: `ref.gather_rows`.

A plan is mostly -1, and the misses of one request stand side by side: a fixed number of programs share it, so no request is
served by one program. A row is two windows, values and scales: `row_bytes` each way per row, and `8 * M` bytes of ids. Places
are (block, byte) pairs; addresses are 64-bit. By Pallas a program of one warpgroup copies a row at a time, item i by program
`i % num_programs`; by CUDA (`ffi/gather_rows.cu`) a warp copies several, in words of 16 bytes, and where the wanted items are
counted, blocks share those alone.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Int32, UInt8

from pallas_kernels import cuda_kernels, ref
from pallas_kernels.host_pool import by_platform, on_device_view
from pallas_kernels.windows import check_page, clear_window, common_alignment, copy_window, row_parts

PROGRAMS = {"pallas": 1_056, "cuda": 66}
"""Programs that share a plan, Pallas of one warpgroup, CUDA of eight warps. By CUDA 66 saturate an H200's link: 16 to 264 of any
shape took the same time (docs/measurements.md), and the fewest leave most room beside them."""

MAX_LISTS = 1_024
"""Lists whose lengths a CUDA block holds; more are not counted."""


def _kernel(pool, host_rows, dest_rows, dest, *, parts, page_entries: int, offset: int, row_step: int, align: int):
    program = jax.lax.axis_index("program")

    def copy_row(i, _):
        host_row, dest_row = host_rows[program, i], dest_rows[program, i]
        known = host_row < pool.shape[0] * page_entries
        wanted = (host_row >= 0) & (dest_row >= 0) & (dest_row < dest.shape[0] * row_step)
        dest_block = dest_row // row_step

        @pl.when(wanted & known)
        def _():
            for _, base, width in parts:
                source, target = base + width * (host_row % page_entries), offset + base + width * (dest_row % row_step)
                copy_window(pool, host_row // page_entries, source, dest, dest_block, target, width, align=align)

        @pl.when(wanted & ~known)
        def _():
            for _, base, width in parts:
                clear_window(dest, dest_block, offset + base + width * (dest_row % row_step), width)

    jax.lax.fori_loop(0, host_rows.shape[1], copy_row, None)


def _deal(rows: Int32[Array, " M"], num_programs: int) -> Int32[Array, "{num_programs} n"]:
    """Item i goes to program `i % num_programs`: what stands side by side is copied side by side."""
    padded = jnp.pad(rows, (0, -rows.size % num_programs), constant_values=ref.MISS)
    return padded.reshape(-1, num_programs).T


@functools.partial(
    jax.jit,
    static_argnames=(
        "value_bytes",
        "scale_bytes",
        "page_entries",
        "offset",
        "row_step",
        "implementation",
        "num_programs",
        "warps",
        "rows_in_flight",
        "interpret",
    ),
)
def gather_rows(
    pool: UInt8[Array, "H page_bytes"],
    dest: UInt8[Array, "N stride"],
    host_rows: Int32[Array, " M"],
    dest_rows: Int32[Array, " M"],
    lengths: Int32[Array, " L"] | None = None,
    *,
    value_bytes: int,
    scale_bytes: int,
    page_entries: int,
    offset: int,
    row_step: int,
    implementation: str | None = None,
    num_programs: int | None = None,
    warps: int = 8,
    rows_in_flight: int = 2,
    interpret: bool = False,
) -> UInt8[Array, "N stride"]:
    """Copies row `host_rows[i]` of `pool` to row `dest_rows[i]` of `dest`, which the result aliases.

    Host row g: block `g // page_entries`, slot `g % page_entries`. Row r of `dest`: block `r // row_step`, slot
    `r % row_step` of the page that starts at byte `offset` of the block (a compact staging buffer: offset 0, row_step
    page_entries). Slot s of a page: values at `value_bytes * s`, scales at `value_bytes * page_entries + scale_bytes * s`.
    -1 in either list: nothing. A host row beyond the pool fills its destination with zeros; a row beyond `dest` is dropped.
    Rows of `dest_rows` must be distinct. Raises `ValueError` where a page leaves its block.

    `lengths` helps to share the work: the items are L lists of `M / L`, and list l wants its first `lengths[l]` at most; the rest
    must be -1. `num_programs` defaults to `PROGRAMS` of the implementation; `warps` (1 to 32, 8 with 4 rows) and
    `rows_in_flight` (1, 2 or 4 a warp) shape the CUDA kernel.
    `interpret=True` runs the kernel on a CPU, with the pool in device space.
    """
    static = dict(page_entries=page_entries, offset=offset, row_step=row_step)
    if not host_rows.size:
        return dest
    check_page("the pool", pool.shape[1], value_bytes, scale_bytes, page_entries)
    check_page("the destination", dest.shape[1], value_bytes, scale_bytes, page_entries, offset)
    if lengths is not None and (lengths.size == 0 or host_rows.size % lengths.size):
        raise ValueError(f"{host_rows.size} items cannot be {lengths.size} lists of one length.")

    wanted = jnp.zeros(0, jnp.int32) if lengths is None or lengths.size > MAX_LISTS else lengths

    def xla(pool, dest, host_rows, dest_rows, _):
        return ref.gather_rows(
            on_device_view(pool), dest, host_rows, dest_rows, value_bytes=value_bytes, scale_bytes=scale_bytes, **static
        )

    def pallas(pool, dest, host_rows, dest_rows, _):
        result, programs = jax.new_ref(dest), min(num_programs or PROGRAMS["pallas"], host_rows.size)
        parts = row_parts(value_bytes, scale_bytes, page_entries)
        align = common_alignment(pool.shape[1], dest.shape[1], offset, *(n for _, base, width in parts for n in (base, width)))
        plgpu.kernel(
            functools.partial(_kernel, parts=parts, align=align, **static),
            out_type=(),
            grid=(programs,),
            grid_names=("program",),
            interpret=plgpu.InterpretGPUParams() if interpret else None,
        )(pool, _deal(host_rows, programs), _deal(dest_rows, programs), result)
        return jax.freeze(result)

    def cuda(pool, dest, host_rows, dest_rows, wanted):
        call = jax.ffi.ffi_call(cuda_kernels.require("gather_rows"), jax.typeof(dest), input_output_aliases={1: 0})
        sizes = dict(value_bytes=value_bytes, scale_bytes=scale_bytes, num_blocks=num_programs or PROGRAMS["cuda"], **static)
        sizes |= dict(warps=warps, rows_in_flight=rows_in_flight)
        return call(pool, dest, host_rows, dest_rows, wanted, **{name: np.int64(size) for name, size in sizes.items()})

    return by_platform("gather_rows", implementation, xla, pallas, cuda, pool, dest, host_rows, dest_rows, wanted)
