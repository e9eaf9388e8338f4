"""Who holds which host block while a request is parked, and its way from a slot to a place and back.

A parked request keeps its C4 host blocks, which move with their references from the slot's table to the place's, and one
parking block for each page of base groups. Everything on the GPU goes. It comes back to any free slot with the base pages, the
newest C4 pages, and a hot region for the rest.
"""

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Bool, Int32

from hisparse_jax import coordinator
from hisparse_jax.block_pool import BlockPool, allocate, free, init_pool, touch
from hisparse_jax.coordinator import Ledger
from hisparse_jax.spill import copied, standing
from hisparse_jax.status import NULL_BLOCK, Status


class ParkingLedger(struct.PyTreeNode):
    """`K` places of requests of up to `P` pages. A place is taken while its page 0 has a host block.

    A block may stand in several places and slots: pages of a cached prefix (`prefix_ledger`), each with a reference of its own.

    pool: BlockPool        parking blocks, A of them; one holds one page of every base group.
    base: i32[K, P]        page to parking block; null past the pages that hold rows.
    host_table: i32[K, P]  page to host block, as in the slot that was left: whole prompts have theirs from admission.
    valid: bool[K, P]      the host copy is complete, and stays so as the page fills.
    num_pages: i32[K]      pages that hold rows.
    pages_lost: i32[K]     pages given up before.
    cached: bool[K]        the place holds a prefix for any number of requests, not a request.
    """

    pool: BlockPool
    base: Int32[Array, "K P"]
    host_table: Int32[Array, "K P"]
    valid: Bool[Array, "K P"]
    num_pages: Int32[Array, " K"]
    pages_lost: Int32[Array, " K"]
    cached: Bool[Array, " K"]

    @property
    def taken(self) -> Bool[Array, " K"]:
        """Which places hold a request or a prefix."""
        return self.host_table[:, 0] != NULL_BLOCK


class ParkPlan(struct.PyTreeNode):
    """Page copies that park a request, by page; null where none is due.

    base: i32[Gb, P]   GPU block of the page in each base group.
    parked: i32[P]     parking block to write.
    source: i32[G, P]  GPU block of a C4 page whose host copy is not complete, in each resident group.
    host: i32[P]       host block to write.
    """

    base: Int32[Array, "Gb P"]
    parked: Int32[Array, " P"]
    source: Int32[Array, "G P"]
    host: Int32[Array, " P"]


class ResumePlan(struct.PyTreeNode):
    """Page copies that bring a request back; null where none is due. `M` = `most_resident` pages.

    parked: i32[P]       parking block to read.
    base: i32[Gb, P]     GPU block of the page in each base group.
    host: i32[M]         host block of a C4 page to read.
    resident: i32[G, M]  its GPU block in each resident group.
    """

    parked: Int32[Array, " P"]
    base: Int32[Array, "Gb P"]
    host: Int32[Array, " M"]
    resident: Int32[Array, "G M"]


def init_parking_ledger(num_blocks: int, num_places: int, max_pages: int) -> ParkingLedger:
    """Empty places over a fresh pool; `num_blocks` includes the null block."""
    per_page = jnp.zeros((num_places, max_pages), jnp.int32)
    return ParkingLedger(
        pool=init_pool(num_blocks),
        base=per_page + NULL_BLOCK,
        host_table=jnp.full_like(per_page, NULL_BLOCK),
        valid=per_page.astype(bool),
        num_pages=jnp.zeros(num_places, jnp.int32),
        pages_lost=jnp.zeros(num_places, jnp.int32),
        cached=jnp.zeros(num_places, bool),
    )


