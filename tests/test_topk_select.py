"""Top-k selection against a sort in plain Python: exact sets, ties, signed zeros, short rows."""

import math

import chex
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels.topk_select import topk_select


def expected(scores, length, k):
    """Ascending numbers of the k best; ties to the lower, NaN as -inf."""
    rank = [(-(-math.inf if math.isnan(s) else s) + 0.0, j) for j, s in enumerate(scores[: max(length, 0)])]
    best = sorted(j for _, j in sorted(rank)[:k])
    return best + [-1] * (k - len(best))


def select(scores, lengths, k):
    return np.asarray(topk_select(jnp.asarray(scores, jnp.float32), jnp.asarray(lengths, jnp.int32), k))


SPECIAL = [0.0, -0.0, 1.0, -1.0, math.inf, -math.inf, math.nan, 1e-45, -1e-45, 3e38]


@settings(max_examples=200, deadline=None)
@given(
    scores=st.lists(st.lists(st.sampled_from(SPECIAL), min_size=12, max_size=12), min_size=3, max_size=3),
    lengths=st.lists(st.integers(0, 12), min_size=3, max_size=3),
)
def test_agrees_with_a_sort(scores, lengths):
    scores = [[0.0 if 0 < abs(s) < 1e-40 else s for s in line] for line in scores]  # XLA on a CPU flushes subnormals
    assert select(scores, lengths, 5).tolist() == [expected(line, n, 5) for line, n in zip(scores, lengths)]


def test_ties_go_to_the_lower_entry_and_zeros_are_equal():
    assert select([[-0.0, 0.0, -0.0, 0.0, -1.0]], [5], 2).tolist() == [[0, 1]]
    assert select([[1.0, 2.0, 2.0, 2.0, 1.0]], [5], 2).tolist() == [[1, 2]]
    assert select([[-math.inf] * 4], [3], 2).tolist() == [[0, 1]]


def test_columns_past_the_length_do_not_matter():
    clean, poisoned = np.arange(16.0)[None].repeat(2, 0), np.arange(16.0)[None].repeat(2, 0)
    poisoned[0, 7:], poisoned[1, 7:] = math.nan, math.inf
    chex.assert_trees_all_equal(select(poisoned, [7, 7], 4), select(clean, [7, 7], 4))
    assert select(poisoned, [7, 0], 4).tolist() == [[3, 4, 5, 6], [-1] * 4]


def test_e3_short_rows_equal_their_single_row_result_in_any_order():
    k, size, rng = 8, 64, np.random.default_rng(0)
    lengths = np.array([0, 1, k - 1, k, k + 1, size, -3, size + 5])
    scores = rng.normal(size=(len(lengths), size)).astype(np.float32)
    alone = [expected(line.tolist(), int(n), k) for line, n in zip(scores, lengths)]
    for order in (np.arange(len(lengths)), np.arange(len(lengths))[::-1], rng.permutation(len(lengths))):
        assert select(scores[order], lengths[order], k).tolist() == [alone[i] for i in order]


def test_e2_exact_far_out():
    size, k, rng = 325_000, 512, np.random.default_rng(1)
    scores = rng.normal(size=size).astype(np.float32).round(3)  # many ties
    lengths = [2**17 - 1, 2**17, 2**18 - 1, 2**18 + 1, size - 1, size]
    best = select(np.broadcast_to(scores, (len(lengths), size)), lengths, k)
    for line, length in zip(best, lengths):
        order = np.argsort(-scores[:length], kind="stable")[:k]
        assert line.tolist() == sorted(order.tolist())


def test_leading_axes_and_more_slots_than_columns():
    scores = np.arange(12.0).reshape(2, 1, 6)
    assert select(scores, [[2], [9]], 8).tolist() == [[[0, 1] + [-1] * 6], [[0, 1, 2, 3, 4, 5, -1, -1]]]
    assert topk_select(jnp.zeros((2, 4), jnp.bfloat16), jnp.array([3, 1]), 2).tolist() == [[0, 1], [0, -1]]


@pytest.mark.parametrize(("size", "k", "tile"), [(12, 5, None), (100, 16, 32), (64, 80, 16), (5, 5, None)])
def test_the_pallas_kernel_agrees_with_the_reference(size, k, tile):
    rng = np.random.default_rng(size)
    for scores in (rng.choice(SPECIAL[:7], (6, size)), rng.normal(size=(6, size)), rng.normal(size=(6, size)).round()):
        lengths = jnp.asarray(rng.integers(-2, size + 3, 6), jnp.int32)
        scores = jnp.asarray(scores, jnp.float32)
        expected = topk_select(scores, lengths, k, implementation="xla")
        result = topk_select(scores, lengths, k, implementation="pallas", tile=tile, interpret=True)
        chex.assert_trees_all_equal(result, expected)


def test_refuses_what_selects_nothing_sensible():
    with pytest.raises(ValueError, match="k=-1 must not be negative"):
        topk_select(jnp.zeros((2, 8)), jnp.zeros(2, jnp.int32), -1)


def test_refuses_an_unknown_implementation():
    with pytest.raises(ValueError, match="implementation='mosaic' is unknown; choose from 'xla', 'pallas', 'cuda', or None"):
        topk_select(jnp.zeros((1, 4)), jnp.array([4]), 2, implementation="mosaic")
