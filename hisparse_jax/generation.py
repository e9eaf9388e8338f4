"""Generates from a batch of prompts through one twin, and compares two runs bit for bit.

    tiered = generate(model, prompts, layout, max_new_tokens=128)
    resident = generate(model, prompts, resident_layout(layout), max_new_tokens=128, twin="resident")
    assert compare(tiered, resident).equal

A run takes request slots 0, 1, ... in the order of the prompts, prefills one after the other, then decodes all in calls
of one compiled size. Both twins take the same steps with the same shapes.
"""

import dataclasses
import math
import time
from collections.abc import Callable, Iterator, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from hisparse_jax import decode, ffi, resident
from hisparse_jax.capacity import batch_gpu_blocks
from hisparse_jax.config import ConfigError, ModelConfig
from hisparse_jax.device_memory import check_slab_budget
from hisparse_jax.host_memory import check_host_budget
from hisparse_jax.layout import CacheLayout, plan_layout
from hisparse_jax.model.blocks import DeepseekV4
from hisparse_jax.prompts import PromptError, check_prompt, check_sampling, chunk_schedule
from hisparse_jax.state import TieredState
from hisparse_jax.status import Status, raise_for_status
from hisparse_jax.steps import traces
from hisparse_jax.tiered import COUNT_NAMES
from hisparse_jax.weights import init_weights

TWINS = {"tiered": decode, "resident": resident}


def random_model(config: ModelConfig, rows: str, seed: int = 0) -> DeepseekV4:
    """A model with random weights in the dtype that a cache of such `rows` computes in: float32 for f32, else bfloat16."""
    return DeepseekV4(config, init_weights(config, seed, jnp.float32 if rows == "f32" else jnp.bfloat16))


@dataclasses.dataclass(frozen=True)
class RequestReport:
    """One request's share of a tiered run; counts and rows are sums over C4 layers and decode steps."""

    context: int
    """Tokens in the cache at the end."""
    pages_resident: int
    pages_lost: int
    """Pages whose GPU blocks were given up."""
    pages_lost_in_prefill: int
    counts: dict[str, int]
    """`COUNT_NAMES` to how many selected entries were that."""
    bytes_to_gpu: int
    """Rows swapped in and staged."""
    bytes_to_host: int
    """Rows mirrored and pages copied."""


@dataclasses.dataclass(frozen=True)
class Generation:
    """What a run gave. Lists have one item per prompt, in order; `S` new tokens each.

    tokens: i32[S]      sampled tokens; the first follows the prompt.
    logits: f32[S, V]   the logits that each was sampled from.
    """

    twin: str
    tokens: list[np.ndarray]
    logits: list[np.ndarray]
    reports: list[RequestReport]
    """Empty for the resident twin."""
    layer_counts: dict[str, list[int]]
    """`COUNT_NAMES` to sums per C4 layer, all requests; empty for the resident twin."""
    decode_steps: int
    prefill_seconds: float
    decode_seconds: float
    """Compilation apart."""
    compile_seconds: float
    traces: int
    """Times that the jitted decode loop was traced in this run: 1, or 0 where an earlier run of the same shapes left it."""

    @property
    def tokens_per_second(self) -> float:
        """Decoded tokens a second, all requests together."""
        return len(self.tokens) * self.decode_steps / self.decode_seconds

    @property
    def hit_rate(self) -> float:
        """Hot hits among references that were neither resident nor newest; 1 where there was none."""
        hits, misses = (sum(r.counts[name] for r in self.reports) for name in ("hot_hits", "misses"))
        return hits / (hits + misses) if hits + misses else 1.0


@dataclasses.dataclass(frozen=True)
class Verdict:
    """Two runs of the same prompts, compared exactly."""

    tokens_equal: bool
    logits_bit_equal: bool

    @property
    def equal(self) -> bool:
        return self.tokens_equal and self.logits_bit_equal


def compare(left: Generation, right: Generation) -> Verdict:
    """Whether two runs sampled the same tokens from logits equal in every bit (NaN equals itself, 0.0 not -0.0)."""

    def same(a: list[np.ndarray], b: list[np.ndarray]) -> bool:
        pairs = zip(a, b, strict=True)
        return len(a) > 0 and all(x.shape == y.shape and x.tobytes() == y.tobytes() for x, y in pairs)

    return Verdict(same(left.tokens, right.tokens), same(left.logits, right.logits))


