"""The trace generator against the replacement oracle: miss rates, retention, shape of the selections."""

import chex
import numpy as np
import pytest
import resolve_oracle as oracle

from hisparse_jax.config import ConfigError
from hisparse_jax.traces import MISS_RATES, RETENTION, make_trace, miss_rate_of

TOP_K, ENTRIES = 64, 2_048


def misses_of(trace, request: int, num_slots: int) -> np.ndarray:
    """Misses per step of a buffer of `num_slots` that starts with the most recent of `trace.held`."""
    region = oracle.HotRegion(num_slots)
    for slot, entry in enumerate(trace.held[request, -num_slots:].tolist()):
        region.slots[slot] = entry
    return np.array([len(region.swap(step)[1]) for step in trace.topk[:, request].tolist()])


@pytest.mark.parametrize("ratio", [1, 2, 4, 8])
def test_a_buffer_misses_what_was_published_for_its_size(ratio):
    trace = make_trace(150, 2, TOP_K, ENTRIES, ratio * TOP_K, seed=3)
    misses = np.stack([misses_of(trace, b, ratio * TOP_K) for b in range(2)])
    assert misses.mean() / TOP_K == pytest.approx(MISS_RATES[ratio], rel=0.1)
    assert misses[:, :20].mean() / TOP_K == pytest.approx(MISS_RATES[ratio], rel=0.4)  # warm from the first step on


def test_smaller_buffers_miss_more_and_recent_entries_are_used_more():
    trace = make_trace(150, 1, TOP_K, ENTRIES, 4 * TOP_K)
    rates = [misses_of(trace, 0, n * TOP_K).mean() / TOP_K for n in (1, 2, 3, 4)]
    assert rates[0] > 1.5 * rates[1] > 1.5 * rates[2] > rates[3] > 0.05
    kept = [len(np.intersect1d(a, b)) / TOP_K for a, b in zip(trace.topk[:-1, 0], trace.topk[1:, 0])]
    assert np.mean(kept) == pytest.approx(RETENTION, abs=0.03) and rates[0] == pytest.approx(1 - RETENTION, abs=0.04)


@pytest.mark.parametrize("miss_rate", [0.0, 0.05, 0.2, 1.0])
def test_the_wanted_miss_rate(miss_rate):
    trace = make_trace(100, 1, TOP_K, ENTRIES, 8 * TOP_K, miss_rate=miss_rate)
    assert misses_of(trace, 0, 8 * TOP_K).mean() / TOP_K == pytest.approx(miss_rate, abs=0.02)


def test_rows_are_ascending_distinct_in_range_and_reproducible():
    trace = make_trace(10, 3, TOP_K, ENTRIES, 2 * TOP_K, seed=5)
    assert trace.topk.shape == (10, 3, TOP_K) and trace.topk.dtype == np.int32 and trace.held.shape == (3, 2 * TOP_K)
    assert (np.diff(trace.topk, axis=-1) > 0).all() and trace.topk.min() >= 0 and trace.topk.max() < ENTRIES
    again = make_trace(10, 2, TOP_K, ENTRIES, 2 * TOP_K, seed=5)  # a request does not depend on its companions
    chex.assert_trees_all_equal(again.topk, trace.topk[:, :2])
    assert (make_trace(10, 3, TOP_K, ENTRIES, 2 * TOP_K, seed=6).topk != trace.topk).any()


def test_refuses_what_cannot_be():
    assert miss_rate_of(6.0) == pytest.approx(0.0414, abs=0.001)
    with pytest.raises(ConfigError, match="num_slots=32 holds less than one selection, top_k=64"):
        make_trace(1, 1, TOP_K, ENTRIES, 32)
    with pytest.raises(ConfigError, match="num_entries=100 leaves nothing to miss beside num_slots=64; at least 128"):
        make_trace(1, 1, TOP_K, 100, 64)
    with pytest.raises(ConfigError, match="miss_rate=1.5"):
        make_trace(1, 1, TOP_K, ENTRIES, 64, miss_rate=1.5)
