"""Does a decode through two tiers give the very logits of one that fits on the GPU?

Decodes a batch of long prompts with most of its C4 history on the host, then the same prompts fully resident, and
compares every token and every bit of every logit. Tables for people go to stderr; the last line of stdout is JSON. Exit code
0: equal; 1: different; 2: bad input.

    .venv/bin/python scripts/generate.py
    .venv/bin/python scripts/generate.py --steps 256 --hot-slots 128 --backup spill --rows bf16
"""

import contextlib
import dataclasses
import importlib.metadata
import json
import math
import os
import pathlib
import sys
import sysconfig
import threading
from concurrent.futures import ThreadPoolExecutor

if importlib.metadata.version("jaxlib").startswith("0.11."):  # most of a short run on a CPU is compilation
    os.environ.setdefault("XLA_FLAGS", "--xla_cpu_opt_preset=fast_compile")

import jax
import jax.numpy as jnp
import tyro
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from hisparse_jax.checkpoint import load_checkpoint
from hisparse_jax.config import CacheConfig, ConfigError, ModelConfig, preset
from hisparse_jax.ffi import FfiError
from hisparse_jax.generation import Generation, Verdict, compare, generate, resident_layout
from hisparse_jax.layout import CacheLayout, plan_layout
from hisparse_jax.model.blocks import DeepseekV4
from hisparse_jax.prompts import PromptError
from hisparse_jax.status import TierError
from hisparse_jax.weights import init_weights

stderr = Console(stderr=True)

DEFAULT_PROMPTS = ("token.py", "signal.py", "email/base64mime.py")
"""Modules of Python's standard library, 2,000 to 4,000 bytes each, of lengths that grow by a page within 128 steps."""


@dataclasses.dataclass(frozen=True)
class Args:
    model: str = "demo"
    """Preset: tiny, demo, v4-flash or v4-pro; random weights from `seed`."""
    checkpoint: pathlib.Path | None = None
    """Folder of safetensors shards, or an .npz with its .json; takes the place of `model`."""
    prompts: tuple[pathlib.Path, ...] = ()
    """Text files, one request each, read as bytes; default: three modules of the standard library."""
    steps: int = 128
    """Decode steps."""
    slab_share: float = 0.4
    """GPU blocks for C4 entries, as a share of what the prompts' resident pages and hot regions would need."""
    gpu_blocks: int | None = None
    """Blocks of the whole slab; takes the place of `slab_share`."""
    host_gib: float | None = None
    """GiB of the host pools; default: what the requests need."""
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
    """Giving pages up: base (when blocks are short) or eager (as soon as they may go)."""
    temperature: float = 0.0
    """0: greedy."""
    seed: int = 0
    """Of the weights and of the sampling keys."""
    call_steps: int = 64
    """Decode steps in one dispatch."""


def main(args: Args) -> int:
    prompts, names = read_prompts(args)
    config, weights = load_weights(args)
    layout = plan(args, config, prompts)
    stderr.print(describe(layout, prompts))
    model = DeepseekV4(config, weights)
    tiered, resident = run_twins(args, model, prompts, layout)
    verdict = compare(tiered, resident)
    stderr.print(request_table(tiered, names), tier_table(tiered, layout), token_lines(tiered, names), sep="\n")
    stderr.print(say(verdict, tiered, resident))
    print(json.dumps(summary(verdict, tiered)))
    return 0 if verdict.equal else 1


def read_prompts(args: Args) -> tuple[list[list[int]], list[str]]:
    """The prompts as token ids (bytes) and their names."""
    library = pathlib.Path(sysconfig.get_path("stdlib"))
    paths = args.prompts or tuple(library / name for name in DEFAULT_PROMPTS)
    try:
        return [list(path.read_bytes()) for path in paths], [path.name for path in paths]
    except OSError as error:
        raise PromptError(f"a prompt file cannot be read: {error}") from None


