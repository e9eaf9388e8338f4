"""The ops on the host pool, by every kernel of the GPU: bytes against numpy, neighbours, far addresses, loops and graphs."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gpu import need

from hisparse_jax.host_memory import make_host_pool
from pallas_kernels.copy_pages import copy_pages
from pallas_kernels.gather_rows import gather_rows
from pallas_kernels.store_entry import store_entry
from pallas_kernels.windows import row_parts

pytestmark = pytest.mark.gpu

FORMATS: dict[str, tuple[dict[str, int], int]] = {  # rows, and bytes of a page
    "fp8": (dict(value_bytes=576, scale_bytes=8, page_entries=64), 37_440),
    "bf16": (dict(value_bytes=1_024, scale_bytes=0, page_entries=64), 65_536),
    "f32": (dict(value_bytes=2_048, scale_bytes=0, page_entries=64), 131_072),
    "words": (dict(value_bytes=136, scale_bytes=4, page_entries=4), 600),
    "odd": (dict(value_bytes=300, scale_bytes=5, page_entries=3), 933),  # nothing is aligned
    "many scales": (dict(value_bytes=160, scale_bytes=41, page_entries=3), 603),
}
GRAPH = {"xla_gpu_graph_min_graph_size": 1, "xla_gpu_enable_command_buffer": "FUSION,CUSTOM_CALL,WHILE,DYNAMIC_SLICE_FUSION"}


@pytest.fixture(params=["pallas", "cuda"])
def how(request):
    return need(request.param, "gather_rows")


@pytest.fixture(params=FORMATS)
def fmt(request):
    return FORMATS[request.param]


def random_bytes(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, shape, np.uint8)


def as_pool(values: np.ndarray) -> jax.Array:
    return jax.device_put(values, jax.sharding.SingleDeviceSharding(jax.devices()[0], memory_kind="pinned_host"))


def ids(values) -> jax.Array:
    return jnp.asarray(np.asarray(values), jnp.int32)


def in_place(op, result: int, how: str, pool: jax.Array, **static) -> Any:
    """`op` jitted with its result's operand donated."""
    home = pool.sharding if result == 0 and op is not gather_rows else None
    run = functools.partial(op, implementation=how, **static)
    return jax.jit(run, donate_argnums=result, out_shardings=home)


def bytes_of_row(row: dict[str, int], slot: int, offset: int = 0) -> np.ndarray:
    """Where in its page a row's bytes stand, in packed order."""
    parts = row_parts(row["value_bytes"], row["scale_bytes"], row["page_entries"])
    return np.concatenate([offset + base + width * slot + np.arange(width) for _, base, width in parts])


