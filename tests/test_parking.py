"""A preempted request goes on in every bit as if it had stayed: whatever the moment, the slot, the companions, the memory."""

import chex
import jax.numpy as jnp
import numpy as np
import pytest
from parking_runs import (
    BRIEF,
    CHUNK,
    LAYOUT,
    LONG,
    OPTIONS,
    OTHER,
    PAGE,
    SMALL,
    STEPS,
    Engine,
    assert_undisturbed,
    values,
)
from runs import text, tight_layout

from hisparse_jax import decode
from hisparse_jax.parking import discard, preempt, resume
from hisparse_jax.sequences import committed
from hisparse_jax.status import Status, TierError
from hisparse_jax.steps import traces

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("parking")]  # test_engine.py preempts and resumes in every run

# Equality


@pytest.mark.parametrize("until", [1, 3, 127, 128, 130, 384, 450, 599])
def test_preempted_in_mid_prefill(until):
    """Before the first entry, at and around page boundaries, short enough to come back whole and too long for it."""
    engine = Engine()
    engine.admit("long", 2, LONG, STEPS)
    engine.prefill("long", until)
    engine.preempt("long")
    engine.admit("brief", 2, BRIEF, 10)
    engine.prefill("brief")
    engine.resume("long", 0)
    engine.decode(5)
    engine.prefill("long", until=min(until + 70, 599), chunk=31)
    engine.preempt("long")
    engine.resume("long", 1)
    engine.prefill("long")
    engine.decode()
    assert_undisturbed(engine, "long")
    assert_undisturbed(engine, "brief")


