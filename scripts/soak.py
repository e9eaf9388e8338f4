"""Does an engine under load, out of memory in both tiers, still give every request the logits that it has alone?

Requests of random lengths arrive in bursts, begin alike, continue earlier ones, sample, stop, are cancelled, preempted and begun
anew, and fail in their callbacks, on a cache that holds a fraction of what they want. Then each is computed again, alone and
fully resident, through the same compiled batch and chunk shapes, and every token and bit is compared. The books are audited on
the way and at the end. Tables for people go to stderr; the last line of stdout is JSON. Exit code 0: nothing amiss; 1: a breach;
2: bad input.

    .venv/bin/python scripts/soak.py --requests 64 --oversubscribe 4 --steps 2000 --seed 1
    .venv/bin/python scripts/soak.py --requests 0 --transitions 1000000
"""

import dataclasses
import importlib.metadata
import json
import math
import os
import time

if importlib.metadata.version("jaxlib").startswith("0.11."):  # most of a short run on a CPU is compilation
    os.environ.setdefault("XLA_FLAGS", "--xla_cpu_opt_preset=fast_compile")

import jax
import numpy as np
import psutil
from rich.console import Console
from rich.markup import escape
from rich.progress import track
from rich.table import Table

from hisparse_jax.capacity import min_gpu_blocks
from hisparse_jax.command import check_least, run_command
from hisparse_jax.config import CacheConfig, ConfigError, preset
from hisparse_jax.drafts import Drafter, prompt_lookup
from hisparse_jax.engine import End, Engine, EngineConfig, Handle
from hisparse_jax.generation import random_model, resident_layout
from hisparse_jax.layout import CacheLayout, plan_layout
from hisparse_jax.metrics import Snapshot
from hisparse_jax.model.blocks import DeepseekV4
from hisparse_jax.solo import solo
from hisparse_jax.steps import traces
from hisparse_jax.tiered import COUNT_NAMES

stderr = Console(stderr=True)

FLAT_MIB = 64
"""Most that the process may grow once its last program is compiled."""


@dataclasses.dataclass(frozen=True)
class Args:
    requests: int = 64
    """Requests to serve; 0: none."""
    oversubscribe: float = 4.0
    """GPU blocks that full slots would want, were they resident, per block that there is."""
    steps: int = 2_000
    """Rounds of the engine in which all must have ended."""
    seed: int = 0
    """Of weights, lengths, arrivals, cancellations and policies."""
    transitions: int = 0
    """Random transitions of pools and coordinator, without a model."""
    model: str = "tiny"
    """Preset, with random weights."""
    rows: str = "f32"
    """Row format: f32, bf16 or fp8 (demo model)."""
    slots: int = 8
    """Requests that run at once."""
    parked: int = 4
    """Requests that the parking holds; 0: whoever makes way begins anew."""
    cached: int = 16
    """Prompt prefixes that the parking holds beside them."""
    cached_host: int = 24
    """Host pages for them, beside those of the requests."""
    prefix_cache: bool = True
    """Adopt cached prefixes; else each prompt is computed from its first token."""
    max_model_len: int = 1_024
    page_entries: int = 32
    """C4 entries of a page."""
    chunk_tokens: int = 64
    hot_slots: int | None = 16
    backup: str = "write_through"
    reclaim: str = "base"
    call_steps: int = 8
    """Decode steps in one round."""
    draft_rows: int = 0
    """Drafts that a step verifies, guessed by prompt lookup for a third of the requests and at random for another."""


@dataclasses.dataclass
class Planned:
    """One request to come: when, what, and what befalls it."""

    step: int
    prompt: list[int]
    max_new_tokens: int
    options: dict
    cancel_after: int | None
    """Rounds from its submission to its cancellation."""
    raise_at: int | None
    """The callback raises at this token."""
    drafter: Drafter | None
    follows: "Planned | None" = None
    """The request that this one continues: its prompt and tokens come before `prompt`."""
    handle: Handle | None = None


class CallbackError(Exception):
    """Raised by a callback on purpose."""


def main(args: Args) -> int:
    check_least(args, requests=0, transitions=0, steps=1, seed=0)
    if not args.requests and not args.transitions:
        raise ConfigError("--requests 0 and --transitions 0 leave nothing to test.")
    breaches, result = [], {}
    if args.transitions:
        from random_transitions import walk

        transitions = walk(args.transitions, args.seed)
        stderr.print(f"{args.transitions:,} transitions: {transitions}")
        breaches += transitions["breaches"]
        result["transitions"] = transitions
    if args.requests:
        result |= soak(args, breaches)
    colour = "red" if breaches else "green"
    stderr.print(f"[bold {colour}]{len(breaches)} breaches[/]", *map(escape, breaches), sep="\n")
    print(json.dumps(result | {"seed": args.seed, "breaches": breaches}))
    return 1 if breaches else 0


