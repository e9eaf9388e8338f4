"""An engine on disk: what it served goes on elsewhere with the very tokens and logits, and here too."""

import dataclasses
import functools
import json
import pathlib
import shutil
import threading

import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from engines import LAYOUT, LONG, MIDDLE, SETTINGS, SHORT, check, check_empty, run, serve, until
from runs import TINY, build, poisoned

from hisparse_jax import saving
from hisparse_jax.config import ModelConfig
from hisparse_jax.engine import End, Engine, EngineClosedError, EngineConfig, EngineError, Handle
from hisparse_jax.layout import CacheLayout, plan_layout
from hisparse_jax.loop import ServingLoop
from hisparse_jax.model.blocks import DeepseekV4
from hisparse_jax.requests import RequestError
from hisparse_jax.saving import SaveError
from hisparse_jax.weights import init_weights

pytestmark = pytest.mark.xdist_group("engine")


def plan(**changes) -> CacheLayout:
    return plan_layout(TINY, dataclasses.replace(LAYOUT.cache, **changes))


def busy(**settings) -> tuple[Engine, list[Handle]]:
    """An engine with requests in mid prefill and mid decode, parked, and queued."""
    engine = serve(**({"growth_reserve": 0.0, "patience": 3} | settings))
    handles = [engine.submit(MIDDLE, 120, seed=8, temperature=0.8)]
    handles += [engine.submit(SHORT, 60, seed=seed, temperature=seed / 2) for seed in range(4)]
    until(engine, lambda s: s.parked > 0)
    handles += [engine.submit(LONG, 9), engine.submit(SHORT, 20, seed=7, temperature=1.2)]
    until(engine, lambda s: s.prefilling > 0 and s.running > 0 and s.parked > 0 and s.queued > 0)
    assert not any(h.done for h in handles)
    return engine, handles


def restore(path: pathlib.Path, layout: CacheLayout = LAYOUT, **options) -> tuple[Engine, dict[int, Handle]]:
    """On a cache whose every byte is poison."""
    engine, handles = Engine.restore(path, build(TINY, "f32"), layout, threaded=False, **options)
    engine._loop.runner.state = poisoned(engine._loop.runner.state)
    return engine, handles


@functools.cache
def saved(folder: pathlib.Path) -> tuple[pathlib.Path, dict[int, tuple[list[int], bytes]], dict[int, int]]:
    """A saved engine, what its requests gave in the engine that went on, and how many tokens each had when it was saved."""
    engine, handles = busy()
    had = {h.number: len(h.tokens) for h in handles}
    engine.save(folder / "engine")
    run(engine)
    check_empty(engine)
    return folder / "engine", {h.number: result(h) for h in handles}, had


def result(handle: Handle) -> tuple[list[int], bytes]:
    completion = handle.result(300.0)
    assert completion.end is End.LENGTH and completion.logits is not None
    return completion.tokens.tolist(), completion.logits.tobytes()


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> pathlib.Path:
    return tmp_path_factory.mktemp("saved")


def test_all_go_on_elsewhere_with_the_same_logits(folder):
    path, expected, had = saved(folder)
    assert sum(n > 0 for n in had.values()) >= 4 and any(n == 0 for n in had.values())
    heard: list[tuple[int, int]] = []
    engine, handles = restore(path, on_token=lambda number, token: heard.append((number, token)))
    assert {number: len(h.tokens) for number, h in handles.items()} == had
    late = engine.submit(SHORT, 5)
    assert late.number == max(had) + 1
    run(engine)
    assert {number: result(h) for number, h in handles.items()} == expected
    assert len(late.tokens) == 5
    for number, (tokens, _) in expected.items():
        assert [token for n, token in heard if n == number] == tokens[had[number] :]
    events = engine.snapshot.events
    assert events["restarted"] == 0 and events["resumed"] >= 5, "what was computed was not computed again"
    check_empty(engine)


SMALLER = {"rule": "base", "gpu_blocks": 21, "host_blocks": 11, "num_hot_slots": 32, "parked_requests": 1}


@pytest.mark.slow
@pytest.mark.parametrize("changes", [SMALLER, {"parked_requests": 0}, {"backup": "spill"}], ids=str)
def test_budgets_packing_and_policies_may_differ(folder, changes):
    path, expected, _ = saved(folder)
    engine, handles = restore(path, plan(**changes), config=dataclasses.replace(SETTINGS, call_steps=4))
    run(engine)
    assert {number: result(h) for number, h in handles.items()} == expected
    check(*handles.values())
    assert (engine.snapshot.events["restarted"] > 0) == (changes == {"parked_requests": 0})
    last = engine.snapshot
    layout = engine.layout
    assert (last.gpu.free, last.host.free) == (layout.gpu_blocks - 1, layout.host_blocks - 1)


