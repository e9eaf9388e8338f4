"""The checkers see every fault they are there for: one program per fault, and one that is sound."""

import re

import jax
import jax.numpy as jnp
import numpy as np
from float_kernels import float_kernels
from h200 import Compiled, compile_for_h200, copies_of, faults_in_place, spec

from hisparse_jax import ffi

POOL = spec((1_000, 37_440), jnp.uint8, "pinned_host")
SLAB = spec((500, 112_320), jnp.uint8)
OTHER_SLAB = spec((400, 112_320), jnp.uint8)
IDS = spec((64,), jnp.int32, "pinned_host")


def sound(pool, slab, source, destination):
    pool, slab = ffi.restore_pages(pool, slab, source, destination, offset=0)
    return ffi.backup_pages(pool, slab, destination, source, offset=0)


def unordered(pool, slab, other, source, destination):
    """Reads the pool and writes it with nothing to order the two."""

    def call(name, result, aliases, *operands):
        copy = jax.ffi.ffi_call(f"hisparse_{name}", jax.typeof(result), input_output_aliases=aliases)
        return copy(*operands, offset=np.int64(0), layer="unordered")

    slab = call("restore_pages", slab, {1: 0}, pool, slab, source, destination)
    return call("backup_pages", pool, {0: 0}, pool, other, destination, source), slab


def moved(pool, slab, source, destination):
    """Takes the whole pool to the device to read one row."""
    pool, slab = ffi.backup_pages(pool, slab, source, destination, offset=0)
    return pool, slab, jax.device_put(pool, jax.memory.Space.Device)[7]


def compiled(program, *args, donate) -> Compiled:
    result = compile_for_h200(program, *args, donate=donate)
    print(program.__name__, donate, faults_in_place(result, POOL, SLAB))
    return result


ffi.load_library()
arguments = (POOL, SLAB, IDS, IDS)
assert not faults_in_place(compiled(sound, *arguments, donate=(0, 1)), POOL, SLAB)

kept_pool = compiled(sound, *arguments, donate=1)
assert copies_of(kept_pool.hlo, POOL) and not copies_of(kept_pool.hlo, SLAB)
assert any("aliased" in fault for fault in faults_in_place(kept_pool, POOL, SLAB))

kept_slab = compiled(sound, *arguments, donate=0)
assert copies_of(kept_slab.hlo, SLAB) and not copies_of(kept_slab.hlo, POOL)
assert any("aliased" in fault for fault in faults_in_place(kept_slab, POOL, SLAB))

twice = compiled(unordered, POOL, SLAB, OTHER_SLAB, IDS, IDS, donate=(0, 1))
assert len([line for line in copies_of(twice.hlo, POOL) if "S(5)} copy(" in line]) == 2
assert any("host temp" in fault for fault in faults_in_place(twice, POOL, SLAB))

assert copies_of(compiled(moved, *arguments, donate=(0, 1)).hlo, POOL)

VALUES, LENGTHS = spec((64, 4_096), jnp.float32), spec((64,), jnp.int32)


def total(values, lengths):
    """Sums what `lengths` cover: one kernel, whose tiles depend on how many bytes it reads."""
    seen = jnp.arange(values.shape[1])[None, :] < lengths[:, None]
    return jnp.where(seen, jnp.exp(values * 0.25), 0).sum(axis=1)


def longer_name_and_an_integer_more(values, lengths):
    return total(values, jax.lax.optimization_barrier(lengths)), lengths + 1


def mask_from_memory(values, lengths):
    seen = jnp.arange(values.shape[1])[None, :] < lengths[:, None]
    return jnp.where(jax.lax.optimization_barrier(seen), jnp.exp(values * 0.25), 0).sum(axis=1)


one, same, other = (
    float_kernels(compile_for_h200(program, VALUES, LENGTHS).hlo)
    for program in (total, longer_name_and_an_integer_more, mask_from_memory)
)
assert one and one == same and one != other, (one, same, other)

product = compile_for_h200(lambda a, b: a @ b, spec((64, 4_096), jnp.bfloat16), spec((4_096, 512), jnp.bfloat16)).hlo
tiles = set(re.findall(r'"sizes":\["\d+"\]', product))
assert tiles, "the product names no tile along what it sums"
for tile in tiles:
    assert float_kernels(product) != float_kernels(product.replace(tile, '"sizes":["7"]')), tile


def scaled(values, weights, lengths):
    """A product of its own, which rounds alike in any company."""
    return jnp.maximum(values[:, 0], weights) * 0.3


def beside_integers(values, weights, lengths):
    return jnp.stack((jax.lax.bitcast_convert_type(scaled(values, weights, lengths), jnp.int32), lengths * 3 + 1))


def added(values, weights, lengths):
    """A product that is added to may be contracted."""
    return scaled(values, weights, lengths) + weights


def added_from_memory(values, weights, lengths):
    return jax.lax.optimization_barrier(scaled(values, weights, lengths)) + weights


programs = [
    compile_for_h200(program, VALUES, spec((64,), jnp.float32), LENGTHS).hlo
    for program in (scaled, beside_integers, added, added_from_memory)
]
alone, beside, contracted, apart = map(float_kernels, programs)
assert programs[1].count(" fusion(") == 1, "product and integers are no longer one kernel"
assert alone and alone == beside, (alone, beside)
assert contracted and contracted != apart, (contracted, apart)
assert alone.items() <= apart.items(), (alone, apart)
