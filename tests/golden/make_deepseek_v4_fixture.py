"""What does the reference answer? Runs the transformers DeepSeek-V4 class on a CPU and records everything it decides.

Needs torch (CPU; made with 2.13.0), transformers 5.24.0, numpy and tyro in an environment of their own: the project
itself depends on neither of the first two. Writes OUT (compressed `.npz`) and OUT with suffix `.json`: the config in
the published checkpoint's field names, with a section `fixture`. T tokens, the first P in one call, then one by one:

    input_ids i32[T]                     w/NAME f16, i16      weights by published name, exact
    prefill_logits f32[P, V]             decode_logits f32[T-P, V]
    topk/L<i> i16[T, K]                  selected entries, ascending, then -1; C4 layers
    topk_margin/L<i> f32[T]              k-th minus next index score, inf where nothing is left out
    router_margin/L<i> f32[T]            the gap that decides the experts; score-routed layers
    index_scores/L<i>/t<position>        visible index scores at a few positions
    probe_positions, attn_out/L<i>, block_out/L<i>        stage outputs at a few positions
    cache/L<i>/...                       the state after T tokens: `swa` (last window - 1 latents), `compressed`, `index_keys`,
                                         `pending_*` (open window, gates without `ape`), `overlap_*` (previous one, with)

`python tests/golden/make_deepseek_v4_fixture.py --out tests/golden/deepseek_v4_tiny.npz` remakes the fixture in a
minute; with `--replay FILE` the reference runs again on a fixture's own weights and differences are reported.
"""

import dataclasses
import json
import pathlib
import sys
from typing import Any

import numpy as np
import torch  # pyright: ignore[reportMissingImports]
import transformers  # pyright: ignore[reportMissingImports]
import tyro

COMMON: dict[str, Any] = dict(
    model_type="deepseek_v4", num_key_value_heads=1, n_shared_experts=1, hc_mult=4, hc_sinkhorn_iters=20, hc_eps=1e-6,
    rms_norm_eps=1e-6, rope_theta=10000, compress_rope_theta=160000, scoring_func="sqrtsoftplus", norm_topk_prob=True,
    routed_scaling_factor=1.5, swiglu_limit=10.0, hidden_act="silu", max_position_embeddings=4096, num_nextn_predict_layers=0,
    tie_word_embeddings=False, bos_token_id=0, eos_token_id=1, attention_bias=False, attention_dropout=0.0, vocab_size=128,
    hidden_size=64, moe_intermediate_size=32, num_hidden_layers=4, num_attention_heads=4, head_dim=64, qk_rope_head_dim=16,
    q_lora_rank=32, o_groups=2, o_lora_rank=16, n_routed_experts=8, num_experts_per_tok=2, num_hash_layers=1, index_n_heads=16,
    index_head_dim=32, index_topk=16, compress_ratios=[0, 4, 128, 4], sliding_window=128,
    rope_scaling=dict(type="yarn", factor=16, beta_fast=32, beta_slow=1, original_max_position_embeddings=256),
)  # fmt: skip
PRESETS: dict[str, dict[str, Any]] = {
    "tiny": {},
    "wide": dict(head_dim=512, qk_rope_head_dim=64, index_head_dim=128),  # the real head sizes
    "pro": dict(num_hidden_layers=5, compress_ratios=[128, 128, 4, 128, 4]),  # V4-Pro's schedule: no window-only layer
}


@dataclasses.dataclass(frozen=True)
class Args:
    out: pathlib.Path = pathlib.Path("deepseek_v4_tiny.npz")
    """The fixture to write."""
    preset: str = "tiny"
    """tiny, wide or pro."""
    seed: int = 21
    tokens: int = 658
    prefill: int = 517
    """Tokens of the first call: 517 leaves a window open in both compressors."""
    replay: pathlib.Path | None = None
    """Run an existing fixture again and compare, writing nothing."""


