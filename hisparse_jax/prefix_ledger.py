"""Who holds which block of a cached prefix: one place of the parking, and any number of requests that share its pages.

A cached prefix is a parked request that stays: all that V4 needs to go on at its token, for whoever begins with the same
tokens. `publish` makes one of a request that runs on, `adopt` gives one to a free slot, `parking_ledger.drop` ends it. Full
pages never change again, so places and slots share their blocks, a reference each. The page that the prefix ends in is the
place's own, for its request writes on in it; and whoever adopts it gets a host page of its own for it:
**copy on write**. That page is restored to the GPU from the place's copy, ahead of any write, and its own host page is filled
as that of any prompt page: by a backup once it is full, or at the end of the prompt, before decode mirrors rows into it. So
no host page is copied to a host page.
"""

import jax.numpy as jnp
from jaxtyping import Array, Int32

from hisparse_jax import coordinator
from hisparse_jax.block_pool import allocate, touch
from hisparse_jax.coordinator import Ledger
from hisparse_jax.parking_ledger import (
    ParkingLedger,
    ParkPlan,
    ResumePlan,
    blocks_to_resume,
    fill,
    keep,
    look_up,
    lowest_free,
    move_in,
)
from hisparse_jax.spill import standing
from hisparse_jax.status import NULL_BLOCK, Status


def publish(
    ledger: Ledger,
    parking: ParkingLedger,
    slot: Int32[Array, ""],
    num_pages: Int32[Array, ""],
    num_sealed: Int32[Array, ""],
    like: Int32[Array, ""],
    num_shared: Int32[Array, ""],
) -> tuple[Ledger, ParkingLedger, ParkPlan, Int32[Array, ""], Int32[Array, ""]]:
    """Caches what the request in `slot` holds, as a prefix in the lowest free place; the request does not notice.

    `num_pages` of its pages hold rows and the first `num_sealed` are full: all, or all but the last. The caller vouches that the
    first `num_shared` pages of the prefix in place `like` hold the same rows: their host and parking blocks get a reference
    and are not copied. The plan's copies (base pages, and the last page where it is not full) must be enqueued before any later
    writer of the GPU blocks.

    Returns `(ledger, parking, plan, place, status)`: `OUT_OF_PARKING` where no place or too few blocks are free;
    `OUT_OF_HOST_BLOCKS` where none is for the last page; `REFUSED` for a slot that is not taken, a full page without a complete
    host copy or with a transfer pending, no full page at all, other counts that do not fit, and a `like` with fewer full
    pages. Then nothing changes and the place is -1.
    """
    max_pages = ledger.host_table.shape[1]
    taken, inside = coordinator.look_up(ledger, slot)
    known, older = look_up(parking, like)
    page = jnp.arange(max_pages, dtype=jnp.int32)
    full, shared = page < num_sealed, page < num_shared
    tail = ~full & (page < num_pages)
    counted = (num_sealed >= 1) & (num_sealed <= num_pages) & (num_pages - num_sealed <= 1)
    counted = counted & (num_pages <= ledger.tables.num_pages[inside]) & (num_shared >= 0) & (num_shared <= num_sealed)
    durable = jnp.all(~full | (ledger.valid[inside] & (ledger.transfer[inside] == 0)))
    on_gpu = jnp.all(~tail | standing(ledger)[inside])
    shareable = (num_shared == 0) | (known & parking.cached[older] & jnp.all(~shared | parking.valid[older]))
    legal = taken & counted & durable & on_gpu & shareable

    pool, blocks, got = allocate(parking.pool, jnp.where(legal, num_pages - num_shared, 0), max_count=max_pages)
    host, last, host_got = allocate(ledger.host, jnp.where(legal, num_pages - num_sealed, 0), max_count=1)
    place, is_there = lowest_free(parking)
    roomy = is_there & (got == Status.OK)
    ok = legal & roomy & (host_got == Status.OK)

    copied = ok & ~shared & (page < num_pages)
    parked = jnp.where(copied, blocks[jnp.maximum(page - num_shared, 0)], NULL_BLOCK)
    base = jnp.where(shared, parking.base[older], parked)
    host_row = jnp.where(shared, parking.host_table[older], jnp.where(full, ledger.host_table[inside], NULL_BLOCK))
    host, _ = touch(host, jnp.where(ok, host_row, NULL_BLOCK))
    host_row = jnp.where(tail, last[0], host_row)
    pool, _ = touch(pool, jnp.where(ok & shared, base, NULL_BLOCK))
    plan = ParkPlan(
        base=jnp.where(copied[None], ledger.tables.base[:, inside], NULL_BLOCK),
        parked=parked,
        source=jnp.where((ok & tail)[None], ledger.tables.resident[:, inside], NULL_BLOCK),
        host=jnp.where(ok & tail, host_row, NULL_BLOCK),
    )
    columns = dict(base=base, host_table=host_row, valid=full, num_pages=num_pages, cached=True)
    cached = fill(parking.replace(pool=pool), place, ok, **columns)
    short = jnp.where(roomy, Status.OUT_OF_HOST_BLOCKS, Status.OUT_OF_PARKING)
    status = jnp.where(legal, jnp.where(ok, Status.OK, short), Status.REFUSED).astype(jnp.int32)
    return keep(ok, ledger.replace(host=host), ledger), keep(ok, cached, parking), plan, jnp.where(ok, place, -1), status


