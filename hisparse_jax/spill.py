"""Copies of pages to the host, planned with leases and committed in two phases, and the pages that leave with them.

A transfer is *enqueued* when its copy stands in the stream of the step, *completed* when the bytes are on the host. A page
promised to the pool (`release_after`) leaves the GPU as soon as its copy allows; a request without a hot region gets it in the
same step in which its promised pages leave, or keeps them.
"""

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Bool, Int32

from hisparse_jax.block_pool import free, touch
from hisparse_jax.coordinator import Ledger, take_regions
from hisparse_jax.status import MISS, NULL_BLOCK


class SpillPlan(struct.PyTreeNode):
    """Up to `M` page copies from the GPU to the host, by slot and page ascending; the first `count` are real.

    request: i32[M]    slot; -1 padding.
    page: i32[M]       page of that request; -1 padding.
    source: i32[G, M]  GPU block of the page in each resident group; null padding.
    host: i32[M]       host block to write; null padding.
    transfer: i32[M]   id; 0 padding.
    count: i32[]
    """

    request: Int32[Array, " M"]
    page: Int32[Array, " M"]
    source: Int32[Array, "G M"]
    host: Int32[Array, " M"]
    transfer: Int32[Array, " M"]
    count: Int32[Array, ""]


def plan_spill(ledger: Ledger, pages: Bool[Array, "B P"], *, release_after: bool, max_pages: int) -> tuple[Ledger, SpillPlan]:
    """Plans a copy of each page in `pages`, lower slots and pages first; refused ones are simply not in the plan.

    Refused: no host block, a resident group without the page, an un-pinned page, a transfer pending (one from before a
    preemption too) or a release promised, a host block with other holders (pages of a cached prefix are complete and read by
    them), the budget of `max_pages` spent. Without `release_after` also a page that is valid; with it, the tail. With
    `release_after` the page leaves the GPU at the commit; where the request has no hot region yet, a switch starts (or widens)
    and the pages leave together when the last is copied, if the pool can then give the region.

    A completed copy makes the page valid, so plan a page only when its rows are final or later ones are written through.
    """
    copies = pages & pinned(ledger) & (ledger.host_table != NULL_BLOCK) & (ledger.transfer == 0) & ~ledger.release_after
    copies = copies & (ledger.host_lease[ledger.host_table] == 0) & (ledger.host.references[ledger.host_table] == 1)
    copies = copies & (behind_tail(ledger) if release_after else ~ledger.valid)
    ledger, plan, planned = _lease(ledger, copies, max_pages)
    return (promise(ledger, planned) if release_after else ledger), plan


def commit_enqueued(ledger: Ledger, plan: SpillPlan, *, leases_until_completed: bool = False) -> Ledger:
    """The plan's copies stand in the stream of the step: their GPU leases end, promised pages leave, switches commit.

    Safe only where the copy and every later writer of those blocks run in one stream order (base rule). Copies on a queue of
    their own need `leases_until_completed=True`, the recommended rule: then nothing changes until `commit_completed`.
    A plan that was committed already changes nothing; the plan of a finished request only ends its leases.
    """
    if leases_until_completed:
        return ledger
    return settle(_end_gpu_leases(ledger, plan))


def commit_completed(ledger: Ledger, plan: SpillPlan) -> Ledger:
    """The plan's bytes are on the host: all its leases end and its pages become valid; promised pages still there leave.

    The plan of a finished request only ends its leases; a later request in its slot is not touched, for ids are unique. A
    plan that was committed already changes nothing.
    """
    ledger = _end_gpu_leases(ledger, plan)
    batch = ledger.valid.shape[0]
    open_ = (plan.transfer != 0) & (ledger.host_lease[plan.host] == plan.transfer)
    host, _ = free(ledger.host, jnp.where(open_, plan.host, NULL_BLOCK))
    lease = jnp.where(open_, plan.host, ledger.host_lease.shape[0])
    request, page = jnp.maximum(plan.request, 0), jnp.maximum(plan.page, 0)
    current = open_ & (ledger.transfer[request, page] == plan.transfer)
    row = jnp.where(current, request, batch)
    ledger = ledger.replace(
        host=host,
        host_lease=ledger.host_lease.at[lease].set(0, mode="drop"),
        valid=ledger.valid.at[row, page].set(True, mode="drop"),
        transfer=ledger.transfer.at[row, page].set(0, mode="drop"),
    )
    return settle(ledger)


