"""Speculative rows: whatever is drafted, tokens, logits and bytes are those of one-by-one decode through the same program.

Each run is compared with a resident run without drafts. Pages leave as soon as they may, so that history is read through hot
slots that thrash, and the layers of an index group share a plan and a resident group.
"""

import dataclasses
import functools

import jax.numpy as jnp
import numpy as np
import pytest
from runs import TINY, TWINS, Job, Played, assert_same, build, poisoned, text, tight_layout
from test_equality import check_bytes, finish_all

from hisparse_jax import decode
from hisparse_jax.config import CacheConfig, ConfigError, preset
from hisparse_jax.generation import resident_layout
from hisparse_jax.groups import LayoutError
from hisparse_jax.layout import CacheLayout, plan_layout
from hisparse_jax.model.blocks import DeepseekV4
from hisparse_jax.sequences import init_sequences
from hisparse_jax.speculative import Replay, accept
from hisparse_jax.status import Status
from hisparse_jax.steps import traces

pytestmark = pytest.mark.xdist_group("speculative")

CONFIG = dataclasses.replace(TINY, num_hidden_layers=4, compress_ratios=(4, 4, 128, 4), index_leaders=(0, 3))
"""The second layer follows the first, in one resident group; the last one leads itself."""

STEPS, CALL = 100, 8
"""Tokens after each prompt's own, enough for a page more; steps of a call."""

ONE, TWO = text(1_270, vocab=128), text(1_101, vocab=128)
JOBS = [Job(0, ONE, STEPS, temperature=1.0, seed=4), Job(3, TWO, STEPS)]
NO_DRAFTS = np.full((4, 2_048), -1, np.int32)


def layout_of(config=CONFIG, **options) -> CacheLayout:
    options = dict(rows="f32", draft_rows=3, num_hot_slots=64, prefetch_followers=config is CONFIG) | options
    return tight_layout(
        config, (6, 5), slack=2, max_model_len=2_048, max_requests=4, chunk_tokens=64, reclaim="eager", stretch_steps=16,
        **options,
    )  # fmt: skip


def model_of(layout: CacheLayout) -> DeepseekV4:
    return build(layout.model, layout.cache.rows)


def speculate(twin: str, layout: CacheLayout, drafts: np.ndarray, jobs=JOBS, *, stop_tokens=(-1, -1), between=None) -> Played:
    """Runs `jobs` to their end with `drafts` (tokens by position). `between(state)` looks at the state after each call."""
    run, model, source = TWINS[twin], model_of(layout), Replay(jnp.asarray(drafts), jnp.zeros(4, jnp.int32))
    state = run.init_state(layout) if twin == "resident" else poisoned(run.init_state(layout))
    for job, stop_token in zip(jobs, stop_tokens, strict=True):
        state = run.admit(
            state, job.slot, job.prompt, layout=layout, max_new_tokens=job.steps, seed=job.seed, temperature=job.temperature,
            stop_token=stop_token,
        )  # fmt: skip
        state, _, status = run.prefill(model, state, job.slot, job.prompt, layout=layout)
        assert status is Status.OK
    slots = [job.slot for job in jobs]
    lost_in_prefill = _lost(state, slots)
    tokens, logits = [[] for _ in jobs], [[] for _ in jobs]
    counts, num_rows = np.zeros((len(layout.model.c4_layers), 4, 5), np.int64), np.zeros(4, np.int64)
    while np.asarray(state.sequences.running).any():
        state, output, status = run.verify_steps(
            model, state, source, jnp.int32(CALL), layout=layout, max_steps=CALL, return_logits=True
        )
        assert not np.asarray(status).any()
        sampled, computed = np.array(output.tokens), np.array(output.logits)
        assert (np.asarray(output.rows) >= (sampled >= 0).sum(axis=-1)).all()
        assert not computed[sampled < 0].any(), "logits of a rejected row were given out"
        for i, slot in enumerate(slots):
            tokens[i].append(sampled[slot][sampled[slot] >= 0])
            logits[i].append(computed[slot][sampled[slot] >= 0])
        num_rows += np.asarray(output.rows).sum(axis=1)
        if output.counts is not None:
            counts += np.array(output.counts)
            np.testing.assert_array_equal(
                counts.sum(axis=-1), np.broadcast_to(num_rows * layout.model.index_topk, counts.shape[:2])
            )
        if between is not None:
            between(state)
    return Played(
        state,
        [np.concatenate(x) for x in tokens],
        [np.concatenate(x) for x in logits],
        lost_in_prefill,
        _lost(state, slots),
        counts,
    )


