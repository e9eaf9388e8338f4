"""An engine that nobody shut down ends with the interpreter, before what it computes with is taken down."""

import os
import pathlib
import subprocess
import sys

PROGRAM = """
import atexit
import time

ended = []
atexit.register(lambda: print("alive" if engine._thread.is_alive() else "ended", handle.result(0).end))

from engines import SHORT, serve

engine = serve(threaded=True)
engine._loop.step = lambda: time.sleep(0.01) or engine._loop.look()  # never done
handle = engine.submit(SHORT, 4)
{end}
"""


def run(end: str) -> subprocess.CompletedProcess[str]:
    tests = pathlib.Path(__file__).parent
    environment = os.environ | {"PYTHONPATH": f"{tests}{os.pathsep}{tests.parent}", "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-c", PROGRAM.replace("{end}", end)]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)


def test_the_interpreter_ends_cleanly_around_a_running_engine():
    done = run("")
    assert (done.returncode, done.stdout.split()) == (0, ["ended", "cancelled"]), done


def test_so_it_does_after_an_error():
    done = run("raise KeyError('mine')")
    assert (done.returncode, done.stdout.split()) == (1, ["ended", "cancelled"]), done
    assert done.stderr.splitlines()[-1] == "KeyError: 'mine'"