def tensor_shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Published name to shape, in the order that the random numbers are drawn."""
    hidden, vocab, heads, dim = (config[k] for k in ("hidden_size", "vocab_size", "num_attention_heads", "head_dim"))
    rank, groups, width = config["q_lora_rank"], config["o_groups"], config["moe_intermediate_size"]
    grouped, experts, streams = groups * config["o_lora_rank"], config["n_routed_experts"], config["hc_mult"]
    mix = (2 + streams) * streams
    shapes = {"embed.weight": (vocab, hidden), "norm.weight": (hidden,), "head.weight": (vocab, hidden)}
    shapes |= {"hc_head_fn": (streams, streams * hidden), "hc_head_base": (streams,), "hc_head_scale": (1,)}
    for i, ratio in enumerate(config["compress_ratios"][: config["num_hidden_layers"]]):
        layer: dict[str, tuple[int, ...]] = {
            "attn_norm.weight": (hidden,), "ffn_norm.weight": (hidden,), "attn.attn_sink": (heads,),
            "attn.wq_a.weight": (rank, hidden), "attn.q_norm.weight": (rank,), "attn.wq_b.weight": (heads * dim, rank),
            "attn.wkv.weight": (dim, hidden), "attn.kv_norm.weight": (dim,),
            "attn.wo_a.weight": (grouped, heads * dim // groups), "attn.wo_b.weight": (hidden, grouped),
        }  # fmt: skip
        for part in ("attn", "ffn"):
            layer |= {f"hc_{part}_fn": (mix, streams * hidden), f"hc_{part}_base": (mix,), f"hc_{part}_scale": (3,)}
        compressors = {"attn.compressor": dim} if ratio else {}
        if ratio == 4:
            compressors["attn.indexer.compressor"] = config["index_head_dim"]
        for name, size in compressors.items():
            wide = size * (2 if ratio == 4 else 1)
            layer |= {f"{name}.ape": (ratio, wide), f"{name}.wkv.weight": (wide, hidden)}
            layer |= {f"{name}.wgate.weight": (wide, hidden), f"{name}.norm.weight": (size,)}
        if ratio == 4:
            layer["attn.indexer.wq_b.weight"] = (config["index_n_heads"] * config["index_head_dim"], rank)
            layer["attn.indexer.weights_proj.weight"] = (config["index_n_heads"], hidden)
        layer["ffn.gate.weight"] = (experts, hidden)
        if i < config["num_hash_layers"]:
            layer["ffn.gate.tid2eid"] = (vocab, config["num_experts_per_tok"])
        else:
            layer["ffn.gate.bias"] = (experts,)
        for expert in [*(f"experts.{e}" for e in range(experts)), "shared_experts"]:
            layer |= {f"ffn.{expert}.{w}.weight": (hidden, width) if w == "w2" else (width, hidden) for w in ("w1", "w2", "w3")}
        shapes |= {f"layers.{i}.{name}": shape for name, shape in layer.items()}
    return shapes


def random_weights(config: dict[str, Any], seed: int) -> dict[str, np.ndarray]:
    """float16 numbers under which every branch visibly moves the logits; the class's own defaults are mostly zeros."""
    rng, weights = np.random.default_rng(seed), {}
    sizes = {"attn_sink": (0, 1), "embed.weight": (0, 1), "norm.weight": (1, 0.1), "_scale": (1, 0.2), "ape": (0, 0.7)}
    sizes |= {"gate.bias": (0, 0.1), "_base": (0, 0.5)}
    for name, shape in tensor_shapes(config).items():
        if name.endswith("tid2eid"):
            drawn = [rng.permutation(config["n_routed_experts"])[: shape[1]] for _ in range(shape[0])]
            weights[name] = np.stack(drawn).astype(np.int16)
            continue
        z = rng.standard_normal(shape)
        mean, size = next((v for suffix, v in sizes.items() if name.endswith(suffix)), (0, None))
        weights[name] = (z / np.sqrt(shape[-1]) if size is None else mean + size * z).astype(np.float16)
    return weights


