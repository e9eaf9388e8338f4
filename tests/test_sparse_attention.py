"""Attention over fp8 rows of a paged cache against plain numpy, and against the model's own reading of the same rows."""

import dataclasses
import itertools

import chex
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from runs import DEMO, build, text, tight_layout

from hisparse_jax import resident
from hisparse_jax.config import CacheConfig
from hisparse_jax.generation import generate
from hisparse_jax.layout import plan_layout
from hisparse_jax.model import attention, blocks
from hisparse_jax.model.span import make_span
from hisparse_jax.pages import read_rows
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

    block = rng.integers(1, num_blocks, (s.requests, s.query_rows, s.columns))
    slot = rng.integers(0, s.entries, block.shape)
    nothing = [-1, s.step - 1, num_blocks * s.step, 2**31 - 1, -(2**31)]  # the null block's last row, a block too far
    nothing += [s.step + s.entries] if s.step > s.entries else []  # beyond a page
    real = rng.random(block.shape) < 0.8
    rows = np.where(real, block * s.step + slot, rng.choice(nothing, block.shape))
    lengths = rng.integers(0, s.columns + 1, (s.requests, s.query_rows))
    lengths[0, 0], lengths[1, 0] = s.columns + 5, rng.choice([0, -3])

    start = rng.integers(0, 3 * s.ring, s.requests)
    start[:2] = 0, s.ring
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
    """Equal up to bf16 rounding of probabilities and results, head by head. Which keys there are, `check_every_key` sees."""
    size = np.abs(want).max(axis=-1, keepdims=True)
    assert np.isfinite(np.asarray(got, np.float64)).all()
    assert (np.abs(np.asarray(got).astype(np.float64) - want) <= 0.02 * size).all()


