"""The fully resident twin: the same model, signatures and numeric functions, every entry on the GPU.

No host tier, no hot buffer, nothing imported from either. Every claim about the tiers is a comparison with this module.
"""

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jaxtyping import Array, Int32, UInt8

from hisparse_jax.block_tables import BlockTables, append_pages, free_request, init_tables
from hisparse_jax.entries import EntryCache, Selection, rows_of
from hisparse_jax.layer_state import LayerState, init_layer_states
from hisparse_jax.layout import CacheLayout
from hisparse_jax.model.blocks import DeepseekV4
from hisparse_jax.model.span import Span
from hisparse_jax.prompts import PrefillOutput, admit_sequence, check_prompt, chunk_schedule, pad_chunk, start_running
from hisparse_jax.sequences import Sequences, committed, init_sequences
from hisparse_jax.status import Status
from hisparse_jax.steps import DecodeOutput, compute_chunk, decode_stretch, init_output, traces

__all__ = ["admit", "check_prompt", "decode_steps", "finish", "init_state", "prefill"]


class ResidentEntries(EntryCache):
    """C4 entries in the slab, found through the block table alone."""

    def store_c4(self, layer, rows, numbers, real, span: Span, layout: CacheLayout):
        return self._store_resident(layer, rows, numbers, real, span, layout)

    def fetch_c4(self, layer, selection: Selection, span: Span, layout: CacheLayout):
        place, picked = layout.resident_place(layer), selection.indices
        rows = rows_of(picked, self.resident[place.group], span, layout.page_entries, layout.row_step, picked >= 0)
        return self._read_c4(rows, place, layout), self, selection


class ResidentState(struct.PyTreeNode):
    """Everything a run keeps from call to call; donated to each."""

    sequences: Sequences
    layers: tuple[LayerState, ...]
    slab: UInt8[Array, "N stride"]
    tables: BlockTables


def init_state(layout: CacheLayout) -> ResidentState:
    """An empty cache of `layout`."""
    batch = layout.cache.max_requests
    state = ResidentState(
        sequences=init_sequences(batch),
        layers=init_layer_states(layout),
        slab=jnp.zeros((layout.gpu_blocks, layout.stride), jnp.uint8),
        tables=init_tables(layout.gpu_blocks, layout.num_base_groups, layout.num_resident_groups, batch, layout.max_pages),
    )
    return committed(state)


def _entries(state: ResidentState) -> ResidentEntries:
    return ResidentEntries(slab=state.slab, base=state.tables.base, resident=state.tables.resident)