def resident_layout(layout: CacheLayout) -> CacheLayout:
    """The twin's layout: the same groups and formats, no host tier, a slab in which every slot's full context fits."""
    blocks = 1 + layout.cache.max_requests * layout.max_pages * layout.growing_groups
    cache = dataclasses.replace(layout.cache, gpu_blocks=blocks, gpu_pool_bytes=None)
    return plan_layout(layout.model, cache, tiered=False)


def check_run(
    prompts: Sequence[Sequence[int]],
    layout: CacheLayout,
    *,
    max_new_tokens: int,
    twin: str = "tiered",
    seed: int = 0,
    temperature: float = 0.0,
    chunks: Sequence[int] | None = None,
    call_steps: int = 64,
) -> None:
    """Refuses what `generate` could not carry to its end, before a weight, a program or a byte of the tiers is needed.

    Raises `PromptError` for bad input, `ConfigError` for a layout that is too small, `FfiError` where the tiered twin has no
    handler library.
    """
    if twin not in TWINS:
        raise ConfigError(f"twin={twin!r} is unknown; choose from {', '.join(TWINS)}.")
    check_input(prompts, layout, max_new_tokens=max_new_tokens, seed=seed, temperature=temperature, call_steps=call_steps)
    lengths = [len(prompt) for prompt in prompts]
    if twin == "tiered":
        _check_host(lengths, layout, max_new_tokens)
    least = least_gpu_blocks(lengths, layout, max_new_tokens=max_new_tokens, twin=twin, chunks=chunks, call_steps=call_steps)
    if layout.gpu_blocks < least:
        raise ConfigError(
            f"gpu_blocks={layout.gpu_blocks} is too small a slab: {_requests(lengths, max_new_tokens)} need {least} blocks at "
            f"once; raise gpu_blocks to {least} (or gpu_pool_bytes to {least * layout.stride:,}), or run fewer or shorter ones."
        )
    check_slab_budget(layout)
    if twin == "tiered":
        check_host_budget(layout.host_bytes)
        ffi.load_library()


def check_input(
    prompts: Sequence[Sequence[int]],
    layout: CacheLayout,
    *,
    max_new_tokens: int,
    seed: int = 0,
    temperature: float = 0.0,
    call_steps: int = 64,
) -> None:
    """The part of `check_run` that no budget enters: raises `PromptError` unless any slab could be large enough."""
    if not 1 <= len(prompts) <= layout.cache.max_requests:
        raise PromptError(f"{len(prompts)} prompts; this layout takes 1..{layout.cache.max_requests} (max_requests).")
    for name, value in (("max_new_tokens", max_new_tokens), ("call_steps", call_steps)):
        if value < 1:
            raise PromptError(f"{name}={value} must be at least 1.")
    check_sampling(seed, temperature)
    if seed > (last := 2**32 - len(prompts)):
        raise PromptError(f"seed={seed} leaves too few for {len(prompts)} requests, which take one each; lower it to {last}.")
    for prompt in prompts:
        check_prompt(prompt, layout, max_new_tokens - 1)


def _check_host(lengths: list[int], layout: CacheLayout, max_new_tokens: int) -> None:
    if not layout.host_blocks:
        raise ConfigError("a layout without a host tier is the resident twin's; plan the tiered twin's with tiered=True.")
    need = 1 + sum(layout.num_pages(length + max_new_tokens - 1) for length in lengths)
    if layout.host_blocks < need:
        size = need * layout.host_page
        raise ConfigError(
            f"host_blocks={layout.host_blocks} is too small a host pool: {_requests(lengths, max_new_tokens)} need {need}, one a "
            f"page and the null block; raise host_blocks to {need} (or host_pool_bytes to {size:,}, "
            f"{math.ceil(size / 2**30 * 1e4) / 1e4:.4f} GiB), or run fewer or shorter ones."
        )


