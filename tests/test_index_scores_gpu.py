"""The CUDA kernel of index scores against numpy: heads, channels, ragged lengths, poisoned pages, a slab beyond 2 GiB."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gpu import need
from test_index_scores import assert_scores, check_a_nan_key, check_pages_that_are_not_there, expected, inputs, paged_keys

from pallas_kernels.index_scores import index_scores

pytestmark = pytest.mark.gpu


@pytest.fixture
def score():
    return functools.partial(index_scores, implementation=need("cuda", "index_scores"))


@pytest.mark.parametrize(
    ("heads", "channels", "page_entries", "requests", "query_rows", "pages"),
    [
        pytest.param(8, 128, 16, 1, 1, 3, id="small-8x128"),
        pytest.param(64, 128, 64, 5, 1, 40, id="small-64x128"),
        (16, 128, 32, 2, 4, 9),
        (32, 128, 64, 3, 2, 130),
        (8, 256, 64, 3, 4, 7),
        (16, 256, 128, 2, 1, 65),
        (32, 256, 64, 1, 1, 200),
        (64, 128, 64, 64, 1, 129),
    ],
)
def test_equals_numpy_for_ragged_requests(score, heads, channels, page_entries, requests, query_rows, pages):
    rng = np.random.default_rng([heads, channels, page_entries])
    stride, offset = page_entries * (channels + 4) + 160, 48
    place = dict(page_entries=page_entries, offset=offset)
    slab, blocks, keys = paged_keys(
        rng, requests=requests, pages=pages, channels=channels, stride=stride, offset=offset, page_entries=page_entries
    )
    columns = pages * page_entries
    lengths = rng.integers(0, columns + 1, requests).astype(np.int32)
    lengths[0] = columns
    queries, weights = inputs(rng, requests=requests, query_rows=query_rows, heads=heads, channels=channels)
    clean = expected(queries, weights, keys[blocks].reshape(requests, columns, channels))
    for request, length in enumerate(lengths):  # what no entry needs may name anything
        blocks[request, -(-length // page_entries) :] = rng.choice([0, -1, len(slab), 2**31 - 1, -(2**31)])
    got = np.asarray(score(slab, blocks, jnp.asarray(queries, jnp.bfloat16), weights, lengths, **place))
    assert_scores(got, clean, lengths)
    again = np.asarray(score(slab, blocks, jnp.asarray(queries, jnp.bfloat16), weights, lengths, **place))
    for request, length in enumerate(lengths):
        np.testing.assert_array_equal(got[request, :, :length], again[request, :, :length])


def test_null_and_unknown_pages_score_zero(score):
    check_pages_that_are_not_there(score, page_entries=16, heads=8, channels=128)


def test_a_nan_key_scores_nan_and_no_other_does(score):
    check_a_nan_key(score, page_entries=16, heads=8, channels=128)


@pytest.mark.parametrize("gib", [3, 5])
def test_addresses_pass_2_gib(score, gib):
    """The same keys at the end of a slab of 3 and of 5 GiB score as in a small one."""
    rng = np.random.default_rng(4)
    stride, place = 37_440, dict(page_entries=64, offset=8_640)
    small, blocks, _ = paged_keys(rng, requests=2, pages=3, channels=128, stride=stride, **place)
    queries, weights = inputs(rng, requests=2, query_rows=1, heads=64, channels=128)
    lengths = np.array([192, 100], np.int32)
    want = np.asarray(score(small, blocks, queries, weights, lengths, **place))
    num_blocks = gib * 2**30 // stride
    first = num_blocks - len(small)
    slab = jax.jit(lambda tail: jnp.zeros((num_blocks, stride), jnp.uint8).at[first:].set(tail))(small)
    got = np.asarray(score(slab, blocks + first, queries, weights, lengths, **place))
    for request, length in enumerate(lengths):
        np.testing.assert_array_equal(got[request, :, :length], want[request, :, :length])
