"""How long does each kernel of the tiers take, beside its target, its peer, and what memory and link allow?

Every variant of every op is compared with its reference first, then timed; a variant that loses, or fails, stays in the
table. One sample is one compiled program of many launches in a row, each on random data of its own that is drawn anew
for every sample; a sample's time is divided by its launches and nothing is subtracted (so the dispatch of one program is
shared by its launches): "in program", a median of 20 samples. "kernel" is the GPU's own time for the op's kernels, from a
profile, without XLA's index arithmetic and launch gaps. Compilation and drawing stand apart. The table for people goes to stderr;
the last line of stdout is JSON. On a CPU only `xla` runs, with tiny shapes: a check that the script works.

    .venv/bin/python scripts/bench_kernels.py
    .venv/bin/python scripts/bench_kernels.py --only gather --launches 64
"""

import dataclasses
import functools
import json
import os
import time
import traceback
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from bench_cases import cases
from bench_inputs import TINY, WHOLE_LOOP_GRAPH, Case, Sizes, on_gpu
from device_times import XLA, device_times
from rich.console import Console
from rich.table import Table

from hisparse_jax import ffi
from hisparse_jax.command import check_least, run_command
from hisparse_jax.config import ConfigError
from pallas_kernels import cuda_kernels

stderr = Console(stderr=True, width=200)

PROFILED = 3
"""Samples in a profile."""

DEFAULTS = ("cuda", "cuda at once", "ffi")
"""Variants that the model runs on a GPU."""

OPTIONS = {
    "default": {},
    "graph": WHOLE_LOOP_GRAPH,
    "stream": {"xla_gpu_enable_command_buffer": ""},
}


@dataclasses.dataclass(frozen=True)
class Args:
    only: str = ""
    """Run the cases whose name contains this, or one of these, parted by commas."""
    variant: str = ""
    """Run the variants whose name contains this."""
    quick: bool = False
    """5 samples and few launches each."""
    samples: int = 20
    """Samples of each variant."""
    launches: int = 64
    """Launches in one sample, at most; slow variants get fewer."""
    options: str = "default"
    """XLA's use of CUDA graphs: default (runs of 5 and more), graph (everything), stream (none)."""
    profile: bool = True
    """Also read each kernel's own time from a profile, on a GPU."""
    budget: float = 0
    """Seconds after which no further variant is begun; 0: no limit."""
    seed: int = 0


def run(case: Case, variant: str, args: Args) -> dict[str, Any]:
    """Checks one variant, then times it."""
    step = case.variants[variant]
    launches = 2 if not on_gpu() else min(args.launches, case.most, 8 if variant in case.slow else case.most)
    samples = 2 if not on_gpu() else args.samples
    options = OPTIONS[args.options] if on_gpu() else {}
    environment = getattr(step, "environment", {})
    os.environ.update(environment)
    try:
        fixed, state = case.fixed(), case.init()
        shardings = jax.tree.map(lambda x: x.sharding, state)
        if case.check:
            one = jax.jit(step, donate_argnums=1, out_shardings=(shardings, None))
            case.check(functools.partial(one, fixed))

        def many(fixed, state, batch):
            outputs = []
            for inputs in batch:
                state, out = step(fixed, state, inputs)
                outputs.append(out)
            return state, jax.tree.map(lambda *of_launch: jnp.stack(of_launch), *outputs)  # one array: each costs the host time

        state = case.init()
        program = jax.jit(many, donate_argnums=1, out_shardings=(shardings, None), compiler_options=options)
        refill = jax.jit(lambda old, new: jax.lax.optimization_barrier(new), donate_argnums=0, keep_unused=True)
        inputs = case.draw(jax.random.key(args.seed), launches)
        pinned = any(x.sharding.memory_kind == "pinned_host" for x in jax.tree.leaves(inputs))
        begin = time.perf_counter()
        state, out = jax.block_until_ready(program(fixed, state, inputs))
        compiling, times = time.perf_counter() - begin, []
        case.expect(out)
        del out

        def once(sample: int, state: Any, inputs: tuple) -> tuple[float, Any, tuple]:
            """One sample on data of its own: seconds, state, inputs."""
            new = case.draw(jax.random.fold_in(jax.random.key(args.seed), sample), launches)
            inputs = jax.block_until_ready(new if pinned else refill(inputs, new))  # the same buffers: graphs stay as they are
            jax.block_until_ready(state)
            begin = time.perf_counter()
            state, out = jax.block_until_ready(program(fixed, state, inputs))
            elapsed = time.perf_counter() - begin
            del out
            return elapsed, state, inputs

        for sample in range(-2, samples):
            elapsed, state, inputs = once(sample + 3, state, inputs)
            if sample >= 0:
                times.append(1e6 * elapsed / launches)
        kernels = {}
        if on_gpu() and args.profile:
            keys = [jax.random.fold_in(jax.random.key(args.seed), 1_000 + sample) for sample in range(PROFILED)]
            drawn = jax.block_until_ready([case.draw(key, launches) for key in keys])
            with device_times() as busy:
                for inputs in drawn:
                    state, out = jax.block_until_ready(program(fixed, state, inputs))
            case.expect(out)
            kernels = {name: float(np.median(us)) * len(us) / (PROFILED * launches) for name, us in busy.items()}
    finally:
        for name in environment:
            os.environ.pop(name, None)
    median = float(np.median(times))
    return {
        "case": case.name,
        "shape": case.shape,
        "variant": variant,
        "us": median,
        "kernel_us": sum(us for name, us in kernels.items() if not XLA.search(name)) or None,
        "kernels": kernels,
        "p10": float(np.percentile(times, 10)),
        "p90": float(np.percentile(times, 90)),
        "launches": launches,
        "compile_s": compiling,
        "first": case.first,
        "then": case.then,
        "peer": case.peer,
        "gb_per_s": case.num_bytes / median / 1e3 if case.num_bytes else None,
        "floor_us": case.floor_us,
    }


