"""Room for a stretch where one plan's copies do not make enough of it."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ledger_model import QUICK
from parking_runs import LAYOUT, PAGE, SMALL, Engine
from runs import text

from hisparse_jax import coordinator, decode, room
from hisparse_jax.layout import plan_layout
from hisparse_jax.status import Status

pytestmark = pytest.mark.xdist_group("parking")

PAGES = 7
grow = jax.jit(coordinator.grow, static_argnames="max_new_pages", compiler_options=QUICK)
make_room = jax.jit(room.make_room, static_argnames=("layout", "max_new_pages"), donate_argnames="state", compiler_options=QUICK)


@pytest.mark.parametrize("reclaim", ["base", pytest.param("eager", marks=pytest.mark.slow)])
def test_several_requests_that_spill_in_one_stretch_find_room(reclaim):
    """Four requests of seven pages fill the slab and none has a copy; each grows. One plan copies eight pages: the second
    request would get three of the five that it needs to give, so one plan alone leaves the stretch short."""
    cache = dataclasses.replace(LAYOUT.cache, backup="spill", reclaim=reclaim, host_blocks=4 * 8 + 3)
    blocks = 1 + 4 * PAGES * LAYOUT.growing_groups
    engine = Engine(plan_layout(SMALL, dataclasses.replace(cache, gpu_blocks=blocks)))
    layout = engine.layout
    assert layout.max_pages == room.spill_budget(layout) == 8 < 4 * (PAGES - 2)
    for slot in range(4):
        engine.admit(str(slot), slot, text(PAGES * PAGE - 1, vocab=128), 100)
    state = engine.state
    ledger, granted, *_ = grow(state.ledger, jnp.full(4, PAGES, jnp.int32), max_new_pages=PAGES)
    assert granted.all() and int(ledger.tables.pool.num_free) == 0
    slab = np.random.default_rng(0).integers(0, 256, state.slab.shape, np.uint8)
    before, running = np.asarray(ledger.tables.resident), state.sequences.replace(running=jnp.ones(4, bool))
    state = state.replace(slab=jax.device_put(slab, state.slab.sharding), ledger=ledger, sequences=running)

    state, granted, status = make_room(state, jnp.ones(4, jnp.int32), layout, max_new_pages=1)
    assert granted.all() and not np.asarray(status).any(), Status(int(np.max(status)))
    engine.state = state
    engine.check()
    lost = np.asarray(state.ledger.pages_lost)
    assert lost.sum() > room.spill_budget(layout) and int(state.traffic.copied_pages.sum()) == 2 * lost.sum()
    for slot, page in zip(*np.nonzero((before[0] > 0) & (np.asarray(state.ledger.tables.resident)[0] == 0))):
        home = int(state.ledger.host_table[slot, page])
        for pool, layer in zip(state.pools, SMALL.c4_layers, strict=True):
            place = layout.resident_place(layer)
            kept = slab[before[place.group, slot, page], place.offset : place.offset + place.page_bytes]
            np.testing.assert_array_equal(np.asarray(pool)[home], kept)
    for slot in range(4):
        engine.state, ended = decode.finish(engine.state, jnp.int32(slot))
        assert int(ended) == Status.OK
    engine.check_empty()