def _requests(lengths: list[int], max_new_tokens: int) -> str:
    total = sum(lengths) + len(lengths) * (max_new_tokens - 1)
    return f"{len(lengths)} request{'s' * (len(lengths) > 1)} of {total:,} tokens in all"


def least_gpu_blocks(
    lengths: Sequence[int],
    layout: CacheLayout,
    *,
    max_new_tokens: int,
    twin: str = "tiered",
    chunks: Sequence[int] | None = None,
    call_steps: int = 64,
) -> int:
    """Least `gpu_blocks` with which `generate` runs prompts of these lengths to their end; `layout.gpu_blocks` plays no part.

    One exception: with `backup="spill"`, many requests that spill in the same stretch may want more page copies than a call
    makes, and then need more blocks.
    """
    layout = layout if twin == "tiered" else dataclasses.replace(layout, host_blocks=0)
    return batch_gpu_blocks(layout, _growth(lengths, layout, max_new_tokens - 1, chunks, call_steps))


def _growth(
    lengths: Sequence[int], layout: CacheLayout, steps: int, chunks: Sequence[int] | None, call_steps: int
) -> Iterator[list[int]]:
    """Pages of each request after each prefill chunk and at each stretch of decode, as a run takes them."""
    pages = [0] * len(lengths)
    for slot, length in enumerate(lengths):
        for begin, count in chunk_schedule(0, length, layout.cache.chunk_tokens, chunks):
            pages[slot] = layout.num_pages(begin + count)
            yield list(pages)
    for call in range(0, steps, call_steps):
        end = min(call + call_steps, steps)
        for first in range(call, end, layout.cache.stretch_steps):
            done = min(first + layout.cache.stretch_steps, end)
            yield [layout.num_pages(length + done) for length in lengths]


def generate(
    model: DeepseekV4,
    prompts: Sequence[Sequence[int]],
    layout: CacheLayout,
    *,
    max_new_tokens: int,
    twin: str = "tiered",
    seed: int = 0,
    temperature: float = 0.0,
    chunks: Sequence[int] | None = None,
    call_steps: int = 64,
    on_progress: Callable[[str, int, int], None] | None = None,
    after_prefill: Callable[[TieredState], TieredState] | None = None,
) -> Generation:
    """Prefills `prompts` and decodes `max_new_tokens - 1` more tokens after each one's first.

    `twin` is "tiered" or "resident" (with `resident_layout(layout)`). `seed + slot` seeds each request. `call_steps` steps go
    into one dispatch. `on_progress(stage, done, total)` is told of prompts and steps. `after_prefill` may replace the state
    before decode. Raises what `check_run` raises, before anything is taken; `TierError` where blocks run out all the same.
    """
    check_run(
        prompts, layout, max_new_tokens=max_new_tokens, twin=twin, seed=seed, temperature=temperature, chunks=chunks,
        call_steps=call_steps,
    )  # fmt: skip
    run, tell = TWINS[twin], on_progress or (lambda *_: None)
    loop = run.__name__.removeprefix("hisparse_jax.") + ".decode_steps"
    traced = traces[loop]
    state = run.init_state(layout)

    started = time.perf_counter()
    step_call = _Decoder(run, model, layout, max_new_tokens - 1, call_steps)
    state = step_call.compile(state)
    compile_seconds = time.perf_counter() - started

    started = time.perf_counter()
    logits: list[np.ndarray] = []
    first: list[int] = []
    for slot, prompt in enumerate(prompts):
        state = run.admit(
            state, slot, prompt, layout=layout, max_new_tokens=max_new_tokens - 1, seed=seed + slot, temperature=temperature
        )
        state, output, status = run.prefill(model, state, slot, prompt, layout=layout, chunks=chunks)
        raise_for_status(status, f"prefill of request {slot}")
        assert output.logits is not None
        logits.append(output.logits)
        first.append(int(np.asarray(state.sequences.token)[slot]))
        tell("prefill", slot + 1, len(prompts))
    prefill_seconds = time.perf_counter() - started
    if after_prefill is not None:
        state = after_prefill(state)
    lost = np.array(state.ledger.pages_lost) if isinstance(state, TieredState) else np.zeros(0)

    started = time.perf_counter()
    state, tokens, step_logits, counts = step_call.decode(state, len(prompts), tell)
    decode_seconds = time.perf_counter() - started
    tokens = [np.concatenate([np.asarray([first[i]], np.int32), tokens[i]]) for i in range(len(prompts))]
    logits = [np.concatenate([logits[i], step_logits[i]]) for i in range(len(prompts))]
    tiered = isinstance(state, TieredState)
    return Generation(
        twin=twin,
        tokens=tokens,
        logits=logits,
        reports=[_report(state, i, layout, counts, lost) for i in range(len(prompts))] if tiered else [],
        layer_counts={n: counts[:, :, k].sum(axis=1).tolist() for k, n in enumerate(COUNT_NAMES)} if tiered else {},
        decode_steps=max_new_tokens - 1,
        prefill_seconds=prefill_seconds,
        decode_seconds=decode_seconds,
        compile_seconds=compile_seconds,
        traces=traces[loop] - traced,
    )


