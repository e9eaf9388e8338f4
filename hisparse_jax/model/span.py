"""Which tokens a call computes: `T` consecutive positions of each of `R` requests.

Prefill has R = 1; decode has T = 1, and a token more for each draft. Where only the first of a span's tokens are kept, the next
span starts behind those: rings are read before `start` alone, and whatever else the others left is written again.
"""

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Bool, Int32


class Span(struct.PyTreeNode):
    """`R` requests, `T` consecutive positions each, of which the first `count` are real.

    slots: i32[R] or None request slot of each, 0..B-1, distinct; None: all slots in order, R = B, as decode has them. No index
                          array then stands between a table and its reader: a gather or a scatter less each time.
    start: i32[R]         position of the first token.
    count: i32[R]         real tokens, 0..T; the rest is padding: it writes nothing and its results are not used.
    positions: i32[R, T]  start + 0..T-1.
    """

    slots: Int32[Array, " R"] | None
    start: Int32[Array, " R"]
    count: Int32[Array, " R"]
    positions: Int32[Array, "R T"]

    def of(self, table: Array) -> Array:
        """The span's rows of `table[B, ...]`: `[R, ...]`."""
        return table if self.slots is None else table[self.slots]

    def add(self, totals: Array, amounts: Array) -> Array:
        """`totals[B, ...]` with `amounts[R, ...]` added to the span's rows."""
        return totals + amounts if self.slots is None else totals.at[self.slots].add(amounts)

    @property
    def rows(self) -> Int32[Array, " R"]:
        """Slot of each request, spelt out."""
        return jnp.arange(self.start.shape[0], dtype=jnp.int32) if self.slots is None else self.slots

    @property
    def valid(self) -> Bool[Array, "R T"]:
        return jnp.arange(self.positions.shape[1])[None, :] < self.count[:, None]

    def closings(self, ratio: int) -> tuple[Int32[Array, "R E"], Bool[Array, "R E"]]:
        """Positions that close an entry of `ratio` tokens, ascending, and which of them are real; E = cdiv(T, ratio)."""
        most = -(-self.positions.shape[1] // ratio)
        first = self.start + ratio - 1 - jax.lax.rem(self.start, ratio)
        closing = first[:, None] + ratio * jnp.arange(most, dtype=jnp.int32)[None, :]
        return closing, closing < (self.start + self.count)[:, None]

    def num_entries(self, ratio: int) -> Int32[Array, "R T"]:
        """Entries of `ratio` tokens that each position sees, its own included; 0 on padding."""
        return jnp.where(self.valid, jax.lax.div(self.positions + 1, ratio), 0)


def make_span(slots: Int32[Array, " R"] | None, start: Int32[Array, " R"], count: Int32[Array, " R"], num_tokens: int) -> Span:
    """A span of `num_tokens` positions a request."""
    return Span(slots, start, count, start[:, None] + jnp.arange(num_tokens, dtype=jnp.int32)[None, :])


def read_ring(ring: Array, span: Span, num_rows: int) -> Array:
    """The rows of the last `num_rows <= W` positions before `span.start`, oldest first, from `ring[B, W, ...]`.

    Position p stands at `p mod W`; positions below 0 read leftovers, which callers mask by position.
    """
    width = ring.shape[1]
    before = span.start[:, None] - num_rows + jnp.arange(num_rows, dtype=jnp.int32)[None, :]
    at = jax.lax.rem(before + width, width)  # below 0 only while the sequence is shorter than `num_rows`
    return ring.at[span.rows[:, None], at].get(mode="promise_in_bounds", wrap_negative_indices=False)


def write_ring(ring: Array, rows: Array, span: Span) -> Array:
    """Stores `rows[R, T, ...]` of the span's last `W` real positions in `ring[B, W, ...]`; in place when donated."""
    batch, width = ring.shape[:2]
    end = (span.start + span.count)[:, None]
    kept = (span.positions < end) & (span.positions >= end - width)
    slots = jnp.where(kept, span.rows[:, None], batch)
    at = jax.lax.rem(span.positions, width)
    return ring.at[slots, at].set(rows, mode="drop", wrap_negative_indices=False)
