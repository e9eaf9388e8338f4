"""Which pages to give up when blocks are short (`reclaim`), or as soon as they may go (`release_history`).

Source: the base rule of vLLM's first HiSparse.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int32

from hisparse_jax.coordinator import Ledger
from hisparse_jax.spill import SpillPlan, candidates, copied, give_up


def reclaim(ledger: Ledger, num_blocks: Int32[Array, ""], *, max_pages: int) -> tuple[Ledger, SpillPlan]:
    """Gives up pages for an allocation that lacks `num_blocks` GPU blocks; 0 or less changes nothing.

    The target is the larger of `num_blocks` and one page in every growing group for each request with candidates. Requests
    come by most candidates, ties to the lower slot, their pages oldest first. One that owns its hot region gives pages
    until the target is met. One that does not switches only where the pages taken free more blocks than the region costs.
    Pages on the host leave at once, others at the commit of the plan (at most `max_pages` copies): they count as blocks to
    come, as do those promised by earlier calls. Look at `num_free` again afterwards.

    Candidates: `spill.candidates`.
    """
    may_go = candidates(ledger)
    copies = may_go & ~copied(ledger) & (ledger.transfer == 0)
    num_candidates = jnp.sum(may_go, axis=1, dtype=jnp.int32)
    groups, hot_cost, owned = ledger.hot.shape[0], ledger.hot_cost, ledger.has_hot
    switching = ledger.transition_target > 0
    per_request = jnp.sum(num_candidates > 0, dtype=jnp.int32) * ledger.tables.growing_groups
    attainable = jnp.minimum(num_blocks, ledger.gpu_lease.shape[0])  # the pool has no more; sums below stay in range
    target = jnp.where(num_blocks > 0, jnp.maximum(attainable, per_request), 0)
    promised = jnp.sum(ledger.release_after, dtype=jnp.int32) * groups - jnp.sum(switching, dtype=jnp.int32) * hot_cost

    def take(carry, request):
        coming, budget = carry
        may_go, copies, owned, switching = request
        short = target - coming
        affordable = may_go & (~copies | (jnp.cumsum(copies, dtype=jnp.int32) <= budget))
        wanted = -(-jnp.where(owned, short, short + hot_cost) // groups)
        taken = jnp.minimum(jnp.sum(affordable, dtype=jnp.int32), wanted)
        gain = taken * groups - jnp.where(owned, 0, hot_cost)
        useful = (num_blocks > 0) & (short > 0) & (gain > 0) & ~(switching & ~owned)
        chosen = affordable & useful & (jnp.cumsum(affordable, dtype=jnp.int32) <= taken)
        budget = budget - jnp.sum(chosen & copies, dtype=jnp.int32)
        return (coming + jnp.where(useful, gain, 0), budget), chosen

    def search(may_go):
        order = jnp.argsort(-num_candidates, stable=True)
        requests = jax.tree.map(lambda x: x[order], (may_go, copies, owned, switching))
        _, chosen = jax.lax.scan(take, (promised, jnp.int32(max_pages)), requests)
        return jnp.zeros_like(may_go).at[order].set(chosen)

    chosen = jax.lax.cond(num_blocks > 0, search, jnp.zeros_like, may_go)
    return give_up(ledger, chosen, max_pages=max_pages)


def release_history(ledger: Ledger, requests: Bool[Array, " B"], *, max_pages: int) -> tuple[Ledger, SpillPlan]:
    """The eager policy: the named requests give up every candidate page, whatever the gain, and take their hot region.

    Pages on the host leave at once, others at the commit of the plan (at most `max_pages` copies, lower slots first). Where
    free blocks and those that come free do not make up a hot region, that request keeps its pages.
    """
    return give_up(ledger, candidates(ledger) & requests[:, None], max_pages=max_pages)
