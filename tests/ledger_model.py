"""A plain-Python account of the two tiers, written from the rules with loops and lists, and a recount of a real ledger.

The model knows no block ids: it counts what each request, page and transfer holds. `recount` looks at the ids. Nor does it know
which free block is next, so it is told when an un-pinned page was lost (`reuse`).
"""

import collections
import dataclasses

import jax.numpy as jnp
import numpy as np

from hisparse_jax.coordinator import Ledger
from hisparse_jax.parking_ledger import ParkingLedger
from hisparse_jax.status import NULL_BLOCK, Status

QUICK = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}
"""Compiler options for programs that run on tiny tables: compiling them takes longer than running them."""


@dataclasses.dataclass
class Page:
    """One page; it outlives its request while a transfer leases its blocks.

    `home` stands for its host block, `base` for its blocks in the base groups, `parked` for its parking block: who shares a block
    has the same object.
    """

    home: object = dataclasses.field(default_factory=object)
    base: object = dataclasses.field(default_factory=object)
    parked: object = dataclasses.field(default_factory=object)
    in_host_table: bool = True
    grown: bool = False
    in_gpu_table: bool = False
    unpinned: bool = False
    valid: bool = False
    promised: bool = False
    written: bool = False
    transfer: int = 0
    gpu_lease: int = 0
    host_lease: int = 0

    @property
    def copied(self) -> bool:
        return not self.gpu_lease if self.transfer else self.valid

    @property
    def pinned(self) -> bool:
        return self.in_gpu_table and not self.unpinned


@dataclasses.dataclass
class Request:
    pages: list[Page]
    hot: bool = False
    lost: int = 0
    cached: bool = False

    @property
    def num_pages(self) -> int:
        return sum(page.grown for page in self.pages)

    @property
    def switching(self) -> bool:
        return not self.hot and any(page.promised for page in self.pages)

    def candidates(self) -> list[Page]:
        return [p for p in self.pages[: max(self.num_pages - 2, 0)] if p.pinned and not p.promised]


def _different(things: list) -> int:
    return len(set(map(id, things)))


def _among(page: Page, pages: list[Page]) -> bool:
    return any(page is other for other in pages)