def tried(case: Case, variant: str, args: Args) -> dict[str, Any]:
    """`run`, or why it failed: a broken variant is a row, not the end."""
    try:
        return run(case, variant, args)
    except Exception as error:
        stderr.print(
            f"[red]{case.name} {case.shape} {variant}[/]", "".join(traceback.format_exception(error)[-3:])[-1500:], markup=True
        )
        return {"case": case.name, "shape": case.shape, "variant": variant, "error": f"{type(error).__name__}: {error}"[:300]}


def as_table(rows: list[dict[str, Any]]) -> Table:
    table = Table(title=f"{jax.devices()[0].device_kind}, jax {jax.__version__}", title_justify="left")
    for column in (
        "case",
        "shape",
        "variant",
        "kernel us",
        "in program",
        "p10 - p90",
        "first",
        "then",
        "peer",
        "GB/s",
        "floor share",
    ):
        table.add_column(column, justify="left" if column in ("case", "shape", "variant") else "right", no_wrap=True)
    for row in rows:
        if "us" not in row:
            end, why = ("[red]failed[/]", row["error"]) if "error" in row else ("not run", row["not_run"])
            table.add_row(row["case"], row["shape"], row["variant"], end, "", why[:60].replace("[", "("))
            continue
        kernel = f"{row['kernel_us']:.2f}" if row["kernel_us"] else ""
        rate = f"{row['gb_per_s']:.1f}" if row["gb_per_s"] else ""
        share = f"{row['floor_us'] / row['us']:.0%}" if row["floor_us"] else ""
        spread = f"{row['p10']:.1f} - {row['p90']:.1f}"
        goals = row["first"], row["then"], row["peer"]
        table.add_row(row["case"], row["shape"], row["variant"], kernel, f"{row['us']:.2f}", spread, *goals, rate, share)
    return table


def _later(variant: str) -> int:
    """What runs first where time is short: every op's default, then the rivals, XLA's slow programs last."""
    return 0 if variant in DEFAULTS else 1 if "cuda" in variant else 3 if variant.startswith("xla") else 2


def main(args: Args) -> int:
    check_least(args, samples=1, launches=1, budget=0, seed=0)
    if args.options not in OPTIONS:
        raise ConfigError(f"--options {args.options} is unknown; choose from {', '.join(OPTIONS)}.")
    if args.quick:
        args = dataclasses.replace(args, samples=5, launches=min(args.launches, 32))
    ffi.load_library()
    wanted = [
        (case, variant)
        for case in cases(Sizes() if on_gpu() else TINY)
        if any(part in case.name for part in args.only.split(","))
        for variant in case.variants
        if args.variant in variant
    ]
    if not wanted:
        raise ConfigError(f"no case is named by --only {args.only!r} with a variant by --variant {args.variant!r}.")
    rows, started = {}, time.perf_counter()
    for case, variant in sorted(wanted, key=lambda pair: _later(pair[1])):
        about, begin = {"case": case.name, "shape": case.shape, "variant": variant}, time.perf_counter()
        if args.budget and begin - started > args.budget:
            rows[case.name, case.shape, variant] = about | {"not_run": f"--budget {args.budget:.0f} s is used up"}
            continue
        row = rows[case.name, case.shape, variant] = tried(case, variant, args)
        told = f"{row['us']:.2f} us" if "us" in row else "failed"
        stderr.print(f"{case.name}, {case.shape}, {variant}: {told} ({time.perf_counter() - begin:.1f} s)", highlight=False)
    rows = [rows[case.name, case.shape, variant] for case, variant in wanted]
    stderr.print(as_table(rows))
    kernels = list(cuda_kernels.registered())
    device = jax.devices()[0].device_kind
    print(json.dumps({"device": device, "jax": jax.__version__, "cuda_kernels": kernels, "options": args.options, "rows": rows}))
    return 1 if any("error" in row for row in rows) else 0


if __name__ == "__main__":
    run_command(main, Args, __doc__)
