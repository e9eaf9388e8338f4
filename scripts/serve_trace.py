"""What does an engine hold, move and wait for while requests come and go?

Serves a seeded trace of arrivals on a cache that is too small for all of them, and shows the engine as it runs: the queue, pages
by state, both pools, bytes each way, what became of the entries that each C4 layer and each request selected. `--plain` prints a
line now and then instead, as does a stderr that is no terminal. The view goes to stderr; the last line of stdout is JSON. Exit
code 0; 1: a request failed or has not ended; 2: bad input.

    .venv/bin/python scripts/serve_trace.py
    .venv/bin/python scripts/serve_trace.py --plain --metrics-file metrics.prom --reclaim unpin
"""

import contextlib
import dataclasses
import importlib.metadata
import json
import os
import pathlib
import time
from collections.abc import Iterator, Mapping

if importlib.metadata.version("jaxlib").startswith("0.11."):  # most of a short run on a CPU is compilation
    os.environ.setdefault("XLA_FLAGS", "--xla_cpu_opt_preset=fast_compile")

import jax
import numpy as np
import soak
from rich.columns import Columns
from rich.console import Console, Group
from rich.live import Live
from rich.table import Table

from hisparse_jax.command import check_least, run_command
from hisparse_jax.config import ConfigError, preset
from hisparse_jax.engine import End, Engine, EngineConfig, Handle
from hisparse_jax.generation import random_model
from hisparse_jax.layout import CacheLayout
from hisparse_jax.metrics import PAGE_STATES, REQUEST_STATES, Snapshot, prometheus_text
from hisparse_jax.tiered import COUNT_NAMES

stderr = Console(stderr=True)

SHOWN = 16
"""Requests in the view, oldest first."""


@dataclasses.dataclass(frozen=True)
class Args:
    requests: int = 32
    """Requests in the trace."""
    gap: float = 3.0
    """Rounds of the engine between two arrivals, on average."""
    prompt_tokens: int = 400
    """Median length of a prompt; lengths are log-normal."""
    new_tokens: int = 96
    """Median of the tokens asked for."""
    oversubscribe: float = 4.0
    """GPU blocks that full slots would want, were they resident, per block that there is."""
    rounds: int = 5_000
    """In which all must have ended."""
    seed: int = 0
    """Of weights and trace."""
    model: str = "tiny"
    """Preset, with random weights."""
    rows: str = "f32"
    slots: int = 4
    parked: int = 3
    max_model_len: int = 1_024
    backup: str = "write_through"
    reclaim: str = "base"
    call_steps: int = 8
    """Decode steps in one round."""
    growth_reserve: float = 0.3
    patience: int = 64
    plain: bool = False
    """Lines of text instead of the live view."""
    every: int = 25
    """Rounds between two of those lines, and between two writes of the metrics file."""
    metrics_file: pathlib.Path | None = None
    """Written in Prometheus' text format, while serving and at the end."""


@dataclasses.dataclass(frozen=True)
class Arrival:
    """A request of the trace and the round in which it comes."""

    round: int
    prompt: list[int]
    max_new_tokens: int
    seed: int


def main(args: Args) -> int:
    check(args)
    layout = soak.plan(
        soak.Args(
            oversubscribe=args.oversubscribe, model=args.model, rows=args.rows, slots=args.slots, parked=args.parked,
            max_model_len=args.max_model_len, backup=args.backup, reclaim=args.reclaim, call_steps=args.call_steps,
        )
    )  # fmt: skip
    arrivals = make_trace(args, layout)
    write_metrics(args, None)
    model = random_model(preset(args.model), args.rows, args.seed)
    settings = EngineConfig(call_steps=args.call_steps, growth_reserve=args.growth_reserve, patience=args.patience)
    engine = Engine(model, layout, settings, threaded=False)
    begin = time.perf_counter()
    handles = serve(args, engine, arrivals)
    seconds, last = time.perf_counter() - begin, engine.snapshot
    write_metrics(args, last)
    engine.shutdown(drain=False)
    print(json.dumps(summary(args, layout, last, seconds)))
    return 1 if len(handles) < len(arrivals) or last.requests or last.ended[End.FAILED] else 0


def check(args: Args) -> None:
    """Raises `ConfigError` for what no trace could be made of."""
    check_least(args, requests=1, prompt_tokens=1, new_tokens=1, rounds=1, every=1, gap=0, seed=0)
    if not args.oversubscribe > 0:
        raise ConfigError(f"--oversubscribe {args.oversubscribe} must be positive.")


