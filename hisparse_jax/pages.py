"""Rows and pages of the slab, by block and slot: the device-side access that both twins share.

A block is one row of `slab[N, stride]`; a layer's page starts `offset` bytes into it. Row `slot` of a page of `n` rows has its
values at `value_bytes * slot` and its scales at `value_bytes * n + scale_bytes * slot`. Every access is a window `(block,
byte)`, so no index passes int32 however large the slab is.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int32, UInt8

from hisparse_jax.rows import RowFormat
from hisparse_jax.status import NULL_BLOCK

_GATHER = jax.lax.GatherDimensionNumbers(offset_dims=(1,), collapsed_slice_dims=(0,), start_index_map=(0, 1))
_SCATTER = jax.lax.ScatterDimensionNumbers(
    update_window_dims=(1,), inserted_window_dims=(0,), scatter_dims_to_operand_dims=(0, 1)
)


def _read_windows(slab: UInt8[Array, "N stride"], block: Int32[Array, "..."], byte: Int32[Array, "..."], size: int):
    index = jnp.stack([block.reshape(-1), byte.reshape(-1)], axis=-1)
    out = jax.lax.gather(slab, index, _GATHER, (1, size), mode=jax.lax.GatherScatterMode.CLIP)
    return out.reshape(*block.shape, size)


def _write_windows(slab: UInt8[Array, "N stride"], block: Int32[Array, " M"], byte: Int32[Array, " M"], data: Array):
    block = jnp.where(block < 0, slab.shape[0], block)  # out of bounds: dropped
    index = jnp.stack([block, byte], axis=-1)
    return jax.lax.scatter(
        slab, index, data, _SCATTER, mode=jax.lax.GatherScatterMode.FILL_OR_DROP, unique_indices=True
    )


def read_rows(
    slab: UInt8[Array, "N stride"],
    block: Int32[Array, "..."],
    slot: Int32[Array, "..."],
    fmt: RowFormat,
    *,
    page_entries: int,
    offset: int,
) -> UInt8[Array, "... row_bytes"]:
    """Packed rows; zero bytes where `block` is negative, whatever stands in memory."""
    safe = jnp.maximum(block, 0)
    parts = [_read_windows(slab, safe, offset + fmt.value_bytes * slot, fmt.value_bytes)]
    if fmt.scale_bytes:
        start = offset + fmt.value_bytes * page_entries
        parts.append(_read_windows(slab, safe, start + fmt.scale_bytes * slot, fmt.scale_bytes))
    return jnp.where((block >= 0)[..., None], jnp.concatenate(parts, axis=-1), 0)


def write_rows(
    slab: UInt8[Array, "N stride"],
    block: Int32[Array, " M"],
    slot: Int32[Array, " M"],
    rows: UInt8[Array, "M row_bytes"],
    fmt: RowFormat,
    *,
    page_entries: int,
    offset: int,
) -> UInt8[Array, "N stride"]:
    """Stores packed rows at distinct places; nothing where `block` is negative. In place when donated."""
    slab = _write_windows(slab, block, offset + fmt.value_bytes * slot, rows[:, : fmt.value_bytes])
    if not fmt.scale_bytes:
        return slab
    start = offset + fmt.value_bytes * page_entries
    return _write_windows(slab, block, start + fmt.scale_bytes * slot, rows[:, fmt.value_bytes :])


def read_pages(
    slab: UInt8[Array, "N stride"],
    blocks: Int32[Array, "R P"],
    fmt: RowFormat,
    *,
    page_entries: int,
    offset: int,
) -> UInt8[Array, "R PE row_bytes"]:
    """All rows of whole pages, page after page; zero bytes where a block is null."""
    page = _read_windows(slab, blocks, jnp.full_like(blocks, offset), fmt.row_bytes * page_entries)
    page = jnp.where((blocks != NULL_BLOCK)[..., None], page, 0)
    middle = fmt.value_bytes * page_entries
    values = page[..., :middle].reshape(*blocks.shape, page_entries, fmt.value_bytes)
    scales = page[..., middle:].reshape(*blocks.shape, page_entries, fmt.scale_bytes)
    rows = jnp.concatenate([values, scales], axis=-1)
    return rows.reshape(blocks.shape[0], -1, fmt.row_bytes)