def blocks_to_adopt(ledger: Ledger, parking: ParkingLedger, place: Int32[Array, ""]) -> Int32[Array, ""]:
    """GPU blocks that `adopt` takes; 0 for a place that is free or does not exist."""
    known, inside = look_up(parking, place)
    donated = ledger.tables.base.shape[0] * _donor(ledger, parking, inside)[1]
    return blocks_to_resume(ledger, parking, place) - jnp.where(known, donated, 0)


def adopt(
    ledger: Ledger, parking: ParkingLedger, place: Int32[Array, ""], slot: Int32[Array, ""], num_pages: Int32[Array, ""]
) -> tuple[Ledger, ResumePlan, Int32[Array, ""]]:
    """Admits a request of `num_pages` prompt pages to a free `slot`, where it stands at the end of the prefix in `place`.

    Full pages of the prefix are the place's host blocks, complete; the others get host blocks of their own, as in `admit`. On
    the GPU the slot gets what `unpark` gives: base pages, the newest C4 pages, a hot region for the rest. Base pages are shared
    with the request in a slot that has the most host blocks of this prefix, for those are the same pages; C4 pages are not,
    since a transfer's lease and the search for room know one owner of a C4 block. No free block is pinned before the request's
    own allocation. The plan's copies come before the request runs.

    Returns `(ledger, plan, status)`: `OUT_OF_HOST_BLOCKS`, `OUT_OF_BLOCKS`; `REFUSED` for a place that holds no prefix, a slot
    that is taken or outside 0..B-1, and a count below the prefix's or above P. Then nothing changes.
    """
    batch, max_pages = ledger.host_table.shape
    known, inside = look_up(parking, place)
    legal = known & parking.cached[inside] & coordinator.is_vacant(ledger, slot)
    legal = legal & (num_pages >= parking.num_pages[inside]) & (num_pages <= max_pages)
    full = parking.valid[inside]
    num_full = jnp.sum(full, dtype=jnp.int32)
    host, blocks, got = allocate(ledger.host, jnp.where(legal, num_pages - num_full, 0), max_count=max_pages)
    able = legal & (got == Status.OK)
    donor, num_donated = _donor(ledger, parking, inside)
    after, plan, gpu_got = move_in(ledger, parking, inside, slot, able, donor=donor, num_donated=num_donated)
    ok = able & (gpu_got == Status.OK)

    page = jnp.arange(max_pages, dtype=jnp.int32)
    own = jnp.where(page < num_pages, blocks[jnp.maximum(page - num_full, 0)], NULL_BLOCK)
    shared = jnp.where(full, parking.host_table[inside], NULL_BLOCK)
    host, _ = touch(host, jnp.where(ok, shared, NULL_BLOCK))
    row = jnp.where(ok, slot, batch)
    after = after.replace(host=host, host_table=after.host_table.at[row].set(jnp.where(full, shared, own), mode="drop"))
    short = jnp.where(able, gpu_got, Status.OUT_OF_HOST_BLOCKS)
    return keep(ok, after, ledger), plan, jnp.where(legal, short, Status.REFUSED).astype(jnp.int32)


def _donor(ledger: Ledger, parking: ParkingLedger, place: Int32[Array, ""]) -> tuple[Int32[Array, ""], Int32[Array, ""]]:
    """The slot that holds most of the first full pages of a prefix, and how many: the same host blocks, and grown."""
    same = (ledger.host_table == parking.host_table[place][None]) & parking.valid[place][None]
    same = same & jnp.all(ledger.tables.base != NULL_BLOCK, axis=0)
    leading = jnp.sum(jnp.cumprod(same, axis=1, dtype=jnp.int32), axis=1, dtype=jnp.int32)
    donor = jnp.argmax(leading).astype(jnp.int32)
    return donor, leading[donor]
