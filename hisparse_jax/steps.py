"""One chunk of prefill, one step of decode, one stretch of steps: the arithmetic both twins run, whatever the cache.

Nothing here knows where an entry lives. The twins differ in the `EntryCache` they pass and in what they do between stretches.
"""

import collections
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Bool, Float32, Int32

from hisparse_jax.entries import EntryCache, Selection
from hisparse_jax.layer_state import LayerState
from hisparse_jax.layout import CacheLayout
from hisparse_jax.model.blocks import DeepseekV4
from hisparse_jax.model.span import make_span
from hisparse_jax.sequences import Sequences, sample
from hisparse_jax.status import Status

traces: collections.Counter[str] = collections.Counter()
"""How often each jitted entry point was traced in this process: one per shape, or something recompiles."""


class DecodeOutput(struct.PyTreeNode):
    """What `S` decode steps gave, by step.

    tokens: i32[B, S]               the token sampled in the step; -1 where the request did not take part.
    logits: f32[B, S, V] or None    its logits; rows of steps not taken are zeros.
    indices: i32[L4, B, S, K] or None   entries selected by each C4 layer; -1 where the request did not take part.
    counts: i32[L4, B, 5] or None   what became of the selected entries (`tiered.COUNT_NAMES`), all steps together.
    """

    tokens: Int32[Array, "B S"]
    logits: Float32[Array, "B S V"] | None
    indices: Int32[Array, "L4 B S K"] | None
    counts: Int32[Array, "L4 B 5"] | None = None


class Stretch(NamedTuple):
    """Steps `first .. first + count - 1` of a call, with growth and reclaim at their head.

    target: i32[B]     tokens that each running request may reach in them; 0 for the others.
    forced: i32[B, S]  `forced[b, s] >= 0` takes the place of the token sampled in step s.
    """

    first: Int32[Array, ""]
    count: Int32[Array, ""]
    target: Int32[Array, " B"]
    forced: Int32[Array, "B S"]


def init_output(layout: CacheLayout, max_steps: int, *, logits: bool, indices: bool, counts: bool = False) -> DecodeOutput:
    """Room for `max_steps` steps."""
    model, batch = layout.model, layout.cache.max_requests
    return DecodeOutput(
        counts=jnp.zeros((len(model.c4_layers), batch, 5), jnp.int32) if counts else None,
        tokens=jnp.full((batch, max_steps), -1, jnp.int32),
        logits=jnp.zeros((batch, max_steps, model.vocab_size), jnp.float32) if logits else None,
        indices=jnp.full((len(model.c4_layers), batch, max_steps, model.index_topk), -1, jnp.int32) if indices else None,
    )


def compute_chunk(
    model: DeepseekV4,
    sequences: Sequences,
    layers: tuple[LayerState, ...],
    cache: EntryCache,
    tokens: Int32[Array, " C"],
    slot: Int32[Array, ""],
    count: Int32[Array, ""],
    layout: CacheLayout,
    *,
    all_logits: bool,
) -> tuple[Sequences, tuple[LayerState, ...], EntryCache, Float32[Array, "N V"], Int32[Array, "L4 C K"]]:
    """Prefills the first `count` of `tokens` for one request, at its length; samples what would follow the last.

    Logits are those of every position (`all_logits`) or of the last real one alone, `[1, V]`. Pages must be there.
    """
    start = sequences.length[slot]
    span = make_span(slot[None], start[None], count[None], tokens.shape[0])
    real = jnp.where(span.valid, tokens[None, :], 0)
    streams, layers, cache, selections = model(real, span, layers, cache, layout)
    last = jax.lax.dynamic_slice_in_dim(streams, jnp.maximum(count - 1, 0), 1, axis=1)
    logits = model.logits(streams if all_logits else last)[0]
    row = jnp.maximum(count - 1, 0) if all_logits else 0
    token = sample(logits[row][None], sequences.seed[slot][None], sequences.temperature[slot][None], (start + count)[None])
    sequences = sequences.replace(
        length=sequences.length.at[slot].add(count),
        token=sequences.token.at[slot].set(jnp.where(count > 0, token[0], sequences.token[slot])),
    )
    return sequences, layers, cache, logits, stack_indices(selections)[:, 0]


def run_stretches(stretch, state, output, num_steps: Int32[Array, ""], forced, layout: CacheLayout, *, step_tokens: int = 1):
    """Decodes `num_steps` steps, at most `stretch_steps` a stretch: `(state, output, status i32[B] of the last stretch)`.

    `stretch(state, output, part: Stretch)` grows the requests and decodes: `(state, output, status)`. `output.tokens` has
    the axes `B, S, ...`; a step computes at most `step_tokens` tokens of a request.
    """
    (batch, max_steps), most = output.tokens.shape[:2], layout.cache.stretch_steps
    forced = jnp.full((batch, max_steps), -1, jnp.int32) if forced is None else forced
    num_steps = jnp.minimum(num_steps, max_steps)

    def body(i, carry):
        state, output, _ = carry
        seq, first = state.sequences, i * most
        count = jnp.minimum(most, num_steps - first)
        target = jnp.where(seq.running, jnp.minimum(seq.length + count * step_tokens, seq.limit), 0)
        return stretch(state, output, Stretch(first, count, target, forced))

    ok = jnp.full(batch, Status.OK, jnp.int32)
    return jax.lax.fori_loop(0, -(-num_steps // most), body, (state, output, ok))


def decode_stretch(
    model: DeepseekV4,
    sequences: Sequences,
    layers: tuple[LayerState, ...],
    cache: EntryCache,
    output: DecodeOutput,
    granted: Bool[Array, " B"],
    part: Stretch,
    layout: CacheLayout,
):
    """The steps of `part`: every running, granted request below its limit computes one token a step.

    Allocates nothing. Returns `(sequences, layers, cache, output)`.
    """

    def step(i, carry):
        seq, layers, cache, out = carry
        at = part.first + i
        active = seq.running & granted & (seq.length < seq.limit)
        span = make_span(None, seq.length, active.astype(jnp.int32), 1)
        tokens = jnp.where(active, seq.token, 0)[:, None]
        streams, layers, cache, selections = model(tokens, span, layers, cache, layout)
        logits = model.logits(streams)[:, 0]
        token = sample(logits, seq.seed, seq.temperature, seq.length + 1)
        wanted = part.forced[:, at]
        token = jnp.where(wanted >= 0, wanted, token)
        length = seq.length + active
        stopped = active & ((token == seq.stop_token) | (length >= seq.limit))
        seq = seq.replace(length=length, token=jnp.where(active, token, seq.token), running=seq.running & ~stopped)
        out = _record(out, at, active, token, logits, selections, layout)
        return seq, layers, cache, out

    return jax.lax.fori_loop(0, part.count, step, (sequences, layers, cache, output))


def _record(out: DecodeOutput, at, active, token, logits, selections: tuple[Selection, ...], layout) -> DecodeOutput:
    out = out.replace(tokens=out.tokens.at[:, at].set(jnp.where(active, token, -1)))
    if out.logits is not None:
        out = out.replace(logits=out.logits.at[:, at].set(jnp.where(active[:, None], logits, 0)))
    if out.indices is not None:
        picked = jnp.where(active[None, :, None], stack_indices(selections)[:, :, 0], -1)
        out = out.replace(indices=out.indices.at[:, :, at].set(picked))
    return out


def stack_indices(selections: tuple[Selection, ...]) -> Int32[Array, "L4 R T K"]:
    """What each C4 layer selected, in model order."""
    return jnp.stack([selection.indices for selection in selections])
