"""What fails in an engine: the request concerned hears of it, the others get their very tokens, nothing leaks."""

import jax
import numpy as np
import pytest
from engines import LONG, MIDDLE, SHORT, check, check_empty, run, serve, until
from runs import failing

from hisparse_jax import decode, ffi
from hisparse_jax.engine import End, EngineClosedError
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


@pytest.mark.parametrize(
    ("module", "name", "number", "error", "resets"),
    [
        (decode, "_take_slot", 2, OUT_OF_MEMORY, 0),  # device memory, at admission
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
