"""The recommended life cycle of pages: un-pinned as soon as they may go, read in place for as long as they are there.

A page is *clean* when its host copy is complete and no copy of it is under way. Clean pages before the tail of a request that
owns its hot region are un-pinned: their blocks join the free queue and count as free, while the table goes on naming them, so
that a selected entry of theirs is still a resident hit. They are lost when a block of theirs is handed out
(`coordinator.forget_reused`), in the transition that does it. Victims are what the free queue yields next: no scoring, no copy,
no search. Source: vLLM's plan for un-pinned pages.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int32

from hisparse_jax.block_pool import free, touch
from hisparse_jax.coordinator import Ledger, take_regions
from hisparse_jax.spill import SpillPlan, candidates, pinned, plan_spill
from hisparse_jax.status import NULL_BLOCK

Count = Int32[Array, ""] | int


def unpin_clean(ledger: Ledger, needed: Int32[Array, ""], watermark: Count, window_pages: Count) -> Ledger:
    """Un-pins the clean pages of every request that owns its hot region, after giving one to those of `requires_hot`.

    Region and pages change in one step: the region comes out of blocks that the request's own pages leave, so it is always
    granted, and always before the first loss. Blocks join the queue by slot, each request's last page first.
    """
    clean = candidates(ledger) & ledger.valid & (ledger.transfer == 0)
    switching = requires_hot(ledger, clean, needed, watermark, window_pages)
    leaving = clean & (ledger.has_hot | switching)[:, None]

    def leave(ledger: Ledger) -> Ledger:
        by_page = jnp.where(leaving[None], ledger.tables.resident, NULL_BLOCK)[:, :, ::-1].transpose(1, 2, 0)
        pool, _ = free(ledger.tables.pool, by_page.reshape(-1))
        ledger = ledger.replace(tables=ledger.tables.replace(pool=pool), unpinned=ledger.unpinned | leaving)
        return take_regions(ledger, switching)

    return jax.lax.cond(jnp.any(leaving), leave, lambda ledger: ledger, ledger)


def plan_copies(
    ledger: Ledger, needed: Int32[Array, ""], watermark: Count, window_pages: Count, *, max_pages: int
) -> tuple[Ledger, SpillPlan]:
    """Plans the copies that pages lack before `unpin_clean` could take them: at most `max_pages`, lower slots and pages first.

    For decode rows that are not written through (lazy backup); pages of other requests stay dirty.
    """
    may_go = candidates(ledger)
    takers = ledger.has_hot | requires_hot(ledger, may_go, needed, watermark, window_pages)
    return plan_spill(ledger, may_go & takers[:, None], release_after=False, max_pages=max_pages)


def requires_hot(
    ledger: Ledger, pages: Bool[Array, "B P"], needed: Int32[Array, ""], watermark: Count, window_pages: Count
) -> Bool[Array, " B"]:
    """Requests that are to take their hot region, were `pages` of theirs to leave for it.

    Those without one, where an allocation of `needed` blocks would leave fewer than `watermark` free, or where the request
    holds `window_pages` pages or more; but only if its pages bring more blocks than the region costs, and no switch of the
    base rule is running.
    """
    pool, resident = ledger.tables.pool, ledger.tables.resident
    low = pool.num_free - needed < watermark
    full = jnp.sum(pinned(ledger), axis=1, dtype=jnp.int32) >= window_pages
    pressed = (low | full) & ~ledger.has_hot & (ledger.transition_target == 0)

    def gain(pages: Bool[Array, "B P"]) -> Int32[Array, " B"]:
        return jnp.sum((pool.references[resident] == 1) & pages[None], axis=(0, 2), dtype=jnp.int32)

    pages = pages & pressed[:, None]
    return jax.lax.cond(jnp.any(pages), gain, lambda pages: jnp.zeros(pages.shape[0], jnp.int32), pages) > ledger.hot_cost


def take_back(ledger: Ledger, pages: Bool[Array, "B P"]) -> Ledger:
    """Pins again those of `pages` that are un-pinned and still there; the others stay as they are.

    Their blocks leave the free queue with the bytes they hold. For a prefix hit, or whatever must not lose the page meanwhile.
    """
    back = pages & ledger.unpinned
    blocks = jnp.where(back[None], ledger.tables.resident, NULL_BLOCK).reshape(-1)
    pool, _ = touch(ledger.tables.pool, blocks)
    return ledger.replace(tables=ledger.tables.replace(pool=pool), unpinned=ledger.unpinned & ~back)
