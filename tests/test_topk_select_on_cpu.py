"""The kernels of top-k, their own source, run on a CPU: scores of every kind against numpy, with warps in any order."""

import ctypes

import numpy as np
import pytest
from kernels_on_cpu import KERNELS, call, compiled, fails, without
from test_topk_select_gpu import KINDS, lengths_of, scores_of

HEADERS = "topk_whole", "topk_parts", "topk_block", "cuda_block"
SOURCES = {header: (KERNELS / f"{header}.h").read_text() for header in HEADERS}
OF_CLUSTERS = {("topk_parts", 3), ("topk_parts", 4)}
"""Barriers that a block does not come to where it has a row alone, as here."""
BARRIERS = {(header, number) for header in HEADERS for number in range(SOURCES[header].count("__syncthreads();"))} - OF_CLUSTERS


@pytest.fixture(scope="module")
def library(tmp_path_factory) -> ctypes.CDLL:
    return compiled(tmp_path_factory.mktemp("kernel"), "topk", *HEADERS)


def select(library, scores: np.ndarray, lengths: np.ndarray, k: int, *, whole: bool, seed: int = 1) -> np.ndarray:
    """`topk_select` by a kernel of a library: one that keeps a row in registers, or one that reads it twice."""
    selected = np.full((len(scores), k), -77, np.int32)
    call(library.topk, scores, lengths, selected, np.asarray([*scores.shape, k, seed, whole], np.int64))
    return selected


def best_of(scores: np.ndarray, lengths: np.ndarray, k: int) -> np.ndarray:
    """The rule: NaN counts as -inf, ties go to the lower number, numbers ascend, then -1."""
    best = np.full((len(scores), k), -1)
    for row, (line, length) in enumerate(zip(scores, np.clip(lengths, 0, scores.shape[1]))):
        order = np.argsort(-np.where(np.isnan(line[:length]), -np.inf, line[:length]), kind="stable")[:k]
        best[row, : len(order)] = np.sort(order)
    return best


def check(library, size: int, k: int, whole: bool, kinds=KINDS, seeds=(1, 2)) -> None:
    rng = np.random.default_rng([size, k])
    for kind in kinds:
        scores = np.ascontiguousarray(scores_of(kind, rng, 2, size), np.float32)
        lengths = np.array([size, *lengths_of(rng, 1, size, k)], np.int32)
        for seed in seeds:
            got = select(library, scores, lengths, k, whole=whole, seed=seed)
            np.testing.assert_array_equal(got, best_of(scores, lengths, k), err_msg=kind)


SHAPES = [(40, 7, True), (4_096, 512, True), (4_094, 1_024, True), (5_000, 64, False), (9_001, 512, False)]


@pytest.mark.parametrize(("size", "k", "whole"), SHAPES)
def test_equals_numpy_whatever_warps_run_first(library, size, k, whole):
    check(library, size, k, whole)


@pytest.mark.slow
@pytest.mark.parametrize(("header", "number"), sorted(BARRIERS))
def test_a_missing_barrier_is_seen(tmp_path, header, number):
    changed = {header: without(SOURCES[header], "__syncthreads();", number)}
    broken = compiled(tmp_path, "topk", *HEADERS, changed=changed)
    assert fails(lambda: [check(broken, size, k, whole, seeds=range(4)) for size, k, whole in SHAPES])
