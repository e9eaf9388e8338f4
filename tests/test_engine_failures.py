"""What fails in an engine: the request concerned hears of it, the others get their very tokens, nothing leaks."""

import asyncio
import threading

import jax
import numpy as np
import pytest
from engines import LAYOUT, LONG, MIDDLE, SHORT, check, check_empty, run, serve, until
from runs import failing

from hisparse_jax import decode, ffi, parking, state
from hisparse_jax.engine import End, EngineClosedError
from hisparse_jax.host_memory import HostMemoryError
from hisparse_jax.loop import ServingLoop
from hisparse_jax.requests import RequestError
from hisparse_jax.runner import Runner

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("engine")]


def test_a_callback_that_raises_fails_its_request_alone():
    def refuse(token: int) -> None:
        raise ValueError(f"no {token}")

    engine = serve()
    bad, good = engine.submit(MIDDLE, 9, on_token=refuse), engine.submit(MIDDLE, 30)
    run(engine)
    with pytest.raises(RequestError, match="request 0 failed: no ") as raised:
        bad.result()
    assert isinstance(raised.value.__cause__, ValueError)
    with pytest.raises(RequestError):
        list(bad)
    assert len(bad.tokens) == 1
    check(good)
    check_empty(engine)


OUT_OF_MEMORY = jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: out of memory")


@pytest.mark.parametrize("at", [1, 2, 9, 30])
def test_a_callback_that_raises_at_any_token_fails_its_request_alone(at):
    """At the prompt's own token, in decode, in the middle of a call's tokens and at the last token."""
    heard: list[int] = []

    def on_token(token: int) -> None:
        heard.append(token)
        if len(heard) == at:
            raise KeyError(token)

    engine = serve()
    bad, *others = (engine.submit(MIDDLE, 30, seed=seed, on_token=on_token if seed == 0 else None) for seed in range(3))
    run(engine)
    with pytest.raises(RequestError):
        bad.result()
    assert list(bad.tokens) == heard and len(heard) == at
    check(*others)
    check_empty(engine)


@pytest.mark.parametrize(
    ("module", "name", "number", "error", "resets"),
    [
        (decode, "_take_slot", 2, OUT_OF_MEMORY, 0),  # device memory, at admission
        (decode, "prepare_chunk", 3, OUT_OF_MEMORY, 0),  # device memory, before a chunk
        (decode, "prefill_chunk", 3, OUT_OF_MEMORY, 1),  # between a chunk's plan and its program
        (ffi, "pinned_ids", 12, MemoryError("pinned memory"), 1),  # host memory, between planning and computing a chunk
        (decode, "start_running", 2, RuntimeError("gone"), 1),
    ],
)
def test_a_failure_is_told_to_its_request_alone(monkeypatch, module, name, number, error, resets):
    engine = serve()
    handles = [engine.submit(MIDDLE, 30, seed=seed, temperature=1.0) for seed in range(3)]
    monkeypatch.setattr(module, name, failing(getattr(module, name), number, error))
    run(engine)
    failed = [h for h in handles if h.completion is not None and h.completion.end is End.FAILED]
    assert len(failed) == 1 and failed[0].error is error
    check(*(h for h in handles if h not in failed))
    assert engine.snapshot.events["resets"] == resets
    check_empty(engine)


def test_a_handler_that_fails_in_a_program_costs_one_request(monkeypatch):
    """The chunk's program takes the cache along: the others are computed anew, and nobody reading them notices."""
    engine = serve()
    others = [engine.submit(SHORT, 60, seed=1, temperature=1.0), engine.submit(MIDDLE, 40)]
    until(engine, lambda s: s.running == 2 and s.events["decoded_tokens"] > 20)
    real = decode._page_ids

    def out_of_range(plan, layout):
        source, dest = real(plan, layout)
        if plan is None:
            return source, dest
        monkeypatch.setattr(decode, "_page_ids", real)
        return tuple(ffi.pinned_ids(np.full(x.shape, 9_999)) for x in source), ffi.pinned_ids(np.ones(dest.shape, np.int32))

    monkeypatch.setattr(decode, "_page_ids", out_of_range)
    hit = engine.submit(LONG, 5)
    run(engine)
    with pytest.raises(RequestError, match="9999"):
        hit.result()
    assert engine.snapshot.events["resets"] == 1 and engine.snapshot.events["restarted"] == 2
    check(*others)
    check_empty(engine)