def standing(ledger: Ledger) -> Bool[Array, "B P"]:
    """Pages that stand on the GPU: a block in every resident group."""
    return jnp.all(ledger.tables.resident != NULL_BLOCK, axis=0)


def pinned(ledger: Ledger) -> Bool[Array, "B P"]:
    """Pages that stand on the GPU and hold a reference on each of their blocks."""
    return standing(ledger) & ~ledger.unpinned


def behind_tail(ledger: Ledger) -> Bool[Array, "B P"]:
    """Pages before the last `tail_pages` of their request."""
    page = jnp.arange(ledger.valid.shape[1], dtype=jnp.int32)[None, :]
    return page < (ledger.tables.num_pages - ledger.tail_pages)[:, None]


def candidates(ledger: Ledger) -> Bool[Array, "B P"]:
    """Pages that may be given up: they hold their blocks, stand before the tail, have a host block, and are not promised."""
    return pinned(ledger) & behind_tail(ledger) & ~ledger.release_after & (ledger.host_table != NULL_BLOCK)


def copied(ledger: Ledger) -> Bool[Array, "B P"]:
    """Pages that may leave the GPU: the host copy is complete, or enqueued with its GPU leases ended."""
    reading = ledger.gpu_lease[ledger.tables.resident[0]] == ledger.transfer
    return jnp.where(ledger.transfer == 0, ledger.valid, ~reading)


def give_up(ledger: Ledger, chosen: Bool[Array, "B P"], *, max_pages: int) -> tuple[Ledger, SpillPlan]:
    """Promises the chosen pages, which stand before the tail and have a host block; those already copied leave now.

    The others leave at the commit of their transfer: one pending already, else one of the plan. A page for which the budget
    of `max_pages` copies is spent stays.
    """
    copies = chosen & ~ledger.valid & (ledger.transfer == 0)
    ledger, plan, planned = _lease(ledger, copies, max_pages)
    return settle(promise(ledger, chosen & (~copies | planned))), plan


def promise(ledger: Ledger, pages: Bool[Array, "B P"]) -> Ledger:
    """Marks pages to leave; for a request without a hot region a switch waits for those not yet copied."""
    waiting = jnp.sum(pages & ~copied(ledger), axis=1, dtype=jnp.int32)
    return ledger.replace(
        release_after=ledger.release_after | pages,
        transition_target=ledger.transition_target + jnp.where(ledger.has_hot, 0, waiting),
    )


def settle(ledger: Ledger) -> Ledger:
    """Lets every promised page go that may: one by one where the hot region is owned, else all of a request with its switch.

    A switch commits when all promised pages are copied: they leave and the hot region is taken in one step. Slot by slot,
    where free blocks and those that come free do not make up a region, the switch is given up: pages stay, nothing is lost.
    Nothing promised costs next to nothing.
    """
    return jax.lax.cond(jnp.any(ledger.release_after), _settle, lambda ledger: ledger, ledger)


