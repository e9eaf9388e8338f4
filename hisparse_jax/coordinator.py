"""Who holds which block of which tier, and for how long: the ledger of the two tiers and its everyday transitions.

Rules that hold after every call: a page has a host block before it has a GPU block; a page stands on
the GPU in all resident groups or in none; a request owns its whole hot region before its first page is lost; its last two
pages are never lost. Giving pages up is in `reclaim.py` and `unpin.py`. No transition moves data: a plan says which bytes must
move.
"""

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Bool, Int32

from hisparse_jax.block_pool import BlockPool, allocate, free, init_pool
from hisparse_jax.block_tables import (
    BlockTables,
    append_pages,
    clear_slot,
    fitting,
    init_tables,
    new_page_numbers,
    page_blocks,
)
from hisparse_jax.status import NULL_BLOCK, Status


class Ledger(struct.PyTreeNode):
    """Pools, tables and transfers of `B` request slots of up to `P` pages; `G` resident groups, `HP` hot pages a request.

    A slot is taken from `admit` to `finish`: its page 0 has a host block. A transfer (one page copy to the host) leases the
    blocks it reads and writes: a reference each, which outlives the request. Ids of transfers are never used twice.

    tables: BlockTables           GPU pool (N blocks) and the tables of the growing groups.
    host: BlockPool               host pool, H blocks.
    host_table: i32[B, P]         page to host block; the whole prompt's from admission.
    hot: i32[G, B, HP]            blocks of the hot region; null until the request owns all of it.
    valid: bool[B, P]             the host copy is complete.
    transfer: i32[B, P]           id of the page's pending transfer; 0 none.
    unpinned: bool[B, P]          the table names the page's blocks but holds no reference: it is read in place until one of
                                  them is handed out.
    release_after: bool[B, P]     the page is promised: it leaves the GPU once its copy allows.
    transition_target: i32[B]     copies that the switch to the hot region was set to wait for; 0 no switch is running.
    next_transfer: i32[]          id of the next transfer; the first is 1.
    gpu_lease: i32[N]             transfer that reads the block; 0 none.
    host_lease: i32[H]            transfer that writes the block; 0 none.
    pages_lost: i32[B]            pages lost to the GPU since the slot's admission; kept over `finish`.
    tail_pages: int               last pages of a request, never given up: decode writes there and a step may be in flight.
    """

    tables: BlockTables
    host: BlockPool
    host_table: Int32[Array, "B P"]
    hot: Int32[Array, "G B HP"]
    valid: Bool[Array, "B P"]
    unpinned: Bool[Array, "B P"]
    transfer: Int32[Array, "B P"]
    release_after: Bool[Array, "B P"]
    transition_target: Int32[Array, " B"]
    next_transfer: Int32[Array, ""]
    gpu_lease: Int32[Array, " N"]
    host_lease: Int32[Array, " H"]
    pages_lost: Int32[Array, " B"]
    tail_pages: int = struct.field(pytree_node=False, default=2)

    @property
    def hot_cost(self) -> int:
        """Blocks of one request's hot region, all groups."""
        return self.hot.shape[0] * self.hot.shape[2]

    @property
    def has_hot(self) -> Bool[Array, " B"]:
        """Which requests own their hot region."""
        return self.hot[0, :, 0] != NULL_BLOCK

    @property
    def admitted(self) -> Bool[Array, " B"]:
        """Which slots are taken."""
        return self.host_table[:, 0] != NULL_BLOCK


def init_ledger(
    *,
    num_blocks: int,
    num_host_blocks: int,
    num_base: int,
    num_resident: int,
    hot_pages: int,
    batch: int,
    max_pages: int,
    tail_pages: int = 2,
) -> Ledger:
    """Empty slots over fresh pools; the counts of blocks include the null block."""
    for name, size in (("num_resident", num_resident), ("hot_pages", hot_pages), ("max_pages", max_pages)):
        if size < 1:
            raise ValueError(f"{name}={size}: two tiers need at least 1; use block tables alone where nothing is tiered.")
    per_page = jnp.zeros((batch, max_pages), jnp.int32)
    per_request = jnp.zeros(batch, jnp.int32)
    return Ledger(
        tables=init_tables(num_blocks, num_base, num_resident, batch, max_pages),
        host=init_pool(num_host_blocks),
        host_table=per_page + NULL_BLOCK,
        hot=jnp.full((num_resident, batch, hot_pages), NULL_BLOCK, jnp.int32),
        valid=per_page.astype(bool),
        unpinned=per_page.astype(bool),
        transfer=per_page,
        release_after=per_page.astype(bool),
        transition_target=per_request,
        next_transfer=jnp.int32(1),
        gpu_lease=jnp.zeros(num_blocks, jnp.int32),
        host_lease=jnp.zeros(num_host_blocks, jnp.int32),
        pages_lost=jnp.zeros(batch, jnp.int32),
        tail_pages=tail_pages,
    )