def test_decode_that_keeps_failing_ends_those_in_it(monkeypatch):
    engine = serve()
    doomed, later = engine.submit(SHORT, 30), engine.submit(LONG, 5)
    until(engine, lambda s: s.running == 1)
    with monkeypatch.context() as patch:
        patch.setattr(Runner, "decode", failing(lambda *_: 1 / 0, 9, OUT_OF_MEMORY))
        engine.step()
        assert not doomed.done, "once may be chance"
        engine.step()
    with pytest.raises(RequestError, match="division by zero"):
        doomed.result()
    run(engine)
    check(later)
    check_empty(engine)


def test_an_engine_that_breaks_tells_everybody(monkeypatch):
    engine = serve(threaded=True)
    monkeypatch.setattr(ServingLoop, "step", lambda self: 1 / 0)
    handle = engine.submit(SHORT, 5)
    with pytest.raises(RequestError, match="division by zero"):
        handle.result(60.0)
    with pytest.raises(EngineClosedError, match="shut down"):
        engine.submit(SHORT, 5)
    with pytest.raises(EngineClosedError, match="the engine broke: division by zero"):
        engine.shutdown()


@pytest.mark.parametrize("drain", [True, False])
def test_shutdown_leaves_the_pools_full(drain):
    engine = serve(threaded=True)
    handles = [engine.submit(LONG, 20, seed=seed) for seed in range(4)]
    next(iter(handles[0]))
    engine.shutdown(drain=drain, timeout=300.0)
    engine.shutdown()
    assert all(h.done for h in handles)
    if drain:
        check(*handles)
    else:
        assert handles[-1].result().end is End.CANCELLED
    with pytest.raises(EngineClosedError, match="takes no more requests"):
        engine.submit(SHORT, 1)
    check_empty(engine)
    assert not hasattr(engine._loop.runner, "state"), "the memory went back"


def test_an_error_in_the_body_cancels_what_is_left():
    engine = serve(threaded=True)
    handle = engine.submit(LONG, 300)

    def body() -> None:
        with engine:
            raise KeyError

    with pytest.raises(KeyError):
        body()
    assert handle.result().end is End.CANCELLED
    check_empty(engine)


# What parks, comes back, and waits outside


def crowded(*, parked: bool = True):
    """Seven requests for four slots: some are parked now, or soon."""
    engine = serve(growth_reserve=0.0, patience=2)
    handles = [engine.submit(SHORT, 90, seed=seed) for seed in range(7)]
    until(engine, lambda s: s.running == 4 and s.parked > 0 if parked else s.running > 0)
    return engine, handles


@pytest.mark.parametrize("name", ["_copy_out", "_copy_back"])
def test_a_handler_that_fails_in_parking_costs_one_request(monkeypatch, name):
    """The program takes the cache along; parked requests are computed anew too."""
    engine, handles = crowded(parked=name == "_copy_back")
    real = getattr(parking, name)

    def out_of_range(state, lot, number, place_row, *rest, layout):
        monkeypatch.setattr(parking, name, real)
        return real(state, lot, number, (ffi.pinned_ids(np.array([9_999])), place_row[1]), *rest, layout=layout)

    monkeypatch.setattr(parking, name, out_of_range)
    run(engine)
    failed = [h for h in handles if h.completion is not None and h.completion.end is End.FAILED]
    assert len(failed) == 1 and "9999" in str(failed[0].error)
    assert engine.snapshot.events["resets"] == 1
    check(*(h for h in handles if h not in failed))
    check_empty(engine)


@pytest.mark.parametrize(
    "number",
    [1, 3, 40],  # on the way in: at the first pool and at the second; never
)
def test_memory_refused_to_an_import_costs_one_request(monkeypatch, number):
    engine, handles = crowded()
    loop = engine._loop
    shelved = loop.scheduler.parked[0]
    loop._shelve(shelved)
    real, kept = Runner.take_in, shelved.image

    def refused(runner, image):
        if image is not kept:
            return real(runner, image)
        with monkeypatch.context() as patch:
            patch.setattr(ffi, "pinned_ids", failing(ffi.pinned_ids, number, MemoryError("no pinned memory")))
            return real(runner, image)

    monkeypatch.setattr(Runner, "take_in", refused)
    run(engine)
    failed = [h for h in handles if h.completion is not None and h.completion.end is End.FAILED]
    if number == 40:
        assert not failed
    else:
        assert failed == [shelved.handle] and "OUT_OF_MEMORY" in str(shelved.handle.error)
    check(*(h for h in handles if h not in failed))
    assert engine.snapshot.events["resets"] == 0, "what had been recorded was taken back"
    check_empty(engine)