@pytest.mark.slow
def test_an_engine_that_parks_nothing_is_computed_anew(tmp_path):
    bare = Engine(build(TINY, "f32"), plan(parked_requests=0), SETTINGS, threaded=False)
    handles = [bare.submit(MIDDLE, 40, seed=1, temperature=1.0), bare.submit(LONG, 20)]
    until(bare, lambda s: s.running > 0)
    bare.save(tmp_path / "bare")
    engine, restored = restore(tmp_path / "bare")
    assert len(restored[0].tokens) == len(handles[0].tokens) > 0
    run(engine)
    check(*restored.values())
    bare.shutdown(drain=False)


@pytest.mark.slow
def test_a_full_parking_makes_room_for_those_in_slots(tmp_path):
    """Without places for prefixes, which would take them in."""
    layout = plan(cached_prefixes=0)
    settings = dataclasses.replace(SETTINGS, growth_reserve=0.0, patience=2)
    engine = Engine(build(TINY, "f32"), layout, settings, threaded=False)
    handles = [engine.submit(SHORT, 90, seed=seed) for seed in range(7)]
    until(engine, lambda s: s.parked == 3 and s.running == 4)
    engine.save(tmp_path / "full")
    shelved = [t for t in engine._loop.scheduler.queue if t.image is not None]
    assert len(shelved) == 1 and engine._loop.scheduler.parked
    run(engine)
    check(*handles)
    check_empty(engine)
    again, restored = restore(tmp_path / "full", layout)
    again.step()
    images = sum(t.image is not None for t in again._loop.scheduler.queue)
    assert images == 3
    again.save(tmp_path / "twice")  # some still wait outside the cache
    for path in (None, tmp_path / "twice"):
        if path is not None:
            again, restored = restore(path, layout)
        run(again)
        check(*restored.values())
        check_empty(again)


@pytest.mark.slow
def test_save_from_another_thread_while_it_serves(tmp_path):
    engine = serve(threaded=True)
    handles = [engine.submit(MIDDLE, 60, seed=seed) for seed in range(3)]
    first = iter(handles[0])
    next(first)
    saver = threading.Thread(target=engine.save, args=(tmp_path / "a",))
    saver.start()
    saver.join(300)
    assert (tmp_path / "a").is_dir()
    refused: list[BaseException] = []

    def on_token(token: int) -> None:
        try:
            engine.save(tmp_path / "b")
        except EngineError as error:
            refused.append(error)

    handles.append(engine.submit(SHORT, 1, on_token=on_token))
    check(*handles)
    assert "call it from outside of on_token" in str(refused[0]) and not (tmp_path / "b").exists()
    engine.shutdown(drain=False)
    with pytest.raises(EngineClosedError, match="saves nothing"):
        engine.save(tmp_path / "b")
    with Engine.restore(tmp_path / "a", build(TINY, "f32"), LAYOUT)[0] as again:
        restored = list(again._inbox) + list(again._loop.open.values())
    assert restored is not None
    check(*(t.handle for t in restored))


# What is refused


def model_with(seed: int, config: ModelConfig = TINY) -> DeepseekV4:
    return DeepseekV4(config, init_weights(config, seed, jnp.float32))


