"""Caches filled as if long prompts had been prefilled, in seconds: what benchmarks of decode start from.

Page p of request r has the same random rows in either twin and in every tier, so that the twins can be compared bit for bit.
Blocks, losses and hot regions come from the product's own transitions, chunk by chunk; only the model is left out.
"""

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int32, UInt8

from hisparse_jax import decode, ffi, resident
from hisparse_jax.config import C4, C128
from hisparse_jax.layer_state import LayerState
from hisparse_jax.layout import CacheLayout
from hisparse_jax.prompts import chunk_schedule, start_running
from hisparse_jax.resident import ResidentState
from hisparse_jax.rows import RowFormat
from hisparse_jax.sequences import committed
from hisparse_jax.state import TieredState
from hisparse_jax.status import NULL_BLOCK, raise_for_status
from pallas_kernels.windows import write_windows

PAGES_AT_ONCE = 256


def filled(
    twin: str, layout: CacheLayout, contexts: Sequence[int], *, max_new_tokens: int, seed: int = 0, spread: float = 0.0
) -> TieredState | ResidentState:
    """A state in which slot r runs a request of `contexts[r]` tokens; hot buffers are cold.

    `spread` is the standard deviation of the logarithm of index keys' lengths: at 0 all entries score alike and selections
    change a lot from step to step, at 1 the same long keys win again and again. Raises `TierError` where the pools are too small.
    """
    state = (_admitted_tiered if twin == "tiered" else _admitted_resident)(layout, contexts, max_new_tokens)
    tables = jax.device_get(state.ledger.tables if isinstance(state, TieredState) else state.tables)
    written = [(r, p) for r, tokens in enumerate(contexts) for p in range(layout.num_pages(tokens))]
    requests, pages = (np.array(numbers, np.int32) for numbers in zip(*written))
    names, key = requests * layout.max_pages + pages, jax.random.key(seed)

    slab = state.slab
    for group, places in enumerate(layout.base_groups):
        for place in places:
            indexes = layout.model.compress_ratios[place.layer] == C4
            fmt = layout.index if indexes else layout.entry
            entries = layout.page_entries if indexes else layout.page_tokens // C128
            for ids, blocks in _batches(names, tables.base[group, requests, pages]):
                pages_of = _pages(ids, jax.random.fold_in(key, 2 * place.layer), fmt, entries, spread if indexes else 0.0)
                slab = _write_pages(slab, blocks, pages_of, offset=place.offset)
    pools = list(state.pools) if isinstance(state, TieredState) else []
    for number, layer in enumerate(layout.model.c4_layers):
        place, of_layer = layout.resident_place(layer), jax.random.fold_in(key, 2 * layer + 1)
        blocks = tables.resident[place.group, requests, pages]
        host = np.asarray(state.ledger.host_table)[requests, pages] if isinstance(state, TieredState) else np.zeros_like(blocks)
        for ids, on_gpu, on_host in _batches(names, blocks, host):
            pages_of = _pages(ids, of_layer, layout.entry, layout.page_entries, 0.0)
            slab = _write_pages(slab, on_gpu, pages_of, offset=place.offset)
            if isinstance(state, TieredState):
                source = ffi.pinned_ids(np.arange(1, len(ids) + 1))
                pools[number] = _write_host_pages(pools[number], pages_of, source, ffi.pinned_ids(on_host))
    state = state.replace(
        slab=slab, layers=_layers(state.layers, jax.random.fold_in(key, 2 * layout.model.num_hidden_layers), layout.entry)
    )
    return state.replace(pools=tuple(pools)) if isinstance(state, TieredState) else state


