"""Speculative rows: a step verifies drafts beside a request's next token and keeps what decode would have sampled, bit for bit.

A step computes the next token and up to `D` drafts as `Q = 1 + D` rows of one span: one forward, one resolve transaction in each
C4 layer. Row t samples the token behind it with that position's own key. A draft is accepted where it equals what the row before
it sampled and all drafts before it are accepted; the token behind the last one kept comes free. A row that is kept has computed
with exactly the tokens before it, so its logits are those of one-by-one decode through the same program.

What rejected rows leave, and why nobody reads it:

    length                     is not advanced over them
    windows, compressor rings  keep a row for each draft beyond what reads reach back, so nothing needed was overwritten
    C4, C128, index rows       stand at entries that close at `length` or later: no row sees one before the span that closes it
                               has written it again, on the slab and through to the host in the same step (a page counts as
                               complete on the host only below `length`)
    hot slots                  hold no such entry: what a step closes stands in the last two pages, which never leave the GPU, so
                               it is resident whenever it is selected
    pages                      grown for rejected rows stay reserved; they are freed by what was allocated, not by length
    LRU, counters, traffic     tell what was done: a rejected row did select, and its misses did move

`CacheConfig` sees to it that a stretch reserves no more than a page, so that the page being written is one of the last two.
"""

from typing import Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Bool, Float32, Int32

from hisparse_jax.entries import EntryCache
from hisparse_jax.layer_state import LayerState
from hisparse_jax.layout import CacheLayout
from hisparse_jax.model.blocks import DeepseekV4
from hisparse_jax.model.span import make_span
from hisparse_jax.sequences import Sequences, sample
from hisparse_jax.steps import Stretch, stack_indices


@runtime_checkable
class DraftSource(Protocol):
    """Where drafts come from: a pytree, so that its arrays are operands of the jitted loop and its class is part of the trace."""

    def propose(self, sequences: Sequences, num_drafts: int) -> Int32[Array, "B D"]:
        """Guesses of the tokens at `length + 1`, `length + 2`, ... of each request; what is no token id ends the list."""
        ...


class Replay(struct.PyTreeNode):
    """Drafts of a continuation that is known, or was guessed outside, by position.

    tokens: i32[B, P]   the tokens at positions first .. first + P - 1; -1, and outside of them: no draft.
    first: i32[B]       `length + 1` where they are guesses of what follows the request's next token.
    """

    tokens: Int32[Array, "B P"]
    first: Int32[Array, " B"]

    def propose(self, sequences: Sequences, num_drafts: int) -> Int32[Array, "B D"]:
        at = (sequences.length + 1 - self.first)[:, None] + jnp.arange(num_drafts, dtype=jnp.int32)[None, :]
        slots = jnp.arange(at.shape[0], dtype=jnp.int32)[:, None]
        return self.tokens.at[slots, at].get(mode="fill", fill_value=-1, wrap_negative_indices=False)


class VerifyOutput(struct.PyTreeNode):
    """What `S` steps of `Q` rows gave. A step keeps its first rows, at least one; flattened, the tokens kept stand in order.

    tokens: i32[B, S, Q]                   the token sampled behind each row kept; -1 elsewhere.
    rows: i32[B, S]                        rows computed, 1 + drafts; 0 where the request did not take part.
    logits: f32[B, S, Q, V] or None        logits of the rows kept; zeros elsewhere.
    indices: i32[L4, B, S, Q, K] or None   entries that the rows kept selected in each C4 layer; -1 elsewhere.
    counts: i32[L4, B, 5] or None          what became of the entries selected by all rows, rejected ones too.
    """

    tokens: Int32[Array, "B S Q"]
    rows: Int32[Array, "B S"]
    logits: Float32[Array, "B S Q V"] | None
    indices: Int32[Array, "L4 B S Q K"] | None
    counts: Int32[Array, "L4 B 5"] | None = None


def init_verify_output(layout: CacheLayout, max_steps: int, *, logits: bool, indices: bool, counts: bool = False) -> VerifyOutput:
    """Room for `max_steps` steps."""
    model, batch, rows = layout.model, layout.cache.max_requests, layout.cache.query_rows
    layers = len(model.c4_layers)
    return VerifyOutput(
        tokens=jnp.full((batch, max_steps, rows), -1, jnp.int32),
        rows=jnp.zeros((batch, max_steps), jnp.int32),
        logits=jnp.zeros((batch, max_steps, rows, model.vocab_size), jnp.float32) if logits else None,
        indices=jnp.full((layers, batch, max_steps, rows, model.index_topk), -1, jnp.int32) if indices else None,
        counts=jnp.zeros((layers, batch, 5), jnp.int32) if counts else None,
    )


