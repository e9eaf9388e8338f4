"""Any sequence of transitions, poisoned arguments among them, against the plain-Python model of the tiers."""

import functools

import chex
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from ledger_model import QUICK, Page, TierModel, recount

from hisparse_jax import coordinator, parking_ledger, prefix_ledger, reclaim, spill, unpin
from hisparse_jax.status import NULL_BLOCK, Status

SIZES = dict(num_blocks=29, num_host_blocks=15, num_base=1, num_resident=2, hot_pages=2, batch=3, max_pages=8)
BATCH, PAGES, GROUPS, NEW, BUDGET = 3, 8, 2, 2, 4
PLACES, PARKED = 3, 11


def once(function, **static):
    """Jitted with its static arguments bound; a second trace fails."""
    named = functools.wraps(function)(functools.partial(function, **static))
    named.__name__ = f"{function.__name__}_{len(static)}_{static.get('release_after', '')}"
    return jax.jit(chex.assert_max_traces(named, n=1), compiler_options=QUICK)


chex.clear_trace_counter()
admit, finish, seal = once(coordinator.admit), once(coordinator.finish), once(coordinator.seal)
grow = once(coordinator.grow, max_new_pages=NEW)
plan_spill = {flag: once(spill.plan_spill, release_after=flag, max_pages=BUDGET) for flag in (False, True)}
commit_enqueued, commit_completed = once(spill.commit_enqueued), once(spill.commit_completed)
reclaim_ = once(reclaim.reclaim, max_pages=BUDGET)
release_history = once(reclaim.release_history, max_pages=BUDGET)
unpin_clean, take_back = once(unpin.unpin_clean), once(unpin.take_back)
plan_copies = once(unpin.plan_copies, max_pages=BUDGET)
park, unpark, drop = once(parking_ledger.park), once(parking_ledger.unpark), once(parking_ledger.drop)
record = once(parking_ledger.record)
publish, adopt = once(prefix_ledger.publish), once(prefix_ledger.adopt)

slots = st.integers(0, BATCH - 1) | st.sampled_from((-1, BATCH, 2**31 - 1))
places = st.integers(0, PLACES - 1) | st.sampled_from((-1, PLACES, 2**31 - 1))
counts = st.integers(0, NEW) | st.sampled_from((-1, NEW + 1, 2**31 - 1))
some_pages = st.lists(st.lists(st.booleans(), min_size=PAGES, max_size=PAGES), min_size=BATCH, max_size=BATCH)
needed, watermark, window = st.integers(0, 12), st.integers(0, 29), st.integers(3, PAGES + 1)


def per_request(values):
    return st.lists(values, min_size=BATCH, max_size=BATCH)


def i32(value):
    return jnp.asarray(value, jnp.int32)