def _admitted_tiered(layout: CacheLayout, contexts: Sequence[int], max_new_tokens: int) -> TieredState:
    state = decode.init_state(layout)
    for slot, tokens in enumerate(contexts):
        state = decode.admit(state, slot, (0,) * tokens, layout=layout, max_new_tokens=max_new_tokens)
        for begin, count in chunk_schedule(0, tokens, layout.cache.chunk_tokens):
            state, plan, status = decode.prepare_chunk(state, jnp.int32(slot), jnp.int32(count), layout=layout)
            raise_for_status(int(status), f"chunk at token {begin} of request {slot}")
            state = decode.commit_backup(_grown(state, slot, count), plan, layout=layout)
        state, tail = decode.plan_tail_backup(state, jnp.int32(slot), layout=layout)
        state = decode.commit_backup(state, tail, layout=layout)
        state = state.replace(sequences=start_running(state.sequences, slot))
    return state


def _admitted_resident(layout: CacheLayout, contexts: Sequence[int], max_new_tokens: int) -> ResidentState:
    state = resident.init_state(layout)
    for slot, tokens in enumerate(contexts):
        state = resident.admit(state, slot, (0,) * tokens, layout=layout, max_new_tokens=max_new_tokens)
        for begin, count in chunk_schedule(0, tokens, layout.cache.chunk_tokens):
            state, status = resident.prepare_chunk(state, jnp.int32(slot), jnp.int32(count), layout=layout)
            raise_for_status(int(status), f"chunk at token {begin} of request {slot}")
            state = _grown(state, slot, count)
        state = resident.end_prefill(state, slot)
    return state


def _grown(state, slot: int, count: int):
    """The state with `count` more tokens in `slot`, as a chunk leaves it."""
    length = np.array(state.sequences.length)
    length[slot] += count
    return state.replace(sequences=committed(state.sequences.replace(length=length)))


def _batches(*columns: np.ndarray):
    """Columns cut to batches of one length, the last one padded with zeros: page 0 to the null block."""
    for begin in range(0, len(columns[0]), PAGES_AT_ONCE):
        parts = [column[begin : begin + PAGES_AT_ONCE] for column in columns]
        yield tuple(np.pad(part, (0, PAGES_AT_ONCE - len(part))) for part in parts)


@functools.partial(jax.jit, static_argnames=("fmt", "entries", "spread"))
def _pages(names: Int32[Array, " M"], key, fmt: RowFormat, entries: int, spread: float) -> UInt8[Array, "M page_bytes"]:
    """Random pages by name. A program of its own: fused with what writes them, it might round otherwise for each tier."""

    def one(name):
        rows, lengths = jax.random.split(jax.random.fold_in(key, name))
        values = jax.random.normal(rows, (entries, fmt.channels))
        return values * jnp.exp(spread * jax.random.normal(lengths, (entries, 1)))

    return fmt.join_page(fmt.pack(jax.vmap(one)(names).astype(fmt.compute_dtype)))


@functools.partial(jax.jit, static_argnames="offset", donate_argnums=0)
def _write_pages(
    slab: UInt8[Array, "N stride"], blocks: Int32[Array, " M"], pages: UInt8[Array, "M page_bytes"], *, offset: int
) -> UInt8[Array, "N stride"]:
    return write_windows(slab, jnp.where(blocks == NULL_BLOCK, slab.shape[0], blocks), jnp.full_like(blocks, offset), pages)


@functools.partial(jax.jit, donate_argnums=0)
def _write_host_pages(pool, pages: UInt8[Array, "M page_bytes"], source, destination):
    pool, _ = ffi.backup_pages(pool, jnp.concatenate([jnp.zeros_like(pages[:1]), pages]), source, destination, offset=0)
    return pool


def _layers(layers: tuple[LayerState, ...], key, entry: RowFormat) -> tuple[LayerState, ...]:
    """Windows and rings of every slot, random; the same for the same batch."""

    def random(x, name: int):
        return None if x is None else jax.random.normal(jax.random.fold_in(key, name), x.shape)

    return tuple(
        LayerState(
            window=entry.pack(
                jax.random.normal(jax.random.fold_in(key, 3 * i), (*x.window.shape[:2], entry.channels), entry.compute_dtype)
            ),
            ring=random(x.ring, 3 * i + 1),
            index_ring=random(x.index_ring, 3 * i + 2),
        )
        for i, x in enumerate(layers)
    )
