"""What a parked request takes on the host, by the plan and by the byte."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ledger_model import QUICK
from parking_runs import LAYOUT, ON_A_GPU, SMALL, values
from runs import DEMO, text, tight_layout

from hisparse_jax import capacity, coordinator, decode
from hisparse_jax.config import CacheConfig, ConfigError, preset
from hisparse_jax.host_memory import HostMemoryError
from hisparse_jax.layout import LayoutError, plan_layout
from hisparse_jax.parking import init_parking, preempt, resume
from hisparse_jax.state import TieredState
from hisparse_jax.status import Status
from scripts import plan

grow = jax.jit(coordinator.grow, static_argnames="max_new_pages", compiler_options=QUICK)


pytestmark = pytest.mark.xdist_group("parking")


@pytest.mark.parametrize("machine", ["any", ON_A_GPU])
def test_bytes_of_every_kind_come_back_while_others_spill_lazily(machine):
    """fp8 pages, two base and several resident groups. No model runs: caches are noise."""
    config = dataclasses.replace(DEMO, num_hidden_layers=6, compress_ratios=(4, 4, 128, 4, 4, 128))
    layout = tight_layout(
        config, (6, 6), slack=1, max_model_len=2_048, rule="base", backup="spill", parked_requests=1
    )  # fmt: skip
    groups, page, num_pages, length = layout.num_resident_groups, layout.page_bytes, 6, 5 * layout.page_tokens + 7
    assert (layout.num_base_groups, layout.cache.rows) == (2, "fp8") and groups > 1
    rng = np.random.default_rng(0)

    def noise(x):
        return jax.device_put(rng.integers(0, 256, x.nbytes, np.uint8).view(x.dtype).reshape(x.shape), x.sharding)

    def running(state: TieredState, slot: int) -> TieredState:
        """The state with a request of six pages in `slot`, and noise on the slab."""
        state = decode.admit(state, slot, text(length), layout=layout, max_new_tokens=20)
        new = jnp.zeros(4, jnp.int32).at[slot].set(num_pages)
        ledger, granted, *_ = grow(state.ledger, new, max_new_pages=num_pages)
        assert bool(granted[slot])
        sequences = state.sequences
        sequences = sequences.replace(length=sequences.length.at[slot].set(length), running=sequences.running.at[slot].set(True))
        return state.replace(ledger=ledger, slab=noise(state.slab), sequences=sequences)

    def on_gpu(state: TieredState, slot: int) -> tuple[list, dict]:
        """Pages of each base group in order; C4 pages by layer and page number."""
        slab, tables = np.array(state.slab), values(state.ledger.tables)
        base = []
        for group, places in enumerate(layout.base_groups):
            size = sum(place.page_bytes for place in places)
            base.append([slab[block, :size].tobytes() for block in tables.base[group, slot, :num_pages]])
        c4 = {}
        for layer in layout.model.c4_layers:
            place = layout.resident_place(layer)
            for number, block in enumerate(tables.resident[place.group, slot]):
                if block:
                    c4[layer, number] = slab[block, place.offset : place.offset + page].tobytes()
        return base, c4

    def on_host(state: TieredState, table: np.ndarray, pages) -> dict:
        pools = dict(zip(layout.model.c4_layers, values(state.pools)))
        return {(layer, number): pools[layer][table[number]].tobytes() for layer, number in pages}

    def dense(state: TieredState, slot: int) -> list[bytes]:
        return [np.array(x)[slot].tobytes() for x in jax.tree.leaves(state.layers)]

    parking, state = init_parking(layout), running(decode.init_state(layout), 0)
    state = state.replace(layers=jax.tree.map(noise, state.layers))
    (base, c4), layers = on_gpu(state, 0), dense(state, 0)
    state, parking, place, status = preempt(state, parking, 0, layout=layout)
    assert (place, status, len(c4)) == (0, Status.OK, 4 * num_pages) and place is not None
    assert on_host(state, np.array(parking.ledger.host_table)[0], c4) == c4
    assert int(parking.traffic.copied_pages[0]) == len(c4)

    state = running(state, 1)
    state = state.replace(layers=jax.tree.map(noise, state.layers))
    other_base, other = on_gpu(state, 1)
    state, parking, status = resume(state, parking, 0, 3, layout=layout)
    assert status is Status.OK and int(state.sequences.length[3]) == length
    back, newest = on_gpu(state, 3)
    assert back == base and dense(state, 3) == layers
    assert newest == {key: c4[key] for key in c4 if key[1] >= num_pages - 2}
    assert on_host(state, np.array(state.ledger.host_table)[3], c4) == c4

    left_base, left = on_gpu(state, 1)
    lost = {key: other[key] for key in other if key not in left}
    assert left_base == other_base and left == {key: other[key] for key in left}
    assert len(lost) == 4 * int(state.ledger.pages_lost[1]) == int(state.traffic.copied_pages[1]) > 0
    assert on_host(state, np.array(state.ledger.host_table)[1], lost) == lost


@pytest.mark.parametrize(
    ("model", "index", "c128", "page", "snapshot_mib", "at_128_mib"),
    [("v4-flash", 693, 91.25, 216_000, 14.7, 4.7), ("v4-pro", 990, 141.4, 312_768, 22.2, 6.7)],
)
@pytest.mark.parametrize("rule", ["searched", "base"])
def test_bytes_of_a_parked_request(model, rule, index, c128, page, snapshot_mib, at_128_mib):
    cache = CacheConfig(
        max_model_len=131_072, gpu_pool_bytes=40 * 2**30, host_pool_bytes=2**31, parked_requests=4, parked_pages=600, rule=rule
    )
    layout = plan_layout(preset(model), cache)
    c4, c128_layers = len(layout.model.c4_layers), len(layout.model.c128_layers)
    assert c4 * layout.index.row_bytes / 4 == index
    assert round(c128_layers * layout.entry.row_bytes / 128, 1) == round(c128, 1)
    assert layout.base_page == page >= 256 * (index + c128)  # the rest pads pages to 576 bytes
    fixed = capacity.fixed_bytes(layout.model, cache)
    assert layout.snapshot_bytes == fixed.total and round(fixed.total / 2**20, 1) == snapshot_mib
    assert round((fixed.total - fixed.c128_states) / 2**20, 1) == at_128_mib
    assert layout.parking_bytes == 601 * page + 5 * layout.snapshot_bytes
    everything = dataclasses.replace(cache, parked_pages=None)
    assert plan_layout(preset(model), everything).parking_blocks == 1 + 4 * 512


def test_the_parking_holds_what_the_plan_says():
    parking, state = init_parking(LAYOUT), decode.init_state(LAYOUT)
    assert sum(pool.nbytes for pool in (*parking.pages, parking.snapshots)) == LAYOUT.parking_bytes
    assert {pool.sharding.memory_kind for pool in (*parking.pages, parking.snapshots)} == {"pinned_host"}
    per_slot = sum(x.nbytes for x in jax.tree.leaves(state.layers)) // LAYOUT.cache.max_requests
    assert per_slot == LAYOUT.snapshot_bytes


def test_parking_counts_in_the_host_budget_and_bad_plans_are_refused(monkeypatch):
    def options(**changes):
        return plan_layout(SMALL, dataclasses.replace(LAYOUT.cache, **changes))

    limit = LAYOUT.host_bytes + LAYOUT.parking_bytes
    monkeypatch.setattr("hisparse_jax.host_memory.host_memory_limits", lambda **_: {"MemAvailable": limit})
    with pytest.raises(HostMemoryError, match="the host pools need"):
        decode.init_state(LAYOUT)  # 95 % are usable
    none = options(parked_requests=0)
    assert none.parking_bytes == none.parking_blocks == 0 and none.host_bytes < 0.95 * limit
    decode.init_state(none)
    with pytest.raises(ConfigError, match="parked_requests=0 .*raise parked_requests"):
        init_parking(none)
    assert plan_layout(SMALL, LAYOUT.cache, tiered=False).parking_bytes == 0
    with pytest.raises(ConfigError, match="parked_requests=-1 must not be negative"):
        options(parked_requests=-1)
    with pytest.raises(ConfigError, match="parked_pages=9 has no effect"):
        options(parked_requests=0, parked_pages=9)
    with pytest.raises(ConfigError, match="cached_prefixes=-1 must not be negative"):
        options(cached_prefixes=-1)
    with pytest.raises(ConfigError, match="cached_pages=9 has no effect without cached_prefixes"):
        options(cached_pages=9)
    shared = options(cached_prefixes=5, cached_pages=9)
    assert shared.parking_places == 3 + 5 and shared.parking_blocks == LAYOUT.parking_blocks + 9
    assert shared.parking_bytes == LAYOUT.parking_bytes + 9 * shared.base_page + 5 * shared.snapshot_bytes
    alone = options(parked_requests=0, cached_prefixes=2)
    assert alone.parking_blocks == 1 + 2 * alone.max_pages and alone.parking_places == 2
    with pytest.raises(ConfigError, match="parked_pages=0 must be positive"):
        options(parked_pages=0)
    with pytest.raises(LayoutError, match="parked_pages=7 holds no request of max_model_len=1024, which has 8 pages"):
        options(parked_pages=7)


def test_the_plan_is_printed(capsys):
    plan.main(plan.Args(parked_requests=4, parked_pages=2_000))
    out, err = capsys.readouterr()
    expected = 2_001 * 216_000 + 5 * 15_420_416
    assert json.loads(out.splitlines()[-1])["parking_bytes"] == expected and f"{expected:,}" in err
