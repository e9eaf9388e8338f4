"""The recommended life cycle at Flash's geometry (base layout): who is un-pinned when, what is lost, and what stays readable."""

import functools
import json

import chex
import jax.numpy as jnp
import numpy as np
import pytest
from ledger_model import recount
from runs import run_script
from test_coordinator import (
    BATCH,
    GROUPS,
    GROWING,
    HOT_COST,
    PAGES,
    SIZES,
    _take,
    admit,
    cells,
    completed,
    enqueued,
    finish,
    grow,
    jit,
    leave_free,
    num_free,
    reclaimed,
    resident,
    with_requests,
)

from hisparse_jax import coordinator, spill, unpin
from hisparse_jax.config import CacheConfig, ConfigError, preset
from hisparse_jax.coordinator import Ledger
from hisparse_jax.groups import LayoutError
from hisparse_jax.layout import plan_layout
from hisparse_jax.status import NULL_BLOCK, Status

_unpin, _take_back = jit(unpin.unpin_clean), jit(unpin.take_back)
_copies = jit(unpin.plan_copies, static_argnames="max_pages")
forget_reused = jit(coordinator.forget_reused)
ALWAYS, NEVER = 1_000, 0
NO_WINDOW = PAGES + 1


def unpinned(ledger: Ledger, slot: int) -> list[int]:
    return np.flatnonzero(np.asarray(ledger.unpinned)[slot]).tolist()


def unpin_clean(ledger: Ledger, *, needed: int = 0, watermark: int = ALWAYS, window: int = NO_WINDOW) -> Ledger:
    return _unpin(ledger, jnp.int32(needed), jnp.int32(watermark), jnp.int32(window))


def hand_out(ledger: Ledger, count: int) -> tuple[Ledger, list[int]]:
    """Somebody takes so many GPU blocks: the ledger without the pages that named them, and the blocks."""
    before = ledger.tables.pool
    pool, blocks, status = _take(before, jnp.int32(count), max_count=SIZES["num_blocks"])
    assert int(status) == Status.OK
    ledger = ledger.replace(tables=ledger.tables.replace(pool=pool))
    return forget_reused(ledger, before), np.asarray(blocks)[:count].tolist()


def test_clean_pages_are_free_and_read_in_place():
    before = with_requests(40)
    ledger = unpin_clean(before)
    assert num_free(ledger) - num_free(before) == 38 * GROUPS - HOT_COST
    assert bool(ledger.has_hot[0]) and unpinned(ledger, 0) == list(range(38))
    assert resident(ledger, 0) == list(range(40)), "the region came from blocks that were free before"
    chex.assert_trees_all_equal(ledger.tables.resident, before.tables.resident)
    assert not np.asarray(ledger.pages_lost).any()
    recount(ledger, {})
    chex.assert_trees_all_equal(unpin_clean(ledger), ledger)


def test_d5_with_no_free_block_the_region_comes_from_the_tail_of_what_was_un_pinned():
    ledger = unpin_clean(leave_free(with_requests(40), 0))
    assert bool(ledger.has_hot[0]) and unpinned(ledger, 0) == list(range(22)), "96 blocks of 16 pages, last pages first"
    assert resident(ledger, 0) == [*range(22), 38, 39] and int(ledger.pages_lost[0]) == 16
    assert num_free(ledger) == 22 * GROUPS


@pytest.mark.parametrize(("candidates", "converts"), [(16, False), (17, True)])
def test_f6_no_hot_region_without_gain(candidates, converts):
    before = with_requests(candidates + 2)
    ledger = unpin_clean(before)
    assert bool(ledger.has_hot[0]) == converts
    if not converts:
        chex.assert_trees_all_equal(ledger, before)


def test_the_watermark_counts_what_growth_will_leave():
    ledger = leave_free(with_requests(40), 120)
    for needed, watermark, converts in ((0, 120, False), (0, 121, True), (8, 112, False), (8, 113, True), (121, NEVER, True)):
        assert bool(unpin_clean(ledger, needed=needed, watermark=watermark).has_hot[0]) == converts, (needed, watermark)


def test_a_full_admission_window_is_reason_enough():
    ledger = with_requests(40, 30)
    assert unpin_clean(ledger, watermark=NEVER, window=40).has_hot.tolist() == [True, False, False]
    assert unpin_clean(ledger, watermark=NEVER, window=41).has_hot.tolist() == [False] * BATCH


