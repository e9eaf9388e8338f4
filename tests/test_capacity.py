"""The least slab of a run is enough, and no smaller one is.

Runs are played on `ledger_model.TierModel`, which `test_coordinator_machine.py` holds to the real transitions step by step: what
`decode` and `room` ask of the ledger happens here in the same order, and nothing is computed or compiled.
"""

import dataclasses
import functools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from ledger_model import TierModel
from runs import TINY

from hisparse_jax.config import CacheConfig, ConfigError
from hisparse_jax.generation import check_run, least_gpu_blocks, resident_layout
from hisparse_jax.layout import CacheLayout, plan_layout
from hisparse_jax.prompts import chunk_schedule
from hisparse_jax.status import Status, TierError, raise_for_status

FOUR = dataclasses.replace(TINY, num_hidden_layers=5, compress_ratios=(4, 4, 128, 4, 4))


class Played:
    """Requests that grow in a slab of `num_blocks`, as `generate` makes them grow. Raises `TierError` where blocks run out."""

    def __init__(self, layout: CacheLayout, num_blocks: int):
        self.layout, self.cache, batch = layout, layout.cache, layout.cache.max_requests
        self.length, self.running = [0] * batch, [False] * batch
        self.model = TierModel(
            num_blocks=num_blocks, num_host_blocks=layout.host_blocks, num_base=layout.num_base_groups, batch=batch,
            num_resident=layout.num_resident_groups, hot_pages=layout.hot_pages, max_pages=layout.max_pages,
        )  # fmt: skip

    def make_room(self, target: list[int], max_new_pages: int) -> list[Status]:
        model, written_through = self.model, self.cache.backup == "write_through"
        new = [max(self.layout.num_pages(n) - self.num_pages(slot), 0) for slot, n in enumerate(target)]
        if written_through:
            model.seal([n // self.layout.page_tokens * runs for n, runs in zip(self.length, self.running, strict=True)])
        budget = 0 if written_through else self.layout.max_pages
        needed = sum(new) * self.layout.growing_groups
        pressure = needed, self.layout.watermark, self.layout.window_pages
        if self.cache.reclaim == "eager":
            self.commit(model.eager([self.num_pages(slot) > 0 for slot in range(len(new))], budget))
        elif self.cache.reclaim == "unpin":
            self.commit(model.copies_to_unpin(*pressure, budget))
            model.unpin(*pressure)
        else:
            self.commit(model.reclaim(needed - model.gpu_free(), budget))
        return model.grow(new, max_new_pages)

    def num_pages(self, slot: int) -> int:
        request = self.model.slots[slot]
        return request.num_pages if request else 0

    def commit(self, plan) -> None:
        self.model.enqueue(plan)
        self.model.complete(plan)

    def plan_backup(self, slot: int, num_pages: int):
        wanted = [[b == slot and p < num_pages for p in range(self.layout.max_pages)] for b in range(len(self.length))]
        return self.model.spill(wanted, release_after=False, budget=self.cache.chunk_pages)

    def prefill(self, slot: int, tokens: int, chunks) -> None:
        assert self.model.admit(slot, self.layout.num_pages(tokens)) is Status.OK
        pending = []
        for begin, count in chunk_schedule(0, tokens, self.cache.chunk_tokens, chunks):
            target = [begin + count if b == slot else 0 for b in range(len(self.length))]
            status = self.make_room(target, self.cache.chunk_pages)[slot]
            if status is Status.OUT_OF_BLOCKS:  # leased pages may go once they are copied
                self.commit(pending)
                status, pending = self.make_room(target, self.cache.chunk_pages)[slot], []
            raise_for_status(status, "prefill")
            plan = self.plan_backup(slot, (begin + count) // self.layout.page_tokens)
            self.commit(pending)
            self.length[slot], pending = begin + count, plan
        self.commit(pending)
        if self.cache.backup == "write_through":
            self.commit(self.plan_backup(slot, self.layout.num_pages(tokens)))
        self.running[slot] = True

    def decode(self, steps: int, call_steps: int) -> None:
        for call in range(0, steps, call_steps):
            end = min(call + call_steps, steps)
            for first in range(call, end, self.cache.stretch_steps):
                count = min(self.cache.stretch_steps, end - first)
                target = [n + count if runs else 0 for n, runs in zip(self.length, self.running, strict=True)]
                for slot, status in enumerate(self.make_room(target, 1)):
                    raise_for_status(status, f"decode of {slot}")
                self.length = target


def play(layout: CacheLayout, num_blocks: int, lengths: list[int], steps: int, chunks, call_steps: int) -> list[int]:
    """The pages that each request lost."""
    played = Played(layout, num_blocks)
    for slot, tokens in enumerate(lengths):
        played.prefill(slot, tokens, chunks)
    played.decode(steps, call_steps)
    return played.model.lost[: len(lengths)]


@functools.cache
def layout_of(**options) -> CacheLayout:
    cache = CacheConfig(max_model_len=2_560, gpu_blocks=2, host_blocks=90, rows="bf16", **options)
    return plan_layout(FOUR, cache)


options = st.fixed_dictionaries({
    "max_requests": st.just(4),
    "num_hot_slots": st.sampled_from((16, 90, 330)),
    "page_entries": st.sampled_from((32, 96)),
    "chunk_tokens": st.sampled_from((32, 256, 1_024)),
    "rule": st.sampled_from(("base", "searched")),
    "backup": st.sampled_from(("write_through", "spill")),
    "reclaim": st.sampled_from(("base", "eager", "unpin")),
})  # fmt: skip
schedules = st.fixed_dictionaries({
    "steps": st.integers(0, 500),
    "chunks": st.none() | st.lists(st.integers(1, 32), max_size=9),
    "call_steps": st.integers(1, 200),
})  # fmt: skip
prompts = st.integers(1, 300) | st.integers(1, 2_000)


def least_of(layout, lengths, steps, chunks, call_steps) -> int:
    return least_gpu_blocks(lengths, layout, max_new_tokens=steps + 1, chunks=chunks, call_steps=call_steps)


@settings(max_examples=100, deadline=None)
@given(options=options, length=prompts, schedule=schedules, more=st.integers(0, 20))
def test_a_request_that_is_taken_ends_and_in_a_smaller_slab_it_does_not(options, length, schedule, more):
    layout = layout_of(**options)
    least = least_of(layout, [length], **schedule)
    play(layout, least, [length], **schedule)
    play(layout, least + more, [length], **schedule)
    if layout.cache.reclaim != "eager":
        with pytest.raises(TierError, match="OUT_OF_BLOCKS"):
            play(layout, least - 1, [length], **schedule)


@settings(max_examples=60, deadline=None)
@given(options=options, lengths=st.lists(prompts, min_size=2, max_size=4), schedule=schedules, more=st.integers(0, 20))
def test_so_do_requests_side_by_side(options, lengths, schedule, more):
    layout = layout_of(**options)
    if layout.cache.backup == "spill" and layout.cache.reclaim != "eager":
        return  # may want more page copies in one stretch than a call makes
    least = least_of(layout, lengths, **schedule)
    play(layout, least, lengths, **schedule)
    play(layout, least + more, lengths, **schedule)
    if layout.cache.reclaim != "eager":
        with pytest.raises(TierError, match="OUT_OF_BLOCKS"):
            play(layout, least - 1, lengths, **schedule)


def test_by_hand():
    layout = layout_of(max_requests=2, num_hot_slots=16, page_entries=32, chunk_tokens=64, rule="base")
    groups, base = layout.num_resident_groups, layout.num_base_groups
    assert (groups, base, layout.hot_pages, layout.page_tokens) == (2, 2, 1, 128)
    schedule = {"steps": 200, "chunks": None, "call_steps": 64}
    # 14 and 8 pages at the end; each keeps two pages and a hot page, and one of them grows by one on top.
    least = least_of(layout, [1_500, 700], **schedule)
    assert least == 1 + base * (14 + 8) + groups * (3 + 3 + 1)
    assert least < least_gpu_blocks([1_500, 700], layout, max_new_tokens=201, twin="resident")
    assert play(layout, least, [1_500, 700], **schedule) == [12, 5]


def test_the_resident_twin_needs_every_page():
    layout = resident_layout(layout_of(max_requests=2))
    pages = layout.num_pages(1_700) + layout.num_pages(900)
    least = least_gpu_blocks([1_500, 700], layout, max_new_tokens=201, twin="resident")
    assert least == 1 + layout.growing_groups * pages
    small = dataclasses.replace(layout, gpu_blocks=least - 1)
    with pytest.raises(ConfigError, match=f"gpu_blocks={least - 1} is too small a slab: 2 requests of 2,600 tokens in all need"):
        check_run([[1] * 1_500, [1] * 700], small, max_new_tokens=201, twin="resident")
    check_run([[1] * 1_500, [1] * 700], dataclasses.replace(layout, gpu_blocks=least), max_new_tokens=201, twin="resident")
