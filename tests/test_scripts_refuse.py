"""Every script refuses bad numbers before it begins: exit code 2, one line that names the option and its value."""

import pathlib

import pytest
from runs import run_script

SCRIPTS = pathlib.Path(__file__).parent.parent / "scripts"

REFUSED = [
    ("soak.py", ("--requests", -1), "--requests -1 must be at least 0"),
    ("soak.py", ("--requests", 0), "leave nothing to test"),
    ("soak.py", ("--transitions", -1), "--transitions -1"),
    ("soak.py", ("--steps", 0), "--steps 0"),
    ("soak.py", ("--seed", -1), "--seed -1"),
    ("serve_trace.py", ("--seed", -1), "--seed -1"),
    ("serve_trace.py", ("--gap", "nan"), "--gap nan"),
    ("bench_reclaim.py", ("--seed", -1), "--seed -1"),
    ("bench_reclaim.py", ("--policies",), "--policies and --shares need a value each"),
    ("bench_kernels.py", ("--samples", 0), "--samples 0"),
    ("bench_kernels.py", ("--launches", -1), "--launches -1"),
    ("bench_kernels.py", ("--budget", -1), "--budget -1"),
    ("bench_decode.py", ("--context", 0), "--context 0"),
    ("bench_decode.py", ("--context", 31), "--context 31 leaves a trace of selections nothing to miss"),
    ("bench_decode.py", ("--most-requests", 0), "--most-requests 0"),
    ("bench_decode.py", ("--resident-requests", -1), "--resident-requests -1"),
    ("plan.py", ("--hbm-gib", "1e300"), "--hbm-gib 1e+300 must be a number of GiB"),
    ("plan.py", ("--host-gib", "nan"), "--host-gib nan"),
    ("generate.py", ("--host-gib", "1e300"), "--host-gib 1e+300"),
    ("generate.py", ("--gpu-blocks", 11_184_810, "--steps", 2), "gpu_blocks=11184810 make a slab of"),
    ("plot_capacity.py", ("--hbm-gib", -1), "--hbm-gib -1.0"),
    ("plot_capacity.py", ("--model", "v9"), "model 'v9' is unknown"),
    ("plot_capacity.py", ("--out", "/nowhere/x.png"), "there is no folder /nowhere"),
]


@pytest.mark.parametrize(
    ("script", "arguments", "said"), REFUSED, ids=lambda x: x if isinstance(x, str) else " ".join(map(str, x))
)
def test_bad_numbers_are_refused_in_words(script, arguments, said, capsys, monkeypatch):
    monkeypatch.syspath_prepend(SCRIPTS)
    code, out, err = run_script(script, *arguments, capsys=capsys)
    assert (code, out) == (2, "") and said in " ".join(err.split()), err
