"""The pool against examples, its edges, and a plain queue under any sequence of calls."""

import chex
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from hisparse_jax import block_pool
from hisparse_jax.block_pool import BlockPool, init_pool
from hisparse_jax.status import NULL_BLOCK, Status

NUM_BLOCKS, MAX_COUNT, NUM_IDS = 9, 5, 6
BAD_IDS = (-1, -(2**31), NUM_BLOCKS, NUM_BLOCKS + 1, 2**31 - 1)

allocate = jax.jit(block_pool.allocate, static_argnames="max_count")
free = jax.jit(block_pool.free)
touch = jax.jit(block_pool.touch)


def queue(pool: BlockPool) -> list[int]:
    """Free blocks in the order in which they will leave."""
    ring, stamps, stamp = np.asarray(pool.ring), np.asarray(pool.ring_stamp), np.asarray(pool.stamp)
    places = [(int(pool.head) + i) % len(ring) for i in range(int(pool.num_items))]
    return [int(ring[p]) for p in places if stamps[p] == stamp[ring[p]]]


def ids(*block_ids: int):
    return jnp.asarray(list(block_ids) + [NULL_BLOCK] * (NUM_IDS - len(block_ids)), jnp.int32)


def take(pool: BlockPool, count: int):
    pool, block_ids, status = allocate(pool, jnp.int32(count), max_count=MAX_COUNT)
    return pool, np.asarray(block_ids).tolist(), Status(int(status))


def test_fresh_pool_gives_ascending_ids_and_never_the_null_block():
    pool, first, _ = take(init_pool(NUM_BLOCKS), 3)
    pool, second, status = take(pool, 5)
    assert (first, second, status) == ([1, 2, 3, 0, 0], [4, 5, 6, 7, 8], Status.OK)
    assert int(pool.num_free) == 0


@pytest.mark.parametrize(("count", "expected"), [(5, "OUT_OF_BLOCKS"), (-1, "REFUSED"), (MAX_COUNT + 1, "REFUSED")])
def test_refused_allocation_leaves_the_pool_untouched(count, expected):
    pool, _, _ = take(init_pool(NUM_BLOCKS), 4)
    pool, _, _ = take(pool, 1)
    after, block_ids, status = take(pool, count)
    assert (block_ids, status.name) == ([NULL_BLOCK] * MAX_COUNT, expected)
    chex.assert_trees_all_equal(after, pool)


def test_freed_blocks_queue_up_in_the_order_given():
    pool, _, _ = take(init_pool(NUM_BLOCKS), 4)
    pool, status = free(pool, ids(3, NULL_BLOCK, 1, 2))
    assert (queue(pool), Status(int(status))) == ([5, 6, 7, 8, 3, 1, 2], Status.OK)


def test_a_block_with_two_references_leaves_with_its_last():
    pool, _, _ = take(init_pool(NUM_BLOCKS), 3)
    pool, _ = touch(pool, ids(1, 1, 2))
    pool, _ = free(pool, ids(1, 3, 2))
    assert queue(pool)[-1] == 3
    pool, _ = free(pool, ids(1, 2, 1))
    assert queue(pool)[-2:] == [2, 1]


@pytest.mark.parametrize("bad", BAD_IDS)
@pytest.mark.parametrize("call", [free, touch])
def test_an_id_outside_the_pool_is_refused(call, bad):
    pool, _, _ = take(init_pool(NUM_BLOCKS), 5)
    after, status = call(pool, ids(1, bad, 2))
    assert Status(int(status)) is Status.BAD_BLOCK
    chex.assert_trees_all_equal(after, pool)


@pytest.mark.parametrize("block_ids", [(1, 1), (1, 8), (8,)])
def test_d10_a_double_free_is_refused_whole(block_ids):
    pool, _, _ = take(init_pool(NUM_BLOCKS), 5)
    after, status = free(pool, ids(*block_ids))
    assert Status(int(status)) is Status.DOUBLE_FREE
    chex.assert_trees_all_equal(after, pool)


def test_a_block_taken_back_from_the_middle_is_passed_over():
    pool, _ = touch(init_pool(NUM_BLOCKS), ids(2, 3))
    assert int(pool.num_free) == 6
    pool, block_ids, _ = take(pool, 3)
    assert block_ids == [1, 4, 5, 0, 0]
    pool, _ = free(pool, ids(3, 2))
    assert queue(pool) == [6, 7, 8, 3, 2]


