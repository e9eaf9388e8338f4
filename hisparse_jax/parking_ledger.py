"""Who holds which host block while a request is parked, and its way from a slot to a place and back.

A parked request keeps its C4 host blocks, which move with their references from the slot's table to the place's, and one
parking block for each page of base groups. Everything on the GPU goes. It comes back to any free slot with the base pages, the
newest C4 pages, and a hot region for the rest. Source: hisparse.md 10.3.
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

    pool: BlockPool        parking blocks, A of them; one holds one page of every base group.
    base: i32[K, P]        page to parking block; null past the pages that hold rows.
    host_table: i32[K, P]  page to host block, as in the slot that was left: whole prompts have theirs from admission.
    valid: bool[K, P]      the host copy is complete, and stays so as the page fills.
    num_pages: i32[K]      pages that hold rows.
    pages_lost: i32[K]     pages given up before.
    """

    pool: BlockPool
    base: Int32[Array, "K P"]
    host_table: Int32[Array, "K P"]
    valid: Bool[Array, "K P"]
    num_pages: Int32[Array, " K"]
    pages_lost: Int32[Array, " K"]

    @property
    def taken(self) -> Bool[Array, " K"]:
        """Which places hold a request."""
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
    real = (slot >= 0) & (slot < batch)
    inside = jnp.where(real, slot, 0)
    page = jnp.arange(max_pages, dtype=jnp.int32)
    written, full = page < num_pages, page < num_sealed
    complete, on_gpu = copied(ledger)[inside], standing(ledger)[inside]
    in_flight = ledger.transfer[inside] != 0
    counted = (num_sealed >= 0) & (num_sealed <= num_pages) & (num_pages <= ledger.tables.num_pages[inside])
    sound = ~jnp.any(written & ~complete & ~on_gpu) & ~jnp.any(in_flight & ~full)
    legal = real & ledger.admitted[inside] & counted & sound

    free_place = ~parking.taken
    pool, blocks, got = allocate(parking.pool, jnp.where(legal, num_pages, 0), max_count=max_pages)
    roomy = jnp.any(free_place) & (got == Status.OK)
    ok = legal & roomy
    place = jnp.argmax(free_place).astype(jnp.int32)

    copies = ok & written & ~complete
    plan = ParkPlan(
        base=jnp.where(ok & written, ledger.tables.base[:, inside], NULL_BLOCK),
        parked=jnp.where(ok, blocks, NULL_BLOCK),
        source=jnp.where(copies, ledger.tables.resident[:, inside], NULL_BLOCK),
        host=jnp.where(copies, ledger.host_table[inside], NULL_BLOCK),
    )
    row = jnp.where(ok, place, parking.taken.shape[0])
    parked = parking.replace(
        pool=pool,
        base=parking.base.at[row].set(blocks, mode="drop"),
        host_table=parking.host_table.at[row].set(ledger.host_table[inside], mode="drop"),
        valid=parking.valid.at[row].set(full | (ledger.valid[inside] & written), mode="drop"),
        num_pages=parking.num_pages.at[row].set(num_pages, mode="drop"),
        pages_lost=parking.pages_lost.at[row].set(ledger.pages_lost[inside], mode="drop"),
    )
    host, _ = touch(ledger.host, jnp.where(ok, ledger.host_table[inside], NULL_BLOCK))
    left, _ = coordinator.finish(ledger.replace(host=host), jnp.where(ok, slot, batch))
    status = jnp.where(legal, jnp.where(roomy, Status.OK, Status.OUT_OF_PARKING), Status.REFUSED).astype(jnp.int32)
    return left, keep(ok, parked, parking), plan, jnp.where(ok, place, -1), status


def blocks_to_resume(ledger: Ledger, parking: ParkingLedger, place: Int32[Array, ""]) -> Int32[Array, ""]:
    """GPU blocks that `unpark` takes; 0 for a place that is free or does not exist."""
    known, inside = _look_up(parking, place)
    return jnp.where(known, _demand(ledger, parking.num_pages[inside])[1], 0)