def soak(args: Args, breaches: list[str]) -> dict:
    """Serves, audits, compares; breaches are added to the list."""
    layout = plan(args)
    model = random_model(preset(args.model), args.rows, args.seed)
    rng = np.random.default_rng(args.seed)
    settings = EngineConfig(
        call_steps=args.call_steps,
        growth_reserve=float(rng.choice([0.0, 0.3, 1.0], p=[0.5, 0.3, 0.2])),
        patience=int(rng.integers(4, 32)),
        keep_logits=True,
        prefix_caching=args.prefix_cache and args.cached > 0,
    )
    engine = Engine(model, layout, settings, threaded=False)
    planned = plan_requests(args, layout, rng)
    started = time.perf_counter()
    growth = serve(args, engine, planned, breaches)
    seconds = time.perf_counter() - started
    engine._loop.prefixes.clear()
    last = engine._loop.look()
    check_end(engine, last, layout, breaches)
    engine.shutdown()
    breaches += [f"the process grew by {growth:.0f} MiB after its last compilation"] if growth > FLAT_MIB else []
    compared = compare_with_solo(args, model, layout, planned, breaches)
    stderr.print(table(last, settings, layout))
    return {
        "requests": len(planned),
        **{str(end): count for end, count in last.ended.items()},
        **compared,
        "rounds": last.step,
        "seconds": round(seconds, 1),
        **last.events,
        "waits": dict(last.waits),
        **{name: sum(getattr(x, name) for x in last.layers) for name in COUNT_NAMES},
        "hit_rate": last.hit_rate,
        "bytes_to_gpu": last.bytes_to_gpu,
        "bytes_to_host": last.bytes_to_host,
        "growth_reserve": settings.growth_reserve,
        "grown_mib": round(growth, 1),
        "device": jax.devices()[0].device_kind,
        "jax": jax.__version__,
    }


def plan(args: Args) -> CacheLayout:
    """The GPU holds `1 / oversubscribe` of what the longest requests in all slots want, the host half as much again and a share
    for cached prefixes; either holds at least one of them."""
    if not 0 < args.oversubscribe < math.inf:
        raise ConfigError(f"--oversubscribe {args.oversubscribe} must be a positive number.")
    cache = CacheConfig(
        max_model_len=args.max_model_len, max_requests=args.slots, gpu_blocks=2, host_blocks=2 + args.max_model_len,
        parked_requests=args.parked, cached_prefixes=args.cached, num_hot_slots=args.hot_slots, rows=args.rows,
        page_entries=args.page_entries, chunk_tokens=args.chunk_tokens, stretch_steps=args.call_steps, backup=args.backup,
        reclaim=args.reclaim, draft_rows=args.draft_rows,
    )  # fmt: skip
    draft = plan_layout(preset(args.model), cache)
    wanted = draft.growing_groups * draft.max_pages * args.slots
    gpu = max(min_gpu_blocks(draft, args.max_model_len), 1 + math.ceil(wanted / args.oversubscribe))
    host = max(draft.max_pages + 2, 1 + math.ceil(1.5 * draft.max_pages * args.slots / args.oversubscribe))
    return plan_layout(preset(args.model), dataclasses.replace(cache, gpu_blocks=gpu, host_blocks=host + args.cached_host))


def plan_requests(args: Args, layout: CacheLayout, rng: np.random.Generator) -> list[Planned]:
    """Bursts of short, middling and long prompts; some begin alike, are repeated, or continue an earlier request."""
    step, planned = 0, []
    vocab = layout.model.vocab_size
    heads = [rng.integers(0, vocab, int(rng.integers(100, 500))).tolist() for _ in range(3)]
    for number in range(args.requests):
        step += int(rng.integers(1, 60)) if rng.random() < 0.15 else 0
        new = int(rng.choice([rng.integers(1, 32), rng.integers(32, 300)]))
        most = layout.cache.max_model_len - new
        length = min(most, int(rng.choice([rng.integers(1, 64), rng.integers(64, 400), rng.integers(300, most + 1)])))
        prompt, follows, kind = rng.integers(0, vocab, length).tolist(), None, rng.random()
        if kind < 0.35:
            head = heads[int(rng.integers(len(heads)))]
            prompt = (head[: len(head) if rng.random() < 0.5 else int(rng.integers(1, len(head)))] + prompt)[:most]
        elif kind < 0.45 and planned:
            prompt = planned[int(rng.integers(number))].prompt[:most] or prompt
        elif kind < 0.7 and planned:
            follows = planned[int(rng.integers(max(0, number - 6), number))]
            prompt = prompt[: int(rng.integers(64))]
        tenant = str(rng.choice(["", "other"], p=[0.8, 0.2])) if follows is None else follows.options["tenant"]
        stop = int(rng.integers(vocab)) if rng.random() < 0.25 else -1
        options = {"seed": number, "temperature": float(rng.choice([0.0, 0.7, 1.3])), "stop_token": stop, "tenant": tenant}
        cancel = int(rng.integers(0, 80)) if rng.random() < 0.2 else None
        raises = int(rng.integers(96)) if rng.random() < 0.08 else None
        planned.append(Planned(step, prompt, new, options, cancel, raises, drafter_of(args, number, layout), follows))
    return planned


