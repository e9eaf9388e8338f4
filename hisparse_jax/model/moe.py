"""Mixture of experts: routing by token id (the first layers) or by score, one shared expert.

Source: DeepSeek V4's published inference code. Every expert is evaluated for every token and unchosen ones weigh exactly
zero: one matrix product whose rows do not depend on the companions, at `E / k` times the needed work. Right for the models
this project runs whole; a grouped product would keep `route` and replace `_experts`.
"""

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int32

from hisparse_jax.config import ModelConfig
from hisparse_jax.model.numerics import contract


def _gated(gate: Float[Array, "..."], up: Float[Array, "..."], limit: float) -> Float[Array, "..."]:
    """SwiGLU with V4's clamps: the gate only from above, the other half on both sides."""
    return jax.nn.silu(jnp.minimum(gate, limit)) * jnp.clip(up, -limit, limit)


class MoE(nnx.Module):
    """Experts of one layer. Weights: `gate [E, D]`, `w1, w3 [E, F, D]`, `w2 [E, D, F]`, the shared expert's `[F, D]`."""

    def __init__(self, config: ModelConfig, layer: int, weights):
        self.config = config
        prefix = f"layers.{layer}.ffn."
        self.hashed = layer < config.num_hash_layers
        self.gate = nnx.Param(weights[f"{prefix}gate.weight"])
        name = "tid2eid" if self.hashed else "bias"
        self.routing = nnx.Param(weights[f"{prefix}gate.{name}"])
        self.w1, self.w2, self.w3 = (nnx.Param(weights[f"{prefix}experts.w{i}.weight"]) for i in (1, 2, 3))
        self.shared_w1, self.shared_w2, self.shared_w3 = (
            nnx.Param(weights[f"{prefix}shared_experts.w{i}.weight"]) for i in (1, 2, 3)
        )

    def route(self, x: Float[Array, "R T D"], tokens: Int32[Array, "R T"]) -> Float[Array, "R T E"]:
        """Weight of every expert for every token, f32; zero for those not chosen. The bias picks, it never weighs."""
        cfg = self.config
        scores = jnp.sqrt(jax.nn.softplus(contract("rtd,ed->rte", x, self.gate[...])))
        if self.hashed:
            chosen = self.routing[...].at[tokens].get(mode="promise_in_bounds", wrap_negative_indices=False)
        else:
            _, chosen = jax.lax.top_k(scores + self.routing[...].reshape(1, 1, -1), cfg.num_experts_per_tok)
        picked = jax.nn.one_hot(chosen, cfg.n_routed_experts, dtype=jnp.float32).sum(axis=-2) * scores
        return picked / picked.sum(axis=-1, keepdims=True) * cfg.routed_scaling_factor

    def _experts(self, x: Float[Array, "R T D"], share: Float[Array, "R T E"]) -> Float[Array, "R T D"]:
        gate = contract("rtd,efd->rtef", x, self.w1[...])
        up = contract("rtd,efd->rtef", x, self.w3[...])
        hidden = (_gated(gate, up, self.config.swiglu_limit) * share[..., None]).astype(x.dtype)
        return contract("rtef,edf->ertd", hidden, self.w2[...]).sum(axis=0)  # no transposed copy of w2

    def __call__(self, x: Float[Array, "R T D"], tokens: Int32[Array, "R T"]) -> Float[Array, "R T D"]:
        routed = self._experts(x, self.route(x, tokens))
        gate = contract("rtd,fd->rtf", x, self.shared_w1[...])
        up = contract("rtd,fd->rtf", x, self.shared_w3[...])
        hidden = _gated(gate, up, self.config.swiglu_limit).astype(x.dtype)
        return (routed + contract("rtf,df->rtd", hidden, self.shared_w2[...])).astype(x.dtype)