def _pages_for(state: ResidentState, tokens: Int32[Array, " B"], layout: CacheLayout) -> Int32[Array, " B"]:
    return jnp.maximum(-(-tokens // layout.page_tokens) - state.tables.num_pages, 0)


@functools.partial(jax.jit, static_argnames="layout", donate_argnames="state")
def prepare_chunk(
    state: ResidentState, slot: Int32[Array, ""], count: Int32[Array, ""], *, layout: CacheLayout
) -> tuple[ResidentState, Int32[Array, ""]]:
    """Takes the pages that `count` more tokens of a request need: `(state, status)`."""
    traces["resident.prepare_chunk"] += 1
    target = jnp.zeros(layout.cache.max_requests, jnp.int32).at[slot].set(state.sequences.length[slot] + count)
    tables, _, status = append_pages(state.tables, _pages_for(state, target, layout), max_new_pages=layout.cache.chunk_pages)
    return state.replace(tables=tables), status[slot]


@functools.partial(jax.jit, static_argnames=("layout", "all_logits"), donate_argnames="state")
def prefill_chunk(
    model: DeepseekV4,
    state: ResidentState,
    tokens: Int32[Array, " C"],
    slot: Int32[Array, ""],
    count: Int32[Array, ""],
    *,
    layout: CacheLayout,
    all_logits: bool = False,
):
    """Prefills `count` tokens of a request whose pages are there: `(state, logits, indices)`."""
    traces["resident.prefill_chunk"] += 1
    sequences, layers, cache, logits, indices = compute_chunk(
        model, state.sequences, state.layers, _entries(state), tokens, slot, count, layout, all_logits=all_logits
    )
    return state.replace(sequences=sequences, layers=layers, slab=cache.slab), logits, indices


def admit(state: ResidentState, slot: int, prompt: Sequence[int], *, layout: CacheLayout, max_new_tokens: int, **options):
    """Takes `slot` for a prompt; pages come as it grows. Options: `seed`, `temperature`, `stop_token`."""
    check_prompt(prompt, layout, max_new_tokens)
    return state.replace(sequences=admit_sequence(state.sequences, slot, len(prompt) + max_new_tokens, **options))


def prefill(
    model: DeepseekV4,
    state: ResidentState,
    slot: int,
    prompt: Sequence[int],
    *,
    layout: CacheLayout,
    chunks: Sequence[int] | None = None,
    all_logits: bool = False,
) -> tuple[ResidentState, PrefillOutput, Status]:
    """Prefills what an admitted request still lacks of its prompt, chunk by chunk, and lets it run.

    `chunks` are the chunks' lengths (default: as long as compiled). Where blocks are short the status says so, the request
    stays at the chunk it reached, and a later call goes on from there.
    """
    logits, indices, at = [], [], jnp.int32(slot)
    for begin, count in chunk_schedule(
        int(np.asarray(state.sequences.length)[slot]), len(prompt), layout.cache.chunk_tokens, chunks
    ):
        state, status = prepare_chunk(state, at, jnp.int32(count), layout=layout)
        if (status := Status(int(status))) != Status.OK:
            return state, PrefillOutput.of(logits, indices, all_logits=all_logits), status
        tokens = pad_chunk(prompt, begin, count, layout.cache.chunk_tokens)
        state, chunk_logits, picked = prefill_chunk(
            model, state, tokens, at, jnp.int32(count), layout=layout, all_logits=all_logits
        )
        logits.append((chunk_logits, count if all_logits else 1))
        indices.append((picked, count))
    state = state.replace(sequences=start_running(state.sequences, slot))
    return state, PrefillOutput.of(logits, indices, all_logits=all_logits), Status.OK


@functools.partial(jax.jit, static_argnames=("layout", "max_steps", "return_logits", "return_indices"), donate_argnames="state")
def decode_steps(
    model: DeepseekV4,
    state: ResidentState,
    num_steps: Int32[Array, ""],
    forced: Int32[Array, "B S"] | None = None,
    *,
    layout: CacheLayout,
    max_steps: int,
    return_logits: bool = False,
    return_indices: bool = False,
) -> tuple[ResidentState, DecodeOutput, Int32[Array, " B"]]:
    """Decodes `num_steps <= max_steps` steps of every running request in one dispatch.

    Returns `(state, output, status i32[B])`: a status other than OK names a request that lacked a page and was left out of
    the stretches it could not grow for; call again once there is room.
    """
    traces["resident.decode_steps"] += 1
    batch, most = layout.cache.max_requests, layout.cache.stretch_steps
    forced = jnp.full((batch, max_steps), -1, jnp.int32) if forced is None else forced
    output = init_output(layout, max_steps, logits=return_logits, indices=return_indices)
    num_steps = jnp.minimum(num_steps, max_steps)

    def stretch(i, carry):
        state, output, _ = carry
        count = jnp.minimum(most, num_steps - i * most)
        seq = state.sequences
        ask = jnp.where(seq.running, jnp.minimum(seq.length + count, seq.limit), 0)
        tables, granted, status = append_pages(state.tables, _pages_for(state, ask, layout), max_new_pages=1)
        state = state.replace(tables=tables)
        sequences, layers, cache, output = decode_stretch(
            model, seq, state.layers, _entries(state), output, granted, forced, i * most, count, layout
        )
        return state.replace(sequences=sequences, layers=layers, slab=cache.slab), output, status

    ok = jnp.full(batch, Status.OK, jnp.int32)
    return jax.lax.fori_loop(0, -(-num_steps // most), stretch, (state, output, ok))


@functools.partial(jax.jit, donate_argnames="state")
def finish(state: ResidentState, slot: Int32[Array, ""]) -> tuple[ResidentState, Int32[Array, ""]]:
    """Ends a request and gives its blocks back: `(state, status)`."""
    tables, status = free_request(state.tables, slot)
    running = state.sequences.running.at[slot].set(False)
    return state.replace(tables=tables, sequences=state.sequences.replace(running=running)), status
