"""Room for the next stretch: requests grow, and history leaves the GPU where the pool is short of blocks.

Runs inside the jitted call, at the head of a stretch of steps or of a prefill chunk. The decision is the coordinator's; what it
plans to copy is copied here, in program order, so a plan is committed as soon as its copies stand in the program. One
plan has room for the pages of one request; where several must give up more, the search goes on after its commit.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int32

from hisparse_jax import coordinator, reclaim, spill, transfer, unpin
from hisparse_jax.block_tables import blocks_wanted
from hisparse_jax.coordinator import Ledger
from hisparse_jax.hot_map import forget_host_blocks
from hisparse_jax.layout import CacheLayout
from hisparse_jax.model.numerics import border
from hisparse_jax.spill import SpillPlan
from hisparse_jax.state import TieredState

PageIds = tuple[Int32[Array, " M"], ...]
"""Slab blocks of pages, an array per resident group."""


def new_pages_for(state: TieredState, tokens: Int32[Array, " B"], layout: CacheLayout) -> Int32[Array, " B"]:
    """Pages each request lacks to hold so many tokens."""
    return jnp.maximum(-(-tokens // layout.page_tokens) - state.ledger.tables.num_pages, 0)


def seal_written(state: TieredState, slots: Bool[Array, " B"], layout: CacheLayout) -> Ledger:
    """The ledger with the full pages of running `slots` valid, where decode writes through."""
    if layout.cache.backup != "write_through":
        return state.ledger
    return coordinator.seal(state.ledger, jnp.where(slots, state.sequences.length // layout.page_tokens, 0))


def spill_budget(layout: CacheLayout) -> int:
    """Pages that one plan may copy: none where rows are written through, for nothing is left to copy."""
    return layout.max_pages if layout.cache.backup == "spill" else 0


def make_room(
    state: TieredState, new_pages: Int32[Array, " B"], layout: CacheLayout, *, max_new_pages: int
) -> tuple[TieredState, Bool[Array, " B"], Int32[Array, " B"]]:
    """Gives each request `new_pages` more pages, all or none: `(state, granted, status)`; history leaves the GPU for them."""
    state, budget = state.replace(ledger=seal_written(state, state.sequences.running, layout)), spill_budget(layout)
    needed = blocks_wanted(state.ledger.tables, new_pages)

    def give_up(state: TieredState) -> tuple[TieredState, Bool[Array, ""]]:
        """Carries out one plan; whether another could find more."""
        ledger, plan = plan_room(state.ledger, needed, layout, max_pages=budget)
        state = state.replace(ledger=ledger)
        if budget:
            state = _spill(state, plan, layout)
        state = state.replace(ledger=unpin_copied(state.ledger, needed, layout))
        more = plan.count > 0 if layout.cache.reclaim == "base" else plan.count == budget
        return state, more & (needed > state.ledger.tables.pool.num_free)

    if budget:
        state, _ = jax.lax.while_loop(lambda carry: carry[1], lambda carry: give_up(carry[0]), (state, jnp.bool_(True)))
    else:
        state, _ = give_up(state)
    ledger, granted, status, host_blocks = coordinator.grow(state.ledger, new_pages, max_new_pages=max_new_pages)
    maps = tuple(forget_host_blocks(m, host_blocks.reshape(-1), layout.page_entries) for m in state.hot_maps)
    return state.replace(ledger=ledger, hot_maps=maps), granted, status


def plan_room(ledger: Ledger, needed: Int32[Array, ""], layout: CacheLayout, *, max_pages: int) -> tuple[Ledger, SpillPlan]:
    """Decides which history leaves the GPU for an allocation of `needed` blocks, and which pages, at most `max_pages`, are copied
    first.

    `reclaim="base"`: only as far as blocks are short. `"eager"`: every page that may go. Those that need no copy leave at once,
    the others at the commit of the plan. `"unpin"`: none by itself; `unpin_copied` is due once the plan is committed.
    """
    if layout.cache.reclaim == "eager":
        return reclaim.release_history(ledger, ledger.tables.num_pages > 0, max_pages=max_pages)
    if layout.cache.reclaim == "unpin":
        return unpin.plan_copies(ledger, needed, layout.watermark, layout.window_pages, max_pages=max_pages)
    return reclaim.reclaim(ledger, needed - ledger.tables.pool.num_free, max_pages=max_pages)


def unpin_copied(ledger: Ledger, needed: Int32[Array, ""], layout: CacheLayout) -> Ledger:
    """Un-pins what may go now that the copies of `plan_room` are committed; nothing where that is not the policy."""
    if layout.cache.reclaim != "unpin":
        return ledger
    return unpin.unpin_clean(ledger, needed, layout.watermark, layout.window_pages)


def _spill(state: TieredState, plan: SpillPlan, layout: CacheLayout) -> TieredState:
    pools = []
    for pool, layer in zip(state.pools, layout.model.c4_layers, strict=True):
        place = layout.resident_place(layer)
        pools.append(
            transfer.back_up_pages(
                pool,
                state.slab,
                plan.source[place.group],
                plan.host,
                layout.entry,
                page_entries=layout.page_entries,
                offset=place.offset,
            )
        )
    slab, pools = border((state.slab, tuple(pools)))
    return commit_copies(state.replace(slab=slab, pools=pools), plan)


def copy_c4_pages(
    call: Callable, state: TieredState, slab_blocks: PageIds, host_blocks: Int32[Array, " M"], layout: CacheLayout, *, back=False
) -> TieredState:
    """Runs a page copy of `ffi` for every C4 layer: its own pool, its group's slab blocks; from the host where `back`."""
    slab, pools = state.slab, []
    for pool, layer in zip(state.pools, layout.model.c4_layers, strict=True):
        place = layout.resident_place(layer)
        ids = (host_blocks, slab_blocks[place.group]) if back else (slab_blocks[place.group], host_blocks)
        pool, slab = call(pool, slab, *ids, offset=place.offset, layer=f"layer {layer}")
        pools.append(pool)
    return state.replace(slab=slab, pools=tuple(pools))


def commit_copies(state: TieredState, plan: SpillPlan) -> TieredState:
    """Ends the leases of copies that stand earlier in the stream, marks their pages valid and counts them."""
    ledger = spill.commit_completed(spill.commit_enqueued(state.ledger, plan), plan)
    counts = state.traffic.copied_pages
    request = jnp.where(plan.host > 0, plan.request, counts.shape[0])
    copied = counts.at[request].add(len(state.pools), mode="drop")
    return state.replace(ledger=ledger, traffic=state.traffic.replace(copied_pages=copied))
