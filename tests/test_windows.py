"""A page that does not stand in its block is refused by every mover of rows, whatever would carry it out."""

import jax.numpy as jnp
import pytest

from pallas_kernels.gather_rows import gather_rows
from pallas_kernels.store_entry import store_entry

PAGE = dict(value_bytes=8, scale_bytes=4, page_entries=4)
"""48 bytes."""


def bytes_of(block: int):
    return jnp.zeros((3, block), jnp.uint8)


@pytest.mark.parametrize(
    ("pool", "slab", "offset", "named"),
    [(40, 96, 0, "the pool, which has 40"), (48, 96, 49, "the destination, which has 96"), (48, 96, -1, "byte -1")],
)
def test_gather_rows_refuses_a_page_beyond_its_block(pool, slab, offset, named):
    rows = jnp.zeros(2, jnp.int32)
    with pytest.raises(ValueError, match=named):
        gather_rows(bytes_of(pool), bytes_of(slab), rows, rows, **PAGE, offset=offset, row_step=4)


def test_store_entry_refuses_a_page_beyond_its_block():
    with pytest.raises(ValueError, match="the pool, which has 47"):
        store_entry(bytes_of(47), jnp.zeros((2, 12), jnp.uint8), jnp.zeros(2, jnp.int32), **PAGE)
