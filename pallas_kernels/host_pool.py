"""How an op touches the host pool, `u8[H, page_bytes]` in `pinned_host`, chosen by platform.

A CUDA kernel takes the pool as an operand and writes it through a ref, in place; `jax.device_put` only restores its
type. XLA's own ops refuse host space: on a CPU, where both spaces are the same memory, the pool is viewed as device
space, handled in `jnp`, and viewed back, in place. The same views on CUDA would move the whole pool, so the choice is
made when the program is lowered. A pool must be donated, and an op that returns it returns nothing else.

Source: `CompileTimeHostOffloadOutputLocationMismatch` is what XLA:GPU says to a call with the pool among two results.
"""

from collections.abc import Callable

import jax
from jax import lax

from pallas_kernels import cuda_kernels

IMPLEMENTATIONS = ("xla", "pallas", "cuda")
CUDA_PREFERENCE = ("cuda", "pallas")
"""On CUDA the first of these that is there is the default."""


def by_platform(
    name: str, implementation: str | None, xla: Callable, pallas: Callable, cuda: Callable, *operands: jax.Array
) -> jax.Array:
    """Runs one implementation of op `name` on `operands`; None takes `xla` on a CPU, a kernel on CUDA, at lowering."""
    if implementation is None:
        kernels = {"cuda": cuda, "pallas": pallas}
        there = [kernel for kernel in CUDA_PREFERENCE if kernel != "cuda" or name in cuda_kernels.registered()]
        return lax.platform_dependent(*operands, cpu=xla, cuda=kernels[there[0]])
    if implementation not in IMPLEMENTATIONS:
        raise ValueError(f"{implementation=} is unknown; choose from {', '.join(IMPLEMENTATIONS)}, or None for the platform's.")
    return {"xla": xla, "pallas": pallas, "cuda": cuda}[implementation](*operands)


def on_device_view(pool: jax.Array) -> jax.Array:
    """The pool as device space, for `jnp`."""
    return jax.device_put(pool, jax.memory.Space.Device)


def like(pool: jax.Array, result: jax.Array) -> jax.Array:
    """`result` typed as living where `pool` does."""
    return jax.device_put(result, jax.typeof(pool).memory_space)