class LedgerMachine(RuleBasedStateMachine):
    def __init__(self):
        super().__init__()
        self.ledger = coordinator.init_ledger(**SIZES)
        self.parking = parking_ledger.init_parking_ledger(PARKED + 1, PLACES, PAGES)
        self.model = TierModel(**SIZES, places=PLACES, parking_blocks=PARKED)
        self.plans, self.leases = [], {}
        self.resident = np.asarray(self.ledger.tables.resident)

    @initialize(num_pages=per_request(st.integers(3, 6)))
    def start(self, num_pages):
        for slot, count in enumerate(num_pages):
            self.admit(slot, count)
        for _ in range(2):
            self.grow_all()

    @rule(slot=slots, num_pages=st.integers(1, PAGES) | st.sampled_from((0, -1, PAGES + 1, 2**31 - 1)))
    def admit(self, slot, num_pages):
        self.ledger, status = admit(self.ledger, i32(slot), i32(num_pages))
        assert int(status) == self.model.admit(slot, num_pages)

    @rule(num_pages=st.integers(3, PAGES))
    def admit_free(self, num_pages):
        self.admit(next((b for b, r in enumerate(self.model.slots) if not r), 0), num_pages)

    @rule(new_pages=per_request(counts))
    def grow(self, new_pages):
        before = np.asarray(self.ledger.host_table)
        self.ledger, granted, status, new_host = grow(self.ledger, i32(new_pages))
        expected = self.model.grow(new_pages, NEW)
        assert np.asarray(status).tolist() == [int(s) for s in expected]
        assert np.asarray(granted).tolist() == [s == 0 for s in expected]
        after = np.asarray(self.ledger.host_table)
        fresh = [after[b][(before[b] == NULL_BLOCK) & (after[b] != NULL_BLOCK)].tolist() for b in range(BATCH)]
        assert [[i for i in row if i != NULL_BLOCK] for row in np.asarray(new_host).tolist()] == fresh

    @rule()
    def grow_all(self):
        self.grow([min(NEW, PAGES - r.num_pages) if r else 0 for r in self.model.slots])

    @rule(num_sealed=per_request(st.integers(-1, PAGES + 1)))
    def seal(self, num_sealed):
        self.ledger = seal(self.ledger, i32(num_sealed))
        self.model.seal(num_sealed)

    @rule()
    def seal_all(self):
        self.seal([PAGES] * BATCH)

    @rule(pages=some_pages)
    def back_up(self, pages):
        self._spill(pages, release_after=False)

    @rule(pages=some_pages)
    def spill(self, pages):
        self._spill(pages, release_after=True)

    def _spill(self, pages, release_after):
        self.ledger, plan = plan_spill[release_after](self.ledger, jnp.asarray(pages))
        self._planned(plan, self.model.spill(pages, release_after, BUDGET))

    @rule(num_blocks=st.integers(-1, 20) | st.sampled_from((2**31 - 1, -(2**31))))
    def reclaim(self, num_blocks):
        self.ledger, plan = reclaim_(self.ledger, i32(num_blocks))
        self._planned(plan, self.model.reclaim(num_blocks, BUDGET))

    @rule(requests=per_request(st.booleans()))
    def release_history(self, requests):
        self.ledger, plan = release_history(self.ledger, jnp.asarray(requests))
        self._planned(plan, self.model.eager(requests, BUDGET))

    @rule(needed=needed, watermark=watermark, window=window)
    def unpin(self, needed, watermark, window):
        self.ledger = unpin_clean(self.ledger, i32(needed), i32(watermark), i32(window))
        self.model.unpin(needed, watermark, window)

    @rule(needed=needed, watermark=watermark, window=window)
    def copy_to_unpin(self, needed, watermark, window):
        self.ledger, plan = plan_copies(self.ledger, i32(needed), i32(watermark), i32(window))
        self._planned(plan, self.model.copies_to_unpin(needed, watermark, window, BUDGET))

    @precondition(lambda self: any(self.model.slots))
    @rule()
    def unpin_and_grow(self):
        """What is free is written to soon, so un-pinned pages go."""
        self.seal_all()
        self.unpin(0, SIZES["num_blocks"], PAGES + 1)
        self.agrees()
        self.grow_all()

    @rule(pages=some_pages)
    def take_back(self, pages):
        self.ledger = take_back(self.ledger, jnp.asarray(pages))
        self.model.take_back(pages)

    def _planned(self, plan, expected):
        count = int(plan.count)
        rows = np.stack([plan.request, plan.page, plan.transfer])
        assert rows[:, :count].T.tolist() == [list(row) for row in expected]
        assert (rows[:, count:].T == [-1, -1, 0]).all()
        host, source = np.asarray(plan.host), np.asarray(plan.source)
        assert not host[count:].any() and not source[:, count:].any()
        assert (host[:count] == np.asarray(self.ledger.host_table)[rows[0, :count], rows[1, :count]]).all()
        for i in range(count):
            self.leases[int(rows[2, i])] = (int(host[i]), tuple(source[:, i].tolist()))
        if count:
            self.plans.append((plan, expected))

    @precondition(lambda self: self.plans)
    @rule(data=st.data())
    def enqueue(self, data):
        self._enqueue(*data.draw(st.sampled_from(self.plans)))

    @precondition(lambda self: self.plans)
    @rule()
    def enqueue_all(self):
        for entry in self.plans:
            self._enqueue(*entry)

    def _enqueue(self, plan, expected):
        self.ledger = commit_enqueued(self.ledger, plan)
        self.model.enqueue(expected)
        for _, _, transfer in expected:
            if transfer in self.leases:
                self.leases[transfer] = (self.leases[transfer][0], ())

    @precondition(lambda self: self.plans)
    @rule(data=st.data(), again=st.booleans())
    def complete(self, data, again):
        entry = data.draw(st.sampled_from(self.plans))
        self.ledger = commit_completed(self.ledger, entry[0])
        self.model.complete(entry[1])
        for _, _, transfer in entry[1]:
            self.leases.pop(transfer, None)
        if not again:
            self.plans = [kept for kept in self.plans if kept is not entry]

    @rule(slot=slots)
    def finish(self, slot):
        self.ledger, status = finish(self.ledger, i32(slot))
        assert int(status) == self.model.finish(slot)

    @rule(slot=slots, ahead=st.integers(0, 1), partial=st.integers(0, 1))
    def park(self, slot, ahead, partial):
        """`ahead` pages were grown for rows to come, `partial` pages are not full."""
        request = self.model.slots[slot] if 0 <= slot < BATCH else None
        num_pages = request.num_pages - ahead if request else 1
        self._park(slot, num_pages, num_pages - partial)

    @rule(slot=slots, num_pages=st.integers(-1, PAGES + 1), num_full=st.integers(-1, PAGES + 1))
    def park_at(self, slot, num_pages, num_full):
        self._park(slot, num_pages, num_full)

    def _park(self, slot, num_pages, num_full):
        before = self.ledger
        self.ledger, self.parking, plan, place, status = park(self.ledger, self.parking, i32(slot), i32(num_pages), i32(num_full))
        expected, where, copies = self.model.park(slot, num_pages, num_full)
        assert (int(status), int(place)) == (expected, where)
        if where < 0:
            assert not any(np.asarray(x).any() for x in jax.tree.leaves(plan))
            chex.assert_trees_all_equal(self.ledger, before)
            return
        written, copied = np.arange(PAGES) < num_pages, np.isin(np.arange(PAGES), copies)
        tables = before.tables
        np.testing.assert_array_equal(plan.base, np.where(written, np.asarray(tables.base)[:, slot], 0))
        np.testing.assert_array_equal(plan.parked, np.asarray(self.parking.base)[where])
        np.testing.assert_array_equal(plan.source, np.where(copied, np.asarray(tables.resident)[:, slot], 0))
        np.testing.assert_array_equal(plan.host, np.where(copied, np.asarray(before.host_table)[slot], 0))
        np.testing.assert_array_equal(self.parking.host_table[where], before.host_table[slot])

    @rule(place=places, slot=slots)
    def unpark(self, place, slot):
        before = self.ledger, self.parking
        self.ledger, self.parking, plan, status = unpark(*before, i32(place), i32(slot))
        assert int(status) == self.model.unpark(place, slot)
        if int(status):
            assert not any(np.asarray(x).any() for x in jax.tree.leaves(plan))
            chex.assert_trees_all_equal((self.ledger, self.parking), before)
            return
        tables = self.ledger.tables
        np.testing.assert_array_equal(plan.parked, before[1].base[place])
        np.testing.assert_array_equal(plan.base, tables.base[:, slot])
        np.testing.assert_array_equal(self.ledger.host_table[slot], before[1].host_table[place])
        resident = np.asarray(tables.resident)[:, slot]
        back = resident[0] != NULL_BLOCK
        count = int(back.sum())
        np.testing.assert_array_equal(np.asarray(plan.resident)[:, :count], resident[:, back])
        np.testing.assert_array_equal(np.asarray(plan.host)[:count], np.asarray(self.ledger.host_table)[slot, back])
        assert not np.asarray(plan.resident)[:, count:].any() and not np.asarray(plan.host)[count:].any()

    @precondition(lambda self: any(self.model.slots))
    @rule(ahead=st.integers(0, 1), partial=st.integers(0, 1))
    def park_largest(self, ahead, partial):
        slot, _ = max(self.model.requests(), key=lambda entry: entry[1].num_pages)
        self.park(slot, ahead, partial)

    @precondition(lambda self: any(r and not r.cached for r in self.model.places) and not all(self.model.slots))
    @rule()
    def unpark_any(self):
        self.unpark(next(k for k, r in enumerate(self.model.places) if r and not r.cached), self.model.slots.index(None))

    @precondition(lambda self: any(self.model.slots))
    @rule(ahead=st.integers(0, 1), partial=st.integers(0, 1), crowded=st.booleans())
    def round_trip(self, ahead, partial, crowded):
        """The largest request leaves and comes back, while others want its blocks or after all of them ended."""
        self.park_largest(ahead, partial)
        self.agrees()
        if crowded:
            self.grow_all()
        else:
            for slot in range(BATCH):
                self.finish(slot)
        self.agrees()
        if any(r and not r.cached for r in self.model.places) and not all(self.model.slots):
            self.unpark_any()
        self.agrees()

    @rule(num_pages=st.integers(-1, PAGES + 1), unwritten=st.integers(-1, 2), partial=st.integers(-1, 1), lost=st.integers(0, 3))
    def record(self, num_pages, unwritten, partial, lost):
        """A request from elsewhere, of whose host pages the last `unwritten` hold no rows yet."""
        before, counts = (self.ledger, self.parking), (num_pages, num_pages - partial, num_pages + unwritten, lost)
        self.ledger, self.parking, parked, host, place, status = record(*before, *map(i32, counts))
        assert (int(status), int(place)) == self.model.record(*counts)
        if int(status):
            assert not np.asarray(parked).any() and not np.asarray(host).any()
            chex.assert_trees_all_equal((self.ledger, self.parking), before)
            return
        np.testing.assert_array_equal(parked, self.parking.base[int(place)])
        np.testing.assert_array_equal(host, self.parking.host_table[int(place)])

    @rule(slot=slots, partial=st.integers(0, 1), like=places, num_shared=st.integers(0, 3))
    def publish(self, slot, partial, like, num_shared):
        request = self.model.slots[slot] if 0 <= slot < BATCH else None
        num_pages = request.num_pages if request else 1
        self._publish(slot, num_pages, num_pages - partial, like, num_shared)

    counted = st.integers(-1, PAGES + 1)

    @rule(slot=slots, num_pages=counted, num_full=counted, like=places, num_shared=counted)
    def publish_at(self, slot, num_pages, num_full, like, num_shared):
        self._publish(slot, num_pages, num_full, like, num_shared)

    def _publish(self, slot, num_pages, num_full, like, num_shared):
        before = self.ledger, self.parking
        arguments = map(i32, (slot, num_pages, num_full, like, num_shared))
        self.ledger, self.parking, plan, place, status = publish(*before, *arguments)
        assert (int(status), int(place)) == self.model.publish(slot, num_pages, num_full, like, num_shared)
        if int(status):
            assert not any(np.asarray(x).any() for x in jax.tree.leaves(plan))
            chex.assert_trees_all_equal((self.ledger, self.parking), before)
            return
        page, tables, where = np.arange(PAGES), before[0].tables, int(place)
        copied, tail = (page >= num_shared) & (page < num_pages), (page >= num_full) & (page < num_pages)
        np.testing.assert_array_equal(plan.base, np.where(copied, np.asarray(tables.base)[:, slot], 0))
        np.testing.assert_array_equal(plan.parked, np.where(copied, np.asarray(self.parking.base)[where], 0))
        np.testing.assert_array_equal(plan.source, np.where(tail, np.asarray(tables.resident)[:, slot], 0))
        np.testing.assert_array_equal(plan.host, np.where(tail, np.asarray(self.parking.host_table)[where], 0))

    @rule(place=places, slot=slots, num_pages=st.integers(1, PAGES) | st.sampled_from((-1, PAGES + 1, 2**31 - 1)))
    def adopt(self, place, slot, num_pages):
        before = self.ledger
        self.ledger, plan, status = adopt(before, self.parking, i32(place), i32(slot), i32(num_pages))
        assert int(status) == self.model.adopt(place, slot, num_pages)
        if int(status):
            assert not any(np.asarray(x).any() for x in jax.tree.leaves(plan))
            chex.assert_trees_all_equal(self.ledger, before)
            return
        tables, parking = self.ledger.tables, self.parking
        base, resident = np.asarray(tables.base)[:, slot], np.asarray(tables.resident)[:, slot]
        fresh = np.asarray(before.tables.pool.references)[base] == 0
        np.testing.assert_array_equal(plan.base, np.where(fresh, base, 0))
        np.testing.assert_array_equal(plan.parked, np.where(fresh[0], np.asarray(parking.base)[place], 0))
        back = resident[0] != NULL_BLOCK
        count = int(back.sum())
        np.testing.assert_array_equal(np.asarray(plan.resident)[:, :count], resident[:, back])
        np.testing.assert_array_equal(np.asarray(plan.host)[:count], np.asarray(parking.host_table)[place, back])

    @precondition(lambda self: any(self.model.slots))
    @rule(partial=st.integers(0, 1), more=st.integers(0, 1), alone=st.booleans())
    def share(self, partial, more, alone):
        """With its copies done, the largest request is cached, and others adopt that while it runs and once it ended."""
        slot, request = max(self.model.requests(), key=lambda entry: entry[1].num_pages)
        for entry in self.plans:
            self.ledger = commit_completed(self.ledger, entry[0])
            self.model.complete(entry[1])
        self.plans, self.leases = [], {}
        if alone:
            for other in range(BATCH):
                self.finish(other if other != slot else -1)
            for place in range(PLACES):
                self.drop(place)
        self.grow_all()
        self.seal_all()
        self.publish(slot, partial, -1, 0)
        latest = max((k for k, r in enumerate(self.model.places) if r and r.cached), default=-1)
        self.publish(slot, 1 - partial, latest, max(request.num_pages - 1, 0))
        self.agrees()
        self.adopt_any(more)
        self.agrees()
        self.finish(slot)
        self.adopt_any(more)
        self.agrees()

    @precondition(lambda self: any(r and r.cached for r in self.model.places) and not all(self.model.slots))
    @rule(more=st.integers(0, 2))
    def adopt_any(self, more):
        cached = [(k, r) for k, r in enumerate(self.model.places) if r and r.cached]
        if cached and not all(self.model.slots):
            place, prefix = cached[-1]
            self.adopt(place, self.model.slots.index(None), len(prefix.pages) + more)

    @rule(place=places)
    def drop(self, place):
        before = self.ledger, self.parking
        self.ledger, self.parking, status = drop(*before, i32(place))
        assert int(status) == self.model.drop(place)
        if int(status):
            chex.assert_trees_all_equal((self.ledger, self.parking), before)

    @invariant()
    def agrees(self):
        ledger, model = self.ledger, self.model
        self._lose_what_was_handed_out()
        resident = np.asarray(ledger.tables.resident) != NULL_BLOCK
        shape = (BATCH, PAGES)
        expected = {
            name: np.zeros(shape, int)
            for name in ("grown", "in_gpu_table", "unpinned", "in_host_table", "valid", "promised", "transfer")
        }
        for b, request in enumerate(model.slots):
            for p, page in enumerate(request.pages if request else []):
                for name, table in expected.items():
                    table[b, p] = getattr(page, name)
        assert (resident == expected["in_gpu_table"].astype(bool)).all(), "in all resident groups or in none"
        assert ((np.asarray(ledger.tables.base) != NULL_BLOCK) == expected["grown"]).all()
        assert (np.asarray(ledger.tables.num_pages) == expected["grown"].sum(1)).all()
        assert ((np.asarray(ledger.host_table) != NULL_BLOCK) == expected["in_host_table"]).all()
        assert (np.asarray(ledger.valid) == expected["valid"]).all()
        assert (np.asarray(ledger.unpinned) == expected["unpinned"]).all()
        assert (np.asarray(ledger.release_after) == expected["promised"]).all()
        assert (np.asarray(ledger.transfer) == expected["transfer"]).all()
        hot = np.asarray(ledger.hot) != NULL_BLOCK
        assert (hot == np.asarray([bool(r and r.hot) for r in model.slots])[None, :, None]).all(), "the whole region or none"
        switching = [bool(r and r.switching) for r in model.slots]
        assert (np.asarray(ledger.transition_target) > 0).tolist() == switching
        assert int(ledger.tables.pool.num_free) == model.gpu_free()
        assert int(ledger.host.num_free) == model.host_free()
        assert np.asarray(ledger.pages_lost).tolist() == model.lost
        for k, request in enumerate(model.places):
            pages = (request.pages if request else []) + [Page(in_host_table=False)] * PAGES
            for table, name in ((self.parking.host_table, "in_host_table"), (self.parking.base, "written")):
                assert (np.asarray(table)[k] != NULL_BLOCK).tolist() == [getattr(page, name) for page in pages[:PAGES]]
            assert np.asarray(self.parking.valid)[k].tolist() == [page.valid for page in pages[:PAGES]]
        assert int(self.parking.pool.num_free) == model.parking_free()
        assert np.asarray(self.parking.cached).tolist() == [bool(r and r.cached) for r in model.places]
        recount(ledger, self.leases, self.parking)
        for b, request in enumerate(model.slots):
            if request and not resident[0, b, : request.num_pages].all():
                assert request.hot, "no page is lost before the hot region is owned"
                assert resident[:, b, max(request.num_pages - 2, 0) : request.num_pages].all(), "the last two pages stay"

    def _lose_what_was_handed_out(self):
        """An un-pinned page is lost in all groups when a block of it has a new holder, and stands as it stood otherwise."""
        before, after = self.resident, np.asarray(self.ledger.tables.resident)
        references = np.asarray(self.ledger.tables.pool.references)
        for slot, index, page in self.model.pages():
            if page.unpinned:
                lost = references[before[:, slot, index]].any()
                assert (after[:, slot, index] == (NULL_BLOCK if lost else before[:, slot, index])).all()
                if lost:
                    self.model.reuse(slot, page)
        self.resident = after

    def teardown(self):
        for entry in list(self.plans):
            self.ledger = commit_completed(self.ledger, entry[0])
        for slot in range(BATCH):
            self.ledger, _ = finish(self.ledger, i32(slot))
        for place in range(PLACES):
            self.ledger, self.parking, _ = drop(self.ledger, self.parking, i32(place))
        recount(self.ledger, {}, self.parking)
        assert int(self.parking.pool.num_free) == PARKED
        assert int(self.ledger.tables.pool.num_free) == SIZES["num_blocks"] - 1
        assert int(self.ledger.host.num_free) == SIZES["num_host_blocks"] - 1


