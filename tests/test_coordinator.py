"""Transitions of the two tiers at Flash's geometry (base layout): the worked table of reclaim, and faults others had."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ledger_model import QUICK, recount

from hisparse_jax import block_pool, block_tables, coordinator, reclaim, spill
from hisparse_jax.coordinator import Ledger, init_ledger
from hisparse_jax.status import NULL_BLOCK, Status

pytestmark = pytest.mark.xdist_group("coordinator")

BATCH, PAGES, GROUPS, HOT_COST, GROWING = 3, 64, 6, 96, 8
SIZES = dict(num_blocks=1_000, num_host_blocks=128, num_base=2, num_resident=6, hot_pages=16, batch=BATCH, max_pages=PAGES)

jit = functools.partial(jax.jit, compiler_options=QUICK)
_admit, _finish, seal = jit(coordinator.admit), jit(coordinator.finish), jit(coordinator.seal)
_grow = jit(coordinator.grow, static_argnames="max_new_pages")
_spill = jit(spill.plan_spill, static_argnames=("release_after", "max_pages"))
_reclaim = jit(reclaim.reclaim, static_argnames="max_pages")
_eager = jit(reclaim.release_history, static_argnames="max_pages")
enqueued, completed = jit(spill.commit_enqueued), jit(spill.commit_completed)
_take = jit(block_pool.allocate, static_argnames="max_count")


def admit(ledger: Ledger, slot: int, num_pages: int):
    ledger, status = _admit(ledger, jnp.int32(slot), jnp.int32(num_pages))
    return ledger, Status(int(status))


def finish(ledger: Ledger, slot: int):
    ledger, status = _finish(ledger, jnp.int32(slot))
    return ledger, Status(int(status))


def grow(ledger: Ledger, *new_pages: int):
    ledger, granted, status, new_host = _grow(ledger, counts(*new_pages), max_new_pages=PAGES)
    assert np.asarray(granted).tolist() == [s == Status.OK for s in np.asarray(status)]
    return ledger, [Status(int(s)) for s in status], np.asarray(new_host)


def counts(*values: int):
    return jnp.asarray((*values, *[0] * (BATCH - len(values))), jnp.int32)


def lacking(ledger: Ledger, *new_pages: int) -> int:
    return int(block_tables.blocks_wanted(ledger.tables, counts(*new_pages))) - num_free(ledger)


def cells(slot: int, *pages: int):
    return jnp.zeros((BATCH, PAGES), bool).at[slot, jnp.asarray(pages)].set(True)


def with_requests(*num_pages: int, sealed: bool = True) -> Ledger:
    """Requests in slots 0, 1, ... with all their pages on the GPU, and on the host too where `sealed`."""
    ledger = init_ledger(**SIZES)
    for slot, count in enumerate(num_pages):
        ledger, status = admit(ledger, slot, count)
        assert status is Status.OK
    ledger, statuses, _ = grow(ledger, *num_pages)
    assert statuses == [Status.OK] * BATCH
    return seal(ledger, counts(*num_pages)) if sealed else ledger


def leave_free(ledger: Ledger, num_free: int) -> Ledger:
    """Hands all but `num_free` GPU blocks to somebody else."""
    surplus = ledger.tables.pool.num_free - num_free
    pool, _, _ = _take(ledger.tables.pool, surplus, max_count=SIZES["num_blocks"])
    return ledger.replace(tables=ledger.tables.replace(pool=pool))


def grant_hot(ledger: Ledger, slot: int) -> Ledger:
    pool, block_ids, _ = _take(ledger.tables.pool, jnp.int32(HOT_COST), max_count=SIZES["num_blocks"])
    hot = ledger.hot.at[:, slot].set(block_ids[:HOT_COST].reshape(GROUPS, -1))
    return ledger.replace(tables=ledger.tables.replace(pool=pool), hot=hot)


def num_free(ledger: Ledger) -> int:
    return int(ledger.tables.pool.num_free)


def resident(ledger: Ledger, slot: int) -> list[int]:
    blocks = np.asarray(ledger.tables.resident)[:, slot] != NULL_BLOCK
    assert (blocks == blocks[0]).all(), "in all groups or in none"
    return np.flatnonzero(blocks[0]).tolist()


def reclaimed(ledger: Ledger, num_blocks: int):
    return _reclaim(ledger, jnp.int32(num_blocks), max_pages=PAGES)


WORKED = {  # pages of each request, blocks lacking -> pages given up by each, net blocks
    "18 alone is skipped": ((18,), 10, (0,), 0),
    "19 alone converts": ((19,), 10, (17,), 6),
    "40 alone converts": ((40,), 10, (18,), 12),
    "of three, 40 converts": ((18, 19, 40), 10, (0, 0, 20), 24),
    "40, all of it": ((40,), 200, (38,), 132),
    "nothing lacking": ((40,), 0, (0,), 0),
    "ties go to the lower slot": ((30, 30), 10, (19, 0), 18),
}


@pytest.mark.parametrize("sealed", [True, False], ids=["valid pages", "copies needed"])
@pytest.mark.parametrize(("pages", "lacking", "given", "net"), WORKED.values(), ids=WORKED)
def test_worked_table_of_reclaim(pages, lacking, given, net, sealed):
    before = with_requests(*pages, sealed=sealed)
    ledger, plan = reclaimed(before, lacking)
    if sealed:
        assert int(plan.count) == 0
    else:
        assert int(plan.count) == sum(given)
        assert ledger.transition_target.tolist() == list(given) + [0] * (BATCH - len(given))
        assert num_free(ledger) == num_free(before), "nothing leaves before its copy is enqueued"
        ledger = completed(enqueued(ledger, plan), plan)
    assert num_free(ledger) - num_free(before) == net
    for slot, (total, gone) in enumerate(zip(pages, given, strict=True)):
        assert resident(ledger, slot) == list(range(gone, total)), "oldest first"
        assert bool(ledger.has_hot[slot]) == (gone > 0)
    if not any(given):
        chex.assert_trees_all_equal(ledger, before)
    recount(ledger, {})


def test_worked_table_with_the_hot_region_owned():
    before = grant_hot(with_requests(40), 0)
    ledger, plan = reclaimed(before, 10)
    assert (int(plan.count), num_free(ledger) - num_free(before), resident(ledger, 0)[0]) == (0, 12, 2)


@pytest.mark.parametrize("candidates", [15, 16, 17])
def test_f6_no_conversion_without_gain(candidates):
    ledger, _ = reclaimed(with_requests(candidates + 2), 10)
    assert bool(ledger.has_hot[0]) == (candidates == 17)


def test_promised_blocks_are_not_reclaimed_twice():
    ledger, first = reclaimed(with_requests(40, 40, sealed=False), 10)
    ledger, second = reclaimed(ledger, 10)
    assert (int(first.count), int(second.count)) == (19, 0)


def test_d1_requests_wait_for_host_blocks_and_all_get_them():
    ledger = init_ledger(**SIZES)
    done = []
    waiting = [("a", 64), ("b", 64), ("c", 60), ("d", 64)]
    running: list[str | None] = [None] * BATCH
    for _ in range(20):
        for slot in range(BATCH):
            if waiting and running[slot] is None:
                ledger, status = admit(ledger, slot, waiting[0][1])
                if status is Status.OUT_OF_HOST_BLOCKS:
                    break
                assert status is Status.OK
                running[slot] = waiting.pop(0)[0]
        slot = next(b for b in range(BATCH) if running[b])
        ledger, status = finish(ledger, slot)
        assert status is Status.OK
        done.append(running[slot])
        running[slot] = None
        if len(done) == 4:
            break
    assert sorted(done) == ["a", "b", "c", "d"]
    assert int(ledger.host.num_free) == 127


def test_d2_one_prompt_of_twice_the_pool_gets_through():
    ledger, _ = admit(leave_free(init_ledger(**SIZES), 260), 0, 60)
    refusals = 0
    for grown in range(0, 60, 2):
        ledger, (status, *_), _ = grow(ledger, 2)
        if status is Status.OUT_OF_BLOCKS:
            refusals += 1
            ledger, _ = reclaimed(ledger, lacking(ledger, 2))
            ledger, (status, *_), _ = grow(ledger, 2)
        assert status is Status.OK
        ledger = seal(ledger, counts(grown + 2))
    assert 0 < refusals < 30
    assert ledger.pages_lost[0] > 0 and resident(ledger, 0)[-2:] == [58, 59]


def test_d4_reclaim_serves_a_request_that_only_waits():
    ledger, _ = admit(leave_free(with_requests(40), 3), 1, 4)
    _, (_, status, _), _ = grow(ledger, 0, 4)
    assert status is Status.OUT_OF_BLOCKS
    assert lacking(ledger, 0, 4) == 4 * GROWING - 3
    ledger, _ = reclaimed(ledger, lacking(ledger, 0, 4))
    _, (_, status, _), _ = grow(ledger, 0, 4)
    assert status is Status.OK


def test_d5_pages_and_hot_region_change_hands_in_one_step_or_not_at_all():
    every = jnp.ones(BATCH, bool)
    few = leave_free(with_requests(12), 0)
    after, _ = _eager(few, every, max_pages=PAGES)
    chex.assert_trees_all_equal(after, few)

    enough = leave_free(with_requests(18), 0)
    after, _ = _eager(enough, every, max_pages=PAGES)
    assert (num_free(after), resident(after, 0), bool(after.has_hot[0])) == (0, [16, 17], True)


def test_d5_a_switch_that_cannot_get_its_region_gives_up_and_succeeds_later():
    ledger = leave_free(with_requests(12, sealed=False), 0)
    ledger, plan = _spill(ledger, cells(0, 0, 1, 2), release_after=True, max_pages=PAGES)
    ledger = enqueued(ledger, plan)
    assert resident(ledger, 0) == list(range(12)) and not bool(ledger.has_hot[0])
    ledger = completed(ledger, plan)
    ledger = ledger.replace(tables=with_requests(12).tables)
    ledger, plan = _eager(ledger, jnp.ones(BATCH, bool), max_pages=PAGES)
    assert plan.page[: int(plan.count)].tolist() == list(range(3, 10)), "what was copied is not copied again"
    ledger = enqueued(ledger, plan)
    assert resident(ledger, 0) == [10, 11] and bool(ledger.has_hot[0])


def test_d6_a_switch_commits_with_the_pages_really_planned():
    before = with_requests(22, sealed=False)
    before = before.replace(host_table=before.host_table.at[0, 3].set(NULL_BLOCK))
    ledger, plan = reclaimed(before, 24)
    assert (int(plan.count), int(ledger.transition_target[0])) == (19, 19)
    ledger = enqueued(ledger, plan)
    assert resident(ledger, 0) == [3, 20, 21] and bool(ledger.has_hot[0])
    assert num_free(ledger) - num_free(before) == 19 * GROUPS - HOT_COST


def test_d6_a_page_already_on_its_way_is_waited_for_and_not_copied_twice():
    ledger, backup = _spill(with_requests(22, sealed=False), cells(0, 5), release_after=False, max_pages=PAGES)
    ledger, plan = reclaimed(ledger, 24)
    assert (int(plan.count), int(ledger.transition_target[0])) == (19, 20)
    ledger = enqueued(ledger, plan)
    assert not bool(ledger.has_hot[0])
    ledger = enqueued(ledger, backup)
    assert bool(ledger.has_hot[0]) and resident(ledger, 0) == [20, 21]


def test_d7_growth_past_the_host_pool_waits_and_keeps_nobody_else():
    ledger = init_ledger(**SIZES)
    for slot, count in enumerate((40, 40, 47)):
        ledger, _ = admit(ledger, slot, count)
    ledger, _, new_host = grow(ledger, 40, 40, 10)
    assert not new_host.any(), "prompt pages have their host blocks since admission"
    after, statuses, _ = grow(ledger, 1, 1, 0)
    assert statuses == [Status.OUT_OF_HOST_BLOCKS, Status.OUT_OF_HOST_BLOCKS, Status.OK]
    chex.assert_trees_all_equal(after, ledger)
    ledger, statuses, _ = grow(ledger, 1, 0, 5)
    assert statuses == [Status.OUT_OF_HOST_BLOCKS, Status.OK, Status.OK]
    ledger, _ = finish(ledger, 2)
    ledger, statuses, new_host = grow(ledger, 1, 2)
    assert statuses == [Status.OK] * 3 and len(set(new_host[new_host != NULL_BLOCK].tolist())) == 3


def test_d8_as_many_hot_regions_as_the_pool_has_room_for():
    ledger = leave_free(with_requests(4, 4, 4), 170)
    ledger, _ = _eager(ledger, jnp.ones(BATCH, bool), max_pages=PAGES)
    assert ledger.has_hot.tolist() == [True, True, False]
    assert resident(ledger, 2) == [0, 1, 2, 3]


def test_d10_blocks_come_back_once_after_many_cycles():
    ledger = init_ledger(**SIZES)
    for cycle in range(40):
        slot = cycle % BATCH
        ledger, _ = admit(ledger, slot, 20)
        ledger, _, _ = grow(ledger, *[24 if b == slot else 0 for b in range(BATCH)])
        ledger, _ = reclaimed(seal(ledger, counts(24, 24, 24)), 12 * (cycle % 3))
        ledger, status = finish(ledger, slot)
        assert status is Status.OK
    recount(ledger, {})
    assert (num_free(ledger), int(ledger.host.num_free)) == (999, 127)


def test_c3_blocks_under_copy_are_handed_out_only_after_its_end():
    ledger, plan = _spill(with_requests(4, sealed=False), cells(0, 0, 1), release_after=False, max_pages=PAGES)
    ledger, _ = finish(spill.commit_enqueued(ledger, plan, leases_until_completed=True), 0)
    assert (num_free(ledger), int(ledger.host.num_free)) == (999 - 2 * GROUPS, 127 - 2)
    pool, block_ids, _ = _take(ledger.tables.pool, ledger.tables.pool.num_free, max_count=SIZES["num_blocks"])
    assert not set(np.asarray(block_ids).tolist()) & set(np.asarray(plan.source[:, :2]).ravel().tolist())
    ledger = completed(ledger, plan)
    assert (num_free(ledger), int(ledger.host.num_free)) == (999, 127)
    chex.assert_trees_all_equal(completed(ledger, plan), ledger)


def test_c8_a_copy_that_ends_late_does_not_vouch_for_the_next_request():
    ledger, plan = _spill(with_requests(4, sealed=False), cells(0, 0, 1), release_after=False, max_pages=PAGES)
    ledger, _ = finish(ledger, 0)
    ledger, _ = admit(ledger, 0, 4)
    ledger, _, _ = grow(ledger, 4)
    ledger, again = _spill(ledger, cells(0, 0), release_after=False, max_pages=PAGES)
    assert not set(np.asarray(ledger.host_table[0, :4]).tolist()) & set(np.asarray(plan.host[:2]).tolist())
    ledger = completed(enqueued(ledger, plan), plan)
    assert not bool(ledger.valid.any()) and int(ledger.transfer[0, 0]) == int(again.transfer[0])
    assert completed(ledger, again).valid[0, :2].tolist() == [True, False]


def test_a_smaller_request_does_not_overtake():
    ledger, _ = admit(with_requests(4, 4), 2, 4)
    after, statuses, _ = grow(leave_free(ledger, 3 * GROWING), 0, 4, 1)
    assert statuses == [Status.OK, Status.OUT_OF_BLOCKS, Status.OUT_OF_BLOCKS]
    _, statuses, _ = grow(after, 1, 61, 1)
    assert statuses == [Status.OK, Status.REFUSED, Status.OK], "one that can never be served holds nobody up"


def test_seal_leaves_a_page_under_copy_to_its_transfer():
    ledger, plan = _spill(with_requests(4, sealed=False), cells(0, 1), release_after=False, max_pages=PAGES)
    ledger = seal(ledger, counts(9, 9, -1))
    assert np.flatnonzero(ledger.valid[0]).tolist() == [0, 2, 3] and not bool(ledger.valid[1:].any())
    assert np.flatnonzero(completed(enqueued(ledger, plan), plan).valid[0]).tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize("pages", [(10,), (11,), (63,)])
def test_a_page_of_the_tail_or_beyond_is_never_spilled(pages):
    before = with_requests(12, sealed=False)
    after, plan = _spill(before, cells(0, *pages), release_after=True, max_pages=PAGES)
    assert int(plan.count) == 0
    chex.assert_trees_all_equal(after, before)


def test_what_makes_no_sense_is_refused_and_changes_nothing():
    before = with_requests(4)
    for call in (lambda: admit(before, 0, 4), lambda: admit(before, 3, 4), lambda: admit(before, -1, 4),
                 lambda: admit(before, 1, 0), lambda: admit(before, 1, 65), lambda: finish(before, 1),
                 lambda: finish(before, -1), lambda: finish(before, 3)):  # fmt: skip
        after, status = call()
        assert status is Status.REFUSED
        chex.assert_trees_all_equal(after, before)
    after, statuses, _ = grow(before, -1, 1, 2**31 - 1)
    assert statuses == [Status.REFUSED] * 3
    chex.assert_trees_all_equal(after, before)
