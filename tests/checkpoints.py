"""Small checkpoints for tests: safetensors files of any dtype, and a quantised model with the numbers it stands for."""

import dataclasses
import json
import pathlib
from typing import Any

import ml_dtypes
import numpy as np
import safetensors

from hisparse_jax.config import ModelConfig, preset
from hisparse_jax.weights import EXPERT_PARTS, tensor_shapes

E4M3, E8M0 = ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e8m0fnu

QUANTISED = dataclasses.replace(
    preset("tiny"), vocab_size=12, hidden_size=160, num_hidden_layers=3, compress_ratios=(0, 4, 128), q_lora_rank=136,
    n_routed_experts=3, head_dim=40, o_lora_rank=8, index_n_heads=2,
)  # fmt: skip
"""160 and 136 inputs cut the last 128-wide blocks short."""
SMALL = dataclasses.replace(QUANTISED, num_hidden_layers=1, compress_ratios=(0,), hidden_size=32, q_lora_rank=8)

_FP8_WEIGHTS = ("wq_a", "wq_b", "attn.wkv", "wo_a", "wo_b", *(f"shared_experts.{part}" for part in EXPERT_PARTS))


def write_safetensors(path: pathlib.Path, tensors: dict[str, np.ndarray]) -> None:
    """One safetensors file; every dtype the library knows, where its own numpy writer has fewer."""
    arrays = {name: np.ascontiguousarray(array) for name, array in tensors.items()}
    specs = {
        name: safetensors.TensorSpec(dtype=a.dtype.name, shape=list(a.shape), data_ptr=a.ctypes.data, data_len=a.nbytes)
        for name, a in arrays.items()
    }
    safetensors.serialize_file(specs, path)


def write_checkpoint(
    folder: pathlib.Path, config: dict[str, Any], tensors: dict[str, np.ndarray], num_shards: int = 3
) -> pathlib.Path:
    """A folder as published: config.json, shards and their index. `num_shards=0` writes one file without index."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    if num_shards == 0:
        write_safetensors(folder / "model.safetensors", tensors)
        return folder
    names = list(tensors)
    weight_map = {name: f"model-{i % num_shards + 1:05}-of-{num_shards:05}.safetensors" for i, name in enumerate(names)}
    for shard in sorted(set(weight_map.values())):
        write_safetensors(folder / shard, {name: tensors[name] for name in names if weight_map[name] == shard})
    write_index(folder, weight_map)
    return folder


def write_index(folder: pathlib.Path, weight_map: dict[str, str]) -> None:
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def config_json(model: ModelConfig) -> dict[str, Any]:
    """A published `config.json` of a model: fields of its own, those that are fixed, and ones that nothing here reads."""
    fields = dataclasses.asdict(model)
    fields |= {"model_type": "deepseek_v4", "num_key_value_heads": 1, "torch_dtype": "bfloat16", "expert_dtype": "fp4"}
    return fields | {"rope_scaling": {"type": "yarn"} | fields["rope_scaling"]}


def published_checkpoint(model: ModelConfig, seed: int = 0) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """`(stored, numbers)`: tensors as a release stores them, and what each weight (experts stacked) must become, f64.

    Linears are fp8; experts fp4 in even layers and fp8, as in *-Base, in odd ones; `tid2eid` int64; `mtp.0` on top.
    """
    rng, stored, numbers = np.random.default_rng(seed), {}, {}
    for name, shape in tensor_shapes(model).items():
        if name.endswith("tid2eid"):
            stored[name] = rng.integers(0, model.n_routed_experts, shape)
            numbers[name] = stored[name]
        elif ".experts." in name:
            prefix, part = name.split("experts.")
            store = store_fp4 if int(name.split(".")[1]) % 2 == 0 else store_fp8
            parts = []
            for expert in range(shape[0]):
                tensors, values = store(rng, f"{prefix}experts.{expert}.{part.removesuffix('.weight')}", shape[1:])
                stored |= tensors
                parts.append(values)
            numbers[name] = np.stack(parts)
        elif name.removesuffix(".weight").endswith(_FP8_WEIGHTS):
            tensors, numbers[name] = store_fp8(rng, name.removesuffix(".weight"), shape)
            stored |= tensors
        else:
            is_half = name.endswith(".weight")
            stored[name] = rng.standard_normal(shape).astype(ml_dtypes.bfloat16 if is_half else np.float32)
            numbers[name] = stored[name].astype(np.float64)
    stored |= store_fp8(rng, "mtp.0.e_proj", (model.hidden_size,) * 2)[0]
    stored |= {"mtp.0.embed.weight": stored["embed.weight"], "mtp.0.attn.attn_sink": np.zeros(4, np.float32)}
    return stored, numbers


def store_fp8(rng, name: str, shape: tuple[int, ...]) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """Any finite e4m3 bytes and one scale per block of 128 x 128, dequantised number by number."""
    codes = rng.integers(0, 127, shape) + 128 * rng.integers(0, 2, shape)
    rows, columns = np.indices(shape)
    scales = rng.integers(90, 140, (rows.max() // 128 + 1, columns.max() // 128 + 1))
    exponent, mantissa = (codes >> 3) & 15, codes & 7
    size = np.where(exponent == 0, mantissa * 2.0**-9, (8 + mantissa) * 2.0 ** (exponent - 10.0))
    numbers = np.where(codes & 128, -size, size) * 2.0 ** (scales[rows // 128, columns // 128] - 127.0)
    stored = {f"{name}.weight": codes.astype(np.uint8).view(E4M3), f"{name}.scale": scales.astype(np.uint8).view(E8M0)}
    return stored, numbers


def store_fp4(rng, name: str, shape: tuple[int, ...]) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """Any e2m1 codes, the even input in the low nibble, and one scale per 32 inputs of a row."""
    codes = rng.integers(0, 16, shape)
    rows, columns = np.indices(shape)
    scales = rng.integers(90, 140, (shape[0], shape[1] // 32))
    size = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])[codes % 8]
    numbers = np.where(codes >= 8, -size, size) * 2.0 ** (scales[rows, columns // 32] - 127.0)
    packed = (codes[:, 0::2] + 16 * codes[:, 1::2]).astype(np.uint8)
    return {f"{name}.weight": packed.view(np.int8), f"{name}.scale": scales.astype(np.uint8).view(E8M0)}, numbers
