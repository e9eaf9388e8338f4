"""A parked request as bytes that another cache can take: what a prefill/decode split or a restart needs.

    image = export_request(state, parking, place, layout)                             # reads; nothing changes
    state, parking, place, status = import_request(state, parking, image, layout)     # then `parking.resume`

An image holds all that its request needs to go on at any token: C4 pages, index keys, C128 entries, one snapshot of windows and
compressor rings, and where it stands. It names no block: pages are in order, one array per cache and layer, so both sides
choose ids of their own, and may differ in packing, pools and hot slots. What a request has not written is zero in its
image, whoever had the block before. Bytes pass through the device, `CHUNK_PAGES` pages at a time.
"""

import dataclasses
import functools
import json
import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jaxtyping import Array, Int32, UInt8

from hisparse_jax import ffi, parking_ledger
from hisparse_jax.config import ModelConfig
from hisparse_jax.hot_map import forget_host_blocks
from hisparse_jax.layer_state import init_layer_states
from hisparse_jax.layout import CacheLayout
from hisparse_jax.parking import Parking, discard, move_row
from hisparse_jax.prompts import check_sampling
from hisparse_jax.sequences import Sequences
from hisparse_jax.specs import CacheSpec, CompressedSpec
from hisparse_jax.state import TieredState
from hisparse_jax.status import Status
from hisparse_jax.steps import traces
from hisparse_jax.tiered import Traffic

FORMAT_VERSION = 1

CHUNK_PAGES = 64
"""Pages that pass through the device at a time, in an array of a compiled shape."""

Pages = UInt8[np.ndarray, "P page_bytes"]


class ImageError(ValueError):
    """An image that this cache cannot take, or a place that gives none; the message names both values, or the remedy."""


@dataclasses.dataclass(frozen=True)
class ImageFormat:
    """What both sides of an import must agree on."""

    version: int
    model: ModelConfig
    rows: str
    index_keys: str
    hadamard: bool
    page_entries: int
    page_bytes: tuple[tuple[str, int], ...]
    """Of each cache of each layer, by name."""
    snapshot_bytes: int


@dataclasses.dataclass(frozen=True)
class Progress:
    """Where a request stands: its row of `Sequences` and of `Traffic`, its host pages, and the pages it has lost before."""

    length: int
    token: int
    limit: int
    stop_token: int
    seed: int
    temperature: float
    running: bool
    host_pages: int
    """Host blocks that it holds: those of its whole prompt, and of pages grown since."""
    pages_lost: int
    traffic: tuple[int, ...]


class RequestImage(struct.PyTreeNode):
    """One request off any cache; numpy arrays and what they mean.

    pages: u8[P, page_bytes] each   by cache name (`layers.3.c4`); pages that hold rows, in order.
    snapshot: u8[snapshot_bytes]    windows and rings, layer by layer.
    """

    pages: dict[str, Pages]
    snapshot: UInt8[np.ndarray, " snapshot_bytes"]
    progress: Progress = struct.field(pytree_node=False)
    format: ImageFormat = struct.field(pytree_node=False)

    @property
    def nbytes(self) -> int:
        return sum(x.nbytes for x in jax.tree.leaves(self))


def image_format(layout: CacheLayout) -> ImageFormat:
    """What images of `layout` look like; packing, pools and hot slots do not enter."""
    return ImageFormat(
        version=FORMAT_VERSION,
        model=layout.model,
        rows=layout.cache.rows,
        index_keys=layout.cache.index_format,
        hadamard=layout.cache.hadamard,
        page_entries=layout.page_entries,
        page_bytes=tuple((cache.name, cache.spec.page_bytes) for cache in _caches(layout)),
        snapshot_bytes=layout.snapshot_bytes,
    )


def format_fields(fmt: ImageFormat) -> dict[str, Any]:
    """A format as JSON gives it back, for comparison."""
    return json.loads(json.dumps(dataclasses.asdict(fmt) | {"page_bytes": dict(fmt.page_bytes)}))


