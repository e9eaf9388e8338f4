"""Top-k kernels against the reference on the same GPU, and against the reference on a CPU."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gpu import need

from pallas_kernels.topk_select import topk_select

pytestmark = pytest.mark.gpu

SPECIAL = np.array([0.0, -0.0, 1.0, -1.0, np.inf, -np.inf, np.nan, -np.nan, 1e-45, -1e-45, 3e38, -3e38], np.float32)


@pytest.fixture(params=["pallas", "cuda"])
def select(request):
    return functools.partial(topk_select, implementation=need(request.param, "topk_select"))


def scores_of(kind: str, rng, rows: int, size: int) -> np.ndarray:
    scores = rng.normal(size=(rows, size)).astype(np.float32)
    column = np.arange(size, dtype=np.float32)
    return {
        "normal": lambda: scores,
        "ties": lambda: scores.round(),
        "special": lambda: rng.choice(SPECIAL, scores.shape),
        "equal": lambda: np.zeros_like(scores),
        "rising": lambda: np.broadcast_to(column, scores.shape),
        "falling": lambda: np.broadcast_to(-column, scores.shape),
        "mostly_zero": lambda: np.where(rng.random(scores.shape) < 0.99, 0.0, scores).astype(np.float32),
        "one_block": lambda: np.where(column < size // 50 + 1, 1e6 + column, scores).astype(np.float32),
        "negative": lambda: scores - 8.0,
        "outliers": lambda: np.where(rng.random(scores.shape) < 0.001, scores * 1e30, scores).astype(np.float32),
        "any_bits": lambda: rng.integers(0, 2**32, scores.shape, np.uint32).view(np.float32),
    }[kind]()


KINDS = [
    "normal",
    "ties",
    "special",
    "equal",
    "rising",
    "falling",
    "mostly_zero",
    "one_block",
    "negative",
    "outliers",
    "any_bits",
]


def lengths_of(rng, rows: int, size: int, k: int) -> np.ndarray:
    edges = [0, 1, k - 1, k, k + 1, size - 1, size, size + 5, -3]
    return np.where(rng.random(rows) < 0.5, rng.choice(edges, rows), rng.integers(0, size + 1, rows)).astype(np.int32)


@pytest.mark.parametrize(("size", "k"), [(40, 7), (4_096, 512), (8_192, 512), (10_001, 64), (32_768, 512), (32_768, 1_024)])
def test_equals_the_reference_on_the_same_device(select, size, k):
    rng = np.random.default_rng(size + k)
    for kind in KINDS * 8:
        scores, lengths = jnp.asarray(scores_of(kind, rng, 16, size)), jnp.asarray(lengths_of(rng, 16, size, k))
        chex.assert_trees_all_equal(select(scores, lengths, k), topk_select(scores, lengths, k, implementation="xla"))


@pytest.mark.parametrize(("size", "k", "ctas"), [(40, 7, 1), (1_500, 64, 1), (5_000, 512, 2), (40_000, 512, 1)])
def test_small_rows_by_cuda_equal_the_reference(size, k, ctas):
    """Few enough rows for a race checker: every way through the kernel, rows of one kind at a time."""
    need("cuda", "topk_select")
    rng, lengths = np.random.default_rng(size), jnp.asarray([size, size - 3])
    for kind in ("normal", "equal", "mostly_zero", "special"):
        scores = scores_of(kind, rng, 2, size)
        with jax.default_device(jax.devices("cpu")[0]):
            expected = topk_select(jnp.asarray(scores), jnp.asarray(np.asarray(lengths)), k, implementation="xla")
        got = topk_select(jnp.asarray(scores), lengths, k, implementation="cuda", ctas_per_row=ctas)
        chex.assert_trees_all_equal(np.asarray(got), np.asarray(expected))


@pytest.mark.parametrize(("size", "k"), [(65_536, 2_048), (262_144, 512), (262_147, 512), (325_000, 512)])
def test_equals_the_reference_far_out(select, size, k):
    rng = np.random.default_rng(size)
    for kind in ("normal", "ties", "mostly_zero", "falling"):
        scores, lengths = jnp.asarray(scores_of(kind, rng, 9, size)), jnp.asarray(lengths_of(rng, 9, size, k))
        chex.assert_trees_all_equal(select(scores, lengths, k), topk_select(scores, lengths, k, implementation="xla"))


def test_thousands_of_rows_equal_the_result_on_a_cpu(select):
    rng = np.random.default_rng(1)
    scores, lengths = scores_of("ties", rng, 2_048, 1_000) / 3, lengths_of(rng, 2_048, 1_000, 100)
    with jax.default_device(jax.devices("cpu")[0]):
        expected = topk_select(jnp.asarray(scores), jnp.asarray(lengths), 100, implementation="xla")
    chex.assert_trees_all_equal(np.asarray(select(jnp.asarray(scores), jnp.asarray(lengths), 100)), np.asarray(expected))


def test_bfloat16_scores(select):
    rng = np.random.default_rng(2)
    for size in (100, 8_192, 32_768, 32_770):
        scores = jnp.asarray(scores_of("normal", rng, 8, size), jnp.bfloat16)
        lengths = jnp.asarray(lengths_of(rng, 8, size, 64))
        chex.assert_trees_all_equal(select(scores, lengths, 64), topk_select(scores, lengths, 64, implementation="xla"))


def test_any_number_of_blocks_per_row_gives_the_same():
    need("cuda", "topk_select")
    rng = np.random.default_rng(3)
    for kind in KINDS:
        scores, lengths = jnp.asarray(scores_of(kind, rng, 8, 20_000)), jnp.asarray(lengths_of(rng, 8, 20_000, 512))
        expected = topk_select(scores, lengths, 512, implementation="xla")
        for ctas in range(1, 9):
            chex.assert_trees_all_equal(topk_select(scores, lengths, 512, implementation="cuda", ctas_per_row=ctas), expected)


def test_the_default_can_be_captured_and_repeats_itself(select):
    scores = jnp.asarray(scores_of("ties", np.random.default_rng(4), 8, 5_000))

    @jax.jit
    def repeat(scores):
        def body(i, carry):
            total, first = carry
            best = select(scores, jnp.full(8, 4_900), 256)
            return total + (best != first).sum(), best

        start = jnp.int32(0), select(scores, jnp.full(8, 4_900), 256)
        return jax.lax.fori_loop(0, 50, body, start)[0]

    assert int(repeat(scores)) == 0