TOP_NAMES = {
    "embed.weight": "model.embed_tokens.weight", "norm.weight": "model.norm.weight", "head.weight": "lm_head.weight",
    "hc_head_fn": "model.hc_head.hc_fn", "hc_head_base": "model.hc_head.hc_base", "hc_head_scale": "model.hc_head.hc_scale",
}  # fmt: skip
LAYER_NAMES = {
    "attn_norm.weight": "input_layernorm.weight", "ffn_norm.weight": "post_attention_layernorm.weight",
    "ffn.gate.weight": "mlp.gate.weight", "ffn.gate.tid2eid": "mlp.gate.tid2eid",
    "ffn.gate.bias": "mlp.gate.e_score_correction_bias", "attn.attn_sink": "self_attn.sinks",
    "attn.wq_a.weight": "self_attn.q_a_proj.weight", "attn.q_norm.weight": "self_attn.q_a_norm.weight",
    "attn.wq_b.weight": "self_attn.q_b_proj.weight", "attn.wkv.weight": "self_attn.kv_proj.weight",
    "attn.kv_norm.weight": "self_attn.kv_norm.weight", "attn.wo_a.weight": "self_attn.o_a_proj.weight",
    "attn.wo_b.weight": "self_attn.o_b_proj.weight",
    "attn.indexer.wq_b.weight": "self_attn.compressor.indexer.q_b_proj.weight",
    "attn.indexer.weights_proj.weight": "self_attn.compressor.indexer.scorer.weights_proj.weight",
}  # fmt: skip
LAYER_NAMES |= {f"hc_{part}_{leaf}": f"{part}_hc.{leaf}" for part in ("attn", "ffn") for leaf in ("fn", "base", "scale")}
for _ours, _theirs in (("compressor", "compressor"), ("indexer.compressor", "compressor.indexer")):
    for _part, _param in (("ape", "position_bias"), ("wkv.weight", "kv_proj.weight"), ("wgate.weight", "gate_proj.weight"),
                          ("norm.weight", "kv_norm.weight")):  # fmt: skip
        LAYER_NAMES[f"attn.{_ours}.{_part}"] = f"self_attn.{_theirs}.{_param}"
for _part, _param in (("w1", "gate_proj"), ("w2", "down_proj"), ("w3", "up_proj")):
    LAYER_NAMES[f"ffn.shared_experts.{_part}.weight"] = f"mlp.shared_experts.{_param}.weight"


def parameter_of(name: str, state: dict[str, Any], width: int) -> tuple[str, Any]:
    """The class's parameter that a published tensor fills, and the view of it to fill: experts share packed ones."""
    if name in TOP_NAMES:
        return TOP_NAMES[name], state[TOP_NAMES[name]]
    _, layer, rest = name.split(".", 2)
    base = f"model.layers.{layer}."
    if rest in LAYER_NAMES:
        return base + LAYER_NAMES[rest], state[base + LAYER_NAMES[rest]]
    expert, part = rest.split(".")[2:4]
    target = base + ("mlp.experts.down_proj" if part == "w2" else "mlp.experts.gate_up_proj")
    view = state[target][int(expert)]
    return target, {"w1": view[:width], "w2": view, "w3": view[width:]}[part]


def build_model(config: dict[str, Any], weights: dict[str, np.ndarray]):
    fields = {k: v for k, v in config.items() if k not in ("model_type", "fixture")}
    fields["rope_scaling"] = dict(fields["rope_scaling"], rope_type="yarn")
    model = transformers.DeepseekV4ForCausalLM(transformers.DeepseekV4Config(**fields)).eval().float()
    state, filled = model.state_dict(), set()
    with torch.no_grad():
        for name, value in weights.items():
            target, view = parameter_of(name, state, config["moe_intermediate_size"])
            tensor = torch.from_numpy(value.astype(np.int64 if name.endswith("tid2eid") else np.float32))
            if view.shape != tensor.shape:
                raise ValueError(f"{name} has shape {tuple(tensor.shape)}, {target} takes {tuple(view.shape)}.")
            view.copy_(tensor)
            filled.add(target)
    if missing := [name for name in state if name not in filled and "inv_freq" not in name]:
        raise ValueError(f"no weight fills {missing}.")
    return model


