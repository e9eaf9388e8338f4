"""What do the tiers cost, and what do they buy? Decode of long requests through the tiers beside the fully resident twin.

Seven runs of one model and one context length, each a jitted loop of decode steps over a filled cache (no prompt is computed):

    resident      as many requests as the slab holds when everything must fit
    same-tiered   the same requests on the same slab through the tiers: nothing is lost, so this is the price of the machinery
    tiered        as many requests as the same slab holds when history may leave
    no-copies     the same with the swap-in of missing rows left out (wrong numbers, right time): the price of the link
    graph         tiered again, its loop over steps captured as one CUDA graph
    all-resident  the same requests on a slab that holds them all: what nothing but more memory could give
    all-tiered    those through the tiers: nothing is lost

Every run computes index scores and top-k, then reads what a seeded trace of published locality selects instead
(`hisparse_jax.traces`; `--selections scored` keeps the model's own): random weights have no locality. All tokens, and the first
call's logits bit for bit, are compared with the resident twin's of the same requests; a difference is exit code 1. Times are
medians of calls after warm-up, one of each run in turn. On a GPU a run takes half a minute, most of it XLA choosing matrix
kernels. The table for people goes to stderr, the last line of stdout is JSON. On a CPU the model is tiny: a check that the script
works.

    .venv/bin/python scripts/bench_decode.py --layers 8 --context 32768 --resident-requests 16
"""

import bisect
import dataclasses
import inspect
import json
import os
import time
from collections.abc import Iterator
from typing import Any, Literal
from unittest import mock

os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.9")

import jax
import jax.numpy as jnp
import numpy as np
from bench_inputs import WHOLE_LOOP_GRAPH
from device_times import device_times
from filled_cache import filled
from rich.console import Console
from rich.table import Table

from hisparse_jax import decode, resident
from hisparse_jax.capacity import batch_gpu_blocks
from hisparse_jax.command import check_least, run_command
from hisparse_jax.config import C4, CacheConfig, ConfigError, ModelConfig, preset
from hisparse_jax.generation import random_model
from hisparse_jax.layout import CacheLayout, plan_layout
from hisparse_jax.model.blocks import Attention, DeepseekV4
from hisparse_jax.programs import COMPILER_OPTIONS
from hisparse_jax.prompts import chunk_schedule
from hisparse_jax.state import TieredState
from hisparse_jax.status import TierError
from hisparse_jax.tiered import COUNT_NAMES
from hisparse_jax.traces import make_trace
from pallas_kernels import resolve_and_gather
from pallas_kernels.resolve_topk import resolve_topk

stderr = Console(stderr=True, width=140)
HOT_HITS, MISSES = COUNT_NAMES.index("hot_hits"), COUNT_NAMES.index("misses")
PAIRS = ("same-tiered", "resident"), ("all-tiered", "all-resident"), ("tiered", "all-resident"), ("graph", "all-resident")
"""Runs that must be equal, bit for bit."""
MOST_KERNELS = 14
"""Kernels listed of each run by `--profile`."""


@dataclasses.dataclass(frozen=True)
class Args:
    layers: int = 8
    """Layers of V4-Flash's geometry, C4 and C128 in turn after two sliding-window layers."""
    experts: int = 16
    """Routed experts of each layer, instead of 256: weights, not caches, would fill the card."""
    context: int = 32_768
    """Tokens of each request before the first step."""
    resident_requests: int = 16
    """Requests that the slab holds when everything must fit; the budget of all runs but the last two."""
    most_requests: int = 64
    """Requests of the tiered run, at most; its slots are the next power of two, as are those of the resident run."""
    hot_slots: int | None = None
    """Hot slots per request and C4 layer; default: twice the model's top-k."""
    steps: int = 16
    """Decode steps of one call."""
    warmup: int = 8
    """Calls before the first one that counts: a cold hot buffer misses everything."""
    calls: int = 20
    """Calls that count."""
    selections: Literal["traced", "scored"] = "traced"
    """Entries that attention reads: those of a trace of published locality, or the best scored ones of random weights."""
    profile: bool = False
    """Also list what the GPU was busy with in one call of each run."""
    reclaim: str = "base"
    """When history leaves in the tiered run; where nothing is lost it is always `base`, which gives nothing up before it must."""
    only: str = ""
    """Names of the runs to make, parted by commas; all where empty."""
    seed: int = 0

    @property
    def all_steps(self) -> int:
        """Decode steps of one run."""
        return (self.warmup + self.calls + self.profile) * self.steps


