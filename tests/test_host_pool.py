"""The three ops that touch the host pool, by both implementations, against numpy at the byte.

The kernels run in interpret mode, which takes no host-space operand: there the pool is in device space.
"""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.copy_pages import PIECE_BYTES, copy_pages
from pallas_kernels.gather_rows import gather_rows
from pallas_kernels.store_entry import store_entry

VALUES, SCALES, ENTRIES = 300, 5, 3  # two whole windows and one that overlaps; byte by byte
PAGE = ENTRIES * (VALUES + SCALES) + 13
ROW = dict(value_bytes=VALUES, scale_bytes=SCALES, page_entries=ENTRIES)
IMPLEMENTATIONS = {"host": {}, "xla": dict(implementation="xla"), "kernel": dict(implementation="pallas", interpret=True)}


@pytest.fixture(params=IMPLEMENTATIONS)
def how(request):
    return request.param


def random_bytes(*shape, seed=0):
    return np.random.default_rng(seed).integers(0, 256, shape, np.uint8)


def as_pool(values: np.ndarray, how: str = "host") -> jax.Array:
    if how != "host":
        return jnp.asarray(values)
    return jax.device_put(values, jax.sharding.SingleDeviceSharding(jax.devices()[0], memory_kind="pinned_host"))


def row_bytes_of(slot: int, offset: int = 0) -> np.ndarray:
    """Bytes of a block that one row owns, in packed order."""
    return offset + np.concatenate((VALUES * slot + np.arange(VALUES), VALUES * ENTRIES + SCALES * slot + np.arange(SCALES)))


def ids(values):
    return jnp.asarray(values, jnp.int32)