def look_up(ledger: Ledger, slot: Int32[Array, ""]) -> tuple[Bool[Array, ""], Int32[Array, ""]]:
    """Whether the slot is taken, and a slot to index with."""
    real = (slot >= 0) & (slot < ledger.admitted.shape[0])
    inside = jnp.where(real, slot, 0)
    return real & ledger.admitted[inside], inside


def is_vacant(ledger: Ledger, slot: Int32[Array, ""]) -> Bool[Array, ""]:
    """Whether the slot exists and nobody has it."""
    return (slot >= 0) & (slot < ledger.admitted.shape[0]) & ~look_up(ledger, slot)[0]


def admit(ledger: Ledger, slot: Int32[Array, ""], num_pages: Int32[Array, ""]) -> tuple[Ledger, Int32[Array, ""]]:
    """Takes a free slot and the host blocks of a whole prompt of `num_pages` pages, or nothing.

    Returns `(ledger, status)`: `OUT_OF_HOST_BLOCKS` and the request waits; `REFUSED` for a slot that is taken or outside
    0..B-1 and for a count outside 1..P. GPU blocks follow by `grow`. A host block is not clean: clear what the hot maps
    remember of the slot's `host_table` before its first use.
    """
    batch, max_pages = ledger.host_table.shape
    ok = is_vacant(ledger, slot) & (num_pages >= 1) & (num_pages <= max_pages)
    host, block_ids, got = allocate(ledger.host, jnp.where(ok, num_pages, 0), max_count=max_pages)
    target = jnp.where(ok & (got == Status.OK), slot, batch)
    ledger = ledger.replace(
        host=host,
        host_table=ledger.host_table.at[target].set(block_ids, mode="drop"),
        pages_lost=ledger.pages_lost.at[target].set(0, mode="drop"),
    )
    short = jnp.where(got == Status.OK, Status.OK, Status.OUT_OF_HOST_BLOCKS)
    return ledger, jnp.where(ok, short, Status.REFUSED).astype(jnp.int32)


def grow(
    ledger: Ledger, new_pages: Int32[Array, " B"], *, max_new_pages: int
) -> tuple[Ledger, Bool[Array, " B"], Int32[Array, " B"], Int32[Array, "B {max_new_pages}"]]:
    """Gives each request its next `new_pages[b]` pages: GPU blocks in every growing group, and a host block to each page
    that has none yet (the prompt's have theirs since `admit`). Per request all or none, in slot order.

    Nobody overtakes an earlier request that was refused for want of the same kind of block. A request that lacks host
    blocks holds up only those that want host blocks too: waiting for them keeps no GPU block from the others, whose end
    is what frees host blocks.

    Returns `(ledger, granted, status, new_host_blocks)`. Status: `OUT_OF_HOST_BLOCKS`, `OUT_OF_BLOCKS`, or `REFUSED` for a
    slot not admitted, a count outside 0..max_new_pages or a page beyond P; no such request changes. `new_host_blocks` are
    those taken now, of the new pages in order, else `NULL_BLOCK`: no hot map may name them any more when they are used.
    """
    batch, max_pages = ledger.host_table.shape
    slots = jnp.arange(batch, dtype=jnp.int32)[:, None]
    legal = fitting(ledger.tables, new_pages) & (new_pages <= max_new_pages) & (ledger.admitted | (new_pages == 0))
    wanted = jnp.where(legal, new_pages, 0)
    pages, _ = new_page_numbers(ledger.tables.num_pages, wanted, max_new_pages, max_pages)
    real = pages < max_pages
    bare = real & (ledger.host_table[slots, jnp.where(real, pages, 0)] == NULL_BLOCK)
    num_bare = jnp.sum(bare, axis=1, dtype=jnp.int32)
    host_ok = (num_bare == 0) | (jnp.cumsum(num_bare, dtype=jnp.int32) <= ledger.host.num_free)

    tables, granted, status = append_pages(ledger.tables, jnp.where(host_ok, wanted, 0), max_new_pages=max_new_pages)
    granted = granted & host_ok & legal
    status = jnp.where(legal, jnp.where(host_ok, status, Status.OUT_OF_HOST_BLOCKS), Status.REFUSED).astype(jnp.int32)

    taking = (bare & granted[:, None]).reshape(-1)
    host, block_ids, _ = allocate(ledger.host, jnp.sum(taking, dtype=jnp.int32), max_count=batch * max_new_pages)
    order = jnp.cumsum(taking, dtype=jnp.int32) - 1
    new_host = jnp.where(taking, block_ids[jnp.where(taking, order, 0)], NULL_BLOCK).reshape(batch, max_new_pages)
    target = jnp.where(new_host == NULL_BLOCK, max_pages, pages)
    before = ledger.tables.pool
    ledger = ledger.replace(tables=tables, host=host, host_table=ledger.host_table.at[slots, target].set(new_host, mode="drop"))
    return forget_reused(ledger, before), granted, status, new_host


