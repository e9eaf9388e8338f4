"""The CUDA kernel of attention against numpy: heads, clusters, ragged lists, poison, rows elsewhere, a slab beyond 2 GiB."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gpu import need
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

from pallas_kernels.sparse_attention import sparse_attention

pytestmark = pytest.mark.gpu

FLASH = Shape(requests=4, query_rows=1, heads=64, columns=512, width=128, ring=128, entries=64, pages=40, offset=37_440, step=320)


@pytest.fixture
def attend():
    return functools.partial(sparse_attention, implementation=need("cuda", "sparse_attention"))


@pytest.mark.parametrize(
    "shape",
    [
        pytest.param(Shape(), id="small-uneven"),
        pytest.param(Shape(requests=40, query_rows=1, heads=17, columns=130, width=70, ring=70), id="small-one-cluster-of-two"),
        pytest.param(Shape(columns=0, requests=2), id="no-entries"),
        pytest.param(Shape(width=0, ring=1), id="no-window"),
        pytest.param(FLASH, id="flash"),
        pytest.param(Shape(**{**vars(FLASH), "requests": 64}), id="flash-64"),
        pytest.param(Shape(**{**vars(FLASH), "requests": 150, "columns": 200}), id="flash-150"),
        pytest.param(Shape(**{**vars(FLASH), "heads": 128, "query_rows": 4, "ring": 131}), id="pro-drafts"),
        pytest.param(Shape(**{**vars(FLASH), "columns": 2_000, "entries": 2, "step": 2, "pages": 900}), id="pages-of-two"),
    ],
)
def test_equals_numpy(attend, shape):
    inputs = paged_inputs(np.random.default_rng([shape.requests, shape.heads]), shape)
    got = np.asarray(attend(*inputs.operands, **shape.place))
    assert_close(got, inputs.expected())
    assert not got[inputs.operands[2] < 0].any(), "padding gave other than zeros"
    np.testing.assert_array_equal(bits(got), bits(attend(*inputs.operands, **shape.place)))


def bits(array) -> np.ndarray:
    return np.asarray(array).view(np.uint16)


def test_a_nan_key_is_seen_by_its_readers_alone(attend):
    check_a_nan_key(attend, Shape())


def test_rows_that_stand_elsewhere_give_the_same_bits(attend):
    """What tiered decode rests on: blocks change places, the numbers do not."""
    inputs = paged_inputs(np.random.default_rng(8), FLASH)
    q, window, positions, slab, rows, lengths, sink = inputs.operands
    home = np.concatenate([[0], 1 + np.random.default_rng(9).permutation(FLASH.pages)])
    moved, real = slab[np.argsort(home)], (rows >= FLASH.step) & (rows < len(slab) * FLASH.step)
    renamed = np.where(real, home[np.where(real, rows, 0) // FLASH.step] * FLASH.step + rows % FLASH.step, -1).astype(np.int32)
    want = attend(*inputs.operands, **FLASH.place)
    np.testing.assert_array_equal(bits(attend(q, window, positions, moved, renamed, lengths, sink, **FLASH.place)), bits(want))


def test_a_sink_of_minus_infinity_weighs_nothing(attend):
    inputs = paged_inputs(np.random.default_rng(10), Shape(width=12))
    operands = *inputs.operands[:-1], np.full(5, -np.inf, np.float32)
    inputs.operands = operands
    assert_close(attend(*operands, **Shape().place), inputs.expected())


@pytest.mark.parametrize(
    ("heads", "width", "columns"),
    [(64, 128, 512), (2, 70, 130), (4, 12, 40), (128, 128, 512)],
    ids=["clusters-of-8", "clusters-of-1-or-2", "clusters-of-2", "two-head-blocks"],
)
def test_every_key_is_found(attend, heads, width, columns):
    check_every_key(attend, heads=heads, width=width, columns=columns, entries=64, step=320)


def test_a_query_without_any_key_gives_zeros(attend):
    check_no_key_at_all(attend)
    check_no_sink(attend)


@pytest.mark.parametrize("gib", [3, 5])
def test_addresses_pass_2_gib(attend, gib):
    """The same rows at the end of a slab of 3 and of 5 GiB give what they give in a small one."""
    inputs = paged_inputs(np.random.default_rng(4), FLASH)
    q, window, positions, slab, rows, lengths, sink = inputs.operands
    num_blocks = gib * 2**30 // slab.shape[1]
    first = num_blocks - len(slab)
    large = jax.jit(lambda tail: jnp.zeros((num_blocks, slab.shape[1]), jnp.uint8).at[first:].set(tail))(slab)
    real = (rows >= FLASH.step) & (rows < len(slab) * FLASH.step)
    moved = np.where(real, rows + first * FLASH.step, -1).astype(np.int32)
    got = attend(q, window, positions, large, moved, lengths, sink, **FLASH.place)
    np.testing.assert_array_equal(bits(got), bits(attend(*inputs.operands, **FLASH.place)))


def test_large_scores_leave_one_key_to_each_head(attend):
    check_large_scores(attend, Shape(requests=2, columns=300, entries=16, pages=30, step=16))
