"""C4 entries in two tiers: in place where their page is on the GPU, else through hot slots (decode) or staging (prefill).

Both caches write the slab the way the resident twin does. `TieredEntries` mirrors each new row to its host page in the same
step, resolves the selected entries and swaps the missing rows in. `StagedEntries` reads lost rows of a whole chunk through a
compact buffer and leaves hot maps alone: a chunk selects more rows than a hot region holds.
"""

from typing import Any, Self

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Bool, Int32, UInt8

from hisparse_jax import pages, transfer
from hisparse_jax.config import C4
from hisparse_jax.entries import Entries, EntryCache, Selection, rows_of
from hisparse_jax.hot_map import HotMap
from hisparse_jax.layout import CacheLayout
from hisparse_jax.model.numerics import border
from hisparse_jax.model.span import Span
from hisparse_jax.resolve import Resolved

COUNT_NAMES = ("resident", "newest", "hot_hits", "misses", "invalid")
"""What becomes of a selected entry; the five sum to all selected."""


class Traffic(struct.PyTreeNode):
    """Rows and pages moved between the tiers for each request slot since its admission, all C4 layers together.

    swapped_rows: i32[B]    host to hot slot, in decode.
    staged_rows: i32[B]     host to staging, in prefill.
    mirrored_rows: i32[B]   GPU to host, row by row, in the step that wrote them.
    copied_pages: i32[B]    GPU to host, whole pages of one layer.
    """

    swapped_rows: Int32[Array, " B"]
    staged_rows: Int32[Array, " B"]
    mirrored_rows: Int32[Array, " B"]
    copied_pages: Int32[Array, " B"]


def init_traffic(batch: int) -> Traffic:
    """Nothing moved yet. Every leaf is a buffer of its own, as donation needs."""
    return Traffic(*(jnp.zeros(batch, jnp.int32) for _ in range(4)))


def reset_traffic(traffic: Traffic, mask: Bool[Array, " B"]) -> Traffic:
    """The requests in `mask` have moved nothing; the others are untouched."""
    return jax.tree.map(lambda x: jnp.where(mask, 0, x), traffic)


class HostEntries(EntryCache):
    """What both tiered caches share: the host pools, where host pages stand, and the way rows are written.

    pools: u8[H, page_bytes] each   one pinned pool per C4 layer, in model order.
    host: i32[B, P]                 host block of each page; null where the request has none.
    homeless: i32[B]                selected entries found in no tier: zero, or something is broken.
    """

    pools: tuple[UInt8[Array, "H page_bytes"], ...]
    host: Int32[Array, "B P"]
    traffic: Traffic
    homeless: Int32[Array, " B"]

    def store_c4(self, layer, rows, numbers, real, span: Span, layout: CacheLayout):
        return self._store_resident(layer, rows, numbers, real, span, layout)

    def _pool(self, layer: int, layout: CacheLayout) -> Array:
        return self.pools[layout.model.c4_layers.index(layer)]


