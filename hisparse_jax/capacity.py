"""What a layout holds: hot regions, requests resident and tiered, bytes per token, the least GPU blocks of a run.

All of it is arithmetic on a `CacheLayout`; no array is made. Fractions are exact. Null blocks are not subtracted from
the pools where a published formula does not subtract them.

Source: the admission arithmetic of vLLM's HiSparse.
"""

import dataclasses
import math
from collections.abc import Iterable, Sequence
from fractions import Fraction

from hisparse_jax.config import C4, CacheConfig, ModelConfig
from hisparse_jax.layout import CacheLayout, index_layers, steady_blocks
from hisparse_jax.specs import C4StateSpec, C128StateSpec, IndexStateSpec, WindowSpec, model_specs

MAP_BYTES = 6
"""Hot map and LRU, per slot and leading layer: an int32 host row and an int16 slot."""


@dataclasses.dataclass(frozen=True)
class HotRegion:
    """What one request owns on the GPU once it has lost pages, whatever its length."""

    pages: int
    blocks: int
    """All groups."""
    payload_bytes: int
    """C4 pages alone."""
    pool_bytes: int
    """Slab bytes: whole blocks."""
    map_bytes: int
    """Hot map and LRU order, outside the slab."""
    unused_rows: int
    """Rows per layer past `num_hot_slots`, where that is no multiple of a page."""


def hot_region(layout: CacheLayout) -> HotRegion:
    """The hot region of one request."""
    return HotRegion(
        pages=layout.hot_pages,
        blocks=layout.hot_blocks,
        payload_bytes=layout.hot_pages * layout.host_page,
        pool_bytes=layout.hot_blocks * layout.stride,
        map_bytes=MAP_BYTES * layout.num_hot_slots * len(index_layers(layout.model)),
        unused_rows=layout.hot_pages * layout.page_entries - layout.num_hot_slots,
    )


def break_even_tokens(layout: CacheLayout) -> int:
    """Context whose resident pages take as much as the hot region and the tail; tiering gains from the next page on."""
    return (layout.hot_pages + layout.cache.tail_pages) * layout.page_tokens


@dataclasses.dataclass(frozen=True)
class Concurrency:
    """Requests of one length that the pools hold at once, as exact fractions."""

    pages: int
    admission: int
    """GPU blocks that a request may ask for while it is admitted."""
    steady: int
    """GPU blocks that it keeps under pressure."""
    gpu: Fraction
    """Tiered requests that the slab holds: all in steady state but the one being admitted."""
    host: Fraction
    """Tiered requests that the host pool holds."""
    resident: Fraction
    """Requests that the slab holds without a host tier."""

    @property
    def tiered(self) -> Fraction:
        return min(self.gpu, self.host)

    @property
    def requests_tiered(self) -> int:
        return math.floor(self.tiered)

    @property
    def requests_resident(self) -> int:
        return math.floor(self.resident)

    @property
    def bound_by(self) -> str:
        """The pool that limits tiered requests."""
        return "host" if self.host < self.gpu else "gpu"


def concurrency(layout: CacheLayout, tokens: int, *, window_tokens: int | None = None) -> Concurrency:
    """Steady-state concurrency of requests of `tokens` tokens.

    `window_tokens` caps the resident pages that admission asks for at those of the tokens in flight; None: the whole
    context. Below `break_even_tokens` a request is cheaper resident, and `gpu` is less than `resident`.
    """
    pages = layout.num_pages(tokens)
    resident = pages if window_tokens is None else min(pages, layout.num_pages(window_tokens))
    admission = layout.num_base_groups * pages + layout.num_resident_groups * (resident + layout.hot_pages)
    tail = layout.cache.tail_pages
    steady = steady_blocks(layout.num_base_groups, layout.num_resident_groups, pages, layout.hot_pages, tail)
    blocks = layout.gpu_blocks
    return Concurrency(
        pages=pages,
        admission=admission,
        steady=steady,
        gpu=Fraction(blocks, admission) if blocks < admission else 1 + Fraction(blocks - admission, steady),
        host=Fraction(layout.host_blocks, pages),
        resident=Fraction(blocks, layout.growing_groups * pages),
    )


