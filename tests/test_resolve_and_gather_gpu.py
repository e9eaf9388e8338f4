"""Resolve and gather in one kernel: the same results and the same bytes as the two ops, step by step."""

import functools
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gpu import need
from test_resolve import adversarial_steps
from test_transfer_gpu import as_pool, random_bytes

from hisparse_jax.hot_map import forget_host_blocks, init_hot_map, reset_requests
from pallas_kernels.gather_rows import gather_rows
from pallas_kernels.resolve_and_gather import resolve_and_gather
from pallas_kernels.resolve_topk import resolve_topk

pytestmark = pytest.mark.gpu

ROWS = {"fp8": dict(value_bytes=576, scale_bytes=8), "bf16": dict(value_bytes=1_024, scale_bytes=0)}
SHAPES = {  # requests, query rows, k, slots, entries of a page, steps
    "small": (4, 1, 8, 16, 4, 4),
    "small and uneven": (4, 2, 5, 13, 4, 4),
    "two blocks a request": (50, 1, 64, 64, 4, 10),
    "one block a request": (140, 1, 64, 64, 4, 10),
    "K=S": (4, 1, 64, 64, 4, 40),
    "uneven pages": (4, 1, 100, 301, 24, 40),
    "V4": (4, 1, 512, 4_096, 64, 40),
    "two rows": (4, 2, 1_024, 8_192, 64, 12),
}


@pytest.fixture(autouse=True)
def library():
    need("cuda", "resolve_and_gather")


def apart(pool, slab, *tables, row, offset, num_host_blocks, **static):
    plan = resolve_topk(*tables, implementation="cuda", num_host_blocks=num_host_blocks, **static)
    rows = plan.host_rows.reshape(-1), plan.dest_rows.reshape(-1)
    return gather_rows(pool, slab, *rows, plan.num_misses, implementation="cuda", offset=offset, **row, **static), plan


@pytest.mark.parametrize("fmt", ROWS)
@pytest.mark.parametrize("shape", SHAPES)
def test_equals_resolve_then_gather(shape, fmt):
    batch, query_rows, top_k, num_slots, entries, num_steps = SHAPES[shape]
    num_pages = max(6, 2 * num_slots // entries)
    num_host_blocks, row = 1 + batch * num_pages + 10, ROWS[fmt]
    page = -(-entries * (row["value_bytes"] + row["scale_bytes"]) // 64) * 64
    rng = np.random.default_rng(num_slots)
    steps = adversarial_steps(rng, num_steps, batch, query_rows, top_k, num_slots, num_pages, entries, num_host_blocks)
    static: dict[str, Any] = dict(page_entries=entries, row_step=2 * entries + 1, num_host_blocks=num_host_blocks, offset=page)
    pool = as_pool(random_bytes(num_host_blocks, page))
    held = 500 + (batch - 1) * -(-num_slots // entries)  # the last request's hot region lies beyond
    slab = random_bytes(held, 3 * page, seed=1)
    ways = {
        "apart": jax.jit(functools.partial(apart, row=row, **static), donate_argnums=(1, 9, 10)),
        "at once": jax.jit(
            functools.partial(resolve_and_gather, implementation="cuda", **row, **static), donate_argnums=(1, 9, 10)
        ),
    }
    slabs, maps, missed = {}, {}, 0
    for name in ways:
        slabs[name], maps[name] = jnp.asarray(slab), init_hot_map(batch, num_slots)
    for t in range(num_steps):
        *tables, reset, recycled = (values[t] for values in steps)
        plans = {}
        for name, way in ways.items():
            before = forget_host_blocks(reset_requests(maps[name], reset), recycled, entries)
            slabs[name], plan = way(pool, slabs[name], *tables, before.slot_host, before.lru)
            maps[name] = maps[name].replace(slot_host=plan.slot_host, lru=plan.lru)
            plans[name] = jax.tree.map(np.asarray, plan)
        chex.assert_trees_all_equal(plans["at once"], plans["apart"])
        missed += plans["apart"].num_misses.sum()
    np.testing.assert_array_equal(slabs["at once"], slabs["apart"])
    assert missed > 0 and not np.array_equal(slabs["apart"], slab)


def test_refuses_rows_it_cannot_take():
    none = jnp.zeros((1, 1), jnp.int32)
    tables = (none[None], none, none > 0, none[0], none, none, none, none, none.astype(jnp.int16))
    place = dict(page_entries=1, offset=0, row_step=1, num_host_blocks=1, implementation="cuda")
    for value_bytes, page in ((24, 32), (2_048, 2_048)):
        with pytest.raises(ValueError, match="choose another implementation"):
            resolve_and_gather(
                as_pool(random_bytes(1, page)), jnp.zeros((2, page), jnp.uint8), *tables, value_bytes=value_bytes, scale_bytes=0,
                **place,
            )  # fmt: skip