def load_weights(args: Args) -> tuple[ModelConfig, dict[str, jax.Array]]:
    """The checkpoint, or the preset with random weights; f32 rows compute in float32."""
    dtype = jnp.float32 if args.rows == "f32" else jnp.bfloat16
    if args.checkpoint is None:
        config = preset(args.model)
        return config, held(init_weights(config, args.seed, dtype))
    config, weights, report = load_checkpoint(args.checkpoint, dtype)
    stderr.print(report)
    return config, held(weights)


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
    longest = args.max_model_len or min(8_192, config.max_position_embeddings)
    gpu_blocks = args.gpu_blocks or 2
    batch = max(2, 1 << (max(1, len(prompts)) - 1).bit_length())
    cache = CacheConfig(
        max_model_len=longest, max_requests=batch, gpu_blocks=gpu_blocks, num_hot_slots=args.hot_slots, rows=args.rows,
        index_keys=args.index_keys, rule=args.rule, backup=args.backup, reclaim=args.reclaim,
        host_blocks=None if args.host_gib else 3 + sum(-(-(len(p) + args.steps) // 256) for p in prompts) + longest // 256,
        host_pool_bytes=math.floor(args.host_gib * 2**30) if args.host_gib else None,
    )  # fmt: skip
    layout = plan_layout(config, cache)
    if args.gpu_blocks is not None:
        return layout
    pages = sum(layout.num_pages(len(p)) for p in prompts)
    tiered_blocks = layout.num_resident_groups * pages + layout.hot_blocks * len(prompts)
    blocks = 1 + layout.num_base_groups * pages + math.ceil(args.slab_share * tiered_blocks)
    return plan_layout(config, dataclasses.replace(cache, gpu_blocks=blocks))


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
                model, prompts, twin_layout, max_new_tokens=args.steps + 1, twin=twin, seed=args.seed,
                temperature=args.temperature, call_steps=args.call_steps, on_progress=tell, after_prefill=wait_for_turn,
            )  # fmt: skip
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


def describe(layout: CacheLayout, prompts: list[list[int]]) -> Table:
    """What the budgets became."""
    table = Table(title=f"layout: {layout.cache.rule} rule, {layout.cache.rows} rows", title_justify="left")
    for column in ("tier", "blocks", "bytes", "holds"):
        table.add_column(column, justify="right" if column in ("blocks", "bytes") else "left")
    groups = " | ".join(",".join(str(p.layer) for p in group) for group in layout.resident_groups)
    table.add_row("GPU slab", f"{layout.gpu_blocks:,}", mib(layout.slab_bytes), f"C4 layers in groups {groups}; index, C128")
    table.add_row("host pools", f"{layout.host_blocks:,}", mib(layout.host_bytes), f"{len(layout.model.c4_layers)} C4 layers")
    table.add_row(
        "hot region", f"{layout.hot_blocks}", mib(layout.hot_blocks * layout.stride), f"{layout.num_hot_slots} slots a request"
    )
    table.caption = f"{len(prompts)} prompts of {', '.join(f'{len(p):,}' for p in prompts)} tokens"
    return table


def request_table(run: Generation, names: list[str]) -> Table:
    """A row per request."""
    table = Table(
        title="requests: pages here / lost / of them in decode; references and bytes of all C4 layers", title_justify="left"
    )
    for column in ("prompt", "context", "pages", "resident", "newest", "hot", "misses", "MiB to GPU", "to host"):
        table.add_column(column, justify="left" if column == "prompt" else "right")
    for name, report in zip(names, run.reports, strict=True):
        pages = (report.pages_resident, report.pages_lost, report.pages_lost - report.pages_lost_in_prefill)
        table.add_row(
            name, f"{report.context:,}", "/".join(map(str, pages)),
            *(f"{report.counts[n]:,}" for n in ("resident", "newest", "hot_hits", "misses")),
            f"{report.bytes_to_gpu / 2**20:,.1f}", f"{report.bytes_to_host / 2**20:,.1f}",
        )  # fmt: skip
    return table


def token_lines(run: Generation, names: list[str]) -> str:
    """The first tokens of each request."""
    return "\n".join(f"{name}: {' '.join(map(str, tokens[:12]))} ..." for name, tokens in zip(names, run.tokens, strict=True))


def tier_table(run: Generation, layout: CacheLayout) -> Table:
    """A row per C4 layer."""
    table = Table(title="C4 layers (all requests)", title_justify="left")
    for column in ("layer", *run.layer_counts, "hit rate"):
        table.add_column(column.replace("_", " "), justify="right")
    for i, layer in enumerate(layout.model.c4_layers):
        counts = {name: values[i] for name, values in run.layer_counts.items()}
        looked_up = counts["hot_hits"] + counts["misses"]
        rate = f"{counts['hot_hits'] / looked_up:.1%}" if looked_up else "-"
        table.add_row(str(layer), *(f"{v:,}" for v in counts.values()), rate)
    return table


def say(verdict: Verdict, tiered: Generation, resident: Generation) -> str:
    """The verdict, and what it cost."""
    lines = [
        f"{g.twin:>9}: {g.tokens_per_second:,.1f} tokens/s over {g.decode_steps} steps "
        f"(prefill {g.prefill_seconds:.1f} s, decode {g.decode_seconds:.1f} s, compiling the loop {g.compile_seconds:.1f} s)"
        for g in (tiered, resident)
    ]
    count = sum(logits.size for logits in tiered.logits)
    colour = "green" if verdict.equal else "red"
    tokens, bits = (("equal", "different")[not same] for same in (verdict.tokens_equal, verdict.logits_bit_equal))
    lines.append(f"[bold {colour}]verdict: tokens {tokens}; {count:,} logits {bits}, bit for bit[/]")
    return "\n".join(lines)


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
    return f"{count / 2**20:,.1f} MiB"


if __name__ == "__main__":
    arguments = tyro.cli(Args, description=__doc__)
    with contextlib.suppress(BrokenPipeError):
        try:
            sys.exit(main(arguments))
        except (ConfigError, PromptError, TierError, FfiError) as error:
            stderr.print(f"[red]generate:[/] {escape(str(error))}", highlight=False, soft_wrap=True)
            sys.exit(2)
