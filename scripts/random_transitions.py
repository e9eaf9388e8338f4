"""Random transitions of pools and coordinator on tiny tables, with every rule of theirs checked after each; no model.

One compiled loop draws a transition and its arguments, wrong ones among them, applies it, and recounts: millions take minutes.
`soak.py --transitions N` runs it.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int32

from hisparse_jax import coordinator, parking_ledger, prefix_ledger, reclaim, spill, unpin
from hisparse_jax.block_pool import BlockPool
from hisparse_jax.coordinator import Ledger
from hisparse_jax.parking_ledger import ParkingLedger
from hisparse_jax.spill import SpillPlan, behind_tail, standing
from hisparse_jax.status import NULL_BLOCK

BATCH, PAGES, NEW, BUDGET, PLANS = 3, 8, 2, 4, 4
PLACES, PARKED = 4, 14
SIZES = dict(num_blocks=29, num_host_blocks=15, num_base=1, num_resident=2, hot_pages=2, batch=BATCH, max_pages=PAGES)

WEIGHTS = dict(
    admit=3, grow=8, seal=1, back_up=4, spill=4, reclaim=4, release_history=1, plan_copies=2, enqueue=4, complete=5, finish=1,
    unpin=3, take_back=1, park=1, unpark=2, publish=3, adopt=3, drop=1,
)  # fmt: skip
"""How often each is drawn; requests live long enough to grow, and slots are rarely empty."""

OPERATIONS = tuple(WEIGHTS)

RULES = (
    "GPU blocks are held as often as counted",
    "host blocks are held as often as counted",
    "the GPU queue holds the free blocks, once each",
    "the host queue holds the free blocks, once each",
    "a page is on the GPU in all groups or in none",
    "a page on the GPU has a host block",
    "a hot region is owned whole or not at all",
    "no page is lost before its owner has a hot region and its copy is under way",
    "the last two pages are never lost",
    "a pending transfer holds its host block's lease",
    "parking blocks are held as often as counted, and all others are queued",
    "a block stands for one page number, and a C4 block in one place",
    "full pages of a cached prefix are complete on the host",
    "an un-pinned page stands in free blocks that nobody else names",
    "an un-pinned page is complete on the host and its owner has a hot region",
)

QUICK = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}


class Walk(NamedTuple):
    """`PLANS` spill plans are kept open at most; a plan without transfers is none. `broken` counts by rule."""

    ledger: Ledger
    parking: ParkingLedger
    plans: SpillPlan
    key: Array
    taken: Int32[Array, " operations"]
    lost: Int32[Array, ""]
    unpinned: Int32[Array, ""]
    regions: Int32[Array, ""]
    shared: Int32[Array, ""]
    broken: Int32[Array, " rules"]


def walk(count: int, seed: int, *, stride: int = 100_000) -> dict:
    """`count` transitions from empty tables, then all requests end: what was done and which rules broke."""
    state = _start(seed)
    for done in range(0, count, stride):
        state = _go(state, jnp.int32(min(stride, count - done)))
    state = _end(state)
    breaches = [f"{int(n)} transitions broke: {rule}" for rule, n in zip(RULES, state.broken, strict=True) if n]
    ledger = state.ledger
    pools = (ledger.tables.pool, ledger.host, state.parking.pool)
    if [int(pool.num_free) for pool in pools] != [SIZES["num_blocks"] - 1, SIZES["num_host_blocks"] - 1, PARKED - 1]:
        breaches.append("with all requests gone and all transfers done, a pool is not full")
    taken = dict(zip(OPERATIONS, map(int, state.taken), strict=True))
    planned = {"pages_planned": int(ledger.next_transfer) - 1, "pages_lost": int(state.lost), "regions_taken": int(state.regions)}
    planned["pages_adopted"] = int(state.shared)
    planned["pages_unpinned"] = int(state.unpinned)
    return {"count": count, **taken, **planned, "breaches": breaches}


def _start(seed: int) -> Walk:
    ledger = coordinator.init_ledger(**SIZES)
    _, none = spill.plan_spill(ledger, jnp.zeros((BATCH, PAGES), bool), release_after=False, max_pages=BUDGET)
    plans = jax.tree.map(lambda x: jnp.stack([x] * PLANS), none)
    return Walk(
        ledger,
        parking_ledger.init_parking_ledger(PARKED, PLACES, PAGES),
        plans,
        jax.random.key(seed),
        taken=jnp.zeros(len(OPERATIONS), jnp.int32),
        lost=jnp.int32(0),
        unpinned=jnp.int32(0),
        regions=jnp.int32(0),
        shared=jnp.int32(0),
        broken=jnp.zeros(len(RULES), jnp.int32),
    )


@functools.partial(jax.jit, donate_argnums=0, compiler_options=QUICK)
def _go(state: Walk, count: Int32[Array, ""]) -> Walk:
    return jax.lax.fori_loop(0, count, lambda _, state: _step(state), state)


@functools.partial(jax.jit, compiler_options=QUICK)
def _end(state: Walk) -> Walk:
    ledger, parking = state.ledger, state.parking
    for i in range(PLANS):
        ledger = spill.commit_completed(ledger, jax.tree.map(lambda x, i=i: x[i], state.plans))
    for slot in range(BATCH):
        ledger, _ = coordinator.finish(ledger, jnp.int32(slot))
    for place in range(PLACES):
        ledger, parking, _ = parking_ledger.drop(ledger, parking, jnp.int32(place))
    return state._replace(ledger=ledger, parking=parking, broken=state.broken + _broken(ledger, parking))


def _step(state: Walk) -> Walk:
    key, pick, first, second, third = jax.random.split(state.key, 5)
    ledger, parking = state.ledger, state.parking
    open_ = state.plans.count > 0
    full = jnp.all(open_)
    odds = jnp.log(jnp.asarray(list(WEIGHTS.values()), jnp.float32))
    operation = jax.random.categorical(pick, odds).astype(jnp.int32)
    planning = (operation >= OPERATIONS.index("back_up")) & (operation <= OPERATIONS.index("plan_copies"))
    operation = jnp.where(planning & full, OPERATIONS.index("complete"), operation)
    chosen = jax.random.randint(first, (), 0, PLANS)
    which = jnp.where(operation < OPERATIONS.index("enqueue"), jnp.argmin(open_).astype(jnp.int32), chosen)
    plan = jax.tree.map(lambda x: x[which], state.plans)
    slot = jax.random.randint(first, (), -1, BATCH + 1)
    amounts = jax.random.randint(second, (BATCH,), -1, PAGES + 2)
    pages = jax.random.bernoulli(third, 0.4, (BATCH, PAGES))
    requests = jax.random.bernoulli(third, 0.5, (BATCH,))
    few = jnp.where(amounts > NEW + 1, amounts % (NEW + 1), amounts)
    place = jax.random.randint(second, (), -1, PLACES + 1)
    here, there = jnp.clip(slot, 0, BATCH - 1), jnp.clip(place, 0, PLACES - 1)
    grown, odd = ledger.tables.num_pages[here], amounts[1] % 2
    whole = jnp.sum(jnp.cumprod(ledger.valid[here], dtype=jnp.int32), dtype=jnp.int32)
    common = jnp.clip(amounts[2], 0, jnp.sum(parking.valid[there] & parking.cached[there], dtype=jnp.int32))

    def alone(ledger):
        return ledger, parking, plan

    def planned(result):
        return result[0], parking, result[1]

    def placed(result):
        return result[0], result[1], plan

    branches = {
        "admit": lambda: alone(coordinator.admit(ledger, slot, amounts[0])[0]),
        "grow": lambda: alone(coordinator.grow(ledger, few, max_new_pages=NEW)[0]),
        "seal": lambda: alone(coordinator.seal(ledger, few)),
        "back_up": lambda: planned(spill.plan_spill(ledger, pages, release_after=False, max_pages=BUDGET)),
        "spill": lambda: planned(spill.plan_spill(ledger, pages, release_after=True, max_pages=BUDGET)),
        "reclaim": lambda: planned(reclaim.reclaim(ledger, amounts[0] * 2, max_pages=BUDGET)),
        "release_history": lambda: planned(reclaim.release_history(ledger, requests, max_pages=BUDGET)),
        "plan_copies": lambda: planned(unpin.plan_copies(ledger, amounts[0], amounts[1] * 4, PAGES + 1, max_pages=BUDGET)),
        "enqueue": lambda: alone(spill.commit_enqueued(ledger, plan)),
        "complete": lambda: (spill.commit_completed(ledger, plan), parking, jax.tree.map(jnp.zeros_like, plan)),
        "finish": lambda: alone(coordinator.finish(ledger, slot)[0]),
        "park": lambda: placed(parking_ledger.park(ledger, parking, slot, grown, grown - odd)),
        "unpark": lambda: placed(parking_ledger.unpark(ledger, parking, place, slot)),
        "publish": lambda: placed(
            prefix_ledger.publish(ledger, parking, slot, jnp.minimum(whole + odd, grown), whole, place, common)
        ),
        "adopt": lambda: alone(prefix_ledger.adopt(ledger, parking, place, slot, amounts[0] + 2 * odd)[0]),
        "drop": lambda: placed(parking_ledger.drop(ledger, parking, place)),
        "unpin": lambda: alone(unpin.unpin_clean(ledger, amounts[0], amounts[1] * 4, jnp.maximum(amounts[2], 4))),
        "take_back": lambda: alone(unpin.take_back(ledger, pages)),
    }
    after, parking, plan = jax.lax.switch(operation, [branches[name] for name in OPERATIONS])
    adopted = jnp.sum(after.valid & ~ledger.valid, dtype=jnp.int32) * (operation == OPERATIONS.index("adopt"))
    return Walk(
        after,
        parking,
        jax.tree.map(lambda all_, one: all_.at[which].set(one), state.plans, plan),
        key,
        taken=state.taken.at[operation].add(1),
        lost=state.lost + jnp.sum(jnp.maximum(after.pages_lost - ledger.pages_lost, 0), dtype=jnp.int32),
        unpinned=state.unpinned + jnp.sum(after.unpinned & ~ledger.unpinned, dtype=jnp.int32),
        regions=state.regions + jnp.sum(after.has_hot & ~ledger.has_hot, dtype=jnp.int32),
        shared=state.shared + adopted,
        broken=state.broken + _broken(after, parking),
    )


def _broken(ledger: Ledger, parking: ParkingLedger) -> Int32[Array, " rules"]:
    """1 for each of `RULES` that does not hold."""
    tables = ledger.tables
    on_gpu, grown = standing(ledger), jnp.arange(PAGES)[None] < tables.num_pages[:, None]
    lost = grown & ~on_gpu
    pending = ledger.transfer > 0
    pinned = jnp.where(ledger.unpinned[None], NULL_BLOCK, tables.resident)
    gpu = [tables.base.reshape(-1), pinned.reshape(-1), ledger.hot.reshape(-1)]
    kept = jnp.where(ledger.unpinned[None], tables.resident, NULL_BLOCK).reshape(-1)
    named = jnp.zeros_like(tables.pool.references).at[kept].add(1).at[NULL_BLOCK].set(0)
    hot = ledger.hot != NULL_BLOCK
    hosts = jnp.concatenate([ledger.host_table, parking.host_table])
    alone = _single(tables.pool, jnp.concatenate(gpu[1:]))
    paged = _same_page(tables.pool, tables.base.reshape(-1, PAGES)) & _same_page(ledger.host, hosts)
    holds = (
        _counted(tables.pool, jnp.concatenate(gpu), ledger.gpu_lease),
        _counted(ledger.host, hosts.reshape(-1), ledger.host_lease),
        _queued(tables.pool),
        _queued(ledger.host),
        jnp.all(on_gpu == jnp.any(tables.resident != NULL_BLOCK, axis=0)),
        jnp.all(~on_gpu | (ledger.host_table != NULL_BLOCK)),
        jnp.all(jnp.all(hot, axis=(0, 2)) == jnp.any(hot, axis=(0, 2))),
        jnp.all(~lost | (ledger.has_hot[:, None] & (ledger.valid | pending))),
        ~jnp.any(lost & ~behind_tail(ledger)),
        jnp.all(~pending | (ledger.host_lease[ledger.host_table] == ledger.transfer)),
        _counted(parking.pool, parking.base.reshape(-1), 0 * parking.pool.references) & _queued(parking.pool),
        alone & paged & _same_page(parking.pool, parking.base),
        jnp.all(~parking.cached | (jnp.sum(parking.valid, axis=1) >= jnp.maximum(parking.num_pages - 1, 1))),
        jnp.all(~ledger.unpinned | on_gpu) & jnp.all(named <= (tables.pool.references == 0)),
        jnp.all(~ledger.unpinned | (ledger.valid & ledger.has_hot[:, None])),
    )
    return (~jnp.stack(holds)).astype(jnp.int32)


def _counted(pool: BlockPool, entries: Int32[Array, " E"], lease: Int32[Array, " N"]):
    """References are entries of tables and places, and leases; none of the null block."""
    return jnp.all(pool.references == _entered(pool, entries) + (lease > 0))


def _entered(pool: BlockPool, entries: Int32[Array, " E"]) -> Int32[Array, " N"]:
    return jnp.zeros_like(pool.references).at[entries].add(1).at[NULL_BLOCK].set(0)


def _single(pool: BlockPool, entries: Int32[Array, " E"]):
    """No block stands in two places."""
    return jnp.all(_entered(pool, entries) <= 1)


def _same_page(pool: BlockPool, tables: Int32[Array, "rows P"]):
    """A block that stands in several tables is the same page of each."""
    page = jnp.broadcast_to(jnp.arange(tables.shape[1], dtype=jnp.int32), tables.shape)
    first = jnp.full_like(pool.references, tables.shape[1]).at[tables].min(page)
    last = jnp.full_like(pool.references, -1).at[tables].max(page)
    return jnp.all((last <= first).at[NULL_BLOCK].set(True))


def _queued(pool: BlockPool):
    """Live items of the ring are the blocks without references."""
    size = pool.ring.shape[0]
    lanes = jnp.arange(size, dtype=jnp.int32)
    places = (pool.head + lanes) % size
    items = pool.ring[places]
    live = (lanes < pool.num_items) & (pool.ring_stamp[places] == pool.stamp[items])
    queued = jnp.zeros_like(pool.references).at[items].add(live.astype(jnp.int32))
    free = (pool.references == 0).astype(jnp.int32).at[NULL_BLOCK].set(0)
    return jnp.all(queued == free) & (jnp.sum(free) == pool.num_free)
