"""What every stage of the model shares: matrix products, norms, and the borders that keep two programs bit-equal."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, UInt8

from hisparse_jax.rows import RowFormat


def border(tree):
    """Stops XLA from fusing across this point.

    Two programs round alike only where they fuse alike. The tiered and the resident decode differ in how rows are stored
    and found, so each crossing between that and the arithmetic is a border; inside, both trace the same functions.
    """
    return jax.lax.optimization_barrier(tree)


def numbers_of(
    rows: UInt8[Array, "*batch row_bytes"], fmt: RowFormat
) -> tuple[Float[Array, "*batch channels"], Float32[Array, "*batch"]]:
    """Packed rows of a cache as `(values, scale)`: `RowFormat.numbers`.

    Their fields cross the border apart, so that reading a row and taking it to pieces is one kernel.
    """
    return fmt.numbers(*border(fmt.fields(rows)))


def contract(equation: str, *operands: Array) -> Float[Array, "..."]:
    """`jnp.einsum` accumulated in float32, without TF32; float32 out.

    Operands of unlike dtype meet in the wider one. A CPU has no bf16 product: weights that are held there as float32 numbers
    with bf16 values give the same products and are not converted in every step.
    """
    return jnp.einsum(equation, *operands, precision=jax.lax.Precision.HIGHEST, preferred_element_type=jnp.float32)


def linear(x: Float[Array, "... D"], weight: Float[Array, "N D"]) -> Float[Array, "... N"]:
    """`x @ weight.T` for a weight stored `[out, in]`: float32 accumulation, `x`'s dtype out."""
    return contract("...d,nd->...n", x, weight).astype(x.dtype)


def rms(x: Float[Array, "... D"], eps: float) -> Float[Array, "... D"]:
    """`x / sqrt(mean(x^2) + eps)` over the last axis, in float32; float32 out."""
    wide = x.astype(jnp.float32)
    return wide * jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + eps)


def rms_norm(x: Float[Array, "... D"], weight: Float[Array, " D"], eps: float) -> Float[Array, "... D"]:
    """RMS norm with a weight, in float32; `x`'s dtype out."""
    return (rms(x, eps) * weight.astype(jnp.float32)[(None,) * (x.ndim - 1)]).astype(x.dtype)
