"""Does a decode through two tiers give the very logits of one that fits on the GPU?

Decodes a batch of long prompts with most of its C4 history on the host, then the same prompts fully resident, and
compares every token and every bit of every logit. Tables for people go to stderr; the last line of stdout is JSON. Exit code
0: equal; 1: different; 2: bad input.

    .venv/bin/python scripts/generate.py
    .venv/bin/python scripts/generate.py --steps 256 --hot-slots 128 --backup spill --rows bf16
"""

import dataclasses
import importlib.metadata
import json
import math
import os
import pathlib
import sysconfig
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

if importlib.metadata.version("jaxlib").startswith("0.11."):  # most of a short run on a CPU is compilation
    os.environ.setdefault("XLA_FLAGS", "--xla_cpu_opt_preset=fast_compile")

import jax
import jax.numpy as jnp
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from hisparse_jax.checkpoint import load_checkpoint
from hisparse_jax.checkpoint_files import config_path
from hisparse_jax.command import run_command, to_bytes
from hisparse_jax.config import CacheConfig, ConfigError, ModelConfig, load_model_config, preset
from hisparse_jax.generation import (
    Generation,
    Verdict,
    check_input,
    check_run,
    compare,
    generate,
    least_gpu_blocks,
    resident_layout,
)
from hisparse_jax.layout import CacheLayout, plan_layout
from hisparse_jax.model.blocks import DeepseekV4
from hisparse_jax.prompts import PromptError
from hisparse_jax.tiered import COUNT_NAMES
from hisparse_jax.weights import init_weights

stderr = Console(stderr=True)

DEFAULT_PROMPTS = ("multiprocessing/popen_spawn_posix.py", "multiprocessing/popen_forkserver.py", "unittest/_log.py")
"""Modules of Python's standard library, the same 2,029, 2,230 and 2,746 bytes from 3.11 to 3.13: each grows by a page of 256
tokens within 128 steps."""


@dataclasses.dataclass(frozen=True)
class Args:
    model: str = "demo"
    """Preset: tiny, demo, v4-flash or v4-pro; random weights from `seed`."""
    checkpoint: pathlib.Path | None = None
    """Folder of safetensors shards, or an .npz with its .json; takes the place of `model`."""
    prompts: tuple[pathlib.Path, ...] = ()
    """Text files, one request each, read as bytes; default: three modules of the standard library."""
    steps: int = 128
    """Decode steps; a prompt and its steps must fit `max_model_len`."""
    slab_share: float = 0.4
    """GPU blocks for C4 entries, as a share of what the prompts' resident pages and hot regions would need; raised, with a
    note, where the requests could not run to their end in it."""
    gpu_blocks: int | None = None
    """Blocks of the whole slab, in place of `slab_share`; refused where the requests could not run to their end in it."""
    host_gib: float | None = None
    """GiB of the host pools; default: what the requests need. Refused where they need more."""
    max_model_len: int | None = None
    """Longest context; default: the model's, at most 8,192."""
    hot_slots: int | None = 64
    """Hot slots per request and C4 layer."""
    rows: str = "fp8"
    """Row format: fp8, bf16 or f32 (which computes in float32)."""
    index_keys: str | None = None
    """Index key format with fp8 rows: fp8 or fp4."""
    rule: str = "searched"
    """Layout: searched or base."""
    backup: str = "write_through"
    """Host copies of decode rows: write_through or spill."""
    reclaim: str = "base"
    """Giving pages up: base (when blocks are short), eager (as soon as they may go) or unpin (copied pages count as free)."""
    temperature: float = 0.0
    """0: greedy."""
    seed: int = 0
    """Of the weights and of the sampling keys."""
    call_steps: int = 64
    """Decode steps in one dispatch."""


