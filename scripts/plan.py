"""How many requests of one context length fit, resident and tiered, and where does every byte go?

Plans the cache of a model under two budgets, the GPU slab alone and the C4 host pools alone, without touching a
device. Tables for people go to stderr; the last line of stdout is JSON.

    .venv/bin/python scripts/plan.py --model v4-flash --rule base --hbm-gib 40 --host-gib 128 --context 131072
"""

import dataclasses
import json
from typing import Any

from rich.console import Console
from rich.table import Table

from hisparse_jax import capacity
from hisparse_jax.command import run_command, to_bytes
from hisparse_jax.config import CacheConfig, preset
from hisparse_jax.layout import CacheLayout, plan_layout

stderr = Console(stderr=True)


@dataclasses.dataclass(frozen=True)
class Args:
    model: str = "v4-flash"
    """Preset: tiny, demo, v4-flash or v4-pro."""
    rule: str = "searched"
    """Layout: searched (least steady-state bytes per request) or base (packed up to the indexer's bytes)."""
    hbm_gib: float = 40.0
    """GiB of the GPU slab; windows, states, weights and activations come on top."""
    host_gib: float = 128.0
    """GiB of the pinned host pools of C4 entries."""
    context: int = 131_072
    """Tokens of one request."""
    parked_requests: int = 0
    """Preempted requests kept on the host at once, in memory beside the pools."""
    parked_pages: int | None = None
    """Pages of all parked requests together; default: the whole context of each."""
    cached_prefixes: int = 0
    """Prompt prefixes kept on the host for later requests, in memory beside the pools."""
    cached_pages: int | None = None
    """Pages of all cached prefixes together; default: the whole context of each."""
    hot_slots: int | None = None
    """Hot slots per request and C4 layer; default: twice the model's top-k."""
    index_keys: str | None = None
    """Format of index keys: fp8 or fp4; default: as the rows."""
    rows: str = "fp8"
    """Format of window, C4 and C128 entries: f32, bf16 or fp8."""


def plan(args: Args) -> CacheLayout:
    """The layout that `args` ask for, or a `ConfigError`."""
    cache = CacheConfig(
        max_model_len=args.context,
        gpu_pool_bytes=to_bytes("--hbm-gib", args.hbm_gib),
        host_pool_bytes=to_bytes("--host-gib", args.host_gib),
        parked_requests=args.parked_requests,
        parked_pages=args.parked_pages,
        cached_prefixes=args.cached_prefixes,
        cached_pages=args.cached_pages,
        num_hot_slots=args.hot_slots,
        rows=args.rows,
        index_keys=args.index_keys,
        rule=args.rule,
    )
    return plan_layout(preset(args.model), cache)


def summary(layout: CacheLayout) -> dict[str, Any]:
    """What programs read; `groups` lists the C4 layers of each resident group."""
    requests = capacity.concurrency(layout, layout.cache.max_model_len)
    return {
        "rule": layout.cache.rule,
        "groups": [[place.layer for place in group] for group in layout.resident_groups],
        "stride": layout.stride,
        "host_page": layout.host_page,
        "gpu_blocks": layout.gpu_blocks,
        "host_blocks": layout.host_blocks,
        "pool_bytes_per_page": layout.growing_groups * layout.stride,
        "hot_bytes_per_request": capacity.hot_region(layout).pool_bytes,
        "requests_resident": requests.requests_resident,
        "requests_tiered": requests.requests_tiered,
    } | parking(layout)


def parking(layout: CacheLayout) -> dict[str, int]:
    """Empty where nothing is parked."""
    if not layout.parking_blocks:
        return {}
    return {
        "parked_requests": layout.cache.parked_requests,
        "cached_prefixes": layout.cache.cached_prefixes,
        "parking_blocks": layout.parking_blocks,
        "parked_page": layout.base_page,
        "snapshot_bytes": layout.snapshot_bytes,
        "parking_bytes": layout.parking_bytes,
    }


def group_table(layout: CacheLayout) -> Table:
    title = "Groups: a block holds one page of every layer of one group"
    table = table_of(title, "group", "pool", "layers", "numbers", "bytes", "used")
    for group in layout.groups:
        if group.role == "hot":
            continue  # the same layers at the same offsets as the resident group
        role = "resident, hot" if group.role == "resident" else group.role
        block = layout.host_page if group.pool == "host" else layout.stride
        numbers, used = ", ".join(map(str, group.layers)), f"{group.block_bytes / block:.1%}"
        table.add_row(role, group.pool, f"{len(group.layers)}", numbers, f"{group.block_bytes:,}", used)
    return table


