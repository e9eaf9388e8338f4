"""The planner: a model and its budgets to one hashable `CacheLayout`, every number a program needs at trace time.

A GPU block is `stride` bytes of one slab and holds one page of every layer of **one** group, so groups overlay each
other. C4 layers are split over resident groups; the hot groups have the same layers at the same offsets, so a hot page
and a resident page of a layer differ by block id alone and one attention view reads both. The stride is a multiple of
the C4 page, so the slab is also a uniform array of C4 pages: row `block * row_step + slot`, counted from the layer's
own offset. Two rules choose the groups:

    base      indexer, C128 and C4 groups apart; a C4 group is packed up to the bytes of the indexer's group.
    searched  C128 joins the indexer's group; the stride is the one with the least steady-state bytes per request.

Source: vLLM's HiSparse layout for DeepSeek-V4 (base); the search is this project's.
"""

import dataclasses
import math
from collections.abc import Iterable, Sequence

from hisparse_jax.config import C4, CacheConfig, ModelConfig
from hisparse_jax.groups import Group, LayoutError, Place, Places, Tensor, check_groups, check_specs
from hisparse_jax.rows import RowFormat, entry_format, index_format
from hisparse_jax.specs import CacheSpec, HotSpec, ModelSpecs, Pool, ResidentSpec, cdiv, model_specs

SPARE_HOST_BLOCKS = 2
"""Host blocks beyond one request's pages: the null block, and one for the copy-on-write of a tail page."""

MAX_ROW = 2**31 - 1
"""Row ids are int32."""

Units = tuple[tuple[tuple[int, CacheSpec], ...], ...]
"""Hot units as `(layer, spec)` pairs: what a group takes whole."""


