"""What an engine has done and holds, counted: running sums inside, an immutable `Snapshot` outside, Prometheus text on demand.

Everything comes from numbers that a step brings to the host anyway, or from the books; no counter makes the device wait.
"""

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import MappingProxyType

import numpy as np
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from hisparse_jax.layout import CacheLayout
from hisparse_jax.requests import End
from hisparse_jax.runner import View
from hisparse_jax.scheduler import Ticket
from hisparse_jax.tiered import COUNT_NAMES, Traffic

REQUEST_STATES = ("queued", "parked", "prefilling", "running")

PAGE_STATES = ("dirty", "pending", "clean", "unpinned", "host_only", "parked")
"""dirty, pending, clean: on the GPU with a host copy that is not complete, under way, complete. unpinned: clean, and its blocks
count as free. The others: on the host alone."""

EVENTS = (
    "submitted", "started", "preempted", "resumed", "restarted", "resets", "decoded_tokens", "decoded_rows", "prefilled_tokens",
    "prefix_lookups", "prefix_hits", "prefix_hit_tokens", "prefixes_cached", "prefixes_evicted", "prefixes_skipped",
)  # fmt: skip
"""restarted: computed anew from the prompt. resets: the whole cache was lost to a failed program and begun anew.
decoded_rows: rows computed in decode, those of rejected drafts too; each selects `index_topk` entries in a C4 layer.
prefixes_skipped: not cached for want of room, even with every other one evicted."""

MOVES = tuple(field.name for field in dataclasses.fields(Traffic))
"""Rows and pages moved between the tiers, all C4 layers together: `tiered.Traffic`. What parking and resuming moves is not in."""

WAITS = ("slot", "gpu", "host")
"""Steps in which the head of the queue waited, by what it lacked."""


@dataclasses.dataclass(frozen=True)
class PoolUse:
    """Blocks of one pool; the null block counts as neither."""

    free: int
    used: int


@dataclasses.dataclass(frozen=True)
class LayerCounts:
    """What became of the entries that one C4 layer selected in decode."""

    layer: int
    resident: int
    newest: int
    hot_hits: int
    misses: int
    invalid: int
    bytes_to_gpu: int
    """Rows swapped in."""


@dataclasses.dataclass(frozen=True)
class RequestUse:
    """An open request: where it stands, what it holds, and what became of the entries that it selected."""

    number: int
    state: str
    """One of `REQUEST_STATES`."""
    length: int
    """Tokens in the cache."""
    produced: int
    """Tokens sampled since the prompt was last begun."""
    pages: int
    """Host pages held."""
    resident: int
    """Pages on the GPU, un-pinned ones included; 0 unless it is in a slot."""
    hot: bool
    """Owns its hot region."""
    counts: Mapping[str, int]
    """`COUNT_NAMES`, all C4 layers of its decode steps, replays included."""
    bytes_to_gpu: int
    bytes_to_host: int
    """Since it was last begun."""


@dataclasses.dataclass(frozen=True)
class Snapshot:
    """An engine after one of its steps. Counts are sums since it was made, the rest is as of now."""

    step: int
    queued: int
    """In the queue, parked requests apart."""
    parked: int
    prefilling: int
    running: int
    gpu: PoolUse
    host: PoolUse
    hot_regions: int
    cached_prefixes: int
    cached_pages: int
    """Different pages of all cached prefixes; running requests may share them, so they may count among `pages` too."""
    pages: Mapping[str, int]
    """`PAGE_STATES`, pages of all requests."""
    layers: tuple[LayerCounts, ...]
    moved: Mapping[str, int]
    """`MOVES`."""
    bytes_to_gpu: int
    bytes_to_host: int
    events: Mapping[str, int]
    """`EVENTS`."""
    ended: Mapping[End, int]
    waits: Mapping[str, int]
    """`WAITS`."""
    queue_seconds: float
    """From submission to the first slot, all started requests together."""
    requests: tuple[RequestUse, ...]
    """All that have not ended, oldest first."""

    @property
    def hit_rate(self) -> float:
        """Hot hits among references that were neither resident nor newest; 1 where there was none."""
        hits, misses = (sum(getattr(x, name) for x in self.layers) for name in ("hot_hits", "misses"))
        return hits / (hits + misses) if hits + misses else 1.0