def prompt_of(item: Planned, layout: CacheLayout) -> list[int]:
    """What is asked: of one that continues another, the other's prompt and the tokens it got too, as far as there is room."""
    before = item.follows.handle if item.follows else None
    whole = ([*before.request.prompt, *before.tokens] if before else []) + item.prompt
    return whole[: layout.cache.max_model_len - item.max_new_tokens]


def drafter_of(args: Args, number: int, layout: CacheLayout) -> Drafter | None:
    """Good guesses, bad ones or none."""
    if not args.draft_rows or number % 3 == 0:
        return None
    rng = np.random.default_rng([args.seed, number])
    return prompt_lookup if number % 3 == 1 else lambda _, count: rng.integers(-1, layout.model.vocab_size + 1, count).tolist()


def serve(args: Args, engine: Engine, planned: list[Planned], breaches: list[str]) -> float:
    """Rounds until all have ended. MiB that the process grew by after its last compilation."""
    process, todo, live = psutil.Process(), list(planned), {}
    compiled, base, now = -1, 0.0, 0.0
    rounds = track(range(args.steps), "serving", console=stderr, transient=True)
    for step in rounds:
        for item in [item for item in todo if item.step <= step and not waits(item)]:
            todo.remove(item)
            prompt = prompt_of(item, engine.layout)
            item.handle = engine.submit(
                prompt, item.max_new_tokens, on_token=raiser(item.raise_at), drafter=item.drafter, **item.options
            )
            if item.cancel_after is not None:
                live[step + item.cancel_after] = [*live.get(step + item.cancel_after, []), item.handle]
        for handle in live.pop(step, []):
            handle.cancel()
        busy = engine.step()
        breaches += audit(engine)
        now = process.memory_info().rss / 2**20
        if (total := sum(traces.values())) != compiled:
            compiled, base = total, now
        if breaches or not (busy or todo):
            break
    else:
        open_ = [repr(item.handle) for item in planned if not (item.handle and item.handle.done)]
        breaches.append(f"{len(open_)} requests have not ended after {args.steps} rounds: {', '.join(open_[:3])}")
    return now - base


def waits(item: Planned) -> bool:
    """Whether the request that it continues has not ended."""
    return item.follows is not None and not (item.follows.handle and item.follows.handle.done)


def raiser(at: int | None):
    """A callback that raises at token number `at`."""
    if at is None:
        return None
    seen: list[int] = []

    def on_token(token: int) -> None:
        seen.append(token)
        if len(seen) > at:
            raise CallbackError(f"token {at} was not welcome")

    return on_token


def audit(engine: Engine) -> list[str]:
    """Recounts both pools from the tables, and compares the books with them."""
    loop = engine._loop
    ledger = loop.runner.state.ledger
    parking = loop.runner.parking
    tables, found = ledger.tables, []
    gpu = [tables.base, np.where(np.asarray(ledger.unpinned), 0, np.asarray(tables.resident)), ledger.hot]
    host = [ledger.host_table, *([parking.ledger.host_table] if parking else [])]
    pools = [("GPU", tables.pool, gpu, ledger.gpu_lease), ("host", ledger.host, host, ledger.host_lease)]
    if parking:
        pools.append(("parking", parking.ledger.pool, [parking.ledger.base], 0 * parking.ledger.pool.references))
    for name, pool, held, lease in pools:
        references = np.asarray(pool.references)
        entries = [np.asarray(x) for x in held]
        standing = np.bincount(np.concatenate([x.ravel() for x in entries]), minlength=len(references))
        standing[0] = 0
        counted = standing + (np.asarray(lease) > 0)
        shared = np.flatnonzero(standing > 1)
        pages = [np.nonzero(np.isin(x, shared))[-1] for x in entries]
        named = [x[np.isin(x, shared)] for x in entries]
        if len(set(zip(np.concatenate(named).tolist(), np.concatenate(pages).tolist(), strict=True))) > len(shared):
            found.append(f"round {loop.number}: a {name} block stands for two pages")
        if (references != counted).any() or int(pool.num_free) != (references[1:] == 0).sum():
            found.append(f"round {loop.number}: {name} blocks are held {counted.sum()} times, counted {references.sum()} times")
    if found:
        return found
    c4 = np.concatenate([np.asarray(x).ravel() for x in (tables.resident, ledger.hot)])
    if len(np.unique(c4[c4 > 0])) < (c4 > 0).sum():
        found.append(f"round {loop.number}: a C4 block stands in two places")
    index = loop.prefixes.index
    books = sum(t.pages for t in [*loop.scheduler.active.values(), *loop.scheduler.parked])
    books += sum(engine.layout.num_pages(prefix.length) for prefix in index)
    held = sum(int((np.asarray(x) > 0).sum()) for x in host)
    found += [] if books == held else [f"round {loop.number}: the books have {books} host pages, the tables {held}"]
    if parking:
        for table in (parking.ledger.host_table, parking.ledger.base):
            cached = np.asarray(table)[np.asarray(parking.ledger.cached)]
            if len(np.unique(cached[cached > 0])) != index.num_pages:
                found.append(f"round {loop.number}: cached prefixes hold other pages than the {index.num_pages} counted")
    return found


