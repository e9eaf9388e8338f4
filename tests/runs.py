"""Small models, tight layouts, and runs of either twin step by step: what the end-to-end tests share.

A `Job` is one request of a run; `play` runs jobs side by side and keeps every logit. Models and layouts are cached, so
that a test process traces and compiles each program once.
"""

import dataclasses
import functools
import itertools
import pathlib
import runpy
import sys
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hisparse_jax.config import CacheConfig, ModelConfig, preset
from hisparse_jax.generation import TWINS, random_model
from hisparse_jax.layout import CacheLayout, plan_layout
from hisparse_jax.model.blocks import DeepseekV4
from hisparse_jax.state import TieredState
from hisparse_jax.status import Status

DEMO = dataclasses.replace(
    preset("demo"), hidden_size=64, num_attention_heads=2, q_lora_rank=32, o_lora_rank=16, n_routed_experts=4,
    moe_intermediate_size=32,
)  # fmt: skip
"""The demo's schedule and head sizes; what does not touch the cache is smaller."""

C4_ONLY = dataclasses.replace(DEMO, num_hidden_layers=4, compress_ratios=(4, 4, 4, 4))
"""The fewest layers with two in each resident group of the base rule, f32 and bf16 rows."""

TINY = preset("tiny")

MAX_STEPS = 32
"""Steps compiled into one decode call."""


@dataclasses.dataclass(frozen=True)
class Job:
    """One request: `steps` tokens are decoded after the prompt's own."""

    slot: int
    prompt: tuple[int, ...]
    steps: int
    chunks: tuple[int, ...] | None = None
    seed: int = 0
    temperature: float = 0.0


@dataclasses.dataclass(frozen=True)
class Played:
    """A run's end. Lists have one item per job: `logits[i]` are those of the prompt's positions, then of the steps."""

    state: Any
    tokens: list[np.ndarray]
    logits: list[np.ndarray]
    lost_in_prefill: list[int]
    lost: list[int]
    counts: np.ndarray
    """i64[L4, B, 5] of the decode steps; zeros for the resident twin and without metrics."""


@functools.cache
def build(config: ModelConfig, rows: str) -> DeepseekV4:
    """The model with random weights, made once."""
    return random_model(config, rows)


def text(length: int, seed: int = 0, vocab: int = 256) -> tuple[int, ...]:
    return tuple(np.random.default_rng([seed, length]).integers(0, vocab, length).tolist())


