"""Rows of host pages to rows of the slab or of a staging buffer. Reference: `ref.gather_rows`.

One program of one warpgroup copies one row in two windows, values and scales, and ends at once where there is none:
`row_bytes` each way per row. Places are (block, byte) pairs; the kernel's addresses are 64-bit.
"""

import functools

import jax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Int32, UInt8

from pallas_kernels import ref
from pallas_kernels.host_pool import by_platform, on_device_view
from pallas_kernels.windows import clear_window, copy_window, row_parts


def _kernel(pool, host_rows, dest_rows, dest, *, parts, page_entries: int, offset: int, row_step: int):
    index = jax.lax.axis_index("row")
    host_row, dest_row = host_rows[index], dest_rows[index]

    known = host_row < pool.shape[0] * page_entries
    wanted = (host_row >= 0) & (dest_row >= 0) & (dest_row < dest.shape[0] * row_step)
    dest_block = dest_row // row_step

    @pl.when(wanted & known)
    def _():
        for _, base, width in parts:
            source, target = base + width * (host_row % page_entries), offset + base + width * (dest_row % row_step)
            copy_window(pool, host_row // page_entries, source, dest, dest_block, target, width)

    @pl.when(wanted & ~known)
    def _():
        for _, base, width in parts:
            clear_window(dest, dest_block, offset + base + width * (dest_row % row_step), width)


@functools.partial(
    jax.jit,
    static_argnames=("value_bytes", "scale_bytes", "page_entries", "offset", "row_step", "implementation", "interpret"),
)
def gather_rows(
    pool: UInt8[Array, "H page_bytes"],
    dest: UInt8[Array, "N stride"],
    host_rows: Int32[Array, " M"],
    dest_rows: Int32[Array, " M"],
    *,
    value_bytes: int,
    scale_bytes: int,
    page_entries: int,
    offset: int,
    row_step: int,
    implementation: str | None = None,
    interpret: bool = False,
) -> UInt8[Array, "N stride"]:
    """Copies row `host_rows[i]` of `pool` to row `dest_rows[i]` of `dest`, which the result aliases.

    Host row g: block `g // page_entries`, slot `g % page_entries`. Row r of `dest`: block `r // row_step`, slot
    `r % row_step` of the page that starts at byte `offset` of the block (a compact staging buffer: offset 0, row_step
    page_entries). Slot s of a page: values at `value_bytes * s`, scales at `value_bytes * page_entries + scale_bytes * s`.
    -1 in either list: nothing. A host row beyond the pool fills its destination with zeros; a row beyond `dest` is dropped.
    Rows of `dest_rows` must be distinct. `interpret=True` runs the kernel on a CPU, with the pool in device space.
    """
    static = dict(page_entries=page_entries, offset=offset, row_step=row_step)
    if not host_rows.size:
        return dest

    def xla(pool, dest, host_rows, dest_rows):
        return ref.gather_rows(
            on_device_view(pool), dest, host_rows, dest_rows, value_bytes=value_bytes, scale_bytes=scale_bytes, **static
        )

    def pallas(pool, dest, host_rows, dest_rows):
        result = jax.new_ref(dest)
        plgpu.kernel(
            functools.partial(_kernel, parts=row_parts(value_bytes, scale_bytes, page_entries), **static),
            out_type=(),
            grid=host_rows.shape,
            grid_names=("row",),
            interpret=plgpu.InterpretGPUParams() if interpret else None,
        )(pool, host_rows, dest_rows, result)
        return jax.freeze(result)

    return by_platform(implementation, xla, pallas, pool, dest, host_rows, dest_rows)