def test_dirty_pages_and_pages_under_copy_stay_until_they_are_clean():
    before = with_requests(40, sealed=False)
    chex.assert_trees_all_equal(unpin_clean(before), before)
    ledger, plan = _copies(before, jnp.int32(0), jnp.int32(ALWAYS), jnp.int32(NO_WINDOW), max_pages=PAGES)
    assert plan.page[: int(plan.count)].tolist() == list(range(38))
    assert not bool(unpin_clean(ledger).has_hot[0]), "no page is clean before its copy is committed"
    ledger = completed(enqueued(ledger, plan), plan)
    assert unpinned(unpin_clean(ledger), 0) == list(range(38))
    _, none = _copies(before, jnp.int32(0), jnp.int32(NEVER), jnp.int32(NO_WINDOW), max_pages=PAGES)
    assert int(none.count) == 0, "nobody needs to be un-pinned, so nothing is copied"


def test_a_reused_block_is_never_read_through_an_old_entry():
    """Whatever is handed out, however often it comes back: no table but the new owner's names it."""
    ledger = unpin_clean(leave_free(with_requests(40), 0))
    for count in (1, 5, 7, 30):
        ledger, blocks = hand_out(ledger, count)
        assert not np.isin(np.asarray(ledger.tables.resident), blocks).any()
        kept = np.asarray(ledger.tables.resident)[:, np.asarray(ledger.unpinned)]
        assert (kept != NULL_BLOCK).all() and not np.asarray(ledger.tables.pool.references)[kept].any()
    assert unpinned(ledger, 0) == list(range(22 - 8)), "43 blocks are seven pages and one block of an eighth"
    assert resident(ledger, 0) == [*unpinned(ledger, 0), 38, 39] and int(ledger.pages_lost[0]) == 16 + 8


def test_every_owner_loses_a_shared_page():
    ledger = unpin_clean(with_requests(40))
    tables = ledger.tables.replace(resident=ledger.tables.resident.at[:, 1].set(ledger.tables.resident[:, 0]))
    ledger = ledger.replace(tables=tables, unpinned=ledger.unpinned.at[1].set(ledger.unpinned[0]))
    ledger, _ = hand_out(leave_free(ledger, 38 * GROUPS), 2)
    assert unpinned(ledger, 0) == unpinned(ledger, 1) == list(range(37))
    assert ledger.pages_lost.tolist() == [1, 1, 0] and not np.asarray(ledger.tables.resident)[:, :2, 37].any()


def test_a_page_is_taken_back_while_it_is_there():
    ledger, _ = hand_out(unpin_clean(leave_free(with_requests(40), 0)), 6)
    free_before = num_free(ledger)
    ledger = _take_back(ledger, cells(0, 0, 3, 30, 21))
    assert unpinned(ledger, 0) == [1, 2, *range(4, 21)] and num_free(ledger) == free_before - 2 * GROUPS
    assert resident(ledger, 0) == [*range(21), 38, 39], "lost pages do not come back"
    ledger, blocks = hand_out(ledger, num_free(ledger))
    assert resident(ledger, 0) == [0, 3, 38, 39] and not np.isin(np.asarray(ledger.tables.resident), blocks).any()


def test_d10_an_end_frees_un_pinned_pages_no_second_time():
    ledger = unpin_clean(with_requests(40, 30))
    for slot in (0, 1):
        ledger, status = finish(ledger, slot)
        assert status is Status.OK
    recount(ledger, {})
    assert num_free(ledger) == 999 and not np.asarray(ledger.unpinned).any()