def record(model, config: dict[str, Any]) -> dict[str, list[np.ndarray]]:
    """Rows that forward hooks collect, one per token: stage outputs, picked entries, index scores, router logits."""
    rows: dict[str, list[np.ndarray]] = {}

    def watch(module, key, get):
        module.register_forward_hook(
            lambda _m, _a, out: rows.setdefault(key, []).extend(r.detach().clone().numpy() for r in get(out))
        )

    for i, layer in enumerate(model.model.layers):
        watch(layer, f"block_out/L{i}", lambda out: out[0])
        watch(layer.self_attn, f"attn_out/L{i}", lambda out: out[0][0])
        if config["compress_ratios"][i] == 4:
            indexer = layer.self_attn.compressor.indexer
            watch(indexer, f"pick/L{i}", lambda out: out[0])
            watch(indexer.scorer, f"score/L{i}", lambda out: out[0])
        if i >= config["num_hash_layers"]:
            watch(layer.mlp.gate, f"gate/L{i}", lambda out: out[0])
    return rows


def decode(model, ids: np.ndarray, prefill: int):
    """One call, then a step per token. Returns `(cache, prefill logits, decode logits)`."""
    tokens = torch.from_numpy(ids.astype(np.int64))[None]
    with torch.no_grad():
        out = model(tokens[:, :prefill], use_cache=True)
        first, steps = out.logits[0].numpy(), []
        for t in range(prefill, len(ids)):
            out = model(tokens[:, t : t + 1], cache=out.cache, use_cache=True)
            steps.append(out.logits[0, 0].numpy())
    return out.cache, first, np.stack(steps)


def router_margin(logits: list[np.ndarray], bias: np.ndarray, num_chosen: int) -> np.ndarray:
    scores = np.sort(np.sqrt(np.logaddexp(0, np.stack(logits).astype(np.float64))) + bias.astype(np.float64), -1)
    return (scores[:, -num_chosen] - scores[:, -num_chosen - 1]).astype(np.float32)


def topk_rows(picks: list[np.ndarray], scores: list[np.ndarray], top_k: int) -> tuple[np.ndarray, np.ndarray]:
    """Selected entries and margins of one C4 layer, checked against the scores."""
    topk, margin = np.full((len(picks), top_k), -1, np.int16), np.full(len(picks), np.inf, np.float32)
    for t, row in enumerate(picks):
        visible = (t + 1) // 4
        chosen = np.sort(row[row >= 0])
        topk[t, : len(chosen)] = chosen
        if visible > top_k:
            ranked = np.sort(scores[t][:visible])[::-1]
            margin[t] = ranked[top_k - 1] - ranked[top_k]
        best = set(np.argsort(-scores[t][:visible], kind="stable")[:top_k])
        if len(chosen) != min(visible, top_k) or (best != set(chosen) and margin[t] != 0):
            raise ValueError(f"the picks at position {t} are not the best {top_k} scores.")
    return topk, margin


def cache_arrays(layer, ratio: int) -> dict[str, np.ndarray]:
    arrays = {"swa": layer.keys[0, 0]}
    if ratio:
        arrays["compressed"] = layer.compressed_kv["compressor"][0]
    if ratio == 4:
        arrays["index_keys"] = layer.compressed_kv["indexer"][0]
    for source, prefix in (("compressor", ""), ("indexer", "index_"))[: {0: 0, 4: 2, 128: 1}[ratio]]:
        arrays |= {f"{prefix}pending_kv": layer.buffer_kv[source][0], f"{prefix}pending_gate": layer.buffer_gate[source][0]}
        if ratio == 4:
            arrays |= {f"{prefix}overlap_kv": layer.overlap_kv[source][0], f"{prefix}overlap_gate": layer.overlap_gate[source][0]}
    return {name: tensor.numpy() for name, tensor in arrays.items()}


