"""Manifold-constrained hyper-connections: `n` residual streams, mixed before and after every sublayer.

Source: DeepSeek V4's published inference code. All arithmetic is float32; streams are kept in the model's dtype.
"""

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from hisparse_jax.config import ModelConfig
from hisparse_jax.model.numerics import contract, rms
from pallas_kernels.sinkhorn import sinkhorn


def _mixing_logits(streams: Float[Array, "... n D"], fn: Float[Array, "M nD"], eps: float) -> Float[Array, "... M"]:
    flat = streams.reshape(*streams.shape[:-2], -1)
    return contract("...d,md->...m", rms(flat, eps), fn)


class HyperConnection(nnx.Module):
    """Mixer of one sublayer: streams to the sublayer's input, and its output back onto the streams."""

    def __init__(self, config: ModelConfig, weights, prefix: str):
        self.config = config
        self.fn = nnx.Param(weights[f"{prefix}_fn"])
        self.base = nnx.Param(weights[f"{prefix}_base"])
        self.scale = nnx.Param(weights[f"{prefix}_scale"])

    def split(
        self, streams: Float[Array, "R T n D"]
    ) -> tuple[Float[Array, "R T D"], Float[Array, "R T n"], Float[Array, "R T n n"]]:
        """The sublayer's input, the weights `post` of its output on each stream, and the streams' mixing matrix."""
        cfg, n = self.config, self.config.hc_mult
        z = _mixing_logits(streams, self.fn[...], cfg.rms_norm_eps)
        scale, base = self.scale[...], self.base[...].reshape(1, 1, -1)
        pre = jax.nn.sigmoid(z[..., :n] * scale[0] + base[..., :n]) + cfg.hc_eps
        post = 2 * jax.nn.sigmoid(z[..., n : 2 * n] * scale[1] + base[..., n : 2 * n])
        mix = (z[..., 2 * n :] * scale[2] + base[..., 2 * n :]).reshape(*z.shape[:-1], n, n)
        mix = sinkhorn(jax.nn.softmax(mix, axis=-1) + cfg.hc_eps, cfg.hc_sinkhorn_iters, cfg.hc_eps)
        return _weigh(pre, streams), post, mix

    def join(
        self,
        streams: Float[Array, "R T n D"],
        output: Float[Array, "R T D"],
        post: Float[Array, "R T n"],
        mix: Float[Array, "R T n n"],
    ) -> Float[Array, "R T n D"]:
        """`S'_k = post_k * y + sum_j mix[j, k] S_j`: the mixing matrix is used transposed."""
        mixed = contract("rtjk,rtjd->rtkd", mix, streams.astype(jnp.float32))
        return (post[..., None] * output.astype(jnp.float32)[..., None, :] + mixed).astype(streams.dtype)


class HeadMixer(nnx.Module):
    """Collapses the streams to one vector before the output head."""

    def __init__(self, config: ModelConfig, weights):
        self.config = config
        self.fn = nnx.Param(weights["hc_head_fn"])
        self.base = nnx.Param(weights["hc_head_base"])
        self.scale = nnx.Param(weights["hc_head_scale"])

    def __call__(self, streams: Float[Array, "R T n D"]) -> Float[Array, "R T D"]:
        z = _mixing_logits(streams, self.fn[...], self.config.rms_norm_eps)
        pre = jax.nn.sigmoid(z * self.scale[...][0] + self.base[...].reshape(1, 1, -1)) + self.config.hc_eps
        return _weigh(pre, streams)


def _weigh(pre: Float[Array, "R T n"], streams: Float[Array, "R T n D"]) -> Float[Array, "R T D"]:
    return contract("rtn,rtnd->rtd", pre, streams.astype(jnp.float32)).astype(streams.dtype)
