"""Rows and pages on the slab against numpy at the byte, with every unowned byte poisoned."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hisparse_jax.pages import entry_rows, read_page_rows, read_rows, write_rows
from hisparse_jax.rows import Fp8EntryRows, Fp8IndexRows, PlainRows

FP8 = Fp8EntryRows("fp8", 512, 576, 8, "bfloat16", 576)
INDEX = Fp8IndexRows("fp8", 128, 128, 4, "bfloat16", 576)
BF16 = PlainRows("bf16", 48, 96, 0, "bfloat16")
POISON = 0xFF  # NaN in e4m3, bf16 and f32


def place(fmt, entries, offset, block, slot) -> np.ndarray:
    """Bytes of a block that one row owns, in packed order; written out, not computed by the code under test."""
    values = offset + fmt.value_bytes * slot + np.arange(fmt.value_bytes)
    scales = offset + fmt.value_bytes * entries + fmt.scale_bytes * slot + np.arange(fmt.scale_bytes)
    return np.concatenate((values, scales))


def random_rows(fmt, count, seed=0):
    return np.random.default_rng(seed).integers(0, 256, (count, fmt.row_bytes), np.uint8)


@pytest.mark.parametrize(("fmt", "entries"), [(FP8, 64), (INDEX, 32), (BF16, 4), (FP8, 2)], ids=["fp8", "index", "bf16", "C128"])
def test_writes_own_bytes_and_nothing_else(fmt, entries):
    offset, row_step, blocks = 1_000, entries + 3, 5
    slab = np.full((blocks, offset + fmt.page_bytes(entries) + 77), POISON, np.uint8)
    places = [(1, 0), (4, entries - 1), (2, 1), (3, entries // 2)]
    rows = np.array([b * row_step + s for b, s in places] + [-1, -7, blocks * row_step], np.int32)
    data = random_rows(fmt, len(rows))
    static = dict(page_entries=entries, offset=offset, row_step=row_step)
    written = write_rows(jnp.asarray(slab), jnp.asarray(rows), jnp.asarray(data), fmt, **static)
    for line, (block, slot) in zip(data, places):
        slab[block, place(fmt, entries, offset, block, slot)] = line
    np.testing.assert_array_equal(written, slab)
    back = read_rows(written, jnp.asarray(rows).reshape(1, -1), fmt, **static)
    np.testing.assert_array_equal(back[0, :4], data[:4])
    assert not np.asarray(back[0, 4:]).any()  # zeros, not poison


@pytest.mark.parametrize(("fmt", "entries"), [(FP8, 4), (INDEX, 64), (BF16, 3)], ids=["fp8", "index", "bf16"])
def test_reads_whole_pages_row_by_row(fmt, entries):
    offset = 24
    slab = np.random.default_rng(1).integers(0, 256, (6, offset + fmt.page_bytes(entries) + 5), np.uint8)
    blocks = np.array([[3, 0, 5], [0, 0, 99]], np.int32)
    rows = np.asarray(read_page_rows(jnp.asarray(slab), jnp.asarray(blocks), fmt, page_entries=entries, offset=offset))
    assert rows.shape == (2, 3 * entries, fmt.row_bytes)
    for request, page, block in ((0, 0, 3), (0, 2, 5)):
        for slot in range(entries):
            np.testing.assert_array_equal(
                rows[request, page * entries + slot], slab[block, place(fmt, entries, offset, block, slot)]
            )
    assert not rows[0, entries : 2 * entries].any() and not rows[1].any()


def test_b2_rows_are_found_past_the_padding():
    assert FP8.page_bytes(64) == 37_440
    slab = np.zeros((2, 2 * 37_440), np.uint8)
    slab[1, 37_440:38_016] = 7  # block 1, second page, row 0
    row = read_rows(jnp.asarray(slab), jnp.array([128]), FP8, page_entries=64, offset=37_440, row_step=128)
    assert np.asarray(row[0, :576]).tolist() == [7] * 576 and not np.asarray(row[0, 576:]).any()


def test_b3_layers_of_one_group_keep_apart():
    entries, pages = 4, FP8.page_bytes(4)
    slab = jnp.zeros((3, 3 * pages), jnp.uint8)
    rows = jnp.array([1 * 12 + 2, 2 * 12 + 3])
    for layer in range(3):
        fill = jnp.full((2, FP8.row_bytes), layer + 1, jnp.uint8)
        slab = write_rows(slab, rows, fill, FP8, page_entries=entries, offset=layer * pages, row_step=12)
    for layer in range(3):
        read = read_rows(slab, rows, FP8, page_entries=entries, offset=layer * pages, row_step=12)
        assert (np.asarray(read) == layer + 1).all()


def test_b4_a_page_is_64_entries_and_256_tokens():
    table = [5, 7, 9]
    rows = entry_rows(jnp.arange(3 * 64)[None], jnp.array([table]), page_entries=64, row_step=320)[0].tolist()
    for tokens in range(4, 521):
        last = tokens // 4 - 1  # entry closed by the last whole group of four
        page = (4 * last + 3) // 256  # page of the token that closed it
        assert rows[last] == table[page] * 320 + last - 64 * page
        assert page + 1 <= -(-tokens // 256)


def test_b6_rows_stand_in_the_blocks_of_the_table():
    entries, table = 4, jnp.array([[7, 5, 2], [6, 0, 3]])  # descending, with gaps
    numbers = jnp.array([[0, 5, 11], [2, 4, 8]])
    rows = entry_rows(numbers, table, page_entries=entries, row_step=entries)
    assert rows.tolist() == [[28, 21, 11], [26, -1, 12]]  # entry 4 of request 1 has no block
    data = random_rows(BF16, 6)
    slab = jnp.full((8, BF16.page_bytes(entries)), POISON, jnp.uint8)
    slab = write_rows(slab, rows.reshape(-1), jnp.asarray(data), BF16, page_entries=entries, offset=0, row_step=entries)
    expected = np.full(slab.shape, POISON, np.uint8)
    for line, (block, slot) in zip(data[[0, 1, 2, 3, 5]], [(7, 0), (5, 1), (2, 3), (6, 2), (3, 0)]):
        expected[block, 96 * slot : 96 * slot + 96] = line
    np.testing.assert_array_equal(slab, expected)


def test_entries_outside_the_table_have_no_row():
    table = jnp.array([[4, 6]])
    rows = entry_rows(jnp.array([[[-1, 0], [7, 8], [2**31 - 1, -(2**31)]]]), table, page_entries=4, row_step=9)
    assert rows.tolist() == [[[-1, 36], [57, -1], [-1, -1]]]


def test_writes_and_reads_in_place_inside_a_loop():
    static = dict(page_entries=4, offset=0, row_step=4)

    def body(i, slab):
        row = read_rows(slab, jnp.array([4, 9]), BF16, **static)
        return write_rows(slab, jnp.array([5, -1]) + i, row + jnp.uint8(1), BF16, **static)

    run = jax.jit(lambda slab: jax.lax.fori_loop(0, 3, body, slab), donate_argnums=0)
    slab = jnp.zeros((64, BF16.page_bytes(4)), jnp.uint8)
    stats = run.lower(slab).compile().memory_analysis()
    assert stats is not None
    assert stats.alias_size_in_bytes == slab.size
    assert stats.temp_size_in_bytes < slab.size
    after = read_rows(run(slab), jnp.array([5, 6, 7]), BF16, **static)
    assert after[:, 0].tolist() == [1, 1, 1]
