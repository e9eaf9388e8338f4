"""The kernel of resolve, its own source, run on a CPU: adversarial steps against the oracle, with warps in any order."""

import ctypes
import pathlib

import numpy as np
import pytest
import resolve_oracle as oracle
from kernels_on_cpu import KERNELS, call, compiled, fails, without
from test_resolve import adversarial_steps, assert_outcome

HEADERS = "resolve_kernel", "resolve_request", "cuda_block"
SOURCES = {header: (KERNELS / f"{header}.h").read_text() for header in HEADERS}
BARRIERS = [
    (header, statement, number)
    for header, statement in (("resolve_kernel", "__syncthreads();"), ("cuda_block", "__syncthreads();"))
    for number in range(SOURCES[header].count(statement))
]
"""Those that are nothing but barriers; the others, which also vote, cannot be left out of the source."""


@pytest.fixture(scope="module")
def library(tmp_path_factory) -> ctypes.CDLL:
    return compiled(tmp_path_factory.mktemp("kernel"), "resolve", *HEADERS)


def resolve(library, tables, slot_host, lru, *, page_entries: int, row_step: int, num_host_blocks: int, seed: int):
    """`resolve_topk` by the kernel of a library: results by name; `slot_host` and `lru` are changed."""
    topk, *_, host, hot = tables
    batch, query_rows, top_k = topk.shape
    shapes = dict(
        rows=(query_rows, top_k), num_valid=(query_rows,), host_rows=(query_rows * top_k,), dest_rows=(query_rows * top_k,),
        slots=(query_rows * top_k,), num_misses=(), counts=(5,), num_homeless=(),
    )  # fmt: skip
    results = {name: np.full((batch, *shape), -77, np.int32) for name, shape in shapes.items()}
    sizes = [
        batch, query_rows, top_k, host.shape[1], hot.shape[1], lru.shape[1], page_entries, row_step, num_host_blocks, seed,
    ]  # fmt: skip
    call(library.resolve, *tables, *results.values(), slot_host, lru, np.asarray(sizes, np.int64))
    return results


def run_against_the_oracle(library, query_rows, top_k, num_slots, entries, num_steps, seeds=(1,)):
    batch, num_pages = 3, max(6, 2 * num_slots // entries)
    static = dict(row_step=2 * entries + 1, num_host_blocks=10 * num_pages)
    rng = np.random.default_rng([query_rows, top_k, num_slots])
    steps = adversarial_steps(rng, num_steps, batch, query_rows, top_k, num_slots, num_pages, entries, static["num_host_blocks"])
    regions = [oracle.HotRegion(num_slots) for _ in range(batch)]
    for t in range(num_steps):
        *tables, reset, recycled = (np.ascontiguousarray(values[t]) for values in steps)
        for b in range(batch):
            regions[b] = oracle.HotRegion(num_slots) if reset[b] else regions[b]
            regions[b].forget(set(recycled.tolist()) - {0}, entries)
        maps = [np.array([of(region) for region in regions], kind) for of, kind in TABLES]
        runs = [[array.copy() for array in maps] for _ in seeds]
        results = [resolve(library, tables, *run, page_entries=entries, **static, seed=seed) for run, seed in zip(runs, seeds)]
        lists = [table.tolist() for table in tables]
        for b in range(batch):
            outcome = oracle.step(regions[b], *(table[b] for table in lists), entries=entries, **static)
            for result, run in zip(results, runs):
                assert_outcome({name: values[b] for name, values in result.items()}, outcome)
                assert result["num_valid"][b].tolist() == [sum(row >= 0 for row in line) for line in outcome.rows]
                assert [array[b].tolist() for array in run] == [of(regions[b]) for of, _ in TABLES]


TABLES = ((lambda region: region.table, np.int32), (lambda region: region.order, np.int16))
SHAPES = {
    "usual": (1, 64, 128, 4, 12),
    "K=S": (1, 8, 8, 4, 12),
    "odd S": (1, 8, 13, 4, 12),
    "two rows": (2, 6, 24, 8, 12),
    "more than a block has threads": (3, 400, 4_099, 64, 3),
}


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_agrees_with_the_oracle_whatever_warps_run_first(library, shape):
    run_against_the_oracle(library, *shape, seeds=(1, 2))


@pytest.mark.slow
@pytest.mark.parametrize(("header", "statement", "number"), BARRIERS)
def test_a_missing_barrier_is_seen(tmp_path: pathlib.Path, header, statement, number):
    broken = compiled(tmp_path, "resolve", *HEADERS, changed={header: without(SOURCES[header], statement, number)})
    assert fails(lambda: [run_against_the_oracle(broken, *shape, seeds=range(4)) for shape in SHAPES.values()])