def verify_stretch(
    model: DeepseekV4,
    source: DraftSource,
    sequences: Sequences,
    layers: tuple[LayerState, ...],
    cache: EntryCache,
    output: VerifyOutput,
    granted: Bool[Array, " B"],
    part: Stretch,
    layout: CacheLayout,
):
    """The steps of `part`: every running, granted request below its limit computes one span a step and keeps 1 to Q tokens.

    Allocates nothing. Returns `(sequences, layers, cache, output)`.
    """
    num_rows = layout.cache.query_rows

    def step(i, carry):
        seq, layers, cache, out = carry
        active = seq.running & granted & (seq.length < seq.limit)
        tokens, count = _rows(seq, source, active, layout)
        span = make_span(None, seq.length, count, num_rows)
        streams, layers, cache, selections = model(tokens, span, layers, cache, layout)
        logits = model.logits(streams)
        sampled = _sample_rows(logits, seq, span.positions + 1)
        kept, stops = accept(tokens, sampled, count, seq.stop_token)
        length = seq.length + kept
        last = jnp.take_along_axis(sampled, jnp.maximum(kept - 1, 0)[:, None], axis=1)[:, 0]
        stopped = active & (stops | (length >= seq.limit))
        seq = seq.replace(length=length, token=jnp.where(active, last, seq.token), running=seq.running & ~stopped)
        return seq, layers, cache, _record(out, part.first + i, count, kept, sampled, logits, stack_indices(selections))

    return jax.lax.fori_loop(0, part.count, step, (sequences, layers, cache, output))


def accept(
    tokens: Int32[Array, "B Q"], sampled: Int32[Array, "B Q"], count: Int32[Array, " B"], stop_token: Int32[Array, " B"]
) -> tuple[Int32[Array, " B"], Bool[Array, " B"]]:
    """How many of the `count` rows of `tokens` are kept, and whether the last token kept is the stop token.

    Row t + 1 is kept where row t is, and sampled just the token that row t + 1 was computed from. Behind the first stop token
    nothing is kept. A count of 0 keeps 0.
    """
    row = jnp.arange(tokens.shape[1], dtype=jnp.int32)[None, :]
    right = (tokens[:, 1:] == sampled[:, :-1]) & (row[:, 1:] < count[:, None])
    kept = jnp.where(count > 0, 1 + jnp.cumprod(right.astype(jnp.int32), axis=1).sum(axis=1, dtype=jnp.int32), 0)
    is_stop = (sampled == stop_token[:, None]) & (row < kept[:, None])
    stops = is_stop.any(axis=1)
    return jnp.where(stops, jnp.argmax(is_stop, axis=1).astype(jnp.int32) + 1, kept), stops


def _rows(seq: Sequences, source: DraftSource, active: Bool[Array, " B"], layout: CacheLayout):
    """Tokens of a step, the next one and the drafts behind it, and how many of them are real: none from the limit on."""
    num_drafts, vocab = layout.cache.draft_rows, layout.model.vocab_size
    drafts = source.propose(seq, num_drafts)
    if drafts.shape != (shape := (seq.length.shape[0], num_drafts)):
        raise ValueError(f"{type(source).__name__} proposes drafts of shape {drafts.shape}, not {shape}; fill up with -1.")
    usable = jnp.cumprod(((drafts >= 0) & (drafts < vocab)).astype(jnp.int32), axis=1).sum(axis=1, dtype=jnp.int32)
    count = jnp.where(active, jnp.minimum(1 + usable, seq.limit - seq.length), 0)
    tokens = jnp.concatenate([seq.token[:, None], drafts], axis=1)
    return jnp.where(jnp.arange(1 + num_drafts)[None, :] < count[:, None], tokens, 0), count


def _sample_rows(logits: Float32[Array, "B Q V"], seq: Sequences, positions: Int32[Array, "B Q"]) -> Int32[Array, "B Q"]:
    """The token for each row's position, with the request's key for it."""
    rows = positions.shape[1]
    seed, temperature = jnp.repeat(seq.seed, rows), jnp.repeat(seq.temperature, rows)
    return sample(logits.reshape(-1, logits.shape[-1]), seed, temperature, positions.reshape(-1)).reshape(positions.shape)


def _record(out: VerifyOutput, at, count, kept, sampled, logits, indices) -> VerifyOutput:
    is_kept = jnp.arange(sampled.shape[1], dtype=jnp.int32)[None, :] < kept[:, None]
    out = out.replace(tokens=out.tokens.at[:, at].set(jnp.where(is_kept, sampled, -1)), rows=out.rows.at[:, at].set(count))
    if out.logits is not None:
        out = out.replace(logits=out.logits.at[:, at].set(jnp.where(is_kept[..., None], logits, 0)))
    if out.indices is not None:
        out = out.replace(indices=out.indices.at[:, :, at].set(jnp.where(is_kept[None, ..., None], indices, -1)))
    return out
