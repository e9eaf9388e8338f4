"""Who runs, who waits, who makes way: the books of an engine, in plain Python, without a byte of cache.

One queue, first come first served. Nobody overtakes a request that waits for a slot or for GPU blocks. One that waits for host
pages may be overtaken by parked requests alone: they hold such pages, and their end is what frees them. A running request
makes way when it, or an older one, cannot grow (the youngest goes, so the oldest always gets on), and when the head of the queue
has waited for long (the one that has run longest goes, to the end of the queue).
"""

import collections
import dataclasses
import enum
import math

import numpy as np

from hisparse_jax.capacity import min_gpu_blocks
from hisparse_jax.drafts import Drafter
from hisparse_jax.images import RequestImage
from hisparse_jax.layout import CacheLayout
from hisparse_jax.prefix import Links
from hisparse_jax.prompts import PromptError, check_prompt, check_sampling
from hisparse_jax.requests import Handle, Request


class Phase(enum.Enum):
    """Where a request stands."""

    QUEUED = enum.auto()
    """Waits for a slot: new, parked, or to be computed anew."""
    PREFILLING = enum.auto()
    RUNNING = enum.auto()
    ENDED = enum.auto()


@dataclasses.dataclass(eq=False)
class Ticket:
    """The engine's side of a request. `since` is the step in which it came to the queue, or to its slot."""

    handle: Handle
    counts: np.ndarray
    phase: Phase = Phase.QUEUED
    since: int = 0
    slot: int = -1
    place: int = -1
    """In the parking; -1: not parked."""
    image: RequestImage | None = None
    """What was computed, where it waits outside the cache."""
    length: int = 0
    """Tokens in the cache."""
    pages: int = 0
    """Host pages held, or those that its image asks for."""
    produced: int = 0
    """Tokens sampled since the prompt was last begun."""
    links: Links = ()
    """Of the prompt's full pages, where prefixes are cached."""
    cuts: tuple[int, ...] = ()
    """Lengths, still to come, at which the prompt is cached for others."""
    drafter: Drafter | None = None
    reserve_all: bool = False
    """It had to make way once: it comes back when its whole length fits."""
    traffic: np.ndarray = dataclasses.field(default_factory=lambda: np.zeros(4, np.int64))
    """Rows and pages moved for it, as last seen."""
    submitted_at: float = 0.0
    started: bool = False

    @property
    def request(self) -> Request:
        return self.handle.request

    @property
    def number(self) -> int:
        """Lower is older."""
        return self.handle.number