@functools.cache
def tight_layout(config: ModelConfig, pages: tuple[int, ...], slack: int, **options) -> CacheLayout:
    """A layout for requests of so many pages: room on the GPU for index keys, tails, hot regions and `slack` pages more."""
    cache = CacheConfig(gpu_blocks=2, host_blocks=sum(pages) + options["max_model_len"] // 128, **options)
    draft = plan_layout(config, cache)
    tails = sum(draft.num_resident_groups * min(n, 2) + draft.hot_blocks * (n > 2) for n in pages)
    blocks = 1 + draft.num_base_groups * sum(pages) + tails + slack * draft.num_resident_groups
    return plan_layout(config, dataclasses.replace(cache, gpu_blocks=blocks))


def poisoned(state: TieredState) -> TieredState:
    """The state with every byte that nothing wrote yet set to 255: NaN in each row format, in windows and in rings."""

    def fill(x):
        return jax.device_put(
            np.full(x.shape, 255, np.uint8).view(x.dtype) if x.dtype == np.uint8 else np.full_like(x, np.nan), x.sharding
        )

    return state.replace(slab=fill(state.slab), pools=tuple(map(fill, state.pools)), layers=jax.tree.map(fill, state.layers))


def play(twin: str, model: DeepseekV4, layout: CacheLayout, jobs: Sequence[Job], state=None, **options) -> Played:
    """Admits and prefills `jobs` in turn, decodes them side by side. `state` continues an earlier run."""
    run = TWINS[twin]
    state = run.init_state(layout) if state is None else state
    logits, first = [], []
    for job in jobs:
        state = run.admit(
            state, job.slot, job.prompt, layout=layout, max_new_tokens=job.steps, seed=job.seed, temperature=job.temperature
        )
        state, output, status = run.prefill(model, state, job.slot, job.prompt, layout=layout, chunks=job.chunks, all_logits=True)
        assert status is Status.OK, (twin, job.slot, status)
        logits.append([output.logits])
        first.append(int(state.sequences.token[job.slot]))
    slots = [job.slot for job in jobs]
    lost_in_prefill = _lost(state, slots)
    tokens = [[np.array([token], np.int32)] for token in first]
    counts = np.zeros((len(layout.model.c4_layers), layout.cache.max_requests, 5), np.int64)
    for done in range(0, max(job.steps for job in jobs), MAX_STEPS):
        state, output, status = run.decode_steps(
            model, state, jnp.int32(MAX_STEPS), layout=layout, max_steps=MAX_STEPS, return_logits=True, **options
        )
        assert not np.asarray(status).any(), (twin, done, status)
        for i, job in enumerate(jobs):
            taken = np.clip(job.steps - done, 0, MAX_STEPS)
            assert (np.asarray(output.tokens)[job.slot, taken:] == -1).all()
            tokens[i].append(np.array(output.tokens)[job.slot, :taken])
            logits[i].append(np.array(output.logits)[job.slot, :taken])
        if output.counts is not None:
            counts += np.array(output.counts)
    return Played(
        state,
        [np.concatenate(x) for x in tokens],
        [np.concatenate(x) for x in logits],
        lost_in_prefill,
        _lost(state, slots),
        counts,
    )


def _lost(state, slots: Sequence[int]) -> list[int]:
    return [int(state.ledger.pages_lost[slot]) if isinstance(state, TieredState) else 0 for slot in slots]


def assert_same(left: Played, right: Played) -> None:
    """Tokens and logits of two runs are equal in every bit."""
    for i, (a, b) in enumerate(zip(left.logits, right.logits, strict=True)):
        assert np.isfinite(a).all()
        if a.tobytes() != b.tobytes():
            rows = np.flatnonzero((a.view(np.uint32) != b.view(np.uint32)).any(axis=-1))
            raise AssertionError(f"job {i}: {len(rows)} of {len(a)} logit rows differ, the first is {rows[0]}")
    assert [t.tolist() for t in left.tokens] == [t.tolist() for t in right.tokens]


def run_script(name: str, *arguments, capsys) -> tuple[int, str, str]:
    """A script as its command runs it, in this process: exit code, stdout, stderr."""
    path, before = str(pathlib.Path(__file__).parent.parent / "scripts" / name), sys.argv
    capsys.readouterr()
    sys.argv = [path, *map(str, arguments)]
    try:
        with pytest.raises(SystemExit) as ended:
            runpy.run_path(path, run_name="__main__")
    finally:
        sys.argv = before
    captured = capsys.readouterr()
    code = ended.value.code
    return code if isinstance(code, int) else int(code is not None), captured.out, captured.err


def failing(function, number: int, error: Exception):
    """`function`, but for call `number` (from 1), which raises."""
    calls = itertools.count(1)

    def call(*args, **kwargs):
        if next(calls) == number:
            raise error
        return function(*args, **kwargs)

    return call


PARTS = {"f32": (4, 0), "bf16": (2, 0), "fp8": (None, 8)}
"""Bytes of a value (fp8: 448 + 2 * 64 in all) and of the scales of a row."""


def rows_of_page(page: np.ndarray, layout: CacheLayout) -> np.ndarray:
    """Packed rows of one page of bytes, by the row formats' own numbers: values of all rows, then scales of all rows."""
    size, scales = PARTS[layout.cache.rows]
    values = 576 if size is None else size * layout.model.head_dim
    n = layout.page_entries
    return np.concatenate(
        [page[: n * values].reshape(n, values), page[n * values : n * (values + scales)].reshape(n, scales)], axis=1
    )


def resident_rows(slab: np.ndarray, block: int, layer: int, layout: CacheLayout) -> np.ndarray:
    """Rows of the C4 page that `layer` has in GPU block `block`."""
    offset = layout.resident_place(layer).offset
    return rows_of_page(slab[block, offset : offset + layout.page_bytes], layout)
