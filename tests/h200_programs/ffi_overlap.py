"""Fork, compute, join in one program for CUDA: in that order, every pool and the slab in place."""

import re

import jax
import jax.numpy as jnp
from h200 import assert_in_place, compile_for_h200, spec

from hisparse_jax import ffi

NUM_POOLS, BLOCKS, CHUNK, WIDTH = 3, 500, 8, 2_048
POOLS = tuple(spec((1_000 + i, 37_440), jnp.uint8, "pinned_host") for i in range(NUM_POOLS))  # told apart by shape
SLAB = spec((BLOCKS, NUM_POOLS * 37_440), jnp.uint8)
IDS = spec((64,), jnp.int32, "pinned_host")


def chunk(pools, slab, source, destination, x, weight, blocks):
    """One prefill chunk: backs the last one's pages up while it computes and writes its own."""
    pools = list(pools)
    for i, pool in enumerate(pools):
        pools[i], slab = ffi.fork_backup(pool, slab, source, destination, offset=i * 37_440, layer=f"C4 layer {i}")
    y = x @ weight
    slab = slab.at[blocks].set(jax.lax.bitcast_convert_type(y, jnp.uint8).reshape(CHUNK, -1)[:, : NUM_POOLS * 37_440])
    slab, y = jax.lax.optimization_barrier((slab, y))
    for i, pool in enumerate(pools):
        pools[i], slab = ffi.join_backup(pool, slab, layer=f"C4 layer {i}")
    return tuple(pools), slab, y


ffi.load_library()
x, weight = spec((CHUNK, WIDTH), jnp.float32), spec((WIDTH, 30_000), jnp.float32)
program = compile_for_h200(chunk, POOLS, SLAB, IDS, IDS, x, weight, spec((CHUNK,), jnp.int32), donate=(0, 1))
assert_in_place(program, *POOLS, SLAB)

# The entry computation is scheduled: its text is the order of launches.
entry = program.hlo[program.hlo.index("ENTRY") :]
order = re.findall(r"backup_pages_(fork|join)|(__cublas\S*|scatter\S* = )", entry)
names = [fork_or_join or "compute" for fork_or_join, _ in order]
assert names[:NUM_POOLS] == ["fork"] * NUM_POOLS and names[-NUM_POOLS:] == ["join"] * NUM_POOLS, names
assert "compute" in names, names
