"""`scripts/bench_decode.py` on a tiny model: its runs are comparable, and a difference would be seen."""

import json
import pathlib
import runpy

import jax.numpy as jnp
import numpy as np
import pytest
from runs import TINY, build, run_script

from hisparse_jax import decode, resident

SCRIPTS = pathlib.Path(__file__).parent.parent / "scripts"
SMALL = ("--context", 3_000, "--resident-requests", 2, "--most-requests", 4, "--steps", 8, "--warmup", 1, "--calls", 2)


@pytest.mark.perf
def test_tiered_holds_more_and_equals_all_resident(capsys, monkeypatch):
    monkeypatch.syspath_prepend(SCRIPTS)
    code, out, err = run_script("bench_decode.py", *SMALL, capsys=capsys)
    assert code == 0, err
    result = json.loads(out.splitlines()[-1])
    runs = {run["run"]: run for run in result["runs"]}
    assert result["differences"] == [] and runs["tiered"]["requests"] > runs["resident"]["requests"]
    assert runs["tiered"]["slab_bytes"] == runs["resident"]["slab_bytes"] < runs["all-resident"]["slab_bytes"]
    assert runs["tiered"]["pages_lost"] > 0.5 and runs["tiered"]["missing"] > 0 and runs["same-tiered"]["pages_lost"] == 0


def test_every_run_can_be_lowered(monkeypatch):
    """Without running one: what takes the place of the model's selections and of the swap-in fits both twins' programs."""
    monkeypatch.syspath_prepend(SCRIPTS)
    script = runpy.run_path(str(SCRIPTS / "bench_decode.py"), run_name="bench_decode")
    args = script["Args"](context=1_000, resident_requests=2, most_requests=2, steps=2, warmup=0, calls=1)
    model = build(TINY, "f32")
    for run in script["plan"](args, TINY):
        if run.name in ("resident", "no-copies"):
            state = (decode if run.twin == "tiered" else resident).init_state(run.layout)
            script["lower_run"](run, model, state, jnp.asarray(script["selections"](run, args)), args)


def test_a_difference_between_runs_is_named(monkeypatch):
    monkeypatch.syspath_prepend(SCRIPTS)
    script = runpy.run_path(str(SCRIPTS / "bench_decode.py"), run_name="bench_decode")

    def run(tokens: bytes, logit: float):
        made = script["Run"]("", "", None, 1)
        made.tokens, made.logits = [tokens], np.full((1, 1, 1), logit, np.float32)
        return made

    pairs = {"same-tiered": run(b"a", 0.0), "resident": run(b"a", -0.0), "tiered": run(b"a", 1), "all-resident": run(b"b", 1)}
    rounding, token = script["differences"](pairs)
    assert rounding.startswith("same-tiered differs from resident: 1 of 1 logit rows") and "request 0 from step 0" in rounding
    assert token.startswith("tiered differs from all-resident: 0 of 1 logit rows")
    assert script["differences"](pairs | {"resident": run(b"a", 0.0), "all-resident": run(b"a", 1)}) == []