TestLedger = LedgerMachine.TestCase
TestLedger.settings = settings(max_examples=25, stateful_step_count=30, deadline=None)


def test_c8_a_page_whose_copy_is_under_way_is_not_published():
    """Neither one that has no complete copy yet nor one that is on its way once more; nothing changes meanwhile."""
    ledger, _ = admit(coordinator.init_ledger(**SIZES), i32(1), i32(4))
    ledger, *_ = grow(ledger, i32([0, 2, 0]))
    parking = parking_ledger.init_parking_ledger(PARKED + 1, PLACES, PAGES)
    first = jnp.zeros((BATCH, PAGES), bool).at[1, :2].set(True)

    def published(ledger, num_pages, num_full):
        after, lot, _, place, status = publish(ledger, parking, i32(1), i32(num_pages), i32(num_full), i32(-1), i32(0))
        if int(status):
            chex.assert_trees_all_equal((after, lot), (ledger, parking))
        return Status(int(status)), int(place)

    assert published(ledger, 1, 1) == (Status.REFUSED, -1)
    ledger, plan = plan_spill[False](ledger, first)
    assert int(plan.count) == 2 and published(ledger, 2, 2) == (Status.REFUSED, -1)
    ledger = commit_enqueued(ledger, plan)
    assert published(ledger, 2, 2) == (Status.REFUSED, -1)
    ledger = commit_completed(ledger, plan)
    assert published(ledger, 2, 2) == (Status.OK, 0) == published(ledger, 2, 1)
    ledger, *_ = grow(ledger, i32([0, 2, 0]))
    ledger, again = plan_spill[True](ledger, first)
    assert int(again.count) == 2 and published(ledger, 2, 2) == (Status.REFUSED, -1), "valid, and on its way again"
    assert published(commit_completed(ledger, again), 2, 2) == (Status.OK, 0)


