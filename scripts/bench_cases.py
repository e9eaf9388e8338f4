"""The kernel benchmark's cases: each op of the tiers at its V4 shapes, with its check, its targets and its peer."""

import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from bench_inputs import (
    BF16,
    ENTRIES,
    FP8,
    HBM,
    LINK,
    Case,
    Sizes,
    host_pool,
    host_table,
    initial_map,
    movers,
    on_gpu,
    random_pages,
    selections,
    some,
    the_pool,
    variants_of,
)

from hisparse_jax import ffi, pages
from hisparse_jax.rows import RowFormat
from hisparse_jax.traces import make_trace, miss_rate_of
from pallas_kernels import copy_pages, gather_rows, ref, resolve_topk, store_entry, topk_select
from pallas_kernels.windows import row_parts


def topk_cases(s: Sizes) -> Iterator[Case]:
    shapes = (
        (64, 32_768, 512, "18", "9", "9.0"), (64, 8_192, 512, "9", "4.5", "4.5"), (64, 262_144, 512, "116", "58", "58.1"),
        (64, 32_768, 1_024, "20", "10", "9.9"), (1, 32_768, 512, "", "", "8.4"),
    )  # fmt: skip
    for batch, size, k, first, then, peer in shapes if on_gpu() else ((2, 256, 64, "", "", ""),):

        def draw(key, launches, batch=batch, size=size):
            return tuple((jax.random.normal(jax.random.fold_in(key, i), (batch, size)),) for i in range(launches))

        def step(fixed, state, inputs, variant, batch=batch, size=size, k=k, ctas=None):
            lengths = jnp.full(batch, size, jnp.int32)
            return state, topk_select.topk_select(inputs[0], lengths, k, implementation=variant, ctas_per_row=ctas)

        def check(run, batch=batch, size=size, k=k):
            scores = jnp.round(jax.random.normal(jax.random.key(1), (batch, size)) * 64) / 64  # ties
            _, got = run(None, (scores,))
            want = jax.jit(ref.topk_select, static_argnums=2)(scores, jnp.full(batch, size, jnp.int32), k)
            np.testing.assert_array_equal(got, want)

        variants = {v: functools.partial(step, variant=v) for v in variants_of(topk_select)}
        if "cuda" in variants and size <= 32_768 and batch > 1:
            variants |= {f"cuda/{ctas}": functools.partial(step, variant="cuda", ctas=ctas) for ctas in (1, 2, 4)}
        yield Case(
            "topk_select", f"[{batch}, {size:,}] k {k}", variants,
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
    whole = random_pages(*pool.shape)  # what the pool was made from
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

        def step(fixed, state, inputs, variant, fmt=fmt, batch=batch, missing=missing, shape=None):
            lengths = jnp.full(batch, missing, jnp.int32)
            return gather_rows.gather_rows(
                fixed, state, *inputs, lengths, implementation=variant, **(shape or {}), **gather_place(s, fmt)
            ), ()

        def init(fmt=fmt, batch=batch):
            return slab_of(s, batch, fmt)

        def check(run, fmt=fmt, draw=draw, init=init):
            host_rows, dest_rows = plan = draw(jax.random.key(11), 1)[0]
            slab, _ = run(init(), plan)
            check_rows(s, the_pool(s, fmt), slab, host_rows, dest_rows, fmt)

        variants = {v: functools.partial(step, variant=v) for v in movers()}
        if "cuda" in variants and batch > 1 and percent in (5, 20):
            for blocks, warps, rows in ((16, 32, 2), (132, 32, 1), (264, 8, 4)):
                shape = dict(num_programs=blocks, warps=warps, rows_in_flight=rows)
                variants[f"cuda/{blocks}x{warps}x{rows}"] = functools.partial(step, variant="cuda", shape=shape)
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


def swap_in(s: Sizes, batch: int, shape: str, *, host, tables: Callable, draw: Callable, expect: Callable, **goals) -> Case:
    """Resolve and gather, the map and the slab carried from launch to launch. `tables()` gives the first map and LRU order."""

    def step(fixed, state, inputs, resolve, gather):
        slab, slot_host, lru = state
        plan = resolver(s, batch, host, resolve)(inputs[0], slot_host, lru)
        slab = gather_rows.gather_rows(
            fixed, slab, plan.host_rows.reshape(-1), plan.dest_rows.reshape(-1), plan.num_misses, implementation=gather,
            **gather_place(s, FP8),
        )  # fmt: skip
        return (slab, plan.slot_host, plan.lru), (plan.rows, plan.num_misses)

    def init():
        return slab_of(s, batch, FP8), *tables()

    def check(run):
        state, (topk,) = init(), draw(jax.random.key(5), 1)[0]
        want = jax.jit(resolver(s, batch, host, "xla"))(topk, *state[1:])
        expect((None, want.num_misses))
        (slab, slot_host, lru), (rows, _) = run(state, (topk,))
        for got, expected in ((rows, want.rows), (slot_host, want.slot_host), (lru, want.lru)):
            np.testing.assert_array_equal(got, expected)
        check_rows(s, the_pool(s, FP8), slab, want.host_rows, want.dest_rows, FP8)

    resolvers = [v for v in variants_of(resolve_topk) if v != "xla"] or ["xla"]
    named = {f"{r} + {g}": (r, g) for r, g in [*((r, r) for r in resolvers if r in movers()), (resolvers[-1], movers()[0])]}
    pairs = {name: functools.partial(step, resolve=r, gather=g) for name, (r, g) in named.items()}
    return Case(
        "resolve+gather", shape, pairs, init, draw, check, expect, slow=(), fixed=functools.partial(the_pool, s, FP8), **goals
    )


def swap_in_cases(s: Sizes) -> Iterator[Case]:
    """The same number of misses in every launch: what peers measure."""
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

        def tables(batch=batch, host=host, at=at):
            at[0] = 0
            return initial_map(s, batch, host)

        def expect(outputs, missing=missing):
            assert (np.asarray(outputs[1]) == missing).all(), "the launches miss more or fewer rows than the case says"

        count, (first, then) = batch * missing * FP8.row_bytes, goals.get((batch, percent), ("", ""))
        yield swap_in(
            s, batch, f"B {batch}, {percent} % of {s.top_k} missing", host=host, tables=tables, draw=draw, expect=expect,
            floor_us=count / LINK * 1e6, num_bytes=count, first=first, then=then, peer=peers.get((batch, percent), ""),
        )  # fmt: skip


def trace_cases(s: Sizes) -> Iterator[Case]:
    """Selections with the published locality (`hisparse_jax.traces`), at the default of twice `top_k` hot slots."""
    s, batch, steps = dataclasses.replace(s, slots=2 * s.top_k), s.requests, 448 if on_gpu() else 32
    host, rate = host_table(s, batch), miss_rate_of(2)
    trace = make_trace(steps, batch, s.top_k, s.entries, s.slots)
    held = np.take_along_axis(host, trace.held // ENTRIES, axis=1) * ENTRIES + trace.held % ENTRIES
    at = [0]

    def draw(_, launches):
        picked = [trace.topk[(at[0] + i) % steps] for i in range(launches)]
        at[0] += launches
        return tuple((jnp.asarray(topk),) for topk in picked)

    def tables():
        at[0] = 0
        lru = jnp.broadcast_to(jnp.arange(s.slots, dtype=jnp.int16), (batch, s.slots))
        return jnp.asarray(held, jnp.int32), lru + jnp.int16(0)

    def expect(outputs):
        assert abs(np.mean(outputs[1]) / s.top_k - rate) < 0.05, "the trace misses more or fewer rows than was published"

    count = int(batch * s.top_k * rate) * FP8.row_bytes
    yield swap_in(
        s, batch, f"B {batch}, trace: {rate:.1%} of {s.top_k} missing, S {s.slots:,}", host=host, tables=tables, draw=draw,
        expect=expect, floor_us=count / LINK * 1e6, num_bytes=count, most=16,
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


def cases(s: Sizes) -> Iterator[Case]:
    for make in (resolve_cases, swap_in_cases, trace_cases, store_cases, topk_cases, gather_cases, backup_cases):
        yield from make(s)
