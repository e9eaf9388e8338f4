"""One pool of blocks: a free queue with reference counts. The only code that touches a free list.

Blocks leave at the head of the queue, oldest first, and come back at its tail. A free block stays readable until it leaves,
so the order is policy, and a block may be taken back from the middle of the queue (`touch`): its item in the ring then goes
stale and is passed over when it surfaces. Nothing here loops over single blocks.

Source: vLLM's block pool.
"""

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Bool, Int32

from hisparse_jax.status import NULL_BLOCK, Status


class BlockPool(struct.PyTreeNode):
    """Free queue and reference counts of `N` blocks; block 0 is the null block and is never handed out.

    A block is free where its count is 0. Every free block has exactly one live item in the ring: one whose stamp is the
    block's. `R = 2 N` ring places, so stale items are swept out once in about N returns.

    ring: i32[R]        block ids; items stand at head, head + 1, ... (mod R).
    ring_stamp: i32[R]  the block's stamp when its item was written.
    head: i32[]         place of the oldest item.
    num_items: i32[]    items in the ring, stale ones included.
    stamp: i32[N]       goes up when a block is taken out of the middle.
    references: i32[N]  holders of each block: table entries and leases.
    num_free: i32[]     blocks that `allocate` can give.
    """

    ring: Int32[Array, " R"]
    ring_stamp: Int32[Array, " R"]
    head: Int32[Array, ""]
    num_items: Int32[Array, ""]
    stamp: Int32[Array, " N"]
    references: Int32[Array, " N"]
    num_free: Int32[Array, ""]


def init_pool(num_blocks: int) -> BlockPool:
    """All of `num_blocks` blocks free but the null block; they leave in ascending order of id."""
    if num_blocks < 2:
        raise ValueError(f"{num_blocks=} leaves none beside the null block; give the pool at least 2 blocks.")
    ids = jnp.arange(2 * num_blocks, dtype=jnp.int32) + 1
    usable = num_blocks - 1
    return BlockPool(
        ring=jnp.where(ids <= usable, ids, NULL_BLOCK),
        ring_stamp=jnp.zeros(2 * num_blocks, jnp.int32),
        head=jnp.int32(0),
        num_items=jnp.int32(usable),
        stamp=jnp.zeros(num_blocks, jnp.int32),
        references=jnp.zeros(num_blocks, jnp.int32),
        num_free=jnp.int32(usable),
    )


def allocate(
    pool: BlockPool, count: Int32[Array, ""], *, max_count: int
) -> tuple[BlockPool, Int32[Array, " {max_count}"], Int32[Array, ""]]:
    """Takes the `count` oldest free blocks, one reference each, or none at all.

    Returns `(pool, block_ids, status)`: `count` distinct ids in queue order, then `NULL_BLOCK`. If fewer are free, `status`
    is `OUT_OF_BLOCKS`; if `count` is negative or above `max_count`, `REFUSED`; either way every id is `NULL_BLOCK` and the
    pool is unchanged. O(max_count) where no item is stale; each window of `max_count` items costs one more turn.
    """
    size, num_blocks = pool.ring.shape[0], pool.stamp.shape[0]
    askable = (count >= 0) & (count <= max_count)
    enough = count <= pool.num_free
    granted = jnp.where(askable & enough, count, 0).astype(jnp.int32)
    lanes = jnp.arange(max(1, min(max_count, size)), dtype=jnp.int32)

    def unfinished(carry):
        passed, taken, _ = carry
        return (taken < granted) & (passed < pool.num_items)

    def take_window(carry):
        passed, taken, block_ids = carry
        offset = passed + lanes
        places = (pool.head + offset) % size
        items = pool.ring[places]
        live = (offset < pool.num_items) & (pool.ring_stamp[places] == pool.stamp[items])
        rank = taken + jnp.cumsum(live, dtype=jnp.int32) - 1
        wanted = live & (rank < granted)
        block_ids = block_ids.at[jnp.where(wanted, rank, max_count)].set(items, mode="drop")
        got = taken + jnp.sum(wanted, dtype=jnp.int32)
        last_wanted = jnp.max(jnp.where(wanted, offset + 1, passed))
        passed = jnp.where(got == granted, last_wanted, jnp.minimum(passed + lanes.shape[0], pool.num_items))
        return passed, got, block_ids

    start = (jnp.int32(0), jnp.int32(0), jnp.full(max_count, NULL_BLOCK, jnp.int32))
    passed, _, block_ids = jax.lax.while_loop(unfinished, take_window, start)
    owned = jnp.where(block_ids == NULL_BLOCK, num_blocks, block_ids)
    pool = pool.replace(
        head=(pool.head + passed) % size,
        num_items=pool.num_items - passed,
        references=pool.references.at[owned].set(1, mode="drop"),
        num_free=pool.num_free - granted,
    )
    status = jnp.where(askable, jnp.where(enough, Status.OK, Status.OUT_OF_BLOCKS), Status.REFUSED)
    return pool, block_ids, status.astype(jnp.int32)


