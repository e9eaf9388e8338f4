"""What does each way of giving history up cost in tokens/s, and what does it move, on the same requests?

`base` gives pages up when blocks are short, `eager` as soon as they may go, `unpin` lets them count as free and reads them in
place until their blocks are handed out. Several requests decode side by side on slabs of different sizes. Every run is compared
with the fully resident twin first, bit for bit; then it is timed, by turns with the others. The table for people goes to stderr;
the last line of stdout is JSON. Exit code 0; 1: a run was not equal; 2: bad input.

    .venv/bin/python scripts/bench_reclaim.py
    .venv/bin/python scripts/bench_reclaim.py --model demo --rows fp8 --tokens 2400 --shares 0.3
"""

import dataclasses
import importlib.metadata
import json
import math
import os
import statistics
from typing import Any

if importlib.metadata.version("jaxlib").startswith("0.11."):  # most of a short run on a CPU is compilation
    os.environ.setdefault("XLA_FLAGS", "--xla_cpu_opt_preset=fast_compile")

import jax
import numpy as np
from rich.console import Console
from rich.table import Table

from hisparse_jax.command import check_least, run_command
from hisparse_jax.config import CacheConfig, ConfigError, preset
from hisparse_jax.generation import Generation, compare, generate, least_gpu_blocks, random_model, resident_layout
from hisparse_jax.layout import CacheLayout, plan_layout
from hisparse_jax.tiered import COUNT_NAMES

stderr = Console(stderr=True, width=160)


@dataclasses.dataclass(frozen=True)
class Args:
    policies: tuple[str, ...] = ("base", "eager", "unpin")
    """Of `CacheConfig.reclaim`."""
    shares: tuple[float, ...] = (0.1, 0.5)
    """Slab sizes: 0 is the least that the requests need, 1 holds them all resident."""
    requests: int = 4
    tokens: int = 900
    """Tokens of the longest prompt; each of the others is an eighth shorter than the one before."""
    steps: int = 256
    """Tokens decoded after each prompt's first."""
    model: str = "tiny"
    """Preset, with random weights."""
    rows: str = "f32"
    backup: str = "write_through"
    page_entries: int = 32
    """C4 entries of a page."""
    hot_slots: int | None = None
    stretch_steps: int = 16
    samples: int = 3
    """Timed runs of each."""
    seed: int = 0


def main(args: Args) -> int:
    check_least(args, seed=0, tokens=1, steps=1)
    if not args.policies or not args.shares:
        raise ConfigError("--policies and --shares need a value each.")
    if args.samples < 1 or args.requests < 1 or not all(0 <= share <= 1 for share in args.shares):
        raise ConfigError(f"samples={args.samples} and requests={args.requests} must be positive, shares={args.shares} in 0..1.")
    prompts = make_prompts(args)
    layouts = {(share, policy): plan(args, prompts, share, policy) for share in args.shares for policy in args.policies}
    model = random_model(preset(args.model), args.rows, args.seed)
    options = {"max_new_tokens": args.steps + 1, "seed": args.seed, "temperature": 1.0}
    twin = generate(model, prompts, resident_layout(next(iter(layouts.values()))), twin="resident", **options)
    runs: dict[tuple[float, str], list[Generation]] = {key: [] for key in layouts}
    for sample in range(args.samples + 1):
        for (share, policy), layout in layouts.items():
            stderr.print(f"round {sample} of {args.samples}: slab {share:.0%}, {policy}", highlight=False)
            runs[share, policy].append(generate(model, prompts, layout, **options))
    rows = [row(key, layouts[key], *runs[key], twin=twin) for key in layouts]
    stderr.print(as_table(rows, twin))
    about = {"device": jax.devices()[0].device_kind, "jax": jax.__version__, **dataclasses.asdict(args)}
    print(json.dumps(about | {"resident_tokens_per_s": twin.tokens_per_second, "rows": rows}))
    return 0 if all(row["equal"] for row in rows) else 1


