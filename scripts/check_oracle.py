"""Does the model compute what the reference implementation computes, resident and through the tiers?

Runs a fixture made by `tests/golden/make_deepseek_v4_fixture.py` (any schedule and size) twice, in float32: all tokens by
chunked prefill, and its prompt by prefill with the rest step by step. Compares logits and the selected entries. The last
line of stdout is JSON. Exit code 0: agrees; 1: differs; 2: bad input; 3: too few rows can be compared.

A row counts only before the first position where a recorded decision (top-k or router) was closer than 1e-5: past it a
different choice is as right, and changes all that follows. `--tiered` gives every page up as soon as it may go and uses
exactly top-k hot slots.

    .venv/bin/python scripts/check_oracle.py tests/golden/deepseek_v4_tiny.npz --tiered
"""

import dataclasses
import json
import pathlib
import zipfile
from typing import Annotated

import jax.numpy as jnp
import numpy as np
import tyro
from rich.console import Console
from rich.table import Table

from hisparse_jax.checkpoint import load_checkpoint
from hisparse_jax.command import run_command
from hisparse_jax.config import CacheConfig, ConfigError, ModelConfig
from hisparse_jax.generation import TWINS
from hisparse_jax.layout import CacheLayout, plan_layout
from hisparse_jax.model.blocks import DeepseekV4
from hisparse_jax.state import TieredState
from hisparse_jax.status import Status, raise_for_status
from hisparse_jax.tiered import COUNT_NAMES

stderr = Console(stderr=True)

TOLERANCE = 1e-4
"""Largest logit difference in float32 that still is rounding."""

MARGIN = 1e-5
"""A decision closer than this may fall either way."""

SLOT = 1
"""The request runs beside an empty slot 0."""


@dataclasses.dataclass(frozen=True)
class Args:
    fixture: Annotated[pathlib.Path, tyro.conf.Positional]
    """The .npz; its config stands beside it as .json."""
    tiered: bool = False
    """Run through the two tiers, with every page forced out that may go."""
    page_entries: int = 64
    """Entries of a page, 32 or 64; 32 lets short fixtures lose pages."""


@dataclasses.dataclass(frozen=True)
class Fixture:
    """What the reference recorded for `T` tokens, of which the first `prompt` are its prompt."""

    ids: np.ndarray
    prompt: int
    logits: np.ndarray
    picks: dict[int, np.ndarray]
    """C4 layer to i16[T, K], ascending, then -1."""
    comparable: int
    """Rows before the first close decision."""


@dataclasses.dataclass(frozen=True)
class Outcome:
    """One run: logits and selections of tokens `first..T-1`, and what the tiers did."""

    first: int
    logits: np.ndarray
    picks: np.ndarray
    pages_lost: int = 0
    counts: np.ndarray | None = None
    """i64[L4, 5] of the decode steps."""


def main(args: Args) -> int:
    config, weights, _ = load_checkpoint(args.fixture, jnp.float32)
    fixture = read_fixture(args.fixture, config)
    layout = plan(config, len(fixture.ids), args)
    model = DeepseekV4(config, weights)
    prefilled = run(model, layout, fixture, len(fixture.ids), args)
    decoded = run(model, layout, fixture, fixture.prompt, args)
    result = judge(fixture, config, prefilled, decoded, args.tiered)
    stderr.print(table(args, fixture, result))
    forced_out = result["pages_lost"] > 0 and all(n > 0 for n in result["misses_per_layer"])
    print(json.dumps(result))
    if 2 * result["rows_compared"] < len(fixture.ids) + len(fixture.ids) - fixture.prompt:
        return 3
    if max(result["prefill_max"], result["decode_max"]) > TOLERANCE or result["topk_mismatches"]:
        return 1
    return 1 if args.tiered and layout.num_pages(len(fixture.ids)) >= 3 and not forced_out else 0


def read_fixture(path: pathlib.Path, config: ModelConfig) -> Fixture:
    """The recorded arrays. Raises `ConfigError` where one is missing."""
    try:
        with np.load(path) as file:
            arrays = {name: file[name] for name in file.files if not name.startswith("w/")}
        ids, logits = arrays["input_ids"], np.concatenate([arrays["prefill_logits"], arrays["decode_logits"]])
        picks = {layer: arrays[f"topk/L{layer}"] for layer in config.c4_layers}
    except (OSError, ValueError, KeyError, zipfile.BadZipFile) as error:
        raise ConfigError(f"{path} is not a fixture of the oracle's format: {error}") from None
    close = np.zeros(len(ids), bool)
    for name, margin in arrays.items():
        if name.startswith(("topk_margin/", "router_margin/")):
            close |= margin < MARGIN
    comparable = int(close.argmax()) if close.any() else len(ids)
    return Fixture(ids, len(arrays["prefill_logits"]), logits, picks, comparable)


