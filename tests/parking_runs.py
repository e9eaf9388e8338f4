"""Requests that leave their slots and come back, on a tiny model: what the tests of the parking share.

Tiny pages of 128 tokens, so that a request of 600 has five. Everything that no one owns is NaN while requests are parked.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ledger_model import recount
from runs import TINY, build, poisoned, text, tight_layout

from hisparse_jax import decode
from hisparse_jax.layout import CacheLayout
from hisparse_jax.parking import Parking, init_parking, preempt, resume
from hisparse_jax.state import TieredState
from hisparse_jax.status import Status

ON_A_GPU = pytest.param("gpu", marks=pytest.mark.gpu)

MAX_STEPS, CHUNK, PAGE = 16, 64, 128
OPTIONS = dict(
    max_model_len=1_024, max_requests=4, num_hot_slots=16, rows="f32", chunk_tokens=CHUNK, page_entries=32, stretch_steps=8,
    parked_requests=3,
)  # fmt: skip
SMALL = dataclasses.replace(TINY, num_hidden_layers=3, compress_ratios=(4, 128, 4))
LAYOUT = tight_layout(SMALL, (6, 5, 3), slack=1, **OPTIONS)
"""One page of C4 entries more than tails and hot regions take: one request alone loses none, three lose most."""

LONG, OTHER, BRIEF = text(600, vocab=128), text(530, seed=1, vocab=128), text(300, seed=2, vocab=128)
STEPS = 60
"""LONG crosses a page boundary after 40 steps."""


@dataclasses.dataclass
class Request:
    prompt: tuple[int, ...]
    steps: int
    slot: int = -1
    """-1: in none."""
    place: int = -1
    """In the parking; -1: in none."""
    logits: list = dataclasses.field(default_factory=list)
    tokens: list = dataclasses.field(default_factory=list)


class Engine:
    """Admits, prefills chunk by chunk, decodes, preempts and resumes; records every logit of every request."""

    def __init__(self, layout: CacheLayout = LAYOUT):
        self.layout, self.model = layout, build(SMALL, layout.cache.rows)
        self.state = poisoned(decode.init_state(layout))
        self.parking = init_parking(layout)
        self.requests: dict[str, Request] = {}

    def length(self, name: str) -> int:
        return int(self.state.sequences.length[self.requests[name].slot])

    def admit(self, name: str, slot: int, prompt: tuple[int, ...], steps: int, **options):
        self.state = decode.admit(self.state, slot, prompt, layout=self.layout, max_new_tokens=steps, **options)
        self.requests[name] = Request(prompt, steps, slot)

    def prefill(self, name: str, until: int | None = None, chunk: int = CHUNK):
        """Computes the prompt up to `until` (default: all of it, and lets the request run); nothing is in flight after it."""
        request, pending = self.requests[name], None
        end = until or len(request.prompt)
        while (begin := self.length(name)) < end:
            pending = self.chunk(name, min(chunk, end - begin), pending)
        if until is None:
            self.state = decode.end_prefill(self.state, request.slot, pending, layout=self.layout)
            request.tokens.append(int(self.state.sequences.token[request.slot]))
        else:
            self.flush(pending)

    def chunk(self, name: str, count: int, pending=None):
        """One chunk; returns the backup of the pages that it sealed, still to be made."""
        request = self.requests[name]
        self.state, pending, output, status = decode.prefill_step(
            self.model, self.state, request.slot, request.prompt, self.length(name), count, pending, layout=self.layout,
            all_logits=True,
        )  # fmt: skip
        assert status is Status.OK and output is not None
        request.logits.append(np.array(output.logits)[:count])
        return pending

    def flush(self, pending):
        self.state = decode.flush_backup(self.state, pending, layout=self.layout)

    def decode(self, steps: int = STEPS):
        """So many steps of every running request, or fewer where all have stopped."""
        while steps > 0 and bool(self.state.sequences.running.any()):
            count = min(steps, MAX_STEPS)
            self.state, output, status = decode.decode_steps(
                self.model, self.state, jnp.int32(count), layout=self.layout, max_steps=MAX_STEPS, return_logits=True
            )
            assert not np.asarray(status).any(), status
            tokens, logits = np.array(output.tokens), np.array(output.logits)
            for request in self.requests.values():
                if request.slot >= 0:
                    taken = tokens[request.slot, :count] >= 0
                    request.tokens += tokens[request.slot, :count][taken].tolist()
                    request.logits.append(logits[request.slot, :count][taken])
            steps -= count

    def preempt(self, name: str):
        request = self.requests[name]
        self.state, self.parking, place, status = preempt(self.state, self.parking, request.slot, layout=self.layout)
        assert status is Status.OK and place is not None
        request.slot, request.place = -1, place
        self.check()
        self.poison()

    def resume(self, name: str, slot: int):
        request = self.requests[name]
        self.state, self.parking, status = resume(self.state, self.parking, request.place, slot, layout=self.layout)
        assert status is Status.OK
        request.slot, request.place = slot, -1
        self.check()

    def finish(self, name: str):
        slot = self.requests.pop(name).slot
        self.state, status = decode.finish(self.state, jnp.int32(slot))
        assert int(status) == Status.OK

    def check(self):
        """Tables, leases, places and free queues partition the pools; hot maps name their own request's blocks alone."""
        ledger, lot = self.state.ledger, self.parking.ledger
        leases = {}
        for lease, held in ((np.asarray(ledger.gpu_lease), 1), (np.asarray(ledger.host_lease), 0)):
            for block in np.flatnonzero(lease):
                host, sources = leases.get(int(lease[block]), (0, ()))
                leases[int(lease[block])] = (host, (*sources, int(block))) if held else (int(block), sources)
        recount(ledger, leases, lot)
        hosts = np.asarray(ledger.host_table)
        for hot_map in self.state.hot_maps:
            for slot, rows in enumerate(np.asarray(hot_map.slot_host)):
                assert set((rows[rows >= 0] // self.layout.page_entries).tolist()) <= set(hosts[slot].tolist())
        assert not np.asarray(self.state.homeless).any()

    def poison(self):
        self.state, self.parking = poison_unowned(self.state, self.parking)

    def check_empty(self):
        """Every pool is as full as at the start, every map and place empty."""
        self.check()
        ledger, lot = self.state.ledger, self.parking.ledger
        free = [int(pool.num_free) for pool in (ledger.tables.pool, ledger.host, lot.pool)]
        assert free == [self.layout.gpu_blocks - 1, self.layout.host_blocks - 1, self.layout.parking_blocks - 1]
        assert not np.asarray(lot.taken).any()
        assert all((np.asarray(m.slot_host) == -1).all() for m in self.state.hot_maps)


def poison_unowned(state: TieredState, parking: Parking) -> tuple[TieredState, Parking]:
    """Every byte that nobody owns set to 255: slab, host pools, parking, windows and rings."""
    ledger, lot = state.ledger, parking.ledger
    free_gpu, free_host, free_parked = (
        np.flatnonzero(np.asarray(pool.references) == 0) for pool in (ledger.tables.pool, ledger.host, lot.pool)
    )
    idle = np.flatnonzero(~np.asarray(ledger.admitted))
    empty = 1 + np.flatnonzero(~np.asarray(lot.taken))
    state = state.replace(
        slab=filled(state.slab, free_gpu),
        pools=tuple(filled(pool, free_host) for pool in state.pools),
        layers=jax.tree.map(lambda x: filled(x, idle), state.layers),
    )
    parking = parking.replace(
        pages=tuple(filled(pages, free_parked) for pages in parking.pages), snapshots=filled(parking.snapshots, empty)
    )
    return state, parking


def filled(x, rows):
    values = np.array(x)
    values[rows] = 255 if x.dtype == jnp.uint8 else np.nan
    return jax.device_put(values, x.sharding)


@functools.cache
def undisturbed(layout: CacheLayout, prompt: tuple[int, ...], steps: int, options: tuple = ()) -> Request:
    """The request alone, never preempted."""
    engine = Engine(layout)
    engine.admit("alone", 0, prompt, steps, **dict(options))
    engine.prefill("alone")
    engine.decode(steps)
    return engine.requests["alone"]


def assert_undisturbed(engine: Engine, name: str, **options):
    request = engine.requests[name]
    alone = undisturbed(engine.layout, request.prompt, request.steps, tuple(options.items()))
    mine, theirs = np.concatenate(request.logits), np.concatenate(alone.logits)
    assert mine.shape == theirs.shape and np.isfinite(mine).all()
    differ = np.flatnonzero((mine.view(np.uint32) != theirs.view(np.uint32)).any(axis=-1))
    assert not len(differ), f"{name}: {len(differ)} of {len(mine)} logit rows differ, the first is {differ[0]}"
    assert request.tokens == alone.tokens and len(request.tokens) == request.steps + 1


def values(tree):
    return jax.tree.map(lambda x: np.array(x), tree)