def park(
    ledger: Ledger,
    parking: ParkingLedger,
    slot: Int32[Array, ""],
    num_pages: Int32[Array, ""],
    num_sealed: Int32[Array, ""],
) -> tuple[Ledger, ParkingLedger, ParkPlan, Int32[Array, ""], Int32[Array, ""]]:
    """Moves a request from `slot` to the lowest free place; `num_pages` of its pages hold rows, the first `num_sealed` are full.

    The plan's copies must be enqueued before any later writer of the GPU blocks, which are free at once. Blocks under lease
    stay out of the pools until their transfer's commit; a page in flight is copied again, so that commit need not be waited for.
    A full page is valid from now on; one that is not keeps its flag, since only written-through rows keep a copy complete.

    Returns `(ledger, parking, plan, place, status)`: `OUT_OF_PARKING` where no place or too few blocks are free; `REFUSED` for
    a slot that is not taken, counts that do not fit its pages, a page that is not full with a transfer in flight (it would
    land on rows written later: commit it first), or rows in no tier. Then nothing changes and the place is -1.
    """
    batch, max_pages = ledger.host_table.shape
    taken, inside = coordinator.look_up(ledger, slot)
    page = jnp.arange(max_pages, dtype=jnp.int32)
    written, full = page < num_pages, page < num_sealed
    complete, on_gpu = copied(ledger)[inside], standing(ledger)[inside]
    in_flight = ledger.transfer[inside] != 0
    counted = (num_sealed >= 0) & (num_sealed <= num_pages) & (num_pages <= ledger.tables.num_pages[inside])
    sound = ~jnp.any(written & ~complete & ~on_gpu) & ~jnp.any(in_flight & ~full)
    legal = taken & counted & sound

    place, is_there = lowest_free(parking)
    pool, blocks, got = allocate(parking.pool, jnp.where(legal, num_pages, 0), max_count=max_pages)
    roomy = is_there & (got == Status.OK)
    ok = legal & roomy

    copies = ok & written & ~complete
    plan = ParkPlan(
        base=jnp.where(ok & written, ledger.tables.base[:, inside], NULL_BLOCK),
        parked=jnp.where(ok, blocks, NULL_BLOCK),
        source=jnp.where(copies, ledger.tables.resident[:, inside], NULL_BLOCK),
        host=jnp.where(copies, ledger.host_table[inside], NULL_BLOCK),
    )
    parked = fill(
        parking.replace(pool=pool),
        place,
        ok,
        base=blocks,
        host_table=ledger.host_table[inside],
        valid=full | (ledger.valid[inside] & written),
        num_pages=num_pages,
        pages_lost=ledger.pages_lost[inside],
    )
    host, _ = touch(ledger.host, jnp.where(ok, ledger.host_table[inside], NULL_BLOCK))
    left, _ = coordinator.finish(ledger.replace(host=host), jnp.where(ok, slot, batch))
    status = jnp.where(legal, jnp.where(roomy, Status.OK, Status.OUT_OF_PARKING), Status.REFUSED).astype(jnp.int32)
    return left, keep(ok, parked, parking), plan, jnp.where(ok, place, -1), status


def blocks_to_resume(ledger: Ledger, parking: ParkingLedger, place: Int32[Array, ""]) -> Int32[Array, ""]:
    """GPU blocks that the request or prefix of a place takes; 0 for a place that is free or does not exist."""
    known, inside = look_up(parking, place)
    return jnp.where(known, _demand(ledger, parking.num_pages[inside])[1], 0)


def unpark(
    ledger: Ledger, parking: ParkingLedger, place: Int32[Array, ""], slot: Int32[Array, ""]
) -> tuple[Ledger, ParkingLedger, ResumePlan, Int32[Array, ""]]:
    """Moves a parked request to a free `slot`: base pages in every base group, and C4 pages as far as they stay.

    Those are the tail, and the rest is on the host behind a hot region; a request whose other pages take no more blocks
    than the region gets them all and no region, so it never needs more than it could have held before. The plan's copies come
    before the request runs.

    Returns `(ledger, parking, plan, status)`: `OUT_OF_BLOCKS`; `REFUSED` for a place that holds no request or does not exist
    and for a slot that is taken or outside 0..B-1. Then nothing changes.
    """
    known, inside = look_up(parking, place)
    legal = known & ~parking.cached[inside] & coordinator.is_vacant(ledger, slot)
    nobody = jnp.int32(0)
    back, plan, got = move_in(ledger, parking, inside, slot, legal, donor=nobody, num_donated=nobody)
    status = jnp.where(legal, got, Status.REFUSED).astype(jnp.int32)
    return back, _vacate(parking, inside, status == Status.OK), plan, status


