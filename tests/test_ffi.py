"""Page copies between slab and host pool: bytes, aliasing, refusals, and the order of fork and join."""

import importlib.util

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hisparse_jax import ffi
from hisparse_jax.config import ConfigError
from hisparse_jax.host_memory import make_host_pool

HOST_BLOCKS, GPU_BLOCKS, PAGE_BYTES, STRIDE, OFFSET = 8, 6, 48, 160, 64
LAYER = "C4 layer 3"


def filled_slab(seed: int = 0) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).integers(0, 256, (GPU_BLOCKS, STRIDE), np.uint8))


def filled_pool(seed: int = 1) -> jax.Array:
    pool = make_host_pool(HOST_BLOCKS, PAGE_BYTES)
    return jax.device_put(np.random.default_rng(seed).integers(0, 256, pool.shape, np.uint8), pool.sharding)


def bytes_of(array: jax.Array) -> np.ndarray:
    return np.array(array, copy=True)


def ids(*values: int) -> jax.Array:
    return ffi.pinned_ids(np.array(values))


@jax.jit
def backup(pool, slab, source, destination):
    return ffi.backup_pages(pool, slab, source, destination, offset=OFFSET, layer=LAYER)


@jax.jit
def restore(pool, slab, source, destination):
    return ffi.restore_pages(pool, slab, source, destination, offset=OFFSET, layer=LAYER)


@jax.jit
def overlapped(pool, slab, source, destination, block):
    """Backs pages up while the program fills `block`."""
    pool, slab = ffi.fork_backup(pool, slab, source, destination, offset=OFFSET, layer=LAYER)
    slab = jax.lax.optimization_barrier(slab.at[block].set(jnp.uint8(77)))
    return ffi.join_backup(pool, slab, layer=LAYER)


def test_the_library_is_built_for_the_oldest_runtime():
    assert ffi.ffi_version() == (0, 4)


def test_a_backup_copies_the_layers_page_and_nothing_else():
    pool, slab = filled_pool(), filled_slab()
    before, source = bytes_of(pool), bytes_of(slab)
    after, slab = backup(pool, slab, ids(1, 5, 0, 3), ids(7, 2, 4, 0))
    expected = before.copy()
    expected[7], expected[2] = (source[block, OFFSET : OFFSET + PAGE_BYTES] for block in (1, 5))
    chex.assert_trees_all_equal(bytes_of(after), expected)
    chex.assert_trees_all_equal(bytes_of(slab), source)
    assert after.sharding.memory_kind == "pinned_host"


def test_b3_offset_is_the_layers_own():
    slab, pool = filled_slab(), filled_pool()
    for offset in (0, 64, STRIDE - PAGE_BYTES):
        call = jax.jit(lambda p, s, a, b, at=offset: ffi.backup_pages(p, s, a, b, offset=at))
        after, _ = call(pool, slab, ids(2), ids(6))
        chex.assert_trees_all_equal(bytes_of(after)[6], bytes_of(slab)[2, offset : offset + PAGE_BYTES])


def test_a_restore_leaves_the_bytes_beside_the_page():
    pool, slab = filled_pool(), filled_slab()
    expected = bytes_of(slab)
    expected[4, OFFSET : OFFSET + PAGE_BYTES] = bytes_of(pool)[6]
    before = bytes_of(pool)
    pool, after = restore(pool, slab, ids(6, 0, 3), ids(4, 2, 0))
    chex.assert_trees_all_equal(bytes_of(after), expected)
    chex.assert_trees_all_equal(bytes_of(pool), before)


@settings(max_examples=30, deadline=None)
@given(st.permutations(range(1, GPU_BLOCKS)), st.permutations(range(1, HOST_BLOCKS)), st.integers(0, 2**16))
def test_b7_backup_then_restore_elsewhere_moves_pages_by_their_own_ids(gpu, host, seed):
    source, destination = ids(*gpu[:3]), ids(*host[:3])
    slab = filled_slab(seed)
    pool, _ = backup(filled_pool(seed), slab, source, destination)
    other = jnp.zeros_like(slab)
    moved_to = gpu[1:3] + gpu[:1]
    _, restored = restore(pool, other, destination, ids(*moved_to))
    expected = np.zeros_like(bytes_of(slab))
    page = slice(OFFSET, OFFSET + PAGE_BYTES)
    expected[moved_to, page] = bytes_of(slab)[gpu[:3], page]
    chex.assert_trees_all_equal(bytes_of(restored), expected)


