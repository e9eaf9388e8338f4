"""Page copies on a GPU, in every way there is: bytes, order against compute, refusals, and nothing left running."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hisparse_jax import ffi
from hisparse_jax.host_memory import make_host_pool

pytestmark = pytest.mark.gpu

PAGE, STRIDE, OFFSET, BLOCKS, LAYER = 37_440, 112_320, 37_440, 600, "C4 layer 3"


@pytest.fixture(params=["table", "each", "batch", "kernel"])
def way(request, monkeypatch):
    monkeypatch.delenv("HISPARSE_PAGE_COPIES", raising=False)
    if request.param != "table":
        monkeypatch.setenv("HISPARSE_PAGE_COPIES", request.param)
    return request.param


def random_bytes(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, shape, np.uint8)


def filled_pool(seed: int = 1, page: int = PAGE) -> jax.Array:
    return jax.device_put(random_bytes(BLOCKS, page, seed=seed), make_host_pool(1, page).sharding)


def bytes_of(array: jax.Array) -> np.ndarray:
    return np.array(array, copy=True)


def jitted(program, pool: jax.Array):
    """Donates pool and slab; the pool stays where it is."""
    home = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    return jax.jit(program, donate_argnums=(0, 1), out_shardings=(pool.sharding, home))


def backup(pool, slab, source, destination):
    return ffi.backup_pages(pool, slab, source, destination, offset=OFFSET, layer=LAYER)


def restore(pool, slab, source, destination):
    return ffi.restore_pages(pool, slab, source, destination, offset=OFFSET, layer=LAYER)


def plan(count: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    return 1 + rng.permutation(BLOCKS - 1)[:count], 1 + rng.permutation(BLOCKS - 1)[:count]


@pytest.mark.parametrize("count", [1, 5, 128, 520])
def test_backup_and_restore_move_pages_and_nothing_else(way, count):
    source, destination = plan(count)
    padded = [np.concatenate((ids, [0, 0, 7])) for ids in (source, destination)]
    padded[1][-1] = 0  # a pair with one null side is padding too
    pool, slab = filled_pool(), jnp.asarray(random_bytes(BLOCKS, STRIDE))
    expected, values = bytes_of(pool), bytes_of(slab)
    expected[destination] = values[source, OFFSET : OFFSET + PAGE]
    place = pool.unsafe_buffer_pointer(), slab.unsafe_buffer_pointer()
    pool, slab = jitted(backup, pool)(pool, slab, *map(ffi.pinned_ids, padded))
    assert (pool.unsafe_buffer_pointer(), slab.unsafe_buffer_pointer()) == place
    assert (bytes_of(pool) == expected).all() and (bytes_of(slab) == values).all()

    back, elsewhere = plan(count, seed=1)
    pool, slab = jitted(restore, pool)(pool, slab, ffi.pinned_ids(back), ffi.pinned_ids(elsewhere))
    values[elsewhere, OFFSET : OFFSET + PAGE] = expected[back]
    assert (bytes_of(pool) == expected).all() and (bytes_of(slab) == values).all()


def test_pages_of_any_size(way):
    """933 bytes at byte 7: nothing is aligned."""
    pool, slab = filled_pool(page=933), jnp.asarray(random_bytes(BLOCKS, 1_001))
    expected, (source, destination) = bytes_of(pool), plan(9)
    expected[destination] = bytes_of(slab)[source, 7:940]

    def program(pool, slab, source, destination):
        return ffi.backup_pages(pool, slab, source, destination, offset=7)

    pool, _ = jitted(program, pool)(pool, slab, ffi.pinned_ids(source), ffi.pinned_ids(destination))
    assert (bytes_of(pool) == expected).all()


def busy(x: jax.Array) -> jax.Array:
    """Milliseconds of compute whose result XLA cannot know."""
    return jax.lax.fori_loop(0, 20, lambda _, y: jnp.tanh(y @ y), x)


def test_a_fork_sees_what_was_written_before_it_and_a_join_ends_it(way):
    """The source is written by slow compute right before the fork, compute runs beside it, the source is overwritten after it."""

    def program(pool, slab, x, source, destination):
        first = busy(x)
        slab = slab.at[source_on_device].set((first[0, 0] * 0 + 41).astype(jnp.uint8))
        pool, slab = ffi.fork_backup(pool, slab, source, destination, offset=OFFSET, layer=LAYER)
        slab, beside = jax.lax.optimization_barrier((slab, busy(x + 1)))
        pool, slab = ffi.join_backup(pool, slab, layer=LAYER)
        return pool, slab.at[source_on_device].set((beside[0, 0] * 0 + 99).astype(jnp.uint8))

    source, destination = plan(200)
    source_on_device = jnp.asarray(source)
    pool, slab = filled_pool(), jnp.asarray(random_bytes(BLOCKS, STRIDE))
    expected = bytes_of(pool)
    expected[destination] = 41
    run, x = jitted(program, pool), jnp.eye(2_048) / 2
    for _ in range(3):
        pool, slab = run(pool, slab, x, ffi.pinned_ids(source), ffi.pinned_ids(destination))
    assert (bytes_of(pool) == expected).all() and (bytes_of(slab)[source] == 99).all()


def test_a_restore_is_read_by_what_comes_after_it(way):
    def program(pool, slab, source, destination):
        pool, slab = ffi.restore_pages(pool, slab, source, destination, offset=0)
        return pool, slab.at[:, PAGE : 2 * PAGE].set(slab[:, :PAGE])

    source, destination = plan(300)
    pool, slab = filled_pool(), jnp.asarray(random_bytes(BLOCKS, STRIDE))
    values = bytes_of(pool)
    pool, slab = jitted(program, pool)(pool, slab, ffi.pinned_ids(source), ffi.pinned_ids(destination))
    assert (bytes_of(slab)[destination, PAGE : 2 * PAGE] == values[source]).all()


def test_a_wrong_id_is_refused_by_name_and_copies_nothing():
    for name, program in (("backup_pages", backup), ("restore_pages", restore)):
        pool, slab = filled_pool(), jnp.asarray(random_bytes(BLOCKS, STRIDE))
        before, values = bytes_of(pool), bytes_of(slab)
        with pytest.raises(jax.errors.JaxRuntimeError, match=rf"{name}: {LAYER}: destination \w+ block 600 of page 1"):
            jax.block_until_ready(
                jax.jit(program)(pool, slab, ffi.pinned_ids(np.array([1, 2])), ffi.pinned_ids(np.array([5, 600])))
            )
        assert (bytes_of(pool) == before).all() and (bytes_of(slab) == values).all()


def test_a_failed_fork_leaves_no_copy_in_flight_and_the_next_program_runs(way):
    def program(pool, slab, source, destination, wrong):
        pool, slab = ffi.fork_backup(pool, slab, source, destination, offset=0, layer="first")
        pool, slab = ffi.join_backup(pool, slab, layer="first")
        pool, slab = ffi.fork_backup(pool, slab, source, destination, offset=OFFSET, layer="second")
        slab = jax.lax.optimization_barrier(slab)
        pool, slab = ffi.backup_pages(pool, slab, source, wrong, offset=OFFSET, layer="third")
        return ffi.join_backup(pool, slab, layer="second")

    source, destination = plan(400)
    pool, slab = filled_pool(), jnp.asarray(random_bytes(BLOCKS, STRIDE))
    home = pool.sharding
    run = jax.jit(program, out_shardings=(home, jax.sharding.SingleDeviceSharding(jax.devices()[0])))
    operands = pool, slab, ffi.pinned_ids(source), ffi.pinned_ids(destination)
    wrong = destination.copy()
    wrong[3] = wrong[2]
    with pytest.raises(jax.errors.JaxRuntimeError, match=rf"third: destination host block {wrong[2]} is named twice"):
        jax.block_until_ready(run(*operands, ffi.pinned_ids(wrong)))
    after, _ = run(*operands, ffi.pinned_ids(destination))
    expected = bytes_of(pool)
    expected[destination] = bytes_of(slab)[source, OFFSET : OFFSET + PAGE]
    assert (bytes_of(after) == expected).all()


def test_a_join_without_a_fork_is_refused():
    with pytest.raises(jax.errors.JaxRuntimeError, match="no fork is open on this pool"):
        jax.block_until_ready(jax.jit(lambda p, s: ffi.join_backup(p, s))(filled_pool(), jnp.zeros((BLOCKS, STRIDE), jnp.uint8)))