def export_request(state: TieredState, parking: Parking, place: int, layout: CacheLayout) -> RequestImage:
    """The image of the request in `place`, which stays there. Raises `ImageError` for a place without one: free, or of a prefix.

    Of a page whose copy is in flight the parking made a copy of its own, so nothing need be waited for.
    """
    lot = parking.ledger
    if place not in (taken := np.flatnonzero(np.asarray(lot.taken & ~lot.cached)).tolist()):
        raise ImageError(f"place {place} holds no request; those that do are {taken}.")
    count, host, size = int(np.asarray(lot.num_pages)[place]), np.asarray(lot.host_table)[place], _chunk_pages(layout)
    pages = {}
    for cache, pool in zip(_c4_caches(layout), state.pools, strict=True):
        pages[cache.name] = _read(pool, host[:count], size)
    for group, pool in zip(_base_caches(layout), parking.pages, strict=True):
        whole = _read(pool, np.asarray(lot.base)[place, :count], size)
        pages |= {c.name: whole[:, c.offset : c.offset + c.spec.page_bytes].copy() for c in group}
    sequence, traffic = parking.sequences, parking.traffic
    progress = Progress(
        **{field.name: np.asarray(getattr(sequence, field.name))[place].item() for field in dataclasses.fields(Sequences)},
        host_pages=int(np.count_nonzero(host)),
        pages_lost=int(np.asarray(lot.pages_lost)[place]),
        traffic=tuple(int(np.asarray(x)[place]) for x in jax.tree.leaves(traffic)),
    )
    snapshot = _read(parking.snapshots, np.array([place + 1]), 1)[0]
    _blank_unwritten(pages, snapshot, progress.length, layout)
    return RequestImage(pages, snapshot, progress, image_format(layout))


def import_request(
    state: TieredState, parking: Parking, image: RequestImage, layout: CacheLayout
) -> tuple[TieredState, Parking, int | None, Status]:
    """Records an image's request in a free place, then loads its bytes: `(state, parking, place, status)`.

    It is then as one that was preempted here: `resume` it, `discard` it, export it again. `OUT_OF_PARKING`,
    `OUT_OF_HOST_BLOCKS`: nothing changed. `OUT_OF_MEMORY`: the bytes found no memory on their way, and what was recorded is taken
    back. Then there is no place. Raises `ImageError` or `PromptError`, before anything changes, as `check_image` does.
    """
    check_image(image, layout)
    now, size = image.progress, _chunk_pages(layout)
    state, parking, parked, host, place, status = _record(
        state,
        parking,
        np.array([now.length, now.host_pages, now.pages_lost], np.int32),
        _one_row(parking.sequences, [getattr(now, field.name) for field in dataclasses.fields(Sequences)]),
        _one_row(parking.traffic, now.traffic),
        layout=layout,
    )
    if (status := Status(int(status))) is not Status.OK:
        return state, parking, None, status
    count, place = layout.num_pages(now.length), int(place)
    parked, host = np.asarray(parked)[:count], np.asarray(host)[:count]
    pools, base, snapshots = list(state.pools), list(parking.pages), parking.snapshots
    try:
        for i, cache in enumerate(_c4_caches(layout)):
            for staged in _stage(image.pages[cache.name], host, size):
                pools[i] = _load(pools[i], *staged)
        for i, group in enumerate(_base_caches(layout)):
            for staged in _stage(np.concatenate([image.pages[c.name] for c in group], axis=1), parked, size):
                base[i] = _load(base[i], *staged)
        for staged in _stage(image.snapshot[None], np.array([place + 1]), 1):
            snapshots = _load(snapshots, *staged)
    except _RefusedMemoryError:
        status = Status.OUT_OF_MEMORY
    state = state.replace(pools=tuple(pools))
    parking = parking.replace(pages=tuple(base), snapshots=snapshots)
    if status is Status.OUT_OF_MEMORY:
        state, parking, _ = discard(state, parking, place, layout=layout)
        return state, parking, None, status
    jax.block_until_ready((pools, base, snapshots))
    return state, parking, place, status


