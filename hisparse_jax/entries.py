"""What attention asks of a cache: store what a span closed, read index keys and C128 entries, fetch selected C4 entries.

`EntryCache` holds the slab and the block tables, and everything but the C4 entries, which both twins keep alike. How C4 entries
are stored and found is the subclass's: `resident.ResidentEntries`, `tiered.TieredEntries`, `tiered.StagedEntries`.
"""

import abc
from typing import Self

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Bool, Float32, Int32, UInt8

from hisparse_jax import pages
from hisparse_jax.config import C4, C128
from hisparse_jax.layout import CacheLayout, Place
from hisparse_jax.model.span import Span
from hisparse_jax.rows import RowFormat
from hisparse_jax.status import MISS, NULL_BLOCK
from pallas_kernels.topk_select import topk_select


class Selection(struct.PyTreeNode):
    """Entries that one C4 layer picked for each token, and the cache's plan for them, which followers reuse.

    indices: i32[R, T, K]   entry numbers, ascending, then -1.
    plan:                   whatever `fetch_c4` resolved them to; None before.
    """

    indices: Int32[Array, "R T K"]
    plan: struct.PyTreeNode | None

    @classmethod
    def of(cls, scores: Float32[Array, "R T N"], lengths: Int32[Array, "R T"], top_k: int) -> "Selection":
        """The `top_k` best of the first `lengths` entries; ties go to the lower entry number."""
        return cls(topk_select(scores, lengths, top_k), None)


def rows_of(
    numbers: Int32[Array, "R *any"],
    table: Int32[Array, "B P"],
    span: Span,
    page_entries: int,
    row_step: int,
    real: Bool[Array, "R *any"],
) -> Int32[Array, "R *any"]:
    """Row of each request's entries `numbers` by its block table; -1 where not `real` or no block stands."""
    wanted = jnp.where(real, numbers, MISS)
    return pages.entry_rows(wanted, span.of(table), page_entries=page_entries, row_step=row_step)


class SlabRows(struct.PyTreeNode):
    """Rows of the slab, as `pages` numbers them.

    rows: i32[R, T, N]       -1 where there is none.
    lengths: i32[R, T]       columns from there on hold no row.
    page_entries, offset, row_step   of the pages they stand in.
    """

    rows: Int32[Array, "R T N"]
    lengths: Int32[Array, "R T"]
    page_entries: int = struct.field(pytree_node=False)
    offset: int = struct.field(pytree_node=False)
    row_step: int = struct.field(pytree_node=False)

    @classmethod
    def none(cls, span: Span) -> Self:
        """No rows, as a layer without compressed entries has them."""
        return cls(jnp.zeros((*span.positions.shape, 0), jnp.int32), jnp.zeros(span.positions.shape, jnp.int32), 1, 0, 1)


class Entries(struct.PyTreeNode):
    """Compressed entries that each token may attend to.

    packed: u8[R, T, N, row_bytes] or [R, N, row_bytes]   rows of one token, or of all of a request's; zero bytes where none is.
    seen: bool[R, T, N]                                   which of them a token attends to.
    place: SlabRows | None                                where attention may read them on the slab; None: nowhere.
    """

    packed: UInt8[Array, "R *T N row_bytes"]
    seen: Bool[Array, "R T N"]
    place: SlabRows | None


