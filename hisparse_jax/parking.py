"""Preemption that keeps the KV: a request leaves its slot, waits on the host, and goes on as if it had never left.

    parking = init_parking(layout)
    state, parking, place, status = preempt(state, parking, slot, layout=layout)
    state, parking, status = resume(state, parking, place, slot, layout=layout)      # any free slot, any companions

Between two dispatches, in decode or between two chunks of prefill. C4 pages stay in the host pool and are not copied again; index
keys and C128 entries go to parking pages, windows and compressor rings to one snapshot per place. Each call plans by a jitted
transition, looks at its status, and then moves the bytes in one program of in-place page copies, ahead of any later writer of the
blocks. Nobody else ships it.
"""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jaxtyping import Array, Int32, UInt8

from hisparse_jax import ffi
from hisparse_jax.config import ConfigError
from hisparse_jax.host_memory import check_host_budget, make_host_pool
from hisparse_jax.hot_map import reset_requests
from hisparse_jax.layer_state import LayerState
from hisparse_jax.layout import CacheLayout
from hisparse_jax.parking_ledger import (
    ParkingLedger,
    ParkPlan,
    ResumePlan,
    blocks_to_resume,
    drop,
    init_parking_ledger,
    keep,
    park,
    unpark,
)
from hisparse_jax.room import commit_copies, copy_c4_pages, plan_room, seal_written, spill_budget, unpin_copied
from hisparse_jax.sequences import Sequences, committed, init_sequences
from hisparse_jax.spill import SpillPlan
from hisparse_jax.state import TieredState
from hisparse_jax.status import NULL_BLOCK, Status
from hisparse_jax.steps import traces
from hisparse_jax.tiered import Traffic, init_traffic

Ids = Int32[Array, " _"]
"""Block ids in pinned host memory; null copies nothing."""


class Parking(struct.PyTreeNode):
    """`K` places (`parking_places`) for preempted requests and cached prefixes, donated from call to call like the state.

    sequences, traffic           as in the state, by place.
    pages: u8[A, bytes] each     pinned; one pool per base group, `bytes` a page of all its layers.
    snapshots: u8[K + 1, bytes]  pinned; windows and rings of place k, layer by layer, in row k + 1.
    """

    ledger: ParkingLedger
    sequences: Sequences
    traffic: Traffic
    pages: tuple[UInt8[Array, "A group_bytes"], ...]
    snapshots: UInt8[Array, "K1 snapshot_bytes"]


def init_parking(layout: CacheLayout) -> Parking:
    """Free places. Raises `ConfigError` where the layout has none, or host memory is short."""
    if not layout.parking_blocks:
        raise ConfigError(
            f"parked_requests={layout.cache.parked_requests} and cached_prefixes={layout.cache.cached_prefixes} with "
            f"{layout.host_blocks} host blocks keep nothing; raise parked_requests or cached_prefixes."
        )
    check_host_budget(layout.parking_bytes)
    rest = committed(assemble_parking(layout, (), jnp.zeros((1, 1), jnp.uint8)))
    group_bytes = [sum(place.page_bytes for place in group) for group in layout.base_groups]
    return rest.replace(
        pages=tuple(make_host_pool(layout.parking_blocks, size) for size in group_bytes),
        snapshots=make_host_pool(layout.parking_places + 1, layout.snapshot_bytes),
    )


def assemble_parking(
    layout: CacheLayout, pages: tuple[UInt8[Array, "A group_bytes"], ...], snapshots: UInt8[Array, "K1 snapshot_bytes"]
) -> Parking:
    """Free places around pools that exist already, or are only specified (`jax.eval_shape`)."""
    places = layout.parking_places
    return Parking(
        ledger=init_parking_ledger(layout.parking_blocks, places, layout.max_pages),
        sequences=init_sequences(places),
        traffic=init_traffic(places),
        pages=pages,
        snapshots=snapshots,
    )


