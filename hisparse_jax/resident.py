"""The fully resident twin: the same model, signatures and numeric functions, every entry on the GPU.

No host tier, no hot buffer, nothing imported from either. Every claim about the tiers is a comparison with this module.
"""

import functools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jaxtyping import Array, Int32, UInt8

from hisparse_jax.block_tables import BlockTables, append_pages, free_request, init_tables
from hisparse_jax.device_memory import check_slab_budget
from hisparse_jax.entries import EntryCache, Selection, rows_of
from hisparse_jax.layer_state import LayerState, init_layer_states
from hisparse_jax.layout import CacheLayout
from hisparse_jax.model.blocks import DeepseekV4
from hisparse_jax.model.span import Span
from hisparse_jax.programs import program
from hisparse_jax.prompts import (
    ChunkOutput,
    PrefillOutput,
    admit_sequence,
    check_prompt,
    chunk_schedule,
    pad_chunk,
    start_running,
)
from hisparse_jax.sequences import Sequences, committed, init_sequences
from hisparse_jax.speculative import DraftSource, VerifyOutput, init_verify_output, verify_stretch
from hisparse_jax.status import Status
from hisparse_jax.steps import DecodeOutput, Stretch, compute_chunk, decode_stretch, init_output, run_stretches, traces

__all__ = [
    "admit",
    "check_prompt",
    "decode_steps",
    "end_prefill",
    "finish",
    "init_state",
    "prefill",
    "prefill_step",
    "verify_steps",
]


class ResidentEntries(EntryCache):
    """C4 entries in the slab, found through the block table alone."""

    def store_c4(self, layer, rows, numbers, real, span: Span, layout: CacheLayout):
        return self._store_resident(layer, rows, numbers, real, span, layout)

    def fetch_c4(self, layer, selection: Selection, span: Span, layout: CacheLayout):
        place, picked = layout.resident_place(layer), selection.indices
        rows = rows_of(picked, self.resident[place.group], span, layout.page_entries, layout.row_step, picked >= 0)
        return self._selected(rows, picked, layer, span, layout), self, selection


class ResidentState(struct.PyTreeNode):
    """Everything a run keeps from call to call; donated to each."""

    sequences: Sequences
    layers: tuple[LayerState, ...]
    slab: UInt8[Array, "N stride"]
    tables: BlockTables


def init_state(layout: CacheLayout) -> ResidentState:
    """An empty cache of `layout`; `ConfigError` where its slab exceeds the device."""
    check_slab_budget(layout)
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


@program("layout", "all_logits")
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
    outputs: list[ChunkOutput] = []
    for begin, count in chunk_schedule(
        int(np.asarray(state.sequences.length)[slot]), len(prompt), layout.cache.chunk_tokens, chunks
    ):
        state, output, status = prefill_step(model, state, slot, prompt, begin, count, layout=layout, all_logits=all_logits)
        if output is None:
            return state, PrefillOutput.of(outputs, all_logits=all_logits), status
        outputs.append(output)
    return end_prefill(state, slot), PrefillOutput.of(outputs, all_logits=all_logits), Status.OK


def prefill_step(
    model: DeepseekV4,
    state: ResidentState,
    slot: int,
    prompt: Sequence[int],
    begin: int,
    count: int,
    *,
    layout: CacheLayout,
    all_logits: bool = False,
) -> tuple[ResidentState, ChunkOutput | None, Status]:
    """Prefills tokens `begin .. begin + count - 1` of an admitted request that holds the first `begin`.

    Decode may run between two steps. Where blocks are short, nothing was computed: no output, and the status says why.
    """
    at, size = jnp.int32(slot), jnp.int32(count)
    state, code = prepare_chunk(state, at, size, layout=layout)
    if (status := Status(int(code))) != Status.OK:
        return state, None, status
    tokens = pad_chunk(prompt, begin, count, layout.cache.chunk_tokens)
    state, logits, indices = prefill_chunk(model, state, tokens, at, size, layout=layout, all_logits=all_logits)
    return state, ChunkOutput(logits, indices, count), status


def end_prefill(state: ResidentState, slot: int) -> ResidentState:
    """Lets a prefilled request run."""
    return state.replace(sequences=start_running(state.sequences, slot))


@program("layout", "max_steps", "return_logits", "return_indices")
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
    output = init_output(layout, max_steps, logits=return_logits, indices=return_indices)

    stretch = functools.partial(_run_stretch, functools.partial(decode_stretch, model), layout)
    return run_stretches(stretch, state, output, num_steps, forced, layout)


@program("layout", "max_steps", "return_logits", "return_indices")
def verify_steps(
    model: DeepseekV4,
    state: ResidentState,
    source: DraftSource,
    num_steps: Int32[Array, ""],
    *,
    layout: CacheLayout,
    max_steps: int,
    return_logits: bool = False,
    return_indices: bool = False,
) -> tuple[ResidentState, VerifyOutput, Int32[Array, " B"]]:
    """Runs `num_steps <= max_steps` steps in one dispatch, each of which verifies up to `draft_rows` drafts of every request.

    State and status as of `decode_steps`, which may be called in between.
    """
    traces["resident.verify_steps"] += 1
    output = init_verify_output(layout, max_steps, logits=return_logits, indices=return_indices)
    stretch = functools.partial(_run_stretch, functools.partial(verify_stretch, model, source), layout)
    return run_stretches(stretch, state, output, num_steps, None, layout, step_tokens=layout.cache.query_rows)


def _run_stretch(compute: Callable, layout: CacheLayout, state: ResidentState, output, part: Stretch):
    """Takes the pages of a stretch, then `compute`s its steps: `(state, output, status)`."""
    tables, granted, status = append_pages(state.tables, _pages_for(state, part.target, layout), max_new_pages=1)
    state = state.replace(tables=tables)
    sequences, layers, cache, output = compute(state.sequences, state.layers, _entries(state), output, granted, part, layout)
    return state.replace(sequences=sequences, layers=layers, slab=cache.slab), output, status


@functools.partial(jax.jit, donate_argnames="state")
def finish(state: ResidentState, slot: Int32[Array, ""]) -> tuple[ResidentState, Int32[Array, ""]]:
    """Ends a request and gives its blocks back: `(state, status)`."""
    tables, status = free_request(state.tables, slot)
    running = state.sequences.running.at[slot].set(False)
    return state.replace(tables=tables, sequences=state.sequences.replace(running=running)), status