def check_end(engine: Engine, last: Snapshot, layout: CacheLayout, breaches: list[str]) -> None:
    """Everything is as at the start, and the sums agree."""
    state, parking = engine._loop.runner.state, engine._loop.runner.parking
    ledger = state.ledger
    tables = (ledger.tables.base, ledger.tables.resident, ledger.hot, ledger.host_table, ledger.gpu_lease, ledger.host_lease)
    selected = last.events["decoded_rows"] * layout.model.index_topk
    facts = {
        "GPU blocks are not all free": last.gpu.free == layout.gpu_blocks - 1,
        "host blocks are not all free": last.host.free == layout.host_blocks - 1,
        "parking blocks are not all free": parking is None or int(parking.ledger.pool.num_free) == layout.parking_blocks - 1,
        "a table or a lease is not empty": not any(np.asarray(x).any() for x in tables),
        "a hot map is not empty": all((np.asarray(m.slot_host) == -1).all() for m in state.hot_maps),
        "pages are left": not any(last.pages.values()),
        "entries were found in no tier": not np.asarray(state.homeless).any(),
        "a layer's references do not add up": all(sum(getattr(x, n) for n in COUNT_NAMES) == selected for x in last.layers),
        "rows swapped in are not the misses": last.moved["swapped_rows"] == sum(x.misses for x in last.layers),
        "requests went missing": sum(last.ended.values()) == last.events["submitted"],
    }
    breaches += [what for what, holds in facts.items() if not holds]


def compare_with_solo(
    args: Args, model: DeepseekV4, layout: CacheLayout, planned: list[Planned], breaches: list[str]
) -> dict[str, int]:
    """Each request again, alone and resident; one that was cut short is compared as far as it came."""
    alone, equal = resident_layout(layout), 0
    for item in track(planned, "comparing", console=stderr, transient=True):
        handle = item.handle
        completion = handle.completion if handle is not None else None
        if handle is None or completion is None:
            continue
        count = len(completion.tokens)
        if (failed := completion.end is End.FAILED) and not isinstance(handle.error, CallbackError):
            breaches.append(f"request {handle.number} failed: {handle.error!r}")
        if completion.end in (End.CANCELLED, End.FAILED) and not count:
            continue
        request = dataclasses.replace(handle.request, max_new_tokens=count) if failed else handle.request
        tokens, logits = solo(model, alone, request, call_steps=args.call_steps)
        whole = completion.end in (End.LENGTH, End.STOP)
        assert completion.logits is not None
        same = tokens[:count].tolist() == completion.tokens.tolist() and logits[:count].tobytes() == completion.logits.tobytes()
        if not same or (whole and len(tokens) != count):
            breaches.append(f"{handle!r}: tokens or logits differ from those of a solo run of {len(tokens)} tokens")
        equal += same
    return {"compared_equal": equal}


def table(last: Snapshot, settings: EngineConfig, layout: CacheLayout) -> Table:
    """What happened."""
    made = Table(title=f"{layout.gpu_blocks} GPU blocks, {layout.host_blocks} host blocks; {settings}", title_justify="left")
    made.add_column("event")
    made.add_column("count", justify="right")
    ended = {f"ended: {end}": count for end, count in last.ended.items()}
    waits = {f"rounds waited for: {name}": count for name, count in last.waits.items()}
    for name, count in {**last.events, **ended, **waits, **last.moved}.items():
        made.add_row(name.replace("_", " "), f"{count:,}")
    return made


if __name__ == "__main__":
    run_command(main, Args, __doc__)