def move_in(
    ledger: Ledger,
    parking: ParkingLedger,
    place: Int32[Array, ""],
    slot: Int32[Array, ""],
    legal: Bool[Array, ""],
    *,
    donor: Int32[Array, ""],
    num_donated: Int32[Array, ""],
) -> tuple[Ledger, ResumePlan, Int32[Array, ""]]:
    """`slot` with the pages of a place that stays as it is: `(ledger, plan, status)`; nothing changes where not `legal`.

    The first `num_donated` base pages are the blocks of slot `donor`, by reference: they hold the same rows. The others get
    blocks of their own.
    """
    groups, batch, hot_pages = ledger.hot.shape
    num_base, _, max_pages = ledger.tables.base.shape
    num_pages = parking.num_pages[place]
    kept, need = _demand(ledger, num_pages)
    own = num_base * (num_pages - num_donated)
    num_resident = most_resident(max_pages, hot_pages, ledger.tail_pages)
    pool, blocks, got = allocate(
        ledger.tables.pool,
        jnp.where(legal, need - num_base * num_donated, 0),
        max_count=num_base * max_pages + groups * max(num_resident, min(ledger.tail_pages, max_pages) + hot_pages),
    )
    ok = legal & (got == Status.OK)

    page = jnp.arange(max_pages, dtype=jnp.int32)
    nth = jnp.arange(num_resident, dtype=jnp.int32)
    donated = ok & (page < num_donated)
    fresh = _deal(blocks, 0, num_base, ok & (page < num_pages - num_donated))
    fresh = jnp.where(donated[None], NULL_BLOCK, fresh[:, jnp.maximum(page - num_donated, 0)])
    base = jnp.where(donated[None], ledger.tables.base[:, donor], fresh)
    pool, _ = touch(pool, jnp.where(donated[None], base, NULL_BLOCK).reshape(-1))
    resident = _deal(blocks, own, groups, ok & (nth < kept))
    region = jnp.full(hot_pages, ok & (kept < num_pages))
    hot = _deal(blocks, own + groups * kept, groups, region)
    newest = jnp.where(nth < kept, num_pages - kept + nth, max_pages)

    row = jnp.where(ok, slot, batch)
    tables = ledger.tables.replace(
        pool=pool,
        base=ledger.tables.base.at[:, row].set(base, mode="drop"),
        resident=ledger.tables.resident.at[:, row, newest].set(resident, mode="drop"),
        num_pages=ledger.tables.num_pages.at[row].set(num_pages, mode="drop"),
    )
    back = ledger.replace(
        tables=tables,
        host_table=ledger.host_table.at[row].set(parking.host_table[place], mode="drop"),
        hot=ledger.hot.at[:, row].set(hot, mode="drop"),
        valid=ledger.valid.at[row].set(parking.valid[place], mode="drop"),
        pages_lost=ledger.pages_lost.at[row].set(parking.pages_lost[place], mode="drop"),
    )
    host = jnp.where(nth < kept, parking.host_table[place][jnp.minimum(newest, max_pages - 1)], NULL_BLOCK)
    plan = ResumePlan(
        parked=jnp.where(ok & ~donated, parking.base[place], NULL_BLOCK),
        base=fresh,
        host=jnp.where(ok, host, NULL_BLOCK),
        resident=resident,
    )
    back = coordinator.forget_reused(back, ledger.tables.pool)
    return keep(ok, back, ledger), plan, got


def drop(ledger: Ledger, parking: ParkingLedger, place: Int32[Array, ""]) -> tuple[Ledger, ParkingLedger, Int32[Array, ""]]:
    """Ends a parked request or a cached prefix: its references on host and parking blocks go, last page first.

    `REFUSED` for a place that holds neither.
    """
    known, inside = look_up(parking, place)
    host, _ = free(ledger.host, jnp.where(known, parking.host_table[inside, ::-1], NULL_BLOCK))
    status = jnp.where(known, Status.OK, Status.REFUSED).astype(jnp.int32)
    return ledger.replace(host=host), _vacate(parking, inside, known), status