def check_every_key(attend, *, heads: int, width: int, columns: int, entries: int = 8, step: int = 11) -> None:
    """Each key in turn is what one head looks for, and the only thing it finds."""
    num_keys = width + columns
    requests = -(-num_keys // heads)
    shape = Shape(
        requests=max(requests, 2), query_rows=1, heads=heads, columns=columns, width=width, ring=width + 3, entries=entries,
        pages=-(-columns // entries), step=step,
    )  # fmt: skip
    q, window, positions, slab, rows, lengths, sink = paged_inputs(np.random.default_rng(5), shape).operands
    numbers = np.random.default_rng(6).permutation(columns)
    rows = np.broadcast_to(((1 + numbers // entries) * step + numbers % entries).astype(np.int32), rows.shape)
    positions, lengths = np.full_like(positions, 5 * shape.ring), np.full_like(lengths, columns)
    latest, latent = entry_rows(np.random.default_rng(7), width)
    recent = 5 * shape.ring - width + 1 + np.arange(width)
    window = np.full_like(window, NAN_BYTE)
    window[:, recent % shape.ring] = latest
    values, scales = (
        slab[:, shape.offset + first * entries : shape.offset + last * entries].reshape(-1, entries, last - first)
        for first, last in ((0, 576), (576, 584))
    )
    packed = np.concatenate([values, scales], axis=-1)
    keys = np.concatenate([latent, numbers_in(packed)[rows[0, 0] // step, rows[0, 0] % step]])
    looked_for = np.arange(shape.requests * heads) % num_keys
    q = (100 * keys[looked_for]).reshape(q.shape).astype(q.dtype)
    got = np.asarray(attend(q, window, positions, slab, rows, lengths, sink, **shape.place)).astype(np.float64)
    np.testing.assert_allclose(got.reshape(-1, 512), keys[looked_for], rtol=0.01, atol=0.01)


def numbers_in(packed: np.ndarray) -> np.ndarray:
    """The numbers of packed rows."""
    values = packed[..., :448].copy().view(ml_dtypes.float8_e4m3fn).astype(np.float64).reshape(*packed.shape[:-1], 7, 64)
    scaled = values * np.exp2(packed[..., 576:583].astype(int) - 127)[..., None]
    rope = packed[..., 448:576].copy().view(ml_dtypes.bfloat16).astype(np.float64)
    return np.concatenate([scaled.reshape(*packed.shape[:-1], 448), rope], axis=-1)


def check_no_key_at_all(attend) -> None:
    """A query that sees nothing gives zeros, beside one that sees something."""
    shape = Shape(requests=2, query_rows=1, width=0, ring=1)
    q, window, positions, slab, rows, lengths, sink = paged_inputs(np.random.default_rng(12), shape).operands
    positions, lengths = np.array([[3], [3]], np.int32), np.array([[shape.columns], [0]], np.int32)
    got = np.asarray(attend(q, window, positions, slab, rows, lengths, sink, **shape.place)).astype(np.float64)
    assert got[0].any() and not got[1].any()


def check_no_sink(attend) -> None:
    """A sink of -inf takes nothing, also where a block of a cluster has no key."""
    shape = Shape(requests=3, query_rows=1, heads=9, width=5, ring=5, columns=3)
    inputs = paged_inputs(np.random.default_rng(13), shape)
    inputs.operands[-1][...] = -np.inf
    assert_close(attend(*inputs.operands, **shape.place), inputs.expected())


def check_a_nan_key(attend, shape: Shape) -> None:
    """A NaN in a key makes the queries that read it NaN, and no others."""
    inputs = paged_inputs(np.random.default_rng(3), shape)
    q, window, positions, slab, rows, lengths, sink = inputs.operands
    stands = (rows[0, 0] >= shape.step) & (rows[0, 0] < len(slab) * shape.step) & (rows[0, 0] % shape.step < shape.entries)
    bad = int(rows[0, 0][stands][0])
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


def test_every_key_is_found():
    check_every_key(sparse_attention, heads=4, width=12, columns=40)


def test_a_query_without_any_key_gives_zeros():
    check_no_key_at_all(sparse_attention)
    check_no_sink(sparse_attention)


def test_which_shapes_the_kernel_takes():
    assert fits(64, 512, 584, stride=37_440, offset=37_440)
    assert not fits(64, 256, 584, stride=37_440, offset=0) and not fits(64, 512, 1_024, stride=37_440, offset=0)
    assert not fits(64, 512, 584, stride=37_448, offset=0) and not fits(64, 512, 584, stride=37_440, offset=8)
    assert not fits(65_536, 512, 584, stride=37_440, offset=0)


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (dict(offset=40), "offset=40.*Choose 'xla'"),
        (dict(width=15), "window_width=15 positions do not stand in a ring of 14"),
        (dict(step=7), "row_step=7"),
        (dict(entries=0), "page_entries=0"),
        (dict(offset=160), "at byte 160 leaves its block of"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_what_does_not_fit_is_refused_in_words(wrong, said):
    operands = paged_inputs(np.random.default_rng(2), Shape()).operands
    place = dataclasses.replace(Shape(), **wrong).place
    with pytest.raises(ValueError, match=said):
        sparse_attention(*operands, **place, implementation="cuda")


def test_rows_of_other_formats_are_refused():
    q, window, *rest = paged_inputs(np.random.default_rng(2), Shape()).operands
    with pytest.raises(ValueError, match="512 channels in 584 bytes; here are 256 channels, 584 bytes"):
        sparse_attention(q[..., :256], window, *rest, **Shape().place)


class Recorder:
    """Takes the place of `attend`: counts rows of the kernel's operands that are other bytes than XLA would read."""

    def __init__(self):
        self.calls, self.differences, self.attend = 0, [], blocks.attend

    def __call__(self, q, window, entries, slab, sink, span, apart, layout):
        if span.slots is not None:  # prefill
            return self.attend(q, window, entries, slab, sink, span, apart, layout)
        self.calls += 1
        at = span.positions[..., None] - window.width + 1 + jnp.arange(window.width)[None, None, :]
        history = jnp.concatenate([attention.read_ring(window.before, span, window.width), window.rows], axis=1)
        index = jnp.arange(q.shape[1])[:, None] + 1 + jnp.arange(window.width)[None, :]
        held = jnp.take_along_axis(window.ring[:, None], (at % window.ring.shape[1])[..., None], axis=2)
        wrong = [(held != history[:, index]).any(axis=-1) & (at >= 0)]
        if entries is not None:
            rows, lengths = entries.place.rows, entries.place.lengths
            place = dict(page_entries=entries.place.page_entries, offset=entries.place.offset, row_step=entries.place.row_step)
            is_key = (rows >= 0) & (jnp.arange(rows.shape[2])[None, None, :] < lengths[..., None])
            packed = entries.packed if entries.packed.ndim == 4 else entries.packed[:, None]
            read = read_rows(slab, rows, layout.entry, **place)
            wrong += [is_key != entries.seen, (read != packed).any(axis=-1) & entries.seen]
        counted = [(each & span.valid[..., None]).sum() for each in wrong]
        jax.debug.callback(lambda *numbers: self.differences.append([int(n) for n in numbers]), *counted)
        return self.attend(q, window, entries, slab, sink, span, apart, layout)

    def found_nothing(self) -> bool:
        jax.effects_barrier()
        return bool(self.differences) and not any(itertools.chain(*self.differences))


MIXED = dataclasses.replace(DEMO, num_hidden_layers=4, compress_ratios=(0, 4, 128, 4))
"""Every kind of layer."""


@pytest.mark.parametrize("drafts", [0, 3])
def test_the_model_hands_its_kernel_the_rows_that_xla_would_read(monkeypatch, drafts):
    """A request of several pages that closes an entry, one shorter than its window, and two idle slots."""
    cache = CacheConfig(
        max_model_len=2_048, max_requests=4, gpu_blocks=100, host_blocks=40, rows="fp8", draft_rows=drafts, chunk_tokens=256
    )
    layout = plan_layout(MIXED, cache)
    model, state = build(MIXED, "fp8"), resident.init_state(layout)
    for slot, length in ((2, 703 - drafts), (0, 60)):
        state = resident.admit(state, slot, text(length), layout=layout, max_new_tokens=8)
        state, _, status = resident.prefill(model, state, slot, text(length), layout=layout)
        assert status == 0
    start = jnp.where(state.sequences.running, state.sequences.length, 0)
    span = make_span(None, start, jnp.where(start > 0, drafts + 1, 0), drafts + 1)
    tokens = jnp.asarray(np.random.default_rng(7).integers(0, 256, span.positions.shape), jnp.int32)

    def streams():
        step = jax.jit(lambda tokens, span, layers, cache: model(tokens, span, layers, cache, layout)[0])
        return np.asarray(step(tokens, span, state.layers, resident._entries(state)))[[0, 2]].astype(np.float64)

    want, seen, recorder = streams(), [], Recorder()

    def reference(*operands, implementation, **place):
        seen.append(implementation)
        return sparse_attention(*operands, **place, implementation="xla")

    monkeypatch.setattr(attention, "choose", lambda name, implementation, offered, *arrays: offered["cuda"](*arrays))
    monkeypatch.setattr(attention, "sparse_attention", reference)
    monkeypatch.setattr(blocks, "attend", recorder)
    got = streams()
    assert seen == ["cuda"] * 4 and recorder.found_nothing(), recorder.differences
    assert np.abs(got - want).max() <= 0.02 * np.abs(want).max()


def test_tiered_decode_hands_its_kernel_rows_of_either_tier(monkeypatch):
    layout = tight_layout(MIXED, (6, 5), slack=1, max_model_len=2_048, max_requests=2, num_hot_slots=64, rows="fp8")
    recorder = Recorder()
    monkeypatch.setattr(blocks, "attend", recorder)
    jax.clear_caches()
    run = generate(build(MIXED, "fp8"), [text(1_400), text(1_100)], layout, max_new_tokens=9, call_steps=8)
    jax.clear_caches()
    assert sum(report.pages_lost for report in run.reports) and sum(run.layer_counts["misses"])
    assert recorder.calls and recorder.found_nothing(), recorder.differences


def test_either_twin_alone_finds_the_kernels(run_h200):
    """A process that imports one twin chooses as one that imports both."""
    for twin in ("resident", "decode"):
        run_h200(code=f"import sys, hisparse_jax.{twin}\nassert 'hisparse_jax.library' in sys.modules")
