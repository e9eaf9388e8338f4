"""Prefill and decode through the tiers; `resident` is the twin with the same signatures.

Between stretches of steps `room.make_room` grows requests and gives pages up; a stretch itself allocates nothing. Prefill backs
pages up through the FFI call: the program of a chunk forks the backup of the pages that the chunk before it sealed,
computes, and joins; those pages are leased meanwhile, so nothing writes or gives them up.
"""

import functools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int32

from hisparse_jax import coordinator, ffi, spill
from hisparse_jax.hot_map import reset_requests
from hisparse_jax.layout import CacheLayout
from hisparse_jax.model.blocks import DeepseekV4
from hisparse_jax.model.numerics import border
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
from hisparse_jax.room import PageIds, commit_copies, copy_c4_pages, make_room, new_pages_for
from hisparse_jax.speculative import DraftSource, VerifyOutput, init_verify_output, verify_stretch
from hisparse_jax.spill import SpillPlan
from hisparse_jax.state import TieredState, init_state
from hisparse_jax.status import NULL_BLOCK, Status, raise_for_status
from hisparse_jax.steps import DecodeOutput, Stretch, compute_chunk, decode_stretch, init_output, run_stretches, traces
from hisparse_jax.tiered import StagedEntries, TieredEntries, reset_traffic

__all__ = [
    "admit", "check_prompt", "decode_steps", "end_prefill", "finish", "flush_backup", "init_state", "prefill", "prefill_step",
    "verify_steps",
]  # fmt: skip


def admit(
    state: TieredState, slot: int, prompt: Sequence[int], *, layout: CacheLayout, max_new_tokens: int, **options
) -> TieredState:
    """Takes `slot` and a host page for every page of the prompt, or raises and takes nothing.

    Options: `seed`, `temperature`, `stop_token`. Raises `PromptError` for bad input, `TierError` where host pages are short.
    """
    check_prompt(prompt, layout, max_new_tokens)
    sequences = admit_sequence(state.sequences, slot, len(prompt) + max_new_tokens, **options)
    (ledger, hot_maps, traffic), status = _take_slot(
        (state.ledger, state.hot_maps, state.traffic), jnp.int32(slot), jnp.int32(layout.num_pages(len(prompt)))
    )
    raise_for_status(int(status), f"admission to slot {slot}")
    return state.replace(sequences=sequences, ledger=ledger, hot_maps=hot_maps, traffic=traffic)


@jax.jit
def _take_slot(parts, slot: Int32[Array, ""], num_pages: Int32[Array, ""]):
    """Host pages for a prompt, an empty hot map and zeroed counters; where the status is not OK nothing is to be kept."""
    ledger, hot_maps, traffic = parts
    ledger, status = coordinator.admit(ledger, slot, num_pages)
    mask = jnp.arange(traffic.swapped_rows.shape[0], dtype=jnp.int32) == slot
    return (ledger, tuple(reset_requests(m, mask) for m in hot_maps), reset_traffic(traffic, mask)), status