def test_stale_items_are_swept_out_before_the_ring_overflows():
    pool = init_pool(NUM_BLOCKS)
    for _ in range(4 * NUM_BLOCKS):
        pool, _ = touch(pool, ids(2, 7))
        pool, _ = free(pool, ids(2, 7))
    assert queue(pool) == [1, 3, 4, 5, 6, 8, 2, 7]
    assert int(pool.num_items) <= pool.ring.shape[0]


def test_an_empty_pool_is_refused_by_name():
    with pytest.raises(ValueError, match="num_blocks=1"):
        init_pool(1)


class PoolMachine(RuleBasedStateMachine):
    """Any sequence of calls, poisoned ids among them, against a list and a dict."""

    def __init__(self):
        super().__init__()
        self.pool = init_pool(NUM_BLOCKS)
        self.order = list(range(1, NUM_BLOCKS))
        self.holders = dict.fromkeys(self.order, 0)

    @rule(count=st.integers(-1, MAX_COUNT + 1))
    def take(self, count):
        self.pool, block_ids, status = traced_allocate(self.pool, jnp.int32(count))
        if not 0 <= count <= MAX_COUNT:
            expected, granted = Status.REFUSED, []
        elif count > len(self.order):
            expected, granted = Status.OUT_OF_BLOCKS, []
        else:
            expected, granted = Status.OK, self.order[:count]
        del self.order[: len(granted)]
        self.holders.update(dict.fromkeys(granted, 1))
        assert np.asarray(block_ids).tolist() == granted + [NULL_BLOCK] * (MAX_COUNT - len(granted))
        assert Status(int(status)) is expected

    @rule(data=st.data())
    def give_back(self, data):
        held = [i for i, n in self.holders.items() for _ in range(n)]
        entries = data.draw(st.permutations(held).map(lambda x: x[:NUM_IDS])) if held else []
        self._free(entries)

    @rule(entries=st.lists(st.integers(0, NUM_BLOCKS - 1), max_size=NUM_IDS))
    def give_back_anything(self, entries):
        self._free(entries)

    @rule(entries=st.lists(st.sampled_from((*BAD_IDS, 1, 2)), min_size=1, max_size=NUM_IDS))
    def give_back_poison(self, entries):
        self._free(entries)

    @rule(entries=st.lists(st.integers(0, NUM_BLOCKS - 1) | st.sampled_from(BAD_IDS), max_size=NUM_IDS))
    def touch(self, entries):
        self.pool, status = traced_touch(self.pool, ids(*entries))
        bad = any(i in BAD_IDS for i in entries)
        assert Status(int(status)) is (Status.BAD_BLOCK if bad else Status.OK)
        for i in [] if bad else entries:
            if i != NULL_BLOCK:
                self.holders[i] += 1
        self.order = [i for i in self.order if self.holders[i] == 0]

    def _free(self, entries):
        self.pool, status = traced_free(self.pool, ids(*entries))
        named = [i for i in entries if i != NULL_BLOCK]
        if any(i in BAD_IDS for i in named):
            expected = Status.BAD_BLOCK
        elif any(named.count(i) > self.holders[i] for i in named):
            expected = Status.DOUBLE_FREE
        else:
            expected = Status.OK
            for i in named:
                self.holders[i] -= 1
                if self.holders[i] == 0:
                    self.order.append(i)
        assert Status(int(status)) is expected

    @invariant()
    def agrees(self):
        assert queue(self.pool) == self.order
        assert int(self.pool.num_free) == len(self.order)
        assert self.pool.references.tolist() == [0] + [self.holders[i] for i in range(1, NUM_BLOCKS)]
        assert int(self.pool.num_items) <= self.pool.ring.shape[0]


def _allocate(pool, count):
    return block_pool.allocate(pool, count, max_count=MAX_COUNT)


chex.clear_trace_counter()
traced_allocate = jax.jit(chex.assert_max_traces(_allocate, n=1))
traced_free = jax.jit(chex.assert_max_traces(block_pool.free, n=1))
traced_touch = jax.jit(chex.assert_max_traces(block_pool.touch, n=1))

TestPool = PoolMachine.TestCase
TestPool.settings = settings(max_examples=40, stateful_step_count=25, deadline=None)