@dataclasses.dataclass
class Run:
    """One run: what it is, and what came of it."""

    name: str
    twin: str
    layout: CacheLayout
    requests: int
    copies: bool = True
    graph: bool = False
    logits: np.ndarray = dataclasses.field(default_factory=lambda: np.zeros(0, np.float32))
    """Of the first call."""
    tokens: list[bytes] = dataclasses.field(default_factory=list)
    """Of every call."""
    times: list[float] = dataclasses.field(default_factory=list)
    """Seconds of one step, in each call that counts."""
    counts: np.ndarray = dataclasses.field(default_factory=lambda: np.zeros(len(COUNT_NAMES), np.int64))
    """Of the tiered rows selected, where they stood, in the calls that count."""
    lost: float = 0.0
    """Pages lost as a share of all pages."""
    kernels: dict[str, tuple[float, float]] = dataclasses.field(default_factory=dict)
    """Kernel to its launches and microseconds in a step."""

    @property
    def seconds(self) -> float:
        return float(np.median(self.times))

    @property
    def tokens_per_s(self) -> float:
        return self.requests / self.seconds

    @property
    def missing(self) -> float | None:
        """Missed rows as a share of all selected ones; None where nothing is counted."""
        return float(self.counts[MISSES] / self.counts.sum()) if self.counts.any() else None

    @property
    def hit_rate(self) -> float | None:
        """Hits among the rows that stand in no GPU page; None where all do."""
        asked = self.counts[HOT_HITS] + self.counts[MISSES]
        return float(self.counts[HOT_HITS] / asked) if asked else None


def model_of(args: Args) -> ModelConfig:
    """V4-Flash with fewer layers and experts; the tiny preset where there is no GPU."""
    if jax.default_backend() != "gpu":
        return preset("tiny")
    flash = preset("v4-flash")
    return dataclasses.replace(
        flash, num_hidden_layers=args.layers, compress_ratios=flash.compress_ratios[: args.layers], n_routed_experts=args.experts
    )


def growth(args: Args, layout: CacheLayout, requests: int) -> Iterator[list[int]]:
    """Pages of every request as the cache is filled, one after the other, and then decoded, all at once."""
    whole = layout.num_pages(args.context)
    for slot in range(requests):
        for begin, count in chunk_schedule(0, args.context, layout.cache.chunk_tokens):
            yield [whole] * slot + [layout.num_pages(begin + count)] + [0] * (requests - slot - 1)
    for step in range(0, args.all_steps, layout.cache.stretch_steps):
        end = min(step + layout.cache.stretch_steps, args.all_steps)
        yield [layout.num_pages(args.context + end)] * requests


def most_held(args: Args, layout: CacheLayout, slab: int) -> int:
    """Requests of the tiered run: the most that `slab` blocks hold while history may leave, up to `most_requests`."""
    counts = range(1, args.most_requests + 1)
    held = bisect.bisect_right(counts, slab, key=lambda count: batch_gpu_blocks(layout, growth(args, layout, count)))
    if not held:
        raise ConfigError(
            f"--resident-requests {args.resident_requests} makes a slab of {slab} blocks, where no request decodes by --reclaim "
            f"{args.reclaim} with {layout.num_hot_slots} hot slots; raise it or --context, or lower --hot-slots."
        )
    return held


