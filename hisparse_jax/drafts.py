"""Drafts of an engine's requests, guessed on the host before each decode call. Wrong ones cost time, never a token."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Int32

from hisparse_jax.layout import CacheLayout
from hisparse_jax.model.blocks import DeepseekV4
from hisparse_jax.speculative import Replay

Drafter = Callable[[Sequence[int], int], Sequence[int]]
"""`drafter(tokens, count)`: up to `count` guesses of what follows `tokens`, the prompt and all that was sampled."""

LONGEST = 4
"""Tokens at the end that `prompt_lookup` tries to find again, at most."""


def prompt_lookup(tokens: Sequence[int], count: int) -> list[int]:
    """What followed the last tokens the last time that they stood in a row: of the longest run, 4 to 1 tokens, that occurs again.

    Good where answers quote: code, summaries, structured text. O(len(tokens)). Source: prompt lookup decoding.
    """
    known = np.asarray(tokens)
    for size in range(min(LONGEST, len(known) - 1), 0, -1):
        runs = np.lib.stride_tricks.sliding_window_view(known[:-1], size)
        found = np.flatnonzero((runs == known[-size:]).all(axis=1))
        if len(found):
            return known[found[-1] + size :][:count].tolist()
    return []


class Steps(NamedTuple):
    """What a call of steps gave, on the host. Of a request's `N` columns those with a token count, in order.

    tokens: i32[B, N]               -1: nothing.
    logits: f32[B, N, V] or None    what each was sampled from.
    rows: i32[B]                    rows computed; without drafts as many as tokens.
    counts, status                  as of `decode_steps`; the resident twin counts nothing.
    """

    tokens: np.ndarray
    logits: np.ndarray | None
    rows: np.ndarray
    counts: np.ndarray | None
    status: np.ndarray


def take_steps(
    run, model: DeepseekV4, state, num_steps: int, drafts: Int32[np.ndarray, "B D"] | None, *, layout: CacheLayout, **options
):
    """`verify_steps` of the twin `run` where the layout has draft rows, else its `decode_steps`: `(state, Steps)`.

    `drafts` are guesses of each request's tokens from `length + 1` on, -1 for none; None: no request has any. Options:
    `max_steps`, `return_logits`.
    """
    batch = layout.cache.max_requests
    if not layout.cache.draft_rows:
        if drafts is not None:
            raise ValueError(f"drafts of shape {drafts.shape} for a layout without draft rows; plan it with draft_rows.")
        state, output, status = run.decode_steps(model, state, jnp.int32(num_steps), layout=layout, **options)
        tokens, logits, counts, status = jax.device_get((output.tokens, output.logits, output.counts, status))
        return state, Steps(tokens, logits, (tokens >= 0).sum(axis=1), counts, status)
    if drafts is None:
        drafts = no_drafts(layout, options["max_steps"])
    source = Replay(jnp.asarray(drafts), state.sequences.length + 1)
    state, output, status = run.verify_steps(model, state, source, jnp.int32(num_steps), layout=layout, **options)
    tokens, rows, logits, counts, status = jax.device_get((output.tokens, output.rows, output.logits, output.counts, status))
    logits = None if logits is None else logits.reshape(batch, -1, logits.shape[-1])
    return state, Steps(tokens.reshape(batch, -1), logits, rows.sum(axis=1), counts, status)


def no_drafts(layout: CacheLayout, max_steps: int) -> Int32[np.ndarray, "B D"]:
    """Room for all drafts that a call of `max_steps` steps can use, without any."""
    return np.full((layout.cache.max_requests, max_steps * layout.cache.query_rows), -1, np.int32)