@pytest.mark.parametrize("moments", [(0,), (39, 40, 41), (40, 48), (59,), (7, 8, 9, 30)], ids=str)
def test_preempted_in_decode(moments):
    """Right after prefill, around the page boundary (also with the next page grown ahead), right before the limit, often."""
    engine, done, slot = Engine(), 0, 1
    engine.admit("long", slot, LONG, STEPS, seed=9, temperature=0.9)
    engine.prefill("long")
    lost = int(engine.state.ledger.pages_lost[slot])
    assert lost == 0, "a request alone loses nothing, so it is preempted before any loss"
    for step in moments:
        engine.decode(step - done)
        engine.preempt("long")
        assert int(engine.state.ledger.tables.pool.num_free) == LAYOUT.gpu_blocks - 1, "all of the GPU is given up"
        done, slot = step, (slot + 1) % 4
        engine.resume("long", slot)
        ledger = engine.state.ledger
        resident = np.asarray(ledger.tables.resident)[0, slot] > 0
        assert resident.sum() == 2 and resident[-(-engine.length("long") // PAGE) - 2] and bool(ledger.has_hot[slot])
    engine.decode()
    assert_undisturbed(engine, "long", seed=9, temperature=0.9)
    engine.finish("long")
    engine.check_empty()


def crowd(engine: Engine, other=OTHER):
    """Three requests that together lose pages."""
    for name, slot, prompt, seed in (("long", 0, LONG, 3), ("other", 1, other, 4), ("brief", 3, BRIEF, 5)):
        engine.admit(name, slot, prompt, STEPS, seed=seed, temperature=0.7)
        engine.prefill(name)


SPILL = {"backup": "spill", "rule": "base", "reclaim": "eager"}


@pytest.mark.parametrize("options", [{}, pytest.param(SPILL, marks=pytest.mark.slow)], ids=["default", "spill"])
def test_several_parked_at_once_with_lost_pages(options):
    layout = LAYOUT if not options else tight_layout(SMALL, (6, 5, 3), slack=1, **OPTIONS, **options)
    engine = Engine(layout)
    before = traces.copy()
    crowd(engine)
    engine.decode(20)
    assert int(engine.state.ledger.pages_lost[0]) > 0
    lost, moved = int(engine.state.ledger.pages_lost[0]), int(engine.state.traffic.swapped_rows[0])
    assert moved > 0
    engine.preempt("long")
    engine.decode(3)
    engine.preempt("brief")
    engine.preempt("other")
    assert sorted(r.place for r in engine.requests.values()) == [0, 1, 2]
    engine.resume("long", 1)
    assert int(engine.state.ledger.pages_lost[1]) == lost and int(engine.state.traffic.swapped_rows[1]) == moved
    engine.decode(9)
    engine.resume("other", 2)
    engine.decode(7)
    engine.preempt("long")
    engine.resume("brief", 0)
    engine.resume("long", 3)
    engine.decode()
    for name, seed in (("long", 3), ("other", 4), ("brief", 5)):
        assert_undisturbed(engine, name, seed=seed, temperature=0.7)
        engine.finish(name)
    engine.check_empty()
    programs = {name: count - before[name] for name, count in traces.items() if name.startswith("parking.")}
    assert set(programs.values()) <= {0, 1}, programs


# Who owns what


def test_host_blocks_of_the_parked_are_handed_to_nobody():
    engine = Engine()
    engine.admit("long", 0, LONG, STEPS)
    engine.prefill("long")
    engine.decode(10)
    engine.preempt("long")
    held = np.asarray(engine.parking.ledger.host_table)[0]
    taken = []
    for slot in range(4):
        engine.admit(f"brief {slot}", slot, BRIEF, 5)
        engine.prefill(f"brief {slot}")
        taken += np.asarray(engine.state.ledger.host_table)[slot].tolist()
    assert not set(taken) & set(held[held > 0].tolist()) and int(engine.state.ledger.host.num_free) < 5
    engine.finish("brief 0")
    with pytest.raises(TierError, match="OUT_OF_HOST_BLOCKS"):
        engine.admit("other", 0, text(1_000, vocab=128), 5)
    engine.decode()
    for slot in range(1, 4):
        engine.finish(f"brief {slot}")
    engine.resume("long", 3)
    engine.decode()
    assert_undisturbed(engine, "long")


@pytest.mark.parametrize("early", [True, False], ids=["committed while parked", "committed after it is back"])
def test_a_copy_in_flight_is_honoured(early):
    engine = Engine()
    engine.admit("long", 0, LONG, STEPS)
    engine.prefill("long", 448)
    plan = engine.chunk("long", CHUNK)  # seals page 3, whose copy is not made yet
    assert plan is not None and int(plan.count) == 1
    leased = np.asarray(plan.source)[:, 0]
    engine.preempt("long")
    pool = engine.state.ledger.tables.pool
    assert (np.asarray(pool.references)[leased] == 1).all(), "the lease outlives the preemption"
    assert int(pool.num_free) == LAYOUT.gpu_blocks - 1 - len(leased)
    if early:
        engine.flush(plan)
    engine.resume("long", 3)
    if not early:
        engine.prefill("long", 550)
        engine.flush(plan)
    engine.check()
    engine.prefill("long")
    engine.decode()
    assert_undisturbed(engine, "long")
    engine.finish("long")
    engine.check_empty()


def test_a_copy_in_flight_of_a_page_not_yet_full_refuses():
    engine = Engine()
    engine.admit("long", 0, LONG, STEPS)
    engine.prefill("long", 128 + 64)
    engine.state, plan, status = decode.prepare_chunk(engine.state, jnp.int32(0), jnp.int32(CHUNK), layout=LAYOUT)
    assert int(status) == Status.OK and int(plan.count) == 1  # of a page that the chunk is still to fill
    refused(engine, slot=0)
    engine.flush(plan)


def test_discard_gives_everything_back():
    engine = Engine()
    crowd(engine)
    engine.preempt("long")
    engine.preempt("other")
    engine.state, engine.parking, status = discard(engine.state, engine.parking, 0, layout=LAYOUT)
    assert status is Status.OK
    engine.check()
    engine.poison()
    engine.resume("other", 0)
    engine.decode()
    assert_undisturbed(engine, "other", seed=4, temperature=0.7)
    engine.finish("other")
    engine.finish("brief")
    engine.check_empty()


def test_a_request_without_a_token_and_one_that_stopped_can_be_parked():
    engine = Engine()
    engine.admit("long", 0, LONG, STEPS)
    engine.preempt("long")
    engine.admit("brief", 0, BRIEF, 3)
    engine.prefill("brief")
    engine.decode(3)
    assert not bool(engine.state.sequences.running[0])
    engine.preempt("brief")
    engine.resume("long", 2)
    engine.resume("brief", 1)
    engine.prefill("long")
    engine.decode()
    assert_undisturbed(engine, "long")
    assert_undisturbed(engine, "brief")


# Refusals


def refused(engine: Engine, *, slot: int | None = None, place: int = -1, into: int | None = None, expected=Status.REFUSED):
    """Preempts `slot`, discards `place`, or resumes it into `into`; the status is as expected and nothing else changed."""
    before = values((engine.state, engine.parking))
    if slot is not None:
        engine.state, engine.parking, got, status = preempt(engine.state, engine.parking, slot, layout=engine.layout)
        assert got is None
    elif into is not None:
        engine.state, engine.parking, status = resume(engine.state, engine.parking, place, into, layout=engine.layout)
    else:
        engine.state, engine.parking, status = discard(engine.state, engine.parking, place, layout=engine.layout)
    assert status is expected
    chex.assert_trees_all_equal(values((engine.state, engine.parking)), before)


def test_bad_slots_and_places_are_refused():
    engine = Engine()
    engine.admit("long", 0, LONG, STEPS)
    engine.prefill("long")
    for slot in (1, -1, 4, 2**31 - 1, -(2**31)):
        refused(engine, slot=slot)
    for place in (0, -1, 3, 2**31 - 1):
        refused(engine, place=place)
        refused(engine, place=place, into=2)
    engine.admit("brief", 1, BRIEF, 5)
    engine.preempt("long")
    for into in (1, -1, 4, 2**31 - 1):
        refused(engine, place=0, into=into)
    refused(engine, place=1, into=0)


def ration(engine: Engine, *, slab: int | None = None, parking: int | None = None):
    """Lets a pool give so many blocks; the rest is out of reach."""
    if slab is not None:
        ledger = engine.state.ledger
        tables = ledger.tables.replace(pool=ledger.tables.pool.replace(num_free=committed(jnp.int32(slab))))
        engine.state = engine.state.replace(ledger=ledger.replace(tables=tables))
    if parking is not None:
        lot = engine.parking.ledger
        engine.parking = engine.parking.replace(ledger=lot.replace(pool=lot.pool.replace(num_free=committed(jnp.int32(parking)))))


def test_a_full_parking_and_a_full_slab_refuse_without_a_trace():
    engine = Engine()
    crowd(engine)
    num_free = int(engine.parking.ledger.pool.num_free)
    ration(engine, parking=4)
    refused(engine, slot=0, expected=Status.OUT_OF_PARKING)  # it has 5 pages
    ration(engine, parking=num_free)
    for name in ("long", "brief", "other"):
        engine.preempt(name)
    engine.admit("last", 3, BRIEF, 5)
    engine.prefill("last")
    refused(engine, slot=3, expected=Status.OUT_OF_PARKING)  # all places are taken
    num_free = int(engine.state.ledger.tables.pool.num_free)
    ration(engine, slab=7)
    refused(engine, place=0, into=0, expected=Status.OUT_OF_BLOCKS)  # it needs 5 + 2 + 1
    ration(engine, slab=num_free)
    engine.resume("long", 0)


def test_others_give_up_history_for_one_that_comes_back():
    engine = Engine()
    engine.admit("long", 0, LONG, 30)
    engine.prefill("long")
    engine.preempt("long")
    for name, slot in (("other", 1), ("third", 2)):
        engine.admit(name, slot, OTHER, 20)
        engine.prefill(name)
    need = LAYOUT.num_base_groups * 5 + LAYOUT.num_resident_groups * 2 + LAYOUT.hot_blocks
    assert int(engine.state.ledger.tables.pool.num_free) < need
    lost = int(engine.state.ledger.pages_lost.sum())
    engine.resume("long", 0)
    assert int(engine.state.ledger.pages_lost.sum()) > lost
    engine.decode()
    for name in engine.requests:
        assert_undisturbed(engine, name)