def test_b1_gather_copies_both_parts_and_nothing_else(how):
    offset, row_step = 17, 7
    pool, dest = random_bytes(5, PAGE), random_bytes(6, offset + PAGE + 9, seed=1)
    # Every slot to every parity; -1 on either side; a host row beyond the pool; a row beyond dest.
    host_rows = [0, 4, 8, 12, 13, 14, -1, 3, 5 * ENTRIES, 7, 2**31 - 1]
    dest_rows = [7, 8, 9, 16, 14, 15, 21, -1, 28, 6 * row_step, 36]
    expected = dest.copy()
    for host_row, row in zip(host_rows, dest_rows):
        if host_row >= 0 and 0 <= row < 6 * row_step:
            block, slot = divmod(host_row, ENTRIES)
            data = pool[block, row_bytes_of(slot)] if block < 5 else 0
            expected[row // row_step, row_bytes_of(row % row_step, offset)] = data
    static = ROW | dict(offset=offset, row_step=row_step) | IMPLEMENTATIONS[how]
    result = gather_rows(as_pool(pool, how), jnp.asarray(dest), ids(host_rows), ids(dest_rows), **static)
    np.testing.assert_array_equal(result, expected)


def test_b7_host_and_gpu_ids_are_separate(how):
    pool, dest = random_bytes(40, PAGE), np.zeros((4, PAGE), np.uint8)
    static = ROW | dict(offset=0, row_step=ENTRIES) | IMPLEMENTATIONS[how]
    rows = ids([37 * ENTRIES, 12 * ENTRIES + 2]), ids([2 * ENTRIES + 1, ENTRIES])
    result = np.asarray(gather_rows(as_pool(pool, how), jnp.asarray(dest), *rows, **static))
    np.testing.assert_array_equal(result[2, row_bytes_of(1)], pool[37, row_bytes_of(0)])
    np.testing.assert_array_equal(result[1, row_bytes_of(0)], pool[12, row_bytes_of(2)])


def test_store_writes_both_parts_and_nothing_else(how):
    pool, rows = random_bytes(4, PAGE), random_bytes(6, VALUES + SCALES, seed=2)
    host_rows = [11, -1, 3, 4 * ENTRIES, 7, -5]
    expected = pool.copy()
    for data, host_row in zip(rows, host_rows):
        if 0 <= host_row < 4 * ENTRIES:
            expected[host_row // ENTRIES, row_bytes_of(host_row % ENTRIES)] = data
    result = store_entry(as_pool(pool, how), jnp.asarray(rows), ids(host_rows), **ROW, **IMPLEMENTATIONS[how])
    np.testing.assert_array_equal(np.array(result, copy=True), expected)
    assert jax.typeof(result).memory_space == (jax.memory.Space.Host if how == "host" else jax.memory.Space.Device)


@pytest.mark.parametrize("page_bytes", [130, PIECE_BYTES + 200])
def test_copies_whole_pages_and_nothing_else(how, page_bytes):
    offset = 11
    pool, slab = random_bytes(5, page_bytes), random_bytes(7, offset + page_bytes + 3, seed=3)
    slab_blocks, host_blocks = [6, 0, 3, 7, 2, -1], [4, 1, 0, 3, 2, 1]
    expected = pool.copy()
    expected[4], expected[2] = slab[6, offset : offset + page_bytes], slab[2, offset : offset + page_bytes]
    static = dict(offset=offset, page_bytes=page_bytes) | IMPLEMENTATIONS[how]
    result = copy_pages(as_pool(pool, how), jnp.asarray(slab), ids(slab_blocks), ids(host_blocks), **static)
    np.testing.assert_array_equal(np.array(result, copy=True), expected)


@pytest.mark.parametrize("scale_bytes", [0, SCALES])
def test_plain_rows_have_one_part(how, scale_bytes):
    static = dict(value_bytes=VALUES, scale_bytes=scale_bytes, page_entries=ENTRIES) | IMPLEMENTATIONS[how]
    pool, row = np.zeros((2, PAGE), np.uint8), random_bytes(1, VALUES + scale_bytes)
    result = np.array(store_entry(as_pool(pool, how), jnp.asarray(row), ids([4]), **static), copy=True)
    assert (result != 0).sum() == (row != 0).sum()
    np.testing.assert_array_equal(result[1, VALUES : 2 * VALUES], row[0, :VALUES])


def test_nothing_to_move(how):
    pool, slab, none = as_pool(random_bytes(2, PAGE), how), jnp.asarray(random_bytes(2, PAGE)), ids([])
    static = IMPLEMENTATIONS[how]
    assert gather_rows(pool, slab, none, none, **ROW, offset=0, row_step=ENTRIES, **static) is not None
    np.testing.assert_array_equal(store_entry(pool, jnp.zeros((0, VALUES + SCALES), jnp.uint8), none, **ROW, **static), pool)
    np.testing.assert_array_equal(copy_pages(pool, slab, none, none, offset=0, page_bytes=PAGE, **static), pool)


def test_refuses_an_unknown_implementation():
    with pytest.raises(ValueError, match="implementation='triton' is unknown; choose from xla, pallas, cuda"):
        copy_pages(as_pool(np.zeros((2, 9), np.uint8)), jnp.zeros((2, 9), jnp.uint8), ids([1]), ids([1]), offset=0, page_bytes=9,
                   implementation="triton")  # fmt: skip


def test_write_then_read_is_in_place_inside_a_loop():
    """A donated host pool and slab, both written and read in the body of a loop: no copy of either."""
    slab_blocks, static = ids([1, 0]), ROW | dict(offset=0, row_step=ENTRIES)

    def body(i, carry):
        pool, slab = carry
        pool = store_entry(pool, jnp.full((2, VALUES + SCALES), i, jnp.uint8), ids([3, -1]) + i, **ROW)
        slab = gather_rows(pool, slab, ids([3, 4]) + i, ids([4, -1]) + i, **static)
        pool = copy_pages(pool, slab, slab_blocks, ids([9, 8]), offset=0, page_bytes=PAGE)
        return pool, slab

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def run(pool, slab, steps):
        return jax.lax.fori_loop(0, steps, body, (pool, slab))

    pool, slab = as_pool(np.zeros((300, PAGE), np.uint8)), jnp.zeros((200, PAGE), jnp.uint8)
    compiled = run.lower(pool, slab, 3).compile()
    stats = compiled.memory_analysis()
    assert stats is not None
    assert stats.alias_size_in_bytes == pool.size + slab.size
    assert stats.temp_size_in_bytes < slab.size
    pool, slab = (np.array(x, copy=True) for x in run(pool, slab, 3))
    assert pool[1, 0] == 0 and pool[1, VALUES] == 1 and pool[1, 2 * VALUES] == 2
    assert slab[1, VALUES] == 0 and slab[1, 2 * VALUES] == 1 and slab[2, 0] == 2
    np.testing.assert_array_equal(pool[9], slab[1])
    assert not pool[8].any()


ADDRESSES = """
import functools
import re
import jax.numpy as jnp
from h200 import compile_for_h200, spec
from pallas_kernels.copy_pages import copy_pages
from pallas_kernels.gather_rows import gather_rows
from pallas_kernels.store_entry import store_entry

pool, slab = spec((87_402, 37_440), jnp.uint8, "pinned_host"), spec((191_193, 224_640), jnp.uint8)
ids, rows, row = spec((8,), jnp.int32), spec((8, 584), jnp.uint8), dict(value_bytes=576, scale_bytes=8, page_entries=64)
compile_for_h200(functools.partial(gather_rows, **row, offset=0, row_step=384), pool, slab, ids, ids, donate=1)
compile_for_h200(functools.partial(store_entry, **row), pool, rows, ids, donate=0)
compile_for_h200(functools.partial(copy_pages, offset=0, page_bytes=37_440), pool, slab, ids, ids, donate=0)
"""


def test_kernels_multiply_block_numbers_in_64_bits(run_h200, monkeypatch):
    """A pool of 3.3 GB overflows an i32 offset, signed or not by a hair: the block pitch must widen the product."""
    monkeypatch.setenv("MOSAIC_GPU_DUMP_PTX", "1")
    ptx = run_h200(code=ADDRESSES)
    products = re.findall(r"(m(?:ul|ad)\.\S+)\s[^;]*\b(37440|224640)\b", ptx)
    assert {int(pitch) for _, pitch in products} == {37_440, 224_640} and ptx.count(".entry") == 3
    assert {kind for kind, _ in products} <= {
        "mul.wide.s32",
        "mul.wide.u32",
        "mad.wide.s32",
        "mad.wide.u32",
        "mul.lo.s64",
        "mad.lo.s64",
    }
