"""Row formats: how one entry stands in bytes, and how rows stand in a page.

A packed row is `row_bytes` bytes: its values, then its scales. A page holds the values of all its rows first, then all
their scales, then padding to a multiple of 576 bytes (fp8 and fp4 only):

    row i of a page of n rows: values at value_bytes * i, scales at value_bytes * n + scale_bytes * i

The same bytes stand on the slab, on the host and in a hot slot. fp8 entry pages are those of FlashMLA's V4 cache, fp8
and fp4 index pages those of DeepGEMM's. Everything here is plain `jnp`, elementwise over the leading axes, so a row's
bytes do not depend on what is packed beside it. XLA's CPU backend takes subnormal numbers for zero, which shows only in
fp4 tiles below 6 * 2^-126.

Source: DeepSeek-V4 inference code (quantisation), FlashMLA and vLLM 0.33 (bytes).
"""

import abc
import dataclasses
import math
from typing import override

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, BFloat16, Float, Float32, Int32, UInt8

from hisparse_jax.config import ConfigError, ModelConfig

PAGE_ALIGN = 576
"""fp8 and fp4 pages are padded to a multiple of this many bytes."""

E4M3_MAX, E4M3_FLOOR = 448.0, 1e-4
"""Largest e4m3 value, and the smallest largest-magnitude an fp8 tile is scaled for."""

E2M1_MAX, E2M1_FLOOR = 6.0, 6.0 * 2.0**-126
"""The same for e2m1."""

ENTRY_DIM, ENTRY_ROPE, ENTRY_TILE = 512, 64, 64
"""Channels, rotary channels (last, kept in bf16) and channels of one scale of an fp8 entry row."""

FP4_TILE = 32


