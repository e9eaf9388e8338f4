"""A published checkpoint to weights: every tensor accounted for by name before any is read, then streamed one by one.

`mtp.*` is skipped and counted. `X.scale` belongs to `X.weight`. e4m3 in 128 x 128 blocks and routed experts in packed
e2m1 become exact numbers of the model's dtype. Anything else that is unknown, missing or misshapen is refused.
"""

import contextlib
import dataclasses
import pathlib
from collections.abc import Iterable
from typing import Any

import jax
import numpy as np

from hisparse_jax.checkpoint_files import CheckpointError, CheckpointFiles, Stored, config_path, open_files
from hisparse_jax.config import ModelConfig, load_model_config
from hisparse_jax.dequantize import FP4_GROUP, dequantize_fp4, dequantize_fp8, fp4_scale_shape, fp8_scale_shape
from hisparse_jax.weights import model_dtype, tensor_dtype, tensor_shapes

__all__ = ["CheckpointError", "LoadReport", "load_checkpoint"]

_FLOATS = ("F64", "F32", "F16", "BF16")
_INTEGERS = ("I64", "U64", "I32", "U32", "I16", "U16", "I8", "U8")
_SCALES = ("F8_E8M0", "U8")
_MTP = "mtp."
_MAX_NAMED = 4


@dataclasses.dataclass(frozen=True)
class LoadReport:
    """What was read and what was not; `str` makes it one line."""

    path: str
    num_files: int
    num_tensors: int
    """Stored tensors that became weights, scales not counted."""
    num_fp8: int
    num_fp4: int
    num_bytes: int
    """Stored bytes of weights and scales."""
    num_skipped: int
    """`mtp.*` tensors, which this implementation has no use for."""

    def __str__(self) -> str:
        size = f"{self.num_bytes / 1e9:,.1f} GB" if self.num_bytes >= 1e9 else f"{self.num_bytes / 1e6:.1f} MB"
        return (
            f"{self.path}: {self.num_tensors:,} tensors ({self.num_fp8:,} fp8, {self.num_fp4:,} fp4) from {self.num_files} "
            f"file{'s' * (self.num_files != 1)}, {size}; skipped {self.num_skipped:,} mtp.* tensors"
        )


@dataclasses.dataclass(frozen=True)
class _Slot:
    """Where a published tensor goes: a weight, or one expert of a stacked one. `shape` is of numbers, not of bytes."""

    target: str
    expert: int | None
    shape: tuple[int, ...]


def load_checkpoint(path: pathlib.Path | str, dtype: Any) -> tuple[ModelConfig, dict[str, jax.Array], LoadReport]:
    """Loads `(config, weights, report)` with matrices in `dtype`, float32 or bfloat16.

    `path` is an `.npz` (weights as `w/NAME`, config in the `.json` beside it) or a folder with `config.json` and
    safetensors. Each weight is filled in one host buffer, experts in place, and moved to the default device once.
    """
    path, dtype = pathlib.Path(path), model_dtype(dtype)
    config = load_model_config(config_path(path))
    slots = _published_slots(config)
    sources: dict[str, list[str]] = {}
    for name, slot in slots.items():
        sources.setdefault(slot.target, []).append(name)
    weights = {}
    with contextlib.closing(open_files(path)) as files:
        encodings = _match(slots, files.tensors, path)
        for target, shape in tensor_shapes(config).items():
            buffer = np.empty(shape, tensor_dtype(target, dtype))
            for name in sources[target]:
                expert = slots[name].expert
                _fill(buffer if expert is None else buffer[expert], name, encodings[name], files, config)
            weights[target] = jax.device_put(buffer)
    return config, weights, _report(path, files, encodings)


def _published_slots(config: ModelConfig) -> dict[str, _Slot]:
    """Every tensor the checkpoint must hold, by its published name: `experts.w1` taken apart into `experts.0.w1`, ..."""
    slots = {}
    for target, shape in tensor_shapes(config).items():
        if ".experts." not in target:
            slots[target] = _Slot(target, None, shape)
            continue
        before, after = target.split(".experts.")
        for expert in range(shape[0]):
            slots[f"{before}.experts.{expert}.{after}"] = _Slot(target, expert, shape[1:])
    return slots


