"""Resolve against a plain-Python oracle, on full tables, and the faults that other implementations shipped."""

import functools
import types
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import resolve_oracle as oracle

from hisparse_jax.config import ConfigError
from hisparse_jax.hot_map import HotMap, forget_host_blocks, forget_host_rows, init_hot_map, reset_requests
from hisparse_jax.resolve import resolve_topk
from pallas_kernels import resolve_topk as kernel

HUGE = 2**31 - 1


def ints(values, dtype=jnp.int32):
    return jnp.asarray(np.asarray(values), dtype)


def hot_map_of(slot_host, lru) -> HotMap:
    return HotMap(slot_host=ints(slot_host), lru=ints(lru, jnp.int16))


def on_host(tree) -> types.SimpleNamespace:
    """Fields of a pytree node as numpy arrays."""
    return types.SimpleNamespace(**{name: np.asarray(value) for name, value in vars(tree).items()})


def pick(hot_map: HotMap, index) -> HotMap:
    return hot_map_of(np.asarray(hot_map.slot_host)[index], np.asarray(hot_map.lru)[index])


BATCH, QUERY_ROWS, TOP_K, SLOTS, PAGES = 5, 2, 4, 8, 3


def fit(values, shape, fill) -> np.ndarray:
    """`values` padded at the end of every axis."""
    values = np.asarray(values)
    return np.pad(values, [(0, want - have) for want, have in zip(shape, values.shape)], constant_values=fill)