class TierModel:
    """`slots[b]` is a `Request` or None, and so is `places[k]`, of a parking with `parking_blocks` blocks but the null one."""

    def __init__(
        self, *, num_blocks, num_host_blocks, num_base, num_resident, hot_pages, batch, max_pages, places=0, parking_blocks=0
    ):
        self.usable, self.host_usable = num_blocks - 1, num_host_blocks - 1
        self.base, self.groups, self.hot_cost = num_base, num_resident, num_resident * hot_pages
        self.max_pages = max_pages
        self.slots: list[Request | None] = [None] * batch
        self.places: list[Request | None] = [None] * places
        self.parking_blocks, self.hot_pages = parking_blocks, hot_pages
        self.orphans: list[Page] = []
        self.lost = [0] * batch
        self.next_transfer = 1

    def requests(self) -> list[tuple[int, Request]]:
        return [(slot, r) for slot, r in enumerate(self.slots) if r]

    def pages(self) -> list[tuple[int, int, Page]]:
        return [(slot, index, page) for slot, r in self.requests() for index, page in enumerate(r.pages)]

    def all_pages(self) -> list[Page]:
        parked = [page for r in self.places if r for page in r.pages]
        return [page for _, _, page in self.pages()] + parked + self.orphans

    def gpu_free(self) -> int:
        fixed = self.base * _different([page.base for _, _, page in self.pages() if page.grown])
        fixed += sum(self.hot_cost * r.hot for _, r in self.requests())
        return self.usable - fixed - self.groups * sum(bool(p.pinned or p.gpu_lease) for p in self.all_pages())

    def host_free(self) -> int:
        return self.host_usable - _different([p.home for p in self.all_pages() if p.in_host_table or p.host_lease])

    def parking_free(self) -> int:
        return self.parking_blocks - _different([p.parked for r in self.places if r for p in r.pages if p.written])

    def admit(self, slot: int, num_pages: int) -> Status:
        if not 0 <= slot < len(self.slots) or self.slots[slot] or not 1 <= num_pages <= self.max_pages:
            return Status.REFUSED
        if num_pages > self.host_free():
            return Status.OUT_OF_HOST_BLOCKS
        self.slots[slot] = Request([Page() for _ in range(num_pages)])
        self.lost[slot] = 0
        return Status.OK

    def grow(self, new_pages: list[int], max_new_pages: int) -> list[Status]:
        gpu, host = self.gpu_free(), self.host_free()
        gpu_closed = host_closed = False
        statuses = []
        for request, count in zip(self.slots, new_pages, strict=True):
            grown = request.num_pages if request else 0
            if not 0 <= count <= min(max_new_pages, self.max_pages - grown) or (count and not request):
                statuses.append(Status.REFUSED)
                continue
            if not request or not count:
                statuses.append(Status.OK)
                continue
            bare = max(0, grown + count - len(request.pages))
            cost = count * (self.base + self.groups)
            host_closed = host_closed or bare > host
            if bare and host_closed:
                statuses.append(Status.OUT_OF_HOST_BLOCKS)
                continue
            gpu_closed = gpu_closed or cost > gpu
            if gpu_closed:
                host -= bare  # it keeps its place in the line for host blocks
                statuses.append(Status.OUT_OF_BLOCKS)
                continue
            gpu, host = gpu - cost, host - bare
            request.pages += [Page() for _ in range(bare)]
            for page in request.pages[grown : grown + count]:
                page.grown = page.in_gpu_table = True
            statuses.append(Status.OK)
        return statuses

    def seal(self, num_sealed: list[int]):
        for request, count in zip(self.slots, num_sealed, strict=True):
            if request:
                for page in request.pages[: max(0, min(count, request.num_pages))]:
                    page.valid = page.valid or not page.transfer

    def finish(self, slot: int) -> Status:
        if not 0 <= slot < len(self.slots) or not (request := self.slots[slot]):
            return Status.REFUSED
        for page in request.pages:
            page.in_host_table = page.in_gpu_table = page.unpinned = False
            if page.host_lease:
                self.orphans.append(page)
        self.slots[slot] = None
        return Status.OK

    def park(self, slot: int, num_pages: int, num_full: int) -> tuple[Status, int, list[int]]:
        """Status, place, and the pages whose host copy had to be made."""
        request = self.slots[slot] if 0 <= slot < len(self.slots) else None
        if not request or not 0 <= num_full <= num_pages <= request.num_pages:
            return Status.REFUSED, -1, []
        copies = [i for i, page in enumerate(request.pages[:num_pages]) if not page.copied]
        homeless = any(not request.pages[i].in_gpu_table for i in copies)
        if homeless or any(page.transfer for page in request.pages[num_full:]):
            return Status.REFUSED, -1, []
        if None not in self.places or num_pages > self.parking_free():
            return Status.OUT_OF_PARKING, -1, []
        place = self.places.index(None)
        kept = []
        for i, page in enumerate(request.pages):
            kept.append(Page(home=page.home, valid=i < num_full or (page.valid and i < num_pages), written=i < num_pages))
            page.in_host_table = page.in_gpu_table = page.unpinned = False
            if page.host_lease:
                self.orphans.append(page)
        self.places[place], self.slots[slot] = Request(kept, lost=self.lost[slot]), None
        return Status.OK, place, copies

    def unpark(self, place: int, slot: int) -> Status:
        request = self.places[place] if 0 <= place < len(self.places) else None
        if not request or request.cached or not 0 <= slot < len(self.slots) or self.slots[slot]:
            return Status.REFUSED
        written = [page for page in request.pages if page.written]
        whole = len(written) <= self.hot_pages + 2
        newest = written if whole else written[-2:]
        cost = self.base * len(written) + self.groups * len(newest) + (0 if whole else self.hot_cost)
        if cost > self.gpu_free():
            return Status.OUT_OF_BLOCKS
        for page in written:
            page.grown, page.in_gpu_table = True, _among(page, newest)
        request.hot = not whole
        self.slots[slot], self.lost[slot], self.places[place] = request, request.lost, None
        return Status.OK

    def publish(self, slot: int, num_pages: int, num_full: int, like: int, num_shared: int) -> tuple[Status, int]:
        """Status and place."""
        request = self.slots[slot] if 0 <= slot < len(self.slots) else None
        if not request or not max(1, num_pages - 1) <= num_full <= num_pages <= request.num_pages:
            return Status.REFUSED, -1
        if any(not page.valid or page.transfer for page in request.pages[:num_full]):
            return Status.REFUSED, -1
        if any(not page.in_gpu_table for page in request.pages[num_full:num_pages]) or not 0 <= num_shared <= num_full:
            return Status.REFUSED, -1
        older = self.places[like] if 0 <= like < len(self.places) else None
        if num_shared and (not older or not older.cached or num_shared > sum(page.valid for page in older.pages)):
            return Status.REFUSED, -1
        if None not in self.places or num_pages - num_shared > self.parking_free():
            return Status.OUT_OF_PARKING, -1
        if num_pages - num_full > self.host_free():
            return Status.OUT_OF_HOST_BLOCKS, -1
        pages = []
        for i, page in enumerate(request.pages[:num_pages]):
            same = older.pages[i] if older and i < num_shared else page if i < num_full else Page()
            kept = Page(home=same.home, valid=i < num_full, written=True)
            kept.parked = same.parked if i < num_shared else kept.parked
            pages.append(kept)
        place = self.places.index(None)
        self.places[place] = Request(pages, cached=True)
        return Status.OK, place

    def adopt(self, place: int, slot: int, num_pages: int) -> Status:
        prefix = self.places[place] if 0 <= place < len(self.places) else None
        if not prefix or not prefix.cached or not 0 <= slot < len(self.slots) or self.slots[slot]:
            return Status.REFUSED
        if not len(prefix.pages) <= num_pages <= self.max_pages:
            return Status.REFUSED
        full = [page for page in prefix.pages if page.valid]
        if num_pages - len(full) > self.host_free():
            return Status.OUT_OF_HOST_BLOCKS
        donated: list[Page] = []
        for _, request in self.requests():
            pairs = zip(request.pages, full)
            same = [mine.grown and mine.home is theirs.home for mine, theirs in pairs]
            leading = same.index(False) if False in same else len(same)
            donated = request.pages[:leading] if leading > len(donated) else donated
        count = len(prefix.pages)
        whole = count <= self.hot_pages + 2
        newest = count if whole else 2
        cost = self.base * (count - len(donated)) + self.groups * newest + (0 if whole else self.hot_cost)
        if cost > self.gpu_free():
            return Status.OUT_OF_BLOCKS
        pages = [Page() for _ in range(num_pages)]
        for i, page in enumerate(pages[:count]):
            page.grown, page.in_gpu_table, page.valid = True, i >= count - newest, i < len(full)
            page.home = full[i].home if i < len(full) else page.home
            page.base = donated[i].base if i < len(donated) else page.base
        self.slots[slot], self.lost[slot] = Request(pages, hot=not whole), 0
        return Status.OK

    def drop(self, place: int) -> Status:
        if not 0 <= place < len(self.places) or not self.places[place]:
            return Status.REFUSED
        self.places[place] = None
        return Status.OK

    def record(self, num_pages: int, num_full: int, num_host: int, lost: int) -> tuple[Status, int]:
        """Status, and the place of a request from elsewhere."""
        if not 0 <= num_full <= num_pages <= num_host or not 1 <= num_host <= self.max_pages:
            return Status.REFUSED, -1
        if None not in self.places or num_pages > self.parking_free():
            return Status.OUT_OF_PARKING, -1
        if num_host > self.host_free():
            return Status.OUT_OF_HOST_BLOCKS, -1
        place = self.places.index(None)
        self.places[place] = Request([Page(valid=i < num_full, written=i < num_pages) for i in range(num_host)], lost=lost)
        return Status.OK, place

    def _shared(self, page: Page) -> bool:
        return sum(other.in_host_table and other.home is page.home for other in self.all_pages()) > 1

    def spill(self, pages: list[list[bool]], release_after: bool, budget: int) -> list[tuple[int, int, int]]:
        reclaimable = [p for _, r in self.requests() for p in r.candidates()]
        plan = []
        for slot, index, page in self.pages():
            legal = pages[slot][index] and page.pinned and not page.transfer and not page.promised
            legal = legal and not any(o.host_lease and o.home is page.home for o in self.orphans) and not self._shared(page)
            legal = legal and (_among(page, reclaimable) if release_after else not page.valid)
            if legal and len(plan) < budget:
                plan.append(self._transfer(slot, index, page))
                page.promised = release_after
        return plan

    def _transfer(self, slot: int, index: int, page: Page) -> tuple[int, int, int]:
        page.transfer = page.gpu_lease = page.host_lease = self.next_transfer
        self.next_transfer += 1
        return slot, index, page.transfer

    def enqueue(self, plan):
        for page in self._planned(plan, "gpu_lease"):
            page.gpu_lease = 0
        self.settle()

    def complete(self, plan):
        for page in self._planned(plan, "gpu_lease"):
            page.gpu_lease = 0
        for page in self._planned(plan, "host_lease"):
            page.host_lease, page.transfer, page.valid = 0, 0, True
        self.orphans = [p for p in self.orphans if p.host_lease]
        self.settle()

    def _planned(self, plan, lease: str) -> list[Page]:
        ids = {transfer for _, _, transfer in plan}
        return [p for p in self.all_pages() if getattr(p, lease) in ids]

    def reclaim(self, num_blocks: int, budget: int) -> list[tuple[int, int, int]]:
        if num_blocks <= 0:
            return []
        ranked = sorted(self.requests(), key=lambda entry: (-len(entry[1].candidates()), entry[0]))
        target = max(num_blocks, sum(bool(r.candidates()) for _, r in ranked) * (self.base + self.groups))
        eventual = self.groups * sum(page.promised for _, _, page in self.pages())
        eventual -= self.hot_cost * sum(r.switching for _, r in ranked)
        chosen = []
        for _, request in ranked:
            if eventual >= target or request.switching:
                continue
            taken, left, need = [], budget, -(-(target - eventual + self.hot_cost) // self.groups)
            for page in request.candidates():
                if eventual + self.groups * len(taken) >= target if request.hot else len(taken) >= need:
                    break
                copy = not page.transfer and not page.valid
                if copy and not left:
                    continue
                left -= copy
                taken.append(page)
            gain = self.groups * len(taken) - (0 if request.hot else self.hot_cost)
            if gain > 0:
                eventual, budget = eventual + gain, left
                chosen += taken
        return self._give_up(chosen, budget=len(chosen))

    def eager(self, requests: list[bool], budget: int) -> list[tuple[int, int, int]]:
        return self._give_up([p for slot, r in self.requests() if requests[slot] for p in r.candidates()], budget)

    def unpin(self, needed: int, watermark: int, window: int):
        low = self.gpu_free() - needed < watermark
        for _, request in self.requests():
            clean = [p for p in request.candidates() if p.valid and not p.transfer]
            if not request.hot and not request.switching and len(clean) * self.groups > self.hot_cost:
                request.hot = low or sum(p.pinned for p in request.pages) >= window
            for page in clean if request.hot else []:
                page.unpinned = True

    def copies_to_unpin(self, needed: int, watermark: int, window: int, budget: int) -> list[tuple[int, int, int]]:
        low, takers = self.gpu_free() - needed < watermark, []
        for _, request in self.requests():
            pays = not request.switching and len(request.candidates()) * self.groups > self.hot_cost
            if request.hot or (pays and (low or sum(p.pinned for p in request.pages) >= window)):
                takers += request.candidates()
        wanted = [
            [bool(r and i < len(r.pages) and _among(r.pages[i], takers)) for i in range(self.max_pages)] for r in self.slots
        ]
        return self.spill(wanted, release_after=False, budget=budget)

    def take_back(self, pages: list[list[bool]]):
        for slot, index, page in self.pages():
            page.unpinned = page.unpinned and not pages[slot][index]

    def reuse(self, slot: int, page: Page):
        """A block of an un-pinned page was handed out."""
        assert page.unpinned
        page.in_gpu_table = page.unpinned = False
        self.lost[slot] += 1

    def _give_up(self, chosen: list[Page], budget: int) -> list[tuple[int, int, int]]:
        plan = []
        for slot, index, page in self.pages():
            if not _among(page, chosen):
                continue
            if not page.transfer and not page.valid:
                if len(plan) == budget:
                    continue
                plan.append(self._transfer(slot, index, page))
            page.promised = True
        self.settle()
        return plan

    def settle(self):
        for owns_hot in (True, False):
            for slot, request in self.requests():
                promised = [p for p in request.pages if p.promised]
                if not promised or request.hot != owns_hot:
                    continue
                if owns_hot:
                    self._leave(slot, [p for p in promised if p.copied])
                elif all(p.copied for p in promised):
                    for page in promised:
                        page.in_gpu_table = False
                    if self.gpu_free() >= self.hot_cost:
                        request.hot = True
                        self._leave(slot, promised)
                    else:
                        for page in promised:
                            page.in_gpu_table, page.promised = True, False

    def _leave(self, slot: int, pages: list[Page]):
        for page in pages:
            page.in_gpu_table = page.promised = False
            self.lost[slot] += 1


def _entries(*tables) -> np.ndarray:
    return np.concatenate([np.asarray(table).ravel() for table in tables])


def recount(ledger: Ledger, leases: dict[int, tuple[int, tuple[int, ...]]], parking: ParkingLedger | None = None):
    """Asserts that tables, places, leases, free queues and the null block partition the pools.

    A block has a reference for each table entry, place and lease; only a page of a cached prefix stands in several tables, as the
    same page of each. An un-pinned page holds none of its blocks, which are free; nobody else names them.
    `leases`: id -> (host, sources).
    """
    tables = ledger.tables
    resident, unpinned = np.asarray(tables.resident), np.asarray(ledger.unpinned)
    kept = resident[:, unpinned].ravel()
    assert (kept != NULL_BLOCK).all() and not np.asarray(tables.pool.references)[kept].any(), "an un-pinned page is not free"
    assert (np.asarray(ledger.valid) & np.asarray(ledger.has_hot)[:, None])[unpinned].all(), "un-pinned without a home"
    hosts = [ledger.host_table] if parking is None else [ledger.host_table, parking.host_table]
    for shared in (tables.base, np.concatenate(hosts), *([] if parking is None else [parking.base])):
        by_page = np.asarray(shared).reshape(-1, np.asarray(shared).shape[-1])
        assert parking is not None or len(by_page[by_page > 0]) == len(set(by_page[by_page > 0].tolist()))
        pages = [set(column[column != NULL_BLOCK].tolist()) for column in by_page.T]
        assert sum(map(len, pages)) == len(set().union(*pages)), "a block stands for two pages"
    c4 = _entries(tables.resident, ledger.hot)
    assert len(set(c4[c4 != NULL_BLOCK].tolist())) == (c4 != NULL_BLOCK).sum(), "a C4 block stands in two places"
    gpu_entries = _entries(tables.base, np.where(unpinned, NULL_BLOCK, resident), ledger.hot)
    gpu_leased = {b: i for i, (_, s) in leases.items() for b in s}
    host_leased = {h: i for i, (h, _) in leases.items() if h}
    pools = [(tables.pool, gpu_entries, ledger.gpu_lease, gpu_leased)]
    if parking is None:
        pools.append((ledger.host, _entries(ledger.host_table), ledger.host_lease, host_leased))
    else:
        pools.append((ledger.host, _entries(ledger.host_table, parking.host_table), ledger.host_lease, host_leased))
        pools.append((parking.pool, _entries(parking.base), jnp.zeros_like(parking.pool.references), {}))
    for pool, entries, lease, leased in pools:
        named = entries[entries != NULL_BLOCK]
        holders = collections.Counter(named.tolist()) + collections.Counter(leased.keys())
        references = np.asarray(pool.references)
        assert references.tolist() == [holders[b] for b in range(len(references))]
        assert np.asarray(lease).tolist() == [leased.get(b, 0) for b in range(len(references))]
        ring, stamps, stamp = np.asarray(pool.ring), np.asarray(pool.ring_stamp), np.asarray(pool.stamp)
        places = (int(pool.head) + np.arange(int(pool.num_items))) % len(ring)
        free = ring[places][stamps[places] == stamp[ring[places]]].tolist()
        assert len(free) == int(pool.num_free)
        assert sorted(free) == [b for b in range(1, len(references)) if references[b] == 0]
