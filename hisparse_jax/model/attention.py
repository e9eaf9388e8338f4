"""One softmax over the sliding window, the compressed entries and a learned sink; keys are values.

Source: DeepSeek V4's published inference code. Keys come in one order and one static width (window by position, then
entries), masked, so that sums round alike in every residency. Scores and softmax are float32; probabilities are rounded to
the keys' dtype before the value product.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Float32

from hisparse_jax.model.numerics import contract


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
