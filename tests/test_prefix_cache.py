"""Prompts that begin alike: a hit changes no bit, whoever came, went or made way since; what nobody owns is NaN throughout."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest
from engines import LAYOUT, LONG, PAGE, SHORT, SOAK, check, check_empty, run, serve, until
from parking_runs import poison_unowned
from prometheus_client.parser import text_string_to_metric_families
from runs import text

from hisparse_jax.engine import Engine, EngineConfig, Handle
from hisparse_jax.layout import plan_layout
from hisparse_jax.metrics import prometheus_text
from hisparse_jax.scheduler import Ticket
from hisparse_jax.sequences import committed
from hisparse_jax.status import NULL_BLOCK

pytestmark = pytest.mark.xdist_group("engine")

FORK = LONG[:300] + text(100, seed=1, vocab=128)
"""Two pages with LONG in common."""


def caching(**settings) -> Engine:
    return serve(prefix_caching=True, **settings)


def poison(engine: Engine) -> None:
    runner = engine._loop.runner
    assert runner.parking is not None
    runner.state, runner.parking = poison_unowned(runner.state, runner.parking)


def finish(engine: Engine, *handles: Handle) -> None:
    """They end, as they do alone; then what nobody owns is poisoned."""
    run(engine)
    check(*handles)
    audit(engine)
    poison(engine)


def audit(engine: Engine) -> None:
    """References, free queues and books agree with the tables; the gauges with a recount."""
    assert SOAK["audit"](engine) == []
    assert engine._loop.runner.parking is not None
    lot, now = engine._loop.runner.parking.ledger, engine._loop.look()
    cached = np.asarray(lot.host_table)[np.asarray(lot.cached)]
    assert (now.cached_prefixes, now.cached_pages) == (int(lot.cached.sum()), len(np.unique(cached[cached > 0])))


def check_empty_at_last(engine: Engine) -> None:
    """Without its cached prefixes an idle engine holds nothing."""
    engine._loop.prefixes.clear()
    engine.step()
    check_empty(engine)
    assert engine._loop.runner.parking is not None
    assert int(engine._loop.runner.parking.ledger.pool.num_free) == LAYOUT.parking_blocks - 1


def ticket_of(engine: Engine, handle: Handle) -> Ticket:
    return engine._loop.open[handle.number]


def events(engine: Engine) -> tuple[int, int]:
    """Hits, and the tokens that they spared."""
    return engine.snapshot.events["prefix_hits"], engine.snapshot.events["prefix_hit_tokens"]


def test_a_hit_changes_no_bit():
    """The same prompt, one that continues it, ones that leave it in the middle: each from another cut."""
    engine = caching()
    first = engine.submit(LONG, 12, seed=1, temperature=0.9)
    finish(engine, first)
    assert events(engine) == (0, 0) and engine.snapshot.events["prefixes_cached"] == 2
    finish(engine, engine.submit(LONG, 12, seed=2, temperature=0.9))
    assert events(engine) == (1, 4 * PAGE), "its last page boundary"
    chat = (*LONG, *first.tokens, *SHORT)
    finish(engine, engine.submit(chat, 12))
    assert events(engine) == (2, 4 * PAGE + 590), "the end of the first prompt, within a page"
    finish(engine, engine.submit(FORK, 8))
    assert events(engine) == (2, 4 * PAGE + 590), "no prefix ends where it leaves"
    finish(engine, engine.submit(LONG[:280] + SHORT, 8, seed=3))
    assert events(engine) == (3, 6 * PAGE + 590), "the second to leave there finds what the first one cached"
    prefilled = engine.snapshot.events["prefilled_tokens"]
    assert prefilled == 590 * 2 + len(chat) + len(FORK) + 310 - events(engine)[1]
    check_empty_at_last(engine)


@pytest.mark.slow
def test_requests_share_pages_with_the_prefix_and_with_each_other_while_they_run():
    """Host pages and base pages by reference, by their own ids in each pool; C4 pages on the GPU are each one's own."""
    engine = caching(growth_reserve=0.0)
    first = engine.submit(LONG[:300], 60)
    until(engine, lambda s: s.running == 1)
    second = engine.submit((*LONG[:300], 5, 6, 7), 40, seed=1, temperature=1.0)
    until(engine, lambda s: s.running == 2)
    audit(engine)
    runner = engine._loop.runner
    assert events(engine) == (1, 300) and runner.parking is not None
    ledger, lot = runner.state.ledger, runner.parking.ledger
    one, two = ticket_of(engine, first).slot, ticket_of(engine, second).slot
    hosts, base = np.asarray(ledger.host_table), np.asarray(ledger.tables.base)
    place = next(p.place for p in engine._loop.prefixes.index if p.length == 300)
    parked = np.asarray(lot.host_table)[place]
    full = np.arange(LAYOUT.max_pages) < 2
    for table in (hosts[one], hosts[two], parked):
        assert (table[full] == parked[full]).all() and NULL_BLOCK not in table[full]
    assert len({hosts[one, 2], hosts[two, 2], parked[2]}) == 3, "the last page is copied before it is written"
    assert (base[:, one, :2] == base[:, two, :2]).all() and (base[:, one, 2] != base[:, two, 2]).all()
    resident = np.asarray(ledger.tables.resident)
    assert not set(resident[:, one].ravel()) & set(resident[:, two].ravel()) - {NULL_BLOCK}
    assert (np.asarray(lot.base)[place] != parked).any() and (base[0, one] != hosts[one]).any(), "B7: ids of three pools"
    first.cancel()
    engine.step()
    poison(engine)
    finish(engine, second)
    check_empty_at_last(engine)