def tier_table(layout: CacheLayout) -> Table:
    hot, steady, pages = capacity.hot_region(layout), requests_of(layout).steady, layout.max_pages
    fixed, resident = capacity.fixed_bytes(layout.model, layout.cache), layout.growing_groups * pages
    title = f"Bytes by tier; a request of {layout.cache.max_model_len:,} tokens has {pages:,} pages"
    table = table_of(title, "what", "blocks", "bytes", "note")
    hot_note = f"{layout.num_hot_slots:,} slots a layer; payload {hot.payload_bytes:,}"
    for what, blocks, size, note in (
        ("GPU slab", layout.gpu_blocks, layout.slab_bytes, f"blocks of {layout.stride:,} bytes"),
        ("host pools", layout.host_blocks, layout.host_bytes, f"blocks of {layout.host_page:,} bytes"),
        ("request, resident", resident, resident * layout.stride, "GPU slab"),
        ("request, tiered", steady, steady * layout.stride, "GPU slab, steady state"),
        ("  of it hot region", hot.blocks, hot.pool_bytes, hot_note),
        ("request, host pages", pages, pages * layout.host_page, "host pools"),
        ("hot map and LRU", None, hot.map_bytes, "GPU, per request, beside the slab"),
        ("windows", None, fixed.windows, "GPU, per request, beside the slab"),
        ("compressor states", None, fixed.states, "GPU, per request, beside the slab"),
    ):
        table.add_row(what, "" if blocks is None else f"{blocks:,}", f"{size:,}", note)
    if layout.parking_blocks:
        places = f"pinned host, beside the pools; {layout.parking_places} places"
        table.add_row("parking", f"{layout.parking_blocks:,}", f"{layout.parking_bytes:,}", places)
        table.add_row("  of it a page", "1", f"{layout.base_page:,}", "index keys and C128 entries")
        table.add_row("  of it a place", "", f"{layout.snapshot_bytes:,}", "windows and compressor states")
    token = capacity.token_bytes(layout)
    table.caption = (
        f"per token: payload {float(token.payload):,.2f} (C4 {float(token.c4 / token.payload):.1%}), "
        f"slab {float(token.pool):,.2f} (payload {float(token.payload_share):.1%} of it), "
        f"host {float(token.c4):,.2f}, backup in decode {float(token.backup):,.2f}"
    )
    return table


def request_table(layout: CacheLayout) -> Table:
    requests, context = requests_of(layout), layout.cache.max_model_len
    least = capacity.min_gpu_blocks(layout, context)
    table = table_of(f"Requests of {context:,} tokens", "what", "number", "note")
    bound = "the host pool" if requests.bound_by == "host" else "the slab"
    bounds = f"bound by {bound}: GPU {float(requests.gpu):,.2f}, host {float(requests.host):,.2f}"
    even = "tokens: hot region plus two tail pages; gains from the next page on"
    minimum = f"GPU blocks ({least * layout.stride / 2**30:,.2f} GiB) that one such request needs"
    table.add_row("requests, resident", f"{float(requests.resident):,.2f}", "the slab holds every page")
    table.add_row("requests, tiered", f"{float(requests.tiered):,.2f}", bounds)
    table.add_row("break-even", f"{capacity.break_even_tokens(layout):,}", even)
    table.add_row("least slab", f"{least:,}", minimum)
    return table


def notes(layout: CacheLayout) -> list[str]:
    """What a reader should not have to find in the numbers."""
    requests, context, hot = requests_of(layout), layout.cache.max_model_len, capacity.hot_region(layout)
    found = []
    if layout.num_pages(context) * layout.page_tokens <= capacity.break_even_tokens(layout):
        found.append(f"{context:,} tokens are not above break-even: a request this short is cheaper resident.")
    elif requests.host < requests.resident:
        found.append("the host pool holds fewer requests than the slab alone would; raise --host-gib.")
    if hot.unused_rows:
        found.append(f"{hot.unused_rows} hot rows a layer stay unused; make --hot-slots a multiple of {layout.page_entries}.")
    if layout.gpu_blocks < capacity.min_gpu_blocks(layout, context):
        found.append("the slab cannot hold one such request; raise --hbm-gib or lower --context.")
    return found


def requests_of(layout: CacheLayout) -> capacity.Concurrency:
    return capacity.concurrency(layout, layout.cache.max_model_len)


def table_of(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left", caption_justify="left")
    for column in columns:
        table.add_column(column, justify="right" if column in ("layers", "blocks", "bytes", "used", "number") else "left")
    return table


def main(args: Args) -> int:
    layout = plan(args)
    for table in (group_table(layout), tier_table(layout), request_table(layout)):
        stderr.print(table)
    for note in notes(layout):
        stderr.print(f"Note: {note}")
    print(json.dumps(summary(layout)))
    return 0


if __name__ == "__main__":
    run_command(main, Args, __doc__)
