"""What every test runs under: a CPU unless a GPU is visible, rank promotion an error, compiled programs kept between runs."""

import hashlib
import importlib.metadata
import os
import pathlib
import subprocess
import sys
import time
from collections.abc import Callable

import pytest

TESTS = pathlib.Path(__file__).parent
ROOT = TESTS.parent

HAS_GPU = pathlib.Path("/dev/nvidia0").exists()
if not HAS_GPU:
    os.environ.setdefault("JAX_PLATFORMS", "cpu")  # before jax starts: without a GPU its CUDA plugin would be tried in vain

if importlib.metadata.version("jaxlib").startswith("0.11."):  # compilation takes most of the time
    os.environ.setdefault("XLA_FLAGS", "--xla_cpu_opt_preset=fast_compile")

import jax  # noqa: E402

import hisparse_jax  # noqa: E402

if not pathlib.Path(hisparse_jax.__path__[0]).resolve().is_relative_to(ROOT.resolve()):
    raise pytest.UsageError(f"the tests of {ROOT} would test {hisparse_jax.__path__[0]}: install this checkout (make install).")

jax.config.update("jax_numpy_rank_promotion", "raise")


def _processor() -> str:
    """Names this machine's processor: compiled programs hold its instructions, so another kind must not load them."""
    try:
        lines = pathlib.Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    kept = sorted({line for line in lines if line.startswith(("model name", "flags", "Features"))})
    return hashlib.sha256("\n".join(kept).encode()).hexdigest()[:16]


def _kept_programs() -> str:
    """Folder of compiled programs. On a GPU each worker has its own: matrix kernels are chosen by timing them, so programs of two
    workers, compiled at the same time, may round differently, and a test that loads one of each would compare them."""
    worker = os.environ.get("PYTEST_XDIST_WORKER", "alone") if HAS_GPU else "any"
    return str(ROOT / ".cache" / f"jax-{_processor()}-{worker}")


jax.config.update("jax_compilation_cache_dir", _kept_programs())


MANY_MAPS, TOO_MANY_MAPS = 25_000, 45_000
"""Memory maps of a process that hold dozens of programs; Linux grants 65,530, and one too many is a crash."""

QUICK = 1.0
"""Seconds of a test that can have compiled no program: counting maps takes a while."""


def _let_go_of_programs(most: int) -> None:
    """A compiled program is about a thousand memory maps: gives all of them back where this process has more than `most`."""
    maps = pathlib.Path("/proc/self/maps")
    if maps.exists() and maps.read_bytes().count(b"\n") > most:
        jax.clear_caches()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if not HAS_GPU:
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="no GPU"))


@pytest.fixture(scope="module", autouse=True)
def _after_a_module():
    yield
    _let_go_of_programs(MANY_MAPS)


@pytest.fixture(autouse=True)
def _after_a_test():
    """In the middle of a module later, since its tests share programs."""
    begin = time.monotonic()
    yield
    if time.monotonic() - begin > QUICK:
        _let_go_of_programs(TOO_MANY_MAPS)


@pytest.fixture(scope="session")
def run_h200() -> Callable[..., str]:
    """Runs a program that compiles for an H200 (`tests/h200.py`) in a process of its own; its output, once it exits with 0.

    Give a file and its arguments, or `code=` with the program's text.
    """

    def run(program: pathlib.Path | None = None, *arguments: str, code: str | None = None, timeout: float = 280) -> str:
        started = ["-c", code] if code is not None else [str(program), *arguments]
        paths = [str(TESTS), str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
        environment = os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": os.pathsep.join(paths)}
        done = subprocess.run(
            [sys.executable, *started], env=environment, cwd=ROOT, capture_output=True, text=True, timeout=timeout
        )
        assert done.returncode == 0, f"{program or 'the program'} exited with {done.returncode}\n{done.stdout}\n{done.stderr}"
        return done.stdout

    return run