def gathered(pool, dest, host_rows, dest_rows, row, offset, row_step) -> np.ndarray:
    """What numpy makes of a plan."""
    dest = dest.copy()
    for g, r in zip(np.asarray(host_rows), np.asarray(dest_rows)):
        if g >= 0 and 0 <= r < dest.shape[0] * row_step:
            block, slot = divmod(int(g), row["page_entries"])
            data = pool[block, bytes_of_row(row, slot)] if block < pool.shape[0] else 0
            dest[r // row_step, bytes_of_row(row, int(r) % row_step, offset)] = data
    return dest


def test_small_gather_copies_rows_and_nothing_else(how, fmt):
    (row, page), entries = fmt, fmt[0]["page_entries"]
    rng, offset, row_step = np.random.default_rng(0), page, 2 * entries
    pool, dest = random_bytes(9, page), random_bytes(7, 3 * page, seed=1)
    places = [block * row_step + slot for block in range(7) for slot in range(entries)]
    dest_rows = rng.permutation(places)[: 4 * entries + 1]
    host_rows = rng.integers(0, 9 * entries, dest_rows.size)
    host_rows[::5], dest_rows[3::7] = -1, -1
    host_rows[1], host_rows[2], dest_rows[6] = 9 * entries, 2**31 - 1, 7 * row_step
    run = in_place(gather_rows, 1, how, pool := as_pool(pool), **row, offset=offset, row_step=row_step)
    result = run(pool, jnp.asarray(dest), ids(host_rows), ids(dest_rows))
    np.testing.assert_array_equal(result, gathered(np.array(pool, copy=True), dest, host_rows, dest_rows, row, offset, row_step))


@pytest.mark.parametrize("counted", [False, True])
@pytest.mark.parametrize("programs", [1, 3, 1_056])
def test_f2_small_gather_of_one_request_that_holds_all_misses(how, programs, counted):
    row, page = FORMATS["fp8"]
    pool, dest = random_bytes(12, page), random_bytes(9, page, seed=1)
    host_rows, dest_rows = np.full((8, 512), -1), np.full((8, 512), -1)
    rng = np.random.default_rng(2)
    host_rows[5], dest_rows[5] = rng.permutation(12 * 64)[:512], 64 + rng.permutation(8 * 64)[:512]
    plan = host_rows.reshape(-1), dest_rows.reshape(-1)
    run = in_place(gather_rows, 1, how, pool := as_pool(pool), **row, offset=0, row_step=64, num_programs=programs)
    lengths = ids((host_rows >= 0).sum(axis=1)) if counted else None
    result = run(pool, jnp.asarray(dest), *map(ids, plan), lengths)
    np.testing.assert_array_equal(result, gathered(np.array(pool, copy=True), dest, *plan, row, 0, 64))


@pytest.mark.parametrize("lists", [1, 70, 1_100])
def test_small_gather_of_counted_lists(how, lists):
    """Lengths of every kind, also below 0 and past the list; more lists than a block counts."""
    row, page = FORMATS["fp8"]
    pool, dest, rng = random_bytes(12, page), random_bytes(9, page, seed=1), np.random.default_rng(lists)
    lengths = rng.choice([-3, 0, 1, 2, 4, 9], lists)
    host_rows, dest_rows = rng.integers(0, 12 * 64, (lists, 4)), np.full((lists, 4), -1)
    wanted = np.arange(4)[None] < lengths[:, None]
    some = rng.permutation(8 * 64)[: wanted.sum()]
    dest_rows[np.nonzero(wanted)[0][: some.size], np.nonzero(wanted)[1][: some.size]] = 64 + some
    plan = np.where(dest_rows >= 0, host_rows, -1).reshape(-1), dest_rows.reshape(-1)
    run = in_place(gather_rows, 1, how, pool := as_pool(pool), **row, offset=0, row_step=64)
    result = run(pool, jnp.asarray(dest), *map(ids, plan), ids(lengths))
    np.testing.assert_array_equal(result, gathered(np.array(pool, copy=True), dest, *plan, row, 0, 64))


def test_small_gather_of_nothing(how):
    row, page = FORMATS["fp8"]
    pool, dest, none = as_pool(random_bytes(3, page)), random_bytes(3, page, seed=1), ids(np.full(32_768, -1))
    run = in_place(gather_rows, 1, how, pool, **row, offset=0, row_step=64)
    np.testing.assert_array_equal(run(pool, jnp.asarray(dest), none, none), dest)


def test_small_store_writes_rows_and_nothing_else(how, fmt):
    (row, page), entries = fmt, fmt[0]["page_entries"]
    pool, rows = random_bytes(6, page), random_bytes(9, row["value_bytes"] + row["scale_bytes"], seed=2)
    host_rows = np.array([6 * entries - 1, -1, entries, 6 * entries, 2, -7, 3 * entries + 1, 2**31 - 1, 0])
    expected = pool.copy()
    for data, g in zip(rows, host_rows):
        if 0 <= g < 6 * entries:
            expected[g // entries, bytes_of_row(row, int(g) % entries)] = data
    pool = as_pool(pool)
    result = in_place(store_entry, 0, how, pool, **row)(pool, jnp.asarray(rows), ids(host_rows))
    assert result.sharding.memory_kind == "pinned_host"
    np.testing.assert_array_equal(np.array(result, copy=True), expected)


@pytest.mark.parametrize(("page", "offset"), [(37_440, 37_440), (600, 4), (933, 7), (4_097, 1)])
def test_small_copy_of_pages_leaves_the_others(how, page, offset):
    pool, slab = random_bytes(9, page), random_bytes(7, 2 * page + 8, seed=3)
    slab_blocks, host_blocks = np.array([6, 0, 2, 7, -1, 3, 4, 1]), np.array([1, 4, 0, 5, 3, 8, 9, -2])
    expected = pool.copy()
    expected[[1, 8]] = slab[[6, 3], offset : offset + page]
    pool = as_pool(pool)
    run = in_place(copy_pages, 0, how, pool, offset=offset, page_bytes=page)
    result = run(pool, jnp.asarray(slab), ids(slab_blocks), ids(host_blocks))
    np.testing.assert_array_equal(np.array(result, copy=True), expected)


def test_copy_of_a_few_pages_among_many_nulls(how):
    page, blocks = 37_440, np.zeros((2, 4_096), int)
    blocks[:, [0, 1_000, 4_095]] = [[3, 1, 2], [5, 2, 4]]
    pool, slab = random_bytes(6, page), random_bytes(4, page, seed=3)
    expected = pool.copy()
    expected[[5, 2, 4]] = slab[[3, 1, 2]]
    pool = as_pool(pool)
    result = in_place(copy_pages, 0, how, pool, offset=0, page_bytes=page)(pool, jnp.asarray(slab), *map(ids, blocks))
    np.testing.assert_array_equal(np.array(result, copy=True), expected)


def test_small_stores_are_read_back_by_later_gathers_in_a_loop_and_as_one_graph(how):
    """Each of 40 steps stores a row, spills a page and gathers both: no copy of the pool, the same buffer, the same bytes."""
    row, page, steps = *FORMATS["fp8"], 40
    packed = random_bytes(steps, 584, seed=4)

    def program(pool, slab, rows):
        def body(i, carry):
            pool, slab = carry
            data = jax.lax.dynamic_slice_in_dim(rows, i, 1)
            pool = store_entry(pool, data, (64 + i)[None], implementation=how, **row)
            plan = (64 + i)[None], (64 + (i * 7) % 64)[None]
            slab = gather_rows(pool, slab, *plan, offset=0, row_step=64, implementation=how, **row)
            source, target = jnp.full(1, 1, jnp.int32), (2 + i % 3)[None]
            return copy_pages(pool, slab, source, target, offset=0, page_bytes=page, implementation=how), slab

        return jax.lax.fori_loop(0, steps, body, (pool, slab))

    pool = make_host_pool(6, page)
    place, home = pool.unsafe_buffer_pointer(), pool.sharding
    shardings = (home, jax.sharding.SingleDeviceSharding(jax.devices()[0]))
    for options in ({}, GRAPH):
        run = jax.jit(program, donate_argnums=(0, 1), out_shardings=shardings, compiler_options=options)
        pool, slab = run(pool, jnp.zeros((2, page), jnp.uint8), jnp.asarray(packed))
        assert pool.unsafe_buffer_pointer() == place
        expected = np.zeros(page, np.uint8)
        for i in range(steps):
            expected[bytes_of_row(row, (i * 7) % 64)] = packed[i]
        np.testing.assert_array_equal(slab[1], expected)
        np.testing.assert_array_equal(np.array(pool, copy=True)[2 + (steps - 1) % 3], expected)


def test_a6_rows_and_pages_beyond_2_to_the_31_bytes(how):
    row, page = FORMATS["fp8"]
    blocks, slab_blocks, stride = 60_000, 12_000, 6 * page  # 2.25 GB and 2.7 GB
    values = np.zeros((blocks, page), np.uint8)
    values[[57_359, 57_360, blocks - 1]] = random_bytes(3, page)  # either side of 2^31, and the end
    pool, slab = as_pool(values), jnp.zeros((slab_blocks, stride), jnp.uint8)
    host_rows = np.array([57_359 * 64 + 63, 57_360 * 64, blocks * 64 - 1, 57_360 * 64 + 32])
    dest_rows = np.array([(slab_blocks - 1) * 384 + 63, 9_559 * 384 + 1, 9_560 * 384, 384])
    gather = in_place(gather_rows, 1, how, pool, **row, offset=5 * page, row_step=384)
    slab = gather(pool, slab, ids(host_rows), ids(dest_rows))
    for g, r in zip(host_rows, dest_rows):
        data = np.asarray(slab[r // 384])[bytes_of_row(row, r % 384, 5 * page)]
        np.testing.assert_array_equal(data, values[g // 64, bytes_of_row(row, g % 64)])
    assert int(jnp.sum((slab != 0).any(axis=1))) == 4

    rows = random_bytes(2, 584, seed=5)
    pool = in_place(store_entry, 0, how, pool, **row)(pool, jnp.asarray(rows), ids([blocks * 64 - 2, 57_361 * 64 + 5]))
    copy = in_place(copy_pages, 0, how, pool, offset=5 * page, page_bytes=page)
    pool = copy(pool, slab, ids([slab_blocks - 1, 9_560]), ids([blocks - 2, 57_362]))
    after = np.array(pool, copy=True)
    values[blocks - 1, bytes_of_row(row, 62)], values[57_361, bytes_of_row(row, 5)] = rows
    values[blocks - 2], values[57_362] = (np.asarray(slab[b])[5 * page :] for b in (slab_blocks - 1, 9_560))
    assert (after == values).all()