def preempt(
    state: TieredState, parking: Parking, slot: int, *, layout: CacheLayout
) -> tuple[TieredState, Parking, int | None, Status]:
    """Takes the request in `slot` off the GPU, all of it, and keeps it on the host: `(state, parking, place, status)`.

    `OUT_OF_PARKING` where no place or too few parking pages are free, `REFUSED` for a slot that is not taken or that has a
    copy in flight of a page not yet full; then nothing changes and there is no place. A copy in flight of a full page is
    honoured: its blocks stay leased until it is committed, before or after the request is back.
    """
    state, parking, plan, place, status = _plan_preempt(state, parking, jnp.int32(slot), layout=layout)
    if (status := Status(int(status))) is not Status.OK:
        return state, parking, None, status
    state, parking = copy_out(state, parking, slot, int(place), plan, layout=layout)
    return state, parking, int(place), status


def resume(
    state: TieredState, parking: Parking, place: int, slot: int, *, layout: CacheLayout
) -> tuple[TieredState, Parking, Status]:
    """Brings a parked request back to a free `slot`, where it goes on as it stood: `(state, parking, status)`.

    Where blocks are short, other requests give up history as they do when one grows, if that makes enough room. Else
    `OUT_OF_BLOCKS`; `REFUSED` for a place without a request and a slot that is taken or does not exist; then nothing changes.
    """
    state, parking, plan, given_up, status = _plan_resume(state, parking, jnp.int32(place), jnp.int32(slot), layout=layout)
    if (status := Status(int(status))) is not Status.OK:
        return state, parking, status
    state, parking = copy_back(state, parking, slot, place, plan, given_up, layout=layout)
    return state, parking, status


def discard(state: TieredState, parking: Parking, place: int, *, layout: CacheLayout) -> tuple[TieredState, Parking, Status]:
    """Ends a parked request or cached prefix: its host blocks and parking pages are free, where nobody else has them.

    `REFUSED`, and nothing changed, where there is none.
    """
    state, parking, status = _discard(state, parking, jnp.int32(place), layout=layout)
    return state, parking, Status(int(status))


def copy_out(
    state: TieredState, parking: Parking, slot: int, place: int, plan: ParkPlan, *, layout: CacheLayout
) -> tuple[TieredState, Parking]:
    """Makes a plan's copies, and one of the slot's windows and rings, to a place."""
    return _copy_out(
        state,
        parking,
        jnp.int32(slot),
        _place_row(place),
        _by_group(plan.base),
        ffi.pinned_ids(np.asarray(plan.parked)),
        _by_group(plan.source),
        ffi.pinned_ids(np.asarray(plan.host)),
        layout=layout,
    )


def copy_back(
    state: TieredState, parking: Parking, slot: int, place: int, plan: ResumePlan, given_up: SpillPlan, *, layout: CacheLayout
) -> tuple[TieredState, Parking]:
    """Makes the copies of what others gave up, then the plan's, and one of the place's windows and rings, to a slot."""
    return _copy_back(
        state,
        parking,
        jnp.int32(slot),
        _place_row(place),
        _by_group(given_up.source),
        ffi.pinned_ids(np.asarray(given_up.host)),
        ffi.pinned_ids(np.asarray(plan.parked)),
        _by_group(plan.base),
        ffi.pinned_ids(np.asarray(plan.host)),
        _by_group(plan.resident),
        layout=layout,
    )


def make_blocks_free(state: TieredState, num_blocks: Int32[Array, ""], layout: CacheLayout) -> tuple[TieredState, SpillPlan]:
    """Lets requests give up history where fewer than `num_blocks` GPU blocks are free: `(state, given_up)`.

    What they give up is committed here: its copies must be the first that the program after this one makes.
    """
    ledger = seal_written(state, state.sequences.running, layout)
    budget = layout.cache.max_requests * spill_budget(layout)  # there is but one plan, so it may take all that there is
    ledger, given_up = plan_room(ledger, num_blocks, layout, max_pages=budget)
    state = state.replace(ledger=ledger)
    if budget:
        state = commit_copies(state, given_up)
    return state.replace(ledger=unpin_copied(state.ledger, num_blocks, layout)), given_up