def plan(args: Args, model: ModelConfig) -> list[Run]:
    """Every run's layout: one slab for all but the last two."""
    few, limit = args.resident_requests, args.context + args.all_steps
    cache = CacheConfig(
        max_model_len=limit, max_requests=2, gpu_blocks=2, host_blocks=2, reclaim=args.reclaim, chunk_tokens=2_048,
        num_hot_slots=args.hot_slots,
    )  # fmt: skip
    if jax.default_backend() != "gpu":
        cache = dataclasses.replace(cache, chunk_tokens=64, rows="f32", page_entries=32)
    pages = plan_layout(model, dataclasses.replace(cache, host_blocks=2**20)).num_pages(limit)

    def layout(requests: int, blocks: int, tiered: bool = True, **options: str) -> CacheLayout:
        sizes = dict(gpu_blocks=blocks, host_blocks=2 + requests * pages)
        slots = max(2, 1 << (requests - 1).bit_length())
        return plan_layout(model, dataclasses.replace(cache, max_requests=slots, **sizes, **options), tiered=tiered)

    def whole(requests: int) -> int:
        return 1 + requests * draft.growing_groups * pages

    draft = layout(args.most_requests, 2**20)
    held = most_held(args, draft, whole(few))
    more = layout(held, whole(few))
    return [
        Run("resident", "resident", layout(few, whole(few), tiered=False), few),
        Run("same-tiered", "tiered", layout(few, whole(few), reclaim="base"), few),
        Run("tiered", "tiered", more, held),
        Run("no-copies", "tiered", more, held, copies=False),
        Run("graph", "tiered", more, held, graph=True),
        Run("all-resident", "resident", layout(held, whole(held), tiered=False), held),
        Run("all-tiered", "tiered", layout(held, whole(held), reclaim="base"), held),
    ]


def without_copies(pool, slab, *tables, num_host_blocks, page_entries, row_step, implementation, **_):
    """Takes the place of `resolve_and_gather`: resolves, leaves the slab as it is."""
    place = dict(page_entries=page_entries, row_step=row_step, num_host_blocks=num_host_blocks)
    return slab, resolve_topk(*tables, implementation=implementation, **place)


def selections(run: Run, args: Args) -> np.ndarray:
    """i32[L4, steps, B, K]: a trace per layer and request. Requests share two walks, each under entry numbers of its own."""
    model, steps, batch = run.layout.model, args.all_steps, run.layout.cache.max_requests
    entries, picked = args.context // C4, []
    for layer in model.c4_layers:
        walks = make_trace(steps, 2, model.index_topk, entries, 2 * model.index_topk, seed=args.seed + layer).topk
        rng = np.random.default_rng([args.seed, layer])
        names = np.stack([rng.permutation(entries).astype(np.int32) for _ in range(batch)])
        rows = np.take_along_axis(names[None], walks[:, np.arange(batch) % 2], axis=2)
        picked.append(np.sort(rows, axis=-1))
    return np.stack(picked)


def traced(picked: jax.Array, context: int):
    """`Attention._select` with the scores' selection replaced, once computed, by that of a trace."""
    scored = Attention._select

    def select(self, x, qr, span, apart, cache, led, layout):
        own = scored(self, x, qr, span, apart, cache, led, layout)
        number = layout.model.c4_layers.index(self.layer)
        rows = picked[number, jnp.maximum(apart.start - context, 0), apart.rows][:, None]
        return own.replace(indices=jnp.where(own.indices < -1, own.indices, jnp.where(apart.valid[..., None], rows, -1)))

    return select


def lower_run(run: Run, model: DeepseekV4, state: Any, picked: Any, args: Args) -> jax.stages.Lowered:
    """The decode call of a run for the shapes of `state`."""
    module = decode if run.twin == "tiered" else resident
    plain = inspect.unwrap(module.decode_steps)

    def call(model, state, num_steps, picked):
        select = Attention._select if picked is None else traced(picked, args.context)
        with mock.patch.object(Attention, "_select", select):
            return plain(model, state, num_steps, layout=run.layout, max_steps=args.steps, return_logits=True)

    options = COMPILER_OPTIONS | (WHOLE_LOOP_GRAPH if run.graph and jax.default_backend() == "gpu" else {})
    op = resolve_and_gather.resolve_and_gather if run.copies else without_copies
    with mock.patch.object(resolve_and_gather, "resolve_and_gather", op):
        jitted = jax.jit(call, donate_argnums=1, compiler_options=options)
        return jitted.lower(model, state, jnp.int32(args.steps), picked)


