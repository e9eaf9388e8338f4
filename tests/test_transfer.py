"""Plans carried out on real tiers: swap-in, follower layers, staging for prefill, backups."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

from hisparse_jax import pages, transfer
from hisparse_jax.hot_map import init_hot_map
from hisparse_jax.pages import entry_rows
from hisparse_jax.resolve import resolve_topk
from hisparse_jax.rows import PlainRows, RowFormat

ENTRIES, ROW_STEP, LAYERS, BLOCKS, HOST_BLOCKS = 4, 13, 3, 12, 20


@dataclasses.dataclass(frozen=True)
class SplitRows(PlainRows):
    """bf16 numbers, the last of them kept as scales, in padded pages: the shape of fp8 rows, tiny."""


FORMAT: RowFormat = SplitRows("split", 24, 40, 8, "bfloat16", 64)
PAGE = FORMAT.page_bytes(ENTRIES)
STATIC = dict(page_entries=ENTRIES, row_step=ROW_STEP)
read_rows = jax.jit(functools.partial(pages.read_rows, fmt=FORMAT), static_argnames=("page_entries", "offset", "row_step"))
swap_in = jax.jit(functools.partial(transfer.swap_in, fmt=FORMAT), static_argnames=("page_entries", "offset", "row_step"))
stage_rows = jax.jit(functools.partial(transfer.stage_rows, fmt=FORMAT, page_entries=ENTRIES))


def as_pool(values: np.ndarray) -> jax.Array:
    return jax.device_put(values, jax.sharding.SingleDeviceSharding(jax.devices()[0], memory_kind="pinned_host"))


def row(seed: int, host_row: int) -> np.ndarray:
    """The bytes of one row of one layer."""
    return np.random.default_rng((seed, host_row)).integers(0, 256, FORMAT.row_bytes, np.uint8)


def filled_pool(seed: int) -> jax.Array:
    pool = np.full((HOST_BLOCKS, PAGE), 0xFF, np.uint8)
    for g in range(HOST_BLOCKS * ENTRIES):
        data, (block, slot) = row(seed, g), divmod(g, ENTRIES)
        pool[block, 40 * slot : 40 * slot + 40], scales = data[:40], 40 * ENTRIES + 8 * slot
        pool[block, scales : scales + 8] = data[40:]
    return as_pool(pool)


def resolve_one(topk, host, hot, hot_map, resident=None):
    resident = np.zeros(len(host)) if resident is None else resident
    tables = ([topk], [len(host) * ENTRIES], [1], 10_000, resident, host, hot)
    topk, bounds, valid, *tables = (jnp.asarray(np.asarray([table], np.int32)) for table in tables)
    return resolve_topk(
        topk,
        bounds,
        valid.astype(bool),
        *tables,
        hot_map=hot_map,
        **STATIC,
        num_host_blocks=HOST_BLOCKS,
    )


def test_a9_followers_apply_the_plan_to_their_own_bytes():
    host, hot, slab = [9, 4, 17], [5, 3], jnp.full((BLOCKS, LAYERS * PAGE), 0xFF, jnp.uint8)
    pools = [filled_pool(layer) for layer in range(LAYERS)]
    resolved, hot_map = resolve_one([1, 4, 10, -1], host, hot, init_hot_map(1, 8))  # the leader's
    for layer, pool in enumerate(pools):
        slab = swap_in(slab, pool, resolved, offset=layer * PAGE, **STATIC)
    for layer in range(LAYERS):
        rows = np.asarray(read_rows(slab, resolved.rows[0, 0], offset=layer * PAGE, **STATIC))
        for entry, data in zip((1, 4, 10), rows):
            np.testing.assert_array_equal(data, row(layer, host[entry // ENTRIES] * ENTRIES + entry % ENTRIES))
        assert not rows[3].any()
    owned = np.zeros(slab.shape, bool)
    owned[5] = True  # slots 0 to 2 stand in the first hot block
    assert (np.asarray(slab)[~owned] == 0xFF).all()
    assert hot_map.slot_host.tolist() == [[37, 16, 70, -1, -1, -1, -1, -1]]


def test_hot_bytes_equal_host_bytes_while_the_slots_thrash():
    rng, pool = np.random.default_rng(0), filled_pool(7)
    host, hot = rng.permutation(np.arange(1, HOST_BLOCKS))[:6], [8, 2]
    slab, hot_map = jnp.full((BLOCKS, PAGE), 0xFF, jnp.uint8), init_hot_map(1, 8)
    for _ in range(12):
        topk = np.sort(rng.permutation(24)[:8])
        resident = np.where(rng.random(6) < 0.3, 11, 0)
        resolved, hot_map = resolve_one(topk, host, hot, hot_map, resident)
        slab = swap_in(slab, pool, resolved, offset=0, **STATIC)
        rows = np.asarray(read_rows(slab, resolved.rows[0, 0], offset=0, **STATIC))
        assert (np.asarray(resolved.rows) >= 0).all()
        for entry, data in zip(topk, rows):
            page, slot = divmod(int(entry), ENTRIES)
            expected = row(7, int(host[page]) * ENTRIES + slot) if resident[page] == 0 else np.full(FORMAT.row_bytes, 0xFF)
            np.testing.assert_array_equal(data, expected)


def stage(pool, topk, bounds, resident, host):
    """`stage_rows` of 5 query rows, 4 columns and 6 pages, and what each reference reads."""
    staged = stage_rows(pool, *(jnp.asarray(np.asarray(x, np.int32)) for x in (topk, bounds, resident, host)))
    return staged, np.asarray(read_rows(staged.pages, staged.rows, page_entries=ENTRIES, offset=0, row_step=ENTRIES))


def test_staging_holds_what_is_selected_and_lost_once_and_in_order():
    host, resident = [6, 0, 2, 11, HOST_BLOCKS, 3], [0, 9, 0, 4, 0, 0]
    topk = [[0, 9, 9, 21], [1, 9, -1, 12], [8, 23, 24, 2**31 - 1], [9, 0, 4, 5], [16, 0, -3, 22]]
    bounds = [24, 24, 24, 5, 22]  # entry 5 of row 3 and 22 of row 4 do not exist yet
    staged, read = stage(filled_pool(1), topk, bounds, resident, host)
    # Distinct entries with a host page and no resident block: 0, 1, 8, 9, 21, 23. Resident: 4, 12. 16 has no home.
    number = {entry: i for i, entry in enumerate([0, 1, 8, 9, 21, 23])}
    expected = [[number.get(j, -1) if j < bound else -1 for j in line] for line, bound in zip(topk, bounds)]
    assert staged.rows.tolist() == expected and int(staged.num_staged) == 6 and int(staged.num_homeless) == 1
    assert staged.pages.shape == (5, PAGE)  # min(5 * 4, 24) rows
    for line, numbers, bytes_of in zip(topk, expected, read):
        for entry, i, data in zip(line, numbers, bytes_of):
            want = row(1, host[entry // ENTRIES] * ENTRIES + entry % ENTRIES) if i >= 0 else np.zeros(FORMAT.row_bytes)
            np.testing.assert_array_equal(data, want)
    unused = np.array(staged.pages)
    for used in range(6):
        unused[used // ENTRIES, 40 * (used % ENTRIES) : 40 * (used % ENTRIES + 1)] = 0
        unused[used // ENTRIES, 160 + 8 * (used % ENTRIES) : 168 + 8 * (used % ENTRIES)] = 0
    assert not unused.any()


def test_staging_a_whole_lost_history_of_the_largest_size():
    host = np.array([1, 2, 3, 4, 5, 0])
    topk = np.arange(20).reshape(5, 4)[::-1]
    staged, read = stage(filled_pool(2), topk, [20] * 5, np.zeros(6), host)
    assert staged.rows.tolist() == topk.tolist() and int(staged.num_staged) == 20
    np.testing.assert_array_equal(read.reshape(20, -1), np.stack([row(2, ENTRIES + int(j)) for j in topk.reshape(-1)]))


def test_staging_more_references_than_entries():
    topk = jnp.tile(jnp.arange(12), (4, 1))
    staged = stage_rows(filled_pool(2), topk, jnp.full(4, 12), jnp.zeros(3, jnp.int32), jnp.arange(1, 4))
    assert staged.rows.tolist() == topk.tolist() and staged.pages.shape == (3, PAGE)


def test_staging_nothing_reads_nothing():
    staged, _ = stage(filled_pool(2), np.arange(20).reshape(5, 4), [24] * 5, np.arange(1, 7), np.zeros(6))
    assert (np.asarray(staged.rows) == -1).all() and int(staged.num_staged) == 0 and int(staged.num_homeless) == 0
    assert not np.asarray(staged.pages).any()


def test_backups_leave_equal_bytes_on_both_tiers():
    rng = np.random.default_rng(3)
    slab = jnp.asarray(rng.integers(0, 256, (BLOCKS, 2 * PAGE), np.uint8))
    pool = as_pool(np.full((HOST_BLOCKS, PAGE), 0xFF, np.uint8))
    resident, host = jnp.array([[0, 5, 8]]), jnp.array([[3, 19, 7]])
    entries = jnp.array([[6, 11, 2]])  # 2 has lost its page: nothing to read, nothing written
    rows = entry_rows(entries, resident, **STATIC)[0]
    data = read_rows(slab, rows, offset=PAGE, **STATIC)
    host_rows = jnp.where(rows >= 0, entry_rows(entries, host, page_entries=ENTRIES, row_step=ENTRIES)[0], -1)
    pool = transfer.back_up_rows(pool, data, host_rows, FORMAT, page_entries=ENTRIES)
    expected = np.full((HOST_BLOCKS, ENTRIES, FORMAT.row_bytes), 0xFF)
    expected[19, 2], expected[7, 3] = data[0], data[1]
    np.testing.assert_array_equal(FORMAT.split_page(jnp.asarray(np.array(pool, copy=True)), ENTRIES), expected)
    pool = transfer.back_up_pages(pool, slab, jnp.array([5, 0]), jnp.array([19, 3]), FORMAT, page_entries=ENTRIES, offset=PAGE)
    np.testing.assert_array_equal(np.array(pool[19], copy=True), slab[5, PAGE:])
    assert (np.array(pool[3], copy=True) == 0xFF).all()
