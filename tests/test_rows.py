"""Row formats against an oracle in plain numpy, written from the byte layouts and quantisation recipes alone."""

import dataclasses
import math

import chex
import hypothesis.extra.numpy as hnp
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hisparse_jax.config import ConfigError, preset
from hisparse_jax.rows import PAGE_ALIGN, RowFormat, entry_format, hadamard, index_format

DEMO, FLASH, TINY = preset("demo"), preset("v4-flash"), preset("tiny")
FORMATS = {
    "entry f32": entry_format(TINY, "f32"),
    "entry bf16": entry_format(TINY, "bf16"),
    "entry fp8": entry_format(DEMO, "fp8"),
    "index f32": index_format(TINY, "f32"),
    "index bf16": index_format(TINY, "bf16"),
    "index fp8 of 128": index_format(FLASH, "fp8"),
    "index fp8 of 256": index_format(DEMO, "fp8"),
    "index fp4 of 128": index_format(FLASH, "fp4"),
    "index fp4 of 256": index_format(DEMO, "fp4"),
}
QUANTISED = [name for name in FORMATS if "fp" in name]
every_format = pytest.mark.parametrize("fmt", FORMATS.values(), ids=FORMATS)
every_quantised = pytest.mark.parametrize("name", QUANTISED)


# The oracle. Values are float64, one at a time where a choice is made.


def oracle_bf16(x: np.ndarray) -> np.ndarray:
    """Bits of the nearest bf16, ties to even; finite input."""
    bits = np.asarray(x, np.float32).view(np.uint32).astype(np.uint64)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def bf16_value(bits: np.ndarray) -> np.ndarray:
    return (bits.astype(np.uint32) << 16).view(np.float32)


def e4m3_value(code: int) -> float:
    sign, exponent, mantissa = -1.0 if code & 0x80 else 1.0, (code >> 3) & 15, code & 7
    return sign * (mantissa * 2.0**-9 if exponent == 0 else (1 + mantissa / 8) * 2.0 ** (exponent - 7))


E4M3 = np.array([e4m3_value(code) for code in range(127)])  # ascending; code 127 is NaN
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])


def nearest_even(values: np.ndarray, table: np.ndarray) -> np.ndarray:
    """Codes of the nearest numbers of an ascending `table`, the even code where two are as near."""
    size = np.minimum(np.abs(values), table[-1])
    above = np.clip(np.searchsorted(table, size), 1, len(table) - 1)
    low, high = size - table[above - 1], table[above] - size
    return np.where((high < low) | ((high == low) & (above % 2 == 0)), above, above - 1)


def oracle_scale_exponent(tile: np.ndarray, largest: float, floor: float) -> int:
    amax = max(np.abs(tile.astype(np.float32)).max(), np.float32(floor))
    mantissa, exponent = math.frexp(np.float32(amax) * np.float32(1 / largest))
    return exponent - 1 if mantissa == 0.5 else exponent


def oracle_tile(tile: np.ndarray, table: np.ndarray, floor: float) -> tuple[np.ndarray, int]:
    """Codes with the sign above the table's bits, and the scale's exponent."""
    exponent = oracle_scale_exponent(tile, table[-1], floor)
    codes = nearest_even(tile.astype(np.float64) * 2.0**-exponent, table)
    return codes + (8 if table is E2M1 else 128) * np.signbit(tile), exponent


def oracle_pack(name: str, x: np.ndarray) -> np.ndarray:
    """One row's bytes."""
    if "f32" in name:
        return x.astype(np.float32).view(np.uint8)
    if "bf16" in name:
        return oracle_bf16(x).view(np.uint8)
    x, rope = bf16_value(oracle_bf16(x)), oracle_bf16(x[-64:]).view(np.uint8)
    if "fp4" in name:
        tiles = [oracle_tile(tile, E2M1, 6 * 2.0**-126) for tile in x.reshape(-1, 32)]
        codes = np.concatenate([codes for codes, _ in tiles])
        return np.array([*(codes[::2] + 16 * codes[1::2]), *(e + 127 for _, e in tiles)], np.uint8)
    if "index" in name:
        codes, exponent = oracle_tile(x, E4M3, 1e-4)
        return np.concatenate([codes.astype(np.uint8), np.array([2.0**exponent], "<f4").view(np.uint8)])
    tiles = [oracle_tile(tile, E4M3, 1e-4) for tile in x[:448].reshape(7, 64)]
    scales = np.array([*(e + 127 for _, e in tiles), 0], np.uint8)
    return np.concatenate([np.concatenate([codes for codes, _ in tiles]).astype(np.uint8), rope, scales])