class Meter:
    """The running sums of one engine."""

    def __init__(self, layout: CacheLayout):
        self.layout = layout
        self.events: dict[str, int] = dict.fromkeys(EVENTS, 0)
        self.ended = dict.fromkeys(End, 0)
        self.waits: dict[str, int] = dict.fromkeys(WAITS, 0)
        self.counts = np.zeros((len(layout.model.c4_layers), len(COUNT_NAMES)), np.int64)
        self.traffic = np.zeros(len(MOVES), np.int64)
        self.queue_seconds = 0.0

    def snapshot(self, step: int, now: View, tickets: Iterable[Ticket], *, cached_prefixes: int, cached_pages: int) -> Snapshot:
        """The sums, and the state as of `now`, with the open requests' `tickets`."""
        layout = self.layout
        requests = tuple(self._use(ticket, now) for ticket in sorted(tickets, key=lambda t: t.number))
        states = {state: sum(use.state == state for use in requests) for state in REQUEST_STATES}
        parked_pages = sum(use.pages for use in requests if use.state == "parked")
        row = layout.entry.row_bytes
        swapped, staged, mirrored, copied = (int(x) for x in self.traffic)
        to_gpu, to_host = self._bytes(self.traffic)
        resident, *clean = (int(np.sum(x)) for x in (now.resident, now.pending, now.clean, now.unpinned))
        pages = (resident - sum(clean), *clean, int(np.sum(now.pages)) - resident, parked_pages)
        layers = (
            LayerCounts(layer, *map(int, counts), bytes_to_gpu=row * int(counts[COUNT_NAMES.index("misses")]))
            for layer, counts in zip(layout.model.c4_layers, self.counts, strict=True)
        )
        return Snapshot(
            step=step,
            **states,
            gpu=PoolUse(int(now.gpu_free), layout.gpu_blocks - 1 - int(now.gpu_free)),
            host=PoolUse(int(now.host_free), layout.host_blocks - 1 - int(now.host_free)),
            hot_regions=int(np.sum(now.hot)),
            cached_prefixes=cached_prefixes,
            cached_pages=cached_pages,
            pages=MappingProxyType(dict(zip(PAGE_STATES, pages, strict=True))),
            layers=tuple(layers),
            moved=MappingProxyType(dict(zip(MOVES, (swapped, staged, mirrored, copied), strict=True))),
            bytes_to_gpu=to_gpu,
            bytes_to_host=to_host,
            events=MappingProxyType(dict(self.events)),
            ended=MappingProxyType(dict(self.ended)),
            waits=MappingProxyType(dict(self.waits)),
            queue_seconds=self.queue_seconds,
            requests=requests,
        )

    def _use(self, ticket: Ticket, now: View) -> RequestUse:
        state = "parked" if ticket.place >= 0 else ticket.phase.name.lower()
        to_gpu, to_host = self._bytes(ticket.traffic)
        return RequestUse(
            number=ticket.number,
            state=state,
            length=ticket.length,
            produced=ticket.produced,
            pages=ticket.pages,
            resident=int(now.resident[ticket.slot]) if ticket.slot >= 0 else 0,
            hot=bool(ticket.slot >= 0 and now.hot[ticket.slot]),
            counts=MappingProxyType(dict(zip(COUNT_NAMES, ticket.counts.sum(axis=0).tolist(), strict=True))),
            bytes_to_gpu=to_gpu,
            bytes_to_host=to_host,
        )

    def _bytes(self, traffic: np.ndarray) -> tuple[int, int]:
        """To the GPU and to the host, of counts as in `MOVES`."""
        swapped, staged, mirrored, copied = (int(x) for x in traffic)
        row = self.layout.entry.row_bytes
        return row * (swapped + staged), row * mirrored + self.layout.page_bytes * copied


class SnapshotCollector(Collector):
    """Feeds a Prometheus registry with the newest snapshot: `registry.register(SnapshotCollector(lambda: engine.snapshot))`."""

    def __init__(self, newest: Callable[[], Snapshot]):
        self.newest = newest

    def collect(self) -> Iterator[Metric]:
        now = self.newest()
        yield _gauge("requests", "Requests by state", "state", {n: getattr(now, n) for n in REQUEST_STATES})
        for pool, use in (("gpu", now.gpu), ("host", now.host)):
            yield _gauge(f"{pool}_blocks", f"Blocks of the {pool} pool", "state", dataclasses.asdict(use))
        yield _gauge("pages", "Pages of all requests by state", "state", now.pages)
        yield GaugeMetricFamily("hisparse_hot_regions", "Requests that own a hot region", value=now.hot_regions)
        yield GaugeMetricFamily("hisparse_cached_prefixes", "Prompt prefixes kept for later requests", value=now.cached_prefixes)
        yield GaugeMetricFamily("hisparse_cached_pages", "Different pages of the cached prefixes", value=now.cached_pages)
        selected = CounterMetricFamily("hisparse_selected_entries", "Entries selected in decode", labels=["layer", "became"])
        swapped = CounterMetricFamily("hisparse_swapped_bytes", "Bytes of rows swapped in by decode", labels=["layer"])
        for counts in now.layers:
            for name in COUNT_NAMES:
                selected.add_metric([str(counts.layer), name], getattr(counts, name))
            swapped.add_metric([str(counts.layer)], counts.bytes_to_gpu)
        yield selected
        yield swapped
        moved = {"gpu": now.bytes_to_gpu, "host": now.bytes_to_host}
        yield _counter("moved_bytes", "Bytes moved between the tiers", "to", moved)
        yield _counter("events", "What happened to requests", "event", now.events)
        yield _counter("ended_requests", "Requests by how they ended", "end", {str(end): n for end, n in now.ended.items()})
        yield _counter("waiting_steps", "Steps in which the head of the queue waited", "for", now.waits)
        yield CounterMetricFamily("hisparse_queue_seconds", "Time from submission to the first slot", value=now.queue_seconds)


def prometheus_text(snapshot: Snapshot) -> str:
    """The snapshot in Prometheus' text format."""
    registry = CollectorRegistry()
    registry.register(SnapshotCollector(lambda: snapshot))
    return generate_latest(registry).decode()


def _gauge(name: str, what: str, label: str, values: Mapping[str, int]) -> GaugeMetricFamily:
    family = GaugeMetricFamily(f"hisparse_{name}", what, labels=[label])
    for key, value in values.items():
        family.add_metric([key], value)
    return family


def _counter(name: str, what: str, label: str, values: Mapping[str, int]) -> CounterMetricFamily:
    family = CounterMetricFamily(f"hisparse_{name}", what, labels=[label])
    for key, value in values.items():
        family.add_metric([key], value)
    return family