def unpark(
    ledger: Ledger, parking: ParkingLedger, place: Int32[Array, ""], slot: Int32[Array, ""]
) -> tuple[Ledger, ParkingLedger, ResumePlan, Int32[Array, ""]]:
    """Moves a parked request to a free `slot`: base pages in every base group, and C4 pages as far as they stay.

    Those are the tail, and the rest is on the host behind a hot region; a request whose other pages take no more blocks
    than the region gets them all and no region, so it never needs more than it could have held before. The plan's copies come
    before the request runs.

    Returns `(ledger, parking, plan, status)`: `OUT_OF_BLOCKS`; `REFUSED` for a place that is free or does not exist and for a
    slot that is taken or outside 0..B-1. Then nothing changes.
    """
    groups, batch, hot_pages = ledger.hot.shape
    num_base, _, max_pages = ledger.tables.base.shape
    known, inside = _look_up(parking, place)
    real = (slot >= 0) & (slot < batch)
    legal = known & real & ~ledger.admitted[jnp.where(real, slot, 0)]
    num_pages = parking.num_pages[inside]
    kept, need = _demand(ledger, num_pages)
    num_resident = most_resident(max_pages, hot_pages, ledger.tail_pages)
    pool, blocks, got = allocate(
        ledger.tables.pool,
        jnp.where(legal, need, 0),
        max_count=num_base * max_pages + groups * max(num_resident, min(ledger.tail_pages, max_pages) + hot_pages),
    )
    ok = legal & (got == Status.OK)

    page = jnp.arange(max_pages, dtype=jnp.int32)
    nth = jnp.arange(num_resident, dtype=jnp.int32)
    base = _deal(blocks, 0, num_base, ok & (page < num_pages))
    resident = _deal(blocks, num_base * num_pages, groups, ok & (nth < kept))
    region = jnp.full(hot_pages, ok & (kept < num_pages))
    hot = _deal(blocks, num_base * num_pages + groups * kept, groups, region)
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
        host_table=ledger.host_table.at[row].set(parking.host_table[inside], mode="drop"),
        hot=ledger.hot.at[:, row].set(hot, mode="drop"),
        valid=ledger.valid.at[row].set(parking.valid[inside], mode="drop"),
        pages_lost=ledger.pages_lost.at[row].set(parking.pages_lost[inside], mode="drop"),
    )
    host = jnp.where(nth < kept, parking.host_table[inside][jnp.minimum(newest, max_pages - 1)], NULL_BLOCK)
    plan = ResumePlan(
        parked=jnp.where(ok, parking.base[inside], NULL_BLOCK),
        base=base,
        host=jnp.where(ok, host, NULL_BLOCK),
        resident=resident,
    )
    back = coordinator.forget_reused(back, ledger.tables.pool)
    status = jnp.where(legal, got, Status.REFUSED).astype(jnp.int32)
    return keep(ok, back, ledger), _vacate(parking, inside, ok), plan, status


def drop(ledger: Ledger, parking: ParkingLedger, place: Int32[Array, ""]) -> tuple[Ledger, ParkingLedger, Int32[Array, ""]]:
    """Ends a parked request: its host and parking blocks go back, last page first. `REFUSED` for a place that holds none."""
    known, inside = _look_up(parking, place)
    host, _ = free(ledger.host, jnp.where(known, parking.host_table[inside, ::-1], NULL_BLOCK))
    status = jnp.where(known, Status.OK, Status.REFUSED).astype(jnp.int32)
    return ledger.replace(host=host), _vacate(parking, inside, known), status


def most_resident(max_pages: int, hot_pages: int, tail_pages: int = 2) -> int:
    """Most C4 pages that `unpark` brings back: no more than take as many blocks as the tail and a hot region."""
    return min(max_pages, tail_pages + hot_pages)


def keep(ok: Bool[Array, ""], after, before):
    """`after` where `ok`, else `before`."""
    return jax.tree.map(lambda a, b: jnp.where(ok, a, b), after, before)


def _look_up(parking: ParkingLedger, place: Int32[Array, ""]) -> tuple[Bool[Array, ""], Int32[Array, ""]]:
    """Whether the place holds a request, and a place to index with."""
    real = (place >= 0) & (place < parking.taken.shape[0])
    inside = jnp.where(real, place, 0)
    return real & parking.taken[inside], inside


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
    row = jnp.where(ok, place, parking.taken.shape[0])
    return parking.replace(
        pool=pool,
        base=parking.base.at[row].set(NULL_BLOCK, mode="drop"),
        host_table=parking.host_table.at[row].set(NULL_BLOCK, mode="drop"),
        valid=parking.valid.at[row].set(False, mode="drop"),
        num_pages=parking.num_pages.at[row].set(0, mode="drop"),
        pages_lost=parking.pages_lost.at[row].set(0, mode="drop"),
    )
