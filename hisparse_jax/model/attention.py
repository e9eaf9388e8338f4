"""One softmax over the sliding window, the compressed entries and a learned sink; keys are values.

Source: DeepSeek V4's published inference code. Keys come in one order and one static width (window by position, then
entries), masked, so that sums round alike in every residency. Scores and softmax are float32; probabilities are rounded to
the keys' dtype before the value product.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Float32, UInt8

from hisparse_jax import library  # noqa: F401 - either twin finds its CUDA kernels, whatever else is imported
from hisparse_jax.entries import Entries, SlabRows
from hisparse_jax.layout import CacheLayout
from hisparse_jax.model.numerics import border, contract, numbers_of
from hisparse_jax.model.span import Span, read_ring
from hisparse_jax.rows import RowFormat
from pallas_kernels.choice import choose
from pallas_kernels.sparse_attention import fits, sparse_attention


class Window(NamedTuple):
    """Latents of the sliding window, `width` positions: before a span, of its tokens, and with them in place.

    before: u8[B, W, row_bytes], rows: u8[R, T, row_bytes], ring: u8[B, W, row_bytes]
    """

    before: UInt8[Array, "B W row_bytes"]
    rows: UInt8[Array, "R T row_bytes"]
    ring: UInt8[Array, "B W row_bytes"]
    width: int

    def keys(self, span: Span, entry: RowFormat) -> Float[Array, "R T width c"]:
        """Keys of each token's window, oldest first; the positions before the sequence are zeros."""
        history = jnp.concatenate([read_ring(self.before, span, self.width), self.rows], axis=1)
        position = span.start[:, None] - self.width + jnp.arange(history.shape[1])[None, :]
        keys, _ = numbers_of(jnp.where((position >= 0)[..., None], history, 0), entry)
        index = jnp.arange(self.rows.shape[1])[:, None] + 1 + jnp.arange(self.width)[None, :]
        return border(keys.at[:, index].get(mode="promise_in_bounds", wrap_negative_indices=False))

    def mask(self, span: Span) -> Bool[Array, "R T width"]:
        """Which of them are positions of the sequence."""
        return span.positions[..., None] - (self.width - 1) + jnp.arange(self.width)[None, None, :] >= 0


def attend(
    q: Float[Array, "R T H c"],
    window: Window,
    entries: Entries | None,
    slab: UInt8[Array, "N stride"],
    sink: Float32[Array, " H"],
    span: Span,
    apart: Span,
    layout: CacheLayout,
) -> Float[Array, "R T H c"]:
    """Attention of a span's tokens over window, entries and sink; `q`'s dtype out. Padding gives anything finite.

    In decode one CUDA kernel reads all rows where they stand, where the library has it, the rows are fp8 and the ring keeps every
    token's window. An entry that stands nowhere, which is counted as an error, is no key there and a zero key by XLA. `apart` is
    the cache's copy of `span`.
    """

    def by_xla(q, sink):
        keys, masks = [window.keys(span, layout.entry)], [window.mask(span)]
        if entries is not None:
            keys.append(numbers_of(entries.packed, layout.entry)[0])
            masks.append(border(entries.seen))
        return sink_attention(q, tuple(keys), tuple(masks), sink)

    place = SlabRows.none(apart) if entries is None else entries.place
    decoding = span.slots is None and layout.entry.name == "fp8" and q.dtype == jnp.bfloat16
    decoding &= window.ring.shape[1] >= window.width + q.shape[1] - 1
    shape = q.shape[0] * q.shape[1], q.shape[3], layout.entry.row_bytes
    if not decoding or place is None or not fits(*shape, stride=layout.stride, offset=place.offset):
        return by_xla(q, sink)

    def by_kernel(q, sink):
        positions = jnp.where(apart.valid, apart.positions, -1)
        where = dict(page_entries=place.page_entries, offset=place.offset, row_step=place.row_step, window_width=window.width)
        operands = q, window.ring, positions, slab, place.rows, place.lengths, sink.astype(jnp.float32)
        return border(sparse_attention(*operands, **where, implementation="cuda"))

    return choose("sparse_attention", None, dict(xla=by_xla, cuda=by_kernel), q, sink)


def sink_attention(
    q: Float[Array, "R T H c"],
    keys: tuple[Float[Array, "..."], ...],
    masks: tuple[Bool[Array, "R T _"], ...],
    sink: Float32[Array, " H"],
) -> Float[Array, "R T H c"]:
    """Attention of `q` over several key arrays in one softmax with a sink; `q`'s dtype out.

    Each key array is `[R, T, N, c]` (keys of one query) or `[R, N, c]` (shared by a request's queries). A masked key
    must hold finite values; it weighs exactly zero. A query without any key gives zeros.
    """
    scale = q.shape[-1] ** -0.5
    scores = [
        jnp.where(mask[:, :, None, :], contract(f"rthc,{_axes(k)}->rthn", q, k) * scale, -jnp.inf)
        for k, mask in zip(keys, masks, strict=True)
    ]
    sinks = sink.astype(jnp.float32)[None, None, :]
    top = sinks
    for part in scores:
        top = jnp.maximum(top, part.max(axis=-1))
    weights = [jnp.exp(part - top[..., None]) for part in scores]
    total = jnp.exp(sinks - top)
    for part in weights:
        total = total + part.sum(axis=-1)
    out = jnp.zeros(q.shape, jnp.float32)
    for part, k in zip(weights, keys, strict=True):
        probability = (part / total[..., None]).astype(k.dtype)
        out = out + contract(f"rthn,{_axes(k)}->rthc", probability, k)
    return out.astype(q.dtype)


def _axes(keys: jax.Array) -> str:
    return "rtnc" if keys.ndim == 4 else "rnc"