def _match(slots: dict[str, _Slot], stored: dict[str, Stored], path: pathlib.Path) -> dict[str, str]:
    """How each tensor is stored: plain, ids, fp8 or fp4. Refuses every name or shape that does not fit."""
    kept = {name for name in stored if not name.startswith(_MTP)}
    scales = {name for name in kept if name.endswith(".scale")}
    if unknown := kept - scales - set(slots):
        raise CheckpointError(f"{path} holds {_named(unknown)}, unknown to its config; take both from one release.")
    if missing := set(slots) - kept:
        raise CheckpointError(f"{path} lacks {_named(missing)}, which its config asks for; download the checkpoint again.")
    encodings = {name: _encoding(name, slot, stored, path) for name, slot in slots.items()}
    used = {_scale_of(name) for name, encoding in encodings.items() if encoding in ("fp8", "fp4")}
    if stray := scales - used:
        raise CheckpointError(f"{path} holds {_named(stray)} without a quantised weight; download the checkpoint again.")
    return encodings


def _encoding(name: str, slot: _Slot, stored: dict[str, Stored], path: pathlib.Path) -> str:
    tensor = stored[name]
    is_ids, is_matrix = name.endswith("tid2eid"), name.endswith(".weight") and len(slot.shape) == 2
    if tensor.dtype in _INTEGERS if is_ids else tensor.dtype in _FLOATS:
        _check_shape(name, tensor.shape, slot.shape, path)
        return "ids" if is_ids else "plain"
    if is_matrix and tensor.dtype == "F8_E4M3":
        _check_shape(name, tensor.shape, slot.shape, path)
        _check_scale(name, fp8_scale_shape(slot.shape), stored, path)
        return "fp8"
    is_expert = slot.expert is not None
    if is_expert and tensor.dtype in ("I8", "U8"):
        if inputs_left := slot.shape[1] % FP4_GROUP:
            raise CheckpointError(
                f"{path}: {name} is fp4 and has {inputs_left} inputs past a group of {FP4_GROUP}; store it as bf16."
            )
        _check_shape(name, tensor.shape, (slot.shape[0], slot.shape[1] // 2), path)
        _check_scale(name, fp4_scale_shape(slot.shape), stored, path)
        return "fp4"
    choices = _INTEGERS if is_ids else _FLOATS + ("F8_E4M3",) * is_matrix + ("packed I8",) * is_expert
    raise CheckpointError(f"{path}: {name} is stored as {tensor.dtype}; it may be {', '.join(choices)}.")


def _check_shape(name: str, shape: tuple[int, ...], expected: tuple[int, ...], path: pathlib.Path) -> None:
    if shape != expected:
        need = f"its config asks for {list(expected)}; take both from one release."
        raise CheckpointError(f"{path}: {name} has shape {list(shape)}, {need}")


def _check_scale(name: str, expected: tuple[int, ...], stored: dict[str, Stored], path: pathlib.Path) -> None:
    scale = stored.get(_scale_of(name))
    if scale is None:
        raise CheckpointError(f"{path}: {name} is stored as {stored[name].dtype} without {_scale_of(name)}; download it again.")
    if scale.dtype not in _SCALES:
        raise CheckpointError(f"{path}: {_scale_of(name)} is stored as {scale.dtype}; a scale is F8_E8M0, or its bytes as U8.")
    _check_shape(_scale_of(name), scale.shape, expected, path)


def _fill(out: np.ndarray, name: str, encoding: str, files: CheckpointFiles, config: ModelConfig) -> None:
    """Writes one tensor's numbers into `out`, a whole weight or one expert's part of it."""
    values = files.read(name)
    if encoding in ("fp8", "fp4"):
        dequantize = dequantize_fp8 if encoding == "fp8" else dequantize_fp4
        dequantize(values.view(np.uint8), files.read(_scale_of(name)).view(np.uint8), out)
        return
    if encoding == "ids" and (wrong := values[(values < 0) | (values >= config.n_routed_experts)]).size:
        raise CheckpointError(f"{name} holds expert {wrong[0]}; experts are numbered 0 to {config.n_routed_experts - 1}.")
    out[...] = values.astype(out.dtype)


def _report(path: pathlib.Path, files: CheckpointFiles, encodings: dict[str, str]) -> LoadReport:
    kinds = list(encodings.values())
    skipped = [name for name in files.tensors if name.startswith(_MTP)]
    num_bytes = sum(tensor.num_bytes for name, tensor in files.tensors.items() if not name.startswith(_MTP))
    return LoadReport(str(path), files.num_files, len(kinds), kinds.count("fp8"), kinds.count("fp4"), num_bytes, len(skipped))


def _scale_of(name: str) -> str:
    return name.removesuffix("weight") + "scale"


def _named(names: Iterable[str]) -> str:
    """A few names and how many more."""
    names = sorted(names)
    more = f" and {len(names) - _MAX_NAMED} more" if len(names) > _MAX_NAMED else ""
    return ", ".join(names[:_MAX_NAMED]) + more