def test_a_page_that_others_share_is_not_written_over():
    """Spilling it once more would write to a host page that they read."""
    ledger, _ = admit(coordinator.init_ledger(**SIZES), i32(0), i32(4))
    for _ in range(2):
        ledger, *_ = grow(ledger, i32([2, 0, 0]))
    ledger = seal(ledger, i32([4, 0, 0]))
    parking = parking_ledger.init_parking_ledger(PARKED + 1, PLACES, PAGES)
    first = jnp.zeros((BATCH, PAGES), bool).at[0, 0].set(True)
    shared, parking, _, _, status = publish(ledger, parking, i32(0), i32(4), i32(4), i32(-1), i32(0))
    assert int(status) == Status.OK
    assert int(plan_spill[True](shared, first)[1].count) == 0 < int(plan_spill[True](ledger, first)[1].count)


def test_a_page_in_flight_since_before_a_preemption_is_not_planned_again():
    """Its host block has one lease; a second transfer would take the first one's place, and a reference would never end."""

    def planned(ledger, slot, release_after):
        return plan_spill[release_after](ledger, jnp.zeros((BATCH, PAGES), bool).at[slot, 0].set(True))

    ledger, _ = admit(coordinator.init_ledger(**SIZES), i32(0), i32(4))
    parking = parking_ledger.init_parking_ledger(PARKED + 1, PLACES, PAGES)
    for _ in range(2):
        ledger, *_ = grow(ledger, i32([2, 0, 0]))
    ledger, plan = planned(ledger, 0, release_after=False)
    ledger, parking, copies, _, status = park(ledger, parking, i32(0), i32(4), i32(4))
    assert int(status) == Status.OK and np.count_nonzero(copies.host) == 4, "the page in flight is copied again"
    ledger, parking, _, status = unpark(ledger, parking, i32(0), i32(2))
    assert int(status) == Status.OK and (np.asarray(ledger.tables.resident)[0, 2, :4] != NULL_BLOCK).all()
    recount(ledger, {1: (int(plan.host[0]), tuple(np.asarray(plan.source)[:, 0].tolist()))}, parking)
    ledger, again = planned(ledger, 2, release_after=True)
    assert int(again.count) == 0
    ledger = commit_completed(ledger, plan)
    recount(ledger, {}, parking)
    ledger, again = planned(ledger, 2, release_after=True)
    assert int(again.count) == 1
