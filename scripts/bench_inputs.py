"""What the kernel benchmark feeds to its variants: sizes, pools of random bytes, selections with known misses."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from hisparse_jax.host_memory import make_host_pool
from hisparse_jax.rows import Fp8EntryRows, Fp8IndexRows, PlainRows, RowFormat
from pallas_kernels import cuda_kernels
from pallas_kernels.host_pool import IMPLEMENTATIONS

LINK = 52e9
"""Bytes a second over PCIe: scattered stores by the GPU, and large DMA, reach 49 to 55e9 on an H200."""
HBM = 4.8e12
"""Bytes a second of an H200's memory, by its datasheet."""
FP8 = Fp8EntryRows("fp8", 512, 576, 8, "bfloat16", 576)
INDEX = Fp8IndexRows("fp8", 128, 128, 4, "bfloat16", 576)
BF16 = PlainRows("bf16", 512, 1_024, 0, "bfloat16")
ENTRIES = 64
WHOLE_LOOP_GRAPH = {
    "xla_gpu_graph_min_graph_size": 1,
    "xla_gpu_enable_command_buffer": "FUSION,CUSTOM_CALL,WHILE,DYNAMIC_SLICE_FUSION",
}
"""XLA's options that capture everything, loops too, as one CUDA graph; by default it captures runs of kernels."""


@dataclasses.dataclass(frozen=True)
class Case:
    """One line of figures: the work of one launch, and how each variant does it.

    A variant is `step(fixed, state, inputs) -> (state, outputs)`: `fixed` is only read, the state is donated. `init` makes a
    new state; `draw(key, launches)` gives one tuple of inputs per launch. `check(run)` raises where the variant is wrong.
    """

    name: str
    shape: str
    variants: dict[str, Callable]
    init: Callable[[], Any]
    draw: Callable[[jax.Array, int], tuple]
    check: Callable[[Callable], None] | None = None
    expect: Callable[[Any], None] = lambda outputs: None
    """Raises where the outputs of a whole sample, stacked over its launches, are not what the case claims to measure."""
    floor_us: float | None = None
    num_bytes: int = 0
    """Bytes over the link of one launch, for the GB/s column."""
    first: str = ""
    then: str = ""
    peer: str = ""
    fixed: Callable[[], Any] = lambda: None
    most: int = 1 << 20
    """Launches in a sample, at most."""
    slow: tuple[str, ...] = ("xla",)
    """Variants that take 8 launches a sample."""