def _settle(ledger: Ledger) -> Ledger:
    pool, resident = ledger.tables.pool, ledger.tables.resident
    leaving = ledger.release_after & copied(ledger)
    stuck = jnp.any(ledger.release_after & ~leaving, axis=1)
    switching = ~ledger.has_hot & jnp.any(leaving, axis=1) & ~stuck
    last_holder = (pool.references[resident] == 1) & leaving[None]
    gains = jnp.sum(last_holder, axis=(0, 2), dtype=jnp.int32)

    def switch(num_free, request):
        wants, gain = request
        commits = wants & (num_free + gain >= ledger.hot_cost)
        return num_free + jnp.where(commits, gain - ledger.hot_cost, 0), commits

    num_free = pool.num_free + jnp.sum(jnp.where(ledger.has_hot, gains, 0), dtype=jnp.int32)
    _, commits = jax.lax.scan(switch, num_free, (switching, gains))

    gone = leaving & (ledger.has_hot | commits)[:, None]
    by_page = jnp.where(gone[None], resident, NULL_BLOCK).transpose(1, 2, 0)
    pool, _ = free(pool, by_page.reshape(-1))
    closed = switching[:, None]
    ledger = ledger.replace(
        tables=ledger.tables.replace(pool=pool, resident=jnp.where(gone[None], NULL_BLOCK, resident)),
        release_after=ledger.release_after & ~gone & ~closed,
        transition_target=jnp.where(switching, 0, ledger.transition_target),
        pages_lost=ledger.pages_lost + jnp.sum(gone, axis=1, dtype=jnp.int32),
    )
    return take_regions(ledger, commits)


def _lease(ledger: Ledger, copies: Bool[Array, "B P"], max_pages: int) -> tuple[Ledger, SpillPlan, Bool[Array, "B P"]]:
    """Plans the first `max_pages` of `copies`, with a lease on each block that takes part; also says which pages those are."""
    batch, table_pages = copies.shape
    if not max_pages:
        none = jnp.zeros(0, jnp.int32)
        source = jnp.zeros((ledger.hot.shape[0], 0), jnp.int32)
        return ledger, SpillPlan(none, none, source, none, none, jnp.int32(0)), jnp.zeros_like(copies)
    pool, resident = ledger.tables.pool, ledger.tables.resident
    rank = jnp.cumsum(copies.reshape(-1), dtype=jnp.int32) - 1
    planned = copies.reshape(-1) & (rank < max_pages)
    cells = jnp.arange(batch * table_pages, dtype=jnp.int32)
    cell = jnp.full(max_pages, MISS, jnp.int32).at[jnp.where(planned, rank, max_pages)].set(cells, mode="drop")
    real = cell != MISS
    inside = jnp.maximum(cell, 0)
    request, page = inside // table_pages, inside % table_pages
    plan = SpillPlan(
        request=jnp.where(real, request, MISS),
        page=jnp.where(real, page, MISS),
        source=jnp.where(real[None], resident[:, request, page], NULL_BLOCK),
        host=jnp.where(real, ledger.host_table[request, page], NULL_BLOCK),
        transfer=jnp.where(real, ledger.next_transfer + jnp.arange(max_pages, dtype=jnp.int32), 0),
        count=jnp.sum(planned, dtype=jnp.int32),
    )
    pool, _ = touch(pool, plan.source.reshape(-1))
    host, _ = touch(ledger.host, plan.host)
    read = jnp.where(real[None], plan.source, ledger.gpu_lease.shape[0])
    written = jnp.where(real, plan.host, ledger.host_lease.shape[0])
    row = jnp.where(real, request, batch)
    ledger = ledger.replace(
        tables=ledger.tables.replace(pool=pool),
        host=host,
        transfer=ledger.transfer.at[row, page].set(plan.transfer, mode="drop"),
        next_transfer=ledger.next_transfer + plan.count,
        gpu_lease=ledger.gpu_lease.at[read].set(jnp.broadcast_to(plan.transfer[None], read.shape), mode="drop"),
        host_lease=ledger.host_lease.at[written].set(plan.transfer, mode="drop"),
    )
    return ledger, plan, planned.reshape(batch, table_pages)


def _end_gpu_leases(ledger: Ledger, plan: SpillPlan) -> Ledger:
    """Drops the references that the plan's transfers still hold on GPU blocks."""
    open_ = (plan.transfer != 0)[None] & (ledger.gpu_lease[plan.source] == plan.transfer[None])
    pool, _ = free(ledger.tables.pool, jnp.where(open_, plan.source, NULL_BLOCK).T.reshape(-1))
    ended = jnp.where(open_, plan.source, ledger.gpu_lease.shape[0])
    return ledger.replace(tables=ledger.tables.replace(pool=pool), gpu_lease=ledger.gpu_lease.at[ended].set(0, mode="drop"))
