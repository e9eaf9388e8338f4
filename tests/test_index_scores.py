"""Index scores of a paged cache against plain numpy, and against the model's own reading of the same pages."""

import chex
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from hisparse_jax.config import CacheConfig, preset
from hisparse_jax.layout import plan_layout
from hisparse_jax.model import indexer
from hisparse_jax.model.span import make_span
from hisparse_jax.resident import ResidentEntries
from pallas_kernels.index_scores import fits, index_scores

E4M3 = ml_dtypes.float8_e4m3fn


def paged_keys(rng, *, requests: int, pages: int, page_entries: int, channels: int, stride: int, offset: int, spare: int = 2):
    """A slab of poison with one page of random keys a block, block tables that name each once, and the keys as numbers."""
    num_blocks = 1 + requests * pages + spare
    slab = rng.integers(0, 256, (num_blocks, stride), np.uint8)  # NaN, infinities and all
    keys = rng.normal(size=(num_blocks, page_entries, channels)).astype(E4M3)
    scales = np.exp2(rng.integers(-6, 6, (num_blocks, page_entries))).astype(np.float32)
    page = np.concatenate([keys.view(np.uint8).reshape(num_blocks, -1), scales.view(np.uint8)], axis=1)
    slab[:, offset : offset + page.shape[1]] = page
    blocks = 1 + rng.permutation(num_blocks - 1)[: requests * pages].astype(np.int32).reshape(requests, pages)
    return slab, blocks, keys.astype(np.float64) * scales[..., None]


def inputs(rng, *, requests: int, query_rows: int, heads: int, channels: int):
    queries = rng.normal(size=(requests, query_rows, heads, channels)).astype(E4M3)
    weights = rng.normal(size=(requests, query_rows, heads)).astype(np.float32)
    return queries, weights


def expected(queries, weights, keys) -> np.ndarray:
    """f64[R, T, N] of `keys[R, N, d]`, scales in them."""
    dots = np.einsum("rthd,rnd->rthn", queries.astype(np.float64), keys)
    return np.einsum("rth,rthn->rtn", weights.astype(np.float64), np.maximum(dots, 0))


def assert_scores(got, want, lengths) -> None:
    """Equal up to f32 rounding of a sum over heads, before each request's length."""
    for request, length in enumerate(lengths):
        size = np.abs(want[request]).max(initial=1.0)
        np.testing.assert_allclose(got[request, :, :length], want[request, :, :length], rtol=1e-5, atol=3e-6 * size)


def test_scores_what_the_pages_hold():
    rng = np.random.default_rng(0)
    shape = dict(requests=3, pages=4, page_entries=8, channels=32)
    slab, blocks, keys = paged_keys(rng, **shape, stride=400, offset=16)
    queries, weights = inputs(rng, requests=3, query_rows=2, heads=5, channels=32)
    lengths = np.array([32, 7, 0], np.int32)
    got = index_scores(slab, blocks, jnp.asarray(queries, jnp.bfloat16), weights, lengths, page_entries=8, offset=16)
    chex.assert_shape(got, (3, 2, 32))
    assert_scores(np.asarray(got), expected(queries, weights, keys[blocks].reshape(3, 32, 32)), [32, 32, 32])


def one_request(rng, *, pages: int, page_entries: int, heads: int, channels: int, offset: int):
    """Slab, block table, queries and weights of one request with one query row, and where its pages stand."""
    stride = page_entries * (channels + 4) + 16 + offset
    shape = dict(requests=1, pages=pages, page_entries=page_entries, channels=channels, stride=stride, offset=offset)
    slab, blocks, _ = paged_keys(rng, **shape)
    queries, weights = inputs(rng, requests=1, query_rows=1, heads=heads, channels=channels)
    return slab, blocks, queries, weights, dict(page_entries=page_entries, offset=offset)


def check_pages_that_are_not_there(score, *, page_entries: int, heads: int, channels: int) -> None:
    """Of four pages the null page, one beyond the slab and one far beyond or negative score zero."""
    for far in (np.iinfo(np.int32).max, -5):
        shape = dict(pages=4, page_entries=page_entries, heads=heads, channels=channels, offset=0)
        slab, blocks, queries, weights, place = one_request(np.random.default_rng(1), **shape)
        slab[0] = 0x7F  # NaN
        blocks[0, 1:] = 0, len(slab), far
        lengths = np.array([4 * page_entries], np.int32)
        got = np.asarray(score(slab, blocks, queries, weights, lengths, **place))[0, 0]
        assert np.isfinite(got).all() and got[:page_entries].any() and not got[page_entries:].any()