def record(
    ledger: Ledger,
    parking: ParkingLedger,
    num_pages: Int32[Array, ""],
    num_sealed: Int32[Array, ""],
    num_host: Int32[Array, ""],
    pages_lost: Int32[Array, ""],
) -> tuple[Ledger, ParkingLedger, Int32[Array, " P"], Int32[Array, " P"], Int32[Array, ""], Int32[Array, ""]]:
    """Takes the lowest free place for a request that comes from elsewhere: `num_host` host blocks, the first `num_pages` of
    its pages hold rows, the first `num_sealed` are full. All or nothing.

    Full pages count as valid at once: load them before the request is resumed. One that is not full is copied again when
    it is parked, for whether later rows are written through is this side's affair.

    Returns `(ledger, parking, parked, host, place, status)`, the blocks to load by page: `OUT_OF_PARKING`,
    `OUT_OF_HOST_BLOCKS`; `REFUSED` for counts that do not fit each other or `P`. Then nothing changes and the place is -1.
    """
    max_pages = parking.base.shape[1]
    page = jnp.arange(max_pages, dtype=jnp.int32)
    legal = (num_sealed >= 0) & (num_sealed <= num_pages) & (num_pages <= num_host) & (num_host >= 1) & (num_host <= max_pages)
    place, is_there = lowest_free(parking)
    pool, blocks, got = allocate(parking.pool, jnp.where(legal, num_pages, 0), max_count=max_pages)
    roomy = is_there & (got == Status.OK)
    host, host_blocks, host_got = allocate(ledger.host, jnp.where(legal & roomy, num_host, 0), max_count=max_pages)
    ok = legal & roomy & (host_got == Status.OK)
    taken = fill(
        parking.replace(pool=pool),
        place,
        ok,
        base=blocks,
        host_table=host_blocks,
        valid=page < num_sealed,
        num_pages=num_pages,
        pages_lost=pages_lost,
    )
    short = jnp.where(host_got == Status.OK, Status.OK, Status.OUT_OF_HOST_BLOCKS)
    status = jnp.where(legal, jnp.where(roomy, short, Status.OUT_OF_PARKING), Status.REFUSED).astype(jnp.int32)
    blocks, host_blocks = (jnp.where(ok, ids, NULL_BLOCK) for ids in (blocks, host_blocks))
    after = keep(ok, ledger.replace(host=host), ledger), keep(ok, taken, parking)
    return *after, blocks, host_blocks, jnp.where(ok, place, -1), status


def most_resident(max_pages: int, hot_pages: int, tail_pages: int) -> int:
    """Most C4 pages that `unpark` brings back: no more than take as many blocks as the tail and a hot region."""
    return min(max_pages, tail_pages + hot_pages)


def keep(ok: Bool[Array, ""], after, before):
    """`after` where `ok`, else `before`."""
    return jax.tree.map(lambda a, b: jnp.where(ok, a, b), after, before)


def look_up(parking: ParkingLedger, place: Int32[Array, ""]) -> tuple[Bool[Array, ""], Int32[Array, ""]]:
    """Whether the place is taken, and a place to index with."""
    real = (place >= 0) & (place < parking.taken.shape[0])
    inside = jnp.where(real, place, 0)
    return real & parking.taken[inside], inside


def lowest_free(parking: ParkingLedger) -> tuple[Int32[Array, ""], Bool[Array, ""]]:
    """The free place of the lowest number, and whether there is one."""
    return jnp.argmin(parking.taken).astype(jnp.int32), ~jnp.all(parking.taken)


def fill(parking: ParkingLedger, place: Int32[Array, ""], ok: Bool[Array, ""], **columns: Array | int | bool) -> ParkingLedger:
    """The row of `place` in each of `columns` set to its value, where `ok`."""
    row = jnp.where(ok, place, parking.taken.shape[0])
    return parking.replace(**{name: getattr(parking, name).at[row].set(x, mode="drop") for name, x in columns.items()})


def _demand(ledger: Ledger, num_pages: Int32[Array, ""]) -> tuple[Int32[Array, ""], Int32[Array, ""]]:
    """C4 pages that come back to the GPU, and the blocks of the whole return."""
    groups, _, hot_pages = ledger.hot.shape
    short = num_pages <= ledger.tail_pages + hot_pages
    kept = jnp.where(short, num_pages, ledger.tail_pages)
    return kept, ledger.tables.base.shape[0] * num_pages + groups * kept + jnp.where(short, 0, ledger.hot_cost)


def _deal(blocks: Int32[Array, " M"], first, groups: int, pages: Bool[Array, " n"]) -> Int32[Array, "{groups} n"]:
    """`blocks` from `first` on, page by page, one to each group; null where not `pages`, whose true ones come first."""
    at = first + jnp.arange(pages.shape[0], dtype=jnp.int32)[None, :] * groups + jnp.arange(groups, dtype=jnp.int32)[:, None]
    return jnp.where(pages[None], blocks[jnp.where(pages[None], at, 0)], NULL_BLOCK)


def _vacate(parking: ParkingLedger, place: Int32[Array, ""], ok: Bool[Array, ""]) -> ParkingLedger:
    """The place is free and its parking blocks are back, where `ok`."""
    pool, _ = free(parking.pool, jnp.where(ok, parking.base[place, ::-1], NULL_BLOCK))
    empty = dict(base=NULL_BLOCK, host_table=NULL_BLOCK, valid=False, num_pages=0, pages_lost=0, cached=False)
    return fill(parking.replace(pool=pool), place, ok, **empty)