class _Decoder:
    """Calls of `decode_steps` with one compiled shape until all steps are done."""

    def __init__(self, run, model: DeepseekV4, layout: CacheLayout, steps: int, call_steps: int):
        self.run, self.model, self.layout, self.steps = run, model, layout, steps
        self.max_steps = max(1, min(steps, call_steps))

    def _call(self, state, count: int):
        return self.run.decode_steps(
            self.model, state, jnp.int32(count), layout=self.layout, max_steps=self.max_steps, return_logits=True
        )

    def compile(self, state):
        """A call of no steps: compiles the loop and leaves the state as it is."""
        state, output, _ = self._call(state, 0)
        jax.block_until_ready(output.tokens)
        return state

    def decode(self, state, num_prompts: int, tell):
        tokens, logits, done = [[] for _ in range(num_prompts)], [[] for _ in range(num_prompts)], 0
        counts = np.zeros((len(self.layout.model.c4_layers), self.layout.cache.max_requests, len(COUNT_NAMES)), np.int64)
        while done < self.steps:
            count = min(self.max_steps, self.steps - done)
            state, output, status = self._call(state, count)
            statuses, step_tokens, step_logits = (np.array(x) for x in (status, output.tokens, output.logits))
            for slot in range(num_prompts):
                raise_for_status(int(statuses[slot]), f"decode of request {slot} at step {done}")
                if (step_tokens[slot, :count] < 0).any():  # an earlier stretch of this call left it out
                    raise_for_status(Status.OUT_OF_BLOCKS, f"decode of request {slot} at step {done}")
                tokens[slot].append(step_tokens[slot, :count])
                logits[slot].append(step_logits[slot, :count])
            counts += np.array(output.counts, np.int64) if output.counts is not None else 0
            done += count
            tell("decode", done, self.steps)
        empty = np.zeros((0, self.layout.model.vocab_size), np.float32)
        return (
            state,
            [np.concatenate([np.zeros(0, np.int32), *rows]) for rows in tokens],
            [np.concatenate([empty, *rows]) for rows in logits],
            counts,
        )


def _report(state: TieredState, slot: int, layout: CacheLayout, counts: np.ndarray, lost: np.ndarray) -> RequestReport:
    moved = jax.tree.map(lambda x: int(np.asarray(x)[slot]), state.traffic)
    raise_for_status(Status.HOMELESS if int(np.asarray(state.homeless)[slot]) else Status.OK, f"request {slot}")
    per_name = counts[:, slot].sum(axis=0)
    row, page = layout.entry.row_bytes, layout.page_bytes
    return RequestReport(
        context=int(np.asarray(state.sequences.length)[slot]),
        pages_resident=int((np.asarray(state.ledger.tables.resident)[0, slot] != 0).sum()),
        pages_lost=int(np.asarray(state.ledger.pages_lost)[slot]),
        pages_lost_in_prefill=int(lost[slot]),
        counts={name: int(per_name[k]) for k, name in enumerate(COUNT_NAMES)},
        bytes_to_gpu=row * (moved.swapped_rows + moved.staged_rows),
        bytes_to_host=row * moved.mirrored_rows + page * moved.copied_pages,
    )
