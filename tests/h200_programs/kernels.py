"""The ops of resolve and transfer compile for an H200 in place, alone and together inside a loop, past 2^32 bytes.

V4-Flash's layout: pages of 37,440 bytes, six layers in a block; a slab of 40 GiB, a layer's host pool of 3 GiB.
"""

import functools
import itertools
from typing import Any, cast

import jax
import jax.numpy as jnp
from h200 import Compiled, assert_in_place, compile_for_h200, copies_of, spec

from hisparse_jax import pages, transfer
from hisparse_jax.hot_map import HotMap
from hisparse_jax.rows import Fp8EntryRows, PlainRows, RowFormat
from pallas_kernels.copy_pages import copy_pages
from pallas_kernels.gather_rows import gather_rows
from pallas_kernels.store_entry import store_entry
from pallas_kernels.topk_select import topk_select

FP8 = Fp8EntryRows("fp8", 512, 576, 8, "bfloat16", 576)
BF16 = PlainRows("bf16", 512, 1_024, 0, "bfloat16")
ENTRIES, BATCH, TOP_K, SLOTS, PAGES, HOST_BLOCKS = 64, 64, 512, 1_024, 512, 87_402
SLAB = spec((191_193, 224_640), jnp.uint8)


def pool_of(fmt: RowFormat) -> jax.ShapeDtypeStruct:
    return spec((HOST_BLOCKS, fmt.page_bytes(ENTRIES)), jnp.uint8, "pinned_host")


def ints(*shape: int) -> Any:
    return spec(shape, jnp.int32)


def compiled(fn, *args, donate=()) -> Compiled:
    result = compile_for_h200(fn, *args, donate=donate, triton=True)
    print(getattr(fn, "__name__", fn), result.stats.temp_size_in_bytes)
    return result


def check_rows(fmt: RowFormat) -> None:
    """Each op that moves rows or pages updates what it returns in place and copies no pool or slab."""
    pool, rows, step = pool_of(fmt), spec((BATCH, fmt.row_bytes), jnp.uint8), 384
    row = dict(value_bytes=fmt.value_bytes, scale_bytes=fmt.scale_bytes, page_entries=ENTRIES)
    page_bytes = fmt.page_bytes(ENTRIES)
    place = dict(page_entries=ENTRIES, offset=page_bytes, row_step=step)
    gather = compiled(
        functools.partial(gather_rows, **row, offset=page_bytes, row_step=step), pool, SLAB, ints(BATCH), ints(BATCH), donate=1
    )
    store = compiled(functools.partial(store_entry, **row), pool, rows, ints(BATCH), donate=0)
    spill = functools.partial(copy_pages, offset=page_bytes, page_bytes=page_bytes)
    spill = compiled(spill, pool, SLAB, ints(BATCH), ints(BATCH), donate=0)
    for program, result in ((gather, SLAB), (store, pool), (spill, pool)):
        assert_in_place(program, result)
        assert not copies_of(program.hlo, pool, SLAB)
        kernel = "mosaic_gpu" in program.hlo or 'custom_call_target="hisparse_' in program.hlo
        assert kernel and "conditional" not in program.hlo  # nothing to choose at run time
        assert program.stats.temp_size_in_bytes == 0

    def write(slab, rows, data):
        return pages.write_rows(slab, rows, data, fmt, **place)

    def read(slab, rows, blocks):
        pages_of = dict(page_entries=ENTRIES, offset=page_bytes)
        return pages.read_rows(slab, rows, fmt, **place), pages.read_page_rows(slab, blocks, fmt, **pages_of)

    assert_in_place(compiled(write, SLAB, ints(BATCH), rows, donate=0), SLAB)
    assert not copies_of(compiled(read, SLAB, ints(BATCH, TOP_K), ints(BATCH, 8)).hlo, SLAB)


def decode_like(pool, slab, hot_map, scores, data, rows, host_rows, slab_blocks, host_blocks, lengths, new, *tables):
    """Write, back up, select, resolve, swap in, read, spill: the pool is written and read in one body, for seven steps."""
    place: dict[str, Any] = dict(page_entries=ENTRIES, offset=37_440, row_step=384)

    def body(_, carry):
        pool, slab, hot_map, seen = carry
        slab = pages.write_rows(slab, rows, data, FP8, **place)
        pool = transfer.back_up_rows(pool, data, host_rows, FP8, page_entries=ENTRIES)
        topk = topk_select(scores, lengths, TOP_K)[:, None]
        bounds, valid = lengths[:, None], lengths[:, None] > 0
        slab, resolved, hot_map = transfer.resolve_and_swap_in(
            slab, pool, topk, bounds, valid, new, *tables, hot_map=hot_map, fmt=FP8, num_host_blocks=HOST_BLOCKS, **place
        )
        slab = transfer.swap_in(slab, pool, resolved, FP8, **place)  # a follower's
        read = pages.read_rows(slab, resolved.rows, FP8, **place)
        pool = transfer.back_up_pages(pool, slab, slab_blocks, host_blocks, FP8, page_entries=ENTRIES, offset=37_440)
        return pool, slab, hot_map, seen + read.astype(jnp.int32).sum()

    return jax.lax.fori_loop(0, 7, body, (pool, slab, hot_map, jnp.int32(0)))


def check_loop() -> None:
    pool, hot_map = pool_of(FP8), HotMap(slot_host=ints(BATCH, SLOTS), lru=cast(Any, spec((BATCH, SLOTS), jnp.int16)))
    moved = [spec((BATCH, FP8.row_bytes), jnp.uint8), *itertools.repeat(ints(BATCH), 6)]
    tables = [ints(BATCH, PAGES), ints(BATCH, PAGES), ints(BATCH, SLOTS // ENTRIES)]
    scores = spec((BATCH, PAGES * ENTRIES), jnp.float32)
    program = compiled(decode_like, pool, SLAB, hot_map, scores, *moved, *tables, donate=(0, 1, 2))
    assert_in_place(program, pool, SLAB)
    assert program.stats.temp_size_in_bytes < 2**27


def check_staging() -> None:
    """A prefill chunk of 256 rows stages at most the whole history; the pool is only read."""

    def stage(pool, topk, bounds, resident, host):
        staged = transfer.stage_rows(pool, topk, bounds, resident, host, FP8, page_entries=ENTRIES)
        return staged.pages, staged.rows, staged.num_staged, staged.num_homeless

    pool = pool_of(FP8)
    program = compiled(stage, pool, ints(256, TOP_K), ints(256), ints(PAGES), ints(PAGES))
    assert not copies_of(program.hlo, pool) and program.stats.host_temp_size_in_bytes == 0
    assert program.stats.temp_size_in_bytes < 2**22


check_rows(FP8)
check_rows(BF16)
check_staging()
check_loop()
