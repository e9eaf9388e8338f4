"""Resolve kernels against the reference on the same GPU, the reference on a CPU and the oracle, over many steps."""

from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import resolve_oracle as oracle
from gpu import need
from test_resolve import adversarial_steps

from hisparse_jax.hot_map import HotMap, forget_host_blocks, init_hot_map, reset_requests
from hisparse_jax.resolve import resolve_topk
from hisparse_jax.traces import make_trace

pytestmark = pytest.mark.gpu


@pytest.fixture(params=["pallas", "cuda"])
def implementation(request) -> str:
    return need(request.param, "resolve_topk")


def run(steps, hot_map: HotMap, **static):
    """Every step's results, map and order."""

    @jax.jit
    def all_steps(hot_map, steps):
        def one(hot_map, step):
            *inputs, reset, recycled = step
            hot_map = reset_requests(hot_map, reset)
            hot_map = forget_host_blocks(hot_map, recycled, static["page_entries"])
            resolved, hot_map = resolve_topk(*inputs, hot_map=hot_map, **static)
            return hot_map, (resolved, hot_map)

        return jax.lax.scan(one, hot_map, steps)[1]

    return jax.tree.map(np.asarray, all_steps(hot_map, steps))


def on_cpu(steps, hot_map: HotMap, **static):
    cpu = jax.devices("cpu")[0]
    steps, hot_map = jax.device_put((jax.tree.map(np.asarray, steps), jax.tree.map(np.asarray, hot_map)), cpu)
    with jax.default_device(cpu):
        return run(steps, hot_map, implementation="xla", **static)


SHAPES = [(1, 4, 8, 4), (2, 5, 10, 4), (1, 64, 100, 4), (3, 100, 301, 64), (1, 512, 4_096, 64), (2, 1_024, 4_096, 64)]


