"""A request as its owner sees it: what was asked, its tokens as they come, how it ended.

Whoever holds a `Handle` may read and cancel it from any thread; the engine alone writes to it.
"""

import asyncio
import contextlib
import dataclasses
import enum
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import numpy as np
from jaxtyping import Float32, Int32, Int64


class EngineError(RuntimeError):
    """Something an engine refuses; the message names the remedy."""


class EngineBusyError(EngineError):
    """The queue is full; try again later."""


class EngineClosedError(EngineError):
    """The engine was shut down, or broke."""


class RequestError(EngineError):
    """A request that could not go on; `__cause__` is what went wrong."""


class End(enum.StrEnum):
    """How a request ended."""

    LENGTH = "length"
    STOP = "stop"
    CANCELLED = "cancelled"
    FAILED = "failed"


@dataclasses.dataclass(frozen=True)
class Request:
    """What is asked for. Tokens depend on nothing else: neither on slot and companions nor on preemptions."""

    prompt: tuple[int, ...]
    max_new_tokens: int
    temperature: float = 0.0
    seed: int = 0
    stop_token: int = -1
    tenant: bytes = b""
    """Requests share cached prefixes within a tenant alone. No token depends on it."""

    @property
    def options(self) -> dict[str, Any]:
        """As keywords of a twin's `admit`; the last token sampled is never computed."""
        return dict(
            max_new_tokens=self.max_new_tokens - 1, seed=self.seed, temperature=self.temperature, stop_token=self.stop_token
        )

    @property
    def limit(self) -> int:
        """Tokens in the cache when it ends by length: the last one sampled is never computed."""
        return len(self.prompt) + self.max_new_tokens - 1


@dataclasses.dataclass(frozen=True)
class Completion:
    """What a request gave.

    tokens: i32[S]            all sampled tokens; a stop token is the last of them.
    logits: f32[S, V] or None what each was sampled from, where the engine keeps logits.
    counts: i64[L4, 5]        what became of the entries it selected in decode (`tiered.COUNT_NAMES`), replays included.
    """

    tokens: Int32[np.ndarray, " S"]
    end: End
    logits: Float32[np.ndarray, "S V"] | None
    counts: Int64[np.ndarray, "L4 5"]


class Handle:
    """One submitted request: iterate over its tokens (`for` or `async for`), or wait for its `result`."""

    def __init__(self, number: int, request: Request, cancel: Callable[["Handle"], None], on_token: Callable[[int], None] | None):
        self.number = number
        self.request = request
        self.on_token = on_token
        self._cancel = cancel
        self._changed = threading.Condition()
        self._tokens: list[int] = []
        self._logits: list[np.ndarray] = []
        self.completion: Completion | None = None
        """What it gave, once it has ended."""
        self.error: BaseException | None = None
        """Why it failed."""
        self._wakers: list[Callable[[], None]] = []

    def __repr__(self) -> str:
        end = self.completion.end if self.completion else "open"
        return f"<request {self.number}: {len(self.request.prompt)} + {len(self._tokens)} tokens, {end}>"

    @property
    def tokens(self) -> tuple[int, ...]:
        """Those sampled so far."""
        with self._changed:
            return tuple(self._tokens)

    @property
    def done(self) -> bool:
        return self.completion is not None

    def cancel(self) -> None:
        """Ends the request soon, wherever it stands; nothing happens to one that has ended."""
        if not self.done:
            self._cancel(self)

    def result(self, timeout: float | None = None) -> Completion:
        """Waits for the end. Raises `RequestError` where the request failed, `TimeoutError` where it takes too long."""
        with self._changed:
            if not self._changed.wait_for(lambda: self.done, timeout):
                raise TimeoutError(f"request {self.number} has not ended after {timeout} s.")
        return self._ended()

    def __iter__(self) -> Iterator[int]:
        """Tokens as they come, from the first. Raises `RequestError` at the end where the request failed."""
        at = 0
        while True:
            with self._changed:
                self._changed.wait_for(lambda at=at: len(self._tokens) > at or self.done)
                new = self._tokens[at:]
            if not new:
                break
            yield from new
            at += len(new)
        self._ended()

    async def __aiter__(self) -> AsyncIterator[int]:
        """As `__iter__`. Where the waiting task is cancelled, so is the request."""
        loop, fresh = asyncio.get_running_loop(), asyncio.Event()

        def wake() -> None:
            with contextlib.suppress(RuntimeError):  # the loop was closed
                loop.call_soon_threadsafe(fresh.set)

        with self._changed:
            self._wakers.append(wake)
        at = 0
        try:
            while True:
                fresh.clear()
                with self._changed:
                    new, done = self._tokens[at:], self.done
                for token in new:
                    yield token
                at += len(new)
                if not new:
                    if done:
                        break
                    await fresh.wait()
        except asyncio.CancelledError:
            self.cancel()
            raise
        finally:
            with self._changed:
                self._wakers.remove(wake)
        self._ended()

    def produced(self) -> tuple[list[int], list[np.ndarray]]:
        """The engine's: tokens so far, and the logits kept with them."""
        with self._changed:
            return list(self._tokens), list(self._logits)

    def preload(self, tokens: list[int], logits: list[np.ndarray]) -> None:
        """The engine's: what was produced before it was saved. The callback has heard of it."""
        self._tokens, self._logits = list(tokens), list(logits)

    def push(self, nth: int, token: int, logits: np.ndarray | None) -> None:
        """The engine's: the `nth` token. One that is known already comes from a replay, and must be the same."""
        if nth < len(self._tokens):
            same = token == self._tokens[nth] and (logits is None or logits.tobytes() == self._logits[nth].tobytes())
            if not same:
                raise RequestError(f"request {self.number} was computed anew and differs from token {nth} on; report this.")
            return
        with self._changed:
            self._tokens.append(token)
            if logits is not None:
                self._logits.append(logits)
            self._notify()
        if self.on_token is not None:
            self.on_token(token)

    def finish(self, end: End, counts: np.ndarray, error: BaseException | None = None) -> None:
        """The engine's: the end; a second one changes nothing."""
        with self._changed:
            if self.done:
                return
            self.error = error
            logits = np.stack(self._logits) if self._logits else None
            self.completion = Completion(np.array(self._tokens, np.int32), end, logits, counts)
            self._notify()

    def _notify(self) -> None:
        self._changed.notify_all()
        for wake in self._wakers:
            wake()

    def _ended(self) -> Completion:
        assert self.completion is not None
        if self.error is not None:
            raise RequestError(f"request {self.number} failed: {self.error}") from self.error
        return self.completion
