"""`scripts/soak.py`: a short soak in this process, and random transitions of the coordinator."""

import json
import pathlib

import pytest
from runs import run_script

pytestmark = pytest.mark.xdist_group("engine")

SCRIPTS = pathlib.Path(__file__).parent.parent / "scripts"
SMALL = ("--slots", 4, "--parked", 3, "--cached", 6, "--cached-host", 0, "--steps", 600)


@pytest.mark.slow
def test_every_request_is_exact_under_pressure(capsys):
    code, out, err = run_script("soak.py", *SMALL, "--requests", 24, "--seed", 3, capsys=capsys)
    result = json.loads(out.splitlines()[-1])
    assert code == 0 and result["breaches"] == [], err
    assert result["requests"] == 24 == result["submitted"]
    assert result["compared_equal"] >= result["length"] + result["stop"] > 12
    assert result["preempted"] > 0 and result["resumed"] > 0 and result["cancelled"] > 0
    assert result["waits"]["gpu"] + result["waits"]["host"] > 0 and result["misses"] > 0
    assert result["prefix_hits"] > 0


@pytest.mark.slow
def test_drafts_change_no_bit_under_pressure(capsys):
    code, out, err = run_script(
        "soak.py",
        *SMALL,
        "--requests",
        18,
        "--seed",
        5,
        "--draft-rows",
        3,
        "--hot-slots",
        64,
        "--reclaim",
        "eager",
        capsys=capsys,
    )
    result = json.loads(out.splitlines()[-1])
    assert code == 0 and result["breaches"] == [], err
    assert result["compared_equal"] >= result["length"] + result["stop"] > 8
    assert result["decoded_rows"] > result["decoded_tokens"] and result["misses"] > 0


def test_a_breach_is_told_by_the_exit_code(capsys):
    code, out, err = run_script("soak.py", *SMALL, "--requests", 6, "--steps", 3, capsys=capsys)
    assert code == 1 and "have not ended after 3 rounds" in json.loads(out.splitlines()[-1])["breaches"][0]
    assert "have not ended" in err


@pytest.mark.slow  # test_coordinator_machine.py walks the same transitions in every run
def test_random_transitions(capsys, monkeypatch):
    monkeypatch.syspath_prepend(SCRIPTS)
    code, out, err = run_script("soak.py", "--requests", 0, "--transitions", 12_000, capsys=capsys)
    result = json.loads(out.splitlines()[-1])["transitions"]
    assert code == 0, err
    assert result["count"] == 12_000 and result["pages_lost"] > 0 and result["regions_taken"] > 0
    assert result["pages_adopted"] > 0
