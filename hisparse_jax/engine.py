"""A serving engine around the jitted loop: requests come and go from any thread, their tokens stream, no bit changes.

    with Engine(model, layout) as engine:
        handle = engine.submit(prompt, max_new_tokens=64)
        for token in handle: ...

One thread owns the cache. A step of it serves what came in, fills free slots from the queue, computes one chunk of the oldest
unfinished prompt, and decodes `call_steps` tokens of all that run; so a new prompt delays running requests by a chunk a step.
What a request's failure does, and a program's, is said in `loop`.
"""

import dataclasses
import threading
import time
from collections.abc import Callable, Sequence

import numpy as np

from hisparse_jax.drafts import Drafter
from hisparse_jax.layout import CacheLayout
from hisparse_jax.loop import ServingLoop
from hisparse_jax.metrics import Snapshot
from hisparse_jax.model.blocks import DeepseekV4
from hisparse_jax.prompts import PromptError
from hisparse_jax.requests import Completion, End, EngineBusyError, EngineClosedError, Handle, Request
from hisparse_jax.runner import Runner
from hisparse_jax.scheduler import Scheduler, Ticket
from hisparse_jax.tiered import COUNT_NAMES

__all__ = ["Completion", "End", "Engine", "EngineBusyError", "EngineClosedError", "EngineConfig", "Handle", "Request"]


@dataclasses.dataclass(frozen=True)
class EngineConfig:
    """Policies of an engine; budgets and shapes are the layout's."""

    call_steps: int = 16
    """Decode steps in one dispatch. New requests, cancellations and chunks wait for its end."""
    growth_reserve: float = 1.0
    """Share of `max_new_tokens` that admission sets aside in both tiers; below 1 more run at once, and may have to make way."""
    patience: int = 256
    """Steps that the head of the queue waits, and a request runs, before a running one is parked for it."""
    max_waiting: int | None = None
    """Requests in the queue before `submit` refuses more; None: any number."""
    keep_logits: bool = False
    """Hand out the logits of every sampled token."""

    def __post_init__(self):
        if self.call_steps < 1 or self.patience < 1:
            raise ValueError(f"call_steps={self.call_steps} and patience={self.patience} must be at least 1.")
        if not 0 <= self.growth_reserve <= 1:
            raise ValueError(f"growth_reserve={self.growth_reserve} must lie in 0..1.")


class Engine:
    """Serves requests on one cache. With `threaded=False` nothing happens but in `step`, which one thread may then call."""

    def __init__(self, model: DeepseekV4, layout: CacheLayout, config: EngineConfig | None = None, *, threaded: bool = True):
        self.layout, self.config = layout, config or EngineConfig()
        settings = self.config
        runner = Runner(model, layout, call_steps=settings.call_steps, keep_logits=settings.keep_logits)
        self._scheduler = Scheduler(
            layout,
            growth_reserve=settings.growth_reserve,
            patience=settings.patience,
            ahead=settings.call_steps * layout.cache.query_rows,
        )
        self._loop = ServingLoop(layout, runner, self._scheduler)
        self._wake = threading.Condition()
        self._inbox: list[Ticket] = []
        self._cancelled: list[int] = []
        self._next_number = 0
        self._closing = self._abandoning = False
        self._error: BaseException | None = None
        self._snapshot = self._loop.look()
        self._thread = threading.Thread(target=self._serve, name="hisparse-engine", daemon=True) if threaded else None
        if self._thread is not None:
            self._thread.start()

    def __enter__(self) -> "Engine":
        return self

    def __exit__(self, kind, *_) -> None:
        self.shutdown(drain=kind is None)

    @property
    def snapshot(self) -> Snapshot:
        """What the engine holds and has done, as of its last step."""
        return self._snapshot

    def submit(
        self,
        prompt: Sequence[int] | np.ndarray,
        max_new_tokens: int,
        *,
        temperature: float = 0.0,
        seed: int = 0,
        stop_token: int = -1,
        on_token: Callable[[int], None] | None = None,
        drafter: Drafter | None = None,
    ) -> Handle:
        """Takes a request, from any thread; it waits for its turn and for room.

        `on_token` is called in the engine's thread and must not block; where it raises, the request fails. So is `drafter`
        (`drafts.prompt_lookup`, say), which guesses what comes next: guesses that are right save steps, in a layout with
        `draft_rows`. Raises `PromptError` for bad input and for what could never fit, `EngineBusyError`, `EngineClosedError`.
        """
        tokens = prompt.tolist() if isinstance(prompt, np.ndarray) else prompt
        request = Request(tuple(tokens), max_new_tokens, temperature, seed, stop_token)
        self._scheduler.check(request)
        if drafter is not None and not self.layout.cache.draft_rows:
            raise PromptError(
                "a drafter has no effect in a layout with draft_rows=0; plan it with draft_rows=3, or leave it out."
            )
        with self._wake:
            if self._closing or self._error is not None:
                raise EngineClosedError("the engine is shut down and takes no more requests.") from self._error
            waiting, most = len(self._inbox) + len(self._scheduler.queue), self.config.max_waiting
            if most is not None and waiting >= most:
                raise EngineBusyError(f"{waiting} requests wait already, max_waiting is {most}; try again later or raise it.")
            handle = Handle(self._next_number, request, self._cancel, on_token)
            self._next_number += 1
            counts = np.zeros((len(self.layout.model.c4_layers), len(COUNT_NAMES)), np.int64)
            self._inbox.append(Ticket(handle, counts, submitted_at=time.monotonic(), drafter=drafter))
            self._wake.notify_all()
        return handle

    def step(self) -> bool:
        """Serves what came in, then one round of everything; whether requests are left. Only with `threaded=False`."""
        with self._wake:
            new, self._inbox = self._inbox, []
            cancelled, self._cancelled = self._cancelled, []
        for ticket in new:
            self._loop.take(ticket)
        for number in list(self._loop.open) if self._abandoning else cancelled:
            self._loop.cancel(number)
        self._snapshot = self._loop.step()
        return bool(self._loop.open)

    def shutdown(self, *, drain: bool = True, timeout: float | None = None) -> None:
        """Takes no more requests, serves those there are (or cancels them, without `drain`), and gives the memory back.

        A second call does no harm. Raises `EngineClosedError` where the engine had broken, `TimeoutError` where it takes too
        long.
        """
        with self._wake:
            self._closing = True
            self._abandoning |= not drain
            self._wake.notify_all()
        if self._thread is None:
            while self._unserved():
                self.step()
            self._loop.runner.close()
        elif self._thread is not threading.current_thread():
            self._thread.join(timeout)
            if self._thread.is_alive():
                raise TimeoutError(f"the engine has not come to its end after {timeout} s.")
        if self._error is not None:
            raise EngineClosedError(f"the engine broke: {self._error}") from self._error

    def _cancel(self, handle: Handle) -> None:
        with self._wake:
            self._cancelled.append(handle.number)
            self._wake.notify_all()

    def _unserved(self) -> bool:
        return bool(self._inbox or self._loop.open)

    def _serve(self) -> None:
        """The engine's thread."""
        try:
            while True:
                with self._wake:
                    self._wake.wait_for(lambda: self._unserved() or self._closing)
                    if not self._unserved():
                        break
                self.step()
            self._loop.runner.close()
        except BaseException as error:  # nobody may wait for ever
            with self._wake:
                self._error = error
                left = [*self._inbox, *self._loop.open.values()]
            for ticket in left:
                ticket.handle.finish(End.FAILED, ticket.counts, error)