@pytest.mark.parametrize(
    ("source", "destination", "words"),
    [
        ((1, 6), (1, 2), ["source GPU block 6 of page 1", "6 blocks", "0..5"]),
        ((1, -1), (1, 2), ["source GPU block -1 of page 1"]),
        ((1, 2), (8, 2), ["destination host block 8 of page 0", "8 blocks", "0..7"]),
        ((1, 2), (3, -2), ["destination host block -2 of page 1"]),
        ((1, 2), (3, 3), ["destination host block 3 is named twice"]),
        ((1, 2), (2**31 - 1, 3), ["destination host block 2147483647 of page 0"]),
    ],
)
@pytest.mark.parametrize("program", ["backup", "fork"])
def test_a_wrong_id_is_refused_by_name_and_copies_nothing(program, source, destination, words):
    def fork(pool, slab, source, destination):
        return overlapped(pool, slab, source, destination, jnp.int32(5))

    pool, slab = filled_pool(), filled_slab()
    before = bytes_of(pool)
    with pytest.raises(jax.errors.JaxRuntimeError) as caught:
        jax.block_until_ready({"backup": backup, "fork": fork}[program](pool, slab, ids(*source), ids(*destination)))
    for word in [*words, LAYER, "backup_pages"]:
        assert word in str(caught.value)
    chex.assert_trees_all_equal(bytes_of(pool), before)


def test_a_restore_names_its_sides():
    with pytest.raises(jax.errors.JaxRuntimeError, match=r"restore_pages: C4 layer 3: source host block 9 of page 0"):
        jax.block_until_ready(restore(filled_pool(), filled_slab(), ids(9), ids(1)))
    with pytest.raises(jax.errors.JaxRuntimeError, match=r"destination GPU block 2 is named twice"):
        jax.block_until_ready(restore(filled_pool(), filled_slab(), ids(1, 3), ids(2, 2)))


def test_the_handler_itself_refuses_lists_of_unlike_length_and_a_page_that_leaves_its_block():
    """The wrapper's own checks come first, so this calls the target as another caller would."""
    pool, slab = filled_pool(), filled_slab()
    call = jax.ffi.ffi_call("hisparse_restore_pages", jax.typeof(slab), input_output_aliases={1: 0})
    with pytest.raises(jax.errors.JaxRuntimeError, match="2 source ids, 1 destination ids"):
        jax.block_until_ready(call(pool, slab, ids(1, 3), ids(2), offset=np.int64(0), layer=LAYER))
    with pytest.raises(jax.errors.JaxRuntimeError, match="does not fit in a block of 160 bytes"):
        jax.block_until_ready(call(pool, slab, ids(1), ids(2), offset=np.int64(2**63 - 1), layer=LAYER))


@pytest.mark.parametrize("offset", [-1, STRIDE - PAGE_BYTES + 1])
def test_a_page_that_leaves_its_block_is_refused_when_traced(offset):
    with pytest.raises(ConfigError, match=f"48 bytes at offset={offset} leaves the block of 160 bytes"):
        ffi.backup_pages(filled_pool(), filled_slab(), ids(1), ids(1), offset=offset)


def test_device_ids_are_refused_when_traced():
    with pytest.raises(ConfigError, match="destination lies in .*pinned_ids"):
        ffi.backup_pages(filled_pool(), filled_slab(), ids(1), jnp.zeros(1, jnp.int32), offset=0)
    with pytest.raises(ConfigError, match="pool lies in .*make_host_pool"):
        ffi.join_backup(jnp.zeros((HOST_BLOCKS, PAGE_BYTES), jnp.uint8), filled_slab())


@pytest.mark.parametrize("program", [backup, restore, overlapped])
def test_pool_and_slab_are_updated_in_place(program):
    pool, slab = make_host_pool(HOST_BLOCKS, PAGE_BYTES), filled_slab()
    block = (jnp.int32(5),) if program is overlapped else ()
    donated = jax.jit(program, donate_argnums=(0, 1))
    memory = donated.lower(pool, slab, ids(1), ids(2), *block).compile().memory_analysis()
    assert memory is not None
    assert memory.alias_size_in_bytes == HOST_BLOCKS * PAGE_BYTES + GPU_BLOCKS * STRIDE
    assert memory.temp_size_in_bytes < GPU_BLOCKS * STRIDE
    pool, slab = jax.block_until_ready(donated(pool, slab, ids(1), ids(2), *block))
    places = pool.unsafe_buffer_pointer(), slab.unsafe_buffer_pointer()
    pool, slab = donated(pool, slab, ids(1), ids(2), *block)
    assert (pool.unsafe_buffer_pointer(), slab.unsafe_buffer_pointer()) == places


