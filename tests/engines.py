"""What the engine's tests share: one layout, that of a small soak, so that a process compiles each program once.

12 host pages of 128 tokens, GPU blocks for about two long requests, places for 3 parked ones and 6 prefixes.
"""

import dataclasses
import functools
import pathlib
import runpy

from runs import TINY, build, text

from hisparse_jax.engine import End, Engine, EngineConfig, Handle, Request
from hisparse_jax.generation import resident_layout
from hisparse_jax.solo import solo
from hisparse_jax.tiered import COUNT_NAMES

SOAK = runpy.run_path(str(pathlib.Path(__file__).parent.parent / "scripts" / "soak.py"), run_name="soak")
LAYOUT = SOAK["plan"](SOAK["Args"](slots=4, parked=3, cached=6, cached_host=0))
PAGE = LAYOUT.page_tokens
SETTINGS = EngineConfig(call_steps=8, keep_logits=True, prefix_caching=False)

SHORT, MIDDLE, LONG = text(30, vocab=128), text(200, vocab=128), text(590, vocab=128)
"""1, 2 and 5 pages."""


@functools.cache
def alone(request: Request) -> tuple[list[int], bytes]:
    tokens, logits = solo(build(TINY, "f32"), resident_layout(LAYOUT), request, call_steps=SETTINGS.call_steps)
    return tokens.tolist(), logits.tobytes()


def serve(*, threaded: bool = False, **settings) -> Engine:
    return Engine(build(TINY, "f32"), LAYOUT, dataclasses.replace(SETTINGS, **settings), threaded=threaded)


def run(engine: Engine, *, rounds: int = 400) -> None:
    assert any(not engine.step() for _ in range(rounds)), f"not done after {rounds} rounds: {engine.snapshot}"


def check(*handles: Handle, timeout: float = 300.0) -> None:
    """The requests ended by themselves, with the tokens and logits that they have alone."""
    for handle in handles:
        completion = handle.result(timeout)
        assert completion.end in (End.LENGTH, End.STOP) and completion.logits is not None
        assert (completion.tokens.tolist(), completion.logits.tobytes()) == alone(handle.request)


def check_empty(engine: Engine) -> None:
    """Nobody holds anything, and every count adds up."""
    last = engine.snapshot
    assert (last.gpu.free, last.host.free) == (LAYOUT.gpu_blocks - 1, LAYOUT.host_blocks - 1)
    assert not any(last.pages.values()) and not (last.queued or last.parked or last.prefilling or last.running)
    assert sum(last.ended.values()) == last.events["submitted"]
    selected = last.events["decoded_rows"] * TINY.index_topk
    assert all(sum(getattr(layer, name) for name in COUNT_NAMES) == selected for layer in last.layers)


def until(engine: Engine, holds, rounds: int = 200) -> None:
    """Rounds until `holds(snapshot)`."""
    for _ in range(rounds):
        if holds(engine.snapshot):
            return
        engine.step()
    raise AssertionError(engine.snapshot)
