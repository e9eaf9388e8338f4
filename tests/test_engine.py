"""The engine: whatever comes and goes, each request gets the tokens and logits of a solo resident run."""

import asyncio
import dataclasses
import itertools
import threading

import numpy as np
import pytest
from engines import LAYOUT, LONG, MIDDLE, SHORT, alone, check, check_empty, run, serve, until
from prometheus_client.parser import text_string_to_metric_families
from runs import TINY, text

from hisparse_jax.engine import End, Engine, EngineBusyError, EngineConfig, Handle, Request
from hisparse_jax.layout import plan_layout
from hisparse_jax.metrics import prometheus_text
from hisparse_jax.prompts import PromptError
from hisparse_jax.scheduler import Phase, Scheduler, Ticket
from hisparse_jax.steps import traces
from hisparse_jax.tiered import COUNT_NAMES

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("engine")]


def test_streams_the_tokens_of_a_solo_run():
    before = traces.copy()
    heard: list[int] = []
    with serve(threaded=True) as engine:
        warm = engine.submit(MIDDLE, 20, temperature=0.9, seed=5, on_token=heard.append)
        greedy = engine.submit(list(LONG), 12)
        single = engine.submit(np.array(SHORT), 1)
        streamed = list(warm)
        assert streamed == list(warm.tokens) == heard == alone(warm.request)[0]
        check(warm, greedy, single)
        assert len(single.tokens) == 1
    check_empty(engine)
    programs = {name: count - before[name] for name, count in traces.items()}
    assert programs["decode.decode_steps"] <= 1 and programs["decode.prefill_chunk"] <= 1


def test_ends_at_its_stop_token():
    tokens, _ = alone(Request(MIDDLE, 20, 0.9, 5))
    stop = tokens[7]
    first = tokens.index(stop)
    engine = serve()
    handles = [engine.submit(MIDDLE, 20, temperature=0.9, seed=5, stop_token=t) for t in (stop, tokens[0])]
    run(engine)
    check(*handles)
    assert [len(h.tokens) for h in handles] == [first + 1, 1]
    assert all(h.result().end is End.STOP for h in handles)
    check_empty(engine)


def test_asyncio_front():
    async def read(handle: Handle) -> list[int]:
        return [token async for token in handle]

    async def main(engine: Engine) -> None:
        one, two, dropped = (engine.submit(SHORT, 25, seed=seed, temperature=1.0) for seed in (1, 2, 3))
        reader = asyncio.create_task(read(dropped))
        await asyncio.sleep(0)
        reader.cancel()  # at its first await point: the request goes with it
        got = await asyncio.gather(read(one), read(two))
        assert got == [alone(h.request)[0] for h in (one, two)]
        with pytest.raises(asyncio.CancelledError):
            await reader
        assert await asyncio.to_thread(dropped.result) and dropped.result().end is End.CANCELLED
        assert await read(one) == got[0], "an ended request can be read again"

    with serve(threaded=True) as engine:
        asyncio.run(main(engine))
    check_empty(engine)


def test_submit_and_cancel_from_many_threads():
    handles: list[Handle] = []

    def client(number: int) -> None:
        for i in range(3):
            handle = engine.submit(SHORT[: 5 + number], 6 + i, seed=number, temperature=float(number % 2))
            handles.append(handle)
            if (number, i) == (3, 1):
                handle.cancel()
            else:
                assert len(list(handle)) == 6 + i

    with serve(threaded=True) as engine:
        clients = [threading.Thread(target=client, args=(number,)) for number in range(4)]
        for thread in clients:
            thread.start()
        for thread in clients:
            thread.join(300)
    assert len(handles) == 12 and len({h.number for h in handles}) == 12
    check(*(h for h in handles if h.result().end is not End.CANCELLED))
    check_empty(engine)


