"""A serving engine around the jitted loop: requests come and go from any thread, their tokens stream, no bit changes.

    with Engine(model, layout) as engine:
        handle = engine.submit(prompt, max_new_tokens=64)
        for token in handle: ...

One thread owns the cache. A step of it serves what came in, fills free slots from the queue, computes one chunk of the oldest
unfinished prompt, and decodes `call_steps` tokens of all that run; so a new prompt delays running requests by a chunk a step.
What a request's failure does, and a program's, is said in `loop`.
"""

import atexit
import contextlib
import dataclasses
import pathlib
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future

import numpy as np

from hisparse_jax import saving
from hisparse_jax.config import ConfigError
from hisparse_jax.drafts import Drafter
from hisparse_jax.layout import CacheLayout
from hisparse_jax.loop import ServingLoop
from hisparse_jax.metrics import Snapshot
from hisparse_jax.model.blocks import DeepseekV4
from hisparse_jax.prompts import PromptError
from hisparse_jax.requests import Completion, End, EngineBusyError, EngineClosedError, EngineError, Handle, Request
from hisparse_jax.runner import Runner
from hisparse_jax.scheduler import Scheduler, Ticket
from hisparse_jax.tiered import COUNT_NAMES

__all__ = [
    "Completion", "End", "Engine", "EngineBusyError", "EngineClosedError", "EngineConfig", "EngineError", "Handle", "Request",
]  # fmt: skip


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
    prefix_caching: bool | None = None
    """Prompts are cached for later requests that begin alike; None: where the layout has `cached_prefixes`."""

    def __post_init__(self):
        if self.call_steps < 1 or self.patience < 1:
            raise ConfigError(f"call_steps={self.call_steps} and patience={self.patience} must be at least 1.")
        if not 0 <= self.growth_reserve <= 1:
            raise ConfigError(f"growth_reserve={self.growth_reserve} must lie in 0..1.")


