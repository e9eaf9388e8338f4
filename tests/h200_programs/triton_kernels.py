"""Top-k selection, resolve and Sinkhorn by Pallas compile for an H200: one kernel each, map and LRU in place, nothing sorted."""

import functools

import jax.numpy as jnp
from h200 import assert_in_place, compile_for_h200, spec

from pallas_kernels.resolve_topk import resolve_topk
from pallas_kernels.sinkhorn import sinkhorn
from pallas_kernels.topk_select import topk_select


def ints(*shape: int):
    return spec(shape, jnp.int32)


def assert_one_kernel(program) -> None:
    assert program.hlo.count("__gpu$xla.gpu.triton") == 1 and "sort" not in program.hlo, program.hlo


def check_topk(rows: int, size: int, k: int, dtype=jnp.float32) -> None:
    select = functools.partial(topk_select, k=k, implementation="pallas")
    program = compile_for_h200(select, spec((rows, size), dtype), ints(rows), triton=True)
    print("topk", rows, size, k, program.stats.temp_size_in_bytes)
    assert_one_kernel(program)
    assert program.stats.temp_size_in_bytes == 0


def check_resolve(batch: int, query_rows: int, top_k: int, slots: int, pages: int = 512) -> None:
    resolve = functools.partial(resolve_topk, page_entries=64, row_step=384, num_host_blocks=87_402, implementation="pallas")
    hot_map = spec((batch, slots), jnp.int32), spec((batch, slots), jnp.int16)
    rows = ints(batch, query_rows), spec((batch, query_rows), jnp.bool_), ints(batch)
    tables = ints(batch, pages), ints(batch, pages), ints(batch, -(-slots // 64))
    program = compile_for_h200(resolve, ints(batch, query_rows, top_k), *rows, *tables, *hot_map, donate=(7, 8), triton=True)
    print("resolve", batch, query_rows, top_k, slots, program.stats.temp_size_in_bytes)
    assert_one_kernel(program)
    assert_in_place(program, *hot_map)


def check_sinkhorn(count: int, n: int) -> None:
    normalise = functools.partial(sinkhorn, iterations=20, eps=1e-6, implementation="pallas")
    program = compile_for_h200(normalise, spec((count, n, n), jnp.float32), triton=True)
    print("sinkhorn", count, n, program.stats.temp_size_in_bytes)
    assert_one_kernel(program)
    assert "while" not in program.hlo


check_sinkhorn(64, 4)
check_sinkhorn(2_049, 8)
check_topk(64, 8_192, 512)
check_topk(64, 32_768, 512)
check_topk(64, 32_768, 1_024, jnp.bfloat16)
check_topk(64, 262_144, 512)
check_resolve(64, 1, 512, 4_096)
check_resolve(16, 2, 512, 1_500)
