"""Prompts are refused before anything changes, in words that name the value and the remedy."""

import inspect

import numpy as np
import pytest
from runs import TINY, tight_layout

from hisparse_jax import decode
from hisparse_jax.prompts import PromptError, admit_sequence, check_prompt, chunk_schedule, pad_chunk, start_running
from hisparse_jax.sequences import init_sequences
from hisparse_jax.status import TierError


@pytest.fixture(scope="module")
def layout():
    return tight_layout(TINY, (2, 1), slack=2, max_model_len=512, max_requests=2, rows="f32", chunk_tokens=64)


@pytest.mark.parametrize(
    ("prompt", "new", "message"),
    [
        ([], 1, "the prompt has no tokens; give at least one"),
        ([1] * 513, 0, "513 tokens and 0 new ones make 513, max_model_len is 512; shorten the prompt or raise max_model_len"),
        ([1] * 500, 13, "500 tokens and 13 new ones make 513"),
        ([1], -1, "max_new_tokens=-1 must not be negative"),
        ([1, 128], 1, r"token id 128 is outside the vocabulary 0\.\.127"),
        ([-1], 1, "token id -1 is outside"),
    ],
)
def test_a_prompt_that_cannot_be_taken(layout, prompt, new, message):
    with pytest.raises(PromptError, match=message):
        check_prompt(prompt, layout, new)


@pytest.mark.parametrize(("prompt", "words"), [([0.5], r"float64\[1\]"), ([[1], [2]], r"int64\[2, 1\]")])
def test_what_is_no_list_of_token_ids(layout, prompt, words):
    unchecked = inspect.unwrap(check_prompt)  # the run's type checker would refuse it first
    with pytest.raises(PromptError, match=f"a flat sequence of token ids, not {words}"):
        unchecked(prompt, layout, 1)


def test_the_longest_prompt_is_taken(layout):
    check_prompt([127] * 512, layout, 0)


@pytest.mark.parametrize(
    ("slot", "options", "message"),
    [
        (2, {}, r"slot 2 does not exist; slots are 0\.\.1 \(max_requests\)"),
        (-1, {}, "slot -1 does not exist"),
        (0, {}, "slot 0 is running a request; finish it first"),
        (1, {"temperature": -0.1}, "temperature=-0.1 must be a finite number and not negative; 0 is greedy"),
        (1, {"seed": -1}, r"seed=-1 must lie in 0\.\.2\^32-1"),
        (1, {"seed": 2**32}, "seed=4294967296 must lie in"),
    ],
)
def test_a_slot_or_option_that_cannot_be(slot, options, message):
    sequences = admit_sequence(init_sequences(2), 0, 8)
    with pytest.raises(PromptError, match=message):
        admit_sequence(start_running(sequences, 0), slot, 8, **options)


def test_a_slot_starts_clean_whoever_had_it():
    before = admit_sequence(init_sequences(2), 0, 5, seed=9, temperature=0.5, stop_token=3)
    before = before.replace(length=before.length.at[0].set(5))
    after = admit_sequence(before, 0, 7)
    assert [int(x[0]) for x in (after.length, after.limit, after.stop_token, after.seed)] == [0, 7, -1, 0]
    assert float(after.temperature[0]) == 0 and not bool(after.running[0])


@pytest.mark.parametrize(("token", "stop", "limit", "runs"), [(4, -1, 6, True), (4, 4, 6, False), (4, -1, 5, False)])
def test_a_request_runs_while_something_is_left(token, stop, limit, runs):
    sequences = admit_sequence(init_sequences(2), 1, limit, stop_token=stop)
    sequences = sequences.replace(length=sequences.length.at[1].set(5), token=sequences.token.at[1].set(token))
    assert start_running(sequences, 1).running.tolist() == [False, runs]


def test_chunks_cover_a_prompt_once():
    assert list(chunk_schedule(0, 10, 4)) == [(0, 4), (4, 4), (8, 2)]
    assert list(chunk_schedule(0, 10, 4, (1, 2, 3))) == [(0, 1), (1, 2), (3, 3), (6, 4)]
    assert list(chunk_schedule(6, 10, 4)) == [(6, 4)] and not list(chunk_schedule(10, 10, 4))
    for wrong in (0, 5):
        with pytest.raises(PromptError, match=rf"a chunk of {wrong} tokens; chunks hold 1\.\.4"):
            list(chunk_schedule(0, 10, 4, (wrong,)))
    np.testing.assert_array_equal(pad_chunk([1, 2, 3, 4], 1, 2, 4), [2, 3, 0, 0])


def test_d1_admission_waits_for_host_pages_and_takes_nothing(layout):
    state = decode.init_state(layout)
    taken = 0
    while int(state.ledger.host.num_free) >= 2:  # leave too few for a prompt of two pages
        state = state.replace(
            ledger=state.ledger.replace(host=state.ledger.host.replace(num_free=state.ledger.host.num_free - 1))
        )
        taken += 1
    before = state
    with pytest.raises(TierError, match="OUT_OF_HOST_BLOCKS: the host pool has too few free blocks; raise host_pool_bytes"):
        decode.admit(state, 0, [1] * 300, layout=layout, max_new_tokens=1)
    assert taken and int(before.ledger.host.num_free) == 1 and not np.asarray(before.ledger.host_table).any()
