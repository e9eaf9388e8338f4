"""Sinkhorn normalisation by Pallas, interpreted, and by the reference, against plain numpy in float64."""

import numpy as np
import pytest

from pallas_kernels.sinkhorn import sinkhorn


def matrices(*shape: int) -> np.ndarray:
    return np.exp(np.random.default_rng(0).normal(size=shape)).astype(np.float32)


def normalised(matrix: np.ndarray, iterations: int, eps: float) -> np.ndarray:
    """Columns, then rows and columns `iterations - 1` times."""
    m = matrix.astype(np.float64)
    for turn in range(2 * iterations - 1):
        m /= m.sum(axis=-1 if turn % 2 else -2, keepdims=True) + eps
    return m


@pytest.mark.parametrize(
    "options", [dict(implementation="xla"), dict(implementation="pallas", interpret=True)], ids=["xla", "pallas"]
)
@pytest.mark.parametrize(("shape", "iterations"), [((5, 4, 4), 20), ((2, 33, 4, 4), 1), ((64, 2, 2), 3), ((1, 8, 8), 20)])
def test_equals_numpy(options, shape, iterations):
    m = matrices(*shape)
    got = np.asarray(sinkhorn(m, iterations, 1e-6, **options))
    np.testing.assert_allclose(got, normalised(m, iterations, 1e-6), rtol=3e-6)


def test_is_doubly_stochastic_and_ends_on_columns():
    mixed = np.asarray(sinkhorn(matrices(5, 4, 4), 20, 1e-6))
    np.testing.assert_allclose(mixed.sum(axis=-2), 1, atol=1e-5)
    np.testing.assert_allclose(mixed.sum(axis=-1), 1, atol=1e-3)


def test_edges():
    assert sinkhorn(np.zeros((0, 4, 4), np.float32), 20, 1e-6).shape == (0, 4, 4)
    wide = matrices(2, 9, 9)
    np.testing.assert_allclose(sinkhorn(wide, 2, 0.0), normalised(wide, 2, 0.0), rtol=3e-6)
    with pytest.raises(ValueError, match="n=9 exceeds 8"):
        sinkhorn(wide, 2, 0.0, implementation="pallas")
    with pytest.raises(ValueError, match="iterations=0 must be at least 1"):
        sinkhorn(wide, 0, 0.0)


@pytest.mark.gpu
@pytest.mark.parametrize("count", [1, 64, 2_049])
def test_pallas_on_a_gpu_equals_numpy(count):
    m = matrices(count, 4, 4)
    np.testing.assert_allclose(sinkhorn(m, 20, 1e-6, implementation="pallas"), normalised(m, 20, 1e-6), rtol=1e-5)
