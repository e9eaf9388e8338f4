"""Block tables of the growing groups, as the resident twin uses them."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hisparse_jax import block_tables
from hisparse_jax.block_tables import blocks_wanted, init_tables
from hisparse_jax.status import NULL_BLOCK, Status

BATCH, PAGES, GROWING = 2, 5, 3

_append = jax.jit(block_tables.append_pages, static_argnames="max_new_pages")
free_request = jax.jit(block_tables.free_request)


def tables(num_blocks: int = 20):
    return init_tables(num_blocks, 1, 2, BATCH, PAGES)


def append(state, *new_pages: int):
    state, granted, status = _append(state, jnp.asarray(new_pages, jnp.int32), max_new_pages=PAGES)
    return state, np.asarray(granted).tolist(), [Status(int(s)).name for s in status]


def test_a_page_takes_one_block_in_every_growing_group():
    state, granted, _ = append(tables(), 2, 1)
    assert granted == [True, True]
    assert state.num_pages.tolist() == [2, 1]
    assert state.base[0].tolist() == [[1, 4, 0, 0, 0], [7, 0, 0, 0, 0]]
    assert state.resident[:, 0, :2].tolist() == [[2, 5], [3, 6]]
    state, _, _ = append(state, 0, 2)
    assert state.base[0, 1].tolist() == [7, 10, 13, 0, 0]


def test_all_or_nothing_and_nobody_overtakes():
    state = tables()
    after, granted, status = append(state, 4, 3)
    assert (granted, status) == ([True, False], ["OK", "OUT_OF_BLOCKS"])
    assert int(blocks_wanted(state, jnp.asarray([4, 3])) - state.pool.num_free) == 2
    _, granted, status = append(after, 1, 3)
    assert (granted, status) == ([True, False], ["OK", "OUT_OF_BLOCKS"])
    small, _, _ = append(tables(9), 1, 0)
    unchanged, granted, _ = append(small, 2, 1)
    assert granted == [False, False]
    chex.assert_trees_all_equal(unchanged, small)


@pytest.mark.parametrize("wrong", [-1, PAGES + 1, 2**31 - 1])
def test_a_count_that_fits_no_table_is_refused_alone(wrong):
    state, granted, status = append(tables(), wrong, 1)
    assert (granted, status) == ([False, True], ["REFUSED", "OK"])
    assert state.num_pages.tolist() == [0, 1]
    assert int(blocks_wanted(tables(), jnp.asarray([wrong, 1]))) == tables().growing_groups


def test_a_request_frees_its_last_page_first():
    state, _, _ = append(tables(7), 2, 0)
    state, status = free_request(state, jnp.int32(0))
    assert Status(int(status)) is Status.OK
    state, _, _ = append(state, 0, 2)
    assert state.base[0, 1, :2].tolist() == [4, 1]
    assert (state.resident[:, 0] == NULL_BLOCK).all()


@pytest.mark.parametrize("slot", [-1, BATCH, 2**31 - 1])
def test_a_slot_outside_the_batch_is_refused(slot):
    state, _, _ = append(tables(), 2, 1)
    after, status = free_request(state, jnp.int32(slot))
    assert Status(int(status)) is Status.REFUSED
    chex.assert_trees_all_equal(after, state)
