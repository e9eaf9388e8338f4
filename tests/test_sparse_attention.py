"""Attention over fp8 rows of a paged cache against plain numpy, and against the model's own reading of the same rows."""

import dataclasses

import chex
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from hisparse_jax import resident
from hisparse_jax.config import CacheConfig, preset
from hisparse_jax.generation import random_model
from hisparse_jax.layout import plan_layout
from hisparse_jax.model import attention
from hisparse_jax.model.span import make_span
from pallas_kernels.sparse_attention import fits, sparse_attention

NAN_BYTE = 0x7F


def entry_rows(rng, *batch: int) -> tuple[np.ndarray, np.ndarray]:
    """Packed rows of random numbers, and the numbers: 448 e4m3 values with seven scales, 64 bf16 values."""
    values = rng.normal(size=(*batch, 7, 64)).astype(ml_dtypes.float8_e4m3fn)
    exponents = rng.integers(-3, 2, (*batch, 7))
    rope = rng.normal(size=(*batch, 64)).astype(ml_dtypes.bfloat16)
    scales = np.concatenate([exponents + 127, np.zeros((*batch, 1), int)], axis=-1).astype(np.uint8)
    packed = np.concatenate([values.view(np.uint8).reshape(*batch, 448), rope.view(np.uint8), scales], axis=-1)
    numbers = (values.astype(np.float64) * np.exp2(exponents)[..., None]).reshape(*batch, 448)
    return packed, np.concatenate([numbers, rope.astype(np.float64)], axis=-1)


@dataclasses.dataclass(frozen=True)
class Shape:
    requests: int = 3
    query_rows: int = 2
    heads: int = 5
    columns: int = 40
    width: int = 12
    ring: int = 14
    entries: int = 8
    pages: int = 9
    offset: int = 48
    step: int = 11

    @property
    def place(self) -> dict[str, int]:
        return dict(window_width=self.width, page_entries=self.entries, offset=self.offset, row_step=self.step)


@dataclasses.dataclass
class Inputs:
    """Operands of the op, and the keys that each query has: `keys[request][row]`, f64[n, 512], None for padding."""

    operands: tuple
    keys: list

    def expected(self) -> np.ndarray:
        """f64[R, T, H, 512], one query at a time."""
        q, sink = np.asarray(self.operands[0]).astype(np.float64), np.asarray(self.operands[-1]).astype(np.float64)
        out = np.zeros(q.shape)
        for r, rows in enumerate(self.keys):
            for t, keys in enumerate(rows):
                if keys is not None:
                    scores = q[r, t] @ keys.T / np.sqrt(512)
                    weights = np.exp(np.concatenate([scores, sink[:, None]], axis=1))
                    out[r, t] = (weights / weights.sum(axis=1, keepdims=True))[:, :-1] @ keys
        return out


