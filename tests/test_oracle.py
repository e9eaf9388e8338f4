"""The model agrees with the reference implementation's logits and selections, resident and through the tiers, in float32.

The shared fixture is the only one made by the reference here. Prompts of other lengths are checked against the same
recorded logits: where a prompt ends, and how it is cut, changes nothing.
"""

import json
import pathlib
import shutil

import numpy as np
import pytest
from runs import run_script

from hisparse_jax.checkpoint import load_checkpoint
from hisparse_jax.model.blocks import DeepseekV4
from scripts import check_oracle

pytestmark = pytest.mark.xdist_group("oracle")

GOLDEN = pathlib.Path(__file__).parent / "golden" / "deepseek_v4_tiny.npz"
BOUND = 2e-5


def run(args: check_oracle.Args, capsys) -> tuple[int, dict]:
    code = check_oracle.main(args)
    return code, json.loads(capsys.readouterr().out.splitlines()[-1])


@pytest.mark.parametrize(("tiered", "page_entries"), [(False, 64), pytest.param(True, 64, marks=pytest.mark.slow), (True, 32)])
def test_the_golden_fixture_agrees(tiered, page_entries, capsys):
    code, result = run(check_oracle.Args(GOLDEN, tiered=tiered, page_entries=page_entries), capsys)
    assert code == 0 and result["tiered"] is tiered
    assert result["prefill_max"] <= BOUND and result["decode_max"] <= BOUND and result["topk_mismatches"] == 0
    assert result["rows_compared"] == 658 + 141 and result["rows_checked"] == 2 * (658 + 141)
    if tiered:
        assert result["pages_lost"] == {64: 1, 32: 4}[page_entries] and result["hot_hits"] > 0
        assert all(count > 0 for count in result["misses_per_layer"])


@pytest.fixture(scope="module")
def golden():
    config, weights, _ = load_checkpoint(GOLDEN, np.float32)
    return DeepseekV4(config, weights), config, check_oracle.read_fixture(GOLDEN, config)


@pytest.mark.parametrize("prompt", [3, pytest.param(4 * 129 + 2, marks=pytest.mark.slow)])  # the fixture's own is 4 * 129 + 1
def test_b5_prompts_of_any_length_continue_as_recorded(golden, prompt):
    model, config, fixture = golden
    args = check_oracle.Args(GOLDEN, tiered=True, page_entries=32)
    layout = check_oracle.plan(config, len(fixture.ids), args)
    outcome = check_oracle.run(model, layout, fixture, prompt, args)
    assert np.abs(outcome.logits - fixture.logits[prompt:]).max() <= BOUND
    for i, layer in enumerate(config.c4_layers):
        np.testing.assert_array_equal(outcome.picks[i], fixture.picks[layer][prompt:])
    assert outcome.pages_lost == 4


def edited(folder: pathlib.Path, **changes) -> pathlib.Path:
    """The golden fixture with some arrays changed: `changes` maps a name (`__` for `/`) to a function of the array."""
    with np.load(GOLDEN) as file:
        arrays = {name: file[name].copy() for name in file.files}
    for name, change in changes.items():
        change(arrays[name.replace("__", "/")])
    path = folder / "edited.npz"
    np.savez(path, **arrays)
    shutil.copy(GOLDEN.with_suffix(".json"), path.with_suffix(".json"))
    return path


def test_a_wrong_logit_and_a_wrong_selection_exit_1(tmp_path, capsys):
    def nudge(logits):
        logits[100, 5] += 2e-4

    def swap(picks):
        picks[-1, 0] += 1 if picks[-1, 1] != picks[-1, 0] + 1 else 2

    code, result = run(check_oracle.Args(edited(tmp_path, prefill_logits=nudge)), capsys)
    assert code == 1 and result["prefill_max"] > check_oracle.TOLERANCE and result["topk_mismatches"] == 0
    code, result = run(check_oracle.Args(edited(tmp_path, topk__L3=swap)), capsys)
    assert code == 1 and result["topk_mismatches"] == 2, "once by prefill, once by decode"


@pytest.mark.parametrize("margin", ["topk_margin__L1", "router_margin__L2"])
def test_a_close_decision_early_leaves_too_little_and_exits_3(tmp_path, capsys, margin):
    def close(margins):
        margins[50] = 1e-6

    code, result = run(check_oracle.Args(edited(tmp_path, **{margin: close})), capsys)
    assert code == 3 and result["rows_compared"] == 50


def test_rows_past_a_close_decision_do_not_count(tmp_path, capsys):
    def close(margins):
        margins[600] = 1e-6

    def spoil(logits):
        logits[-1] += 1

    code, result = run(check_oracle.Args(edited(tmp_path, topk_margin__L1=close, decode_logits=spoil)), capsys)
    assert code == 0 and result["rows_compared"] == 600 + (600 - 517)


def test_bad_files_are_one_line_and_exit_2(tmp_path, capsys):
    with np.load(GOLDEN) as file:
        np.savez(tmp_path / "bare.npz", **{name: file[name] for name in file.files if name.startswith("w/")})
    (tmp_path / "corrupt.npz").write_bytes(b"PK\x03\x04 no archive")
    for name in ("bare", "corrupt"):
        shutil.copy(GOLDEN.with_suffix(".json"), tmp_path / f"{name}.json")
    cases = [
        ((tmp_path / "none.npz",), "none.npz does not exist; name a folder"),
        ((tmp_path / "corrupt.npz",), "corrupt.npz"),
        ((tmp_path / "bare.npz",), "bare.npz is not a fixture of the oracle's format"),
        ((GOLDEN, "--page-entries", "48"), "--page-entries 48: choose 32 or 64"),
    ]
    for arguments, message in cases:
        code, out, err = run_script("check_oracle.py", *arguments, capsys=capsys)
        assert (code, out) == (2, "") and message in err
        assert err.startswith("check_oracle: ") and len(err.splitlines()) == 1