def min_gpu_blocks(layout: CacheLayout, tokens: int) -> int:
    """Least `gpu_blocks` with which one prompt of `tokens` tokens is prefilled in full chunks, or decoded to that length alone.

    Null block included; `layout.gpu_blocks` plays no part.
    """
    chunk = layout.cache.chunk_tokens
    return batch_gpu_blocks(layout, ([layout.num_pages(min(end, tokens))] for end in range(chunk, tokens + chunk, chunk)))


def batch_gpu_blocks(layout: CacheLayout, growth: Iterable[Sequence[int]]) -> int:
    """Least `gpu_blocks` with which requests that start empty grow side by side, none of them ending; null block included.

    `growth` lists the pages of each request after each time that room is made for new ones. Before the new pages come, all
    history can leave but each request's tail. A request that lost pages holds its hot region; while it has too
    few pages for that to pay it stays whole, except under `reclaim="eager"`: there the count is what is enough, and a slab
    without room for such regions may get by with less. Giving pages up and taking the region are one transition, so the
    region comes from the pages' own blocks. `layout.gpu_blocks` plays no part.
    """
    eager, tail = layout.cache.reclaim == "eager", layout.cache.tail_pages

    def resident(before: int, after: int) -> int:
        """Pages of one request on the GPU, hot ones included, at their fewest once the new ones are there."""
        tiered = layout.hot_pages + min(before, tail) + after - before
        if not layout.host_blocks or (eager and before <= tail):
            return after
        return tiered if eager else min(after, tiered)

    most, pages = 0, None
    for grown in growth:
        held = sum(map(resident, pages or [0] * len(grown), grown))
        most = max(most, layout.num_base_groups * sum(grown) + layout.num_resident_groups * held)
        pages = grown
    return 1 + most


@dataclasses.dataclass(frozen=True)
class TokenBytes:
    """Bytes that one more token of context takes, over all layers. Payload is pages, pool is whole blocks."""

    c4: Fraction
    """Payload of C4 entries; the same on the host."""
    index: Fraction
    c128: Fraction
    pool_resident: Fraction
    pool_base: tuple[Fraction, ...]
    """One per base group."""
    unpadded: Fraction
    """Payload without the padding of pages."""
    backup: Fraction
    """Written to the host for each decoded token."""

    @property
    def payload(self) -> Fraction:
        return self.c4 + self.index + self.c128

    @property
    def pool(self) -> Fraction:
        return self.pool_resident + sum(self.pool_base)

    @property
    def payload_share(self) -> Fraction:
        """The part of the slab's growth that is payload; the rest is slack of the packing."""
        return self.payload / self.pool


def token_bytes(layout: CacheLayout) -> TokenBytes:
    """Bytes per token of context of a request that is fully resident."""
    specs = model_specs(layout.model, layout.cache)
    c4, index, c128 = (sum(s.page_bytes for _, s in kind) for kind in (specs.source, specs.index, specs.c128))
    rows = sum(Fraction(s.row.row_bytes, s.ratio) for _, s in specs.source + specs.index + specs.c128)
    page, stride = layout.page_tokens, layout.stride
    return TokenBytes(
        c4=Fraction(c4, page),
        index=Fraction(index, page),
        c128=Fraction(c128, page),
        pool_resident=Fraction(layout.num_resident_groups * stride, page),
        pool_base=(Fraction(stride, page),) * layout.num_base_groups,
        unpadded=Fraction(rows),
        backup=Fraction(layout.entry.row_bytes * len(specs.source), C4),
    )


@dataclasses.dataclass(frozen=True)
class FixedBytes:
    """What one running request holds outside the slab, whatever its length."""

    windows: int
    c4_states: int
    index_states: int
    c128_states: int

    @property
    def states(self) -> int:
        return self.c4_states + self.index_states + self.c128_states

    @property
    def total(self) -> int:
        return self.windows + self.states


def fixed_bytes(model: ModelConfig, cache: CacheConfig) -> FixedBytes:
    """Window latents and float32 compressor states of one request."""
    sliding = model_specs(model, cache).sliding
    kinds = (WindowSpec, C4StateSpec, IndexStateSpec, C128StateSpec)
    return FixedBytes(*(sum(s.dense_bytes for _, s in sliding if isinstance(s, kind)) for kind in kinds))
