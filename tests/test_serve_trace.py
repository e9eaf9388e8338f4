"""`scripts/serve_trace.py`: a small trace, as a live view and as lines."""

import json
import pathlib

import pytest
from prometheus_client.parser import text_string_to_metric_families
from runs import run_script

pytestmark = pytest.mark.xdist_group("engine")

SMALL = ("--requests", 6, "--gap", 2, "--every", 5, "--reclaim", "unpin")


@pytest.fixture(autouse=True)
def scripts_on_the_path(monkeypatch):
    monkeypatch.syspath_prepend(pathlib.Path(__file__).parent.parent / "scripts")


@pytest.mark.slow  # programs of its own
def test_the_same_trace_live_and_plain(capsys, monkeypatch, tmp_path):
    metrics = tmp_path / "metrics.prom"
    monkeypatch.setenv("FORCE_COLOR", "1")  # rich takes stderr for a terminal
    code, out, view = run_script("serve_trace.py", *SMALL, "--metrics-file", metrics, capsys=capsys)
    live = json.loads(out.splitlines()[-1])
    assert code == 0 and live["length"] == 6 == live["submitted"] and live["open"] == 0
    assert live["misses"] > 0 and live["bytes_to_gpu"] > 0 and live["waits"]["gpu"] + live["waits"]["host"] > 0
    for words in ("C4 layers: entries selected in decode", "prefilling", "host only", "GPU blocks used", "waited for gpu"):
        assert words in view, words
    families = {family.name: family for family in text_string_to_metric_families(metrics.read_text())}
    selected = {s.labels["became"]: 0.0 for s in families["hisparse_selected_entries"].samples}
    for sample in families["hisparse_selected_entries"].samples:
        selected[sample.labels["became"]] += sample.value
    assert selected == {name: live[name] for name in selected}

    monkeypatch.delenv("FORCE_COLOR")
    code, out, lines = run_script("serve_trace.py", *SMALL, "--plain", capsys=capsys)
    plain = json.loads(out.splitlines()[-1])
    clocks = ("seconds", "tokens_per_s", "queue_seconds")
    assert code == 0 and {k: v for k, v in plain.items() if k not in clocks} == {k: live[k] for k in plain if k not in clocks}
    assert "round 6: " in lines and "pages: " in lines and "C4 layers" not in lines


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--reclaim", "lazy"), "choose from base, eager, unpin"),
        (("--gap", -1), "--gap -1.0 must be at least 0"),
        (("--requests", 0), "--requests 0 must be at least 1"),
        (("--metrics-file", "/no/such/folder/x"), "cannot be written"),
        (("--colour", "red"), "--colour"),
    ],
)
def test_bad_flags_are_refused(arguments, words, capsys):
    code, out, err = run_script("serve_trace.py", *arguments, capsys=capsys)
    assert code == 2 and words in err and not out
