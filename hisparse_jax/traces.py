"""Selections with the locality of real ones: what a benchmark feeds to resolve and swap-in instead of random numbers.

A request's entries stand in order of last use. A step takes some of the K used in the step before (retention), some that
left a buffer of S slots (misses), and the rest from between, the recent ones more often. The order changes as the LRU rule
changes it, so a buffer of S slots misses exactly what was drawn as a miss, from the first step on if it starts with
`Trace.held`; smaller buffers miss more, larger ones less.

Source: published measurements of a compressed cache with K = 512: step-to-step retention 66.4 %, misses by buffer size.
"""

import dataclasses

import numpy as np
from jaxtyping import Int32

from hisparse_jax.config import ConfigError

RETENTION = 0.664
"""Share of a selection that the next one keeps, on average; 0.60 to 0.74 by layer."""

MISS_RATES = {1: 0.3356, 2: 0.1656, 3: 0.1031, 4: 0.0711, 8: 0.0241}
"""Misses as a share of K, by slots / K."""


@dataclasses.dataclass(frozen=True)
class Trace:
    """
    topk: i32[steps, B, K]  ascending entry numbers, distinct within a row.
    held: i32[B, S]         what a warm buffer holds before the first step, in LRU order: the next victim first.
    """

    topk: Int32[np.ndarray, "steps B K"]
    held: Int32[np.ndarray, "B S"]


def miss_rate_of(slots_per_top_k: float) -> float:
    """`MISS_RATES` between its points, on a line in the logarithm; the ends hold beyond them."""
    return float(np.exp(np.interp(slots_per_top_k, list(MISS_RATES), np.log(list(MISS_RATES.values())))))


def make_trace(
    num_steps: int,
    batch: int,
    top_k: int,
    num_entries: int,
    num_slots: int,
    *,
    miss_rate: float | None = None,
    retention: float = RETENTION,
    seed: int = 0,
) -> Trace:
    """`num_steps` selections of `top_k` among `num_entries` per request, the same for the same seed on any machine.

    `miss_rate` is the share of `top_k` that `num_slots` hot slots miss, by default what was published for that size. Where
    both cannot be, misses go before retention.
    """
    miss_rate = miss_rate_of(num_slots / top_k) if miss_rate is None else miss_rate
    if not 0 <= miss_rate <= 1 or not 0 <= retention <= 1:
        raise ConfigError(f"{miss_rate=} and {retention=} are shares of top_k; choose both from 0 to 1.")
    if num_slots < top_k:
        raise ConfigError(f"{num_slots=} holds less than one selection, {top_k=}; raise num_slots.")
    if num_entries < num_slots + top_k:
        raise ConfigError(f"{num_entries=} leaves nothing to miss beside {num_slots=}; at least {num_slots + top_k}.")
    requests = [np.random.default_rng([seed, b]) for b in range(batch)]
    orders = [rng.permutation(num_entries).astype(np.int32) for rng in requests]  # next victim first
    held = np.stack([order[-num_slots:] for order in orders])
    weights = _weights(top_k, num_slots, miss_rate, retention)
    topk = np.empty((num_steps, batch, top_k), np.int32)
    for step in range(num_steps):
        for b, rng in enumerate(requests):
            places = _draw(rng, num_entries, top_k, num_slots, miss_rate, retention, weights)
            topk[step, b] = np.sort(orders[b][places])
            orders[b] = _use(orders[b], places, num_slots)
    return Trace(topk, held)


def _weights(top_k: int, num_slots: int, miss_rate: float, retention: float) -> np.ndarray:
    """Of the places between the last selection and the end of the buffer, the most recent first: a geometric decay."""
    between = num_slots - top_k
    decay = max(miss_rate, 1e-3) / max(1 - retention, 1e-3)
    return min(decay, 1.0) ** (np.arange(between) / max(between, 1))


def _draw(rng, num_entries: int, top_k: int, num_slots: int, miss_rate: float, retention: float, weights) -> np.ndarray:
    """Places in the order, distinct: misses before the buffer, retained ones at its end, the others between."""
    between = len(weights)
    num_misses = rng.binomial(top_k, miss_rate)
    kept_share = min(retention / max(1 - miss_rate, 1e-9), 1.0)
    num_kept = max(rng.binomial(top_k - num_misses, kept_share), top_k - num_misses - between)
    num_others = top_k - num_misses - num_kept
    misses = rng.choice(num_entries - num_slots, num_misses, replace=False)
    kept = num_entries - 1 - rng.choice(top_k, num_kept, replace=False)
    urgency = rng.exponential(size=between) / weights  # the smallest of these are a weighted draw without replacement
    others = num_entries - 1 - top_k - np.argsort(urgency, kind="stable")[:num_others]
    return np.concatenate((misses, others, kept))


def _use(order: np.ndarray, places: np.ndarray, num_slots: int) -> np.ndarray:
    """The order after a step: unused | missed, ascending | hit, in their old order."""
    is_used = np.zeros(order.size, bool)
    is_used[places] = True
    hits = order[-num_slots:][is_used[-num_slots:]]
    missed = np.sort(order[:-num_slots][is_used[:-num_slots]])
    return np.concatenate((order[~is_used], missed, hits))