def resolve(topk, hot_map, *, num_entries, host, hot, resident=None, row_valid=None, first_new=None, blocks=999):
    """`resolve_topk` with 4 entries a page and a block, on nested lists, one request a line; pads them to one shape.

    Unless said, nothing is resident, nothing is new and every row is valid. Columns padded to `TOP_K` count as invalid.
    """
    batch, query_rows = np.shape(topk)[:2]
    bounds = np.broadcast_to(np.reshape(num_entries, (batch, -1)), (batch, query_rows))
    valid = np.ones((batch, query_rows), bool) if row_valid is None else row_valid
    slots = fit(hot_map.slot_host, (BATCH, SLOTS), -1), np.concatenate((hot_map.lru, np.tile(range(SLOTS), (BATCH - batch, 1))))
    resolved, after = resolve_topk(
        ints(fit(topk, (BATCH, QUERY_ROWS, TOP_K), -1)),
        ints(fit(bounds, (BATCH, QUERY_ROWS), 0)),
        jnp.asarray(fit(valid, (BATCH, QUERY_ROWS), False)),
        ints(fit(np.full(batch, HUGE) if first_new is None else first_new, (BATCH,), 0)),
        ints(fit(np.zeros((batch, 1)) if resident is None else resident, (BATCH, PAGES), 0)),
        ints(fit(host, (BATCH, PAGES), 0)),
        ints(fit(hot, (BATCH, SLOTS // 4), 0)),
        hot_map_of(*slots),
        page_entries=4,
        row_step=4,
        num_host_blocks=blocks,
    )
    resolved = types.SimpleNamespace(**{name: value[:batch] for name, value in vars(on_host(resolved)).items()})
    resolved.rows = resolved.rows[:, :query_rows, : np.shape(topk)[2]]
    resolved.num_valid = resolved.num_valid[:, :query_rows]
    return resolved, pick(after, slice(batch))


def plan_of(resolved, request: int = 0) -> list[tuple[int, int]]:
    """The plan as `(host row, slot)`; nothing stands behind it."""
    count = int(resolved.num_misses[request])
    plan = np.stack([getattr(resolved, name)[request] for name in ("host_rows", "dest_rows", "slots")], axis=-1)
    assert (plan[count:] == -1).all() and (plan[:count] >= 0).all()
    return [(host_row, slot) for host_row, _, slot in plan[:count].tolist()]


def assert_sound(resolved, hot_map: HotMap, selected: int | None = None):
    """What holds after any step: LRU a permutation, no host row twice, counts that add up."""
    for slots, order in zip(np.asarray(hot_map.slot_host), np.asarray(hot_map.lru)):
        assert sorted(order) == list(range(slots.size))
        held = slots[slots >= 0]
        assert len(set(held)) == len(held)
    if selected is not None:
        assert resolved.counts.sum(-1).tolist() == [selected] * len(resolved.counts)


def test_worked_example_of_one_row():
    # S is at least K = 8, so two slots join the example's six: last in the LRU, and not reached.
    resolved, after = resolve_topk(
        ints([[[17, 5, 0, 6, 2, 9, -1, 4]]]),
        num_entries=ints([[18]]),
        row_valid=jnp.array([[True]]),
        first_new=ints([17]),
        resident=ints([[0, 0, 7, 8, 9]]),
        host=ints([[3, 5, 6, 2, 4]]),
        hot=ints([[11, 12]]),
        hot_map=hot_map_of([[13, -1, 21, 12, -1, 14, -1, -1]], [[1, 4, 0, 5, 2, 3, 6, 7]]),
        page_entries=4,
        row_step=4,
        num_host_blocks=7,
    )
    assert resolved.rows.tolist() == [[[37, 46, 47, 45, 49, 29, -1, 48]]]
    assert plan_of(on_host(resolved)) == [(22, 1), (20, 4)]
    assert resolved.dest_rows[0, :2].tolist() == [45, 48]
    assert after.slot_host.tolist() == [[13, 22, 21, 12, 20, 14, -1, -1]]
    assert after.lru.tolist() == [[0, 6, 7, 1, 4, 5, 2, 3]]
    assert resolved.num_valid.tolist() == [[7]]
    assert resolved.counts.tolist() == [[1, 1, 3, 2, 1]]


def test_worked_example_of_two_rows():
    # Entry 3 is host row 11, entry 8 is 20, entry 4 is 12. Two more slots again, never reached.
    before = hot_map_of([[10, 11, 12, -1, -1, -1, -1, -1]], [[3, 4, 5, 6, 7, 0, 1, 2]])
    resolved, after = resolve([[[3, 8], [8, 4]]], before, num_entries=[12], host=[[2, 3, 5]], hot=[[1, 2]])
    assert resolved.rows.tolist() == [[[4 + 1, 4 + 3], [4 + 3, 4 + 2]]]
    assert plan_of(resolved) == [(20, 3)]
    assert after.lru.tolist() == [[4, 5, 6, 7, 0, 3, 1, 2]]
    assert resolved.counts.tolist() == [[0, 0, 3, 1, 4]]


@functools.partial(jax.jit, static_argnames=("page_entries", "row_step", "num_host_blocks"))
def run_steps(steps, hot_map: HotMap, **static):
    def one(hot_map, step):
        *inputs, reset, recycled = step
        hot_map = reset_requests(hot_map, reset)
        hot_map = forget_host_blocks(hot_map, recycled, static["page_entries"])
        resolved, hot_map = resolve_topk(*inputs, hot_map=hot_map, **static)
        return hot_map, (resolved, hot_map)

    return jax.lax.scan(one, hot_map, steps)[1]


def adversarial_steps(rng, num_steps, batch, query_rows, top_k, num_slots, num_pages, entries, num_host_blocks):
    """Inputs of `num_steps` steps in which everything happens: see the comments."""
    max_entries = num_pages * entries
    pages_of_region = -(-num_slots // entries)
    owners = rng.permutation(np.arange(1, num_host_blocks))[: batch * num_pages].reshape(batch, num_pages)
    hot = rng.permutation(np.arange(500, 500 + batch * pages_of_region)).reshape(batch, pages_of_region)
    hot[-1] = 0  # a request without a hot region
    steps = []
    for _ in range(num_steps):
        reset, recycled = rng.random(batch) < 0.03, np.zeros(batch * num_pages, int)
        for request in np.flatnonzero(reset):  # it ends; the next one gets its host blocks, and one of a neighbour's
            other = rng.integers(batch)
            a, b = rng.integers(num_pages, size=2)
            owners[request, a], owners[other, b] = owners[other, b], owners[request, a]
            recycled[[request * num_pages + a, other * num_pages + b]] = owners[request, a], owners[other, b]
        host = np.where(rng.random(owners.shape) < 0.97, owners, rng.choice([0, -1, num_host_blocks, HUGE // entries]))
        resident = np.where(rng.random(owners.shape) < rng.choice([0.0, 0.3, 1.0]), 700 + owners, 0)
        bound = rng.integers(0, max_entries + 2, (batch, query_rows))
        first_new = np.maximum(bound.max(axis=1) - rng.integers(0, 2, batch), 0)
        recent = rng.integers(0, max_entries, (batch, 1, 1)) + rng.integers(-entries, entries, (batch, query_rows, top_k))
        topk = np.where(rng.random(recent.shape) < 0.6, recent, rng.integers(0, max_entries, recent.shape))
        edges = rng.choice([0, entries - 1, entries, max_entries - 1, max_entries, HUGE, -1, -HUGE], recent.shape)
        topk = np.where(rng.random(recent.shape) < 0.15, edges, topk)
        topk = np.where(rng.random(recent.shape) < 0.1, bound[..., None] - 1, topk)  # the newest entry of its row
        topk = np.where(rng.random((batch, 1, 1)) < 0.2, topk[..., :1], topk)  # one id repeated
        valid = rng.random((batch, query_rows)) < 0.9
        steps.append((topk, bound, valid, first_new, resident, host, hot, reset, recycled))
    kinds = [jnp.int32, jnp.int32, bool, *[jnp.int32] * 4, bool, jnp.int32]
    return tuple(jnp.asarray(np.stack(values), kind) for values, kind in zip(zip(*steps), kinds))


def assert_outcome(of_request: dict[str, np.ndarray], outcome: oracle.Outcome) -> None:
    """One request's results are the oracle's, padding and counts too."""
    width = of_request["rows"].size
    padded = outcome.plan + [(-1, -1, -1)] * (width - len(outcome.plan))
    assert of_request["rows"].tolist() == outcome.rows
    assert list(zip(*(of_request[name].reshape(-1).tolist() for name in ("host_rows", "dest_rows", "slots")))) == padded
    assert of_request["num_misses"] == len(outcome.plan)
    assert of_request["counts"].tolist() == list(outcome.counts.values())
    assert of_request["num_homeless"] == outcome.num_homeless


@pytest.mark.parametrize(
    ("query_rows", "top_k", "num_slots", "entries"),
    [(1, 8, 8, 4), (1, 8, 13, 4), (2, 6, 24, 8), (2, 4, 8, 4)],
    ids=["K=S", "odd S", "two rows", "two rows, Q*K=S"],
)
def test_agrees_with_the_oracle_on_full_tables(query_rows, top_k, num_slots, entries):
    batch, num_pages, num_host_blocks, row_step, num_steps = 8, 6, 60, 2 * entries + 1, 200
    rng = np.random.default_rng(query_rows * 100 + num_slots)
    steps = adversarial_steps(rng, num_steps, batch, query_rows, top_k, num_slots, num_pages, entries, num_host_blocks)
    static: dict[str, Any] = dict(page_entries=entries, row_step=row_step, num_host_blocks=num_host_blocks)
    resolved, maps = (on_host(tree) for tree in run_steps(steps, init_hot_map(batch, num_slots), **static))
    inputs = [values.tolist() for values in map(np.asarray, steps)]
    regions, seen = [oracle.HotRegion(num_slots) for _ in range(batch)], np.zeros(5, int)
    for t in range(num_steps):
        *tables, reset, recycled = (values[t] for values in inputs)
        for b in range(batch):
            regions[b] = oracle.HotRegion(num_slots) if reset[b] else regions[b]
            regions[b].forget(set(recycled) - {0}, entries)
            outcome = oracle.step(
                regions[b], *(table[b] for table in tables), entries=entries, row_step=row_step, num_host_blocks=num_host_blocks
            )
            assert_outcome({name: values[t, b] for name, values in vars(resolved).items()}, outcome)
            assert maps.slot_host[t, b].tolist() == regions[b].table
            assert maps.lru[t, b].tolist() == regions[b].order
            seen += resolved.counts[t, b]
    assert (seen > 100).all() and resolved.num_homeless.sum() > 100  # every class occurs


@pytest.mark.parametrize(("query_rows", "top_k", "num_slots"), [(1, 12, 20), (2, 5, 10)])
def test_the_pallas_kernel_agrees_with_the_reference(query_rows, top_k, num_slots):
    batch, num_pages, entries, num_host_blocks, num_steps = 4, 5, 4, 40, 25
    rng = np.random.default_rng(query_rows)
    steps = adversarial_steps(rng, num_steps, batch, query_rows, top_k, num_slots, num_pages, entries, num_host_blocks)
    static: dict[str, Any] = dict(page_entries=entries, row_step=9, num_host_blocks=num_host_blocks)
    hot_map = init_hot_map(batch, num_slots)
    for *inputs, _, _ in zip(*steps):
        arguments = (*inputs, hot_map.slot_host, hot_map.lru)
        expected = kernel.resolve_topk(*arguments, **static, implementation="xla")
        result = kernel.resolve_topk(*arguments, **static, implementation="pallas", tile=4, interpret=True)
        chex.assert_trees_all_equal(result, expected)
        hot_map = HotMap(slot_host=expected.slot_host, lru=expected.lru)


def test_a_resident_request_passes_through_unchanged():
    before = hot_map_of([[5, -1, 9, 8, -1, 4, -1, -1]], [[2, 0, 3, 1, 7, 6, 5, 4]])
    resolved, after = resolve([[[0, 3, 7, 4]]], before, num_entries=[8], resident=[[3, 2]], host=[[0, 0]], hot=[[0]])
    assert resolved.rows.tolist() == [[[12, 15, 11, 8]]] and resolved.counts.tolist() == [[4, 0, 0, 0, 0]]
    chex.assert_trees_all_equal(after, before)


def test_a1_every_output_is_written():
    topk = [[[1, -1, 3, -1]], [[0, 1, 9, 2]], [[0, 1, 2, 3]]]  # -1 inside; n4 < K; a padding row
    resolved, after = resolve(
        topk,
        init_hot_map(3, SLOTS),
        num_entries=[8, 2, 8],
        row_valid=[[True], [True], [False]],
        host=[[1, 2], [3, 4], [5, 6]],
        hot=[[1, 2], [3, 4], [5, 6]],
    )
    assert resolved.rows.tolist() == [[[4, -1, 5, -1]], [[12, 13, -1, -1]], [[-1] * 4]]
    assert resolved.counts.tolist() == [[0, 0, 0, 2, 2], [0, 0, 0, 2, 2], [0, 0, 0, 0, 0]]
    assert resolved.num_homeless.tolist() == [0, 0, 0]
    assert_sound(resolved, after)


def test_a2_repeated_id_takes_one_slot():
    resolved, after = resolve([[[7, 7, 9, 7]]], init_hot_map(1, SLOTS), num_entries=[12], host=[[1, 2, 3]], hot=[[5, 6]])
    assert resolved.rows.tolist() == [[[20, 20, 21, 20]]]
    assert plan_of(resolved) == [(11, 0), (13, 1)] and resolved.counts.tolist() == [[0, 0, 2, 2, 0]]
    assert_sound(resolved, after, 4)


@pytest.mark.parametrize("held", [[-1] * 8, [4, 5, 6, 7, -1, -1, -1, -1]], ids=["all miss", "one row hits"])
def test_a3_rows_of_one_request_do_not_evict_each_other(held):
    topk = [[[0, 1, 2, 3], [4, 5, 6, 7]]]
    resolved, after = resolve(topk, hot_map_of([held], [list(range(8))]), num_entries=[8], host=[[1, 2]], hot=[[5, 6]])
    holds = np.asarray(after.slot_host)
    for entry, row in zip(range(8), resolved.rows.reshape(-1).tolist()):
        assert holds[0, (row // 4 - 5) * 4 + row % 4] == 4 + entry


def test_a4_padding_rows_leave_their_request_alone():
    before = hot_map_of([[4, 5] + [-1] * 6] * 3, [[2, 3, 4, 5, 6, 7, 0, 1]] * 3)
    resolved, after = resolve(
        [[[0, 1, 0, 1]], [[2, 3, 0, 1]], [[HUGE, 0, 1, 2]]],
        before,
        num_entries=[8, 8, HUGE],
        row_valid=[[True], [False], [False]],
        host=[[1, 2]] * 3,
        hot=[[5, 6]] * 3,
    )
    chex.assert_trees_all_equal(pick(after, slice(1, 3)), pick(before, slice(1, 3)))
    assert resolved.rows[1:].tolist() == [[[-1] * 4]] * 2 and resolved.num_valid.tolist() == [[4], [0], [0]]
    assert resolved.counts.tolist() == [[0, 0, 4, 0, 0], [0] * 5, [0] * 5]


@pytest.mark.parametrize(("top_k", "num_slots"), [(448, 900), (2_048, 4_096)])
def test_a5_lru_stays_a_permutation_at_any_width(top_k, num_slots):
    entries, num_pages, rng = 64, 80, np.random.default_rng(top_k)
    region, hot_map = oracle.HotRegion(num_slots), init_hot_map(1, num_slots)
    host, hot = 1 + np.arange(num_pages), 200 + np.arange(-(-num_slots // entries))
    for _ in range(4):
        topk = np.sort(rng.permutation(num_pages * entries)[:top_k])
        bound = num_pages * entries
        tables = (topk[None], [bound], [True], bound, np.zeros(num_pages, int), host, hot)
        arguments = (jnp.asarray(np.asarray(x)[None]) for x in tables)
        resolved, hot_map = resolve_topk(*arguments, hot_map=hot_map, page_entries=entries, row_step=320, num_host_blocks=999)
        lists = (np.asarray(x).tolist() for x in tables)
        outcome = oracle.step(region, *lists, entries=entries, row_step=320, num_host_blocks=999)
        assert resolved.rows.tolist() == [outcome.rows] and hot_map.lru.tolist() == [region.order]
        assert_sound(on_host(resolved), hot_map, top_k)


def test_a6_slot_numbers_reach_their_limit_and_no_further():
    num_slots, pages = 32_768, 512
    before = init_hot_map(1, num_slots)
    before = before.replace(lru=jnp.roll(before.lru, 1, axis=1))  # slot 32,767 is the next victim
    hot = 1_000 + jnp.arange(pages)[None]

    def call(hot_map, page_entries):
        tables: dict[str, Any] = dict(
            resident=ints([[0, 0]]), host=ints([[1, 2]]), hot=hot, row_valid=jnp.array([[True]]), first_new=ints([HUGE])
        )
        static: dict[str, Any] = dict(page_entries=page_entries, row_step=page_entries, num_host_blocks=9)
        return resolve_topk(ints([[[5, 70]]]), num_entries=ints([[99]]), hot_map=hot_map, **tables, **static)

    resolved, after = call(before, 64)
    assert plan_of(on_host(resolved)) == [(69, 32_767), (134, 0)]
    assert resolved.rows.tolist() == [[[(1_000 + 511) * 64 + 63, 64_000]]]
    assert np.asarray(after.lru)[0, -2:].tolist() == [32_767, 0]
    with pytest.raises(ConfigError, match="num_hot_slots=32769 exceeds 32768"):
        init_hot_map(1, num_slots + 1)
    with pytest.raises(ConfigError, match="exceeds 32768"):
        call(HotMap(slot_host=jnp.zeros((1, 32_769), jnp.int32), lru=jnp.zeros((1, 32_769), jnp.int16)), 128)


def test_a7_newest_entries_are_never_read_from_the_host():
    tables: dict[str, Any] = dict(host=[[1, 2]], hot=[[7, 8]])
    closing: dict[str, Any] = dict(
        num_entries=[[5, 6]], first_new=[4], resident=[[0, 9]]
    )  # row 0 closes entry 4, row 1 closes entry 5
    resolved, hot_map = resolve([[[4, 1], [4, 5]]], init_hot_map(1, SLOTS), **closing, **tables)
    assert resolved.rows.tolist() == [[[36, 28], [36, 37]]] and resolved.counts.tolist() == [[0, 3, 0, 1, 4]]
    assert plan_of(resolved) == [(5, 0)]
    later, hot_map = resolve([[[4, 5]]], hot_map, num_entries=[8], first_new=[7], resident=[[0, 9]], **tables)
    assert later.counts.tolist() == [[2, 0, 0, 0, 2]] and plan_of(later) == []
    lost, _ = resolve([[[4, 5]]], hot_map, num_entries=[6], first_new=[5], **tables)  # 5 is new and has lost its page
    assert lost.rows[0, 0, 1] == -1 and lost.num_homeless.tolist() == [1] and plan_of(lost) == [(8, 1)]


def test_a8_ids_without_a_home_become_nothing():
    before = init_hot_map(5, SLOTS)
    resolved, after = resolve(
        [[[8, 3, 8, 8]], [[12, HUGE, -HUGE, -1]], [[0, 4, 0, 0]], [[0, 4, 0, 4]], [[0, 1, 2, 3]]],
        before,
        num_entries=[8, HUGE, 8, 8, 8],
        host=[[1, 2, 0], [1, 2, 3], [0, 3, 0], [50, -7, 0], [1, 2, 0]],  # null, and out of range on both sides
        hot=[[5, 15], [6, 16], [7, 17], [8, 18], [9, 0]],  # the last request does not own its whole hot region
        blocks=50,
    )
    assert resolved.rows.tolist() == [[[-1, 20, -1, -1]], [[-1] * 4], [[-1, 28, -1, -1]], [[-1] * 4], [[-1] * 4]]
    assert resolved.num_homeless.tolist() == [0, 1, 3, 4, 4]
    assert resolved.counts[:, 3].tolist() == [1, 0, 1, 0, 0]
    chex.assert_trees_all_equal(pick(after, [1, 3, 4]), pick(before, [1, 3, 4]))
    assert_sound(resolved, after, 4)


def test_a10_valid_count_is_no_prefix_length():
    resolved, _ = resolve([[[-1, 5, -1, 0]]], init_hot_map(1, SLOTS), num_entries=[8], host=[[1, 2]], hot=[[3, 4]])
    assert resolved.rows.tolist() == [[[-1, 12, -1, 13]]] and resolved.num_valid.tolist() == [[2]]


def test_b8_a_row_does_not_depend_on_its_companions_or_the_table_width():
    rng = np.random.default_rng(0)
    topk, hot = rng.integers(-1, 8, (3, 1, 4)), np.arange(20, 26).reshape(3, 2)
    host, wider = np.arange(1, 7).reshape(3, 2), np.concatenate((np.arange(1, 7).reshape(3, 2), [[0], [77], [78]]), axis=1)
    bounds = [4, 7, 8]
    together, maps = resolve(topk, init_hot_map(3, SLOTS), num_entries=bounds, host=wider, hot=hot)
    for b in range(3):
        one = slice(b, b + 1)
        alone, map_alone = resolve(topk[one], init_hot_map(1, SLOTS), num_entries=bounds[one], host=host[one], hot=hot[one])
        chex.assert_trees_all_equal(map_alone, pick(maps, one))
        chex.assert_trees_all_equal(vars(alone), {name: value[one] for name, value in vars(together).items()})


def test_c4_a_recycled_host_block_is_forgotten_by_all():
    tables: dict[str, Any] = dict(num_entries=[8, 8], hot=[[5, 15], [6, 16]])
    _, hot_map = resolve([[[0, 1]], [[4, 5]]], init_hot_map(2, SLOTS), host=[[3, 4], [8, 9]], **tables)
    layers = hot_map_of(np.stack([hot_map.slot_host] * 2), np.stack([hot_map.lru] * 2))
    layers = forget_host_blocks(reset_requests(layers, jnp.array([True, False])), ints([3, 0, 9]), 4)
    recycled = pick(layers, 0)
    assert (np.asarray(layers.slot_host) == -1).all()
    assert recycled.lru.tolist() == [[*range(8)], [2, 3, 4, 5, 6, 7, 0, 1]]  # reset; forgotten in place
    resolved, _ = resolve([[[0, 1]], [[4, 5]]], recycled, host=[[9, 3], [8, 4]], **tables)
    assert plan_of(resolved, 0) == [(36, 0), (37, 1)] and plan_of(resolved, 1) == [(16, 2), (17, 3)]
    chex.assert_trees_all_equal(forget_host_blocks(hot_map, ints([0, 7]), 4), hot_map)


def test_c5_a_rewritten_row_is_fetched_again():
    tables: dict[str, Any] = dict(num_entries=[8], host=[[3, 4]], hot=[[5, 6]])
    _, hot_map = resolve([[[0, 1, 4]]], init_hot_map(1, SLOTS), **tables)
    hot_map = forget_host_rows(hot_map, ints([13, -1, 99]))
    assert hot_map.slot_host.tolist() == [[12, -1, 16] + [-1] * 5] and hot_map.lru.tolist() == [[3, 4, 5, 6, 7, 0, 1, 2]]
    resolved, _ = resolve([[[0, 1, 4]]], hot_map, **tables)
    assert plan_of(resolved) == [(13, 3)]


def test_c7_a_warm_up_of_padding_leaves_no_trace():
    before = init_hot_map(2, SLOTS)
    tables: dict[str, Any] = dict(host=[[1], [2]], hot=[[3, 4]] * 2)
    warm_up = np.full((2, 2, 4), HUGE)
    resolved, after = resolve(warm_up, before, num_entries=[HUGE, 0], row_valid=np.zeros((2, 2), bool), **tables)
    chex.assert_trees_all_equal(after, before)
    assert not np.asarray(resolved.counts).any() and (np.asarray(resolved.rows) == -1).all()
    _, used = resolve([[[0]], [[1]]], before, num_entries=[4, 4], **tables)
    chex.assert_trees_all_equal(reset_requests(used, jnp.ones(2, bool)), before)


def test_refuses_what_cannot_work():
    def call(num_slots, hot_pages, **change):
        tables: dict[str, Any] = dict(
            resident=ints([[0]]), host=ints([[1]]), hot=ints([[2] * hot_pages]), row_valid=jnp.ones((1, 2), bool)
        )
        static: dict[str, Any] = dict(page_entries=4, row_step=4, num_host_blocks=9) | change
        numbers: dict[str, Any] = dict(topk=jnp.zeros((1, 2, 3), jnp.int32), num_entries=ints([[4, 4]]), first_new=ints([4]))
        return resolve_topk(**numbers, **tables, hot_map=init_hot_map(1, num_slots), **static)

    with pytest.raises(ConfigError, match="num_hot_slots=4 holds 4, one transaction needs 6"):
        call(4, 1)
    with pytest.raises(ConfigError, match="hot region of 1 pages holds 4 rows, num_hot_slots=6; give it 2 pages"):
        call(6, 1)
    with pytest.raises(ConfigError, match="row_step=3 is below page_entries=4"):
        call(6, 2, row_step=3)
    with pytest.raises(ValueError, match="implementation='mosaic' is unknown"):
        call(6, 2, implementation="mosaic")