class Loop:
    """A run under way: its cache, filled, and its compiled call."""

    def __init__(self, run: Run, model: DeepseekV4, args: Args):
        begin = time.perf_counter()
        self.run, self.model, self.steps = run, model, args.steps
        self.state = filled(run.twin, run.layout, [args.context] * run.requests, max_new_tokens=args.all_steps, seed=args.seed)
        self.picked = jnp.asarray(selections(run, args)) if args.selections == "traced" else None
        jax.block_until_ready(self.state)
        filled_at = time.perf_counter()
        if isinstance(self.state, TieredState):
            lost = np.asarray(self.state.ledger.pages_lost).sum()
            run.lost = float(lost) / (run.requests * run.layout.num_pages(args.context))
        self.compiled = lower_run(run, model, self.state, self.picked, args).compile()
        compiling = time.perf_counter() - filled_at
        stderr.print(f"{run.name}: {run.requests} requests, filled in {filled_at - begin:.0f} s, compiled in {compiling:.0f} s")

    def call(self) -> tuple[float, Any]:
        """Seconds of one step, and what the call returned. Tokens are kept, and the first call's logits."""
        run, num_steps = self.run, jnp.int32(self.steps)
        begin = time.perf_counter()
        self.state, output, status = self.compiled(self.model, self.state, num_steps, self.picked)
        jax.block_until_ready(output.tokens)
        seconds = time.perf_counter() - begin
        if np.asarray(status).any():
            raise TierError(
                f"{run.name}: call {len(run.tokens)} ended with status {np.asarray(status)}; give the pools more blocks."
            )
        if not run.tokens:
            run.logits = np.array(output.logits)[: run.requests]
        run.tokens.append(np.asarray(output.tokens)[: run.requests].tobytes())
        return seconds / self.steps, output

    def profile(self) -> None:
        """One more call, of which the kernels are kept."""
        with device_times() as kernels:
            self.call()
        self.run.kernels = {name: (len(us) / self.steps, float(us.sum()) / self.steps) for name, us in kernels.items()}

    def check(self) -> None:
        if isinstance(self.state, TieredState) and np.asarray(self.state.homeless).any():
            raise TierError(f"{self.run.name}: selected entries stand in no tier.")


def measure(runs: list[Run], model: DeepseekV4, args: Args) -> None:
    """Makes all runs, a call of each in turn: what drifts, drifts under all of them alike."""
    loops = [Loop(run, model, args) for run in runs]
    for number in range(args.warmup + args.calls):
        for loop in loops if number % 2 else loops[::-1]:
            seconds, output = loop.call()
            if number >= args.warmup:
                loop.run.times.append(seconds)
                if output.counts is not None:
                    loop.run.counts += np.asarray(output.counts).sum(axis=(0, 1))
    for loop in loops:
        if args.profile:
            loop.profile()
        loop.check()


def differences(runs: dict[str, Run]) -> list[str]:
    """Pairs of runs that differ: in a token of any call, or in a bit of the first one's logits."""
    found = []
    for one, other in PAIRS:
        if one in runs and other in runs:
            left, right = runs[one], runs[other]
            rows = (left.logits.view(np.uint32) != right.logits.view(np.uint32)).any(axis=-1)
            if left.tokens != right.tokens or not left.logits.size or rows.any():
                where = [f"request {r} from step {np.flatnonzero(row)[0]}" for r, row in enumerate(rows) if row.any()]
                most = np.abs(left.logits - right.logits).max(initial=0)
                found.append(
                    f"{one} differs from {other}: {rows.sum()} of {rows.size} logit rows, by {most:.1e} at most; {where[:6]}"
                )
    return found


def ratios(runs: dict[str, Run]) -> dict[str, float]:
    """What the runs say of one another."""

    def speed(one: str, other: str) -> float | None:
        return runs[one].tokens_per_s / runs[other].tokens_per_s if one in runs and other in runs else None

    named = {
        "resident_step": speed("same-tiered", "resident"),
        "resident_step_many": speed("all-tiered", "all-resident"),
        "swap_in_step": speed("tiered", "no-copies"),
        "graph_step": speed("graph", "tiered"),
        "throughput": speed("tiered", "resident"),
        "of_all_resident": speed("tiered", "all-resident"),
    }
    return {name: value for name, value in named.items() if value is not None}