def free(pool: BlockPool, block_ids: Int32[Array, " M"]) -> tuple[BlockPool, Int32[Array, ""]]:
    """Drops one reference for each entry of `block_ids`; `NULL_BLOCK` entries are skipped.

    A block whose count reaches 0 goes to the tail of the queue, in the order of the entries that took the last reference.
    Returns `(pool, status)`: `BAD_BLOCK` where an id lies outside the pool, `DOUBLE_FREE` where a count would go below 0;
    then the pool is unchanged. O(M + N), and O(R) when stale items must be swept out to make room.
    """
    size, num_blocks = pool.ring.shape[0], pool.stamp.shape[0]
    named, in_range = _named(pool, block_ids)
    places = jnp.where(named, block_ids, num_blocks)
    references = pool.references - _multiplicity(pool, places)
    honest = jnp.all(references >= 0)
    ok = in_range & honest

    order = jnp.arange(block_ids.shape[0], dtype=jnp.int32)
    last = jnp.full(num_blocks, -1, jnp.int32).at[places].max(order, mode="drop")
    inside = jnp.where(named, block_ids, NULL_BLOCK)
    returned = ok & named & (last[inside] == order) & (references[inside] == 0)
    num_returned = jnp.sum(returned, dtype=jnp.int32)

    roomy = jax.lax.cond(pool.num_items + num_returned > size, _sweep, lambda pool: pool, pool)
    rank = jnp.cumsum(returned, dtype=jnp.int32) - 1
    tail = jnp.where(returned, (roomy.head + roomy.num_items + rank) % size, size)
    pool = roomy.replace(
        ring=roomy.ring.at[tail].set(block_ids, mode="drop"),
        ring_stamp=roomy.ring_stamp.at[tail].set(pool.stamp[inside], mode="drop"),
        num_items=roomy.num_items + num_returned,
        references=jnp.where(ok, references, pool.references),
        num_free=pool.num_free + num_returned,
    )
    return pool, _fault(in_range, jnp.where(honest, Status.OK, Status.DOUBLE_FREE))


def touch(pool: BlockPool, block_ids: Int32[Array, " M"]) -> tuple[BlockPool, Int32[Array, ""]]:
    """Adds one reference for each entry of `block_ids`; `NULL_BLOCK` entries are skipped.

    A free block leaves the queue, wherever it stands, with the bytes it still holds. Returns `(pool, status)`: `BAD_BLOCK`
    where an id lies outside the pool, which is then unchanged. O(M + N).
    """
    named, in_range = _named(pool, block_ids)
    named = named & in_range
    places = jnp.where(named, block_ids, pool.stamp.shape[0])
    added = _multiplicity(pool, places)
    revived = (added > 0) & (pool.references == 0)
    pool = pool.replace(
        references=pool.references + added,
        stamp=pool.stamp + revived.astype(jnp.int32),
        num_free=pool.num_free - jnp.sum(revived, dtype=jnp.int32),
    )
    return pool, _fault(in_range, jnp.int32(Status.OK))


def _named(pool: BlockPool, block_ids: Int32[Array, " M"]) -> tuple[Bool[Array, " M"], Bool[Array, ""]]:
    """Which entries name a block that can be held, and whether none lies outside the pool."""
    inside = (block_ids >= 0) & (block_ids < pool.stamp.shape[0])
    return inside & (block_ids != NULL_BLOCK), jnp.all(inside)


def _multiplicity(pool: BlockPool, places: Int32[Array, " M"]) -> Int32[Array, " N"]:
    """How often each block stands in `places`; N there means none."""
    return jnp.zeros_like(pool.references).at[places].add(1, mode="drop")


def _fault(in_range: Bool[Array, ""], otherwise: Array) -> Int32[Array, ""]:
    return jnp.where(in_range, otherwise, Status.BAD_BLOCK).astype(jnp.int32)


def _sweep(pool: BlockPool) -> BlockPool:
    """The same queue without its stale items, from place 0 on."""
    size = pool.ring.shape[0]
    lanes = jnp.arange(size, dtype=jnp.int32)
    places = (pool.head + lanes) % size
    items, stamps = pool.ring[places], pool.ring_stamp[places]
    live = (lanes < pool.num_items) & (stamps == pool.stamp[items])
    target = jnp.where(live, jnp.cumsum(live, dtype=jnp.int32) - 1, size)
    return pool.replace(
        ring=jnp.zeros_like(pool.ring).at[target].set(items, mode="drop"),
        ring_stamp=jnp.zeros_like(pool.ring_stamp).at[target].set(stamps, mode="drop"),
        head=jnp.zeros_like(pool.head),
        num_items=jnp.sum(live, dtype=jnp.int32),
    )