def test_another_model_other_weights_and_other_shapes_are_refused(folder):
    path, _, _ = saved(folder)
    narrow = dataclasses.replace(TINY, index_topk=8)
    for model, layout, message in (
        (
            DeepseekV4(narrow, init_weights(narrow, 0, jnp.float32)),
            plan_layout(narrow, LAYOUT.cache),
            "model.index_topk=16, .* 8",
        ),
        (build(TINY, "f32"), plan(rows="bf16"), "rows='f32', .* 'bf16'"),
        (build(TINY, "f32"), plan(page_entries=64), "page_entries=32, .* 64"),
        (build(TINY, "f32"), plan(max_requests=8), "max_requests=4, .* 8"),
        (build(TINY, "f32"), plan(chunk_tokens=32), "chunk_tokens=64, .* 32"),
        (model_with(1), LAYOUT, "weights="),
        (build(TINY, "f32"), plan(max_model_len=512), r"request \d cannot go on here: .* max_model_len"),
        (build(TINY, "f32"), plan(gpu_blocks=9), r"request \d cannot go on here: .* raise gpu_pool_bytes"),
    ):
        with pytest.raises(SaveError, match=message):
            Engine.restore(path, model, layout)
    with pytest.raises(EngineError, match="keep_logits=True, config has False"):
        Engine.restore(path, build(TINY, "f32"), LAYOUT, EngineConfig())


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # of Orbax's loop, closed under a failed read
def test_a_damaged_folder_is_one_clear_error(folder, tmp_path):
    """A byte turned round in each file in turn, then files gone."""
    path, _, _ = saved(folder)
    files = [p.relative_to(path) for p in sorted(path.rglob("*")) if p.is_file() and p.stat().st_size]
    kept = [p for p in files if p.parts[0] == "engine" or p.parts[1] == "0"]
    harmless = []
    for number, file in enumerate([*kept, "requests/0", "requests/0/arrays", "engine"]):
        copy = tmp_path / str(number)
        shutil.copytree(path, copy)
        if (copy / file).is_dir():
            shutil.rmtree(copy / file)
        else:
            content = bytearray((copy / file).read_bytes())
            content[len(content) // 2] ^= 0x10
            (copy / file).write_bytes(content)
        try:
            tickets = saving.load(copy, build(TINY, "f32"), LAYOUT).tickets
        except SaveError as error:
            said = str(error)
        else:
            said = str(copy)
            harmless.append(file)
            assert len(tickets) == 7 and not (copy / file).is_dir()
        assert said.startswith(str(copy)), said
    data = max(kept, key=lambda p: (path / p).stat().st_size)
    assert data.parts[:3] == ("requests", "0", "arrays")
    texts = {pathlib.Path(name) for name in ("engine/about/metadata", "requests/0/about/metadata")}
    assert not {data, *texts} & set(harmless) and texts <= set(kept), "what is left is Orbax's own, or twice there"


def test_what_is_no_saved_engine_is_one_clear_error(tmp_path):
    other = tmp_path / "other"
    with ocp.Checkpointer(ocp.CompositeCheckpointHandler()) as orbax:
        orbax.save(other / "engine", args=ocp.args.Composite(about=ocp.args.JsonSave({"kind": "weights", "digest": ""})))
    (tmp_path / "empty").mkdir()
    for path, message in (
        (other, "holds 'weights'"),
        (tmp_path / "empty", "cannot be read"),
        (tmp_path / "no", "does not exist"),
    ):
        with pytest.raises(SaveError, match=message):
            Engine.restore(path, build(TINY, "f32"), LAYOUT)


def test_a_save_that_fails_leaves_nothing_and_the_engine_goes_on(tmp_path, monkeypatch):
    engine = serve()
    handle = engine.submit(SHORT, 9)
    engine.step()
    (tmp_path / "there").mkdir()
    with pytest.raises(SaveError, match="exists; name a folder that does not"):
        engine.save(tmp_path / "there")
    with monkeypatch.context() as patch:
        patch.setattr(saving, "_write", lambda *_, **__: json.loads("no disk"))
        with pytest.raises(ValueError, match="Expecting value"):
            engine.save(tmp_path / "new")
    assert [p.name for p in tmp_path.iterdir()] == ["there"]
    run(engine)
    assert len(handle.tokens) == 9
    check_empty(engine)


# Shutting down


@pytest.mark.parametrize("threaded", [True, False])
def test_g4_shutdown_twice_in_a_step_and_after_an_error(monkeypatch, threaded):
    engine = serve(threaded=threaded)
    seconds: list[float] = []
    handle = engine.submit(SHORT, 30, on_token=lambda _: seconds.append(engine.shutdown()))
    pools = engine._loop.runner.state.pools
    assert threaded or engine.step()
    assert engine.shutdown() > 0 and engine.shutdown() > 0
    assert len(handle.result(300.0).tokens) == len(seconds) == 30 and not any(seconds), "in a step it only says that it is time"
    assert not hasattr(engine._loop.runner, "state") and all(pool.is_deleted() for pool in pools)

    broken = serve(threaded=threaded)
    monkeypatch.setattr(ServingLoop, "step", lambda self: 1 / 0)
    handle = broken.submit(SHORT, 5)
    if threaded:
        with pytest.raises(RequestError):
            handle.result(60.0)
    for _ in range(2):
        with pytest.raises(EngineClosedError if threaded else ZeroDivisionError):
            broken.shutdown()
        assert not hasattr(broken._loop.runner, "state"), "the memory went back"


def test_the_numbers_in_a_folder_are_those_of_the_requests(folder):
    path, expected, had = saved(folder)
    found = saving.load(path, build(TINY, "f32"), LAYOUT)
    tickets = [make(lambda _: None, None) for make in found.tickets]
    assert {t.number for t in tickets} == set(expected) and found.next_number == max(expected) + 1
    assert {t.number: len(t.handle.tokens) for t in tickets} == had
    for ticket in tickets:
        assert (ticket.image is None) == (ticket.length == 0)
        if ticket.image is not None:
            assert ticket.length == ticket.image.progress.length and np.all(ticket.counts >= 0)
