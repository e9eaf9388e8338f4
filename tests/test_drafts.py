"""Drafters, and an engine that drafts: right guesses save steps, wrong ones change nothing, a broken one fails its request."""

import dataclasses
import functools

import pytest
from engines import LONG, MIDDLE, SETTINGS, SHORT, run
from runs import TINY, build

from hisparse_jax.capacity import min_gpu_blocks
from hisparse_jax.config import CacheConfig
from hisparse_jax.drafts import no_drafts, prompt_lookup, take_steps
from hisparse_jax.engine import Engine, Handle, Request
from hisparse_jax.generation import resident_layout
from hisparse_jax.layout import CacheLayout, plan_layout
from hisparse_jax.prompts import PromptError
from hisparse_jax.requests import RequestError
from hisparse_jax.solo import solo


@pytest.mark.parametrize(
    ("tokens", "count", "guesses"),
    [
        ((1, 2, 3, 9, 1, 2, 3), 2, [9, 1]),
        ((1, 2, 3, 9, 1, 2, 3), 9, [9, 1, 2, 3]),
        ((7, 2, 8, 5, 2, 9, 2), 1, [9]),  # the newest place
        ((6, 1, 7, 3, 2, 7, 6, 1, 7), 1, [3]),  # the longest run, not the newest token
        ((4, 4), 3, [4]),
        ((1, 2, 3), 3, []),
        ((1,), 3, []),
        ((), 3, []),
    ],
)
def test_prompt_lookup(tokens, count, guesses):
    assert prompt_lookup(tokens, count) == guesses


def plan(draft_rows: int) -> CacheLayout:
    """Room on the GPU for two long requests, most of them spilled."""
    cache = CacheConfig(
        max_model_len=1_024, max_requests=4, gpu_blocks=2, host_blocks=24, num_hot_slots=64, rows="f32", chunk_tokens=64,
        page_entries=32, stretch_steps=8, reclaim="eager", draft_rows=draft_rows,
    )  # fmt: skip
    least = min_gpu_blocks(plan_layout(TINY, cache), 1_024)
    return plan_layout(TINY, dataclasses.replace(cache, gpu_blocks=2 * least))


def test_drafts_without_room_for_them_are_refused():
    layout = plan(0)
    with pytest.raises(ValueError, match="layout without draft rows"):
        take_steps(None, build(TINY, "f32"), None, 1, no_drafts(layout, 4), layout=layout)


@pytest.mark.slow
@pytest.mark.xdist_group("engine")
def test_a_drafter_without_room_for_drafts_is_refused():
    with Engine(build(TINY, "f32"), plan(0), SETTINGS, threaded=False) as engine:
        with pytest.raises(PromptError, match="a drafter has no effect"):
            engine.submit(SHORT, 4, drafter=prompt_lookup)


@functools.cache
def alone(request: Request) -> tuple[list[int], bytes]:
    tokens, logits = solo(build(TINY, "f32"), resident_layout(plan(3)), request, call_steps=SETTINGS.call_steps)
    return tokens.tolist(), logits.tobytes()


@pytest.mark.slow
@pytest.mark.xdist_group("engine")
def test_an_engine_that_drafts_gives_what_each_request_has_alone():
    def check(handle: Handle) -> None:
        completion = handle.result()
        assert completion.logits is not None
        assert (completion.tokens.tolist(), completion.logits.tobytes()) == alone(handle.request)

    def knowing(tokens, count):
        return alone(Request(LONG, 60, 0.9, 5))[0][len(tokens) - len(LONG) :][:count]

    def wrong(tokens, count):
        return [(token + 1) % TINY.vocab_size for token in knowing(tokens, count)]

    def broken(tokens, count):
        raise KeyError("no idea")

    engine = Engine(build(TINY, "f32"), plan(3), SETTINGS, threaded=False)
    rounds = {}
    for drafter in (knowing, wrong, prompt_lookup, None):
        one = engine.submit(LONG, 60, temperature=0.9, seed=5, drafter=drafter)
        other = engine.submit(MIDDLE, 20, seed=1, drafter=prompt_lookup)
        begun = engine.snapshot.step
        run(engine)
        rounds[drafter] = engine.snapshot.step - begun
        check(one)
        check(other)
    assert rounds[knowing] < rounds[wrong] == rounds[None]
    bad, good = engine.submit(MIDDLE, 9, drafter=broken), engine.submit(MIDDLE, 20, seed=1)
    run(engine)
    with pytest.raises(RequestError, match="no idea"):
        bad.result()
    check(good)
    last = engine.snapshot
    assert (last.gpu.free, last.host.free) == (plan(3).gpu_blocks - 1, plan(3).host_blocks - 1)
    assert last.events["decoded_rows"] > last.events["decoded_tokens"] > 0
    engine.shutdown()