@dataclasses.dataclass(frozen=True)
class Sizes:
    """The V4 shapes, or tiny ones for a machine without a GPU."""

    requests: int = 64
    top_k: int = 512
    slots: int = 4_096
    num_pages: int = 512
    layers_in_block: int = 6
    layer: int = 1
    backup_layers: int = 21
    backup_pages: int = 128

    @property
    def host_blocks(self) -> int:
        return 1 + self.requests * self.num_pages

    @property
    def entries(self) -> int:
        return self.num_pages * ENTRIES

    @property
    def hot_pages(self) -> int:
        return -(-self.slots // ENTRIES)


TINY = Sizes(requests=2, top_k=64, slots=256, num_pages=8, layers_in_block=2, backup_layers=2, backup_pages=2)


def on_gpu() -> bool:
    return jax.default_backend() == "gpu"


def variants_of(module) -> tuple[str, ...]:
    """What an op's module offers here: everything on a GPU, `xla` elsewhere."""
    offered = getattr(module, "IMPLEMENTATIONS", IMPLEMENTATIONS)
    if not on_gpu():
        return ("xla",)
    name = module.__name__.rsplit(".", 1)[-1]
    return tuple(v for v in offered if v != "cuda" or name in cuda_kernels.registered())


def movers() -> tuple[str, ...]:
    """Implementations of the ops on the host pool: XLA's would move the whole pool on CUDA."""
    return (
        tuple(v for v in ("pallas", "cuda") if v == "pallas" or "gather_rows" in cuda_kernels.registered())
        if on_gpu()
        else ("xla",)
    )


@functools.cache
def random_pages(blocks: int, page_bytes: int) -> np.ndarray:
    return np.random.default_rng(0).integers(0, 2**63, (blocks, page_bytes // 8), np.int64).view(np.uint8)


def host_pool(blocks: int, page_bytes: int) -> jax.Array:
    """A new pool of random bytes."""
    like = make_host_pool(1, page_bytes)
    pool = jax.device_put(random_pages(blocks, page_bytes), like.sharding)
    if not on_gpu():  # numpy's own memory there: see make_host_pool
        pool = jax.jit(lambda x: x, donate_argnums=0, out_shardings=like.sharding)(pool)
    return jax.block_until_ready(pool)


@functools.cache
def the_pool(s: Sizes, fmt: RowFormat) -> jax.Array:
    """The pool that is only read: 64 requests of 32,768 entries, 1.2 GB of fp8 rows."""
    return host_pool(s.host_blocks, fmt.page_bytes(ENTRIES))


def some(key: jax.Array, *shape: int, count: int, low: int, high: int) -> jax.Array:
    """`count` distinct numbers of `low ... high - 1` in each of `shape` rows, in random order."""
    order = jnp.argsort(jax.random.uniform(key, (*shape, high - low)), axis=-1)
    return low + order[..., :count].astype(jnp.int32)


@functools.partial(jax.jit, static_argnames=("batch", "top_k", "missing", "entries", "slots"))
def selections(key, first_step, steps, *, batch: int, top_k: int, missing: int, entries: int, slots: int):
    """Top-k indices of consecutive steps with exactly `missing` misses each, `i32[steps, batch, top_k]`, ascending.

    A request visits its entries in a random order of its own: a step selects the next `missing`, which were never loaded or
    were evicted long ago, and the rest among those visited last. LRU holds these for certain while no more than
    `slots - top_k` others were used since: as many were visited since, and as many before may have been used again.
    """
    window = (slots - top_k) // 2
    order = jax.vmap(lambda k: jax.random.permutation(k, entries))(jax.random.split(jax.random.key(7), batch))

    def step(i):
        begin = (first_step + i) * missing
        back = 1 + some(jax.random.fold_in(key, i), batch, count=top_k - missing, low=0, high=window)
        new = jnp.broadcast_to(begin + jnp.arange(missing), (batch, missing))
        at = jnp.concatenate((new, begin - back), axis=1) % entries
        return jnp.sort(jnp.take_along_axis(order, at, axis=1), axis=1).astype(jnp.int32)

    return jax.lax.map(step, steps)


def initial_map(s: Sizes, batch: int, host: np.ndarray) -> tuple[jax.Array, jax.Array]:
    """Every slot full, the oldest first: the entries that `selections` visited before step 0."""
    keys = jax.random.split(jax.random.key(7), batch)
    order = np.asarray(jax.vmap(lambda k: jax.random.permutation(k, s.entries))(keys))
    held = order[:, (np.arange(s.slots) - s.slots) % s.entries]
    slot_host = np.take_along_axis(host, held // ENTRIES, axis=1) * ENTRIES + held % ENTRIES
    lru = jnp.broadcast_to(jnp.arange(s.slots, dtype=jnp.int16), (batch, s.slots))
    return jnp.asarray(slot_host, jnp.int32), lru + jnp.int16(0)


def host_table(s: Sizes, batch: int) -> np.ndarray:
    """Each request owns 512 host blocks side by side in no order: the pool as allocation leaves it."""
    rng = np.random.default_rng(3)
    return np.stack([1 + i * s.num_pages + rng.permutation(s.num_pages) for i in range(batch)]).astype(np.int32)


def slab_of(s: Sizes, batch: int, fmt: RowFormat) -> jax.Array:
    return jnp.full((1 + batch * s.hot_pages, s.layers_in_block * fmt.page_bytes(ENTRIES)), 0xA5, jnp.uint8)


def gather_place(s: Sizes, fmt: RowFormat) -> dict[str, int]:
    return dict(
        value_bytes=fmt.value_bytes, scale_bytes=fmt.scale_bytes, page_entries=ENTRIES,
        offset=s.layer * fmt.page_bytes(ENTRIES), row_step=ENTRIES * s.layers_in_block,
    )  # fmt: skip