def check_image(image: RequestImage, layout: CacheLayout) -> None:
    """Raises where `layout` can never take the image: `ImageError` for another format or model, a longer context, bad arrays
    or numbers; `PromptError` for sampling options that no request has."""
    if found := difference(format_fields(image.format), format_fields(image_format(layout))):
        name, theirs, ours = found
        raise ImageError(f"the image has {name}={theirs!r}, this cache {ours!r}; import it where both are the same.")
    now, most = image.progress, layout.cache.max_model_len
    if now.limit > most:
        raise ImageError(f"the image's request ends at {now.limit} tokens, max_model_len is {most}; raise max_model_len.")
    count = layout.num_pages(now.length)
    expected = {name: [count, size] for name, size in image.format.page_bytes} | {"snapshot": [layout.snapshot_bytes]}
    arrays = {**image.pages, "snapshot": image.snapshot}
    if found := difference({name: list(x.shape) for name, x in arrays.items() if x.dtype == np.uint8}, expected):
        name, theirs, ours = found
        raise ImageError(
            f"the image's {name} has {theirs} bytes, that of a request of {now.length} tokens {ours}; export it again."
        )
    sound = 0 <= now.length <= now.limit and 0 <= now.token < layout.model.vocab_size and now.pages_lost >= 0
    if not sound or not max(1, count) <= now.host_pages <= layout.num_pages(now.limit) or len(now.traffic) != 4:
        raise ImageError(f"{now} contradicts itself; export the request again.")
    check_sampling(now.seed, now.temperature)


def difference(left: dict, right: dict) -> tuple[str, Any, Any] | None:
    """The first field, by dotted name, in which two nested dicts differ, with both values; a missing one is None."""
    for name in [*left, *(name for name in right if name not in left)]:
        a, b = left.get(name), right.get(name)
        if isinstance(a, dict) and isinstance(b, dict):
            if found := difference(a, b):
                return f"{name}.{found[0]}", *found[1:]
        elif a != b:
            return name, a, b
    return None