def make_prompts(args: Args) -> list[list[int]]:
    """Random tokens of unlike lengths."""
    rng, vocab = np.random.default_rng(args.seed), preset(args.model).vocab_size
    return [rng.integers(0, vocab, max(1, args.tokens - i * args.tokens // 8)).tolist() for i in range(args.requests)]


def plan(args: Args, prompts: list[list[int]], share: float, policy: str) -> CacheLayout:
    """A slab between the least for these requests and one that holds them resident; the same for every policy."""
    batch = max(2, 1 << (args.requests - 1).bit_length())
    longest = args.tokens + args.steps
    cache = CacheConfig(
        max_model_len=longest, max_requests=batch, gpu_blocks=2, host_blocks=2 + batch * longest, num_hot_slots=args.hot_slots,
        rows=args.rows, backup=args.backup, page_entries=args.page_entries, stretch_steps=args.stretch_steps,
    )  # fmt: skip
    draft = plan_layout(preset(args.model), cache)
    lengths = [len(prompt) for prompt in prompts]
    pages = [draft.num_pages(n + args.steps) for n in lengths]
    all_resident = 1 + draft.growing_groups * sum(pages)
    eager = dataclasses.replace(draft, cache=dataclasses.replace(cache, reclaim="eager"))
    least = max(least_gpu_blocks(lengths, layout, max_new_tokens=args.steps + 1) for layout in (draft, eager))
    blocks = min(least, all_resident) + math.ceil(share * max(0, all_resident - least))
    counts = {"gpu_blocks": blocks, "host_blocks": max(sum(pages), draft.max_pages + 1) + 1, "reclaim": policy}
    return plan_layout(preset(args.model), dataclasses.replace(cache, **counts))


def row(key: tuple[float, str], layout: CacheLayout, first: Generation, *timed: Generation, twin: Generation) -> dict[str, Any]:
    """The figures of one slab and policy: counts of a run (they are the same in each), and times of all but the first."""
    equal = all(compare(run, twin).equal for run in (first, *timed))
    speeds = [run.tokens_per_second for run in timed]
    counts = {name: sum(report.counts[name] for report in first.reports) for name in COUNT_NAMES}
    return {
        "share": key[0],
        "policy": key[1],
        "gpu_blocks": layout.gpu_blocks,
        "equal": equal,
        "tokens_per_s": statistics.median(speeds),
        "slowest": min(speeds),
        "fastest": max(speeds),
        **counts,
        "hit_rate": first.hit_rate,
        "bytes_to_gpu": sum(report.bytes_to_gpu for report in first.reports),
        "bytes_to_host": sum(report.bytes_to_host for report in first.reports),
        "pages_lost": sum(report.pages_lost for report in first.reports),
    }


def as_table(rows: list[dict[str, Any]], twin: Generation) -> Table:
    """One line per slab and policy."""
    table = Table(title=f"resident twin: {twin.tokens_per_second:.1f} tokens/s", title_justify="left")
    names = ("resident", "newest", "hot_hits", "misses")
    columns = ("slab", "blocks", "policy", "equal", "tokens/s", *names, "to GPU, MiB", "to host, MiB", "pages lost")
    for column in columns:
        table.add_column(column.replace("_", " "), justify="left" if column in ("policy", "equal") else "right", no_wrap=True)
    for row in rows:
        speed = f"{row['tokens_per_s']:.1f} ({row['slowest']:.1f} - {row['fastest']:.1f})"
        moved = [f"{row[name] / 2**20:.2f}" for name in ("bytes_to_gpu", "bytes_to_host")]
        counts = [f"{row[name]:,}" for name in names]
        equal = "yes" if row["equal"] else "[red]NO[/]"
        head = f"{row['share']:.0%}", str(row["gpu_blocks"]), row["policy"], equal
        table.add_row(*head, speed, *counts, *moved, str(row["pages_lost"]))
    return table


if __name__ == "__main__":
    run_command(main, Args, __doc__)
