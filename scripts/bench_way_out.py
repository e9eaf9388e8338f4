"""Benchmark cases of the way out: one step's new rows, and whole pages, to the host."""

import functools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from bench_inputs import ENTRIES, FP8, LINK, Case, Sizes, host_pool, movers, on_gpu, slab_of

from hisparse_jax import ffi, pages
from pallas_kernels import copy_pages, store_entry


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