class TieredEntries(HostEntries):
    """The cache of a decode step.

    hot: i32[G, B, HP]          hot blocks of each request; null until it owns its whole hot region.
    hot_maps: HotMap each       one per C4 layer; a follower's stays empty.
    counts: i32[L4, B, 5] or None   what became of the selected entries so far (`COUNT_NAMES`); None: not counted.
    """

    hot: Int32[Array, "G B HP"]
    hot_maps: tuple[HotMap, ...]
    counts: Int32[Array, "L4 B 5"] | None

    def store_c4(self, layer, rows, numbers, real, span: Span, layout: CacheLayout):
        cache = self._store_resident(layer, rows, numbers, real, span, layout)
        if layout.cache.backup != "write_through":
            return cache
        entries, index = layout.page_entries, layout.model.c4_layers.index(layer)
        where = rows_of(numbers, self.host, span, entries, entries, real)
        data = rows.reshape(-1, layout.entry.row_bytes)
        pool = transfer.back_up_rows(self.pools[index], data, where.reshape(-1), layout.entry, page_entries=entries)
        mirrored = span.add(self.traffic.mirrored_rows, (where >= 0).sum(axis=1, dtype=jnp.int32))
        return cache.replace(
            pools=self.pools[:index] + (pool,) + self.pools[index + 1 :], traffic=self.traffic.replace(mirrored_rows=mirrored)
        )

    def fetch_c4(self, layer, selection: Selection, span: Span, layout: CacheLayout):
        place, index = layout.resident_place(layer), layout.model.c4_layers.index(layer)
        cache, plan, early = self, selection.plan, layout.cache.prefetch_followers
        followers = layout.model.followers_of(layer) if early else ()
        if not isinstance(plan, Resolved):
            slab, plan, hot_map = transfer.resolve_and_swap_in(
                self.slab,
                self._pool(layer, layout),
                selection.indices,
                span.num_entries(C4),
                span.valid,
                jax.lax.div(span.start, C4),
                span.of(self.resident[place.group]),
                span.of(self.host),
                span.of(self.hot[place.group]),
                self.hot_maps[index],
                layout.entry,
                num_host_blocks=layout.host_blocks,
                **self._rows(layer, layout),
            )
            maps = self.hot_maps[:index] + (hot_map,) + self.hot_maps[index + 1 :]
            cache = cache.replace(hot_maps=maps, homeless=span.add(self.homeless, plan.num_homeless))
            cache = cache._swapped(slab, plan, span)
        elif not early:
            cache = cache._swap_in(layer, plan, span, layout)
        if self.counts is not None:
            cache = cache.replace(counts=self.counts.at[index].set(span.add(self.counts[index], plan.counts)))
        entries = cache._selected(plan.rows, selection.indices, layer, span, layout)
        if followers:
            # read before the copies, which the rest of this layer need not wait for
            packed, slab = border((entries.packed, cache.slab))
            entries, cache = entries.replace(packed=packed), cache.replace(slab=slab)
            for follower in followers:
                cache = cache._swap_in(follower, plan, span, layout)
        return entries, cache, selection.replace(plan=plan)

    def _swap_in(self, layer: int, plan: Resolved, span: Span, layout: CacheLayout) -> Self:
        """Carries out the plan with the pool and the pages of `layer`."""
        pool, rows = self._pool(layer, layout), self._rows(layer, layout)
        return self._swapped(transfer.swap_in(self.slab, pool, plan, layout.entry, **rows), plan, span)

    def _swapped(self, slab: UInt8[Array, "N stride"], plan: Resolved, span: Span) -> Self:
        swapped = span.add(self.traffic.swapped_rows, plan.num_misses)
        return self.replace(slab=slab, traffic=self.traffic.replace(swapped_rows=swapped))

    def _rows(self, layer: int, layout: CacheLayout) -> dict[str, Any]:
        return dict(page_entries=layout.page_entries, offset=layout.resident_place(layer).offset, row_step=layout.row_step)


class StagedEntries(HostEntries):
    """The cache of a prefill chunk: one request, many query rows, hot maps untouched."""

    def fetch_c4(self, layer, selection: Selection, span: Span, layout: CacheLayout):
        place, picked, slot = layout.resident_place(layer), selection.indices, span.rows[0]
        table = self.resident[place.group]
        staged = transfer.stage_rows(
            self._pool(layer, layout),
            picked[0],
            span.num_entries(C4)[0],
            table[slot],
            self.host[slot],
            layout.entry,
            page_entries=layout.page_entries,
        )
        lost = pages.read_rows(
            staged.pages,
            staged.rows[None],
            layout.entry,
            page_entries=layout.page_entries,
            offset=0,
            row_step=layout.page_entries,
        )
        where = rows_of(picked, table, span, layout.page_entries, layout.row_step, picked >= 0)
        rows = jnp.where((where >= 0)[..., None], self._read_c4(where, place, layout), lost)
        moved = self.traffic.staged_rows.at[slot].add(staged.num_staged)
        cache = self.replace(
            traffic=self.traffic.replace(staged_rows=moved), homeless=self.homeless.at[slot].add(staged.num_homeless)
        )
        return Entries(rows, picked >= 0, None), cache, selection