class Scheduler:
    """The queue and the slots of one layout.

    growth_reserve   share of `max_new_tokens` that admission sets aside in both tiers. At 1 growth never fails; below, more
                     requests run at once, and one that cannot grow makes way.
    patience         steps that the head of the queue waits, and that a request runs, before the one makes way for the other.
    ahead            tokens that a request may gain before the books are looked at again.
    """

    def __init__(self, layout: CacheLayout, *, growth_reserve: float, patience: int, ahead: int):
        self.layout, self.growth_reserve, self.patience, self.ahead = layout, growth_reserve, patience, ahead
        self.queue: collections.deque[Ticket] = collections.deque()
        self.active: dict[int, Ticket] = {}
        self._need: dict[int, int] = {}

    def check(self, request: Request) -> None:
        """Raises `PromptError` for a request that no waiting could make fit."""
        layout = self.layout
        if request.max_new_tokens < 1:
            raise PromptError(f"max_new_tokens={request.max_new_tokens} must be at least 1.")
        check_prompt(request.prompt, layout, request.max_new_tokens - 1)
        check_sampling(request.seed, request.temperature)
        pages = layout.num_pages(request.limit)
        need = self.gpu_blocks(pages) + 1
        if need > layout.gpu_blocks:
            raise PromptError(
                f"{request.limit} tokens need {need} GPU blocks even alone, the pool has {layout.gpu_blocks}; raise "
                f"gpu_pool_bytes to {need * layout.stride:,} (or gpu_blocks to {need}), or shorten the request."
            )
        if pages > layout.host_blocks - 1:
            raise PromptError(
                f"{request.limit} tokens need {pages} host pages, the pool has {layout.host_blocks - 1}; raise host_pool_bytes "
                f"to {(pages + 1) * layout.host_page:,} (or host_blocks to {pages + 1}), or shorten the request."
            )

    @property
    def parked(self) -> list[Ticket]:
        return [t for t in self.queue if t.place >= 0]

    def free_slot(self) -> int | None:
        """The lowest that nobody has."""
        return next((slot for slot in range(self.layout.cache.max_requests) if slot not in self.active), None)

    def blocked(self, ticket: Ticket) -> str | None:
        """What a queued request waits for: "host" pages, a "slot" or "gpu" blocks; None where it may start.

        Host pages come first: where they are short, no preemption helps.
        """
        layout = self.layout
        holders = [*self.active.values(), *self.parked]
        if ticket.place < 0 and sum(map(self.reserved_pages, [*holders, ticket])) > layout.host_blocks - 1:
            return "host"
        if self.free_slot() is None:
            return "slot"
        if sum(self.gpu_blocks(self.reserved_pages(t)) for t in [*self.active.values(), ticket]) > layout.gpu_blocks - 1:
            return "gpu"
        return None

    def next_start(self) -> Ticket | None:
        """Who gets a slot now: the head of the queue, or a parked request where the head lacks host pages."""
        held_up = False
        for ticket in self.queue:
            if held_up and ticket.place < 0:
                continue
            reason = self.blocked(ticket)
            if reason is None:
                return ticket
            if reason != "host":
                return None
            held_up = True
        return None

    def start(self, ticket: Ticket, slot: int, phase: Phase, step: int) -> None:
        """From the queue to a slot."""
        self.queue.remove(ticket)
        ticket.slot, ticket.place, ticket.phase, ticket.since = slot, -1, phase, step
        self.active[slot] = ticket

    def leave(self, ticket: Ticket) -> None:
        """Out of the slot or the queue, for good or to be queued again."""
        if self.active.get(ticket.slot) is ticket:
            del self.active[ticket.slot]
        elif ticket in self.queue:
            self.queue.remove(ticket)
        ticket.slot = ticket.place = -1

    def requeue(self, ticket: Ticket, step: int, *, first: bool) -> None:
        """Back to the queue: to its head, behind older ones that had to make way too, or to its end."""
        ticket.phase, ticket.since = Phase.QUEUED, step
        if not first:
            self.queue.append(ticket)
            return
        older = 0
        while older < len(self.queue) and self.queue[older].reserve_all and self.queue[older].number < ticket.number:
            older += 1
        ticket.reserve_all = True
        self.queue.insert(older, ticket)

    def youngest(self, *, parked: bool) -> Ticket | None:
        """Who makes way when growth fails; among parked ones too where host pages are short. None where there is but one."""
        choices = [*self.active.values(), *(self.parked if parked else [])]
        return max(choices, key=lambda t: t.number) if len(choices) > 1 else None

    def overdue(self, step: int) -> Ticket | None:
        """Who makes way for a head of the queue that has waited for long, if that could help it."""
        if not self.queue or step - self.queue[0].since < self.patience or self.blocked(self.queue[0]) not in ("slot", "gpu"):
            return None
        ripe = [t for t in self.active.values() if t.phase is Phase.RUNNING and step - t.since >= self.patience]
        return min(ripe, key=lambda t: (t.since, t.number), default=None)

    def reserved_pages(self, ticket: Ticket) -> int:
        """Pages that the books set aside for a request: those it has, those its next step may add, and its reserve."""
        request = ticket.request
        share = 1.0 if ticket.reserve_all else self.growth_reserve
        planned = len(request.prompt) + math.ceil(share * request.max_new_tokens)
        return max(ticket.pages, self.layout.num_pages(min(request.limit, max(planned, ticket.length + self.ahead))))

    def gpu_blocks(self, pages: int) -> int:
        """GPU blocks that a request of so many pages needs once all history that may go is gone."""
        if pages not in self._need:
            self._need[pages] = min_gpu_blocks(self.layout, pages * self.layout.page_tokens) - 1
        return self._need[pages]