@pytest.mark.slow
def test_c4_who_adopted_does_not_miss_the_prefix():
    """Evicted, its blocks reused, while its adopter runs, is parked, comes back; then the slot is another's."""
    engine = caching()
    finish(engine, engine.submit(LONG, 3))
    adopter = engine.submit(LONG, 40, seed=4, temperature=1.0)
    until(engine, lambda s: s.running == 1)
    assert events(engine) == (1, 4 * PAGE)
    engine._loop.prefixes.clear()
    audit(engine)
    poison(engine)
    engine.step()
    assert engine._loop._park(ticket_of(engine, adopter), first=True)
    audit(engine)
    poison(engine)
    other = engine.submit(SHORT, 30, seed=1)
    finish(engine, adopter, other)
    finish(engine, engine.submit(FORK, 20))
    check_empty_at_last(engine)


def test_two_tenants_never_share_a_page():
    engine = caching(growth_reserve=0.0)
    finish(engine, engine.submit(LONG[:140], 3, tenant="a"))
    handles = [engine.submit(LONG[:140], 60, tenant=tenant, seed=1) for tenant in ("a", "b", b"a")]
    until(engine, lambda s: s.running == 3)
    assert events(engine) == (2, 2 * PAGE), "a tenant is its name in UTF-8"
    hosts = np.asarray(engine._loop.runner.state.ledger.host_table)
    held = [set(hosts[ticket_of(engine, h).slot]) - {NULL_BLOCK} for h in handles]
    assert held[0] & held[2] and not (held[0] | held[2]) & held[1]
    finish(engine, *handles)
    check_empty_at_last(engine)


@pytest.mark.slow
def test_c8_what_was_not_computed_and_complete_is_not_hit():
    """A request makes way in mid prefill with a copy in flight; the same prompt finds nothing before a cut was reached."""
    engine = caching()
    first = engine.submit(LONG[:380], 5)
    until(engine, lambda s: s.events["prefilled_tokens"] == 192)
    assert engine._loop.runner.pending is not None, "a backup is under way"
    ticket = ticket_of(engine, first)
    engine._loop._give_back(ticket)
    engine._loop._begin_anew(ticket)
    assert len(engine._loop.prefixes.index) == 0
    poison(engine)
    again = engine.submit(LONG[:380], 5, seed=1)
    until(engine, lambda s: s.prefilling == 2)
    assert engine.snapshot.events["prefix_lookups"] == 3 and events(engine) == (0, 0)
    finish(engine, first, again)
    check_empty_at_last(engine)


def test_c9_a_prefix_outlives_a_request_that_ends_at_once():
    """It ends with its first token, its pages only just backed up; one that is cancelled leaves what it had cached."""
    engine = caching()
    finish(engine, engine.submit(LONG[:300], 1))
    finish(engine, engine.submit(LONG[:301], 4))
    assert events(engine) == (1, 300)
    cut = engine.submit(text(400, seed=7, vocab=128), 5)
    until(engine, lambda s: s.events["prefixes_cached"] == 4)
    cut.cancel()
    engine.step()
    poison(engine)
    finish(engine, engine.submit(cut.request.prompt, 4))
    assert events(engine) == (2, 300 + 3 * PAGE)
    check_empty_at_last(engine)


