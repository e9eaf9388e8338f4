"""Every program under `h200_programs` compiles for an H200 and finds what it asserts; each runs in its own process."""

import pathlib

import pytest

PROGRAMS = sorted((pathlib.Path(__file__).parent / "h200_programs").glob("*.py"))


SLOW = ("images_geometry", "parking_geometry")
"""Programs between two dispatches: no step waits for them."""


@pytest.mark.parametrize(
    "program", [pytest.param(p, id=p.stem, marks=pytest.mark.slow if p.stem in SLOW else ()) for p in PROGRAMS]
)
def test_compiles_for_an_h200(run_h200, program):
    run_h200(program)


@pytest.mark.slow
@pytest.mark.parametrize("case", ["pallas", "prefill", "spill", "verify", "prefetch"])
def test_other_calls_at_v4_flashs_geometry_compile_too(run_h200, case):
    run_h200(PROGRAMS[0].with_name("decode_geometry.py"), case)
