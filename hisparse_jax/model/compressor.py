"""Pools 4 or 128 tokens into one entry, channel by channel, with learned gates.

Source: DeepSeek V4's published inference code. Ratio 4 overlaps: entry j pools the first halves of tokens 4j-4..4j-1 and the
second halves of tokens 4j..4j+3. Arithmetic up to the norm is float32. What a later entry still needs is kept in a ring of
raw projections, addressed by position, so that nothing of an earlier request can be pooled.
"""

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Float32, Int32

from hisparse_jax.config import C4, ModelConfig
from hisparse_jax.model.numerics import border, contract, rms_norm
from hisparse_jax.model.rope import frequencies, rotate
from hisparse_jax.model.span import Span, read_ring, write_ring


def ring_rows(ratio: int) -> int:
    """Rows that a compressor reads back in its ring: the most tokens one entry pools."""
    return 2 * ratio if ratio == C4 else ratio


def ring_width(ratio: int, width: int) -> int:
    """Floats of one ring row: kv, then gate, both halves where entries overlap."""
    return 2 * (2 if ratio == C4 else 1) * width


class Compressor(nnx.Module):
    """Compressor of one layer: `width` channels out of `D`, `ratio` tokens an entry."""

    def __init__(self, config: ModelConfig, ratio: int, width: int, weights, prefix: str):
        self.config, self.ratio, self.width = config, ratio, width
        self.wkv = nnx.Param(weights[f"{prefix}wkv.weight"])
        self.wgate = nnx.Param(weights[f"{prefix}wgate.weight"])
        self.ape = nnx.Param(weights[f"{prefix}ape"])
        self.norm = nnx.Param(weights[f"{prefix}norm.weight"])

    def __call__(
        self, x: Float[Array, "R T D"], span: Span, ring: Float32[Array, "B W floats"]
    ) -> tuple[Float[Array, "R E width"], Int32[Array, "R E"], Bool[Array, "R E"], Float32[Array, "B W floats"]]:
        """Entries that the span's tokens close: values, entry numbers, which are real, and the ring after the span."""
        wide = x.astype(jnp.float32)
        kv = contract("rtd,wd->rtw", wide, self.wkv[...].astype(jnp.float32))
        gate = contract("rtd,wd->rtw", wide, self.wgate[...].astype(jnp.float32))
        rows = border(jnp.concatenate([kv, gate + self._position_bias(span)], axis=-1))
        closing, real = span.closings(self.ratio)
        pooled = self._pool(jnp.concatenate([read_ring(ring, span, ring_rows(self.ratio)), rows], axis=1), closing, span)
        values = rms_norm(pooled.astype(x.dtype), self.norm[...], self.config.rms_norm_eps)
        number = jax.lax.div(closing, self.ratio)
        values = rotate(values, number * self.ratio, frequencies(self.config, self.ratio))
        return values, number, real, write_ring(ring, rows, span)

    def _position_bias(self, span: Span) -> Float32[Array, "R T half"]:
        at = jax.lax.rem(span.positions, self.ratio)
        return self.ape[...].at[at].get(mode="promise_in_bounds", wrap_negative_indices=False)

    def _pool(
        self, history: Float32[Array, "R WT floats"], closing: Int32[Array, "R E"], span: Span
    ) -> Float32[Array, "R E width"]:
        items, width = ring_rows(self.ratio), self.width
        position = closing[..., None] - (items - 1) + jnp.arange(items, dtype=jnp.int32)[None, None, :]
        index = position - (span.start[:, None, None] - ring_rows(self.ratio))
        request = jnp.arange(history.shape[0], dtype=jnp.int32)[:, None, None]
        rows = history.at[request, index].get(mode="clip", wrap_negative_indices=False)
        kv, gate = jnp.split(rows, 2, axis=-1)
        if self.ratio == C4:  # first halves of the older four tokens, second halves of the newer four
            kv, gate = (jnp.concatenate([part[..., :C4, :width], part[..., C4:, width:]], axis=-2) for part in (kv, gate))
        exists = (position >= 0)[..., None]
        weight = jax.nn.softmax(jnp.where(exists, gate, -jnp.inf), axis=-2)
        return (weight * jnp.where(exists, kv, 0)).sum(axis=-2)
