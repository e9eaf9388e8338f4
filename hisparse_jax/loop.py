"""The rounds of an engine: what comes in, who gets a slot, a chunk, some steps, who makes way. One thread, no locks.

A request that fails is told so and gives back all it held. A program that fails takes the whole cache along: the request
concerned fails, and the others are computed anew from their prompts, to the very same tokens.
"""

import contextlib
import time
import traceback
from collections.abc import Iterator

import numpy as np

from hisparse_jax.drafts import no_drafts
from hisparse_jax.images import RequestImage
from hisparse_jax.layout import CacheLayout
from hisparse_jax.metrics import Meter, Snapshot
from hisparse_jax.prefix_cache import PrefixCache
from hisparse_jax.requests import End
from hisparse_jax.runner import Runner, View
from hisparse_jax.scheduler import Phase, Scheduler, Ticket
from hisparse_jax.status import Status, raise_for_status

MAX_STRIKES = 2
"""Decode calls that may fail in a row before the requests in them fail."""


class ServingLoop:
    """All requests that have not ended (`open`), and the cache they share."""

    def __init__(self, layout: CacheLayout, runner: Runner, scheduler: Scheduler, *, cached_prefixes: int = 0):
        self.layout, self.runner, self.scheduler = layout, runner, scheduler
        self.open: dict[int, Ticket] = {}
        self.meter = Meter(layout)
        self.prefixes = PrefixCache(layout, runner, self.meter.events, capacity=cached_prefixes)
        self.number = 0
        """Of the newest step."""
        self._strikes = 0
        self._stuck: dict[Ticket, Status] = {}

    def take(self, ticket: Ticket) -> None:
        """A new request, to the end of the queue."""
        self.open[ticket.number] = ticket
        self.meter.events["submitted"] += 1
        self.scheduler.requeue(ticket, self.number, first=False)

    def cancel(self, number: int) -> None:
        """Ends a request wherever it stands; one that has ended stays as it is."""
        if ticket := self.open.get(number):
            self._end(ticket, End.CANCELLED)

    def step(self) -> Snapshot:
        """One round of everything."""
        self.number += 1
        if not self._still_stuck():
            self._make_way()
            self._start()
        self._prefill()
        self._decode()
        self._relieve()
        return self.look()

    def look(self) -> Snapshot:
        """What is held, and the sums so far."""
        now = self.runner.look()
        for ticket in self.scheduler.active.values():
            self._follow(ticket, now)
        index = self.prefixes.index
        return self.meter.snapshot(self.number, now, self.open.values(), cached_prefixes=len(index), cached_pages=index.num_pages)

    def _make_way(self) -> None:
        """Parks running requests for a head of the queue that has waited for long."""
        while self.runner.can_park and (ticket := self.scheduler.overdue(self.number)):
            with self._concerning(ticket):
                if not self._park(ticket, first=False):
                    return

    def _start(self) -> None:
        """Fills slots from the queue."""
        scheduler = self.scheduler
        while (ticket := scheduler.next_start()) is not None:
            slot = scheduler.free_slot()
            assert slot is not None
            with self._concerning(ticket):
                if ticket.image is not None and not self._land(ticket):
                    continue
                if ticket.place >= 0:
                    if not self.runner.resume(ticket.place, slot):
                        if not scheduler.active:
                            raise_for_status(Status.OUT_OF_BLOCKS, "return of a request alone")
                        return
                    self.meter.events["resumed"] += 1
                    whole = ticket.length >= len(ticket.request.prompt)
                    scheduler.start(ticket, slot, Phase.RUNNING if whole else Phase.PREFILLING, self.number)
                    continue
                self.prefixes.admit(ticket, slot)
                scheduler.start(ticket, slot, Phase.PREFILLING, self.number)
                ticket.pages = self.layout.num_pages(len(ticket.request.prompt))
                self.meter.events["started"] += 1
                if not ticket.started:
                    ticket.started = True
                    self.meter.queue_seconds += time.monotonic() - ticket.submitted_at
        if scheduler.queue and (reason := scheduler.blocked(scheduler.queue[0])):
            self.meter.waits[reason] += 1

    def _prefill(self) -> None:
        """One chunk of the oldest prompt that is not done."""
        waiting = [t for t in self.scheduler.active.values() if t.phase is Phase.PREFILLING]
        ticket = min(waiting, key=lambda t: t.number, default=None)
        if ticket is None:
            return
        prompt = ticket.request.prompt
        with self._concerning(ticket):
            end = ticket.cuts[0] if ticket.cuts else len(prompt)
            length, logits, status = self.runner.prefill(ticket.slot, prompt, ticket.length, end)
            self.meter.events["prefilled_tokens"] += length - ticket.length
            self._note(ticket, status)
            now = self.runner.look()
            self._follow(ticket, now)
            self.prefixes.publish(ticket)
            if logits is None:
                return
            ticket.phase, ticket.since = Phase.RUNNING, self.number
            raise_for_status(Status.HOMELESS if now.homeless[ticket.slot] else Status.OK, "prefill")
            self._deliver(ticket, [int(now.token[ticket.slot])], logits[None] if self.runner.keep_logits else None, now)

    def _decode(self) -> None:
        """One call for all that run."""
        drafts = self._drafts() if self.layout.cache.draft_rows else None
        running = self._running()
        if not running:
            return
        left = max(t.request.limit - t.length for t in running)
        count = min(self.runner.call_steps, left)
        try:
            ahead = count * self.layout.cache.query_rows
            self.prefixes.make_host_room(sum(self._pages_ahead(t, ahead) for t in running))
            steps = self.runner.decode(count, drafts)
            now = self.runner.look()
        except Exception as error:
            self._strikes += 1
            out = self._strikes >= MAX_STRIKES
            self._recover(error, running if out else [])
            self._strikes = 0 if out else self._strikes
            return
        self._strikes = 0
        assert steps.counts is not None
        self.meter.counts += steps.counts.sum(axis=1)
        for ticket in running:
            if ticket.phase is not Phase.RUNNING:  # begun anew since: one before it lost the cache
                continue
            with self._concerning(ticket):
                slot = ticket.slot
                ticket.counts += steps.counts[:, slot]
                taken = np.flatnonzero(steps.tokens[slot] >= 0)
                self.meter.events["decoded_tokens"] += len(taken)
                self.meter.events["decoded_rows"] += int(steps.rows[slot])
                logits = None if steps.logits is None else steps.logits[slot, taken]
                self._note(ticket, Status(int(steps.status[slot])))
                self._follow(ticket, now)
                raise_for_status(Status.HOMELESS if now.homeless[slot] else Status.OK, "decode")
                self._deliver(ticket, steps.tokens[slot, taken].tolist(), logits, now)

    def _drafts(self) -> np.ndarray:
        """What may come next in each slot: known tokens, where a request is computed anew, then what its drafter guesses."""
        drafts = no_drafts(self.layout, self.runner.call_steps)
        for ticket in self._running():
            with self._concerning(ticket):
                known = ticket.handle.tokens
                guesses = list(known[ticket.produced :])
                if ticket.drafter is not None and (room := drafts.shape[1] - len(guesses)) > 0:
                    guesses += ticket.drafter((*ticket.request.prompt, *known), room)
                guesses = guesses[: drafts.shape[1]]
                drafts[ticket.slot, : len(guesses)] = guesses
        return drafts

    def _deliver(self, ticket: Ticket, tokens: list[int], logits: np.ndarray | None, now: View) -> None:
        """Hands out tokens; the request ends where the cache says that it stopped."""
        for i, token in enumerate(tokens):
            ticket.handle.push(ticket.produced, token, None if logits is None else logits[i].copy())
            ticket.produced += 1
        if tokens and not now.running[ticket.slot]:
            self._end(ticket, End.STOP if tokens[-1] == ticket.request.stop_token else End.LENGTH)

    def _note(self, ticket: Ticket, status: Status) -> None:
        """Remembers who could not grow."""
        if status in (Status.OUT_OF_BLOCKS, Status.OUT_OF_HOST_BLOCKS):
            self._stuck[ticket] = status
        else:
            self._stuck.pop(ticket, None)
            raise_for_status(status, "growth")

    def _still_stuck(self) -> bool:
        """Whether somebody in a slot could not grow when it last tried."""
        self._stuck = {t: s for t, s in self._stuck.items() if self.scheduler.active.get(t.slot) is t}
        return bool(self._stuck)

    def _relieve(self) -> None:
        """Lets the youngest make way where somebody could not grow. Nobody starts until all could."""
        if not self._still_stuck():
            return
        stuck = next(iter(self._stuck))
        with self._concerning(stuck):
            if self.runner.pending is not None:  # pages that are being backed up may leave once that is done
                self.runner.flush()
                return
            lacks_host = Status.OUT_OF_HOST_BLOCKS in self._stuck.values()
            ticket = self.scheduler.youngest(parked=lacks_host)
            if ticket is None:
                raise_for_status(self._stuck[stuck], "growth of a request alone")
                return
            keeps = not lacks_host and ticket.length > 0  # a parked request keeps its host pages
            if not (keeps and self._park(ticket, first=True)):
                self._give_back(ticket)
                self._begin_anew(ticket)

    def _park(self, ticket: Ticket, *, first: bool) -> bool:
        """Takes a request off the GPU with all it has; False where the parking is full."""
        if (place := self._take_place(ticket.slot)) is None:
            return False
        self.scheduler.leave(ticket)
        ticket.place = place
        self.scheduler.requeue(ticket, self.number, first=first)
        self.meter.events["preempted"] += 1
        return True

    def _take_place(self, slot: int) -> int | None:
        """Parks what stands in a slot, in the place of cached prefixes if need be; None where the parking is full."""
        while (place := self.runner.park(slot)) is None and self.runner.can_park and self.prefixes.evict():
            pass
        return place

    def image_of(self, ticket: Ticket) -> RequestImage | None:
        """All that a request has computed, which it keeps; one in a slot is parked for that and comes back.

        None where nothing was computed yet, and in a cache that parks nothing.
        """
        slot = ticket.slot
        if ticket.place >= 0:
            return self.runner.export(ticket.place)
        if slot < 0 or not ticket.length or not self.runner.can_park:
            return ticket.image
        while (place := self._take_place(slot)) is None:
            self._shelve(self.scheduler.parked[-1])
        try:
            return self.runner.export(place)
        finally:
            if not self.runner.resume(place, slot):
                self.scheduler.leave(ticket)
                ticket.place = place
                self.scheduler.requeue(ticket, self.number, first=True)

    def look_after(self, error: Exception) -> None:
        """Something between two rounds failed: where it took the cache along, all are computed anew."""
        self._recover(error, [])

    def _shelve(self, ticket: Ticket) -> None:
        """Makes room in the parking: a parked request keeps its place in the queue and waits outside the cache."""
        ticket.image = self.runner.export(ticket.place)
        self.runner.discard(ticket.place)
        ticket.place = -1

    def _land(self, ticket: Ticket) -> bool:
        """Brings a request that waited outside the cache to the parking; False where none can, and it begins anew."""
        assert ticket.image is not None
        self.prefixes.make_host_room(ticket.image.progress.host_pages)
        while self.runner.can_park:
            if (place := self.runner.take_in(ticket.image)) is not None:
                ticket.place, ticket.image = place, None
                return True
            if not self.prefixes.evict():
                self._shelve(self.scheduler.parked[-1])
        self._begin_anew(ticket)
        return False

    def _begin_anew(self, ticket: Ticket) -> None:
        """To the queue with nothing of what was computed; owners keep the tokens they have."""
        self.scheduler.leave(ticket)
        ticket.image = None
        ticket.length = ticket.pages = ticket.produced = 0
        ticket.traffic[:] = 0
        self.scheduler.requeue(ticket, self.number, first=True)
        self.meter.events["restarted"] += 1

    def _give_back(self, ticket: Ticket) -> None:
        if ticket.place >= 0:
            self.runner.discard(ticket.place)
        elif ticket.slot >= 0:
            if self.runner.pending is not None:
                self.runner.flush()
                self._follow(ticket, self.runner.look())
            self.runner.finish(ticket.slot)

    def _end(self, ticket: Ticket, end: End, error: BaseException | None = None) -> None:
        """The request is over: what it held goes back, then its owner hears of it."""
        if ticket.phase is Phase.ENDED:
            return
        ticket.phase = Phase.ENDED
        try:
            self._give_back(ticket)
        except Exception as failure:
            self._recover(failure, [], lost=True)
        self.scheduler.leave(ticket)
        self._stuck.pop(ticket, None)
        self.meter.ended[end] += 1
        del self.open[ticket.number]
        ticket.handle.finish(end, ticket.counts, error)

    @contextlib.contextmanager
    def _concerning(self, ticket: Ticket) -> Iterator[None]:
        """What fails in here is this request's failure, and nobody else's."""
        try:
            yield
        except Exception as error:
            self._recover(error, [ticket])

    def _recover(self, error: Exception, concerned: list[Ticket], *, lost: bool = False) -> None:
        """Ends the requests concerned. Where the cache is lost, all others are computed anew in an empty one."""
        traceback.clear_frames(error.__traceback__)  # or the error would keep the arrays of a lost cache alive
        if lost or not self.runner.sound:
            self.runner.reset()
            self.prefixes.index.clear()
            self.meter.events["resets"] += 1
            scheduler = self.scheduler
            for ticket in sorted([*scheduler.active.values(), *scheduler.parked], key=lambda t: t.number):
                if ticket.phase is Phase.ENDED or ticket in concerned:
                    scheduler.leave(ticket)
                else:
                    self._begin_anew(ticket)
        for ticket in concerned:
            self._end(ticket, End.FAILED, error)

    def _pages_ahead(self, ticket: Ticket, num_steps: int) -> int:
        """Host pages that a request takes in so many steps."""
        return max(0, self.layout.num_pages(min(ticket.request.limit, ticket.length + num_steps)) - ticket.pages)

    def _running(self) -> list[Ticket]:
        return [t for t in self.scheduler.active.values() if t.phase is Phase.RUNNING]

    def _follow(self, ticket: Ticket, now: View) -> None:
        """Brings the books of a request in a slot up to date."""
        slot = ticket.slot
        ticket.length, ticket.pages = int(now.length[slot]), int(now.host_pages[slot])
        moved = np.asarray(now.traffic)[:, slot].astype(np.int64)
        self.meter.traffic += moved - ticket.traffic
        ticket.traffic = moved