def main(args: Args) -> int:
    prompts, names = read_prompts(args)
    config = preset(args.model) if args.checkpoint is None else load_model_config(config_path(args.checkpoint))
    layout = plan(args, config, prompts)
    check_run(prompts, layout, **run_options(args))
    model = DeepseekV4(config, load_weights(args, config))
    weights = f"random, seed {args.seed}" if args.checkpoint is None else str(args.checkpoint)
    stderr.print(describe(layout, prompts, weights))
    tiered, resident = run_twins(args, model, prompts, layout)
    verdict = compare(tiered, resident)
    stderr.print(page_table(tiered, names), reference_table(tiered, names), layer_table(tiered, layout), sep="\n")
    stderr.print(token_lines(tiered, names), speed_table(tiered, resident), say(verdict, tiered), sep="\n")
    print(json.dumps(summary(verdict, tiered)))
    return 0 if verdict.equal else 1


def run_options(args: Args) -> dict[str, Any]:
    """What both twins are asked to do."""
    return {
        "max_new_tokens": args.steps + 1, "seed": args.seed, "temperature": args.temperature, "call_steps": args.call_steps,
    }  # fmt: skip


def read_prompts(args: Args) -> tuple[list[list[int]], list[str]]:
    """The prompts as token ids (bytes) and their names."""
    library = pathlib.Path(sysconfig.get_path("stdlib"))
    paths = args.prompts or tuple(library / name for name in DEFAULT_PROMPTS)
    try:
        return [list(path.read_bytes()) for path in paths], [path.name for path in paths]
    except OSError as error:
        raise PromptError(f"a prompt file cannot be read: {error}") from None


def load_weights(args: Args, config: ModelConfig) -> dict[str, jax.Array]:
    """The checkpoint's, or random ones for the preset; f32 rows compute in float32."""
    dtype = jnp.float32 if args.rows == "f32" else jnp.bfloat16
    if args.checkpoint is None:
        return held(init_weights(config, args.seed, dtype))
    _, weights, report = load_checkpoint(args.checkpoint, dtype)
    stderr.print(escape(str(report)), highlight=False, soft_wrap=True)
    return held(weights)


def held(weights: dict[str, jax.Array]) -> dict[str, jax.Array]:
    """Weights as the device multiplies them: a CPU has no bf16 product, so all but the embedding become float32 there."""
    if jax.default_backend() != "cpu":
        return weights
    wide = {n: w.astype(jnp.float32) for n, w in weights.items() if w.dtype == jnp.bfloat16 and n != "embed.weight"}
    return weights | wide


