"""Quantised weights to numbers, on the host: e4m3 in blocks of 128 x 128, and packed e2m1 with a scale per 32 inputs.

Scales are ue8m0 bytes, `2^(byte - 127)`. A stored value has at most 4 significant bits and a scale none, so both
results are exact in float32 and, wherever they stay in its range, in bfloat16.
Source: DeepSeek-V4 checkpoints and inference code.
"""

import ml_dtypes
import numpy as np

FP8_BLOCK = 128
FP4_GROUP = 32
_BYTES = np.arange(256, dtype=np.uint8)
_E4M3 = _BYTES.view(ml_dtypes.float8_e4m3fn).astype(np.float32)
_E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)
_E2M1_PAIRS = np.stack((_E2M1[_BYTES & 15], _E2M1[_BYTES >> 4]), axis=-1)
"""Two numbers of one byte, the low nibble first: f32[256, 2]."""
_E8M0 = _BYTES.view(ml_dtypes.float8_e8m0fnu).astype(np.float32)


def fp8_scale_shape(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Shape of the scales of an fp8 weight `[out, in]`; blocks at the far edges may be cut short."""
    return tuple(-(-size // FP8_BLOCK) for size in shape)


def fp4_scale_shape(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Shape of the scales of an fp4 weight of logical shape `[out, in]`, `in` a multiple of 32."""
    return (shape[0], shape[1] // FP4_GROUP)


def dequantize_fp8(values: np.ndarray, scales: np.ndarray, out: np.ndarray) -> None:
    """Fills `out[out, in]` from e4m3 bytes `u8[out, in]` and one ue8m0 byte per 128 x 128 block. A row of blocks at a time."""
    columns = out.shape[1]
    for block, scale in enumerate(_E8M0[scales]):
        rows = slice(block * FP8_BLOCK, (block + 1) * FP8_BLOCK)
        out[rows] = (_E4M3[values[rows]] * np.repeat(scale, FP8_BLOCK)[:columns]).astype(out.dtype)


def dequantize_fp4(packed: np.ndarray, scales: np.ndarray, out: np.ndarray) -> None:
    """Fills `out[out, in]` from packed e2m1 `u8[out, in / 2]` and one ue8m0 byte per 32 inputs. 128 rows at a time."""
    for start in range(0, len(out), FP8_BLOCK):
        rows = slice(start, start + FP8_BLOCK)
        values = _E2M1_PAIRS[packed[rows]].reshape(-1, scales.shape[1], FP4_GROUP)
        out[rows] = (values * _E8M0[scales[rows]][..., None]).reshape(out[rows].shape).astype(out.dtype)
