"""Weights by their published names: which tensors a model has, their shapes and dtypes, and random ones.

Weights are a flat dict, `layers.3.attn.wq_a.weight` to an array. Names are the published checkpoint's, but for the
routed experts, which are stacked: `layers.3.ffn.experts.w1.weight` and `w3` are `[E, F, D]`, `w2` is `[E, D, F]`.
Matrices are stored `[out, in]`. Source: DeepSeek-V4 checkpoints and inference code.
"""

import zlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from hisparse_jax.config import C4, SWA, ConfigError, ModelConfig

EXPERT_PARTS = ("w1", "w2", "w3")
_FLOAT32_SUFFIXES = ("attn_sink", "ape", "gate.bias")


def tensor_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Every tensor of a model in a fixed order, experts stacked. A C4 layer that follows another's indexer has none."""
    hidden, vocab, streams = config.hidden_size, config.vocab_size, config.hc_mult
    shapes: dict[str, tuple[int, ...]] = {
        "embed.weight": (vocab, hidden),
        "norm.weight": (hidden,),
        "head.weight": (vocab, hidden),
        "hc_head_fn": (streams, streams * hidden),
        "hc_head_base": (streams,),
        "hc_head_scale": (1,),
    }
    for layer, ratio in enumerate(config.compress_ratios):
        parts = _attention(config) | _mixers(config) | _experts(config, layer)
        if ratio != SWA:
            parts |= _compressor("attn.compressor.", ratio, config.head_dim, hidden)
        if ratio == C4 and config.leader_of(layer) == layer:
            parts |= _indexer(config)
        shapes |= {f"layers.{layer}.{name}": shape for name, shape in parts.items()}
    return shapes


def _attention(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    heads, dim, hidden, rank = config.num_attention_heads, config.head_dim, config.hidden_size, config.q_lora_rank
    grouped = config.o_groups * config.o_lora_rank
    return {
        "attn_norm.weight": (hidden,),
        "ffn_norm.weight": (hidden,),
        "attn.attn_sink": (heads,),
        "attn.wq_a.weight": (rank, hidden),
        "attn.q_norm.weight": (rank,),
        "attn.wq_b.weight": (heads * dim, rank),
        "attn.wkv.weight": (dim, hidden),
        "attn.kv_norm.weight": (dim,),
        "attn.wo_a.weight": (grouped, heads * dim // config.o_groups),
        "attn.wo_b.weight": (hidden, grouped),
    }


def _mixers(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    streams = config.hc_mult
    mix = (2 + streams) * streams
    shapes = {"fn": (mix, streams * config.hidden_size), "base": (mix,), "scale": (3,)}
    return {f"hc_{part}_{name}": shape for part in ("attn", "ffn") for name, shape in shapes.items()}


def _compressor(prefix: str, ratio: int, width: int, hidden: int) -> dict[str, tuple[int, ...]]:
    wide = width * (2 if ratio == C4 else 1)
    return {
        f"{prefix}ape": (ratio, wide),
        f"{prefix}wkv.weight": (wide, hidden),
        f"{prefix}wgate.weight": (wide, hidden),
        f"{prefix}norm.weight": (width,),
    }


def _indexer(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    heads, dim, hidden = config.index_n_heads, config.index_head_dim, config.hidden_size
    return _compressor("attn.indexer.compressor.", C4, dim, hidden) | {
        "attn.indexer.wq_b.weight": (heads * dim, config.q_lora_rank),
        "attn.indexer.weights_proj.weight": (heads, hidden),
    }


def _experts(config: ModelConfig, layer: int) -> dict[str, tuple[int, ...]]:
    experts, hidden, width = config.n_routed_experts, config.hidden_size, config.moe_intermediate_size
    one = {"w1": (width, hidden), "w2": (hidden, width), "w3": (width, hidden)}
    if layer < config.num_hash_layers:
        routing: dict[str, tuple[int, ...]] = {"ffn.gate.tid2eid": (config.vocab_size, config.num_experts_per_tok)}
    else:
        routing = {"ffn.gate.bias": (experts,)}
    return (
        {"ffn.gate.weight": (experts, hidden)}
        | routing
        | {f"ffn.experts.{part}.weight": (experts, *one[part]) for part in EXPERT_PARTS}
        | {f"ffn.shared_experts.{part}.weight": one[part] for part in EXPERT_PARTS}
    )


def tensor_dtype(name: str, dtype: Any) -> np.dtype:
    """Dtype a tensor is held in by a model of `dtype`: sinks, `ape`, mixers and router bias float32, `tid2eid` int32."""
    if name.endswith("tid2eid"):
        return np.dtype(np.int32)
    if name.endswith(_FLOAT32_SUFFIXES) or name.rpartition(".")[2].startswith("hc_"):
        return np.dtype(np.float32)
    return model_dtype(dtype)


def model_dtype(dtype: Any) -> np.dtype:
    """`dtype` as a numpy dtype; a model is held in float32 or bfloat16."""
    try:
        held = jnp.dtype(dtype)
    except TypeError:
        held = None
    if held is None or held not in (jnp.dtype(jnp.float32), jnp.dtype(jnp.bfloat16)):
        raise ConfigError(f"dtype={dtype!r} is not built; hold the weights in float32 or bfloat16.")
    return held


def init_weights(config: ModelConfig, seed: int, dtype: Any) -> dict[str, jax.Array]:
    """Random weights under which every branch visibly moves the logits.

    Every tensor is a function of `seed`, its name and its shape alone, computed on the host in float32.
    """
    return {name: jnp.asarray(_random(name, shape, seed, config).astype(tensor_dtype(name, dtype)))
            for name, shape in tensor_shapes(config).items()}  # fmt: skip


def _random(name: str, shape: tuple[int, ...], seed: int, config: ModelConfig) -> np.ndarray:
    rng = np.random.default_rng([seed, zlib.crc32(name.encode())])
    if name.endswith("tid2eid"):
        order = rng.random((shape[0], config.n_routed_experts), dtype=np.float32).argsort(axis=-1)
        return order[:, : shape[1]]
    z = rng.standard_normal(shape, dtype=np.float32)
    if name == "embed.weight" or name.endswith("attn_sink"):
        return z
    if name.endswith("norm.weight"):
        return 1 + 0.1 * z
    if name.endswith("_scale"):
        return 1 + 0.2 * z
    for suffix, size in (("ape", 0.7), ("gate.bias", 0.1), ("_base", 0.5)):
        if name.endswith(suffix):
            return size * z
    return z / np.sqrt(np.float32(shape[-1]))