TARGETS = {
    "resident_step": ("nothing lost, against the resident twin", ">= 0.99"),
    "resident_step_many": ("the same with as many requests as tiered decode holds", ">= 0.99"),
    "swap_in_step": ("with swap-in, against its copies left out", ">= 0.95"),
    "graph_step": ("the loop as one CUDA graph, against the default", ""),
    "throughput": ("tokens/s on the same slab", ">= 3"),
    "of_all_resident": ("against a slab that holds everything", ""),
}


def report(runs: dict[str, Run], args: Args) -> None:
    table = Table(title=f"decode of {args.context:,}-token requests, {jax.devices()[0].device_kind}")
    for name in ("run", "requests", "slab GiB", "pages lost", "missing", "hit rate", "ms/step", "from", "to", "tokens/s"):
        table.add_column(name, justify="left" if name == "run" else "right")
    for run in runs.values():
        share = ["" if x is None else f"{x:.1%}" for x in (run.lost, run.missing, run.hit_rate)]
        slab = f"{run.layout.slab_bytes / 2**30:.2f}"
        times = (f"{seconds * 1e3:.3f}" for seconds in (run.seconds, min(run.times), max(run.times)))
        table.add_row(run.name, str(run.requests), slab, *share, *times, f"{run.tokens_per_s:,.0f}")
    stderr.print(table)
    for run in runs.values():
        busy = sum(us for _, us in run.kernels.values())
        for name, (count, us) in sorted(run.kernels.items(), key=lambda item: -item[1][1])[:MOST_KERNELS]:
            stderr.print(f"  {run.name}: {us:9.1f} us in {count:6.1f} launches a step  {name[:80]}")
        if busy:
            launches = sum(count for count, _ in run.kernels.values())
            stderr.print(f"  {run.name}: {busy:,.0f} us busy of {run.seconds * 1e6:,.0f}, {launches:,.0f} launches a step")
    for name, value in ratios(runs).items():
        what, target = TARGETS[name]
        stderr.print(f"  {value:.3f}  {what}  {target}")


def main(args: Args) -> int:
    config = model_of(args)
    check_least(args, steps=1, calls=1, context=1, resident_requests=1, most_requests=1, warmup=0, seed=0)
    if args.selections == "traced" and args.context < (least := 3 * C4 * config.index_topk):
        raise ConfigError(
            f"--context {args.context} leaves a trace of selections nothing to miss; give {least} tokens or more, or "
            "--selections scored."
        )
    if args.context + args.all_steps > config.max_position_embeddings:
        raise ConfigError(
            f"--context {args.context} and {args.all_steps} decoded tokens exceed the model's {config.max_position_embeddings:,} "
            "positions; lower --context, --warmup or --calls. (Without a GPU the model is tiny: --context 3000 --warmup 2.)"
        )
    planned, wanted = plan(args, config), args.only.split(",") if args.only else []
    if unknown := sorted(set(wanted) - {run.name for run in planned}):
        raise ConfigError(f"--only names no run {unknown[0]!r}; there are {', '.join(run.name for run in planned)}.")
    planned = [run for run in planned if not wanted or run.name in wanted]
    model = random_model(config, planned[0].layout.cache.rows, args.seed)
    measure(planned, model, args)
    runs = {run.name: run for run in planned}
    faults, compared = differences(runs), [pair for pair in PAIRS if runs.keys() >= set(pair)]
    equal = f"{len(compared)} pairs of runs equal, bit for bit" if compared else "no two of these runs are comparable"
    report(runs, args)
    colour = "red" if faults else "green" if compared else "yellow"
    stderr.print(f"[bold {colour}]{'; '.join(faults) or equal}[/]")
    rows = [
        {"run": r.name, "requests": r.requests, "slab_bytes": r.layout.slab_bytes, "pages_lost": r.lost, "missing": r.missing,
         "hit_rate": r.hit_rate, "ms_per_step": r.seconds * 1e3, "ms_of_calls": [x * 1e3 for x in r.times],
         "tokens_per_s": r.tokens_per_s}
        for r in runs.values()
    ]  # fmt: skip
    print(json.dumps({"card": jax.devices()[0].device_kind, "context": args.context, "layers": config.num_hidden_layers,
                      "runs": rows, "ratios": ratios(runs), "differences": faults}))  # fmt: skip
    return 1 if faults else 0


if __name__ == "__main__":
    run_command(main, Args, __doc__)