@functools.partial(jax.jit, static_argnames="layout", donate_argnames=("state", "parking"))
def _plan_preempt(
    state: TieredState, parking: Parking, slot: Int32[Array, ""], *, layout: CacheLayout
) -> tuple[TieredState, Parking, ParkPlan, Int32[Array, ""], Int32[Array, ""]]:
    traces["parking.preempt"] += 1
    sequences = state.sequences
    mask = jnp.arange(layout.cache.max_requests, dtype=jnp.int32) == slot
    length = sequences.length[slot]
    full = length // layout.page_tokens
    ledger = seal_written(state, sequences.running & mask, layout)
    ledger, lot, plan, place, status = park(ledger, parking.ledger, slot, -(-length // layout.page_tokens), full)
    ok = status == Status.OK
    left = mask & ok
    copied = jnp.sum(plan.host != NULL_BLOCK, dtype=jnp.int32) * len(layout.model.c4_layers)
    traffic = state.traffic.replace(copied_pages=state.traffic.copied_pages + jnp.where(left, copied, 0))
    row = jnp.where(ok, place, layout.parking_places)
    parking = parking.replace(
        ledger=lot,
        sequences=move_row(sequences, slot, parking.sequences, row),
        traffic=move_row(traffic, slot, parking.traffic, row),
    )
    state = state.replace(
        ledger=keep(ok, ledger, state.ledger),
        sequences=sequences.replace(running=sequences.running & ~left),
        hot_maps=tuple(reset_requests(m, left) for m in state.hot_maps),
        traffic=traffic,
    )
    return state, parking, plan, place, status


@functools.partial(jax.jit, static_argnames="layout", donate_argnames=("state", "parking"))
def _copy_out(
    state: TieredState,
    parking: Parking,
    slot: Int32[Array, ""],
    place_row: tuple[Ids, Ids],
    base: tuple[Ids, ...],
    parked: Ids,
    source: tuple[Ids, ...],
    host: Ids,
    *,
    layout: CacheLayout,
) -> tuple[TieredState, Parking]:
    """C4 pages to the host pools, base pages and a snapshot to the parking."""
    traces["parking.copy_out"] += 1
    state = copy_c4_pages(ffi.backup_pages, state, source, host, layout)
    slab, pages = state.slab, []
    for group, pool in enumerate(parking.pages):
        pool, slab = ffi.backup_pages(pool, slab, base[group], parked, offset=0, layer=f"base group {group}")
        pages.append(pool)
    rows = jnp.stack([jnp.zeros(layout.snapshot_bytes, jnp.uint8), _snapshot(state.layers, slot)])
    row, one = place_row
    snapshots, _ = ffi.backup_pages(parking.snapshots, rows, one, row, offset=0, layer="snapshots")
    return state.replace(slab=slab), parking.replace(pages=tuple(pages), snapshots=snapshots)


@functools.partial(jax.jit, static_argnames="layout", donate_argnames=("state", "parking"))
def _plan_resume(
    state: TieredState, parking: Parking, place: Int32[Array, ""], slot: Int32[Array, ""], *, layout: CacheLayout
) -> tuple[TieredState, Parking, ResumePlan, SpillPlan, Int32[Array, ""]]:
    traces["parking.resume"] += 1
    roomy, given_up = make_blocks_free(state, blocks_to_resume(state.ledger, parking.ledger, place), layout)
    ledger, lot, plan, status = unpark(roomy.ledger, parking.ledger, place, slot)
    ok = status == Status.OK
    row = jnp.where(ok, slot, layout.cache.max_requests)
    mask = jnp.arange(layout.cache.max_requests, dtype=jnp.int32) == row
    state = state.replace(
        ledger=keep(ok, ledger, state.ledger),
        hot_maps=tuple(reset_requests(m, mask) for m in state.hot_maps),
        sequences=move_row(parking.sequences, place, state.sequences, row),
        traffic=keep(ok, move_row(parking.traffic, place, roomy.traffic, row), state.traffic),
    )
    given_up = keep(ok, given_up, jax.tree.map(jnp.zeros_like, given_up))
    return state, parking.replace(ledger=lot), plan, given_up, status


@functools.partial(jax.jit, static_argnames="layout", donate_argnames=("state", "parking"))
def _copy_back(
    state: TieredState,
    parking: Parking,
    slot: Int32[Array, ""],
    place_row: tuple[Ids, Ids],
    given_up: tuple[Ids, ...],
    given_up_host: Ids,
    parked: Ids,
    base: tuple[Ids, ...],
    host: Ids,
    resident: tuple[Ids, ...],
    *,
    layout: CacheLayout,
) -> tuple[TieredState, Parking]:
    """First what others give up leaves its blocks; then base pages, C4 pages and the snapshot come back."""
    traces["parking.copy_back"] += 1
    if given_up_host.size:
        state = copy_c4_pages(ffi.backup_pages, state, given_up, given_up_host, layout)
    slab, pages = state.slab, []
    for group, pool in enumerate(parking.pages):
        pool, slab = ffi.restore_pages(pool, slab, parked, base[group], offset=0, layer=f"base group {group}")
        pages.append(pool)
    state = copy_c4_pages(ffi.restore_pages, state.replace(slab=slab), resident, host, layout, back=True)
    row, one = place_row
    blank = jnp.zeros((2, layout.snapshot_bytes), jnp.uint8)
    snapshots, rows = ffi.restore_pages(parking.snapshots, blank, row, one, offset=0, layer="snapshots")
    state = state.replace(layers=_put_snapshot(state.layers, slot, rows[1]))
    return state, parking.replace(pages=tuple(pages), snapshots=snapshots)


@functools.partial(jax.jit, static_argnames="layout", donate_argnames=("state", "parking"))
def _discard(
    state: TieredState, parking: Parking, place: Int32[Array, ""], *, layout: CacheLayout
) -> tuple[TieredState, Parking, Int32[Array, ""]]:
    traces["parking.discard"] += 1
    ledger, lot, status = drop(state.ledger, parking.ledger, place)
    return state.replace(ledger=ledger), parking.replace(ledger=lot), status


def move_row(source, index: Int32[Array, ""], target, row: Int32[Array, ""]):
    """`target` with row `row` taken from row `index` of `source`; past the end it stays as it is."""
    return jax.tree.map(lambda a, b: b.at[row].set(a[index], mode="drop"), source, target)


def _snapshot(layers: tuple[LayerState, ...], slot: Int32[Array, ""]) -> UInt8[Array, " snapshot_bytes"]:
    """Windows and rings of one request, layer by layer, as bytes."""
    parts = [jax.lax.bitcast_convert_type(x[slot], jnp.uint8).reshape(-1) for x in jax.tree.leaves(layers)]
    return jnp.concatenate(parts)


def _put_snapshot(
    layers: tuple[LayerState, ...], slot: Int32[Array, ""], row: UInt8[Array, " snapshot_bytes"]
) -> tuple[LayerState, ...]:
    """`layers` with one request's windows and rings from a snapshot."""
    leaves, tree = jax.tree.flatten(layers)
    placed, begin = [], 0
    for x in leaves:
        shape = x.shape[1:] if x.dtype == jnp.uint8 else (*x.shape[1:], x.dtype.itemsize)
        end = begin + math.prod(shape)
        placed.append(x.at[slot].set(jax.lax.bitcast_convert_type(row[begin:end].reshape(shape), x.dtype)))
        begin = end
    return jax.tree.unflatten(tree, placed)


def _place_row(place: int) -> tuple[Ids, Ids]:
    """Ids of a place's snapshot, and of the row that stands for a slot's: block 0 would mean none."""
    return ffi.pinned_ids(np.array([place + 1])), ffi.pinned_ids(np.array([1]))


def _by_group(blocks: Int32[Array, "G M"]) -> tuple[Ids, ...]:
    return tuple(ffi.pinned_ids(row) for row in np.asarray(blocks))