class EntryCache(struct.PyTreeNode):
    """Slab and block tables of a step. Tables do not change inside a step.

    slab: u8[N, stride]        all GPU pages.
    base: i32[Gb, B, P]        blocks of index keys and C128 entries; never given up while a request runs.
    resident: i32[G, B, P]     blocks of C4 entries; null where the page is not on the GPU.
    """

    slab: UInt8[Array, "N stride"]
    base: Int32[Array, "Gb B P"]
    resident: Int32[Array, "G B P"]

    @abc.abstractmethod
    def store_c4(self, layer: int, rows, numbers, real, span: Span, layout: CacheLayout) -> Self:
        """Stores packed C4 entries `rows[R, E, row_bytes]` of `layer` where `real`."""

    @abc.abstractmethod
    def fetch_c4(self, layer: int, selection: Selection, span: Span, layout: CacheLayout) -> tuple[Entries, Self, Selection]:
        """The selected entries; the cache and the selection with its plan."""

    def store_c128(self, layer: int, rows, numbers, real, span: Span, layout: CacheLayout) -> Self:
        """Stores packed C128 entries `rows[R, E, row_bytes]` of `layer` where `real`."""
        place, entries = layout.c128_place(layer), layout.page_tokens // C128
        return self._store(place, self.base, layout.entry, entries, entries, rows, numbers, real, span)

    def store_index(self, layer: int, rows, numbers, real, span: Span, layout: CacheLayout) -> Self:
        """Stores packed index keys `rows[R, E, row_bytes]` of `layer` where `real`."""
        place, entries = layout.index_place(layer), layout.page_entries
        return self._store(place, self.base, layout.index, entries, entries, rows, numbers, real, span)

    def index_pages(self, layer: int, span: Span, layout: CacheLayout) -> tuple[Int32[Array, "R P"], int]:
        """Blocks of each request's pages of index keys, and the byte of a block where such a page starts."""
        place = layout.index_place(layer)
        return span.of(self.base[place.group]), place.offset

    def read_index(
        self, layer: int, first_page: Int32[Array, ""], num_pages: int, span: Span, layout: CacheLayout
    ) -> UInt8[Array, "R n row_bytes"]:
        """Packed index keys of `num_pages` pages from `first_page`; zero bytes where no page stands."""
        table, offset = self.index_pages(layer, span, layout)
        table = jnp.pad(table, ((0, 0), (0, num_pages)), constant_values=NULL_BLOCK)
        blocks = jax.lax.dynamic_slice_in_dim(table, first_page, num_pages, axis=1)
        return pages.read_page_rows(self.slab, blocks, layout.index, page_entries=layout.page_entries, offset=offset)

    def read_c128(self, layer: int, span: Span, layout: CacheLayout) -> Entries:
        """All C128 entries of each request; a token sees those up to its own."""
        place, entries = layout.c128_place(layer), layout.page_tokens // C128
        table, lengths = self.base[place.group], span.num_entries(C128)
        packed = pages.read_page_rows(self.slab, span.of(table), layout.entry, page_entries=entries, offset=place.offset)
        number = jnp.arange(packed.shape[1], dtype=jnp.int32)
        written = number[None, :] < jax.lax.div(span.start + span.count, C128)[:, None]
        seen = number[None, None, :] < lengths[..., None]
        wanted = jnp.broadcast_to(number[None, None, :], seen.shape)
        rows = rows_of(wanted, table, span, entries, entries, seen)
        return Entries(jnp.where(written[..., None], packed, 0), seen, SlabRows(rows, lengths, entries, place.offset, entries))

    def _store_resident(self, layer: int, rows, numbers, real, span: Span, layout: CacheLayout) -> Self:
        place = layout.resident_place(layer)
        entries, step = layout.page_entries, layout.row_step
        return self._store(place, self.resident, layout.entry, entries, step, rows, numbers, real, span)

    def _store(
        self, place: Place, tables: Array, fmt: RowFormat, entries: int, row_step: int, rows, numbers, real, span: Span
    ) -> Self:
        where = rows_of(numbers, tables[place.group], span, entries, row_step, real).reshape(-1)
        data = rows.reshape(-1, fmt.row_bytes)
        slab = pages.write_rows(self.slab, where, data, fmt, page_entries=entries, offset=place.offset, row_step=row_step)
        return self.replace(slab=slab)

    def _read_c4(self, rows: Int32[Array, "R T K"], place: Place, layout: CacheLayout) -> UInt8[Array, "R T K row_bytes"]:
        return pages.read_rows(
            self.slab,
            rows,
            layout.entry,
            page_entries=layout.page_entries,
            offset=place.offset,
            row_step=layout.row_step,
        )

    def _selected(
        self, rows: Int32[Array, "R T K"], indices: Int32[Array, "R T K"], layer: int, span: Span, layout: CacheLayout
    ) -> Entries:
        """The entries `indices` of a C4 layer, all of which stand in `rows` of the slab.

        Where rows of followers are fetched early, their leader's are read at once, in both twins alike: the slab changes next.
        """
        place, lengths = layout.resident_place(layer), jnp.minimum(span.num_entries(C4), indices.shape[2])
        early = layout.cache.prefetch_followers and layout.model.followers_of(layer)
        where = None if early else SlabRows(rows, lengths, layout.page_entries, place.offset, layout.row_step)
        return Entries(self._read_c4(rows, place, layout), indices >= 0, where)
