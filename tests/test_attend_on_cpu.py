"""The attention kernel's own source, run on a CPU: the checks of the gpu tests, with warps in any order.

A kernel that lacks one of its barriers is seen (`slow`).
"""

import ctypes
import functools

import ml_dtypes
import numpy as np
import pytest
from kernels_on_cpu import KERNELS, call, compiled, fails, without
from test_sparse_attention import (
    Shape,
    assert_close,
    check_a_nan_key,
    check_every_key,
    check_large_scores,
    check_no_key_at_all,
    check_no_sink,
    paged_inputs,
)

HEADERS = "attend_kernel", "cuda_block"
KERNEL = (KERNELS / "attend_kernel.h").read_text()
EVERY, FIRST = ("__syncthreads();", "WaitForProducts();", "WaitForGroups<0>();", "blocks.sync();"), ("WaitForGroups<1>();",)
NEEDED = [each for statement in EVERY for each in [statement] * KERNEL.count(statement)] + list(FIRST)
"""Statements without which the kernel is wrong: barriers, waits for products and for copies, the meetings of a cluster."""

SHAPES = {
    "uneven": Shape(),
    "several tiles": Shape(requests=2, query_rows=1, heads=17, columns=300, width=70, ring=70),
    "two blocks of heads": Shape(requests=2, query_rows=1, heads=70, columns=70),
    "no entries": Shape(columns=0, requests=2),
    "no window": Shape(width=0, ring=1, requests=2),
}


def attend(library, q, window, positions, slab, rows, lengths, sink, *, cluster: int, seed: int = 1, **place):
    """`sparse_attention` by the kernel of a library, with `cluster` blocks a query."""
    operands = [np.ascontiguousarray(x) for x in (q, window, positions, slab, rows, lengths, sink)]
    requests, query_rows, num_heads, _ = q.shape
    sizes = [
        slab.shape[1], place["offset"], slab.shape[0], num_heads, requests * query_rows, query_rows, window.shape[1],
        place["window_width"], rows.shape[2], place["page_entries"], place["row_step"], cluster, seed,
    ]  # fmt: skip
    out = np.full(q.shape, np.nan, ml_dtypes.bfloat16)
    call(library.attend, *operands, out, np.asarray(sizes, np.int64))
    return out


@pytest.fixture(scope="module")
def library(tmp_path_factory) -> ctypes.CDLL:
    return compiled(tmp_path_factory.mktemp("kernel"), "attend", *HEADERS)


@pytest.mark.parametrize("cluster", [1, 2, 8])
class TestOnACpu:
    @pytest.fixture
    def run(self, library, cluster):
        return functools.partial(attend, library, cluster=cluster)

    @pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
    def test_equals_numpy_whatever_warps_run_first(self, run, shape):
        inputs = paged_inputs(np.random.default_rng([shape.requests, shape.heads]), shape)
        assert_all_close([run(*inputs.operands, **shape.place, seed=seed) for seed in (1, 2)], inputs.expected())

    def test_edges(self, run):
        check_every_key(run, heads=37, width=12, columns=140)
        check_a_nan_key(run, Shape(requests=2))
        check_no_key_at_all(run)
        check_no_sink(run)
        check_large_scores(run, Shape(requests=2))


@pytest.mark.slow
@pytest.mark.parametrize("number", range(len(NEEDED)), ids=[f"{i}-{statement}" for i, statement in enumerate(NEEDED)])
def test_a_missing_barrier_is_seen(tmp_path, number):
    statement, before = NEEDED[number], NEEDED[:number].count(NEEDED[number])
    broken = compiled(tmp_path, "attend", *HEADERS, changed={"attend_kernel": without(KERNEL, statement, before)})
    shape = SHAPES["several tiles"]
    inputs = paged_inputs(np.random.default_rng(0), shape)

    def check():
        runs = [attend(broken, *inputs.operands, **shape.place, cluster=2, seed=seed) for seed in range(8)]
        assert_all_close(runs, inputs.expected())

    assert fails(check)


def assert_all_close(runs: list[np.ndarray], want: np.ndarray) -> None:
    """Every run is right, and all are equal in every bit."""
    for run in runs:
        assert_close(run, want)
        np.testing.assert_array_equal(run.view(np.uint16), runs[0].view(np.uint16))