def take_regions(ledger: Ledger, requests: Bool[Array, " B"]) -> Ledger:
    """Gives each of `requests` its whole hot region, lower slots first; the pool must have the blocks free."""
    return jax.lax.cond(jnp.any(requests), _take_regions, lambda ledger, _: ledger, ledger, requests)


def _take_regions(ledger: Ledger, requests: Bool[Array, " B"]) -> Ledger:
    groups, batch, hot_pages = ledger.hot.shape
    before = ledger.tables.pool
    rank = jnp.cumsum(requests, dtype=jnp.int32) - requests
    count = jnp.sum(requests, dtype=jnp.int32) * ledger.hot_cost
    pool, block_ids, _ = allocate(before, count, max_count=batch * ledger.hot_cost)
    regions = block_ids.reshape(batch, groups, hot_pages)[jnp.where(requests, rank, 0)].transpose(1, 0, 2)
    hot = jnp.where(requests[None, :, None], regions, ledger.hot)
    return forget_reused(ledger.replace(tables=ledger.tables.replace(pool=pool), hot=hot), before)


def forget_reused(ledger: Ledger, before: BlockPool) -> Ledger:
    """Loses each un-pinned page of which a block was handed out since `before`: null in all groups, for every owner.

    Due in the transition that takes GPU blocks, whatever for: what writes them comes after it.
    """
    handed_out = (before.references == 0) & (ledger.tables.pool.references > 0)

    def lose(ledger: Ledger) -> Ledger:
        resident = ledger.tables.resident
        reused = ledger.unpinned & jnp.any(handed_out[resident], axis=0)
        return ledger.replace(
            tables=ledger.tables.replace(resident=jnp.where(reused[None], NULL_BLOCK, resident)),
            unpinned=ledger.unpinned & ~reused,
            pages_lost=ledger.pages_lost + jnp.sum(reused, axis=1, dtype=jnp.int32),
        )

    return jax.lax.cond(jnp.any(handed_out) & jnp.any(ledger.unpinned), lose, lambda ledger: ledger, ledger)


def seal(ledger: Ledger, num_sealed: Int32[Array, " B"]) -> Ledger:
    """Marks pages 0 .. num_sealed[b] - 1 valid: every row of them was written through to the host.

    Counts past the pages that a request has are cut; a page with a pending transfer waits for that transfer.
    """
    page = jnp.arange(ledger.valid.shape[1], dtype=jnp.int32)[None, :]
    sealed = page < jnp.minimum(num_sealed, ledger.tables.num_pages)[:, None]
    return ledger.replace(valid=ledger.valid | (sealed & (ledger.transfer == 0)))


def finish(ledger: Ledger, slot: Int32[Array, ""]) -> tuple[Ledger, Int32[Array, ""]]:
    """Ends the request in `slot`: its blocks go back to both pools, last page first, the hot region after them.

    Blocks under lease of a transfer in flight stay out of the free queues until its commit; those of un-pinned pages have been
    in theirs and keep their place. Returns `(ledger, status)`: `REFUSED`, and nothing changed, for a slot that is not taken or
    outside 0..B-1.
    """
    batch = ledger.host_table.shape[0]
    taken, inside = look_up(ledger, slot)
    pinned = jnp.where(ledger.unpinned[None], NULL_BLOCK, ledger.tables.resident)
    pages = page_blocks(ledger.tables.replace(resident=pinned), inside)
    held = jnp.concatenate([pages, ledger.hot[:, inside].reshape(-1)])
    pool, status = free(ledger.tables.pool, jnp.where(taken, held, NULL_BLOCK))
    host, host_status = free(ledger.host, jnp.where(taken, ledger.host_table[inside, ::-1], NULL_BLOCK))
    status = jnp.where(status == Status.OK, host_status, status)
    ok = taken & (status == Status.OK)
    target = jnp.where(ok, slot, batch)
    pool, host = jax.tree.map(lambda after, before: jnp.where(ok, after, before), (pool, host), (ledger.tables.pool, ledger.host))
    ledger = ledger.replace(
        tables=clear_slot(ledger.tables.replace(pool=pool), target),
        host=host,
        host_table=ledger.host_table.at[target].set(NULL_BLOCK, mode="drop"),
        hot=ledger.hot.at[:, target].set(NULL_BLOCK, mode="drop"),
        valid=ledger.valid.at[target].set(False, mode="drop"),
        unpinned=ledger.unpinned.at[target].set(False, mode="drop"),
        transfer=ledger.transfer.at[target].set(0, mode="drop"),
        release_after=ledger.release_after.at[target].set(False, mode="drop"),
        transition_target=ledger.transition_target.at[target].set(0, mode="drop"),
    )
    return ledger, jnp.where(taken, status, Status.REFUSED).astype(jnp.int32)
