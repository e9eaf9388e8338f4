"""Sinkhorn normalisation of many small matrices, for hyper-connections. Reference: `ref.sinkhorn`.

One lane of a Pallas program keeps a whole matrix in registers: XLA makes four kernels of every pass, and passes are many.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt
from jaxtyping import Array, Float32

from pallas_kernels import ref
from pallas_kernels.choice import choose

BLOCK = 32
"""Matrices of a program: a warp, whose lanes take one each."""

MAX_N = 8
"""Rows of a matrix that a lane's registers hold."""


def _kernel(matrix_ref, out_ref, *, count: int, n: int, iterations: int, eps: float):
    start = pl.program_id(0) * BLOCK
    mask = start + jnp.arange(BLOCK, dtype=jnp.int32) < count
    at = pl.ds(start, BLOCK)
    cells = [plt.load(matrix_ref.at[at, jnp.int32(cell)], mask=mask, other=1.0) for cell in range(n * n)]

    def divided(cells, lines):
        """Every line of cells divided by its sum."""
        cells = list(cells)
        for line in lines:
            total = functools.reduce(jnp.add, [cells[cell] for cell in line]) + eps
            for cell in line:
                cells[cell] = cells[cell] / total
        return cells

    rows = [[n * i + j for j in range(n)] for i in range(n)]
    columns = [[n * i + j for i in range(n)] for j in range(n)]
    cells = jax.lax.fori_loop(0, iterations - 1, lambda _, cells: divided(divided(cells, rows), columns), divided(cells, columns))
    for cell, value in enumerate(cells):
        plt.store(out_ref.at[at, jnp.int32(cell)], value, mask=mask)


@functools.partial(jax.jit, static_argnames=("iterations", "eps", "implementation", "interpret"))
def sinkhorn(
    matrix: Float32[Array, "*batch n n"],
    iterations: int,
    eps: float,
    *,
    implementation: str | None = None,
    interpret: bool = False,
) -> Float32[Array, "*batch n n"]:
    """Columns and rows of positive matrices divided by their sums in turn: `iterations` column passes, the first and the last.

    `eps` is added to every sum. `iterations` is at least 1, n at most 8 for `pallas`; `interpret=True` runs the Pallas program
    on a CPU. Source: DeepSeek V4's published inference code.
    """
    if iterations < 1:
        raise ValueError(f"{iterations=} must be at least 1: the passes end on columns.")
    *batch, n, _ = matrix.shape
    count = int(np.prod(batch))
    if count == 0:
        return matrix

    def xla(matrix):
        return ref.sinkhorn(matrix, iterations, eps)

    def pallas(matrix):
        if n > MAX_N:
            raise ValueError(f"pallas keeps a matrix in the registers of one lane: {n=} exceeds {MAX_N}. Choose 'xla'.")
        return pl.pallas_call(
            functools.partial(_kernel, count=count, n=n, iterations=iterations, eps=eps),
            out_shape=jax.ShapeDtypeStruct((count, n * n), jnp.float32),
            grid=(pl.cdiv(count, BLOCK),),
            compiler_params=None if interpret else plt.CompilerParams(num_warps=1),
            interpret=interpret,
            name="sinkhorn",
        )(matrix.reshape(count, n * n)).reshape(matrix.shape)

    if implementation is None and n > MAX_N:
        implementation = "xla"
    return choose("sinkhorn", implementation, dict(xla=xla, pallas=pallas), matrix)