def _lost(state, slots) -> list[int]:
    return [int(state.ledger.pages_lost[slot]) for slot in slots] if hasattr(state, "ledger") else []


@functools.cache
def one_by_one(layout: CacheLayout) -> Played:
    return speculate("resident", resident_layout(layout), NO_DRAFTS)


def right_drafts(layout: CacheLayout) -> np.ndarray:
    """What one-by-one decode gives, by position."""
    drafts = NO_DRAFTS.copy()
    for job, tokens in zip(JOBS, one_by_one(layout).tokens, strict=True):
        drafts[job.slot, len(job.prompt) + 1 :][: len(tokens)] = tokens
    return drafts


def corrupted(drafts: np.ndarray, share: float, seed: int) -> np.ndarray:
    """A share of the drafts wrong, and a quarter as many left out or no token at all."""
    rng = np.random.default_rng(seed)
    wrong, missing, absurd = (rng.random(drafts.shape) < share / part for part in (1, 8, 8))
    drafts = np.where(wrong & (drafts >= 0), (drafts + 1) % TINY.vocab_size, drafts)
    return np.where(absurd, 2**31 - 1, np.where(missing, -1, drafts)).astype(np.int32)


def patterns(layout: CacheLayout) -> dict[str, np.ndarray]:
    right = right_drafts(layout)
    return {
        "none": NO_DRAFTS,
        "right": right,
        "all wrong": corrupted(right, 1.0, seed=0),
        "few wrong": corrupted(right, 0.15, seed=1),
        "half wrong": corrupted(right, 0.5, seed=2),
    }


def check_patterns(layout: CacheLayout) -> None:
    """Both twins equal one-by-one decode at every pattern, tiers agree after every call, and every block comes back."""
    before, twin = traces.copy(), resident_layout(layout)

    def between(state) -> None:
        reached = [dataclasses.replace(job, steps=int(state.sequences.length[job.slot]) - len(job.prompt)) for job in JOBS]
        check_bytes(Played(state, [], [], [], [], np.zeros(0)), layout, reached)
        check_maps_hold_history_alone(state, layout)

    calls = {}
    for name, drafts in patterns(layout).items():
        assert_same(speculate("resident", twin, drafts), one_by_one(layout))
        number = []
        tiered = speculate("tiered", layout, drafts, between=lambda state, n=number: (n.append(1), between(state)))
        assert_same(tiered, one_by_one(layout))
        calls[name] = len(number)
        assert sum(tiered.lost) > sum(tiered.lost_in_prefill) > 0, "no page was lost in mid-decode"
        assert (tiered.counts[:, :, 3].sum(axis=1) > 0).all(), "a C4 layer missed nothing"
        np.testing.assert_array_equal(tiered.counts[:, :, 3].sum(axis=0), np.asarray(tiered.state.traffic.swapped_rows))
        assert not np.asarray(tiered.state.homeless).any()
        finish_all(tiered.state, layout, [job.slot for job in JOBS])  # D10
    in_order = [calls[name] for name in ("right", "few wrong", "half wrong", "all wrong", "none")]
    assert in_order == sorted(in_order) and calls["right"] < calls["all wrong"] == calls["none"]
    programs = {name: count - before[name] for name, count in traces.items() if name.endswith("verify_steps")}
    assert programs == {"decode.verify_steps": 1, "resident.verify_steps": 1}


