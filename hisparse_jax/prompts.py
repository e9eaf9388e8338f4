"""Prompts on their way in: checked before anything changes, cut into chunks of one compiled size, given a slot."""

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float32, Int32

from hisparse_jax.layout import CacheLayout
from hisparse_jax.sequences import Sequences, committed


class ChunkOutput(NamedTuple):
    """What one chunk gave, on the device: `count` real rows of padded arrays.

    logits: f32[C, V] of every position, or f32[1, V] of the last real one alone.
    indices: i32[L4, C, K]
    """

    logits: Float32[Array, "N V"]
    indices: Int32[Array, "L4 C K"]
    count: int


class PrefillOutput(NamedTuple):
    """What a prefill gave, on the host, for the tokens it computed.

    logits: f32[T, V] of every position, or f32[1, V] of the last; None where no token was computed.
    indices: i32[L4, T, K] entries selected by each C4 layer, ascending, then -1; None likewise.
    """

    logits: np.ndarray | None
    indices: np.ndarray | None

    @classmethod
    def of(cls, chunks: Sequence[ChunkOutput], *, all_logits: bool) -> "PrefillOutput":
        """From the chunks of a prompt, in order."""
        if not chunks:
            return cls(None, None)
        kept = chunks if all_logits else chunks[-1:]
        return cls(
            np.concatenate([np.asarray(x.logits)[: x.count] for x in kept]),
            np.concatenate([np.asarray(x.indices)[:, : x.count] for x in chunks], axis=1),
        )


class PromptError(ValueError):
    """A prompt that cannot be taken; the message names the value and the remedy."""


def check_prompt(prompt: Sequence[int], layout: CacheLayout, max_new_tokens: int) -> None:
    """Raises `PromptError` unless the prompt fits the context with its new tokens and holds token ids only."""
    if len(prompt) == 0:
        raise PromptError("the prompt has no tokens; give at least one.")
    if max_new_tokens < 0:
        raise PromptError(f"max_new_tokens={max_new_tokens} must not be negative.")
    if (total := len(prompt) + max_new_tokens) > layout.cache.max_model_len:
        raise PromptError(
            f"a prompt of {len(prompt)} tokens and {max_new_tokens} new ones make {total}, max_model_len is "
            f"{layout.cache.max_model_len}; shorten the prompt or raise max_model_len."
        )
    ids = np.asarray(prompt)
    if not np.issubdtype(ids.dtype, np.integer) or ids.ndim != 1:
        raise PromptError(f"a prompt is a flat sequence of token ids, not {ids.dtype}[{', '.join(map(str, ids.shape))}].")
    if bad := ids[(ids < 0) | (ids >= layout.model.vocab_size)].tolist():
        raise PromptError(f"token id {bad[0]} is outside the vocabulary 0..{layout.model.vocab_size - 1}.")


def check_sampling(seed: int, temperature: float) -> None:
    """Raises `PromptError` for a seed or a temperature that no request can have."""
    if not 0 <= temperature < math.inf:
        raise PromptError(f"temperature={temperature} must be a finite number and not negative; 0 is greedy.")
    if not 0 <= seed < 2**32:
        raise PromptError(f"seed={seed} must lie in 0..2^32-1.")


def chunk_schedule(begin: int, length: int, chunk_tokens: int, chunks: Sequence[int] | None = None) -> Iterator[tuple[int, int]]:
    """`(begin, count)` of each chunk of tokens `begin..length-1`. `chunks` lists the first lengths; full chunks follow."""
    wanted = iter(chunks or ())
    while begin < length:
        count = min(next(wanted, chunk_tokens), length - begin)
        if not 1 <= count <= chunk_tokens:
            raise PromptError(f"a chunk of {count} tokens; chunks hold 1..{chunk_tokens} tokens (chunk_tokens).")
        yield begin, count
        begin += count


def pad_chunk(prompt: Sequence[int], begin: int, count: int, chunk_tokens: int) -> Int32[Array, " C"]:
    """Tokens `begin .. begin + count - 1`, then zeros, in the compiled shape."""
    padded = np.zeros(chunk_tokens, np.int32)
    padded[:count] = prompt[begin : begin + count]
    return jnp.asarray(padded)


def admit_sequence(
    sequences: Sequences,
    slot: int,
    limit: int,
    *,
    length: int = 0,
    seed: int = 0,
    temperature: float = 0.0,
    stop_token: int = -1,
) -> Sequences:
    """`sequences` with `slot` set up for a new request, of whose tokens `length` are cached. Raises `PromptError` for a bad slot
    or option."""
    batch = sequences.length.shape[0]
    if not 0 <= slot < batch:
        raise PromptError(f"slot {slot} does not exist; slots are 0..{batch - 1} (max_requests).")
    if bool(np.asarray(sequences.running)[slot]):
        raise PromptError(f"slot {slot} is running a request; finish it first.")
    check_sampling(seed, temperature)
    start = {"length": length, "token": 0, "limit": limit, "stop_token": stop_token, "seed": seed, "running": False}
    return _with_slot(sequences, slot, temperature=temperature, **start)


def _with_slot(sequences: Sequences, slot: int, **values: float | int) -> Sequences:
    """`sequences` with numbers of one slot replaced, on the host: these arrays are a few bytes, and nothing is compiled."""
    changed = {name: np.array(getattr(sequences, name)) for name in values}
    for name, value in values.items():
        changed[name][slot] = value
    return committed(sequences.replace(**changed))


def start_running(sequences: Sequences, slot: int) -> Sequences:
    """Lets a prefilled request take part in decode, unless it has nothing left to compute."""
    now = {name: np.asarray(getattr(sequences, name))[slot] for name in ("length", "limit", "token", "stop_token")}
    more = now["length"] < now["limit"] and now["token"] != now["stop_token"]
    return _with_slot(sequences, slot, running=bool(more))