def test_cancel_at_every_stage():
    engine = serve(growth_reserve=0.0, patience=3)
    stays = engine.submit(MIDDLE, 250)
    inbox = engine.submit(SHORT, 5)
    inbox.cancel()
    engine.step()
    assert inbox.done
    prefilling = engine.submit(LONG, 5)
    until(engine, lambda s: s.prefilling == 1 and s.running == 1 and s.events["prefilled_tokens"] > 300)
    assert engine._loop.runner.pending is not None, "a backup is under way"
    prefilling.cancel()
    engine.step()
    running = engine.submit(SHORT, 60)
    until(engine, lambda s: s.running == 2)
    running.cancel()
    engine.step()
    assert 0 < len(running.tokens) < 60
    others = [engine.submit(SHORT, 90, seed=seed) for seed in range(4)]
    until(engine, lambda s: s.parked > 0)
    parked = next(t.handle for t in engine._loop.scheduler.parked)
    queued = engine.submit(SHORT, 5)
    parked.cancel()
    queued.cancel()
    engine.step()
    run(engine)
    for handle in (inbox, prefilling, running, parked, queued):
        assert handle.result().end is End.CANCELLED
    check(*(h for h in (stays, *others) if h is not parked))
    stays.cancel()
    assert not engine.step() and engine.snapshot.ended[End.CANCELLED] == 5
    check_empty(engine)


def test_waits_where_host_pages_are_short_and_refuses_where_too_many_wait():
    engine = serve(max_waiting=2)
    first = engine.submit(LONG, 290)
    engine.step()
    second, third = engine.submit(LONG, 60, seed=1), engine.submit(SHORT, 3)
    with pytest.raises(EngineBusyError, match="2 requests wait already, max_waiting is 2; try again later or raise it"):
        engine.submit(SHORT, 1)
    for _ in range(5):
        engine.step()
    assert engine.snapshot.waits["host"] > 0 and engine.snapshot.queued == 2, "nobody overtakes the head of the queue"
    run(engine)
    check(first, second, third)
    check_empty(engine)


def test_no_request_starves_under_a_stream_of_short_ones():
    engine = serve()
    shorts = [engine.submit(SHORT, 20, seed=seed) for seed in range(6)]
    long = engine.submit(LONG, 20)
    fed = 0
    while not long.done:
        shorts.append(engine.submit(SHORT, 20, seed=fed % 6))
        engine.step()
        fed += 1
        assert fed < 60, engine.snapshot
    check(long)
    for handle in shorts:
        handle.cancel()
    run(engine)
    check_empty(engine)


def test_a_long_run_makes_way_for_the_head_of_the_queue():
    engine = serve(patience=4)
    hogs = [engine.submit(SHORT[:8], 115, seed=seed) for seed in range(4)]
    until(engine, lambda s: s.running == 4)
    late = engine.submit(SHORT, 5, temperature=1.0, seed=9)
    until(engine, lambda _: late.done, rounds=20)
    assert engine.snapshot.events["preempted"] > 0 and not any(h.done for h in hogs)
    run(engine)
    check(late, *hogs)
    check_empty(engine)


def test_whoever_cannot_grow_is_helped_by_the_youngest():
    """Prompts that just fit, and no reserve: GPU blocks run out in decode, then host pages."""
    engine = serve(growth_reserve=0.0)
    requests = [engine.submit(text(250, seed=seed, vocab=128), 150, seed=seed) for seed in range(4)]
    run(engine)
    check(*requests)
    events = engine.snapshot.events
    assert events["preempted"] > 0 and events["resumed"] > 0 and events["restarted"] > 0, events
    check_empty(engine)


