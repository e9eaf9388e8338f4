"""Tiered equals resident, bit for bit, while pages are lost and the hot buffer thrashes; the bytes behind it are equal too.

Each run holds requests of unlike lengths in unlike slots, starts from memory full of NaN, and is compared with one resident
run that has other slots, one-piece prompts and nothing lost.
"""

import dataclasses
import functools
import itertools

import jax.numpy as jnp
import numpy as np
import pytest
from runs import (
    C4_ONLY,
    DEMO,
    TINY,
    Job,
    Played,
    assert_same,
    build,
    play,
    poisoned,
    resident_rows,
    rows_of_page,
    text,
    tight_layout,
)

from hisparse_jax import decode
from hisparse_jax.generation import resident_layout
from hisparse_jax.layout import CacheLayout
from hisparse_jax.status import Status
from hisparse_jax.steps import traces

STEPS = 40
LONG, MIDDLE, BRIEF = text(1_789), text(1_014), text(515)
"""7, 4 and 3 pages; the first two grow by a page in decode. The long prompt is several times the blocks left to C4 pages."""
PAGES = (5, 3, 8)
UNEVEN = (1, 2, 3, 5, 250, 256, 7, 100)
FRESH = text(3, seed=5)
"""Too short for an entry: its first one pools what an earlier request of the slot may have left."""

PAIRWISE = {
    "f32": [("searched", "write_through", "base"), ("base", "spill", "eager"), ("searched", "write_through", "unpin")],
    "bf16": [("searched", "spill", "base"), ("base", "write_through", "eager"), ("base", "write_through", "unpin")],
    "fp8": [("searched", "write_through", "eager"), ("base", "spill", "base"), ("base", "spill", "unpin")],
}
"""Rows to (rule, backup, reclaim): every pair of two choices stands here once at least. The third of each shares what does not
depend on its reclaim, prefill above all, with another: compiled once."""

RECLAIM = ("base", "eager", "unpin")

MODELS = {"f32": C4_ONLY, "bf16": C4_ONLY, "fp8": DEMO}


def layout_of(config, rows: str, rule: str, backup: str, reclaim: str, **options) -> CacheLayout:
    return tight_layout(
        config, PAGES, slack=2, max_model_len=8_192, max_requests=4, num_hot_slots=64, stretch_steps=16, rows=rows, rule=rule,
        backup=backup, reclaim=reclaim, **options,
    )  # fmt: skip


def jobs(slots: tuple[int, int, int], *, uneven: bool) -> list[Job]:
    a, b, c = slots
    return [
        Job(a, MIDDLE, STEPS, seed=7, temperature=0.8),
        Job(b, BRIEF, STEPS - 9, chunks=(5, 6) if uneven else None),
        Job(c, LONG, STEPS, chunks=UNEVEN if uneven else None),
    ]


@functools.cache
def reference(config, rows: str, options: tuple = ()) -> tuple[Played, Played, CacheLayout]:
    """The resident run, and a fresh one of the 3-token prompt."""
    model, layout = (
        build(config, rows),
        resident_layout(layout_of(config, rows, "searched", "write_through", "base", **dict(options))),
    )
    played = play("resident", model, layout, jobs((0, 1, 2), uneven=False))
    return played, play("resident", model, layout, [Job(1, FRESH, 20)]), layout


def check(config, rows: str, rule: str, backup: str, reclaim: str, **options) -> None:
    model, layout = build(config, rows), layout_of(config, rows, rule, backup, reclaim, **options)
    resident, fresh, resident_plan = reference(config, rows, tuple(options.items()))
    assert len(layout.resident_groups[0]) >= 2, "one layer a group proves nothing about offsets"
    before = traces.copy()
    todo = jobs((2, 0, 3), uneven=True)
    tiered = play("tiered", model, layout, todo, poisoned(decode.init_state(layout)))
    assert_same(tiered, resident)
    check_losses(tiered)
    check_counts(tiered, layout, todo)
    check_bytes(tiered, layout, todo)
    check_rows_of_both(tiered, layout, todo, resident, resident_plan)

    state = finish_all(tiered.state, layout, [job.slot for job in todo])
    again = play("tiered", model, layout, [Job(3, FRESH, 20)], state)  # E5: the slot of the long one
    assert_same(again, fresh)
    state = finish_all(again.state, layout, [3])
    alone = play("tiered", model, layout, [Job(1, MIDDLE, STEPS, chunks=(255, 1, 4), seed=7, temperature=0.8)], state)
    assert alone.logits[0].tobytes() == resident.logits[0].tobytes()
    programs = {name: count - before[name] for name, count in traces.items() if name.startswith("decode.")}
    assert set(programs.values()) <= {0, 1} and programs["decode.decode_steps"] == 1 == programs["decode.prefill_chunk"]