def check_maps_hold_history_alone(state, layout: CacheLayout) -> None:
    """C5: no hot slot holds an entry that is, or will be, written again: those from `length // 4` on."""
    hosts = np.asarray(state.ledger.host_table)
    for job in JOBS:
        open_entry = int(state.sequences.length[job.slot]) // 4
        for hot_map in state.hot_maps:
            held = np.asarray(hot_map.slot_host)[job.slot]
            page = {int(block): p for p, block in enumerate(hosts[job.slot]) if block}
            entries = [
                page[int(row) // layout.page_entries] * layout.page_entries + row % layout.page_entries for row in held[held >= 0]
            ]
            assert max(entries, default=-1) < open_entry


def test_c5_c6_any_drafts_give_what_one_by_one_decode_gives():
    """Rows that were rejected are written again before anything reads them, on the slab, on the host, in windows and rings."""
    check_patterns(layout_of())


def test_a_stop_token_ends_a_request_in_the_middle_of_accepted_drafts():
    layout = layout_of()
    expected = one_by_one(layout)
    ends = [33, 50]
    stop_tokens = [int(tokens[end]) for tokens, end in zip(expected.tokens, ends, strict=True)]
    ends = [tokens.tolist().index(stop) for tokens, stop in zip(expected.tokens, stop_tokens, strict=True)]
    run = speculate("tiered", layout, right_drafts(layout), stop_tokens=stop_tokens)
    for i, (job, end) in enumerate(zip(JOBS, ends, strict=True)):
        assert run.tokens[i].tolist() == expected.tokens[i][: end + 1].tolist()
        assert run.logits[i].tobytes() == expected.logits[i][: end + 1].tobytes()
        assert int(run.state.sequences.length[job.slot]) == len(job.prompt) + end + 1
    finish_all(run.state, layout, [job.slot for job in JOBS])


@pytest.mark.slow
def test_a9_followers_rows_may_come_early_or_in_their_turn():
    """The same logits, counts, maps and bytes with the followers' copies behind the leader's plan, and when their turn comes."""
    early, late = layout_of(), layout_of(prefetch_followers=False)
    drafts = corrupted(right_drafts(early), 0.3, seed=3)
    runs = [speculate("tiered", layout, drafts) for layout in (early, late)]
    for run, layout in zip(runs, (early, late), strict=True):
        assert_same(run, one_by_one(early))
        check_bytes(run, layout, JOBS)
        assert (run.counts[0] == run.counts[1]).all() and run.counts[0, :, 3].any(), "leader and follower share a plan"
    np.testing.assert_array_equal(runs[0].counts, runs[1].counts)
    for left, right in zip(runs[0].state.hot_maps, runs[1].state.hot_maps, strict=True):
        np.testing.assert_array_equal(left.slot_host, right.slot_host)
        np.testing.assert_array_equal(left.lru, right.lru)
    np.testing.assert_array_equal(runs[0].state.slab, runs[1].state.slab)


@pytest.mark.parametrize(
    ("tokens", "sampled", "count", "stop", "kept", "stops"),
    [
        ((5, 1, 2, 3), (1, 2, 3, 4), 4, -1, 4, False),  # all right, and one more token for nothing
        ((5, 1, 2, 3), (1, 2, 9, 4), 4, -1, 3, False),
        ((5, 1, 2, 3), (9, 2, 3, 4), 4, -1, 1, False),  # what follows a wrong draft is wrong, however it looks
        ((5, 1, 2, 3), (1, 2, 3, 4), 2, -1, 2, False),  # padding rows are no drafts
        ((5, 0, 0, 0), (0, 0, 0, 0), 1, -1, 1, False),
        ((5, 1, 2, 3), (1, 2, 3, 4), 0, -1, 0, False),
        ((5, 1, 2, 3), (1, 2, 3, 4), 4, 2, 2, True),  # ends with the stop token
        ((5, 1, 2, 3), (1, 9, 2, 4), 4, 2, 2, False),  # a stop token behind a rejected draft
        ((5, 1, 2, 3), (1, 2, 3, 4), 4, 4, 4, True),
    ],
)
def test_the_longest_right_prefix_is_accepted(tokens, sampled, count, stop, kept, stops):
    found = accept(*(jnp.int32([x]) for x in (tokens, sampled, count, stop)))
    assert (int(found[0][0]), bool(found[1][0])) == (kept, stops)


def test_replay_proposes_by_position():
    sequences = init_sequences(2).replace(length=jnp.int32([2, 4]))
    drafts = Replay(jnp.arange(12, dtype=jnp.int32).reshape(2, 6), jnp.int32([0, 4])).propose(sequences, 7)
    assert drafts.tolist() == [[3, 4, 5, -1, -1, -1, -1], [7, 8, 9, 10, 11, -1, -1]]
    late = Replay(jnp.arange(6, dtype=jnp.int32).reshape(2, 3), jnp.int32([5, 9])).propose(sequences, 4)
    assert late.tolist() == [[-1, -1, 0, 1], [-1, -1, -1, -1]]


def test_the_plan_knows_the_draft_rows():
    flash = preset("v4-flash")

    def cache(**options) -> CacheConfig:
        return CacheConfig(max_model_len=8_192, gpu_blocks=64, host_blocks=64, **options)

    assert cache(draft_rows=3).hot_slots(flash) == 5 * 512
    assert cache(draft_rows=3, num_hot_slots=2_048).hot_slots(flash) == 2_048
    plain, wide = plan_layout(flash, cache()), plan_layout(flash, cache(draft_rows=3))
    layers, c4 = flash.num_hidden_layers, len(flash.c4_layers)
    rows = layers * 584 + c4 * (8_192 + 2_048) + len(flash.c128_layers) * 4_096  # window, C4 and index state, C128 state
    assert wide.snapshot_bytes - plain.snapshot_bytes == 3 * rows
    for options, words in (
        (dict(draft_rows=2), "draft_rows=2 makes 3 query rows"),
        (dict(draft_rows=-1), "draft_rows=-1"),
        (dict(draft_rows=7), "stretch_steps=64 steps of 8 rows.*lower stretch_steps to 32"),
        (dict(draft_rows=3, num_hot_slots=2_047), "num_hot_slots=2047 holds 2047, one transaction needs 2048"),
        (dict(draft_rows=15, stretch_steps=16), "8192 references.*lower draft_rows below 8"),
    ):
        with pytest.raises(ConfigError, match=words):
            cache(**options).hot_slots(flash)
    with pytest.raises(LayoutError, match="prefetch_followers has no effect"):
        plan_layout(flash, cache(prefetch_followers=True))


def test_a_source_of_another_width_is_refused():
    layout = layout_of()

    class Narrow(Replay):
        def propose(self, sequences, num_drafts):
            return super().propose(sequences, num_drafts - 1)

    with pytest.raises(ValueError, match=r"Narrow proposes drafts of shape \(4, 2\), not \(4, 3\)"):
        decode.verify_steps(
            model_of(layout),
            decode.init_state(layout),
            Narrow(jnp.asarray(NO_DRAFTS), jnp.zeros(4, jnp.int32)),
            jnp.int32(1),
            layout=layout,
            max_steps=CALL,
        )


V4_LIKE = dataclasses.replace(TINY, num_hidden_layers=5, compress_ratios=(4, 4, 128, 4, 4))


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        dict(draft_rows=1, num_hot_slots=32, rule="base"),
        dict(draft_rows=7, num_hot_slots=128),
        dict(backup="spill"),
        dict(rows="bf16"),
    ],
    ids=lambda options: "-".join(f"{k}={v}" for k, v in options.items()),
)
def test_any_drafts_with_a_leader_per_layer(options):
    """As V4 is, and with other numbers of rows, copies at the spill, another row format."""
    check_patterns(layout_of(V4_LIKE, **options))


