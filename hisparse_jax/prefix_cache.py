"""What an engine does with cached prefixes: who adopts one, what is published and when, who yields to whom. No locks.

A prompt is cached where the index cuts it: each cut is the end of a chunk, so that the state there exists between two dispatches,
and the backup of the pages before it is ended first. What decode computed is not cached: its programs round otherwise than a
prefill of the same tokens, and a hit must not change a bit. A follow-up of a chat adopts the prompt before it, and computes the
answer and what is new.

Cached prefixes hold only what nobody needs: they yield, the one used least lately first, to admissions, to requests that
grow, and to parked requests. So the scheduler's books leave them out.
"""

from hisparse_jax.layout import CacheLayout
from hisparse_jax.prefix import CachedPrefix, PrefixIndex
from hisparse_jax.runner import Runner
from hisparse_jax.scheduler import Ticket
from hisparse_jax.status import Status, raise_for_status


class PrefixCache:
    """The index over the places of one runner; with `capacity=0` every request is computed from its first token."""

    def __init__(self, layout: CacheLayout, runner: Runner, events: dict[str, int], *, capacity: int):
        self.layout, self.runner, self.events = layout, runner, events
        cache = layout.cache
        formats = (cache.rows, cache.index_format, cache.hadamard, cache.page_entries, cache.chunk_tokens)
        self.index = PrefixIndex(layout.page_tokens, capacity, repr((layout.model, formats)))

    def admit(self, ticket: Ticket, slot: int) -> None:
        """Host pages for a prompt, and what is cached of it. Raises `TierError` where not even eviction makes room."""
        request = ticket.request
        ticket.length, ticket.links, ticket.cuts = 0, (), ()
        if self.index.capacity:
            ticket.links = self.index.links(request.tenant, request.prompt)
            self.events["prefix_lookups"] += 1
            hit = self.index.find(ticket.links, request.prompt)
            if hit is not None and self._adopt(ticket, slot, hit):
                ticket.length = hit.length
            ticket.cuts = self.index.cuts(ticket.links, ticket.length, request.prompt)
        if not ticket.length:
            self.make_host_room(self.layout.num_pages(len(request.prompt)))
            self.runner.admit(slot, request)

    def _adopt(self, ticket: Ticket, slot: int, hit: CachedPrefix) -> bool:
        """False, and nothing is held, where there is no room: without the hit the request can start with less."""
        runner, prompt = self.runner, ticket.request.prompt
        self.index.use(hit)
        self.make_host_room(self.layout.num_pages(len(prompt)) - len(hit.links), keep=hit)
        status = runner.adopt(hit.place, slot, ticket.request, hit.length)
        if status is Status.OUT_OF_BLOCKS and runner.pending is not None:  # leased pages may go once they are copied
            runner.flush()
            status = runner.adopt(hit.place, slot, ticket.request, hit.length)
        if status is Status.OK:
            self.events["prefix_hits"] += 1
            self.events["prefix_hit_tokens"] += hit.length
        elif status not in (Status.OUT_OF_BLOCKS, Status.OUT_OF_HOST_BLOCKS):
            raise_for_status(status, f"prefix in place {hit.place}")
        return status is Status.OK

    def publish(self, ticket: Ticket) -> None:
        """Caches the prompt up to where the request stands, if that is a cut."""
        length = ticket.length
        if length not in ticket.cuts:
            return
        ticket.cuts = tuple(cut for cut in ticket.cuts if cut > length)
        tokens, links = ticket.request.prompt[:length], ticket.links[: length // self.layout.page_tokens]
        if (known := self.index.exact(links, tokens)) is not None:
            self.index.use(known)
            return
        self.runner.flush()
        while True:
            if len(self.index) < self.index.capacity:
                like, num_shared = self.index.sharing(links)
                place = self.runner.publish(ticket.slot, like.place if like else -1, num_shared)
                if place is not None:
                    self.index.add(place, links, tokens)
                    self.events["prefixes_cached"] += 1
                    return
            if not self.evict():
                self.events["prefixes_skipped"] += 1
                return

    def make_host_room(self, num_pages: int, *, keep: CachedPrefix | None = None) -> None:
        """Evicts until so many host blocks are free, or nothing is left but `keep`."""
        while len(self.index) and self.runner.look().host_free < num_pages and self.evict(keep):
            pass

    def evict(self, keep: CachedPrefix | None = None) -> bool:
        """Gives up the prefix used least lately, but `keep`; False where there is none."""
        prefix = self.index.oldest(keep)
        if prefix is None:
            return False
        self._give_up(prefix)
        self.events["prefixes_evicted"] += 1
        return True

    def clear(self) -> None:
        """Gives up all of them, which counts as no eviction."""
        for prefix in self.index:
            self._give_up(prefix)

    def _give_up(self, prefix: CachedPrefix) -> None:
        self.runner.discard(prefix.place)
        self.index.remove(prefix)
