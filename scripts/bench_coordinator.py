"""Does the head of a stretch cost more the more pages there are?

Times the transitions that `room.make_room` runs before a stretch of at most 64 steps, without a byte of cache: seal full pages,
decide what leaves, un-pin, grow. Per policy, requests, and pages held by each; block tables are as wide as the longest context
asked for, so that only what is held changes, and once as wide as what is held. *idle*: nobody grows, and whatever was to leave
has left. *grow*: all grow by a page, with room. *short*: all grow by a page and no block is free, so history leaves. The table
for people goes to stderr; the last line of stdout is JSON. Exit code 0; 2: bad input.

    .venv/bin/python scripts/bench_coordinator.py
    .venv/bin/python scripts/bench_coordinator.py --requests 1 16 --pages 64 1024 --policies unpin
"""

import dataclasses
import json
import statistics
import time
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int32
from rich.console import Console
from rich.table import Table

from hisparse_jax import coordinator, room
from hisparse_jax.block_pool import allocate
from hisparse_jax.block_tables import blocks_wanted
from hisparse_jax.command import run_command
from hisparse_jax.config import CacheConfig, ConfigError, preset
from hisparse_jax.coordinator import Ledger
from hisparse_jax.layout import CacheLayout, plan_layout
from hisparse_jax.sequences import committed

stderr = Console(stderr=True, width=140)

CASES = ("idle", "grow", "short")


@dataclasses.dataclass(frozen=True)
class Args:
    requests: tuple[int, ...] = (1, 16, 64)
    """Requests with pages; 1 stands in tables of two slots."""
    pages: tuple[int, ...] = (64, 1_024, 4_096)
    """Pages that each of them holds."""
    policies: tuple[str, ...] = ("base", "unpin")
    """Of `CacheConfig.reclaim`."""
    model: str = "v4-flash"
    """Preset that gives the groups and the hot region."""
    samples: int = 15


def main(args: Args) -> int:
    if args.samples < 1 or min(*args.requests, *args.pages) < 1:
        raise ConfigError(f"samples={args.samples}, requests={args.requests} and pages={args.pages} must be at least 1.")
    rows = [row for policy in args.policies for row in measure(args, policy)]
    stderr.print(as_table(rows))
    device = jax.devices()[0].device_kind
    print(json.dumps({"device": device, "jax": jax.__version__, "model": args.model, "samples": args.samples, "rows": rows}))
    return 0


def measure(args: Args, policy: str) -> Iterator[dict[str, Any]]:
    """A row for each case, number of requests, pages held and width of the tables."""
    widest = max(args.pages)
    for requests in args.requests:
        for width, held in [(widest, n) for n in args.pages] + [(n, n) for n in args.pages if n < widest]:
            layout = plan(args, policy, requests, width)
            head = jax.jit(lambda ledger, new, layout=layout: stretch_head(ledger, new, layout), donate_argnums=0)
            for case in CASES:
                before = holding(layout, requests, held, short=case == "short")
                none = jnp.zeros(layout.cache.max_requests, jnp.int32)
                before = before if case == "short" else head(before, none)[0]
                new = none if case == "idle" else none.at[:requests].set(1)
                times = timed(head, before, new, args.samples)
                about = {"policy": policy, "case": case, "requests": requests, "pages": held, "width": width}
                yield about | {"us": statistics.median(times), "p10": np.quantile(times, 0.1), "p90": np.quantile(times, 0.9)}
        stderr.print(f"{policy}, {requests} requests: done", highlight=False)


def plan(args: Args, policy: str, requests: int, width: int) -> CacheLayout:
    """A layout in which every request can hold `width` pages, and one more."""
    model = preset(args.model)
    tokens = 256 * (width + 1)
    model = dataclasses.replace(model, max_position_embeddings=max(tokens, model.max_position_embeddings))
    slots = max(2, 1 << (requests - 1).bit_length())
    cache = CacheConfig(
        max_model_len=tokens, max_requests=slots, gpu_blocks=2, host_blocks=slots * (width + 1) + 2, reclaim=policy
    )
    draft = plan_layout(model, cache)
    blocks = 1 + slots * (draft.growing_groups * (width + 1) + draft.hot_blocks)
    return plan_layout(model, dataclasses.replace(cache, gpu_blocks=blocks))