@pytest.mark.parametrize("late", [False, True])
def test_fork_and_join_copy_what_stood_at_the_fork(late, monkeypatch):
    monkeypatch.delenv("HISPARSE_FFI_LATE_COPIES", raising=False)
    if late:
        monkeypatch.setenv("HISPARSE_FFI_LATE_COPIES", "1")
    pool, slab = filled_pool(), filled_slab()
    expected, source = bytes_of(pool), bytes_of(slab)
    expected[[7, 2]] = source[[1, 3], OFFSET : OFFSET + PAGE_BYTES]
    program = jax.jit(overlapped, donate_argnums=(0, 1))
    pool, slab = program(pool, slab, ids(1, 3, 0), ids(7, 2, 0), jnp.int32(5))
    chex.assert_trees_all_equal(bytes_of(pool), expected)
    source[5] = 77
    chex.assert_trees_all_equal(bytes_of(slab), source)


def test_c3_a_source_page_overwritten_under_its_copy_shows(monkeypatch):
    monkeypatch.setenv("HISPARSE_FFI_LATE_COPIES", "1")
    program = jax.jit(overlapped, donate_argnums=(0, 1))
    pool, _ = program(filled_pool(), filled_slab(), ids(1, 3), ids(7, 2), jnp.int32(3))
    assert (bytes_of(pool)[2] == 77).all()


def test_several_pools_are_forked_and_joined_by_their_own():
    def program(pools, slab, source, destination):
        pools = list(pools)
        for i, pool in enumerate(pools):
            pools[i], slab = ffi.fork_backup(pool, slab, source, destination, offset=i * PAGE_BYTES)
        for i in reversed(range(len(pools))):
            pools[i], slab = ffi.join_backup(pools[i], slab)
        return pools, slab

    slab = filled_slab()
    source = bytes_of(slab)
    pools = tuple(make_host_pool(HOST_BLOCKS, PAGE_BYTES) for _ in range(3))
    pools, _ = jax.jit(program, donate_argnums=(0, 1))(pools, slab, ids(2), ids(4))
    for i, pool in enumerate(pools):
        chex.assert_trees_all_equal(bytes_of(pool)[4], source[2, i * PAGE_BYTES : (i + 1) * PAGE_BYTES])


def test_a_join_without_a_fork_is_refused():
    with pytest.raises(jax.errors.JaxRuntimeError, match="backup_pages_join: C4 layer 3: no fork is open"):
        jax.block_until_ready(jax.jit(lambda p, s: ffi.join_backup(p, s, layer=LAYER))(filled_pool(), filled_slab()))


def test_a_slab_that_moved_between_fork_and_join_is_refused():
    def program(pool, slab, other, source, destination):
        pool, slab = ffi.fork_backup(pool, slab, source, destination, offset=OFFSET, layer=LAYER)
        pool, _ = ffi.join_backup(pool, other, layer=LAYER)
        return pool, slab

    with pytest.raises(jax.errors.JaxRuntimeError, match="the slab has another buffer than at the fork"):
        jax.block_until_ready(jax.jit(program)(filled_pool(), filled_slab(), filled_slab(), ids(1), ids(1)))


def test_a_failed_fork_leaves_no_copy_open():
    def program(pool, other, slab, source, destination, wrong):
        pool, slab = ffi.fork_backup(pool, slab, source, destination, offset=OFFSET)
        other, slab = ffi.fork_backup(other, slab, source, wrong, offset=OFFSET)
        pool, slab = ffi.join_backup(pool, slab)
        other, slab = ffi.join_backup(other, slab)
        return pool, other, slab

    jitted = jax.jit(program)
    operands = filled_pool(), filled_pool(2), filled_slab(), ids(1), ids(1)
    with pytest.raises(jax.errors.JaxRuntimeError, match="destination host block 99"):
        jax.block_until_ready(jitted(*operands, ids(99)))
    pool, _, _ = jitted(*operands, ids(2))
    chex.assert_trees_all_equal(bytes_of(pool)[1], bytes_of(operands[2])[1, OFFSET : OFFSET + PAGE_BYTES])


def test_pinned_ids_are_a_copy_in_host_memory():
    plan = np.array([3, 1, 2], np.int64)
    pinned = ffi.pinned_ids(plan)
    plan[:] = 0
    assert pinned.sharding.memory_kind == "pinned_host" and pinned.dtype == jnp.int32
    chex.assert_trees_all_equal(bytes_of(pinned), np.array([3, 1, 2], np.int32))


def test_a_missing_or_broken_library_says_what_to_do(monkeypatch, tmp_path):
    broken = tmp_path / "_ffi.so"
    broken.write_text("no library")
    monkeypatch.setenv("HISPARSE_FFI_LIBRARY", str(broken))
    with pytest.raises(ffi.FfiError, match="cannot be used.*pip install -e"):
        ffi.load_library.__wrapped__()
    monkeypatch.delenv("HISPARSE_FFI_LIBRARY")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ffi.FfiError, match="is not built; run `pip install -e .`"):
        ffi.library_path()