def make_trace(args: Args, layout: CacheLayout) -> list[Arrival]:
    """Arrivals in order of time; exponential gaps, log-normal lengths, cut to what the context holds."""
    rng, most = np.random.default_rng(args.seed), layout.cache.max_model_len
    rounds = np.cumsum(rng.exponential(args.gap, args.requests))
    arrivals = []
    for number, when in enumerate(rounds):
        new = min(max(1, round(args.new_tokens * rng.lognormal(0, 0.7))), most // 2)
        length = min(max(1, round(args.prompt_tokens * rng.lognormal(0, 0.7))), most - new)
        arrivals.append(Arrival(int(when), rng.integers(0, layout.model.vocab_size, length).tolist(), new, number))
    return arrivals


def serve(args: Args, engine: Engine, arrivals: list[Arrival]) -> list[Handle]:
    """Rounds until all have come and ended, or there are no more rounds; what came."""
    handles: list[Handle] = []
    with shown(args) as show:
        for number in range(args.rounds):
            while len(handles) < len(arrivals) and arrivals[len(handles)].round <= number:
                new = arrivals[len(handles)]
                handles.append(engine.submit(new.prompt, new.max_new_tokens, temperature=1.0, seed=new.seed))
            busy = engine.step()
            show(engine.snapshot)
            if number % args.every == 0:
                write_metrics(args, engine.snapshot)
            if not busy and len(handles) == len(arrivals):
                break
    return handles


@contextlib.contextmanager
def shown(args: Args) -> Iterator:
    """A function that shows a snapshot: in place on a terminal, else as a line of text every `every` rounds."""
    if args.plain or not stderr.is_terminal:
        yield lambda now: stderr.print(line(now), highlight=False, soft_wrap=True) if now.step % args.every == 1 else None
        return
    with Live(console=stderr, refresh_per_second=8, transient=False) as live:
        yield lambda now: live.update(view(now))


def line(now: Snapshot) -> str:
    """The snapshot in a line."""
    states = ", ".join(f"{getattr(now, name)} {name}" for name in REQUEST_STATES)
    pages = ", ".join(f"{count} {name.replace('_', ' ')}" for name, count in now.pages.items())
    moved = f"{now.bytes_to_gpu / 2**20:.2f} MiB to GPU, {now.bytes_to_host / 2**20:.2f} to host"
    return f"round {now.step}: {states}; pages: {pages}; {moved}; hit rate {hit_rate(now)}"


def hit_rate(now: Snapshot) -> str:
    """As a share; a dash before anything was looked up."""
    return f"{now.hit_rate:.1%}" if any(layer.hot_hits or layer.misses for layer in now.layers) else "-"


def view(now: Snapshot) -> Group:
    """The snapshot as tables."""
    states = {name: getattr(now, name) for name in REQUEST_STATES}
    pools = {
        "GPU blocks used": f"{now.gpu.used:,} of {now.gpu.used + now.gpu.free:,}",
        "host blocks used": f"{now.host.used:,} of {now.host.used + now.host.free:,}",
        "hot regions": now.hot_regions,
        "MiB to GPU": f"{now.bytes_to_gpu / 2**20:,.2f}",
        "MiB to host": f"{now.bytes_to_host / 2**20:,.2f}",
        "hit rate": hit_rate(now),
    }
    waits = {f"waited for {name}": rounds for name, rounds in now.waits.items()}
    ended = {str(end): count for end, count in now.ended.items()}
    pages = {name.replace("_", " "): now.pages[name] for name in PAGE_STATES}
    boxes = (
        pairs("requests", states | ended),
        pairs("pages", pages),
        pairs("pools", pools),
        pairs("queue", waits | dict(now.events)),
    )
    layers = counted("C4 layers: entries selected in decode", ("layer",))
    for layer in now.layers:
        layers.add_row(str(layer.layer), *(f"{getattr(layer, name):,}" for name in COUNT_NAMES), mib(layer.bytes_to_gpu))
    requests = counted("requests", ("number", "state", "tokens", "new", "pages", "on GPU", "hot"))
    for use in now.requests[:SHOWN]:
        head = use.number, use.state, f"{use.length:,}", use.produced, use.pages, use.resident, "yes" if use.hot else ""
        requests.add_row(*map(str, head), *(f"{use.counts[name]:,}" for name in COUNT_NAMES), mib(use.bytes_to_gpu))
    left = len(now.requests) - SHOWN
    return Group(f"round {now.step}", Columns(boxes), layers, requests, f"and {left} more" if left > 0 else "")


def pairs(title: str, values: Mapping[str, object]) -> Table:
    table = Table(title=title, title_justify="left", show_header=False)
    table.add_column()
    table.add_column(justify="right")
    for name, value in values.items():
        table.add_row(name.replace("_", " "), f"{value:,}" if isinstance(value, int) else str(value))
    return table


def counted(title: str, head: tuple[str, ...]) -> Table:
    table = Table(title=title, title_justify="left")
    for column in (*head, *COUNT_NAMES, "MiB to GPU"):
        table.add_column(column.replace("_", " "), justify="left" if column == "state" else "right", no_wrap=True)
    return table


def mib(size: int) -> str:
    return f"{size / 2**20:,.2f}"


def write_metrics(args: Args, now: Snapshot | None) -> None:
    """The newest snapshot as Prometheus text; None: an empty file, to learn early whether it can be written."""
    if args.metrics_file is None:
        return
    try:
        args.metrics_file.write_text("" if now is None else prometheus_text(now))
    except OSError as error:
        raise ConfigError(f"--metrics-file {args.metrics_file} cannot be written: {error}") from None


def summary(args: Args, layout: CacheLayout, last: Snapshot, seconds: float) -> dict:
    """What a program wants to know of the run."""
    return {
        "requests": args.requests,
        "open": len(last.requests),
        **{str(end): count for end, count in last.ended.items()},
        "rounds": last.step,
        "seconds": round(seconds, 2),
        "tokens_per_s": round(last.events["decoded_tokens"] / seconds, 2),
        **last.events,
        "waits": dict(last.waits),
        "queue_seconds": round(last.queue_seconds, 2),
        **{name: sum(getattr(layer, name) for layer in last.layers) for name in COUNT_NAMES},
        "hit_rate": last.hit_rate,
        "bytes_to_gpu": last.bytes_to_gpu,
        "bytes_to_host": last.bytes_to_host,
        "gpu_blocks": layout.gpu_blocks,
        "host_blocks": layout.host_blocks,
        "reclaim": args.reclaim,
        "seed": args.seed,
        "device": jax.devices()[0].device_kind,
        "jax": jax.__version__,
    }


if __name__ == "__main__":
    run_command(main, Args, __doc__)
