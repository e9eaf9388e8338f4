"""Byte windows: runs of bytes at (block, byte) of a `u8[N, stride]` array, by XLA and inside a kernel.

Slabs and host pools pass 2^31 bytes, so a place is always a pair of i32 numbers and never one flat number. A row is
two windows: a page holds the values of all its rows first, then all their scales.
"""

import math

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array, Int32, UInt8

LANES = 128
"""Threads of one warpgroup: what one load or store of a kernel moves, in bytes or wider words."""

MAX_LANE_BYTES = 8
"""Widest load or store of one thread. Source: Mosaic GPU's strided layout."""


def row_parts(value_bytes: int, scale_bytes: int, page_entries: int) -> tuple[tuple[int, int, int], ...]:
    """The windows of one row as `(start, base, width)`: bytes `start ...` of the packed row stand `base + width * slot`
    into its page. Formats without scales have one."""
    parts = (0, 0, value_bytes), (value_bytes, value_bytes * page_entries, scale_bytes)
    return tuple(part for part in parts if part[2])


def check_page(what: str, block_bytes: int, value_bytes: int, scale_bytes: int, page_entries: int, offset: int = 0) -> None:
    """Raises `ValueError` unless a page of `page_entries` rows at byte `offset` stays in its block."""
    end = offset + page_entries * (value_bytes + scale_bytes)
    if page_entries < 1 or offset < 0 or end > block_bytes:
        raise ValueError(
            f"a page of {page_entries=} rows of {value_bytes} + {scale_bytes} bytes at byte {offset} does not stand in a block "
            f"of {what}, which has {block_bytes} bytes; give the place that the layout has."
        )


def read_windows(
    array: UInt8[Array, "N stride"], blocks: Int32[Array, "*places"], starts: Int32[Array, "*places"], width: int
) -> UInt8[Array, "*places {width}"]:
    """`array[block, start : start + width]` for every place. A window that leaves the array reads as zeros."""
    last = blocks.ndim
    dims = lax.GatherDimensionNumbers(offset_dims=(last,), collapsed_slice_dims=(0,), start_index_map=(0, 1))
    places = jnp.stack((blocks, starts), axis=-1)
    mode = lax.GatherScatterMode.FILL_OR_DROP
    return lax.gather(array, places, dims, slice_sizes=(1, width), mode=mode, fill_value=0)


def write_windows(
    array: UInt8[Array, "N stride"],
    blocks: Int32[Array, "*places"],
    starts: Int32[Array, "*places"],
    data: UInt8[Array, "*places width"],
) -> UInt8[Array, "N stride"]:
    """`array[block, start : start + width] = data` for every place, in place when `array` is donated.

    A window that leaves the array is not written. Windows that are written must not overlap.
    """
    last = blocks.ndim
    dims = lax.ScatterDimensionNumbers(update_window_dims=(last,), inserted_window_dims=(0,), scatter_dims_to_operand_dims=(0, 1))
    places = jnp.stack((blocks, starts), axis=-1)
    mode = lax.GatherScatterMode.FILL_OR_DROP
    return lax.scatter(array, places, data, dims, mode=mode, unique_indices=True)


def copy_window(source, source_block, source_start, target, target_block, target_start, width: int, *, align: int = 1) -> None:
    """Inside a Mosaic GPU kernel: copies `width` bytes from ref to ref. All loads stand before all stores.

    `align` divides every address of both windows: a warpgroup then moves up to 128 * 8 bytes at a time, else 128. The last
    piece overlaps the one before it, so any width from 128 is covered. Narrower windows go byte by byte.
    """
    loaded = [source[source_block, piece] for piece in _pieces(source_start, width, align)]
    for piece, data in zip(_pieces(target_start, width, align), loaded):
        target[target_block, piece] = data


def clear_window(target, target_block, target_start, width: int) -> None:
    """Inside a Mosaic GPU kernel: zeros in `width` bytes of a ref."""
    shape = (LANES,) if width >= LANES else ()
    for piece in _pieces(target_start, width):
        target[target_block, piece] = jnp.zeros(shape, jnp.uint8)


def common_alignment(*numbers: int) -> int:
    """The largest power of two, at most `MAX_LANE_BYTES`, that divides all of `numbers`."""
    return math.gcd(MAX_LANE_BYTES, *numbers)


def _pieces(start, width: int, align: int = 1) -> list:
    if width < LANES:
        return [start + byte for byte in range(width)]
    pieces, done = [], 0
    while width - done >= LANES:
        size = next(LANES * lane for lane in (8, 4, 2, 1) if align % lane == 0 and LANES * lane <= width - done)
        pieces.append(pl.ds(start + done, size))
        done += size
    return [*pieces, *([pl.ds(start + width - LANES, LANES)] if done < width else [])]