def test_what_can_never_fit_is_refused():
    engine = serve()
    for prompt, new, message in (
        ((), 3, "the prompt has no tokens"),
        ((1, 128), 3, "token id 128 is outside the vocabulary 0..127"),
        (SHORT, 0, "max_new_tokens=0 must be at least 1"),
        (SHORT, 1_000, "max_model_len is 1024; shorten the prompt or raise max_model_len"),
    ):
        with pytest.raises(PromptError, match=message):
            engine.submit(prompt, new)
    for temperature in (-1.0, float("nan"), float("inf")):
        with pytest.raises(PromptError, match=f"temperature={temperature} must be a finite number and not negative"):
            engine.submit(SHORT, 1, temperature=temperature)
    with pytest.raises(PromptError, match="seed=-1 must lie in"):
        engine.submit(SHORT, 1, seed=-1)
    with pytest.raises(ValueError, match=r"growth_reserve=2\.0 must lie in 0\.\.1"):
        EngineConfig(growth_reserve=2.0)
    assert not engine.step() and engine.snapshot.events["submitted"] == 0


def small_scheduler(**options) -> Scheduler:
    return Scheduler(plan_layout(TINY, dataclasses.replace(LAYOUT.cache, **options)), growth_reserve=1.0, patience=4, ahead=8)


def test_a_request_too_long_for_the_pool_is_refused_with_what_it_needs():
    scheduler = small_scheduler(gpu_blocks=9)
    with pytest.raises(PromptError, match=r"590 tokens need 10 GPU blocks even alone, the pool has 9; raise gpu_pool_bytes to"):
        scheduler.check(Request(LONG, 1))
    scheduler.check(Request(MIDDLE, 1))


def test_parked_requests_alone_overtake_a_head_that_lacks_host_pages():
    scheduler, numbers = small_scheduler(host_blocks=10), itertools.count()

    def queue(prompt, **fields) -> Ticket:
        handle = Handle(next(numbers), Request(prompt, 10), lambda _: None, None)
        ticket = Ticket(handle, np.zeros((2, 5), np.int64), **fields)
        scheduler.requeue(ticket, 0, first=False)
        return ticket

    head, short, parked = queue(LONG), queue(SHORT), queue(LONG, place=1, length=600, pages=5)
    assert scheduler.blocked(head) == "host" and scheduler.next_start() is parked
    scheduler.start(parked, 0, Phase.RUNNING, 1)
    assert scheduler.next_start() is None, "the short one waits behind the head"
    assert scheduler.overdue(9) is None, "parking gives back no host page"
    scheduler.leave(parked)
    assert scheduler.next_start() is head
    scheduler.requeue(short, 2, first=True)
    assert scheduler.queue[0] is short and short.reserve_all


def test_snapshots_are_immutable_and_readable_by_prometheus():
    engine = serve()
    before = engine.snapshot
    handle = engine.submit(LONG, 40)
    until(engine, lambda s: s.running == 1 and s.events["decoded_tokens"] > 8)
    now = engine.snapshot
    assert before.step == 0 and before.events["submitted"] == 0, "a snapshot does not change"
    with pytest.raises(dataclasses.FrozenInstanceError):
        now.step = 3  # pyright: ignore[reportAttributeAccessIssue]
    with pytest.raises(TypeError):
        now.events["submitted"] = 3  # pyright: ignore[reportIndexIssue]
    assert now.gpu.used + now.gpu.free == LAYOUT.gpu_blocks - 1
    assert sum(now.pages.values()) == LAYOUT.num_pages(now.events["prefilled_tokens"] + now.events["decoded_tokens"])
    families = text_string_to_metric_families(prometheus_text(now))
    samples = {(s.name, *sorted(s.labels.values())): s.value for family in families for s in family.samples}
    assert samples["hisparse_requests", "running"] == 1
    assert samples["hisparse_host_blocks", "used"] == now.host.used
    layer = now.layers[0]
    assert samples["hisparse_selected_entries_total", str(layer.layer), "misses"] == layer.misses
    assert samples["hisparse_moved_bytes_total", "host"] == now.bytes_to_host > 0
    run(engine)
    check(handle)
    completion = handle.result()
    assert completion.counts.tolist() == [[getattr(x, name) for name in COUNT_NAMES] for x in engine.snapshot.layers]