@functools.partial(jax.jit, static_argnames="layout", donate_argnames="state")
def prepare_chunk(
    state: TieredState, slot: Int32[Array, ""], count: Int32[Array, ""], *, layout: CacheLayout
) -> tuple[TieredState, SpillPlan, Int32[Array, ""]]:
    """Makes room for `count` more tokens of a request and leases the pages they will seal: `(state, backup, status)`."""
    traces["decode.prepare_chunk"] += 1
    batch = layout.cache.max_requests
    target = jnp.zeros(batch, jnp.int32).at[slot].set(state.sequences.length[slot] + count)
    state, granted, status = make_room(
        state, new_pages_for(state, target, layout), layout, max_new_pages=layout.cache.chunk_pages
    )
    sealed = jnp.where(granted, target // layout.page_tokens, 0)
    ledger, plan = _plan_backup(state, slot, sealed[slot], layout)
    return state.replace(ledger=ledger), plan, status[slot]


def _plan_backup(state: TieredState, slot, num_pages, layout: CacheLayout):
    """Plans the copies of pages 0..num_pages-1 that have no complete or pending host copy."""
    ledger = state.ledger
    page = jnp.arange(layout.max_pages)[None, :]
    mine = (jnp.arange(layout.cache.max_requests) == slot)[:, None]
    wanted = mine & (page < num_pages) & ~ledger.valid
    return spill.plan_spill(ledger, wanted, release_after=False, max_pages=layout.cache.chunk_pages)


@functools.partial(jax.jit, static_argnames="layout", donate_argnames="state")
def plan_tail_backup(state: TieredState, slot: Int32[Array, ""], *, layout: CacheLayout) -> tuple[TieredState, SpillPlan]:
    """Leases the prompt's last, partly filled page: write-through keeps its host copy complete from here on."""
    pages = -(-state.sequences.length[slot] // layout.page_tokens)
    ledger, plan = _plan_backup(state, slot, pages, layout)
    return state.replace(ledger=ledger), plan


@program("layout", "all_logits")
def prefill_chunk(
    model: DeepseekV4,
    state: TieredState,
    tokens: Int32[Array, " C"],
    slot: Int32[Array, ""],
    count: Int32[Array, ""],
    source: PageIds,
    dest: Int32[Array, " M"],
    *,
    layout: CacheLayout,
    all_logits: bool = False,
):
    """Prefills `count` tokens of a request while pages `source` are copied to host blocks `dest`.

    `source` (slab blocks, an array per group) and `dest` live in pinned host memory; 0 copies nothing. Returns
    `(state, logits, indices)`.
    """
    traces["decode.prefill_chunk"] += 1
    state = copy_c4_pages(ffi.fork_backup, state, source, dest, layout)
    cache = StagedEntries(
        slab=state.slab,
        base=state.ledger.tables.base,
        resident=state.ledger.tables.resident,
        pools=state.pools,
        host=state.ledger.host_table,
        traffic=state.traffic,
        homeless=state.homeless,
    )
    sequences, layers, cache, logits, indices = compute_chunk(
        model, state.sequences, state.layers, cache, tokens, slot, count, layout, all_logits=all_logits
    )
    assert isinstance(cache, StagedEntries)
    slab, pools, logits = border((cache.slab, cache.pools, logits))
    for i, layer in enumerate(layout.model.c4_layers):
        pool, slab = ffi.join_backup(pools[i], slab, layer=f"layer {layer}")
        pools = (*pools[:i], pool, *pools[i + 1 :])
    state = state.replace(
        sequences=sequences, layers=layers, slab=slab, pools=pools, traffic=cache.traffic, homeless=cache.homeless
    )
    return state, logits, indices


@functools.partial(jax.jit, static_argnames="layout", donate_argnames="state")
def backup(state: TieredState, source: PageIds, dest: Int32[Array, " M"], *, layout: CacheLayout) -> TieredState:
    """Copies pages to the host, nothing beside it; operands as in `prefill_chunk`."""
    return copy_c4_pages(ffi.backup_pages, state, source, dest, layout)


@functools.partial(jax.jit, static_argnames="layout", donate_argnames="state")
def commit_backup(state: TieredState, plan: SpillPlan, *, layout: CacheLayout) -> TieredState:
    """Ends the leases of a backup that an earlier dispatch carried out, and marks its pages valid."""
    return commit_copies(state, plan)


def prefill(
    model: DeepseekV4,
    state: TieredState,
    slot: int,
    prompt: Sequence[int],
    *,
    layout: CacheLayout,
    chunks: Sequence[int] | None = None,
    all_logits: bool = False,
) -> tuple[TieredState, PrefillOutput, Status]:
    """Prefills what an admitted request still lacks of its prompt, chunk by chunk, and lets it run.

    `chunks` are the chunks' lengths (default: as long as compiled). Where blocks are short, even with the request's own
    history on the host, the status says so, the request stays at the chunk it reached, and a later call goes on from there.
    """
    outputs: list[ChunkOutput] = []
    pending = None
    for begin, count in chunk_schedule(
        int(np.asarray(state.sequences.length)[slot]), len(prompt), layout.cache.chunk_tokens, chunks
    ):
        state, pending, output, status = prefill_step(
            model, state, slot, prompt, begin, count, pending, layout=layout, all_logits=all_logits
        )
        if output is None:
            return state, PrefillOutput.of(outputs, all_logits=all_logits), status
        outputs.append(output)
    state = end_prefill(state, slot, pending, layout=layout)
    return state, PrefillOutput.of(outputs, all_logits=all_logits), Status.OK


def prefill_step(
    model: DeepseekV4,
    state: TieredState,
    slot: int,
    prompt: Sequence[int],
    begin: int,
    count: int,
    pending: SpillPlan | None = None,
    *,
    layout: CacheLayout,
    all_logits: bool = False,
) -> tuple[TieredState, SpillPlan | None, ChunkOutput | None, Status]:
    """Prefills tokens `begin .. begin + count - 1` of an admitted request that holds the first `begin`.

    `pending` is the backup that the step before this one returned; it is carried out beside this chunk. Hand on the new one
    to the next step or to `end_prefill`; decode may run in between. Where blocks are short, nothing was computed: no output,
    the status says why, and `pending` was flushed.
    """
    at, size = jnp.int32(slot), jnp.int32(count)
    state, plan, code = prepare_chunk(state, at, size, layout=layout)
    if int(code) == Status.OUT_OF_BLOCKS and pending is not None:  # leased pages may go once they are copied
        state, pending = flush_backup(state, pending, layout=layout), None
        state, plan, code = prepare_chunk(state, at, size, layout=layout)
    if (status := Status(int(code))) != Status.OK:
        return flush_backup(state, pending, layout=layout), None, None, status
    tokens = pad_chunk(prompt, begin, count, layout.cache.chunk_tokens)
    state, logits, indices = prefill_chunk(
        model, state, tokens, at, size, *_page_ids(pending, layout), layout=layout, all_logits=all_logits
    )
    if pending is not None:
        state = commit_backup(state, pending, layout=layout)
    return state, plan, ChunkOutput(logits, indices, count), status


def end_prefill(state: TieredState, slot: int, pending: SpillPlan | None, *, layout: CacheLayout) -> TieredState:
    """Carries out what is left to back up of a prefilled prompt, and lets the request run."""
    state = flush_backup(state, pending, layout=layout)
    if layout.cache.backup == "write_through":
        state, tail = plan_tail_backup(state, jnp.int32(slot), layout=layout)
        state = flush_backup(state, tail, layout=layout)
    return state.replace(sequences=start_running(state.sequences, slot))


def flush_backup(state: TieredState, pending: SpillPlan | None, *, layout: CacheLayout) -> TieredState:
    """Carries out a pending backup now, with nothing beside it; its leases end."""
    if pending is None:
        return state
    return commit_backup(backup(state, *_page_ids(pending, layout), layout=layout), pending, layout=layout)


def _page_ids(plan: SpillPlan | None, layout: CacheLayout):
    if plan is None:
        none = ffi.pinned_ids(np.full(layout.cache.chunk_pages, NULL_BLOCK, np.int32))
        return (none,) * layout.num_resident_groups, none
    return tuple(ffi.pinned_ids(blocks) for blocks in np.asarray(plan.source)), ffi.pinned_ids(np.asarray(plan.host))


@program("layout", "max_steps", "return_logits", "return_indices", "metrics")
def decode_steps(
    model: DeepseekV4,
    state: TieredState,
    num_steps: Int32[Array, ""],
    forced: Int32[Array, "B S"] | None = None,
    *,
    layout: CacheLayout,
    max_steps: int,
    return_logits: bool = False,
    return_indices: bool = False,
    metrics: bool = True,
) -> tuple[TieredState, DecodeOutput, Int32[Array, " B"]]:
    """Decodes `num_steps <= max_steps` steps of every running request in one dispatch.

    Returns `(state, output, status i32[B])`: a status other than OK names a request that lacked a page on the GPU or the
    host and was left out of the stretches it could not grow for; call again once there is room.
    """
    traces["decode.decode_steps"] += 1
    output = init_output(layout, max_steps, logits=return_logits, indices=return_indices, counts=metrics)

    stretch = functools.partial(_run_stretch, functools.partial(decode_stretch, model), layout)
    return run_stretches(stretch, state, output, num_steps, forced, layout)


@program("layout", "max_steps", "return_logits", "return_indices", "metrics")
def verify_steps(
    model: DeepseekV4,
    state: TieredState,
    source: DraftSource,
    num_steps: Int32[Array, ""],
    *,
    layout: CacheLayout,
    max_steps: int,
    return_logits: bool = False,
    return_indices: bool = False,
    metrics: bool = True,
) -> tuple[TieredState, VerifyOutput, Int32[Array, " B"]]:
    """Runs `num_steps <= max_steps` steps in one dispatch, each of which verifies up to `draft_rows` drafts of every request.

    A step gives a request 1 to `1 + draft_rows` tokens: those that one-by-one decode gives, whatever `source` proposes. State
    and status as of `decode_steps`, which may be called in between.
    """
    traces["decode.verify_steps"] += 1
    output = init_verify_output(layout, max_steps, logits=return_logits, indices=return_indices, counts=metrics)
    stretch = functools.partial(_run_stretch, functools.partial(verify_stretch, model, source), layout)
    return run_stretches(stretch, state, output, num_steps, None, layout, step_tokens=layout.cache.query_rows)


def _run_stretch(compute: Callable, layout: CacheLayout, state: TieredState, output, part: Stretch):
    """Makes room for a stretch, then `compute`s its steps on the tiers: `(state, output, status)`."""
    state, granted, status = make_room(state, new_pages_for(state, part.target, layout), layout, max_new_pages=1)
    ledger = state.ledger
    cache = TieredEntries(
        slab=state.slab,
        base=ledger.tables.base,
        resident=ledger.tables.resident,
        pools=state.pools,
        host=ledger.host_table,
        traffic=state.traffic,
        hot=ledger.hot,
        hot_maps=state.hot_maps,
        counts=output.counts,
        homeless=state.homeless,
    )
    sequences, layers, cache, output = compute(state.sequences, state.layers, cache, output, granted, part, layout)
    state = state.replace(
        sequences=sequences,
        layers=layers,
        slab=cache.slab,
        pools=cache.pools,
        hot_maps=cache.hot_maps,
        traffic=cache.traffic,
        homeless=cache.homeless,
    )
    return state, output.replace(counts=cache.counts), status


@functools.partial(jax.jit, donate_argnames="state")
def finish(state: TieredState, slot: Int32[Array, ""]) -> tuple[TieredState, Int32[Array, ""]]:
    """Ends a request and gives its blocks back in both tiers: `(state, status)`."""
    ledger, status = coordinator.finish(state.ledger, slot)
    mask = jnp.arange(state.sequences.running.shape[0]) == slot
    sequences = state.sequences.replace(running=state.sequences.running & ~mask)
    maps = tuple(reset_requests(m, mask) for m in state.hot_maps)
    return state.replace(ledger=ledger, sequences=sequences, hot_maps=maps), status