class Engine:
    """Serves requests on one cache. With `threaded=False` nothing happens but in `step`, which one thread may then call.

    Ends with `shutdown`, with the block of a `with`, or with the interpreter, which cancels what is left.
    """

    def __init__(self, model: DeepseekV4, layout: CacheLayout, config: EngineConfig | None = None, *, threaded: bool = True):
        self.layout, self.config = layout, config or EngineConfig()
        settings, cached = self.config, layout.cache.cached_prefixes
        if settings.prefix_caching and not cached:
            raise ConfigError("prefix_caching=True needs places to cache in; plan the layout with cached_prefixes=1 or more.")
        caching = settings.prefix_caching is not False
        runner = Runner(model, layout, call_steps=settings.call_steps, keep_logits=settings.keep_logits)
        self._scheduler = Scheduler(
            layout,
            growth_reserve=settings.growth_reserve,
            patience=settings.patience,
            ahead=settings.call_steps * layout.cache.query_rows,
        )
        self._loop = ServingLoop(layout, runner, self._scheduler, cached_prefixes=cached if caching else 0)
        self._wake = threading.Condition()
        self._inbox: list[Ticket] = []
        self._cancelled: list[int] = []
        self._saves: list[tuple[pathlib.Path, Future[None]]] = []
        self._stepping: int | None = None
        """Thread that is in a step."""
        self._next_number = 0
        self._closing = self._abandoning = False
        self._error: BaseException | None = None
        self._closing_seconds = 0.0
        self._snapshot = self._loop.look()
        self._thread = threading.Thread(target=self._serve, name="hisparse-engine", daemon=True) if threaded else None
        if self._thread is not None:
            self._thread.start()
            atexit.register(_end_with_the_interpreter, weakref.ref(self))

    def __enter__(self) -> "Engine":
        return self

    def __exit__(self, kind, *_) -> None:
        self.shutdown(drain=kind is None)

    @property
    def snapshot(self) -> Snapshot:
        """What the engine holds and has done, as of the end of its last step; a handle knows of its own end a moment earlier."""
        return self._snapshot

    def submit(
        self,
        prompt: Sequence[int] | np.ndarray,
        max_new_tokens: int,
        *,
        temperature: float = 0.0,
        seed: int = 0,
        stop_token: int = -1,
        tenant: bytes | str = b"",
        on_token: Callable[[int], None] | None = None,
        drafter: Drafter | None = None,
    ) -> Handle:
        """Takes a request, from any thread; it waits for its turn and for room.

        Requests of one `tenant` share the cached prefixes of their prompts, those of two never do.
        `on_token` is called in the engine's thread and must not block; where it raises, the request fails. So is `drafter`
        (`drafts.prompt_lookup`, say), which guesses what comes next: guesses that are right save steps, in a layout with
        `draft_rows`. Raises `PromptError` for bad input and for what could never fit, `EngineBusyError`, `EngineClosedError`.
        """
        tokens = prompt.tolist() if isinstance(prompt, np.ndarray) else prompt
        salt = tenant.encode() if isinstance(tenant, str) else tenant
        request = Request(tuple(tokens), max_new_tokens, temperature, seed, stop_token, salt)
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
        with self._at_work():
            self._take_in()
            self._snapshot = self._loop.step()
        return bool(self._loop.open)

    def save(self, path: pathlib.Path | str) -> None:
        """Writes all requests that have not ended, with what was computed of them, to a new folder; they go on here.

        From any thread; it is done between two steps, and this returns when all is written. One after the other they leave
        the GPU for it and come back; where the layout parks nothing, `restore` computes them anew. Tokens that an
        `on_token` heard are not told again. Raises `EngineError` for a folder that exists, `EngineClosedError`.
        """
        if self._stepping == threading.get_ident():
            raise EngineError("save waits for the end of the step that calls it; call it from outside of on_token.")
        done: Future[None] = Future()
        with self._wake:
            if self._closing or self._error is not None:
                raise EngineClosedError("the engine is shut down and saves nothing.") from self._error
            self._saves.append((pathlib.Path(path), done))
            self._wake.notify_all()
        if self._thread is None:
            with self._at_work():
                self._take_in()
        done.result()

    @classmethod
    def restore(
        cls,
        path: pathlib.Path | str,
        model: DeepseekV4,
        layout: CacheLayout,
        config: EngineConfig | None = None,
        *,
        threaded: bool = True,
        on_token: Callable[[int, int], None] | None = None,
    ) -> tuple["Engine", dict[int, Handle]]:
        """An engine that goes on with what another has saved, and the handles of its requests by their numbers.

        Tokens and logits are those that the other would have given. Budgets, packing and policies (None: the other's) may
        differ; what finds no room in the cache yet waits outside of it. Handles begin with the tokens that there were;
        `on_token` gets a request's number and each new one. Raises `EngineError`, before an engine is made, for a folder
        that is damaged or does not fit model and layout.
        """
        saved = saving.load(pathlib.Path(path), model, layout)
        config = config or EngineConfig(**saved.settings)
        if config.keep_logits != saved.settings["keep_logits"]:
            raise EngineError(
                f"{path} was saved with keep_logits={saved.settings['keep_logits']}, config has {config.keep_logits}; a request "
                "would have the logits of some of its tokens: restore it with the same."
            )
        engine = cls(model, layout, config, threaded=threaded)
        tickets = [make(engine._cancel, on_token) for make in saved.tickets]
        with engine._wake:
            engine._inbox, engine._next_number = tickets + engine._inbox, saved.next_number
            engine._wake.notify_all()
        return engine, {ticket.number: ticket.handle for ticket in tickets}

    def shutdown(self, *, drain: bool = True, timeout: float | None = None) -> float:
        """Takes no more requests, serves those there are (or cancels them, without `drain`), and gives the memory back.

        Returns the seconds that giving back took, once the device was idle: unpinning a large pool is slow. A second call
        does no harm; one from `on_token` only says that it is time. Raises `EngineClosedError` where the engine had broken,
        `TimeoutError` where it takes too long.
        """
        with self._wake:
            self._closing = True
            self._abandoning |= not drain
            self._wake.notify_all()
        if self._stepping == threading.get_ident():
            return 0.0
        if self._thread is None:
            try:
                while self._unserved():
                    self.step()
            finally:
                self._closing_seconds += self._loop.runner.close()
        else:
            self._thread.join(timeout)
            if self._thread.is_alive():
                raise TimeoutError(f"the engine has not come to its end after {timeout} s.")
        if self._error is not None:
            raise EngineClosedError(f"the engine broke: {self._error}") from self._error
        return self._closing_seconds

    def _cancel(self, handle: Handle) -> None:
        with self._wake:
            self._cancelled.append(handle.number)
            self._wake.notify_all()

    @contextlib.contextmanager
    def _at_work(self) -> Iterator[None]:
        self._stepping = threading.get_ident()
        try:
            yield
        finally:
            self._stepping = None

    def _take_in(self) -> None:
        """Serves what came in from other threads."""
        with self._wake:
            new, self._inbox = self._inbox, []
            cancelled, self._cancelled = self._cancelled, []
            saves, self._saves = self._saves, []
        for ticket in new:
            self._loop.take(ticket)
        for number in list(self._loop.open) if self._abandoning else cancelled:
            self._loop.cancel(number)
        for path, done in saves:
            try:
                saving.save(self._loop, dataclasses.asdict(self.config), self._next_number, path)
                done.set_result(None)
            except Exception as error:
                self._loop.look_after(error)
                done.set_exception(error)

    def _unserved(self) -> bool:
        return bool(self._inbox or self._loop.open or self._saves)

    def _serve(self) -> None:
        """The engine's thread."""
        try:
            while True:
                with self._wake:
                    self._wake.wait_for(lambda: self._unserved() or self._closing)
                    if not self._unserved():
                        break
                self.step()
        except BaseException as error:  # nobody may wait for ever
            with self._wake:
                self._error = error
                left, saves = [*self._inbox, *self._loop.open.values()], self._saves
            for ticket in left:
                ticket.handle.finish(End.FAILED, ticket.counts, error)
            for _, done in saves:
                done.set_exception(EngineClosedError(f"the engine broke: {error}"))
        finally:
            self._closing_seconds += self._loop.runner.close()


def _end_with_the_interpreter(of: weakref.ref[Engine]) -> None:
    """Its thread must not compute on while the interpreter and JAX are taken down around it."""
    engine = of()
    if engine is not None:
        with contextlib.suppress(EngineClosedError):
            engine.shutdown(drain=False)
