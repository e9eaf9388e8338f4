"""Cached prefixes with their bytes: out of a running request to a place of the parking, from there to any free slot.

    state, parking, place, status = publish(state, parking, slot, length, layout=layout)
    state, parking, status = adopt(state, parking, place, slot, prompt, length, layout=layout, max_new_tokens=64)

Between two dispatches. Each plans by a jitted transition, looks at its status, and moves the bytes by the programs that park and
resume. A prefix can be cached at any token that the request stands at, and only there: V4 goes on at a token with the windows and
compressor rings as they were at that token, and those of earlier tokens are gone.
"""

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int32

from hisparse_jax import parking, prefix_ledger
from hisparse_jax.hot_map import reset_requests
from hisparse_jax.layout import CacheLayout
from hisparse_jax.parking import Parking
from hisparse_jax.parking_ledger import ParkingLedger, ParkPlan, ResumePlan, keep
from hisparse_jax.prompts import PromptError, admit_sequence, check_prompt
from hisparse_jax.room import seal_written
from hisparse_jax.spill import SpillPlan
from hisparse_jax.state import TieredState
from hisparse_jax.status import Status
from hisparse_jax.steps import traces
from hisparse_jax.tiered import reset_traffic


def publish(
    state: TieredState, lot: Parking, slot: int, *, layout: CacheLayout, like: int = -1, num_shared: int = 0
) -> tuple[TieredState, Parking, int | None, Status]:
    """Caches what the request in `slot` has computed so far: `(state, parking, place, status)`.

    `like` is the place of a prefix whose first `num_shared` pages hold the same tokens; they are shared and not copied.
    `OUT_OF_PARKING` and `OUT_OF_HOST_BLOCKS` where there is no room; `REFUSED` for a slot that is not taken, for less than one
    full page, and where a full page has no complete host copy (a backup is under way: flush it first). Then nothing changes.
    """
    state, lot, plan, place, status = _plan_publish(
        state, lot, jnp.int32(slot), jnp.int32(like), jnp.int32(num_shared), layout=layout
    )
    if (status := Status(int(status))) is not Status.OK:
        return state, lot, None, status
    state, lot = parking.copy_out(state, lot, slot, int(place), plan, layout=layout)
    return state, lot, int(place), status


def adopt(
    state: TieredState,
    lot: Parking,
    place: int,
    slot: int,
    prompt: Sequence[int],
    length: int,
    *,
    layout: CacheLayout,
    max_new_tokens: int,
    **options,
) -> tuple[TieredState, Parking, Status]:
    """Admits a request as `decode.admit` does, with the prefix in `place` as its first tokens: `(state, parking, status)`.

    The caller vouches that the prefix is the prompt's first `length` tokens; at least one is left to prefill. Where GPU blocks
    are short, other requests give up history, if that makes room; else `OUT_OF_BLOCKS`, and `OUT_OF_HOST_BLOCKS` where host
    blocks are. `REFUSED` for a place without a prefix. Then nothing changes. Raises `PromptError` for bad input.
    """
    check_prompt(prompt, layout, max_new_tokens)
    if not 1 <= length < len(prompt):
        raise PromptError(f"a prefix of {length} tokens for a prompt of {len(prompt)}; at least one must be left to compute.")
    sequences = admit_sequence(state.sequences, slot, len(prompt) + max_new_tokens, length=length, **options)
    state, plan, given_up, status = _plan_adopt(
        state, lot.ledger, jnp.int32(place), jnp.int32(slot), jnp.int32(layout.num_pages(len(prompt))), layout=layout
    )
    if (status := Status(int(status))) is not Status.OK:
        return state, lot, status
    state, lot = parking.copy_back(state.replace(sequences=sequences), lot, slot, place, plan, given_up, layout=layout)
    return state, lot, status


@functools.partial(jax.jit, static_argnames="layout", donate_argnames=("state", "lot"))
def _plan_publish(
    state: TieredState,
    lot: Parking,
    slot: Int32[Array, ""],
    like: Int32[Array, ""],
    num_shared: Int32[Array, ""],
    *,
    layout: CacheLayout,
) -> tuple[TieredState, Parking, ParkPlan, Int32[Array, ""], Int32[Array, ""]]:
    traces["prefix.publish"] += 1
    mask = jnp.arange(layout.cache.max_requests, dtype=jnp.int32) == slot
    length = state.sequences.length[slot]
    pages, full = -(-length // layout.page_tokens), length // layout.page_tokens
    sealed = seal_written(state, state.sequences.running & mask, layout)
    ledger, places, plan, place, status = prefix_ledger.publish(sealed, lot.ledger, slot, pages, full, like, num_shared)
    ledger = keep(status == Status.OK, ledger, state.ledger)
    return state.replace(ledger=ledger), lot.replace(ledger=places), plan, place, status


@functools.partial(jax.jit, static_argnames="layout", donate_argnames="state")
def _plan_adopt(
    state: TieredState,
    places: ParkingLedger,
    place: Int32[Array, ""],
    slot: Int32[Array, ""],
    num_pages: Int32[Array, ""],
    *,
    layout: CacheLayout,
) -> tuple[TieredState, ResumePlan, SpillPlan, Int32[Array, ""]]:
    traces["prefix.adopt"] += 1
    roomy, given_up = parking.make_blocks_free(state, prefix_ledger.blocks_to_adopt(state.ledger, places, place), layout)
    ledger, plan, status = prefix_ledger.adopt(roomy.ledger, places, place, slot, num_pages)
    ok = status == Status.OK
    mask = (jnp.arange(layout.cache.max_requests, dtype=jnp.int32) == slot) & ok
    state = state.replace(
        ledger=keep(ok, ledger, state.ledger),
        hot_maps=tuple(reset_requests(m, mask) for m in state.hot_maps),
        traffic=keep(ok, reset_traffic(roomy.traffic, mask), state.traffic),
    )
    return state, plan, keep(ok, given_up, jax.tree.map(jnp.zeros_like, given_up)), status