@dataclasses.dataclass(frozen=True)
class CacheLayout:
    """The plan of one model under one set of budgets. Block counts include the null block, id 0 of each pool."""

    model: ModelConfig
    cache: CacheConfig
    entry: RowFormat
    """Rows of C4, C128 and window entries."""
    index: RowFormat
    stride: int
    """Bytes of a GPU block."""
    gpu_blocks: int
    host_blocks: int
    """0 in a layout without a host tier."""
    num_hot_slots: int
    hot_pages: int
    """Hot blocks per request and group; rows past `num_hot_slots` stay unused."""
    max_pages: int
    """Pages of a request of `max_model_len` tokens."""
    base_groups: tuple[Places, ...]
    """Index keys and C128 entries: `[indexer, C128]` by the base rule, one group by the searched."""
    resident_groups: tuple[Places, ...]
    """C4 entries; the hot groups are the same."""

    @property
    def page_entries(self) -> int:
        return self.cache.page_entries

    @property
    def page_tokens(self) -> int:
        return C4 * self.page_entries

    @property
    def page_bytes(self) -> int:
        """Bytes of one C4 page of one layer."""
        return self.entry.page_bytes(self.page_entries)

    @property
    def host_page(self) -> int:
        """Bytes of a host block: one page of every C4 layer."""
        return len(self.model.c4_layers) * self.page_bytes

    @property
    def base_page(self) -> int:
        """Bytes of a parking block: one page of every base group, without the slack of slab blocks."""
        return sum(_block_bytes(group) for group in self.base_groups)

    @property
    def parking_places(self) -> int:
        """Places for parked requests and cached prefixes; 0 where neither is kept."""
        return self.cache.parked_requests + self.cache.cached_prefixes if self.host_blocks else 0

    @property
    def parking_blocks(self) -> int:
        """Blocks of base pages of parked requests and cached prefixes, null block included; 0 where neither is kept."""
        cache = self.cache
        if not self.parking_places:
            return 0
        shares = ((cache.parked_requests, cache.parked_pages), (cache.cached_prefixes, cache.cached_pages))
        return 1 + sum(places * self.max_pages if pages is None else pages for places, pages in shares)

    @property
    def snapshot_bytes(self) -> int:
        """Windows and compressor states of one request, all layers."""
        return sum(s.dense_bytes for _, s in model_specs(self.model, self.cache).sliding)

    @property
    def row_step(self) -> int:
        """C4 rows from one block to the next: 320 (Flash) and 448 (Pro) by the base rule."""
        return self.stride // self.page_bytes * self.page_entries

    @property
    def num_base_groups(self) -> int:
        return len(self.base_groups)

    @property
    def num_resident_groups(self) -> int:
        return len(self.resident_groups)

    @property
    def growing_groups(self) -> int:
        """Blocks that one more resident page takes."""
        return self.num_base_groups + self.num_resident_groups

    @property
    def hot_blocks(self) -> int:
        """Blocks of one request's hot region, all groups."""
        return self.num_resident_groups * self.hot_pages

    @property
    def watermark(self) -> int:
        """Free GPU blocks below which `reclaim="unpin"` makes requests take their hot regions."""
        given = self.cache.watermark
        return max(self.hot_blocks, self.gpu_blocks // 10) if given is None else given

    @property
    def window_pages(self) -> int:
        """Resident pages from which on it makes one do so in any case; more than there can be without an admission window."""
        window = self.cache.admission_window
        return self.max_pages + 1 if window is None else self.num_pages(window)

    @property
    def slab_bytes(self) -> int:
        return self.gpu_blocks * self.stride

    @property
    def host_bytes(self) -> int:
        return self.host_blocks * self.host_page

    @property
    def parking_bytes(self) -> int:
        """Pinned host memory beside the C4 pools: base pages, and a snapshot for each place and for the null one."""
        if not self.parking_blocks:
            return 0
        return self.parking_blocks * self.base_page + (self.parking_places + 1) * self.snapshot_bytes

    def num_pages(self, tokens: int) -> int:
        """Pages of a request of `tokens` tokens."""
        return cdiv(tokens, self.page_tokens)

    def resident_place(self, layer: int) -> Place:
        """Of a C4 layer, in its resident group and in its hot group alike."""
        return _find(self.resident_groups, layer, self.model.c4_layers, "C4 entries")

    def index_place(self, layer: int) -> Place:
        """Of a C4 layer that leads; a follower stores no index keys."""
        return _find(self.base_groups, layer, index_layers(self.model), "index keys")

    def c128_place(self, layer: int) -> Place:
        return _find(self.base_groups, layer, self.model.c128_layers, "C128 entries")

    @property
    def groups(self) -> tuple[Group, ...]:
        """One record per block table: source, indexer, resident, hot, C128. Without a host tier: no source, no hot."""
        return _group_records(self, model_specs(self.model, self.cache))

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """One host tensor per C4 layer (layer-major), then one GPU tensor per distinct byte offset."""
        views = [(g.pool, name, place) for g in self.groups for name, place in zip(g.names, g.places, strict=True)]
        host = [Tensor((name,), 0, place.page_bytes, self.host_blocks, "host") for pool, name, place in views if pool == "host"]
        at: dict[int, list[str]] = {}
        for pool, name, place in views:
            if pool == "gpu":
                at.setdefault(place.offset, []).append(name)
        gpu = [Tensor(tuple(names), offset, self.stride, self.gpu_blocks, "gpu") for offset, names in sorted(at.items())]
        return tuple(host + gpu)


def plan_layout(model: ModelConfig, cache: CacheConfig, *, tiered: bool = True) -> CacheLayout:
    """The layout of `model` under `cache`'s budgets, or a `LayoutError`.

    Blocks: `gpu_blocks` or `gpu_pool_bytes // stride`; `host_blocks` or `host_pool_bytes // host_page`. With
    `tiered=False` (the resident twin) the groups and the stride are the same and there is no host pool.
    """
    specs = model_specs(model, cache)
    check_specs(specs)
    if cache.max_model_len > model.max_position_embeddings:
        raise LayoutError(
            f"max_model_len={cache.max_model_len} exceeds the model's max_position_embeddings={model.max_position_embeddings}; "
            "lower max_model_len."
        )
    if cache.prefetch_followers and not any(model.followers_of(layer) for layer in model.c4_layers):
        raise LayoutError(
            "prefetch_followers has no effect on this model: each of its C4 layers leads; leave it out, or name index_leaders."
        )
    pages = specs.source[0][1].num_blocks(cache.max_model_len)
    num_hot_slots = cache.hot_slots(model)
    hot_pages = cdiv(num_hot_slots, cache.page_entries)
    units = _hot_units(model, specs)
    if cache.rule == "base":
        base, resident, stride = _base_rule(specs, units)
    else:
        base, resident, stride = _searched_rule(specs, units, pages, hot_pages, cache.tail_pages)
    host_page = sum(s.page_bytes for _, s in specs.source)
    gpu_blocks = _block_count("gpu", cache.gpu_blocks, cache.gpu_pool_bytes, stride)
    host_blocks = _block_count("host", cache.host_blocks, cache.host_pool_bytes, host_page) if tiered else 0
    layout = CacheLayout(
        model, cache, entry_format(model, cache.rows), index_format(model, cache.index_format), stride, gpu_blocks, host_blocks,
        num_hot_slots, hot_pages, pages, base, resident,
    )  # fmt: skip
    check_groups(layout.groups)
    _check_counts(layout, tiered)
    return layout


def index_layers(model: ModelConfig) -> tuple[int, ...]:
    """C4 layers that lead, ascending: those with index keys of their own."""
    return tuple(layer for layer in model.c4_layers if model.leader_of(layer) == layer)


def steady_blocks(num_base: int, num_resident: int, pages: int, hot_pages: int, tail_pages: int) -> int:
    """GPU blocks that a request of `pages` pages keeps under pressure: base pages, its tail, its hot region."""
    return num_base * pages + num_resident * (min(pages, tail_pages) + hot_pages)


def _base_rule(specs: ModelSpecs, units: Units) -> tuple[tuple[Places, ...], tuple[Places, ...], int]:
    base = tuple(_place(g, pairs) for g, pairs in enumerate(p for p in (specs.index, specs.c128) if p))
    resident = _pack(units, sum(s.page_bytes for _, s in specs.index))
    page = math.lcm(*(s.page_bytes for _, s in specs.source))
    return base, resident, cdiv(max(_block_bytes(g) for g in base + resident), page) * page


def _searched_rule(
    specs: ModelSpecs, units: Units, pages: int, hot_pages: int, tail_pages: int
) -> tuple[tuple[Places, ...], tuple[Places, ...], int]:
    """Every stride of m C4 pages that holds the base group; least `steady_blocks * stride`, on a tie the larger m."""
    base = (_place(0, specs.index + specs.c128),)
    page = math.lcm(*(s.page_bytes for _, s in specs.source))
    least = cdiv(_block_bytes(base[0]), page)
    best: tuple[int, tuple[Places, ...], int] | None = None
    for m in range(least, max(least, len(specs.source)) + 1):
        resident, stride = _pack(units, m * page), m * page
        if max(_block_bytes(g) for g in resident) > stride:
            continue  # leader and followers share a group, and this stride is too small for them
        cost = steady_blocks(1, len(resident), pages, hot_pages, tail_pages) * stride
        if best is None or cost <= best[0]:
            best = cost, resident, stride
    assert best is not None, "the widest stride holds every C4 layer"
    return base, best[1], best[2]


def _hot_units(model: ModelConfig, specs: ModelSpecs) -> Units:
    """A leader and its followers each, in model order."""
    units: dict[int, list[tuple[int, CacheSpec]]] = {}
    for layer, spec in specs.source:
        units.setdefault(model.leader_of(layer), []).append((layer, spec))
    return tuple(tuple(unit) for unit in units.values())


def _pack(units: Units, limit: int) -> tuple[Places, ...]:
    """Greedy: a hot unit, never split, joins the open group while that stays within `limit` bytes."""
    groups: list[list[tuple[int, CacheSpec]]] = [[]]
    used = 0
    for unit in units:
        unit_bytes = sum(s.page_bytes for _, s in unit)
        if groups[-1] and used + unit_bytes > limit:
            groups.append([])
            used = 0
        groups[-1] += unit
        used += unit_bytes
    return tuple(_place(g, pairs) for g, pairs in enumerate(groups))


def _place(group: int, pairs: Iterable[tuple[int, CacheSpec]]) -> Places:
    places, offset = [], 0
    for layer, spec in pairs:
        places.append(Place(layer, group, offset, spec.page_bytes))
        offset += spec.page_bytes
    return tuple(places)


def _group_records(layout: CacheLayout, specs: ModelSpecs) -> tuple[Group, ...]:
    tiered = layout.host_blocks > 0
    page = specs.source[0][1]
    base_specs = dict(specs.index + specs.c128)
    resident_spec = ResidentSpec(page.block_size, page.page_bytes)
    hot_spec = HotSpec(page.block_size, page.page_bytes, layout.hot_pages)
    source = Group("source", tuple(Place(i, 0, 0, s.page_bytes) for i, s in specs.source), tuple(s for _, s in specs.source))
    indexer, *c128 = (tuple(base_specs[p.layer] for p in g) for g in layout.base_groups)
    resident = [Group("resident", g, (resident_spec,) * len(g)) for g in layout.resident_groups]
    hot = [Group("hot", g, (hot_spec,) * len(g)) for g in layout.resident_groups]
    rest = [Group("c128", places, s) for places, s in zip(layout.base_groups[1:], c128, strict=True)]
    records = [Group("indexer", layout.base_groups[0], indexer), *resident, *(hot if tiered else []), *rest]
    return ((source,) if tiered else ()) + tuple(records)


def _block_count(pool: Pool, override: int | None, budget: int | None, block_bytes: int) -> int:
    if override is not None:
        return override
    if budget is None:
        raise LayoutError(f"{pool}_pool_bytes and {pool}_blocks are both missing; give one (a block has {block_bytes:,} bytes).")
    return budget // block_bytes


def _check_counts(layout: CacheLayout, tiered: bool) -> None:
    gpu, host, cache = layout.gpu_blocks, layout.host_blocks, layout.cache
    if gpu < 2 or (tiered and host < 2):
        pool, block = ("gpu", layout.stride) if gpu < 2 else ("host", layout.host_page)
        raise LayoutError(
            f"no allocatable blocks, host={host}, gpu={gpu}: block 0 is the null block; raise {pool}_pool_bytes to at least "
            f"{2 * block:,} (or {pool}_blocks to 2)."
        )
    need = layout.max_pages + SPARE_HOST_BLOCKS
    if tiered and host < need:
        raise LayoutError(
            f"the host pool has {host} blocks, max_model_len={cache.max_model_len} needs {need} ({layout.max_pages} pages, the "
            f"null block, a copy-on-write tail); raise host_pool_bytes to {need * layout.host_page:,} (or host_blocks to {need}) "
            "or lower max_model_len."
        )
    if tiered and cache.watermark is not None and cache.watermark > gpu:
        raise LayoutError(f"watermark={cache.watermark} exceeds the {gpu} GPU blocks there are; lower watermark.")
    least = layout.hot_pages + cache.tail_pages
    if tiered and cache.admission_window is not None and layout.window_pages <= least:
        raise LayoutError(
            f"admission_window={cache.admission_window} is {layout.window_pages} pages, of which none pays for a hot region of "
            f"{layout.hot_pages} beside a tail of {cache.tail_pages}; raise admission_window above {least * layout.page_tokens}."
        )
    if cache.parked_pages is not None and cache.parked_pages < layout.max_pages and tiered:
        raise LayoutError(
            f"parked_pages={cache.parked_pages} holds no request of max_model_len={cache.max_model_len}, which has "
            f"{layout.max_pages} pages; raise parked_pages or leave it out."
        )
    for pool, blocks, rows in (("gpu", gpu, layout.row_step), ("host", host, layout.page_entries)):
        if blocks * rows > MAX_ROW:
            raise LayoutError(
                f"{pool} rows number {blocks * rows:,} and ids are int32; lower {pool}_blocks to {MAX_ROW // rows}."
            )


def _find(groups: Sequence[Places], layer: int, layers: tuple[int, ...], what: str) -> Place:
    if layer not in layers:
        raise LayoutError(f"layer {layer} stores no {what}; the layers that do are {layers}.")
    return next(p for g in groups for p in g if p.layer == layer)


def _block_bytes(places: Places) -> int:
    return sum(p.page_bytes for p in places)
