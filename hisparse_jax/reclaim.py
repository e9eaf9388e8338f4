"""Which pages to give up when blocks are short (`reclaim`), or as soon as they may go (`release_history`).

Source: hisparse.md 7.4, the base rule of vLLM's first version.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int32

from hisparse_jax.coordinator import Ledger
from hisparse_jax.spill import SpillPlan, behind_tail, copied, give_up, standing
from hisparse_jax.status import NULL_BLOCK


def reclaim(ledger: Ledger, num_blocks: Int32[Array, ""], *, max_pages: int) -> tuple[Ledger, SpillPlan]:
    """Gives up pages for an allocation that lacks `num_blocks` GPU blocks; 0 or less changes nothing.

    The target is the larger of `num_blocks` and one page in every growing group for each request with candidates. Requests
    come by most candidates, ties to the lower slot, their pages oldest first. One that owns its hot region gives pages
    until the target is met. One that does not switches only where the pages taken free more blocks than the region costs.
    Pages on the host leave at once, others at the commit of the plan (at most `max_pages` copies): they count as blocks to
    come, as do those promised by earlier calls. Look at `num_free` again afterwards.

    Candidates stand on the GPU before the last two pages, have a host block, and are not promised yet.
    """
    candidates, copies = _candidates(ledger)
    num_candidates = jnp.sum(candidates, axis=1, dtype=jnp.int32)
    groups, hot_cost, owned = ledger.hot.shape[0], ledger.hot_cost, ledger.has_hot
    switching = ledger.transition_target > 0
    per_request = jnp.sum(num_candidates > 0, dtype=jnp.int32) * ledger.tables.growing_groups
    attainable = jnp.minimum(num_blocks, ledger.gpu_lease.shape[0])  # the pool has no more; sums below stay in range
    target = jnp.where(num_blocks > 0, jnp.maximum(attainable, per_request), 0)
    promised = jnp.sum(ledger.release_after, dtype=jnp.int32) * groups - jnp.sum(switching, dtype=jnp.int32) * hot_cost

    def take(carry, request):
        coming, budget = carry
        candidates, copies, owned, switching = request
        short = target - coming
        affordable = candidates & (~copies | (jnp.cumsum(copies, dtype=jnp.int32) <= budget))
        wanted = -(-jnp.where(owned, short, short + hot_cost) // groups)
        taken = jnp.minimum(jnp.sum(affordable, dtype=jnp.int32), wanted)
        gain = taken * groups - jnp.where(owned, 0, hot_cost)
        useful = (num_blocks > 0) & (short > 0) & (gain > 0) & ~(switching & ~owned)
        chosen = affordable & useful & (jnp.cumsum(affordable, dtype=jnp.int32) <= taken)
        budget = budget - jnp.sum(chosen & copies, dtype=jnp.int32)
        return (coming + jnp.where(useful, gain, 0), budget), chosen

    order = jnp.argsort(-num_candidates, stable=True)
    requests = jax.tree.map(lambda x: x[order], (candidates, copies, owned, switching))
    _, chosen = jax.lax.scan(take, (promised, jnp.int32(max_pages)), requests)
    return give_up(ledger, jnp.zeros_like(candidates).at[order].set(chosen), max_pages=max_pages)


def release_history(ledger: Ledger, requests: Bool[Array, " B"], *, max_pages: int) -> tuple[Ledger, SpillPlan]:
    """The eager policy: the named requests give up every candidate page, whatever the gain, and take their hot region.

    Pages on the host leave at once, others at the commit of the plan (at most `max_pages` copies, lower slots first). Where
    free blocks and those that come free do not make up a hot region, that request keeps its pages.
    """
    candidates, _ = _candidates(ledger)
    return give_up(ledger, candidates & requests[:, None], max_pages=max_pages)


def _candidates(ledger: Ledger) -> tuple[Bool[Array, "B P"], Bool[Array, "B P"]]:
    """Pages that may be given up, and those of them that need a copy planned first."""
    candidates = standing(ledger) & behind_tail(ledger) & ~ledger.release_after & (ledger.host_table != NULL_BLOCK)
    return candidates, candidates & ~copied(ledger) & (ledger.transfer == 0)
