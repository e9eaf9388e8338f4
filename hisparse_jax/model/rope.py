"""Rotary embedding: interleaved pairs in the last channels of a vector; YaRN where compressed entries take part.

Source: DeepSeek V4's published inference code. One frequency table a layer serves queries, window latents, entries, index
queries and keys, and the inverse rotation of the output. There is no magnitude factor.
"""

import functools
import math

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int32

from hisparse_jax.config import SWA, ModelConfig


@functools.cache
def frequencies(config: ModelConfig, ratio: int) -> np.ndarray:
    """Radians per position of each rotary pair, f32[rope_dim / 2], of a layer with compress ratio `ratio`."""
    dims = config.qk_rope_head_dim
    theta = config.rope_theta if ratio == SWA else config.compress_rope_theta
    plain = theta ** (-np.arange(0, dims, 2, dtype=np.float64) / dims)
    if ratio == SWA or config.rope_scaling is None:
        return plain.astype(np.float32)
    yarn = config.rope_scaling

    def pair_of(rotations: float) -> float:
        return dims * math.log(yarn.original_max_position_embeddings / (rotations * 2 * math.pi)) / (2 * math.log(theta))

    low, high = max(math.floor(pair_of(yarn.beta_fast)), 0), min(math.ceil(pair_of(yarn.beta_slow)), dims - 1)
    ramp = np.clip((np.arange(dims // 2) - low) / (high - low if high > low else 0.001), 0, 1)
    return (plain * ((1 - ramp) + ramp / yarn.factor)).astype(np.float32)


def rotate(
    x: Float[Array, "*shape D"], positions: Int32[Array, "..."], freqs: np.ndarray, *, inverse: bool = False
) -> Float[Array, "*shape D"]:
    """Rotates the last `2 * len(freqs)` channels of `x` by `positions` (broadcast against `x`'s leading axes).

    Angles, cosines and the rotation are float32; `x`'s dtype out. `inverse=True` rotates back.
    """
    angle = positions.astype(jnp.float32)[..., None] * jnp.asarray(freqs).reshape((1,) * positions.ndim + (-1,))
    cos, sin = jnp.cos(angle), jnp.sin(angle)
    if inverse:
        sin = -sin
    rope_dims = 2 * len(freqs)
    plain, turned = x[..., :-rope_dims], x[..., -rope_dims:].astype(jnp.float32)
    pairs = turned.reshape(*turned.shape[:-1], -1, 2)
    signed = jnp.stack([-sin, sin], axis=-1)  # (a, b) -> (a cos - b sin, b cos + a sin)
    turned = (pairs * cos[..., None] + pairs[..., ::-1] * signed).reshape(turned.shape)
    return jnp.concatenate([plain, turned.astype(x.dtype)], axis=-1)