@pytest.mark.parametrize(("query_rows", "top_k", "num_slots", "entries"), SHAPES)
def test_equals_both_references_over_adversarial_steps(implementation, query_rows, top_k, num_slots, entries):
    batch, num_pages, num_host_blocks = 8, max(6, 2 * num_slots // entries), 40 * max(6, 2 * num_slots // entries)
    rng, num_steps = np.random.default_rng(num_slots), 600 if num_slots < 64 else 120
    steps = adversarial_steps(rng, num_steps, batch, query_rows, top_k, num_slots, num_pages, entries, num_host_blocks)
    static: dict[str, Any] = dict(page_entries=entries, row_step=2 * entries + 1, num_host_blocks=num_host_blocks)
    hot_map = init_hot_map(batch, num_slots)
    result = run(steps, hot_map, implementation=implementation, **static)
    chex.assert_trees_all_equal(result, run(steps, hot_map, implementation="xla", **static))
    chex.assert_trees_all_equal(result, on_cpu(steps, hot_map, **static))


@pytest.mark.parametrize(("query_rows", "top_k", "num_slots", "entries"), [(1, 8, 16, 4), (2, 5, 13, 4), (3, 100, 301, 16)])
def test_small_steps_equal_the_reference(implementation, query_rows, top_k, num_slots, entries):
    """Few enough steps for a race checker, without a loop around them; the reference runs on a CPU, unchecked."""
    rng, batch, num_pages = np.random.default_rng(0), 4, max(6, 2 * num_slots // entries)
    static: dict[str, Any] = dict(page_entries=entries, row_step=2 * entries, num_host_blocks=8 * num_pages)
    steps = adversarial_steps(rng, 3, batch, query_rows, top_k, num_slots, num_pages, entries, 8 * num_pages)
    cpu, empty = jax.devices("cpu")[0], jax.tree.map(np.asarray, init_hot_map(batch, num_slots))
    maps = {implementation: empty, "xla": empty}
    for t in range(3):
        tables, results = [np.asarray(values[t]) for values in steps[:-2]], {}
        for how, device in ((implementation, jax.devices()[0]), ("xla", cpu)):
            with jax.default_device(device):
                operands, hot_map = jax.tree.map(jnp.asarray, (tables, maps[how]))
                result = resolve_topk(*operands, hot_map=hot_map, implementation=how, **static)
            results[how], maps[how] = jax.tree.map(np.asarray, result)
        chex.assert_trees_all_equal(results[implementation], results["xla"])
        chex.assert_trees_all_equal(maps[implementation], maps["xla"])


@pytest.mark.parametrize("num_slots", [512, 1_000, 4_096, 32_768])
def test_a_trace_ends_in_the_oracles_tables(implementation, num_slots):
    batch, top_k, entries, num_steps = 4, 512, 64, 60
    num_entries = num_slots + 8_192
    num_pages = -(-num_entries // entries)
    trace = make_trace(num_steps, batch, top_k, num_entries, num_slots, seed=num_slots)
    rng = np.random.default_rng(0)
    host = 1 + rng.permutation(batch * num_pages).reshape(batch, num_pages).astype(np.int32)
    hot = 1 + np.arange(batch * -(-num_slots // entries), dtype=np.int32).reshape(batch, -1)
    static: dict[str, Any] = dict(page_entries=entries, row_step=320, num_host_blocks=batch * num_pages + 1)
    bound, resident = np.full((batch, 1), num_entries, np.int32), np.zeros_like(host)

    def every(array):
        return jnp.asarray(np.broadcast_to(array, (num_steps, *array.shape)))

    tables = [every(a) for a in (bound, np.ones((batch, 1), bool), bound[:, 0], resident, host, hot)]
    nothing = [every(a) for a in (np.zeros(batch, bool), np.zeros(1, np.int32))]
    steps = (jnp.asarray(trace.topk[:, :, None]), *tables, *nothing)
    hot_map = init_hot_map(batch, num_slots)
    resolved, maps = run(steps, hot_map, implementation=implementation, **static)
    chex.assert_trees_all_equal((resolved, maps), on_cpu(steps, hot_map, **static))
    for b in range(batch):
        region = oracle.HotRegion(num_slots)
        for t in range(num_steps):
            lists = [trace.topk[t, b][None], bound[b], [True], num_entries, resident[b], host[b], hot[b]]
            outcome = oracle.step(region, *(np.asarray(x).tolist() for x in lists), entries=entries, **_oracle_static(static))
            assert resolved.rows[t, b].tolist() == outcome.rows and resolved.num_misses[t, b] == len(outcome.plan)
        assert maps.slot_host[-1, b].tolist() == region.table and maps.lru[-1, b].tolist() == region.order


def _oracle_static(static: dict[str, Any]) -> dict[str, Any]:
    return {name: static[name] for name in ("row_step", "num_host_blocks")}


def test_a_resident_request_does_not_look_at_its_map(implementation):
    num_slots, entries = 4_096, 64
    poison = HotMap(
        slot_host=jnp.asarray(np.random.default_rng(0).integers(-(2**31), 2**31, (3, num_slots)), jnp.int32),
        lru=jnp.asarray(np.random.default_rng(1).integers(-(2**15), 2**15, (3, num_slots)), jnp.int16),
    )
    before = jax.tree.map(np.asarray, poison)
    topk = jnp.asarray(np.random.default_rng(2).integers(-1, 1_100, (3, 1, 512)), jnp.int32)
    pages = jnp.arange(1, 17, dtype=jnp.int32)[None] + jnp.zeros((3, 1), jnp.int32)
    resolved, after = resolve_topk(
        topk,
        jnp.full((3, 1), 1_024),
        jnp.ones((3, 1), bool),
        jnp.full(3, 1_020),
        pages,
        jnp.zeros_like(pages),
        jnp.zeros((3, 64), jnp.int32),
        hot_map=poison,
        page_entries=entries,
        row_step=64,
        num_host_blocks=9,
        implementation=implementation,
    )
    chex.assert_trees_all_equal(jax.tree.map(np.asarray, after), before)
    valid = (np.asarray(topk) >= 0) & (np.asarray(topk) < 1_024)
    chex.assert_trees_all_equal(np.asarray(resolved.rows), np.where(valid, 64 + np.asarray(topk), -1))
    assert not np.asarray(resolved.num_misses).any() and (np.asarray(resolved.host_rows) == -1).all()
