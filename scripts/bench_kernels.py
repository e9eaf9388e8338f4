"""How long does each kernel of the tiers take, beside its target, its peer, and what memory and link allow?

Every variant of every op is compared with its reference first, then timed; a variant that loses, or fails, stays in the
table. One sample is one compiled program of many launches in a row, each on random data of its own that is drawn anew
for every sample; a sample's time is divided by its launches and nothing is subtracted (so the dispatch of one program is
shared by its launches). Medians of 20 samples. Compilation and drawing stand apart. The table for people goes to stderr;
the last line of stdout is JSON. On a CPU only `xla` runs, with tiny shapes: a check that the script works.

    .venv/bin/python scripts/bench_kernels.py
    .venv/bin/python scripts/bench_kernels.py --only gather --launches 64
"""

import dataclasses
import functools
import json
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import tyro
from rich.console import Console
from rich.table import Table

from hisparse_jax import ffi, pages
from hisparse_jax.host_memory import make_host_pool
from hisparse_jax.rows import Fp8EntryRows, PlainRows, RowFormat
from pallas_kernels import copy_pages, cuda_kernels, gather_rows, ref, resolve_topk, store_entry, topk_select
from pallas_kernels.host_pool import IMPLEMENTATIONS
from pallas_kernels.windows import row_parts

stderr = Console(stderr=True, width=200)

LINK = 52e9
"""Bytes a second over PCIe: scattered stores by the GPU, and large DMA, reach 49 to 55e9 on an H200."""
HBM = 4.8e12
"""Bytes a second of an H200's memory, by its datasheet."""
FP8 = Fp8EntryRows("fp8", 512, 576, 8, "bfloat16", 576)
BF16 = PlainRows("bf16", 512, 1_024, 0, "bfloat16")
ENTRIES = 64
OPTIONS = {
    "default": {},
    "graph": {
        "xla_gpu_graph_min_graph_size": 1,
        "xla_gpu_enable_command_buffer": "FUSION,CUSTOM_CALL,WHILE,DYNAMIC_SLICE_FUSION",
    },
    "stream": {"xla_gpu_enable_command_buffer": ""},
}


@dataclasses.dataclass(frozen=True)
class Args:
    only: str = ""
    """Run the cases whose name contains this."""
    quick: bool = False
    """5 samples and few launches each."""
    samples: int = 20
    """Samples of each variant."""
    launches: int = 64
    """Launches in one sample, at most; slow variants get fewer."""
    options: str = "default"
    """XLA's use of CUDA graphs: default (runs of 5 and more), graph (everything), stream (none)."""
    budget: float = 0
    """Seconds after which no further variant is begun; 0: no limit."""
    seed: int = 0


@dataclasses.dataclass(frozen=True)
class Case:
    """One line of figures: the work of one launch, and how each variant does it.

    A variant is `step(fixed, state, inputs) -> (state, outputs)`: `fixed` is only read, the state is donated. `init` makes a
    new state; `draw(key, launches)` gives one tuple of inputs per launch. `check(run)` raises where the variant is wrong.
    """

    name: str
    shape: str
    variants: dict[str, Callable]
    init: Callable[[], Any]
    draw: Callable[[jax.Array, int], tuple]
    check: Callable[[Callable], None] | None = None
    floor_us: float | None = None
    num_bytes: int = 0
    """Bytes over the link of one launch, for the GB/s column."""
    first: str = ""
    then: str = ""
    peer: str = ""
    fixed: Callable[[], Any] = lambda: None
    most: int = 1 << 20
    """Launches in a sample, at most."""
    slow: tuple[str, ...] = ("xla",)
    """Variants that take 8 launches a sample."""