def oracle_unpack(name: str, row: np.ndarray) -> np.ndarray:
    """One row's numbers in float64."""
    if "f32" in name:
        return row.view(np.float32).astype(np.float64)
    if "bf16" in name:
        return bf16_value(row.view(np.uint16)).astype(np.float64)
    if "fp4" in name:
        values, scales = np.split(row, [len(row) * 16 // 17])
        codes = np.stack([values & 15, values >> 4], 1).reshape(-1)
        return np.repeat(2.0 ** (scales.astype(int) - 127), 32) * E2M1[codes & 7] * np.where(codes & 8, -1, 1)
    if "index" in name:
        return np.array([e4m3_value(int(code)) for code in row[:-4]]) * row[-4:].view("<f4").astype(np.float64)
    values = np.array([e4m3_value(int(code)) for code in row[:448]]) * np.repeat(2.0 ** (row[576:583].astype(int) - 127), 64)
    return np.concatenate([values, bf16_value(row[448:576].copy().view(np.uint16))])


def check(name: str, x: np.ndarray) -> None:
    """Bytes and numbers of rows `x` equal the oracle's, compiled."""
    fmt = FORMATS[name]
    rows = jitted_pack(fmt, x)
    np.testing.assert_array_equal(rows, np.stack([oracle_pack(name, row) for row in x]))
    expected = np.stack([oracle_unpack(name, row) for row in rows])
    np.testing.assert_array_equal(np.asarray(jitted_unpack(fmt, rows), np.float64), expected)
    values, scale = jitted_unpack_scaled(fmt, rows)
    np.testing.assert_array_equal(np.asarray(values, np.float64) * np.asarray(scale, np.float64)[:, None], expected)


def compiled(method: str):
    """A method of `RowFormat`, jitted; rows are padded to a multiple of 16 so that all tests share a few programs."""
    jitted = jax.jit(lambda fmt, rows: getattr(fmt, method)(rows), static_argnums=0)

    def call(fmt: RowFormat, rows):
        padding = np.zeros((-len(rows) % 16, *rows.shape[1:]), rows.dtype)
        outs = jitted(fmt, np.concatenate((np.asarray(rows), padding)))
        return jax.tree.map(lambda out: np.asarray(out)[: len(rows)], outs)

    return call


jitted_pack, jitted_unpack, jitted_unpack_scaled = compiled("pack"), compiled("unpack"), compiled("unpack_scaled")
jitted_hadamard = jax.jit(hadamard)


def round_trip(fmt: RowFormat, x) -> np.ndarray:
    return jitted_unpack(fmt, jitted_pack(fmt, x))


def normal(fmt: RowFormat, num_rows: int = 4, seed: int = 0, spread: float = 3.0) -> np.ndarray:
    """Rows whose magnitudes differ from row to row by powers of ten."""
    rng = np.random.default_rng(seed)
    size = 10.0 ** rng.uniform(-spread, spread, (num_rows, 1))
    return (rng.standard_normal((num_rows, fmt.channels)) * size).astype(np.float32)


@pytest.mark.parametrize("name", FORMATS)
def test_random_rows_match_the_oracle_to_the_byte(name):
    check(name, normal(FORMATS[name], num_rows=16))


@settings(max_examples=30, deadline=None)
@given(st.sampled_from(QUANTISED), st.data())
def test_any_bf16_bits_match_the_oracle(name, data):
    bits = data.draw(hnp.arrays(np.uint16, (2, FORMATS[name].channels), elements=st.integers(0, 0xFFFF)))
    exponent = data.draw(st.integers(1, 240))  # of the largest number; bf16 numbers below 2^-126 are zero on a CPU
    field = np.minimum((bits >> 7) & 0xFF, exponent)
    x = bf16_value((bits & 0x807F) | (field << 7).astype(np.uint16))
    check(name, np.where(np.abs(x) < 2.0**-126, np.copysign(0, x), x).astype(np.float32))


@every_quantised
def test_boundaries_of_scale_and_value(name):
    """Largest magnitudes around the floor and every power of two, each with ties and the values around them."""
    fmt, largest = FORMATS[name], 6.0 if "fp4" in name else 448.0
    tops = [1e-4, 9.9e-5, 1.01e-4, 0.0448, *(f * largest * 2.0**e for e in (-20, -1, 0, 3) for f in (1, 1 - 2**-8, 1 + 2**-7))]
    tops += [2.0**e for e in (-15, -14, 0, 7, 8, 9)]
    table = E2M1 if "fp4" in name else E4M3
    ties = (table[:-1] + table[1:]) / 2
    points = np.concatenate([table, ties, ties * (1 - 2**-7), ties * (1 + 2**-7)])
    rng = np.random.default_rng(1)
    x = rng.choice(np.concatenate([points, -points]), (len(tops), fmt.channels))
    scale = np.array([2.0 ** np.ceil(np.log2(top / largest)) for top in tops])
    x = np.clip(x * scale[:, None], -np.array(tops)[:, None], np.array(tops)[:, None])
    x[:, ::32] = np.array(tops)[:, None]
    check(name, x.astype(np.float32))


@every_quantised
def test_small_numbers_zeros_and_their_signs(name):
    fmt = FORMATS[name]
    x = np.zeros((4, fmt.channels), np.float32)
    x[1] = -0.0
    x[2, :4] = [1.0, -0.0, -1e-6, 1e-30]
    x[3, :4] = [448.0, 2.0**-9, -(2.0**-10), 2.0**-11]  # an e4m3 subnormal, a tie with zero, nothing
    check(name, x)


def test_the_floor_stores_byte_105():
    row = jitted_pack(FORMATS["entry fp8"], np.zeros((1, 512)))
    assert row[0, 576:].tolist() == [105] * 7 + [0]


@every_format
def test_numbers_survive_a_second_round(fmt):
    """Bytes may not: a largest value rounded down to 224 gets the next finer scale. The numbers are the same."""
    once = round_trip(fmt, normal(fmt, seed=2))
    chex.assert_trees_all_equal(round_trip(fmt, once), once)
    assert once.dtype == fmt.compute_dtype == ("float32" if fmt.name == "f32" else "bfloat16")


@every_format
def test_zero_bytes_are_zeros(fmt):
    rows = np.zeros((2, fmt.row_bytes), np.uint8)
    values, scale = jitted_unpack_scaled(fmt, rows)
    chex.assert_trees_all_equal(jitted_unpack(fmt, rows), np.zeros((2, fmt.channels), fmt.compute_dtype))
    chex.assert_trees_all_equal(values, np.zeros((2, fmt.channels), fmt.compute_dtype))
    assert np.isfinite(scale).all()


@every_format
def test_poison_stays_in_its_row(fmt):
    x = normal(fmt, seed=3)
    poisoned = np.insert(x, (1, 3), np.array([[np.nan], [np.inf]]), axis=0)
    rows, clean = jitted_pack(fmt, poisoned), jitted_pack(fmt, x)
    chex.assert_trees_all_equal(np.delete(rows, (1, 4), axis=0), clean)
    rows = np.insert(rows, 2, 0xFF, axis=0)
    kept = jitted_unpack(fmt, rows)[[0, 3, 4, 6]]
    chex.assert_trees_all_equal(kept, jitted_unpack(fmt, clean))


@pytest.mark.parametrize("name", [name for name in FORMATS if "fp4" not in name])
def test_a_number_that_is_none_is_not_hidden(name):
    fmt = FORMATS[name]
    x = normal(fmt, num_rows=1)
    x[0, 5] = np.nan
    assert np.isnan(np.asarray(round_trip(fmt, x), np.float32)[0, 5])


@every_quantised
def test_rounding_to_bf16_is_not_optimised_away(name):
    """XLA may drop a pair of casts inside one program; the bytes may not change with the program around `pack`."""
    fmt = FORMATS[name]
    x = normal(fmt, num_rows=16, seed=4)
    rounded = bf16_value(oracle_bf16(x))
    inside = np.asarray(jax.jit(lambda x: fmt.pack(x.astype(jnp.bfloat16)))(x))
    chex.assert_trees_all_equal(inside, jitted_pack(fmt, rounded))
    chex.assert_trees_all_equal(jitted_pack(fmt, x), jitted_pack(fmt, rounded))


def test_casts_agree_with_ml_dtypes():
    """A second opinion on both element types, over every bf16 number in range."""
    bits = np.arange(1 << 16, dtype=np.uint16)
    x = bf16_value(bits[np.isfinite(bf16_value(bits))])
    x = x[(np.abs(x) <= 448) & ((np.abs(x) >= 2.0**-126) | (x == 0))]
    for name, dtype, largest in (
        ("index fp8 of 128", ml_dtypes.float8_e4m3fn, 448),
        ("index fp4 of 128", ml_dtypes.float4_e2m1fn, 6),
    ):
        fmt, kept = FORMATS[name], x[np.abs(x) <= largest]
        kept = np.pad(kept, (0, -len(kept) % 16)).reshape(-1, 16)
        rows = np.full((len(kept), fmt.channels // 32, 32), largest, np.float32)  # the scale is 1
        rows[:, 0, 16:] = kept
        numbers = np.asarray(jitted_unpack(fmt, jitted_pack(fmt, rows.reshape(len(kept), -1))), np.float32)[:, 16:32]
        np.testing.assert_array_equal(numbers, kept.astype(dtype).astype(np.float32))


def test_two_values_a_byte_the_even_channel_low():
    x = np.zeros((1, 128), np.float32)
    x[0, :4] = [6.0, -0.5, 1.5, 2.5]
    assert jitted_pack(FORMATS["index fp4 of 128"], x)[0, :2].tolist() == [0x97, 0x43]


@pytest.mark.parametrize(
    ("fmt", "entries", "row_bytes", "page_bytes"),
    [
        (entry_format(FLASH, "fp8"), 2, 584, 1_728),
        (entry_format(FLASH, "fp8"), 64, 584, 37_440),
        (entry_format(FLASH, "fp8"), 128, 584, 74_880),
        (entry_format(FLASH, "fp8"), 256, 584, 149_760),
        (index_format(FLASH, "fp8"), 64, 132, 8_640),
        (index_format(FLASH, "fp4"), 64, 68, 4_608),
        (index_format(DEMO, "fp8"), 64, 260, 16_704),
        (index_format(DEMO, "fp4"), 64, 136, 9_216),
        (index_format(FLASH, "bf16"), 64, 256, 16_384),
        (entry_format(FLASH, "bf16"), 64, 1_024, 65_536),
        (entry_format(FLASH, "bf16"), 2, 1_024, 2_048),
        (entry_format(FLASH, "f32"), 64, 2_048, 131_072),
    ],
)
def test_bytes_of_rows_and_pages(fmt, entries, row_bytes, page_bytes):
    assert (fmt.row_bytes, fmt.page_bytes(entries)) == (row_bytes, page_bytes)
    assert fmt.page_align in (1, PAGE_ALIGN) and hash(fmt) == hash(fmt)


@pytest.mark.parametrize("fmt", [FORMATS["entry fp8"], FORMATS["index fp8 of 256"], FORMATS["index fp4 of 128"]])
def test_b1_values_and_scales_stand_apart_in_a_page(fmt):
    rng = np.random.default_rng(5)
    rows = rng.integers(0, 256, (64, fmt.row_bytes), np.uint8)
    page = np.full(fmt.page_bytes(64), 0, np.uint8)
    for i, row in enumerate(rows):
        page[fmt.value_bytes * i : fmt.value_bytes * (i + 1)] = row[: fmt.value_bytes]
        start = fmt.value_bytes * 64 + fmt.scale_bytes * i
        page[start : start + fmt.scale_bytes] = row[fmt.value_bytes :]
        assert (fmt.value_offset(i), fmt.scale_offset(i, 64)) == (fmt.value_bytes * i, start)
    chex.assert_trees_all_equal(np.asarray(fmt.join_page(jnp.asarray(rows))), page)
    chex.assert_trees_all_equal(np.asarray(fmt.split_page(jnp.asarray(page), 64)), rows)


def test_b2_slot_57_and_the_page_behind():
    fmt = FORMATS["entry fp8"]
    assert (fmt.value_offset(57), fmt.scale_offset(57, 64)) == (32_832, 37_320)
    rows = np.random.default_rng(6).integers(0, 256, (2, 64, 584), np.uint8)
    pages = np.asarray(fmt.join_page(jnp.asarray(rows))).reshape(-1)
    chex.assert_trees_all_equal(pages[37_440 : 37_440 + 576], rows[1, 0, :576])
    chex.assert_trees_all_equal(pages[37_376:37_440], np.zeros(64, np.uint8))


def test_fp8_entries_have_one_geometry():
    with pytest.raises(ConfigError, match=r"head_dim=64.*Choose rows=bf16 or rows=f32"):
        entry_format(TINY, "fp8")


def test_refusals_name_the_value():
    with pytest.raises(ConfigError, match="'int8' is unknown; choose from f32, bf16, fp8"):
        entry_format(DEMO, "int8")
    with pytest.raises(ConfigError, match="'fp4' is unknown; choose from f32, bf16, fp8"):
        entry_format(DEMO, "fp4")
    with pytest.raises(ConfigError, match="index_head_dim=80 is no multiple"):
        index_format(dataclasses.replace(DEMO, index_head_dim=80), "fp4")
    with pytest.raises(ConfigError, match="index_head_dim=80; set hadamard=False"):
        hadamard(jnp.zeros((2, 80)))
    with pytest.raises(ValueError, match="a fp8 row has 512 channels, x has 511"):
        FORMATS["entry fp8"].pack(jnp.zeros(511))


@pytest.mark.parametrize("dim", [1, 2, 32, 256])
def test_hadamard_is_sylvesters_matrix_and_its_own_inverse(dim):
    matrix = np.array([[(-1.0) ** (i & j).bit_count() for j in range(dim)] for i in range(dim)]) / math.sqrt(dim)
    x = np.random.default_rng(7).standard_normal((3, dim)).astype(np.float32)
    chex.assert_trees_all_close(np.asarray(jitted_hadamard(jnp.asarray(x))), (x @ matrix).astype(np.float32), atol=1e-5)
    chex.assert_trees_all_close(np.asarray(jitted_hadamard(jitted_hadamard(jnp.asarray(x)))), x, atol=1e-5)
    assert jitted_hadamard(jnp.asarray(x, jnp.bfloat16)).dtype == jnp.bfloat16


@pytest.mark.parametrize("name", ["index fp8 of 128", "index fp4 of 128"])
def test_e1_a_needle_is_found_when_both_sides_or_none_are_rotated(name):
    """One needle among 18,000 / 4 candidates; a rotation on one side only loses it."""
    fmt, rng = FORMATS[name], np.random.default_rng(8)
    query = rng.standard_normal(fmt.channels).astype(np.float32)
    keys = rng.standard_normal((4_500, fmt.channels)).astype(np.float32)
    keys[1_234] += 0.6 * query

    def best(query, keys, k):
        values, scale = jitted_unpack_scaled(fmt, jitted_pack(fmt, keys))
        scores = values.astype(np.float32) @ round_trip(fmt, query[None])[0].astype(np.float32) * scale
        return set(np.argsort(-scores)[:k].tolist())

    turned_query, turned_keys = np.asarray(jitted_hadamard(query)), np.asarray(jitted_hadamard(keys))
    assert 1_234 in best(query, keys, 1) and 1_234 in best(turned_query, turned_keys, 1)
    assert 1_234 not in best(query, turned_keys, 512) and 1_234 not in best(turned_query, keys, 512)