def plan(args: Args, config: ModelConfig, prompts: list[list[int]]) -> CacheLayout:
    """The layout: a slab with room for the prompts' index keys and C128 entries, and for a share of the rest."""
    if args.steps < 1:
        raise PromptError(f"--steps {args.steps} must be at least 1.")
    if not 0 < args.slab_share < math.inf:
        raise ConfigError(f"--slab-share {args.slab_share} must be a positive number.")
    longest = min(8_192, config.max_position_embeddings) if args.max_model_len is None else args.max_model_len
    batch = max(2, 1 << (len(prompts) - 1).bit_length())
    pages = sum(-(-min(len(p) + args.steps, longest) // 256) for p in prompts)
    cache = CacheConfig(
        max_model_len=longest, max_requests=batch, gpu_blocks=2 if args.gpu_blocks is None else args.gpu_blocks,
        num_hot_slots=args.hot_slots, rows=args.rows, index_keys=args.index_keys, rule=args.rule, backup=args.backup,
        reclaim=args.reclaim, host_blocks=3 + pages + longest // 256 if args.host_gib is None else None,
        host_pool_bytes=None if args.host_gib is None else to_bytes("--host-gib", args.host_gib),
    )  # fmt: skip
    layout = plan_layout(config, cache)
    check_input(prompts, layout, **run_options(args))
    if args.gpu_blocks is not None:
        return layout
    return plan_layout(config, dataclasses.replace(cache, gpu_blocks=share_blocks(args, layout, [len(p) for p in prompts])))


def share_blocks(args: Args, layout: CacheLayout, lengths: list[int]) -> int:
    """Blocks of the slab that `--slab-share` asks for, or the least that the requests need, with a note."""
    pages = sum(map(layout.num_pages, lengths))
    tiered_blocks = layout.num_resident_groups * pages + layout.hot_blocks * len(lengths)
    rest = 1 + layout.num_base_groups * pages
    blocks = rest + math.ceil(args.slab_share * tiered_blocks)
    least = least_gpu_blocks(lengths, layout, max_new_tokens=args.steps + 1, call_steps=args.call_steps)
    if blocks >= least:
        return blocks
    share = math.ceil((least - rest) / tiered_blocks * 100) / 100
    note = f"--slab-share {args.slab_share} makes {blocks} blocks and these requests need {least}; using {least} (about {share})."
    stderr.print(f"Note: {note}", highlight=False, soft_wrap=True)
    return least


def run_twins(args: Args, model: DeepseekV4, prompts: list[list[int]], layout: CacheLayout) -> tuple[Generation, Generation]:
    """Both twins' runs. They compile and prefill side by side, since compiling keeps one core busy; they decode in turn."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    prefilled, decoding = threading.Barrier(2), threading.Lock()

    def run(twin: str, twin_layout: CacheLayout) -> Generation:
        tasks = {"prefill": progress.add_task(f"{twin:>8}: compile, prefill", total=len(prompts))}

        def tell(stage: str, done: int, total: int) -> None:
            if stage not in tasks:
                tasks[stage] = progress.add_task(f"{twin:>8}: {stage}", total=total)
            progress.update(tasks[stage], completed=done)

        def wait_for_turn(state):
            prefilled.wait()
            decoding.acquire()
            return state

        try:
            return generate(
                model, prompts, twin_layout, twin=twin, on_progress=tell, after_prefill=wait_for_turn, **run_options(args)
            )
        except BaseException:
            prefilled.abort()
            raise
        finally:
            if decoding.locked():
                decoding.release()

    with Progress(*columns, console=stderr) as progress, ThreadPoolExecutor(2) as pool:
        futures = [pool.submit(run, "tiered", layout), pool.submit(run, "resident", resident_layout(layout))]
        failures = [f.exception() for f in futures]
    for failure in sorted(filter(None, failures), key=lambda f: isinstance(f, threading.BrokenBarrierError)):
        raise failure  # the cause, not the other run's broken wait
    return futures[0].result(), futures[1].result()


def table_of(title: str, *columns: str) -> Table:
    """A table that is readable at 80 columns: names and words give way by folding, numbers never do."""
    table = Table(title=title, title_justify="left", caption_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for column in columns:
        is_text = column in ("prompt", "tier", "holds", "twin")
        table.add_column(column, justify="left" if is_text else "right", no_wrap=not is_text, overflow="fold")
    return table


def describe(layout: CacheLayout, prompts: list[list[int]], weights: str) -> Table:
    """What the budgets became."""
    table = table_of(f"layout: {layout.cache.rule} rule, {layout.cache.rows} rows", "tier", "blocks", "bytes", "holds")
    groups = " | ".join(", ".join(str(p.layer) for p in group) for group in layout.resident_groups)
    hot_bytes = layout.hot_blocks * layout.stride
    for tier, blocks, size, holds in (
        ("GPU slab", layout.gpu_blocks, layout.slab_bytes, f"C4 layers in groups {groups}; index keys, C128 entries"),
        ("host pools", layout.host_blocks, layout.host_bytes, f"C4 layers: {len(layout.model.c4_layers)}"),
        ("hot region", layout.hot_blocks, hot_bytes, f"hot slots a request: {layout.num_hot_slots}; in the slab"),
    ):
        table.add_row(tier, f"{blocks:,}", f"{mib(size)} MiB", holds)
    table.caption = f"weights: {escape(weights)}; prompts: {len(prompts)}, of {', '.join(f'{len(p):,}' for p in prompts)} tokens"
    return table


def page_table(run: Generation, names: list[str]) -> Table:
    """A row per request: where its pages ended, and what moved."""
    columns = ("prompt", "context", "on GPU", "on host", "in decode", "to GPU", "to host")
    table = table_of("requests: pages on the GPU, pages that left it for the host; MiB moved each way", *columns)
    for name, report in zip(names, run.reports, strict=True):
        lost_in_decode = report.pages_lost - report.pages_lost_in_prefill
        numbers = (report.context, report.pages_resident, report.pages_lost, lost_in_decode)
        moved = (report.bytes_to_gpu, report.bytes_to_host)
        table.add_row(escape(name), *(f"{n:,}" for n in numbers), *map(mib, moved))
    return table


def reference_table(run: Generation, names: list[str]) -> Table:
    """A row per request: where the entries stood that its steps selected."""
    table = table_of("requests: selected entries, all C4 layers and decode steps", "prompt", *COLUMNS)
    table.caption = "hit rate: of the entries whose page has left the GPU, those that a hot slot held"
    for name, report in zip(names, run.reports, strict=True):
        table.add_row(escape(name), *count_cells(report.counts))
    return table


def layer_table(run: Generation, layout: CacheLayout) -> Table:
    """A row per C4 layer."""
    table = table_of("C4 layers: selected entries, all requests and decode steps", "layer", *COLUMNS)
    for i, layer in enumerate(layout.model.c4_layers):
        table.add_row(str(layer), *count_cells({name: values[i] for name, values in run.layer_counts.items()}))
    return table


COLUMNS = (*(name.replace("_", " ") for name in COUNT_NAMES), "hit rate")


def count_cells(counts: dict[str, int]) -> list[str]:
    """Cells of `COLUMNS`; the hit rate is that of entries that were neither resident nor newest."""
    looked_up = counts["hot_hits"] + counts["misses"]
    return [f"{counts[n]:,}" for n in COUNT_NAMES] + [f"{counts['hot_hits'] / looked_up:.1%}" if looked_up else "-"]


def token_lines(run: Generation, names: list[str]) -> str:
    """The first tokens of each request, through the tiers."""
    lines = (f"{escape(name)}: {' '.join(map(str, tokens[:12]))} ..." for name, tokens in zip(names, run.tokens, strict=True))
    return "\n".join(("first tokens decoded through the tiers:", *lines))


def speed_table(*runs: Generation) -> Table:
    """What each twin took."""
    table = table_of("speed", "twin", "tokens/s", "steps", "prefill s", "decode s", "compile s")
    for run in runs:
        seconds = (run.prefill_seconds, run.decode_seconds, run.compile_seconds)
        table.add_row(run.twin, f"{run.tokens_per_second:,.1f}", f"{run.decode_steps:,}", *(f"{s:,.1f}" for s in seconds))
    return table


def say(verdict: Verdict, run: Generation) -> str:
    """The verdict."""
    sampled = sum(map(len, run.tokens))
    count = sum(logits.size for logits in run.logits)
    colour = "green" if verdict.equal else "red"
    tokens, bits = (("equal", "different")[not same] for same in (verdict.tokens_equal, verdict.logits_bit_equal))
    lost, pages = sum(r.pages_lost for r in run.reports), sum(r.pages_lost + r.pages_resident for r in run.reports)
    said = f"{sampled} tokens {tokens}; {count:,} logits {bits}, bit for bit; {lost} of {pages} pages had left the GPU"
    return f"[bold {colour}]verdict, tiered against fully resident: {said}[/]"


def summary(verdict: Verdict, run: Generation) -> dict:
    """The JSON line."""
    sums = {name: sum(values) for name, values in run.layer_counts.items()}
    sums["resident_hits"] = sums.pop("resident")
    return {
        "tokens_equal": verdict.tokens_equal,
        "logits_bit_equal": verdict.logits_bit_equal,
        "spilled_pages": sum(r.pages_lost for r in run.reports),
        "spilled_in_decode": sum(r.pages_lost - r.pages_lost_in_prefill for r in run.reports),
        "pages": sum(r.pages_lost + r.pages_resident for r in run.reports),
        **sums,
        "misses_per_layer": run.layer_counts["misses"],
        "hit_rate": run.hit_rate,
        "bytes_to_gpu": sum(r.bytes_to_gpu for r in run.reports),
        "bytes_to_host": sum(r.bytes_to_host for r in run.reports),
        "tokens_per_s": run.tokens_per_second,
        "traces": run.traces,
        "device": jax.devices()[0].device_kind,
        "jax": jax.__version__,
    }


def mib(count: int) -> str:
    return f"{count / 2**20:,.1f}"


if __name__ == "__main__":
    run_command(main, Args, __doc__)