def plan(config: ModelConfig, tokens: int, args: Args) -> CacheLayout:
    """A layout in which everything would fit; the tiered run gives pages up of its own accord."""
    if args.page_entries not in (32, 64):
        raise ConfigError(f"--page-entries {args.page_entries}: choose 32 or 64.")
    pages = -(-tokens // (4 * args.page_entries))
    cache = CacheConfig(
        max_model_len=pages * 4 * args.page_entries,
        max_requests=2,
        gpu_blocks=2,
        host_blocks=pages + 3,
        num_hot_slots=config.index_topk,
        rows="f32",
        page_entries=args.page_entries,
        reclaim="eager",
        chunk_tokens=64 if args.tiered else 256,
    )
    draft = plan_layout(config, cache, tiered=args.tiered)
    blocks = 1 + draft.growing_groups * pages + draft.hot_blocks
    return plan_layout(config, dataclasses.replace(cache, gpu_blocks=blocks), tiered=args.tiered)


def run(model: DeepseekV4, layout: CacheLayout, fixture: Fixture, prompt: int, args: Args) -> Outcome:
    """Prefills the first `prompt` tokens, then feeds the rest one by one."""
    twin, steps = TWINS["tiered" if args.tiered else "resident"], len(fixture.ids) - prompt
    state, tokens = twin.init_state(layout), fixture.ids[:prompt].tolist()
    state = twin.admit(state, SLOT, tokens, layout=layout, max_new_tokens=steps)
    state, output, status = twin.prefill(model, state, SLOT, tokens, layout=layout, all_logits=True)
    raise_for_status(status, "prefill")
    logits, picks, counts = output.logits, output.indices, None
    if steps:
        forced = np.full((2, steps), -1, np.int32)
        forced[SLOT, :-1] = fixture.ids[prompt + 1 :]
        sequences = state.sequences
        state = state.replace(sequences=sequences.replace(token=sequences.token.at[SLOT].set(int(fixture.ids[prompt]))))
        state, decoded, status = twin.decode_steps(
            model, state, jnp.int32(steps), jnp.asarray(forced), layout=layout, max_steps=steps, return_logits=True,
            return_indices=True,
        )  # fmt: skip
        raise_for_status(int(status[SLOT]), "decode")
        logits = np.array(decoded.logits[SLOT])
        picks = np.array(decoded.indices[:, SLOT])
        counts = None if decoded.counts is None else np.array(decoded.counts[:, SLOT], np.int64)
    if not isinstance(state, TieredState):
        return Outcome(prompt if steps else 0, logits, picks)
    raise_for_status(Status.HOMELESS if int(state.homeless[SLOT]) else Status.OK, "the run")
    return Outcome(prompt if steps else 0, logits, picks, int(state.ledger.pages_lost[SLOT]), counts)


def judge(fixture: Fixture, config: ModelConfig, prefilled: Outcome, decoded: Outcome, tiered: bool) -> dict:
    """The JSON line's fields."""
    largest, compared, mismatches, checked = [], 0, 0, 0
    for outcome in (prefilled, decoded):
        end = max(fixture.comparable, outcome.first)
        rows = slice(outcome.first, end)
        compared += end - outcome.first
        difference = np.abs(outcome.logits[: end - outcome.first] - fixture.logits[rows])
        largest.append(float(difference.max(initial=0.0)))
        for i, layer in enumerate(config.c4_layers):
            wrong = (outcome.picks[i, : end - outcome.first] != fixture.picks[layer][rows]).any(axis=-1)
            mismatches += int(wrong.sum())
            checked += len(wrong)
    totals = decoded.counts if decoded.counts is not None else np.zeros((len(config.c4_layers), len(COUNT_NAMES)), np.int64)
    by_name = dict(zip(COUNT_NAMES, totals.T.tolist(), strict=True))
    return {
        "prefill_max": largest[0],
        "decode_max": largest[1],
        "topk_mismatches": mismatches,
        "rows_checked": checked,
        "rows_compared": compared,
        "tiered": tiered,
        "pages_lost": decoded.pages_lost,
        "misses": sum(by_name["misses"]),
        "hot_hits": sum(by_name["hot_hits"]),
        "misses_per_layer": by_name["misses"],
    }


def table(args: Args, fixture: Fixture, result: dict) -> Table:
    """The figures for people."""
    out = Table(title=f"{args.fixture.name}: {len(fixture.ids)} tokens, prompt {fixture.prompt}", title_justify="left")
    out.add_column("figure")
    out.add_column("seen", justify="right")
    out.add_column("allowed", justify="right")
    out.add_row("largest logit difference, prefill", f"{result['prefill_max']:.2e}", f"{TOLERANCE:.0e}")
    out.add_row("largest logit difference, decode", f"{result['decode_max']:.2e}", f"{TOLERANCE:.0e}")
    out.add_row("top-k rows that differ", f"{result['topk_mismatches']} of {result['rows_checked']:,}", "0")
    out.add_row("logit rows compared", f"{result['rows_compared']:,}", "half")
    if args.tiered:
        out.add_row("pages lost; misses; hot hits", f"{result['pages_lost']}; {result['misses']:,}; {result['hot_hits']:,}", "")
    return out


if __name__ == "__main__":
    run_command(main, Args, __doc__)