@pytest.mark.parametrize("resume", [False, True], ids=["preempt", "resume"])
def test_pinned_memory_refused_between_plan_and_copy_costs_one_request(monkeypatch, resume):
    engine, handles = crowded(parked=resume)
    name = "resume" if resume else "park"
    real = getattr(Runner, name)

    def refused(runner, *arguments):
        monkeypatch.setattr(Runner, name, real)
        with monkeypatch.context() as patch:
            patch.setattr(ffi, "pinned_ids", failing(ffi.pinned_ids, 2, MemoryError("no pinned memory")))
            return real(runner, *arguments)

    monkeypatch.setattr(Runner, name, refused)
    run(engine)
    failed = [h for h in handles if h.completion is not None and h.completion.end is End.FAILED]
    assert len(failed) == 1 and isinstance(failed[0].error, MemoryError)
    check(*(h for h in handles if h not in failed))
    check_empty(engine)


# Host memory


def test_host_memory_refused_at_the_start_is_told_and_starts_no_thread(monkeypatch):
    before = threading.active_count()
    with monkeypatch.context() as patch:
        patch.setattr("hisparse_jax.host_memory.host_memory_limits", lambda **_: {"MemAvailable": LAYOUT.host_bytes})
        with pytest.raises(HostMemoryError, match="the host pools need"):
            serve(threaded=True)
    for module in (state, parking):
        with monkeypatch.context() as patch:
            patch.setattr(module, "make_host_pool", failing(module.make_host_pool, 2, OUT_OF_MEMORY))
            with pytest.raises(jax.errors.JaxRuntimeError, match="out of memory"):
                serve(threaded=True)
    assert threading.active_count() == before


def test_host_memory_refused_in_a_reset_breaks_the_engine_and_all_are_told(monkeypatch):
    """A failed program took the cache along and there is none to go on with."""
    engine = serve(threaded=True)
    first = engine.submit(SHORT, 200)
    next(iter(first))
    monkeypatch.setattr(state, "make_host_pool", failing(state.make_host_pool, 1, MemoryError("no host memory")))
    monkeypatch.setattr(decode, "prefill_chunk", failing(decode.prefill_chunk, 1, OUT_OF_MEMORY))
    second = engine.submit(MIDDLE, 5)
    for handle in (first, second):
        with pytest.raises(RequestError, match="no host memory"):
            handle.result(300.0)
    with pytest.raises(EngineClosedError, match="the engine broke: no host memory"):
        engine.shutdown()


# Cancellation


def test_cancelled_after_any_number_of_rounds_it_leaves_nothing():
    engine, rounds = serve(), 0
    stays = engine.submit(SHORT, 400, seed=1)
    while True:
        held = None
        handle = engine.submit(MIDDLE, 20, seed=2, temperature=1.0)
        for _ in range(rounds):
            engine.step()
        ended = handle.done
        handle.cancel()
        engine.step()
        assert handle.result().end is (End.LENGTH if ended else End.CANCELLED)
        held = engine._loop.runner.look().host_pages
        assert np.count_nonzero(held) == (not stays.done), "no page but those of the one that stays"
        if ended:
            break
        rounds += 1
    assert rounds >= 6  # four chunks, the last with a decode call, and two more
    stays.cancel()
    engine.step()
    check_empty(engine)


def test_a_task_cancelled_at_any_of_its_awaits_takes_its_request_along():
    """The reader waits for its first token, and for more after each round; it never waits elsewhere."""

    async def main(rounds: int) -> bool:
        engine = serve()
        handle, other = engine.submit(SHORT, 25, seed=1, temperature=1.0), engine.submit(SHORT, 25, seed=2)
        got: list[int] = []

        async def read() -> None:
            async for token in handle:
                got.append(token)

        reader = asyncio.create_task(read())
        for _ in range(rounds):
            await asyncio.sleep(0)
            engine.step()
        for _ in range(4):
            await asyncio.sleep(0)
        ended = reader.done()
        assert tuple(got) == handle.tokens and ended == handle.done
        if not ended:
            reader.cancel()
            with pytest.raises(asyncio.CancelledError):
                await reader
        assert not handle._wakers
        run(engine)
        assert handle.result().end is (End.LENGTH if ended else End.CANCELLED)
        check(*((handle, other) if ended else (other,)))
        check_empty(engine)
        return ended

    ended = [asyncio.run(main(rounds)) for rounds in range(4)]
    assert ended == [False, False, False, True], ended