@dataclasses.dataclass(frozen=True)
class RowFormat(abc.ABC):
    """One row format: `channels` numbers to `row_bytes` bytes and back. Static and hashable."""

    name: str
    """f32, bf16, fp8 or fp4."""
    channels: int
    value_bytes: int
    scale_bytes: int
    """Bytes of the scales of one row; 0 for plain rows."""
    compute_dtype: str
    """What `unpack` returns: float32 or bfloat16."""
    page_align: int = 1

    @property
    def row_bytes(self) -> int:
        return self.value_bytes + self.scale_bytes

    def page_bytes(self, entries: int) -> int:
        """Bytes of a page of `entries` rows, padding included."""
        return -(-entries * self.row_bytes // self.page_align) * self.page_align

    def value_offset(self, row: int) -> int:
        """Byte of a page where the values of `row` start."""
        return self.value_bytes * row

    def scale_offset(self, row: int, entries: int) -> int:
        """Byte of a page of `entries` rows where the scales of `row` start."""
        return self.value_bytes * entries + self.scale_bytes * row

    @abc.abstractmethod
    def pack(self, x: Float[Array, "*batch channels"]) -> UInt8[Array, "*batch row_bytes"]:
        """Quantises and lays out rows. `x` is f32 or bf16; quantised formats round it to bf16 first."""

    def fields(self, rows: UInt8[Array, "*batch row_bytes"]) -> tuple[UInt8[Array, "*batch _"], ...]:
        """The bytes of packed rows by what they hold, as `numbers` takes them: values and scales. Padding is left out."""
        return self._split(rows)

    @abc.abstractmethod
    def numbers(self, *fields: UInt8[Array, "*batch _"]) -> tuple[Float[Array, "*batch channels"], Float32[Array, "*batch"]]:
        """Rows as `(values, scale)` with `values * scale` the exact stored numbers.

        `values` are in `compute_dtype`. `scale` differs from 1 for fp8 index rows only, whose one power-of-two scale
        belongs behind the dot product. Zero bytes give zeros.
        """

    def unpack_scaled(
        self, rows: UInt8[Array, "*batch row_bytes"]
    ) -> tuple[Float[Array, "*batch channels"], Float32[Array, "*batch"]]:
        """Packed rows as `(values, scale)`: see `numbers`."""
        return self.numbers(*self.fields(rows))

    def unpack(self, rows: UInt8[Array, "*batch row_bytes"]) -> Float[Array, "*batch channels"]:
        """Rows as numbers in `compute_dtype`, exact unless a product leaves bf16's range. Zero bytes give zeros."""
        return self.unpack_scaled(rows)[0]

    def join_page(self, rows: UInt8[Array, "*batch entries row_bytes"]) -> UInt8[Array, "*batch page_bytes"]:
        """Packed rows to whole pages: all values, all scales, zeros as padding."""
        *batch, entries, _ = rows.shape
        values, scales = self._split(rows)
        padding = self.page_bytes(entries) - entries * self.row_bytes
        parts = (values.reshape(*batch, -1), scales.reshape(*batch, -1), jnp.zeros((*batch, padding), jnp.uint8))
        return jnp.concatenate(parts, axis=-1)

    def split_page(self, pages: UInt8[Array, "*batch page_bytes"], entries: int) -> UInt8[Array, "*batch entries row_bytes"]:
        """Whole pages to packed rows; the inverse of `join_page`."""
        batch = pages.shape[:-1]
        middle, end = self.scale_offset(0, entries), self.scale_offset(entries, entries)
        values = pages[..., :middle].reshape(*batch, entries, self.value_bytes)
        scales = pages[..., middle:end].reshape(*batch, entries, self.scale_bytes)
        return jnp.concatenate((values, scales), axis=-1)

    def _split(self, rows: jax.Array) -> tuple[jax.Array, jax.Array]:
        return rows[..., : self.value_bytes], rows[..., self.value_bytes :]

    def _check(self, x: jax.Array) -> None:
        if x.shape[-1] != self.channels:
            raise ValueError(f"a {self.name} row has {self.channels} channels, x has {x.shape[-1]}.")


@dataclasses.dataclass(frozen=True)
class PlainRows(RowFormat):
    """f32 or bf16 numbers, little endian, nothing else."""

    @override
    def pack(self, x):
        self._check(x)
        return _to_bytes(x.astype(self.compute_dtype))

    @override
    def fields(self, rows):
        return (rows,)

    @override
    def numbers(self, *fields):
        values = _from_bytes(fields[0], self.compute_dtype)
        return values, jnp.ones(values.shape[:-1], jnp.float32)


@dataclasses.dataclass(frozen=True)
class Fp8EntryRows(RowFormat):
    """448 e4m3 values, 64 bf16 rotary values, 7 ue8m0 scales (one per 64 values), a zero byte: 584 bytes."""

    @override
    def pack(self, x):
        self._check(x)
        x = _round_to_bf16(x)
        tiles = x[..., :-ENTRY_ROPE].reshape(*x.shape[:-1], -1, ENTRY_TILE)
        byte = _scale_byte(tiles, E4M3_MAX, E4M3_FLOOR)
        values = _to_e4m3(tiles, byte).reshape(*x.shape[:-1], -1)
        rope = _to_bytes(x[..., -ENTRY_ROPE:].astype(jnp.bfloat16))
        pad = jnp.zeros((*x.shape[:-1], 1), jnp.uint8)
        return jnp.concatenate((values, rope, byte.astype(jnp.uint8), pad), axis=-1)

    @override
    def fields(self, rows):
        values, scales = self._split(rows)
        nope = ENTRY_DIM - ENTRY_ROPE
        return values[..., :nope], values[..., nope:], scales[..., :-1]

    @override
    def numbers(self, *fields):
        values, rope, scales = fields
        batch = values.shape[:-1]
        tiles = _from_e4m3(values).reshape(*batch, -1, ENTRY_TILE) * _e8m0_to_bf16(scales)[..., None]
        out = jnp.concatenate((tiles.reshape(*batch, -1), _from_bytes(rope, jnp.bfloat16)), axis=-1)
        return out, jnp.ones(batch, jnp.float32)


@dataclasses.dataclass(frozen=True)
class Fp8IndexRows(RowFormat):
    """`channels` e4m3 values and one power-of-two float32 scale over all of them."""

    @override
    def pack(self, x):
        self._check(x)
        x = _round_to_bf16(x)
        byte = _scale_byte(x, E4M3_MAX, E4M3_FLOOR)
        scale = lax.bitcast_convert_type(byte << 23, jnp.float32)
        return jnp.concatenate((_to_e4m3(x, byte), _to_bytes(scale[..., None])), axis=-1)

    @override
    def numbers(self, *fields):
        values, scales = fields
        return _from_e4m3(values), _from_bytes(scales, jnp.float32)[..., 0]

    @override
    def unpack(self, rows):
        values, scale = self.unpack_scaled(rows)
        return values * scale.astype(jnp.bfloat16)[..., None]


@dataclasses.dataclass(frozen=True)
class Fp4IndexRows(RowFormat):
    """Two e2m1 values a byte, the even channel in the low nibble, and one ue8m0 scale per 32 channels."""

    @override
    def pack(self, x):
        self._check(x)
        x = _round_to_bf16(x)
        tiles = x.reshape(*x.shape[:-1], -1, FP4_TILE)
        byte = _scale_byte(tiles, E2M1_MAX, E2M1_FLOOR)
        codes = _to_e2m1(tiles, byte).reshape(*x.shape[:-1], -1, 2)
        values = codes[..., 0] | (codes[..., 1] << 4)
        return jnp.concatenate((values, byte), axis=-1).astype(jnp.uint8)

    @override
    def numbers(self, *fields):
        values, scales = fields
        batch = values.shape[:-1]
        codes = jnp.stack((values & 15, values >> 4), axis=-1)
        tiles = _from_e2m1(codes).reshape(*batch, -1, FP4_TILE)
        out = (tiles * _e8m0_to_bf16(scales)[..., None]).reshape(*batch, self.channels)
        return out, jnp.ones(batch, jnp.float32)


def entry_format(model: ModelConfig, rows: str) -> RowFormat:
    """Format of window, C4 and C128 entries: `rows` is f32, bf16 or fp8. fp8 has one geometry only, 512 = 448 + 64."""
    if rows == "fp8":
        if (model.head_dim, model.qk_rope_head_dim) != (ENTRY_DIM, ENTRY_ROPE):
            raise ConfigError(
                f"rows=fp8 packs head_dim={ENTRY_DIM} with qk_rope_head_dim={ENTRY_ROPE}; the model has head_dim="
                f"{model.head_dim}, qk_rope_head_dim={model.qk_rope_head_dim}. Choose rows=bf16 or rows=f32."
            )
        nope = ENTRY_DIM - ENTRY_ROPE
        return Fp8EntryRows("fp8", ENTRY_DIM, nope + 2 * ENTRY_ROPE, nope // ENTRY_TILE + 1, "bfloat16", PAGE_ALIGN)
    return _plain("rows", rows, model.head_dim, "f32, bf16, fp8")


def index_format(model: ModelConfig, index_keys: str) -> RowFormat:
    """Format of index keys and index queries: `index_keys` is f32, bf16, fp8 or fp4."""
    dim = model.index_head_dim
    if index_keys == "fp8":
        return Fp8IndexRows("fp8", dim, dim, 4, "bfloat16", PAGE_ALIGN)
    if index_keys == "fp4":
        if dim % FP4_TILE:
            raise ConfigError(
                f"index_keys=fp4 scales {FP4_TILE} channels at a time; index_head_dim={dim} is no multiple. "
                "Choose index_keys=fp8."
            )
        return Fp4IndexRows("fp4", dim, dim // 2, dim // FP4_TILE, "bfloat16", PAGE_ALIGN)
    return _plain("index_keys", index_keys, dim, "f32, bf16, fp8, fp4")


def _plain(option: str, name: str, channels: int, choices: str) -> RowFormat:
    dtypes = {"f32": "float32", "bf16": "bfloat16"}
    if name not in dtypes:
        raise ConfigError(f"{option}={name!r} is unknown; choose from {choices}.")
    return PlainRows(name, channels, channels * jnp.dtype(dtypes[name]).itemsize, 0, dtypes[name])


def hadamard(x: Float[Array, "*batch channels"]) -> Float[Array, "*batch channels"]:
    """`x H / sqrt(channels)` with H in Sylvester's order, in float32, returned in `x`'s dtype. Its own inverse.

    `channels` is a power of two. Rotate index queries and keys, or neither. Source: DeepSeek-V4 inference code.
    """
    dim = x.shape[-1]
    if dim & (dim - 1):
        raise ConfigError(f"hadamard needs a power of two, index_head_dim={dim}; set hadamard=False.")
    y, half = x.astype(jnp.float32), 1
    while half < dim:
        pairs = y.reshape(*x.shape[:-1], dim // (2 * half), 2, half)
        low, high = pairs[..., 0, :], pairs[..., 1, :]
        y = jnp.stack((low + high, low - high), axis=-2).reshape(x.shape)
        half *= 2
    return (y * jnp.float32(1.0 / math.sqrt(dim))).astype(x.dtype)


def _round_to_bf16(x: jax.Array) -> Float32[Array, "..."]:
    """bf16-rounded numbers in float32. A pair of casts may be dropped by XLA (excess precision); this may not."""
    return lax.reduce_precision(x.astype(jnp.float32), exponent_bits=8, mantissa_bits=7)


def _scale_byte(tiles: Float32[Array, "*batch tile"], largest: float, floor: float) -> Int32[Array, "*batch"]:
    """ue8m0 byte of the least power of two that is at least `max|x| * (1 / largest)`: ceil(log2) on the bits.

    Inf and NaN give 254, whose inverse is 0: such a tile holds NaN (fp8) rather than a plausible number.
    """
    amax = jnp.maximum(jnp.max(jnp.abs(tiles), axis=-1), jnp.float32(floor))
    bits = lax.bitcast_convert_type(amax * jnp.float32(1.0 / largest), jnp.int32)
    return jnp.minimum((bits >> 23) + ((bits & 0x7FFFFF) != 0), 254)


def _divide(tiles: Float32[Array, "*batch tile"], byte: Int32[Array, "*batch"]) -> Float32[Array, "*batch tile"]:
    """`tiles / scale` as an exact product: the inverse of a stored scale is a normal power of two."""
    return tiles * lax.bitcast_convert_type((254 - byte) << 23, jnp.float32)[..., None]


def _to_e4m3(tiles: jax.Array, byte: jax.Array) -> UInt8[Array, "..."]:
    """Bytes of `tiles / scale`, to nearest even. No double rounding on the way: 8 significant bits fit float16."""
    q = jnp.clip(_divide(tiles, byte), -E4M3_MAX, E4M3_MAX)
    return lax.bitcast_convert_type(q.astype(jnp.float8_e4m3fn), jnp.uint8)


def _from_e4m3(values: UInt8[Array, "..."]) -> BFloat16[Array, "..."]:
    return lax.bitcast_convert_type(values, jnp.float8_e4m3fn).astype(jnp.bfloat16)


def _to_e2m1(tiles: jax.Array, byte: jax.Array) -> Int32[Array, "..."]:
    """e2m1 codes 0..15 of `tiles / scale`: nearest of 0, .5, 1, 1.5, 2, 3, 4, 6, ties to the even code, sign in bit 3."""
    size = jnp.abs(_divide(tiles, byte))
    code = jnp.zeros(size.shape, jnp.int32)
    for middle, tie_goes_up in ((0.25, 0), (0.75, 1), (1.25, 0), (1.75, 1), (2.5, 0), (3.5, 1), (5.0, 0)):
        code += ((size >= middle) if tie_goes_up else (size > middle)).astype(jnp.int32)
    return code | (lax.shift_right_logical(lax.bitcast_convert_type(tiles, jnp.int32), 31) << 3)


def _from_e2m1(codes: UInt8[Array, "..."]) -> BFloat16[Array, "..."]:
    """bf16 numbers of e2m1 codes, put together from their bits."""
    code = codes.astype(jnp.uint16)
    size = code & 7
    bits = jnp.where(size > 1, ((126 + (size >> 1)) << 7) | ((size & 1) << 6), size * (126 << 7))
    return lax.bitcast_convert_type((bits | ((code & 8) << 12)).astype(jnp.uint16), jnp.bfloat16)


def _e8m0_to_bf16(byte: UInt8[Array, "..."]) -> BFloat16[Array, "..."]:
    """2^(byte - 127). Byte 0, which `pack` never stores and masked rows hold, gives 0."""
    return lax.bitcast_convert_type(byte.astype(jnp.uint16) << 7, jnp.bfloat16)


def _to_bytes(x: jax.Array) -> UInt8[Array, "..."]:
    return lax.bitcast_convert_type(x, jnp.uint8).reshape(*x.shape[:-1], -1)


def _from_bytes(values: UInt8[Array, "..."], dtype) -> jax.Array:
    size = jnp.dtype(dtype).itemsize
    return lax.bitcast_convert_type(values.reshape(*values.shape[:-1], -1, size), dtype)