def stretch_head(ledger: Ledger, new_pages: Int32[Array, " B"], layout: CacheLayout) -> tuple[Ledger, Int32[Array, " B"]]:
    """What `room.make_room` does to the ledger where rows are written through: `(ledger, status)`."""
    ledger = coordinator.seal(ledger, ledger.tables.num_pages - 1)
    needed = blocks_wanted(ledger.tables, new_pages)
    ledger, _ = room.plan_room(ledger, needed, layout, max_pages=room.spill_budget(layout))
    ledger, _, status, _ = coordinator.grow(room.unpin_copied(ledger, needed, layout), new_pages, max_new_pages=1)
    return ledger, status


def holding(layout: CacheLayout, requests: int, pages: int, *, short: bool) -> Ledger:
    """Requests of so many pages, all on the GPU and on the host; where `short`, no further GPU block is free."""
    cache, most = layout.cache, layout.growing_groups * pages * requests
    ledger = coordinator.init_ledger(
        num_blocks=layout.gpu_blocks, num_host_blocks=layout.host_blocks, num_base=layout.num_base_groups,
        num_resident=layout.num_resident_groups, hot_pages=layout.hot_pages, batch=cache.max_requests, max_pages=layout.max_pages,
    )  # fmt: skip
    host, host_blocks, _ = allocate(ledger.host, jnp.int32(requests * pages), max_count=requests * pages)
    pool, blocks, _ = allocate(ledger.tables.pool, jnp.int32(most), max_count=most)
    if short:
        pool, _, _ = allocate(pool, pool.num_free, max_count=layout.gpu_blocks)
    blocks = blocks.reshape(-1, requests, pages)
    tables = ledger.tables.replace(
        pool=pool,
        base=ledger.tables.base.at[:, :requests, :pages].set(blocks[: layout.num_base_groups]),
        resident=ledger.tables.resident.at[:, :requests, :pages].set(blocks[layout.num_base_groups :]),
        num_pages=ledger.tables.num_pages.at[:requests].set(pages),
    )
    host_table = ledger.host_table.at[:requests, :pages].set(host_blocks.reshape(requests, pages))
    return committed(ledger.replace(tables=tables, host=host, host_table=host_table))


def timed(head, before: Ledger, new_pages: Int32[Array, " B"], samples: int) -> list[float]:
    """Microseconds of each call from `before`; compilation and copying stand apart. Raises where somebody could not grow."""
    times = []
    for sample in range(samples + 2):
        ledger = jax.block_until_ready(jax.tree.map(jnp.copy, before))
        begin = time.perf_counter()
        ledger, status = jax.block_until_ready(head(ledger, new_pages))
        times += [1e6 * (time.perf_counter() - begin)] * (sample >= 2)
        grown = np.asarray(ledger.tables.num_pages) - np.asarray(before.tables.num_pages)
        assert not np.asarray(status).any() and (grown == np.asarray(new_pages)).all()
    return times


def as_table(rows: list[dict[str, Any]]) -> Table:
    """One line per policy, requests, width and pages; a column per case."""
    table = Table(title="head of a stretch, microseconds: median (10 % - 90 %)", title_justify="left")
    for column in ("policy", "requests", "table width", "pages held", *CASES):
        table.add_column(column, justify="left" if column == "policy" else "right", no_wrap=True)
    for idle, *others in zip(*[iter(rows)] * len(CASES), strict=True):
        cells = [f"{row['us']:,.0f} ({row['p10']:,.0f} - {row['p90']:,.0f})" for row in (idle, *others)]
        table.add_row(idle["policy"], str(idle["requests"]), f"{idle['width']:,}", f"{idle['pages']:,}", *cells)
    return table


if __name__ == "__main__":
    run_command(main, Args, __doc__)