def test_growth_takes_un_pinned_blocks_and_old_tables_forget_them():
    ledger, status = admit(unpin_clean(leave_free(with_requests(40), 0)), 1, 10)
    assert status is Status.OK
    ledger, statuses, _ = grow(ledger, 0, 10)
    assert statuses == [Status.OK] * BATCH
    lost = -(-10 * GROWING // GROUPS)
    assert unpinned(ledger, 0) == list(range(22 - lost)) and resident(ledger, 1) == list(range(10))
    recount_but_for(ledger)


def test_the_base_rule_leaves_un_pinned_pages_alone():
    ledger = unpin_clean(with_requests(40))
    after, plan = reclaimed(ledger, 200)
    assert int(plan.count) == 0
    chex.assert_trees_all_equal(after, ledger)
    spilled, plan = jit(spill.plan_spill, static_argnames=("release_after", "max_pages"))(
        ledger, cells(0, 0, 1), release_after=True, max_pages=PAGES
    )
    assert int(plan.count) == 0
    chex.assert_trees_all_equal(spilled, ledger)


def recount_but_for(ledger: Ledger) -> None:
    """`leave_free` handed blocks to nobody, so only what tables name is recounted."""
    named = np.concatenate([np.asarray(x).ravel() for x in (ledger.tables.base, ledger.tables.resident, ledger.hot)])
    named = named[named != NULL_BLOCK]
    assert len(set(named.tolist())) == len(named)


FLASH = functools.partial(CacheConfig, max_model_len=131_072, host_pool_bytes=128 * 2**30, gpu_pool_bytes=40 * 2**30)


@pytest.mark.parametrize(("model", "watermark"), [("v4-flash", 22_943), ("v4-pro", 16_388)])
def test_watermark_of_the_published_layouts(model, watermark):
    assert plan_layout(preset(model), FLASH(rule="base", reclaim="unpin")).watermark == watermark
    small = FLASH(rule="base", reclaim="unpin", gpu_pool_bytes=None, gpu_blocks=700)
    layout = plan_layout(preset(model), small)
    assert layout.watermark == layout.hot_blocks > 70, "never below what one region costs"


def test_options_that_cannot_work_are_refused_with_a_remedy():
    for make, words in (
        (lambda: FLASH(watermark=7), "watermark=7 has no effect with reclaim='base'"),
        (lambda: FLASH(admission_window=9, reclaim="eager"), "admission_window=9 has no effect with reclaim='eager'"),
        (lambda: FLASH(watermark=-1, reclaim="unpin"), "watermark=-1 must not be negative"),
        (lambda: FLASH(tail_pages=1), "tail_pages=1 must be at least 2"),
        (lambda: FLASH(reclaim="lazy"), "choose from base, eager, unpin"),
    ):
        with pytest.raises(ConfigError, match=words):
            make()
    flash = preset("v4-flash")
    blocks = plan_layout(flash, FLASH()).gpu_blocks
    plan_layout(flash, FLASH(reclaim="unpin", watermark=blocks))
    with pytest.raises(LayoutError, match=f"watermark={blocks + 1} exceeds the {blocks} GPU blocks"):
        plan_layout(flash, FLASH(reclaim="unpin", watermark=blocks + 1))
    plan_layout(flash, FLASH(reclaim="unpin", admission_window=4_609))
    with pytest.raises(LayoutError, match="raise admission_window above 4608"):
        plan_layout(flash, FLASH(reclaim="unpin", admission_window=4_608))


def test_a_longer_tail_stays():
    ledger = with_requests(40).replace(tail_pages=5)
    assert unpinned(unpin_clean(ledger), 0) == list(range(35))


@pytest.mark.perf
def test_bench_reclaim_runs_small(capsys):
    arguments = ("--tokens", 500, "--steps", 40, "--requests", 2, "--shares", 0.2, "--samples", 1)
    code, out, err = run_script("bench_reclaim.py", *arguments, capsys=capsys)
    rows = {row["policy"]: row for row in json.loads(out.splitlines()[-1])["rows"]}
    assert code == 0 and all(row["equal"] for row in rows.values()), err
    assert rows["unpin"]["bytes_to_gpu"] < rows["eager"]["bytes_to_gpu"]
    code, _, err = run_script("bench_reclaim.py", "--shares", 1.5, capsys=capsys)
    assert code == 2 and "shares=(1.5,)" in err


@pytest.mark.perf
def test_bench_coordinator_runs_small(capsys):
    arguments = ("--requests", 1, 2, "--pages", 20, 40, "--samples", 2)
    code, out, err = run_script("bench_coordinator.py", *arguments, capsys=capsys)
    assert code == 0 and out.splitlines()[-1].startswith("{"), err
    code, _, err = run_script("bench_coordinator.py", "--samples", 0, capsys=capsys)
    assert code == 2 and "samples=0" in err
