"""Benchmark cases of the way in: resolve, gather, and both together, at a given share of misses or by a trace."""

import dataclasses
import functools
from collections.abc import Callable, Iterator

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
    gather_place,
    host_table,
    initial_map,
    movers,
    on_gpu,
    random_pages,
    selections,
    slab_of,
    some,
    the_pool,
    variants_of,
)

from hisparse_jax import pages
from hisparse_jax.rows import RowFormat
from hisparse_jax.traces import make_trace, miss_rate_of
from pallas_kernels import cuda_kernels, gather_rows, resolve_and_gather, resolve_topk
from pallas_kernels.windows import row_parts


def resolve_static(s: Sizes) -> dict[str, int]:
    return dict(page_entries=ENTRIES, row_step=ENTRIES * s.layers_in_block, num_host_blocks=s.host_blocks)


def hot_table(s: Sizes, batch: int) -> jax.Array:
    return 1 + jnp.arange(batch * s.hot_pages, dtype=jnp.int32).reshape(batch, s.hot_pages)


def tables_of(s: Sizes, batch: int, host: np.ndarray, *, resident: bool = False) -> tuple[jax.Array, ...]:
    """What `resolve_topk` takes between the selection and the map: one query row, everything lost or everything resident."""
    nothing = jnp.zeros((batch, s.num_pages), jnp.int32)
    on_device = 1 + jnp.arange(batch * s.num_pages, dtype=jnp.int32).reshape(batch, s.num_pages)
    full, valid = jnp.full((batch, 1), s.entries, jnp.int32), jnp.ones((batch, 1), bool)
    first_new = jnp.full(batch, s.entries, jnp.int32)
    return full, valid, first_new, on_device if resident else nothing, jnp.asarray(host), hot_table(s, batch)


def resolver(s: Sizes, batch: int, host: np.ndarray, variant: str, *, resident: bool = False) -> Callable:
    """`resolve(topk, slot_host, lru) -> Resolution` of one batch."""
    tables = tables_of(s, batch, host, resident=resident)

    def run(topk, slot_host, lru):
        return resolve_topk.resolve_topk(
            topk[:, None], *tables, slot_host, lru, implementation=variant, **resolve_static(s)
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

        def step(fixed, state, inputs, variant, fmt=fmt, batch=batch, missing=missing):
            lengths = jnp.full(batch, missing, jnp.int32)
            return gather_rows.gather_rows(fixed, state, *inputs, lengths, implementation=variant, **gather_place(s, fmt)), ()

        def init(fmt=fmt, batch=batch):
            return slab_of(s, batch, fmt)

        def check(run, fmt=fmt, draw=draw, init=init):
            host_rows, dest_rows = plan = draw(jax.random.key(11), 1)[0]
            slab, _ = run(init(), plan)
            check_rows(s, the_pool(s, fmt), slab, host_rows, dest_rows, fmt)

        variants = {v: functools.partial(step, variant=v) for v in movers()}
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

    def at_once(fixed, state, inputs):
        slab, slot_host, lru = state
        sizes = resolve_static(s) | gather_place(s, FP8)
        tables = tables_of(s, batch, host)
        slab, plan = resolve_and_gather.resolve_and_gather(
            fixed, slab, inputs[0][:, None], *tables, slot_host, lru, implementation="cuda", **sizes
        )
        return (slab, plan.slot_host, plan.lru), (plan.rows[:, 0], plan.num_misses)

    def step(fixed, state, inputs, resolve, gather):
        slab, slot_host, lru = state
        plan = resolver(s, batch, host, resolve)(inputs[0], slot_host, lru)
        slab = gather_rows.gather_rows(
            fixed, slab, plan.host_rows.reshape(-1), plan.dest_rows.reshape(-1), plan.num_misses, implementation=gather,
            **gather_place(s, FP8),
        )  # fmt: skip
        return (slab, plan.slot_host, plan.lru), (plan.rows[:, 0], plan.num_misses)

    def init():
        return slab_of(s, batch, FP8), *tables()

    def check(run):
        state, (topk,) = init(), draw(jax.random.key(5), 1)[0]
        want = jax.jit(resolver(s, batch, host, "xla"))(topk, *state[1:])
        expect((None, want.num_misses))
        (slab, slot_host, lru), (rows, _) = run(state, (topk,))
        for got, expected in ((rows, want.rows[:, 0]), (slot_host, want.slot_host), (lru, want.lru)):
            np.testing.assert_array_equal(got, expected)
        check_rows(s, the_pool(s, FP8), slab, want.host_rows, want.dest_rows, FP8)

    resolvers = [v for v in variants_of(resolve_topk) if v != "xla"] or ["xla"]
    named = {f"{r} + {r}": (r, r) for r in resolvers if r in movers()}
    pairs = {name: functools.partial(step, resolve=r, gather=g) for name, (r, g) in named.items()}
    if "resolve_and_gather" in cuda_kernels.registered() and on_gpu():
        pairs = {"cuda at once": at_once} | pairs
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


def skewed_cases(s: Sizes) -> Iterator[Case]:
    """One request misses everything it selects, the others nothing: rows that one block would take alone."""
    batch, host = (s.requests, host_table(s, s.requests)) if on_gpu() else (2, host_table(s, 2))
    cold, at = jnp.arange(batch) == batch // 2, [0]

    def draw(key, launches):
        sizes, steps = dict(batch=batch, top_k=s.top_k, entries=s.entries, slots=s.slots), jnp.arange(launches)
        new = selections(key, at[0] % s.entries, steps, missing=s.top_k, **sizes)
        held = selections(key, 0, steps, missing=0, **sizes)
        at[0] += launches
        return tuple((topk,) for topk in jnp.where(cold[None, :, None], new, held))

    def tables():
        at[0] = 0
        return initial_map(s, batch, host)

    def expect(outputs):
        np.testing.assert_array_equal(np.asarray(outputs[1]), np.broadcast_to(np.asarray(cold) * s.top_k, outputs[1].shape))

    count = s.top_k * FP8.row_bytes
    yield swap_in(
        s, batch, f"B {batch}, one request misses all {s.top_k}", host=host, tables=tables, draw=draw, expect=expect,
        floor_us=count / LINK * 1e6, num_bytes=count,
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
