"""The model: attention and experts on mixed residual streams, layer by layer, and the output head.

Weights live inside the modules; the cache is passed through. A call computes a `Span` of tokens and returns the cache it
leaves. How C4 entries are stored and found is the cache's affair: `resident` and `decode` pass different ones.
"""

from collections.abc import Mapping

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Float32, Int32

from hisparse_jax.config import C4, SWA, ModelConfig
from hisparse_jax.entries import EntryCache, Selection
from hisparse_jax.layer_state import LayerState
from hisparse_jax.layout import CacheLayout
from hisparse_jax.model.attention import Window, attend
from hisparse_jax.model.compressor import Compressor
from hisparse_jax.model.hyper_connections import HeadMixer, HyperConnection
from hisparse_jax.model.indexer import Indexer, score_entries
from hisparse_jax.model.moe import MoE
from hisparse_jax.model.numerics import border, contract, linear, rms, rms_norm
from hisparse_jax.model.rope import frequencies, rotate
from hisparse_jax.model.span import Span, write_ring
from hisparse_jax.rows import hadamard

Weights = Mapping[str, jax.Array | jax.ShapeDtypeStruct]


class Attention(nnx.Module):
    """Attention of one layer: sliding window, and C4 or C128 entries where the layer has them."""

    def __init__(self, config: ModelConfig, layer: int, weights: Weights):
        self.config, self.layer, self.ratio = config, layer, config.compress_ratios[layer]
        prefix = f"layers.{layer}.attn."
        self.wq_a, self.q_norm, self.wq_b, self.wkv, self.kv_norm, self.wo_a, self.wo_b = (
            nnx.Param(weights[f"{prefix}{name}.weight"]) for name in ("wq_a", "q_norm", "wq_b", "wkv", "kv_norm", "wo_a", "wo_b")
        )
        self.sink = nnx.Param(weights[f"{prefix}attn_sink"])
        if self.ratio != SWA:
            self.compressor = Compressor(config, self.ratio, config.head_dim, weights, f"{prefix}compressor.")
        self.leads = self.ratio == C4 and config.leader_of(layer) == layer
        if self.leads:
            self.indexer = Indexer(config, weights, f"{prefix}indexer.")

    def __call__(
        self,
        x: Float[Array, "R T D"],
        span: Span,
        state: LayerState,
        cache: EntryCache,
        led: Selection | None,
        layout: CacheLayout,
    ) -> tuple[Float[Array, "R T D"], LayerState, EntryCache, Selection | None]:
        """The sublayer's output and what it leaves: ring states, entry cache, and the selection followers reuse."""
        cfg, freqs, eps = self.config, frequencies(self.config, self.ratio), self.config.rms_norm_eps
        apart = border(span)  # the cache's: integers it shared with the arithmetic would be fused into one or into both
        qr = rms_norm(linear(x, self.wq_a[...]), self.q_norm[...], eps)
        q = linear(qr, self.wq_b[...]).reshape(*qr.shape[:-1], cfg.num_attention_heads, cfg.head_dim)
        q = rotate(rms(q, eps).astype(x.dtype), span.positions[..., None], freqs)
        latent = rms_norm(linear(x, self.wkv[...]), self.kv_norm[...], eps)
        rows = border(layout.entry.pack(rotate(latent, span.positions, freqs)))
        window = Window(state.window, rows, write_ring(state.window, rows, span), cfg.sliding_window)
        state, entries = state.replace(window=window.ring), None
        if self.ratio != SWA:
            state, cache = self._compress(x, span, apart, state, cache, layout)
            if self.ratio == C4:
                led = self._select(x, qr, span, apart, cache, led, layout)
                entries, cache, led = cache.fetch_c4(self.layer, led, apart, layout)
            else:
                entries = cache.read_c128(self.layer, apart, layout)
        out = attend(q, window, entries, cache.slab, self.sink[...], span, apart, layout)
        return self._project(rotate(out, span.positions[..., None], freqs, inverse=True)), state, cache, led

    def _compress(self, x, span: Span, apart: Span, state: LayerState, cache: EntryCache, layout: CacheLayout):
        assert state.ring is not None
        values, numbers, real, ring = self.compressor(x, span, state.ring)
        packed, numbers, real = border((layout.entry.pack(values), numbers, real))
        if self.ratio != C4:
            return state.replace(ring=ring), cache.store_c128(self.layer, packed, numbers, real, apart, layout)
        cache = cache.store_c4(self.layer, packed, numbers, real, apart, layout)
        if not self.leads:
            return state.replace(ring=ring), cache
        assert state.index_ring is not None
        values, numbers, real, index_ring = self.indexer.compressor(x, span, state.index_ring)
        if layout.cache.hadamard:
            values = hadamard(values)
        packed, numbers, real = border((layout.index.pack(values), numbers, real))
        cache = cache.store_index(self.layer, packed, numbers, real, apart, layout)
        return state.replace(ring=ring, index_ring=index_ring), cache

    def _select(self, x, qr, span: Span, apart: Span, cache: EntryCache, led: Selection | None, layout: CacheLayout) -> Selection:
        """Top-k entries of each token: the leader's where this layer follows one."""
        if not self.leads and led is not None:
            return led
        queries, weights = self.indexer.queries(x, qr, span, layout.index, rotated=layout.cache.hadamard)
        scores = score_entries(queries, weights, cache, self.layer, apart, layout)
        return Selection.of(scores, apart.num_entries(C4), self.config.index_topk)

    def _project(self, out: Float[Array, "R T H c"]) -> Float[Array, "R T D"]:
        cfg = self.config
        groups = out.reshape(*out.shape[:2], cfg.o_groups, -1)
        wo_a = self.wo_a[...].reshape(cfg.o_groups, cfg.o_lora_rank, -1)
        low = contract("rtgi,gli->rtgl", groups, wo_a).astype(out.dtype)
        return linear(low.reshape(*out.shape[:2], -1), self.wo_b[...])