def paged_inputs(rng, shape: Shape) -> Inputs:
    """A slab and windows that are NaN wherever no key stands, rows of every kind of nothing, one padding query at least."""
    s, num_blocks = shape, 1 + shape.pages
    stride = -(-(s.offset + 584 * s.entries + 64) // 16) * 16
    slab = np.full((num_blocks, stride), NAN_BYTE, np.uint8)
    packed, numbers = entry_rows(rng, num_blocks, s.entries)
    values = slab[1:, s.offset : s.offset + 576 * s.entries].reshape(s.pages, s.entries, 576)
    values[...] = packed[1:, :, :576]
    slab[1:, s.offset : s.offset + 576 * s.entries] = values.reshape(s.pages, -1)
    slab[1:, s.offset + 576 * s.entries : s.offset + 584 * s.entries] = packed[1:, :, 576:].reshape(s.pages, -1)

    block, slot = rng.integers(1, num_blocks, (2, s.requests, s.query_rows, s.columns))
    slot = rng.integers(0, s.entries, block.shape)
    nothing = rng.choice([-1, 3, num_blocks * s.step, 2**31 - 1, -(2**31), s.step + s.entries], block.shape)
    real = rng.random(block.shape) < 0.8
    rows = np.where(real, block * s.step + slot, nothing)
    if s.step == s.entries:  # no row lies beyond its page
        rows = np.where(rows == s.step + s.entries, -1, rows)
    lengths = rng.integers(0, s.columns + 1, (s.requests, s.query_rows))
    lengths[0, 0], lengths[-1, -1] = s.columns + 5, 0

    start = rng.integers(0, 3 * s.ring, s.requests)
    start[0] = 2
    positions = start[:, None] + np.arange(s.query_rows)
    positions[-1, -1] = -1
    window = np.full((s.requests, s.ring, 584), NAN_BYTE, np.uint8)
    latest, latent = entry_rows(rng, s.requests, 4 * s.ring + s.query_rows)
    keys: list = []
    for r in range(s.requests):
        keys.append([])
        for t, position in enumerate(positions[r]):
            if position < 0:
                keys[r].append(None)
                continue
            seen = np.arange(max(position - s.width + 1, 0), position + 1)
            window[r, seen % s.ring] = latest[r, seen]
            kept = real[r, t] & (np.arange(s.columns) < lengths[r, t])
            keys[r].append(np.concatenate([latent[r, seen], numbers[block[r, t], slot[r, t]][kept]]))
    q = (4 * rng.normal(size=(s.requests, s.query_rows, s.heads, 512))).astype(ml_dtypes.bfloat16)
    sink = rng.normal(size=s.heads).astype(np.float32)
    integers = (np.asarray(x, np.int32) for x in (positions, rows, lengths))
    positions, rows, lengths = integers
    return Inputs((q, window, positions, slab, rows, lengths, sink), keys)


def assert_close(got, want: np.ndarray) -> None:
    """Equal up to bf16 rounding of probabilities and results, head by head."""
    size = np.abs(want).max(axis=-1, keepdims=True)
    assert np.isfinite(np.asarray(got, np.float64)).all()
    assert (np.abs(np.asarray(got).astype(np.float64) - want) <= 0.02 * size).all()


def check_a_nan_key(attend, shape: Shape) -> None:
    """A NaN in a key makes the queries that read it NaN, and no others."""
    inputs = paged_inputs(np.random.default_rng(3), shape)
    q, window, positions, slab, rows, lengths, sink = inputs.operands
    bad = int(rows[0, 0][(rows[0, 0] >= shape.step) & (rows[0, 0] % shape.step < shape.entries)][0])
    slab[bad // shape.step, shape.offset + 576 * (bad % shape.step) + 100] = NAN_BYTE
    got = np.asarray(attend(*inputs.operands, **shape.place)).astype(np.float64)
    reads = ((rows == bad) & (np.arange(shape.columns) < lengths[..., None])).any(axis=-1) & (positions >= 0)
    assert reads.any() and not reads.all()
    np.testing.assert_array_equal(np.isnan(got).any(axis=(2, 3)), reads)


def check_large_scores(attend, shape: Shape) -> None:
    """Scores of thousands neither overflow nor vanish: only the largest key of each head weighs."""
    inputs = paged_inputs(np.random.default_rng(11), shape)
    q, *others = inputs.operands
    q = (q.astype(np.float32) * 200).astype(q.dtype)
    got = np.asarray(attend(q, *others, **shape.place)).astype(np.float64)
    for request, rows in enumerate(inputs.keys):
        for row, keys in enumerate(rows):
            if keys is not None:
                best = keys[np.argmax(q[request, row].astype(np.float64) @ keys.T, axis=1)]
                np.testing.assert_allclose(got[request, row], best, rtol=0.02, atol=0.02)


def test_attends_to_what_the_rows_hold():
    inputs = paged_inputs(np.random.default_rng(0), Shape())
    got = sparse_attention(*inputs.operands, **Shape().place)
    chex.assert_shape(got, (3, 2, 5, 512))
    assert_close(got, inputs.expected())


def test_a_layer_without_entries():
    shape = Shape(columns=0)
    inputs = paged_inputs(np.random.default_rng(1), shape)
    assert_close(sparse_attention(*inputs.operands, **shape.place), inputs.expected())


def test_a_nan_key_is_seen_by_its_readers_alone():
    check_a_nan_key(sparse_attention, Shape())


def test_large_scores_leave_one_key_to_each_head():
    check_large_scores(sparse_attention, Shape())


def test_which_shapes_the_kernel_takes():
    assert fits(64, 512, 584, stride=37_440, offset=37_440)
    assert not fits(64, 256, 584, stride=37_440, offset=0) and not fits(64, 512, 1_024, stride=37_440, offset=0)
    assert not fits(64, 512, 584, stride=37_448, offset=0) and not fits(64, 512, 584, stride=37_440, offset=8)
    assert not fits(65_536, 512, 584, stride=37_440, offset=0)


def test_cuda_is_refused_for_other_shapes_in_words():
    shape = Shape(offset=40)
    inputs = paged_inputs(np.random.default_rng(2), shape)
    with pytest.raises(ValueError, match="offset=40.*Choose 'xla'"):
        sparse_attention(*inputs.operands, **shape.place, implementation="cuda")


@pytest.mark.parametrize("drafts", [0, 3])
def test_the_model_hands_its_kernel_the_rows_that_xla_would_read(monkeypatch, drafts):
    """Every kind of layer, a request of several pages and one shorter than its window, and an idle slot."""
    config = preset("demo")
    config = dataclasses.replace(config, num_hidden_layers=4, compress_ratios=(0, 4, 128, 4))
    cache = CacheConfig(
        max_model_len=2_048, max_requests=4, gpu_blocks=100, host_blocks=40, rows="fp8", draft_rows=drafts, chunk_tokens=256
    )
    layout = plan_layout(config, cache)
    model, state = random_model(config, "fp8", 0), resident.init_state(layout)
    rng = np.random.default_rng(7)
    for slot, length in ((2, 703 - drafts), (0, 60)):  # the longer one closes a C4 entry in this step
        prompt = rng.integers(0, 256, length).tolist()
        state = resident.admit(state, slot, prompt, layout=layout, max_new_tokens=8)
        state, _, status = resident.prefill(model, state, slot, prompt, layout=layout)
        assert status == 0
    start = jnp.where(state.sequences.running, state.sequences.length, 0)
    span = make_span(None, start, jnp.where(start > 0, drafts + 1, 0), drafts + 1)
    tokens = jnp.asarray(rng.integers(0, 256, span.positions.shape), jnp.int32)

    def streams():
        step = jax.jit(lambda tokens, span, layers, cache: model(tokens, span, layers, cache, layout)[0])
        return np.asarray(step(tokens, span, state.layers, resident._entries(state)))[[0, 2]].astype(np.float64)

    want, seen = streams(), []

    def reference(*operands, implementation, **place):
        seen.append(implementation)
        return sparse_attention(*operands, **place, implementation="xla")

    monkeypatch.setattr(attention, "choose", lambda name, implementation, offered, *arrays: offered["cuda"](*arrays))
    monkeypatch.setattr(attention, "sparse_attention", reference)
    got = streams()
    assert seen == ["cuda"] * 4
    assert np.abs(got - want).max() <= 0.02 * np.abs(want).max()
