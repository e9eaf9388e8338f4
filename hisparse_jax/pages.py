"""Rows and pages on the slab, read and written with plain XLA ops: what both twins use.

A **row number** names a (block, slot) pair: `row = block * row_step + slot`, with slots `0 ... page_entries - 1`. Which
page of the block is meant is said apart, by `offset`, its first byte. `row_step` is only how pairs are numbered, any
number from `page_entries` on: `CacheLayout.row_step` for C4 entries, where resident and hot rows then are FlashMLA's row
numbers relative to the layer, and `page_entries` of the page itself for index keys and C128 entries, whose pages do not
tile the stride. -1 is no row. Bytes that no row names are never returned: such rows are zeros.
"""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Int32, UInt8

from hisparse_jax.rows import RowFormat
from hisparse_jax.status import MISS, NULL_BLOCK
from pallas_kernels.windows import read_windows, row_parts, write_windows


def entry_rows(
    entries: Int32[Array, "B *any"], tables: Int32[Array, "B P"], *, page_entries: int, row_step: int
) -> Int32[Array, "B *any"]:
    """Row of each entry of request b by its block table; -1 for entries below 0, beyond the table or on a null page.

    With a host table and `row_step = page_entries` these are host rows. No bound on the request's length is applied.
    """
    flat = entries.reshape(entries.shape[0], -1)
    page, slot = lax.div(flat, page_entries), lax.rem(flat, page_entries)  # entries below 0 are masked
    known = (flat >= 0) & (page < tables.shape[1])
    block = jnp.take_along_axis(tables, jnp.where(known, page, 0), axis=1)
    rows = jnp.where(known & (block > NULL_BLOCK), block * row_step + slot, MISS)
    return rows.reshape(entries.shape)


def read_rows(
    slab: UInt8[Array, "N stride"],
    rows: Int32[Array, "*rows"],
    fmt: RowFormat,
    *,
    page_entries: int,
    offset: int,
    row_step: int,
) -> UInt8[Array, "*rows row_bytes"]:
    """Packed rows: values, then scales. Zeros where a row is -1 or beyond the slab."""
    block = jnp.where(rows >= 0, lax.div(rows, row_step), slab.shape[0])
    slot = lax.rem(rows, row_step)
    parts = row_parts(fmt.value_bytes, fmt.scale_bytes, page_entries)
    return jnp.concatenate([read_windows(slab, block, offset + base + width * slot, width) for _, base, width in parts], axis=-1)


def write_rows(
    slab: UInt8[Array, "N stride"],
    rows: Int32[Array, " M"],
    data: UInt8[Array, "M row_bytes"],
    fmt: RowFormat,
    *,
    page_entries: int,
    offset: int,
    row_step: int,
) -> UInt8[Array, "N stride"]:
    """Writes packed rows, in place when the slab is donated. Skips rows of -1 or beyond the slab; the others are distinct."""
    block = jnp.where(rows >= 0, lax.div(rows, row_step), slab.shape[0])
    slot = lax.rem(rows, row_step)
    for start, base, width in row_parts(fmt.value_bytes, fmt.scale_bytes, page_entries):
        slab = write_windows(slab, block, offset + base + width * slot, data[:, start : start + width])
    return slab


def read_page_rows(
    slab: UInt8[Array, "N stride"], blocks: Int32[Array, "*batch P"], fmt: RowFormat, *, page_entries: int, offset: int
) -> UInt8[Array, "*batch rows row_bytes"]:
    """All packed rows of whole pages, page after page: `rows = P * page_entries`. Null or unknown blocks give zeros."""
    block = jnp.where(blocks > NULL_BLOCK, blocks, slab.shape[0])
    pages = read_windows(slab, block, jnp.full_like(block, offset), fmt.page_bytes(page_entries))
    rows = fmt.split_page(pages, page_entries)
    return rows.reshape(*blocks.shape[:-1], -1, fmt.row_bytes)