def check_a_nan_key(score, *, page_entries: int, heads: int, channels: int) -> None:
    """The entry whose key holds a NaN scores NaN, and no other does."""
    shape = dict(pages=2, page_entries=page_entries, heads=heads, channels=channels, offset=16)
    slab, blocks, queries, weights, place = one_request(np.random.default_rng(5), **shape)
    slot, lengths = page_entries // 2, np.array([2 * page_entries], np.int32)
    slab[blocks[0, 1], 16 + slot * channels + channels // 2] = 0x7F
    got = np.asarray(score(slab, blocks, queries, weights, lengths, **place))[0, 0]
    assert np.flatnonzero(np.isnan(got)).tolist() == [page_entries + slot]


def test_a_page_that_is_not_there_scores_zero():
    check_pages_that_are_not_there(index_scores, page_entries=8, heads=4, channels=32)


def test_a_nan_key_scores_nan_and_no_other_does():
    check_a_nan_key(index_scores, page_entries=8, heads=4, channels=32)


def test_the_model_hands_its_kernel_the_pages_that_xla_would_read(monkeypatch):
    rng = np.random.default_rng(6)
    config = preset("demo")
    layout = plan_layout(config, CacheConfig(max_model_len=2_048, max_requests=2, gpu_blocks=40, host_blocks=40, rows="fp8"))
    layer, (heads, channels) = config.c4_layers[-1], (config.index_n_heads, config.index_head_dim)
    place, pages, entries = layout.index_place(layer), layout.max_pages, layout.page_entries
    shape = dict(requests=2, pages=pages, page_entries=entries, channels=channels)
    slab, blocks, keys = paged_keys(rng, **shape, stride=layout.stride, offset=place.offset)
    base = np.zeros((layout.num_base_groups, 2, pages), np.int32)
    base[place.group] = blocks
    cache = ResidentEntries(slab=jnp.asarray(slab), base=jnp.asarray(base), resident=jnp.asarray(blocks)[None])
    queries, weights = inputs(rng, requests=2, query_rows=1, heads=heads, channels=channels)
    span = make_span(None, jnp.int32([2_000, 131]), jnp.int32([1, 1]), 1)
    operands = jnp.asarray(queries, jnp.bfloat16), jnp.asarray(weights), cache, layer, span, layout
    want = expected(queries, weights, keys[blocks].reshape(2, -1, channels))
    assert_scores(np.asarray(indexer.score_entries(*operands)), want, [500, 33])

    seen = []

    def reference(*arrays, implementation, **place):
        seen.append((implementation, np.asarray(arrays[-1]).tolist()))
        return index_scores(*arrays, **place, implementation="xla")

    monkeypatch.setattr(indexer, "choose", lambda name, implementation, offered, *arrays: offered["cuda"](*arrays))
    monkeypatch.setattr(indexer, "index_scores", reference)
    assert_scores(np.asarray(indexer.score_entries(*operands)), want, [500, 33])
    assert seen == [("cuda", [500, 33])]


def test_which_shapes_the_kernel_takes():
    flash = dict(stride=37_440, page_entries=64, offset=8_640)
    assert fits(64, 64, 128, **flash) and fits(1, 8, 256, **flash)
    assert not fits(64, 64, 256, **flash) and not fits(64, 48, 128, **flash) and not fits(64, 64, 64, **flash)
    assert not fits(64, 64, 128, **flash | {"offset": 8}) and not fits(64, 64, 128, **flash | {"page_entries": 24})
    assert not fits(65_536, 64, 128, **flash)


def test_cuda_is_refused_for_other_shapes_in_words():
    rng = np.random.default_rng(2)
    slab, blocks, _ = paged_keys(rng, requests=1, pages=1, page_entries=8, channels=32, stride=400, offset=0)
    queries, weights = inputs(rng, requests=1, query_rows=1, heads=4, channels=32)
    with pytest.raises(ValueError, match="4 heads of 32, page_entries=8.*Choose 'xla'"):
        index_scores(slab, blocks, queries, weights, np.zeros(1, np.int32), page_entries=8, offset=0, implementation="cuda")
