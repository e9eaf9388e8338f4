"""Which GPU block holds which page: block tables of the growing groups, over one pool. Both twins decode through these.

A page costs one block in every growing group: `Gb` base groups (index keys, C128 entries), whose pages stay for the life of
the request, and `G` resident groups (C4 entries). All groups share one id space, so a block belongs to one group at a time.
"""

import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Bool, Int32

from hisparse_jax.block_pool import BlockPool, allocate, free, init_pool
from hisparse_jax.status import NULL_BLOCK, Status


class BlockTables(struct.PyTreeNode):
    """Block tables of `B` request slots and the pool behind them; `NULL_BLOCK` where no block stands.

    pool: BlockPool         all GPU blocks, N of them.
    base: i32[Gb, B, P]     page to block, groups that are never tiered.
    resident: i32[G, B, P]  page to block, C4 groups; a page has a block in all of them or in none.
    num_pages: i32[B]       pages grown so far, 0..P.
    """

    pool: BlockPool
    base: Int32[Array, "Gb B P"]
    resident: Int32[Array, "G B P"]
    num_pages: Int32[Array, " B"]

    @property
    def growing_groups(self) -> int:
        """Blocks that one new page takes."""
        return self.base.shape[0] + self.resident.shape[0]


def init_tables(num_blocks: int, num_base: int, num_resident: int, batch: int, max_pages: int) -> BlockTables:
    """Empty tables of `batch` slots of `max_pages` pages over a fresh pool of `num_blocks`."""
    return BlockTables(
        pool=init_pool(num_blocks),
        base=jnp.full((num_base, batch, max_pages), NULL_BLOCK, jnp.int32),
        resident=jnp.full((num_resident, batch, max_pages), NULL_BLOCK, jnp.int32),
        num_pages=jnp.zeros(batch, jnp.int32),
    )


def append_pages(
    tables: BlockTables, new_pages: Int32[Array, " B"], *, max_new_pages: int
) -> tuple[BlockTables, Bool[Array, " B"], Int32[Array, " B"]]:
    """Gives request b the blocks of pages `num_pages[b] .. num_pages[b] + new_pages[b] - 1`, or none of them.

    Served in slot order: once one request is refused for want of blocks, so is every later one that wants any, however
    small. Returns `(tables, granted, status)`: `OUT_OF_BLOCKS` for those, `REFUSED` for a count that is negative, above
    `max_new_pages` or leads beyond page P, which holds nobody else up. A request that wants nothing is granted it.
    """
    if max_new_pages < 1:
        raise ValueError(f"{max_new_pages=} lets no request grow; give at least 1.")
    fits = fitting(tables, new_pages) & (new_pages <= max_new_pages)
    wanted = jnp.where(fits, new_pages, 0)
    running = jnp.cumsum(wanted * tables.growing_groups, dtype=jnp.int32)
    granted = fits & ((wanted == 0) | (running <= tables.pool.num_free))
    status = jnp.where(fits, jnp.where(granted, Status.OK, Status.OUT_OF_BLOCKS), Status.REFUSED).astype(jnp.int32)

    served = jnp.where(granted, wanted, 0)
    groups, batch = tables.growing_groups, new_pages.shape[0]
    pool, block_ids, _ = allocate(
        tables.pool, jnp.sum(served, dtype=jnp.int32) * groups, max_count=batch * max_new_pages * groups
    )
    pages, order = new_page_numbers(tables.num_pages, served, max_new_pages, tables.base.shape[2])
    by_page = block_ids.reshape(batch * max_new_pages, groups)[order]
    slots = jnp.arange(batch, dtype=jnp.int32)[:, None]
    by_group = jnp.moveaxis(by_page, 2, 0)
    num_base = tables.base.shape[0]
    tables = tables.replace(
        pool=pool,
        base=tables.base.at[:, slots, pages].set(by_group[:num_base], mode="drop"),
        resident=tables.resident.at[:, slots, pages].set(by_group[num_base:], mode="drop"),
        num_pages=tables.num_pages + served,
    )
    return tables, granted, status


def fitting(tables: BlockTables, new_pages: Int32[Array, " B"]) -> Bool[Array, " B"]:
    """Which requests can hold so many more pages in a table of P; also false where `new_pages` is negative."""
    return (new_pages >= 0) & (new_pages <= tables.base.shape[2] - tables.num_pages)


def new_page_numbers(
    num_pages: Int32[Array, " B"], served: Int32[Array, " B"], max_new_pages: int, max_pages: int
) -> tuple[Int32[Array, "B {max_new_pages}"], Int32[Array, "B {max_new_pages}"]]:
    """Page numbers of the pages that each request gains, and their place in the order slot by slot, page by page.

    Beyond a request's `served` pages the number is `max_pages`, which a scatter drops, and the place is 0.
    """
    lane = jnp.arange(max_new_pages, dtype=jnp.int32)[None, :]
    real = lane < served[:, None]
    before = jnp.cumsum(served, dtype=jnp.int32) - served
    return jnp.where(real, num_pages[:, None] + lane, max_pages), jnp.where(real, before[:, None] + lane, 0)


def blocks_wanted(tables: BlockTables, new_pages: Int32[Array, " B"]) -> Int32[Array, ""]:
    """GPU blocks with which `append_pages` serves every request that fits its table."""
    wanted = jnp.where(fitting(tables, new_pages), new_pages, 0)
    return jnp.sum(wanted, dtype=jnp.int32) * tables.growing_groups


def page_blocks(tables: BlockTables, slot: Int32[Array, ""]) -> Int32[Array, " M"]:
    """Blocks of one request, last page first, so that its first pages stay readable longest once freed; M = (Gb + G) P."""
    columns = jnp.concatenate([tables.base[:, slot], tables.resident[:, slot]])
    return columns[:, ::-1].T.reshape(-1)


def clear_slot(tables: BlockTables, slot: Int32[Array, ""]) -> BlockTables:
    """Empties the tables of `slot`, of none where it is B; what becomes of the blocks is the caller's business."""
    return tables.replace(
        base=tables.base.at[:, slot].set(NULL_BLOCK, mode="drop"),
        resident=tables.resident.at[:, slot].set(NULL_BLOCK, mode="drop"),
        num_pages=tables.num_pages.at[slot].set(0, mode="drop"),
    )


def free_request(tables: BlockTables, slot: Int32[Array, ""]) -> tuple[BlockTables, Int32[Array, ""]]:
    """Gives back every block of the request in `slot`, last page first. An empty slot changes nothing.

    Returns `(tables, status)`: `REFUSED` for a slot outside 0..B-1, with the tables unchanged.
    """
    batch = tables.num_pages.shape[0]
    real = (slot >= 0) & (slot < batch)
    pool, status = free(tables.pool, jnp.where(real, page_blocks(tables, jnp.where(real, slot, 0)), NULL_BLOCK))
    tables = clear_slot(tables.replace(pool=pool), jnp.where(real & (status == Status.OK), slot, batch))
    return tables, jnp.where(real, status, Status.REFUSED).astype(jnp.int32)