@pytest.mark.slow
def test_decode_may_run_in_between():
    """Steps of one row and of four on one cache: tiered equals resident, bit for bit, after each."""
    layout = layout_of()
    drafts = corrupted(right_drafts(layout), 0.3, seed=5)
    found = []
    for twin, plan in (("tiered", layout), ("resident", resident_layout(layout))):
        run, model, source = TWINS[twin], model_of(layout), Replay(jnp.asarray(drafts), jnp.zeros(4, jnp.int32))
        state = run.init_state(plan)
        for job in JOBS:
            state = run.admit(state, job.slot, job.prompt, layout=plan, max_new_tokens=job.steps, seed=job.seed)
            state, _, _ = run.prefill(model, state, job.slot, job.prompt, layout=plan)
        logits = []
        for _ in range(3):
            state, output, _ = run.verify_steps(
                model, state, source, jnp.int32(5), layout=plan, max_steps=CALL, return_logits=True
            )
            logits.append(np.array(output.logits))
            state, output, _ = run.decode_steps(model, state, jnp.int32(7), layout=plan, max_steps=CALL, return_logits=True)
            logits.append(np.array(output.logits))
        found.append(logits)
    for left, right in zip(*found, strict=True):
        assert left.any() and left.tobytes() == right.tobytes()