@dataclasses.dataclass(frozen=True)
class Sizes:
    """The V4 shapes, or tiny ones for a machine without a GPU."""

    requests: int = 64
    top_k: int = 512
    slots: int = 4_096
    num_pages: int = 512
    layers_in_block: int = 6
    layer: int = 1
    backup_layers: int = 21
    backup_pages: int = 128

    @property
    def host_blocks(self) -> int:
        return 1 + self.requests * self.num_pages

    @property
    def entries(self) -> int:
        return self.num_pages * ENTRIES

    @property
    def hot_pages(self) -> int:
        return -(-self.slots // ENTRIES)


TINY = Sizes(requests=2, top_k=64, slots=256, num_pages=8, layers_in_block=2, backup_layers=2, backup_pages=2)


def on_gpu() -> bool:
    return jax.default_backend() == "gpu"


def variants_of(module) -> tuple[str, ...]:
    """What an op's module offers here: everything on a GPU, `xla` elsewhere."""
    offered = getattr(module, "IMPLEMENTATIONS", IMPLEMENTATIONS)
    if not on_gpu():
        return ("xla",)
    name = module.__name__.rsplit(".", 1)[-1]
    return tuple(v for v in offered if v != "cuda" or name in cuda_kernels.registered())


def movers() -> tuple[str, ...]:
    """Implementations of the ops on the host pool: XLA's would move the whole pool on CUDA."""
    return (
        tuple(v for v in ("pallas", "cuda") if v == "pallas" or "gather_rows" in cuda_kernels.registered())
        if on_gpu()
        else ("xla",)
    )


# Inputs


@functools.cache
def random_pages(blocks: int, page_bytes: int) -> np.ndarray:
    return np.random.default_rng(0).integers(0, 2**63, (blocks, page_bytes // 8), np.int64).view(np.uint8)


def host_pool(blocks: int, page_bytes: int) -> jax.Array:
    """A new pool of random bytes."""
    like = make_host_pool(1, page_bytes)
    pool = jax.device_put(random_pages(blocks, page_bytes), like.sharding)
    if not on_gpu():  # numpy's own memory there: see make_host_pool
        pool = jax.jit(lambda x: x, donate_argnums=0, out_shardings=like.sharding)(pool)
    return jax.block_until_ready(pool)


@functools.cache
def the_pool(s: Sizes, fmt: RowFormat) -> jax.Array:
    """The pool that is only read: 64 requests of 32,768 entries, 1.2 GB of fp8 rows."""
    return host_pool(s.host_blocks, fmt.page_bytes(ENTRIES))


def some(key: jax.Array, *shape: int, count: int, low: int, high: int) -> jax.Array:
    """`count` distinct numbers of `low ... high - 1` in each of `shape` rows, in random order."""
    order = jnp.argsort(jax.random.uniform(key, (*shape, high - low)), axis=-1)
    return low + order[..., :count].astype(jnp.int32)


@functools.partial(jax.jit, static_argnames=("batch", "top_k", "missing", "entries", "slots"))
def selections(key, first_step, steps, *, batch: int, top_k: int, missing: int, entries: int, slots: int):
    """Top-k indices of consecutive steps with exactly `missing` misses each, `i32[steps, batch, top_k]`, ascending.

    A request visits its entries in a random order of its own: a step selects the next `missing`, which were never loaded or
    were evicted long ago, and the rest among the last `slots - top_k`, which exact LRU still holds.
    """
    window = slots - top_k
    order = jax.vmap(lambda k: jax.random.permutation(k, entries))(jax.random.split(jax.random.key(7), batch))

    def step(i):
        begin = (first_step + i) * missing
        back = 1 + some(jax.random.fold_in(key, i), batch, count=top_k - missing, low=0, high=window)
        new = jnp.broadcast_to(begin + jnp.arange(missing), (batch, missing))
        at = jnp.concatenate((new, begin - back), axis=1) % entries
        return jnp.sort(jnp.take_along_axis(order, at, axis=1), axis=1).astype(jnp.int32)

    return jax.lax.map(step, steps)


def initial_map(s: Sizes, batch: int, host: np.ndarray) -> tuple[jax.Array, jax.Array]:
    """Every slot full, the oldest first: the entries that `selections` visited before step 0."""
    keys = jax.random.split(jax.random.key(7), batch)
    order = np.asarray(jax.vmap(lambda k: jax.random.permutation(k, s.entries))(keys))
    held = order[:, (np.arange(s.slots) - s.slots) % s.entries]
    slot_host = np.take_along_axis(host, held // ENTRIES, axis=1) * ENTRIES + held % ENTRIES
    lru = jnp.broadcast_to(jnp.arange(s.slots, dtype=jnp.int16), (batch, s.slots))
    return jnp.asarray(slot_host, jnp.int32), lru + jnp.int16(0)


def host_table(s: Sizes, batch: int) -> np.ndarray:
    """Each request owns 512 host blocks side by side in no order: the pool as allocation leaves it."""
    rng = np.random.default_rng(3)
    return np.stack([1 + i * s.num_pages + rng.permutation(s.num_pages) for i in range(batch)]).astype(np.int32)


# Cases


def topk_cases(s: Sizes) -> Iterator[Case]:
    shapes = (
        (64, 32_768, 512, "18", "9", "9.0"), (64, 8_192, 512, "9", "4.5", "4.5"), (64, 262_144, 512, "116", "58", "58.1"),
        (64, 32_768, 1_024, "20", "10", "9.9"), (1, 32_768, 512, "", "", "8.4"),
    )  # fmt: skip
    for batch, size, k, first, then, peer in shapes if on_gpu() else ((2, 256, 64, "", "", ""),):

        def draw(key, launches, batch=batch, size=size):
            return tuple((jax.random.normal(jax.random.fold_in(key, i), (batch, size)),) for i in range(launches))

        def step(fixed, state, inputs, variant, batch=batch, size=size, k=k):
            lengths = jnp.full(batch, size, jnp.int32)
            return state, topk_select.topk_select(inputs[0], lengths, k, implementation=variant)

        def check(run, batch=batch, size=size, k=k):
            scores = jnp.round(jax.random.normal(jax.random.key(1), (batch, size)) * 64) / 64  # ties
            _, got = run(None, (scores,))
            want = jax.jit(ref.topk_select, static_argnums=2)(scores, jnp.full(batch, size, jnp.int32), k)
            np.testing.assert_array_equal(got, want)

        yield Case(
            "topk_select", f"[{batch}, {size:,}] k {k}",
            {v: functools.partial(step, variant=v) for v in variants_of(topk_select)},
            lambda: jnp.zeros(()), draw, check, floor_us=batch * size * 4 / HBM * 1e6, first=first, then=then, peer=peer,
        )  # fmt: skip


def resolve_static(s: Sizes) -> dict[str, int]:
    return dict(page_entries=ENTRIES, row_step=ENTRIES * s.layers_in_block, num_host_blocks=s.host_blocks)


def hot_table(s: Sizes, batch: int) -> jax.Array:
    return 1 + jnp.arange(batch * s.hot_pages, dtype=jnp.int32).reshape(batch, s.hot_pages)


def resolver(s: Sizes, batch: int, host: np.ndarray, variant: str, *, resident: bool = False) -> Callable:
    """`resolve(topk, slot_host, lru) -> Resolution` of one batch, everything lost or everything resident."""
    nothing = jnp.zeros((batch, s.num_pages), jnp.int32)
    on_device = 1 + jnp.arange(batch * s.num_pages, dtype=jnp.int32).reshape(batch, s.num_pages)
    full, valid = jnp.full((batch, 1), s.entries, jnp.int32), jnp.ones((batch, 1), bool)
    tables = on_device if resident else nothing, jnp.asarray(host), hot_table(s, batch)

    def run(topk, slot_host, lru):
        first_new = jnp.full(batch, s.entries, jnp.int32)
        return resolve_topk.resolve_topk(
            topk[:, None], full, valid, first_new, *tables, slot_host, lru, implementation=variant, **resolve_static(s)
        )  # fmt: skip

    return run


def resolve_cases(s: Sizes) -> Iterator[Case]:
    for batch, resident, first, then, peer in (
        (s.requests, False, "20", "10", "20.1"), (1, False, "15", "6", "14.7"), (s.requests, True, "5", "3", ""),
    ):  # fmt: skip
        host = host_table(s, batch)

        def draw(key, launches, batch=batch):
            sizes = dict(batch=batch, top_k=s.top_k, missing=0, entries=s.entries, slots=s.slots)
            picked = selections(key, 0, jnp.arange(launches), **sizes)
            return tuple((topk,) for topk in picked)

        def step(fixed, state, inputs, variant, batch=batch, host=host, resident=resident):
            result = resolver(s, batch, host, variant, resident=resident)(inputs[0], *state)
            return (result.slot_host, result.lru), result[:-2]

        def check(run, batch=batch, host=host, draw=draw, resident=resident):
            state, (topk,) = initial_map(s, batch, host), draw(jax.random.key(5), 1)[0]
            want = jax.jit(resolver(s, batch, host, "xla", resident=resident))(topk, *state)
            assert int(want.num_misses.sum()) == 0 and int(want.counts[:, 4].sum()) == 0, want.counts
            (slot_host, lru), rest = run(state, (topk,))
            for got, expected in zip((*rest, slot_host, lru), want):
                np.testing.assert_array_equal(got, expected)

        yield Case(
            "resolve_resident" if resident else "resolve", f"B {batch} K {s.top_k} S {s.slots:,}",
            {v: functools.partial(step, variant=v) for v in variants_of(resolve_topk)},
            functools.partial(initial_map, s, batch, host), draw, check,
            floor_us=batch * (8 * s.top_k + (0 if resident else 6 * s.slots)) / HBM * 1e6,
            first=first, then=then, peer=peer,
        )  # fmt: skip


def slab_of(s: Sizes, batch: int, fmt: RowFormat) -> jax.Array:
    return jnp.full((1 + batch * s.hot_pages, s.layers_in_block * fmt.page_bytes(ENTRIES)), 0xA5, jnp.uint8)


def gather_place(s: Sizes, fmt: RowFormat) -> dict[str, int]:
    return dict(
        value_bytes=fmt.value_bytes, scale_bytes=fmt.scale_bytes, page_entries=ENTRIES,
        offset=s.layer * fmt.page_bytes(ENTRIES), row_step=ENTRIES * s.layers_in_block,
    )  # fmt: skip


def check_rows(s: Sizes, pool, slab, host_rows, dest_rows, fmt: RowFormat) -> None:
    """Every planned row of the slab equals its host row, read by numpy; bytes beside them are untouched."""
    place = gather_place(s, fmt)
    host_rows, dest_rows = np.asarray(host_rows).reshape(-1), np.asarray(dest_rows).reshape(-1)
    planned = (host_rows >= 0) & (dest_rows >= 0)
    host_rows, dest_rows = jnp.asarray(host_rows[planned]), jnp.asarray(dest_rows[planned])
    got = pages.read_rows(slab, dest_rows, fmt, page_entries=ENTRIES, offset=place["offset"], row_step=place["row_step"])
    block, slot = np.divmod(np.asarray(host_rows), ENTRIES)
    whole = np.asarray(pool)
    parts = [(base + width * slot, width) for _, base, width in row_parts(fmt.value_bytes, fmt.scale_bytes, ENTRIES)]
    want = np.concatenate([whole[block[:, None], at[:, None] + np.arange(width)] for at, width in parts], axis=1)
    np.testing.assert_array_equal(got, want)
    blank = jnp.full((host_rows.size, fmt.row_bytes), 0xA5, jnp.uint8)
    rest = pages.write_rows(slab, dest_rows, blank, fmt, page_entries=ENTRIES, offset=place["offset"], row_step=place["row_step"])
    assert bool((rest == 0xA5).all()), "bytes beside the rows changed"


def gather_cases(s: Sizes) -> Iterator[Case]:
    """Rows alone, by a plan that stands: what the link and the copy cost."""
    for fmt, batch, percent, targets in (
        (FP8, s.requests, 5, ("", "", "27")), (FP8, s.requests, 10, ("", "", "48")), (FP8, s.requests, 20, ("", "", "87")),
        (FP8, s.requests, 100, ("", "", "")), (FP8, 1, 20, ("", "", "")), (FP8, 1, 100, ("", "", "")),
        (BF16, s.requests, 10, ("", "", "")),
    ):  # fmt: skip
        missing = max(1, s.top_k * percent // 100)

        def draw(key, launches, batch=batch, missing=missing):
            return plans(key, launches, s, batch, missing)

        def step(fixed, state, inputs, variant, fmt=fmt, blocks=None):
            how: dict[str, Any] = dict(implementation=variant, num_programs=blocks)
            return gather_rows.gather_rows(fixed, state, *inputs, **how, **gather_place(s, fmt)), ()

        def init(fmt=fmt, batch=batch):
            return slab_of(s, batch, fmt)

        def check(run, fmt=fmt, draw=draw, init=init):
            host_rows, dest_rows = plan = draw(jax.random.key(11), 1)[0]
            slab, _ = run(init(), plan)
            check_rows(s, the_pool(s, fmt), slab, host_rows, dest_rows, fmt)

        variants = {v: functools.partial(step, variant=v) for v in movers()}
        if "cuda" in variants and batch > 1 and percent in (5, 20):
            for blocks in (66, 132, 528, 1_056):
                variants[f"cuda/{blocks}"] = functools.partial(step, variant="cuda", blocks=blocks)
        count = batch * missing * fmt.row_bytes
        yield Case(
            "gather", f"{fmt.name} B {batch}, {percent} % of {s.top_k} missing", variants, init, draw, check,
            floor_us=count / LINK * 1e6, num_bytes=count, peer=f"link {targets[2]}" if targets[2] else "", slow=(),
            fixed=functools.partial(the_pool, s, fmt),
        )  # fmt: skip


@functools.partial(jax.jit, static_argnames=("launches", "s", "batch", "missing"))
def plans(key, launches: int, s: Sizes, batch: int, missing: int):
    """A plan per launch, as resolve gives it: `missing` items per request in front of its K, then -1."""
    host = jnp.asarray(host_table(s, batch))
    hot = hot_table(s, batch)

    def one(key):
        keys = jax.random.split(key)
        entry = jnp.sort(some(keys[0], batch, count=missing, low=0, high=s.entries), axis=1)
        slot = some(keys[1], batch, count=missing, low=0, high=s.slots)
        host_row = jnp.take_along_axis(host, entry // ENTRIES, axis=1) * ENTRIES + entry % ENTRIES
        step = ENTRIES * s.layers_in_block
        dest_row = jnp.take_along_axis(hot, slot // ENTRIES, axis=1) * step + slot % ENTRIES
        pad = ((0, 0), (0, s.top_k - missing))
        return tuple(jnp.pad(x, pad, constant_values=-1).reshape(-1) for x in (host_row, dest_row))

    host_rows, dest_rows = jax.lax.map(one, jax.random.split(key, launches))
    return tuple((host_rows[i], dest_rows[i]) for i in range(launches))


def swap_in_cases(s: Sizes) -> Iterator[Case]:
    """Resolve and gather, the map and the slab carried from launch to launch."""
    peers = {(64, 5): "36.3", (64, 10): "58.1", (64, 20): "102.0", (16, 20): "37.2", (1, 20): "22.3"}
    goals = {
        (64, 5): ("36", "30"),
        (64, 10): ("58", "50"),
        (64, 20): ("102", "90"),
        (16, 20): ("37", "25"),
        (1, 20): ("22", "12"),
    }
    for batch, percent in peers if on_gpu() else ((2, 20),):
        host, missing = host_table(s, batch), max(1, s.top_k * percent // 100)

        at = [0]  # draws go on where the last one ended, as the state does

        def draw(key, launches, batch=batch, missing=missing, at=at):
            sizes = dict(batch=batch, top_k=s.top_k, missing=missing, entries=s.entries, slots=s.slots)
            picked = selections(key, at[0] % s.entries, jnp.arange(launches), **sizes)
            at[0] += launches
            return tuple((topk,) for topk in picked)

        def step(fixed, state, inputs, resolve, gather, batch=batch, host=host):
            slab, slot_host, lru = state
            plan = resolver(s, batch, host, resolve)(inputs[0], slot_host, lru)
            slab = gather_rows.gather_rows(
                fixed, slab, plan.host_rows.reshape(-1), plan.dest_rows.reshape(-1), implementation=gather, **gather_place(s, FP8)
            )  # fmt: skip
            return (slab, plan.slot_host, plan.lru), (plan.rows, plan.num_misses)

        def init(batch=batch, host=host, at=at):
            at[0] = 0
            return slab_of(s, batch, FP8), *initial_map(s, batch, host)

        def check(run, batch=batch, host=host, draw=draw, init=init, missing=missing):
            state, (topk,) = init(), draw(jax.random.key(5), 1)[0]
            want = jax.jit(resolver(s, batch, host, "xla"))(topk, *state[1:])
            assert (np.asarray(want.num_misses) == missing).all(), want.num_misses
            (slab, slot_host, lru), (rows, _) = run(state, (topk,))
            for got, expected in ((rows, want.rows), (slot_host, want.slot_host), (lru, want.lru)):
                np.testing.assert_array_equal(got, expected)
            check_rows(s, the_pool(s, FP8), slab, want.host_rows, want.dest_rows, FP8)

        resolvers = [v for v in variants_of(resolve_topk) if v != "xla"] or ["xla"]
        pairs = {f"{r} + {g}": functools.partial(step, resolve=r, gather=g) for r in resolvers for g in movers()}
        count, (first, then) = batch * missing * FP8.row_bytes, goals.get((batch, percent), ("", ""))
        yield Case(
            "resolve+gather", f"B {batch}, {percent} % of {s.top_k} missing", pairs, init, draw, check,
            floor_us=count / LINK * 1e6, num_bytes=count, first=first, then=then, peer=peers.get((batch, percent), ""), slow=(),
            fixed=functools.partial(the_pool, s, FP8),
        )  # fmt: skip


def store_cases(s: Sizes) -> Iterator[Case]:
    """One decode step's new rows, every request with one: on the slab, on the host, on both."""
    batch, host_rows = s.requests, (s.host_blocks - 1) * ENTRIES
    place = dict(page_entries=ENTRIES, offset=s.layer * FP8.page_bytes(ENTRIES), row_step=ENTRIES * s.layers_in_block)
    sizes = dict(value_bytes=FP8.value_bytes, scale_bytes=FP8.scale_bytes, page_entries=ENTRIES)

    @functools.partial(jax.jit, static_argnames="launches")
    def draw(key, launches):
        def one(key):
            keys = jax.random.split(key, 3)
            data = jax.random.bits(keys[0], (batch, FP8.row_bytes), jnp.uint8)
            at = jax.random.randint(keys[1], (batch,), 0, host_rows // batch) + jnp.arange(batch) * (host_rows // batch)
            slab_rows = (1 + jnp.arange(batch)) * place["row_step"] + jax.random.randint(keys[2], (batch,), 0, ENTRIES)
            return data, (ENTRIES + at).astype(jnp.int32), slab_rows.astype(jnp.int32)

        drawn = jax.lax.map(one, jax.random.split(key, launches))
        return tuple(tuple(x[i] for x in drawn) for i in range(launches))

    def init():
        return host_pool(s.host_blocks, FP8.page_bytes(ENTRIES)), slab_of(s, batch, FP8)

    def step(fixed, state, inputs, slab_too, variant):
        (pool, slab), (data, where, rows) = state, inputs
        if slab_too:
            slab = pages.write_rows(slab, rows, data, FP8, **place)
        if variant:
            pool = store_entry.store_entry(pool, data, where, implementation=variant, **sizes)
        return (pool, slab), ()

    def check(run):
        inputs = draw(jax.random.key(2), 1)[0]
        (pool, _), _ = run(init(), inputs)
        data, where, _ = (np.asarray(x) for x in inputs)
        block, slot = np.divmod(where, ENTRIES)
        rows = np.asarray(FP8.split_page(jnp.asarray(np.asarray(pool)[block]), ENTRIES))[np.arange(batch), slot]
        np.testing.assert_array_equal(rows, data)

    shape, count = f"B {batch}, one layer", batch * FP8.row_bytes
    common: dict[str, Any] = dict(init=init, draw=draw, slow=())
    alone = {v: functools.partial(step, slab_too=False, variant=v) for v in movers()}
    both = {v: functools.partial(step, slab_too=True, variant=v) for v in movers()}
    yield Case("slab store", shape, {"xla": functools.partial(step, slab_too=True, variant=None)}, **common)
    yield Case(
        "store_entry", shape, alone, check=check, floor_us=count / LINK * 1e6, num_bytes=count, first="5", then="1", **common
    )
    yield Case("slab store + store_entry", shape, both, check=check, first="slab + 5", then="slab + 1", num_bytes=count, **common)


def backup_cases(s: Sizes) -> Iterator[Case]:
    """Whole scattered pages to the host: by the FFI call, whose ids the host knows, and by the kernel that reads device ids."""
    page, blocks = FP8.page_bytes(ENTRIES), 2_048 if on_gpu() else 16
    for layers, first, then in ((1, "28 GB/s", "50 GB/s"), (s.backup_layers, "45 GB/s", "52 GB/s")):
        rng = np.random.default_rng(layers)

        def init(layers=layers):
            slab = jax.random.bits(jax.random.key(0), (blocks, layers * page), jnp.uint8)
            return slab, tuple(host_pool(blocks, page) for _ in range(layers))

        def draw(_, launches, rng=rng):
            pairs = [[1 + rng.permutation(blocks - 1)[: s.backup_pages] for _ in range(2)] for _ in range(launches)]
            return tuple(tuple(ffi.pinned_ids(ids) for ids in pair) for pair in pairs)

        def draw_on_device(_, launches, rng=rng):
            pairs = [[1 + rng.permutation(blocks - 1)[: s.backup_pages] for _ in range(2)] for _ in range(launches)]
            return tuple(tuple(jnp.asarray(ids, jnp.int32) for ids in pair) for pair in pairs)

        def by_ffi(fixed, state, inputs):
            slab, pools = state
            done = []
            for i, pool in enumerate(pools):
                pool, slab = ffi.backup_pages(pool, slab, *inputs, offset=i * page)
                done.append(pool)
            return (slab, tuple(done)), ()

        def by_kernel(fixed, state, inputs, variant):
            slab, pools = state
            copy = functools.partial(copy_pages.copy_pages, page_bytes=page, implementation=variant)
            return (slab, tuple(copy(pool, slab, *inputs, offset=i * page) for i, pool in enumerate(pools))), ()

        def check(run, init=init, draw=draw, layers=layers):
            source, destination = inputs = draw(None, 1)[0]
            state = init()
            pages_of = np.asarray(state[0][np.array(source, copy=True)])
            (_, pools), _ = run(state, inputs)
            for i, pool in enumerate(pools):
                for at, block in enumerate(np.array(destination, copy=True)[:8]):
                    np.testing.assert_array_equal(np.asarray(pool)[block], pages_of[at, i * page : (i + 1) * page])

        def forced(way):
            def run(fixed, state, inputs):
                return by_ffi(fixed, state, inputs)

            run.environment = {"HISPARSE_PAGE_COPIES": way}  # pyright: ignore[reportFunctionMemberAccess]
            return run

        ways = {f"ffi/{way}": forced(way) for way in ("each", "batch", "kernel")} if on_gpu() else {}
        count = layers * s.backup_pages * page
        shape = f"{s.backup_pages} scattered pages, {layers} layers"
        common: dict[str, Any] = dict(
            floor_us=count / LINK * 1e6, num_bytes=count, first=first, then=then, peer="20-28 GB/s" if layers == 1 else ""
        )
        names = {"ffi": by_ffi} | ways
        yield Case("page backup", shape, names, init, draw, check, slow=tuple(names), **common)
        kernels = {v: functools.partial(by_kernel, variant=v) for v in movers()}
        on_device = functools.partial(check, draw=draw_on_device)
        yield Case("copy_pages", shape, kernels, init, draw_on_device, on_device, slow=tuple(kernels), **common)


# Running


def cases(s: Sizes) -> Iterator[Case]:
    for make in (swap_in_cases, topk_cases, resolve_cases, store_cases, backup_cases, gather_cases):
        yield from make(s)


def run(case: Case, variant: str, args: Args) -> dict[str, Any]:
    """Checks one variant, then times it."""
    step = case.variants[variant]
    launches = 2 if not on_gpu() else min(args.launches, case.most, 8 if variant in case.slow else case.most)
    samples = 2 if not on_gpu() else args.samples
    options = OPTIONS[args.options] if on_gpu() else {}
    environment = getattr(step, "environment", {})
    os.environ.update(environment)
    try:
        fixed, state = case.fixed(), case.init()
        shardings = jax.tree.map(lambda x: x.sharding, state)
        if case.check:
            one = jax.jit(step, donate_argnums=1, out_shardings=(shardings, None))
            case.check(functools.partial(one, fixed))

        def many(fixed, state, batch):
            outputs = []
            for inputs in batch:
                state, out = step(fixed, state, inputs)
                outputs.append(out)
            return state, outputs

        state = case.init()
        program = jax.jit(many, donate_argnums=1, out_shardings=(shardings, None), compiler_options=options)
        refill = jax.jit(lambda old, new: jax.lax.optimization_barrier(new), donate_argnums=0, keep_unused=True)
        inputs = case.draw(jax.random.key(args.seed), launches)
        pinned = any(x.sharding.memory_kind == "pinned_host" for x in jax.tree.leaves(inputs))
        begin = time.perf_counter()
        state, out = jax.block_until_ready(program(fixed, state, inputs))
        compiling, times = time.perf_counter() - begin, []
        del out
        for sample in range(-2, samples):
            new = case.draw(jax.random.fold_in(jax.random.key(args.seed), sample + 3), launches)
            inputs = jax.block_until_ready(new if pinned else refill(inputs, new))  # the same buffers: graphs stay as they are
            jax.block_until_ready(state)
            begin = time.perf_counter()
            state, out = jax.block_until_ready(program(fixed, state, inputs))
            elapsed = time.perf_counter() - begin
            del out
            if sample >= 0:
                times.append(1e6 * elapsed / launches)
    finally:
        for name in environment:
            os.environ.pop(name, None)
    median = float(np.median(times))
    return {
        "case": case.name,
        "shape": case.shape,
        "variant": variant,
        "us": median,
        "p10": float(np.percentile(times, 10)),
        "p90": float(np.percentile(times, 90)),
        "launches": launches,
        "compile_s": compiling,
        "first": case.first,
        "then": case.then,
        "peer": case.peer,
        "gb_per_s": case.num_bytes / median / 1e3 if case.num_bytes else None,
        "floor_us": case.floor_us,
    }


def tried(case: Case, variant: str, args: Args) -> dict[str, Any]:
    """`run`, or why it failed: a broken variant is a row, not the end."""
    try:
        return run(case, variant, args)
    except Exception as error:
        stderr.print(
            f"[red]{case.name} {case.shape} {variant}[/]", "".join(traceback.format_exception(error)[-3:])[-1500:], markup=True
        )
        return {"case": case.name, "shape": case.shape, "variant": variant, "error": f"{type(error).__name__}: {error}"[:300]}


def as_table(rows: list[dict[str, Any]]) -> Table:
    table = Table(title=f"{jax.devices()[0].device_kind}, jax {jax.__version__}", title_justify="left")
    for column in ("case", "shape", "variant", "median us", "p10 - p90", "first", "then", "peer", "GB/s", "floor share"):
        table.add_column(column, justify="left" if column in ("case", "shape", "variant") else "right", no_wrap=True)
    for row in rows:
        if "error" in row:
            table.add_row(row["case"], row["shape"], row["variant"], "[red]failed[/]", row["error"][:60].replace("[", "("))
            continue
        rate = f"{row['gb_per_s']:.1f}" if row["gb_per_s"] else ""
        share = f"{row['floor_us'] / row['us']:.0%}" if row["floor_us"] else ""
        spread = f"{row['p10']:.1f} - {row['p90']:.1f}"
        goals = row["first"], row["then"], row["peer"]
        table.add_row(row["case"], row["shape"], row["variant"], f"{row['us']:.2f}", spread, *goals, rate, share)
    return table


def main(args: Args) -> int:
    if args.options not in OPTIONS:
        stderr.print(f"bench_kernels: --options {args.options} is unknown; choose from {', '.join(OPTIONS)}.")
        return 2
    if args.quick:
        args = dataclasses.replace(args, samples=5, launches=min(args.launches, 32))
    ffi.load_library()
    rows, started = [], time.perf_counter()
    for case in cases(Sizes() if on_gpu() else TINY):
        if args.only not in case.name:
            continue
        for variant in case.variants:
            begin = time.perf_counter()
            if args.budget and begin - started > args.budget:
                about = {"case": case.name, "shape": case.shape, "variant": variant}
                rows.append(about | {"error": f"not run: --budget {args.budget:.0f} s is used up"})
                continue
            rows.append(tried(case, variant, args))
            told = f"{rows[-1]['us']:.2f} us" if "us" in rows[-1] else "failed"
            stderr.print(f"{case.name}, {case.shape}, {variant}: {told} ({time.perf_counter() - begin:.1f} s)", highlight=False)
    stderr.print(as_table(rows))
    kernels = list(cuda_kernels.registered())
    device = jax.devices()[0].device_kind
    print(json.dumps({"device": device, "jax": jax.__version__, "cuda_kernels": kernels, "options": args.options, "rows": rows}))
    return 1 if any("error" in row for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main(tyro.cli(Args, description=__doc__)))