class Block(nnx.Module):
    """One layer: attention, then experts, each behind its hyper-connection."""

    def __init__(self, config: ModelConfig, layer: int, weights: Weights):
        self.config = config
        prefix = f"layers.{layer}."
        self.attn_hc = HyperConnection(config, weights, f"{prefix}hc_attn")
        self.ffn_hc = HyperConnection(config, weights, f"{prefix}hc_ffn")
        self.attn_norm = nnx.Param(weights[f"{prefix}attn_norm.weight"])
        self.ffn_norm = nnx.Param(weights[f"{prefix}ffn_norm.weight"])
        self.attn = Attention(config, layer, weights)
        self.ffn = MoE(config, layer, weights)

    def __call__(self, streams, tokens, span: Span, state: LayerState, cache: EntryCache, led, layout: CacheLayout):
        eps = self.config.rms_norm_eps
        x, post, mix = self.attn_hc.split(streams)
        y, state, cache, led = self.attn(rms_norm(x, self.attn_norm[...], eps), span, state, cache, led, layout)
        streams = self.attn_hc.join(streams, y, post, mix)
        x, post, mix = self.ffn_hc.split(streams)
        y = self.ffn(rms_norm(x, self.ffn_norm[...], eps), tokens)
        return self.ffn_hc.join(streams, y, post, mix), state, cache, led


class DeepseekV4(nnx.Module):
    """DeepSeek V4 for inference, without MTP. `weights` are named as in the published checkpoint, experts stacked."""

    def __init__(self, config: ModelConfig, weights: Weights):
        self.config = config
        self.embed = nnx.Param(weights["embed.weight"])
        self.layers = nnx.List([Block(config, i, weights) for i in range(config.num_hidden_layers)])
        self.norm = nnx.Param(weights["norm.weight"])
        self.head = nnx.Param(weights["head.weight"])
        self.head_mixer = HeadMixer(config, weights)

    def __call__(
        self,
        tokens: Int32[Array, "R T"],
        span: Span,
        states: tuple[LayerState, ...],
        cache: EntryCache,
        layout: CacheLayout,
    ) -> tuple[Float[Array, "R T n D"], tuple[LayerState, ...], EntryCache, tuple[Selection, ...]]:
        """Residual streams after the last layer, the states and the cache after the span, each C4 layer's selection."""
        tokens, span = border((tokens, span))
        x = self.embed[...].at[tokens].get(mode="promise_in_bounds", wrap_negative_indices=False)
        streams = jnp.broadcast_to(x[:, :, None, :], (*x.shape[:2], self.config.hc_mult, x.shape[-1]))
        after, selections, led = [], [], None
        for i, block in enumerate(self.layers):
            streams, state, cache, led = block(border(streams), tokens, span, states[i], cache, led, layout)
            after.append(state)
            if self.config.compress_ratios[i] == C4:
                selections.append(led)
        return streams, tuple(after), cache, tuple(selections)

    def logits(self, streams: Float[Array, "R T n D"]) -> Float32[Array, "R T V"]:
        """Logits of each position, f32; a border, so that sampling and debug output read the same numbers."""
        h = rms_norm(self.head_mixer(border(streams)), self.norm[...], self.config.rms_norm_eps)
        return border(contract("rtd,vd->rtv", h, self.head[...]))
