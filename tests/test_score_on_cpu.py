"""The kernel of index scores, its own source, run on a CPU: the checks of the gpu tests."""

import functools

import ml_dtypes
import numpy as np
import pytest
from kernels_on_cpu import call, compiled
from test_index_scores import assert_scores, check_a_nan_key, check_pages_that_are_not_there, expected, inputs, paged_keys


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    return compiled(tmp_path_factory.mktemp("kernel"), "score", "score_kernel", "cuda_block")


def score(library, slab, blocks, queries, weights, lengths, *, page_entries: int, offset: int, tiles: int, seed: int = 1):
    """`index_scores` by the kernel, each warp with `tiles` times 16 entries."""
    requests, query_rows, heads, channels = queries.shape
    scores = np.full((requests, query_rows, blocks.shape[1] * page_entries), np.inf, np.float32)
    sizes = [
        slab.shape[1], offset, len(slab), blocks.shape[1], page_entries, query_rows, tiles, requests * query_rows, heads,
        channels, seed,
    ]  # fmt: skip
    packed = np.ascontiguousarray(queries.astype(ml_dtypes.float8_e4m3fn)).view(np.uint8)
    assert call(library.score, slab, blocks, packed, weights, lengths, scores, np.asarray(sizes, np.int64)) & 1
    return scores


@pytest.mark.parametrize("tiles", [1, 3])
@pytest.mark.parametrize(
    ("heads", "channels", "page_entries", "requests", "query_rows", "pages"),
    [(8, 128, 16, 2, 1, 35), (64, 128, 64, 3, 2, 3), (32, 256, 32, 2, 1, 9)],
)
def test_equals_numpy_for_ragged_requests(library, heads, channels, page_entries, requests, query_rows, pages, tiles):
    rng = np.random.default_rng([heads, channels, page_entries])
    stride, place = page_entries * (channels + 4) + 160, dict(page_entries=page_entries, offset=48)
    slab, blocks, keys = paged_keys(rng, requests=requests, pages=pages, channels=channels, stride=stride, **place)
    columns = pages * page_entries
    lengths = np.array([columns, 0, columns // 2 + 3][:requests], np.int32)
    queries, weights = inputs(rng, requests=requests, query_rows=query_rows, heads=heads, channels=channels)
    want = expected(queries, weights, keys[blocks].reshape(requests, columns, channels))
    for request, length in enumerate(lengths):  # what no entry needs may name anything
        blocks[request, -(-length // page_entries) :] = rng.choice([0, -1, len(slab), 2**31 - 1, -(2**31)])
    got = [score(library, slab, blocks, queries, weights, lengths, **place, tiles=tiles, seed=seed) for seed in (1, 2)]
    assert_scores(got[0], want, lengths)
    np.testing.assert_array_equal(got[0].view(np.uint32), got[1].view(np.uint32))


def test_pages_that_are_not_there_and_nan_keys(library):
    one_tile = functools.partial(score, library, tiles=1)
    check_pages_that_are_not_there(one_tile, page_entries=16, heads=8, channels=128)
    check_a_nan_key(one_tile, page_entries=16, heads=8, channels=128)