@functools.partial(jax.jit, static_argnames="layout", donate_argnames=("state", "parking"))
def _record(
    state: TieredState,
    parking: Parking,
    numbers: Int32[Array, "3"],
    sequence: Sequences,
    traffic: Traffic,
    *,
    layout: CacheLayout,
) -> tuple[TieredState, Parking, Int32[Array, " P"], Int32[Array, " P"], Int32[Array, ""], Int32[Array, ""]]:
    """Takes place and blocks. `numbers`: tokens, host pages, pages lost; `sequence` and `traffic` have one row."""
    traces["images.record"] += 1
    length, num_host, pages_lost = numbers
    num_pages, num_sealed = -(-length // layout.page_tokens), length // layout.page_tokens
    ledger, lot, parked, host, place, status = parking_ledger.record(
        state.ledger, parking.ledger, num_pages, num_sealed, num_host, pages_lost
    )
    row = jnp.where(status == Status.OK, place, layout.parking_places)
    maps = tuple(forget_host_blocks(m, host, layout.page_entries) for m in state.hot_maps)
    parking = parking.replace(
        ledger=lot,
        sequences=move_row(sequence, jnp.int32(0), parking.sequences, row),
        traffic=move_row(traffic, jnp.int32(0), parking.traffic, row),
    )
    return state.replace(ledger=ledger, hot_maps=maps), parking, parked, host, place, status


@functools.partial(jax.jit, donate_argnames="pool")
def _load(
    pool: UInt8[Array, "H page_bytes"],
    pages: UInt8[Array, "M1 page_bytes"],
    source: Int32[Array, " M"],
    destination: Int32[Array, " M"],
) -> UInt8[Array, "H page_bytes"]:
    """`pool[destination[i]] = pages[source[i]]`, in place; ids in pinned host memory, 0 copies nothing."""
    traces["images.load"] += 1
    return ffi.backup_pages(pool, pages, source, destination, offset=0, layer="import")[0]


@functools.partial(jax.jit, donate_argnames="pages")
def _unload(
    pool: UInt8[Array, "H page_bytes"],
    pages: UInt8[Array, "M1 page_bytes"],
    source: Int32[Array, " M"],
    destination: Int32[Array, " M"],
) -> UInt8[Array, "M1 page_bytes"]:
    """`pages[destination[i]] = pool[source[i]]`; likewise. The pool is read and stays."""
    traces["images.unload"] += 1
    return ffi.restore_pages(pool, pages, source, destination, offset=0, layer="export")[1]


class _Cache(NamedTuple):
    """Pages of one layer: `offset` is where they stand in a parking block of their group."""

    name: str
    spec: CompressedSpec
    offset: int


def _groups(layout: CacheLayout, *roles: str) -> list[list[_Cache]]:
    return [
        [_Cache(name, _compressed(spec), place.offset) for name, spec, place in zip(g.names, g.specs, g.places, strict=True)]
        for g in layout.groups
        if g.role in roles
    ]


def _compressed(spec: CacheSpec) -> CompressedSpec:
    assert isinstance(spec, CompressedSpec), spec
    return spec


def _c4_caches(layout: CacheLayout) -> list[_Cache]:
    return _groups(layout, "source")[0]


def _base_caches(layout: CacheLayout) -> list[list[_Cache]]:
    """By base group."""
    return _groups(layout, "indexer", "c128")


def _caches(layout: CacheLayout) -> list[_Cache]:
    """All that have pages, by name."""
    return sorted([*_c4_caches(layout), *(cache for group in _base_caches(layout) for cache in group)])


def _chunk_pages(layout: CacheLayout) -> int:
    return min(CHUNK_PAGES, layout.max_pages)


def _one_row(like, values):
    """A tree as `like` with one row: `values`, by leaf."""
    leaves, tree = jax.tree.flatten(like)
    return jax.tree.unflatten(tree, [np.array([value], x.dtype) for value, x in zip(values, leaves, strict=True)])


class _RefusedMemoryError(Exception):
    """There was no memory for a chunk on its way."""


def _stage(pages: Pages, blocks: np.ndarray, size: int) -> Iterator[tuple[Array, Array, Array]]:
    """Operands of `_load`, `size` pages at a time."""
    for begin in range(0, len(blocks), size):
        part = pages[begin : begin + size]
        try:
            rows = np.zeros((size + 1, pages.shape[1]), np.uint8)
            rows[1 : len(part) + 1] = part
            near, far = _ids(blocks[begin : begin + size], size)
            staged = jax.block_until_ready(jax.device_put(rows)), near, far
        except MemoryError as error:
            raise _RefusedMemoryError from error
        except jax.errors.JaxRuntimeError as error:
            if "RESOURCE_EXHAUSTED" not in str(error):
                raise
            raise _RefusedMemoryError from error
        yield staged


def _read(pool: UInt8[Array, "H page_bytes"], blocks: np.ndarray, size: int) -> Pages:
    """Pages `blocks` of a pool, `size` at a time."""
    whole = np.empty((len(blocks), pool.shape[1]), np.uint8)
    for begin in range(0, len(blocks), size):
        part = whole[begin : begin + size]
        near, far = _ids(blocks[begin : begin + size], size)
        part[:] = np.asarray(_unload(pool, jnp.zeros((size + 1, pool.shape[1]), jnp.uint8), far, near))[1 : len(part) + 1]
    return whole


def _ids(blocks: np.ndarray, size: int) -> tuple[Array, Array]:
    """Rows 1, 2, ... of a chunk and the blocks they pair with, padded with the null block."""
    padded = np.zeros((2, size), np.int32)
    padded[:, : len(blocks)] = np.arange(1, len(blocks) + 1), blocks
    return ffi.pinned_ids(padded[0]), ffi.pinned_ids(padded[1])


def _blank_unwritten(
    pages: dict[str, Pages], snapshot: UInt8[np.ndarray, " snapshot_bytes"], length: int, layout: CacheLayout
) -> None:
    """Zeroes what a request of `length` tokens has not written: leftovers of others must not leave the process."""
    for cache in _caches(layout):
        row, entries, array = cache.spec.row, cache.spec.entries, pages[cache.name]
        array[:, row.scale_offset(entries, entries) :] = 0
        if tail := length % layout.page_tokens:
            written, last = tail // cache.spec.ratio, array[-1]
            last[row.value_offset(written) : row.value_offset(entries)] = 0
            last[row.scale_offset(written, entries) : row.scale_offset(entries, entries)] = 0
    begin = 0
    for x in jax.tree.leaves(jax.eval_shape(lambda: init_layer_states(layout))):
        end = begin + math.prod(x.shape[1:]) * x.dtype.itemsize
        snapshot[begin:end].reshape(x.shape[1], -1)[length:] = 0  # a ring: position p at p mod rows
        begin = end