def test_d3_cached_prefixes_yield_to_who_needs_their_room():
    """Admission and growth, with the host pool and all places full of what is cached."""
    engine = caching(growth_reserve=0.0)
    for seed in range(4):
        finish(engine, engine.submit(text(300, seed=seed, vocab=128), 3))
    assert engine.snapshot.cached_prefixes == 6, "two each, and the oldest two are gone"
    now = engine.snapshot
    assert now.host.used == now.cached_pages == 9 and now.pages["host_only"] == 0 and now.gpu.used == 0, "G2: pool by pool"
    samples = {s.name: s.value for f in text_string_to_metric_families(prometheus_text(now)) for s in f.samples}
    assert samples["hisparse_cached_prefixes"] == 6 and samples["hisparse_cached_pages"] == 9
    big = engine.submit((*text(300, seed=3, vocab=128), *LONG), 100)
    until(engine, lambda s: s.running == 1)
    assert events(engine) == (1, 300), "what it adopts is kept; the others make room for the rest"
    audit(engine)
    finish(engine, big)
    assert engine.snapshot.events["prefixes_evicted"] >= 6 and not engine.snapshot.waits["host"]
    finish(engine, *[engine.submit(text(110, seed=20 + i, vocab=128), 200) for i in range(3)])
    assert engine.snapshot.events["restarted"] == engine.snapshot.events["prefixes_skipped"] == 0
    check_empty_at_last(engine)


@pytest.mark.slow
def test_cached_prefixes_yield_to_a_request_that_is_parked():
    engine = caching()
    finish(engine, engine.submit(LONG, 3))
    request = engine.submit(SHORT, 40)
    until(engine, lambda s: s.running == 1)
    runner = engine._loop.runner
    num_free = spare_parking(engine, 0)
    assert engine._loop._park(ticket_of(engine, request), first=False) and runner.parking is not None
    assert engine.snapshot.events["prefixes_evicted"] == 0 < engine._loop.look().events["prefixes_evicted"]
    spare_parking(engine, num_free)
    finish(engine, request)
    check_empty_at_last(engine)


def spare_parking(engine: Engine, change: int) -> int:
    """Puts all free parking blocks out of reach, or so many back into it; how many were free."""
    runner = engine._loop.runner
    assert runner.parking is not None
    lot = runner.parking.ledger
    before = int(lot.pool.num_free)
    pool = lot.pool.replace(num_free=committed(jnp.int32(before + change if change else 0)))
    runner.parking = runner.parking.replace(ledger=lot.replace(pool=pool))
    return before


@pytest.mark.parametrize(("name", "resets"), [("publish", 0), ("adopt", 0), ("parking.copy_out", 1), ("parking.copy_back", 1)])
def test_what_fails_while_a_prefix_is_cached_or_adopted_fails_one_request(monkeypatch, name, resets):
    """Before anything changed, or with the cache lost between the plan and its copies; then nothing is cached any more."""
    engine = caching()
    finish(engine, engine.submit(LONG[:300], 3))

    def fail(*_, **__):
        raise MemoryError("pinned memory")

    with monkeypatch.context() as patched:
        patched.setattr(f"hisparse_jax.prefix_places.{name}", fail)
        bad = engine.submit(LONG[:310], 3)
        until(engine, lambda _: bad.done)
    assert isinstance(bad.error, MemoryError) and engine.snapshot.events["resets"] == resets
    assert engine.snapshot.cached_prefixes == (0 if resets else 2)
    finish(engine, engine.submit(LONG[:310], 3))
    check_empty_at_last(engine)


def test_what_is_switched_on_without_room_is_refused():
    layout = plan_layout(LAYOUT.model, dataclasses.replace(LAYOUT.cache, cached_prefixes=0))
    with pytest.raises(ValueError, match="prefix_caching=True needs places to cache in; plan the layout with cached_prefixes=1"):
        Engine(None, layout, EngineConfig(prefix_caching=True), threaded=False)  # pyright: ignore[reportArgumentType]