def run(
    config: dict[str, Any], weights: dict[str, np.ndarray], ids: np.ndarray, prefill: int, probes: list[int], scored: list[int]
):
    """Runs the reference. Returns `(model, arrays of the fixture)`."""
    torch.set_num_threads(2)
    model = build_model(config, weights)
    rows = record(model, config)
    cache, first, steps = decode(model, ids, prefill)
    arrays = {"input_ids": ids.astype(np.int32), "prefill_logits": first, "decode_logits": steps}
    arrays |= {"probe_positions": np.asarray(probes, np.int32)} | {f"w/{name}": value for name, value in weights.items()}
    for i, ratio in enumerate(config["compress_ratios"][: config["num_hidden_layers"]]):
        for key in (f"attn_out/L{i}", f"block_out/L{i}"):
            arrays[key] = np.stack([rows[key][p] for p in probes]).astype(np.float32)
        if i >= config["num_hash_layers"]:
            bias = weights[f"layers.{i}.ffn.gate.bias"]
            arrays[f"router_margin/L{i}"] = router_margin(rows[f"gate/L{i}"], bias, config["num_experts_per_tok"])
        if ratio == 4:
            scores = rows[f"score/L{i}"]
            arrays[f"topk/L{i}"], arrays[f"topk_margin/L{i}"] = topk_rows(rows[f"pick/L{i}"], scores, config["index_topk"])
            arrays |= {f"index_scores/L{i}/t{t}": scores[t][: (t + 1) // 4].astype(np.float32) for t in scored}
        arrays |= {f"cache/L{i}/{name}": value for name, value in cache_arrays(cache.layers[i], ratio).items()}
    return model, arrays


def replay(path: pathlib.Path) -> bool:
    """Prints the largest differences to a fixture; true where logits stay within 1e-4 and no selection differs."""
    stored = dict(np.load(path))
    config = json.loads(path.with_suffix(".json").read_text())
    fixture = config["fixture"]
    weights = {key[2:]: value for key, value in stored.items() if key.startswith("w/")}
    _, arrays = run(config, weights, stored["input_ids"], fixture["prefill_tokens"], fixture["probe_positions"],
                    fixture["score_positions"])  # fmt: skip
    same = set(arrays) == set(stored)
    for key in sorted(set(arrays) & set(stored)):
        finite = np.isfinite(stored[key])
        difference = np.abs(np.where(finite, arrays[key], 0.0) - np.where(finite, stored[key], 0.0)).max(initial=0.0)
        same &= bool(difference <= (0 if key.startswith("topk/") else 1e-4))
        if difference > 1e-4 or key.endswith("logits"):
            print(f"{key:32s} largest difference {difference:.3e}")
    return same


def main(args: Args) -> None:
    if args.replay is not None:
        sys.exit(not replay(args.replay))
    if args.preset not in PRESETS:
        sys.exit(f"preset {args.preset!r} is unknown; choose from {', '.join(PRESETS)}.")
    if not 0 < args.prefill < args.tokens:
        sys.exit(f"prefill={args.prefill} must lie below tokens={args.tokens}, and be positive.")
    config, last = COMMON | PRESETS[args.preset], args.tokens - 1
    ids = np.random.default_rng(args.seed + 1).integers(0, config["vocab_size"], args.tokens)
    probes = sorted({min(t, last) for t in (0, 3, 4, 7, 127, 128, args.prefill - 1, args.prefill, args.prefill + 2, 639, last)})
    scored = sorted({min(t, last) for t in (127, args.prefill - 1, args.prefill, last)})
    model, arrays = run(config, random_weights(config, args.seed), ids, args.prefill, probes, scored)
    with torch.no_grad():
        whole = model(torch.from_numpy(ids.astype(np.int64))[None], use_cache=False).logits[0].numpy()
    margins = {
        kind: min(float(v.min()) for k, v in arrays.items() if k.startswith(kind)) for kind in ("topk_margin", "router_margin")
    }
    config["fixture"] = dict(
        preset=args.preset, seed=args.seed, tokens=args.tokens, prefill_tokens=args.prefill, probe_positions=probes,
        score_positions=scored, dtype="float32", torch=torch.__version__, transformers=transformers.__version__,
        max_abs_diff_full_vs_prefill=float(np.abs(whole[: args.prefill] - arrays["prefill_logits"]).max()),
        max_abs_diff_full_vs_decode=float(np.abs(whole[args.prefill :] - arrays["decode_logits"]).max()),
        min_topk_margin=margins["topk_margin"], min_router_margin=margins["router_margin"],
        mean_abs_logit=float(np.abs(whole).mean()),
    )  # fmt: skip
    np.savez_compressed(args.out, **arrays)
    args.out.with_suffix(".json").write_text(json.dumps(config, indent=1) + "\n")
    print(json.dumps(config["fixture"]))


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))