def check_losses(run: Played) -> None:
    assert sum(run.lost_in_prefill) > 0, "no page was lost in prefill"
    assert sum(run.lost) > sum(run.lost_in_prefill), "no page was lost in mid-decode"
    assert int(run.state.traffic.staged_rows.sum()) > 0, "prefill read nothing that was lost"
    assert (run.counts[:, :, 3].sum(axis=1) > 0).all(), f"a C4 layer missed nothing: {run.counts[:, :, 3].sum(axis=1)}"
    assert not np.asarray(run.state.homeless).any()


def check_counts(run: Played, layout: CacheLayout, todo: list[Job]) -> None:
    """resident + newest + hot hits + misses + invalid = selected, per layer and request; bytes follow the plan."""
    steps = np.zeros(layout.cache.max_requests, np.int64)
    for job in todo:
        steps[job.slot] = job.steps
    expected = np.broadcast_to(steps * layout.model.index_topk, run.counts.shape[:2])
    np.testing.assert_array_equal(run.counts.sum(axis=-1), expected)
    np.testing.assert_array_equal(run.counts[:, :, 3].sum(axis=0), np.asarray(run.state.traffic.swapped_rows))


def check_bytes(run: Played, layout: CacheLayout, todo: list[Job]) -> None:
    """Every backed-up row: host bytes = resident bytes = hot bytes. Maps name own rows, once; LRU orders are permutations.

    A follower's slots are those of its leader's map, its bytes its own (A9).
    """
    state, ledger, entries = run.state, run.state.ledger, layout.page_entries
    slab, host_table, hot = np.asarray(state.slab), np.asarray(ledger.host_table), np.asarray(ledger.hot)
    resident, valid = np.asarray(ledger.tables.resident), np.asarray(ledger.valid)
    compared = hot_rows = 0
    for number, layer in enumerate(layout.model.c4_layers):
        pool, group = np.asarray(state.pools[number]), layout.resident_place(layer).group
        hot_map = state.hot_maps[layout.model.c4_layers.index(layout.model.leader_of(layer))]
        slot_host, lru = np.asarray(hot_map.slot_host), np.asarray(hot_map.lru)
        assert (np.sort(lru, axis=-1) == np.arange(layout.num_hot_slots)).all()
        for job in todo:
            request, num_entries = job.slot, (len(job.prompt) + job.steps) // 4
            for page in range(-(-num_entries // entries)):
                block = resident[group, request, page]
                assert block or valid[request, page], "a page stands in no tier"
                if block and (valid[request, page] or layout.cache.backup == "write_through"):
                    rows = min(num_entries - page * entries, entries)
                    host = rows_of_page(pool[host_table[request, page]], layout)
                    assert host[:rows].tobytes() == resident_rows(slab, block, layer, layout)[:rows].tobytes(), (
                        layer,
                        job.slot,
                        page,
                    )
                    compared += rows
            held = np.flatnonzero(slot_host[request] >= 0)
            named = slot_host[request, held]
            assert len(set(named)) == len(named) and set(named // entries) <= set(host_table[request][host_table[request] > 0])
            for slot, row in zip(held, named, strict=True):
                here = resident_rows(slab, hot[group, request, slot // entries], layer, layout)[slot % entries]
                assert here.tobytes() == rows_of_page(pool[row // entries], layout)[row % entries].tobytes(), (
                    layer,
                    request,
                    slot,
                )
            hot_rows += len(held)
    assert hot_rows > 0 and (compared > 0 or layout.cache.backup == "spill")


def check_rows_of_both(run: Played, layout: CacheLayout, todo: list[Job], resident: Played, plan: CacheLayout) -> None:
    """B3, B5: each layer's rows, in whatever tier, are those of the resident run."""
    slab, other = np.asarray(run.state.slab), np.asarray(resident.state.slab)
    tables, other_tables = np.asarray(run.state.ledger.tables.resident), np.asarray(resident.state.tables.resident)
    host = np.asarray(run.state.ledger.host_table)
    for number, layer in enumerate(layout.model.c4_layers):
        pool, group, twin_group = (
            np.asarray(run.state.pools[number]),
            layout.resident_place(layer).group,
            plan.resident_place(layer).group,
        )
        for twin_slot, job in enumerate(todo):
            for page in range((len(job.prompt) + job.steps) // plan.page_tokens):
                expected = resident_rows(other, other_tables[twin_group, twin_slot, page], layer, plan)
                block = tables[group, job.slot, page]
                mine = resident_rows(slab, block, layer, layout) if block else rows_of_page(pool[host[job.slot, page]], layout)
                assert mine.tobytes() == expected.tobytes(), (layer, job.slot, page)


def finish_all(state, layout: CacheLayout, slots: list[int]):
    """Ends the requests: every block is back and every map empty (D10, C4)."""
    for slot in slots:
        state, status = decode.finish(state, jnp.int32(slot))
        assert Status(int(status)) is Status.OK
    ledger = state.ledger
    assert int(ledger.tables.pool.num_free) == layout.gpu_blocks - 1 and int(ledger.host.num_free) == layout.host_blocks - 1
    tables = (ledger.tables.base, ledger.tables.resident, ledger.hot, ledger.host_table, ledger.gpu_lease, ledger.host_lease)
    assert not any(np.asarray(table).any() for table in tables)
    assert all((np.asarray(m.slot_host) == -1).all() for m in state.hot_maps)
    return state


@pytest.mark.parametrize(
    ("rows", "choices"),
    [
        pytest.param("fp8", PAIRWISE["fp8"][:2], id="fp8"),
        pytest.param("fp8", PAIRWISE["fp8"][2:], id="fp8-unpin", marks=pytest.mark.slow),
        pytest.param("bf16", PAIRWISE["bf16"][:2], id="bf16"),
        pytest.param("bf16", PAIRWISE["bf16"][2:], id="bf16-unpin", marks=pytest.mark.slow),
        pytest.param("f32", PAIRWISE["f32"][:2], id="f32"),
        pytest.param("f32", PAIRWISE["f32"][2:], id="f32-unpin", marks=pytest.mark.slow),
    ],
)
def test_tiered_equals_resident(rows, choices):
    for rule, backup, reclaim in choices:
        check(MODELS[rows], rows, rule, backup, reclaim)


@pytest.mark.xdist_group("tiny")
def test_metrics_do_not_touch_the_logits_nor_does_any_slot_or_chunking():
    """A tiny model, quick enough to vary more: counters off, other slots, other chunks, other companions. Its second layer
    follows the first one's selection and plan, and reads its own bytes (A9)."""
    config = dataclasses.replace(TINY, num_hidden_layers=4, compress_ratios=(4, 4, 128, 4), index_leaders=(0, 3))
    model = build(config, "f32")
    layout = tight_layout(
        config, (6, 5), slack=2, max_model_len=2_048, max_requests=4, num_hot_slots=16, rows="f32", chunk_tokens=64,
        reclaim="unpin",
    )  # fmt: skip
    one, two = text(1_270, vocab=128), text(1_101, vocab=128)

    def run(*todo: Job, **options) -> Played:
        return play("tiered", model, layout, todo, poisoned(decode.init_state(layout)), **options)

    base = run(Job(0, one, 40, temperature=1.0, seed=4), Job(1, two, 40))
    silent = run(Job(0, one, 40, temperature=1.0, seed=4), Job(1, two, 40), metrics=False)
    assert_same(silent, base)
    assert base.counts[:, :2, 3].all() and (base.counts[0] == base.counts[1]).all() and not silent.counts.any()
    moved = run(Job(3, two, 40, chunks=(63, 2, 1, 64, 5)), Job(2, one, 40, chunks=(1,) * 9, temperature=1.0, seed=4))
    for i in (0, 1):
        assert moved.logits[1 - i].tobytes() == base.logits[i].tobytes()
        assert moved.tokens[1 - i].tolist() == base.tokens[i].tolist()
    alone = run(Job(2, one, 40, temperature=1.0, seed=4))
    assert alone.logits[0].tobytes() == base.logits[0].tobytes()
    twin = play("resident", model, resident_layout(layout), [Job(1, one, 40, temperature=1.0, seed=4), Job(3, two, 40)])
    assert_same(base, twin)


FORMATS = [("f32", {}), ("bf16", {}), ("fp8", {"index_keys": "fp8"}), ("fp8", {"index_keys": "fp4"})]


@pytest.mark.slow
@pytest.mark.timeout(3_600)
@pytest.mark.parametrize("hadamard", [False, True])
@pytest.mark.parametrize(
    ("rows", "keys"), FORMATS, ids=lambda value: value if isinstance(value, str) else "-".join(value.values())
)
@pytest.mark.parametrize(
    ("rule", "backup", "reclaim"), list(itertools.product(("searched", "base"), ("write_through", "spill"), RECLAIM))
)
def test_full_product(rule, backup, reclaim, rows, keys, hadamard):
    check(DEMO, rows, rule, backup, reclaim, hadamard=hadamard, **keys)
