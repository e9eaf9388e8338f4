"""CUDA kernels' own sources, compiled for a CPU with `cuda_on_cpu/emulator.h`, which says what that can show."""

import ctypes
import os
import pathlib
import shutil
import subprocess
import traceback
import warnings
from collections.abc import Callable

import numpy as np

SOURCES = pathlib.Path(__file__).parent / "cuda_on_cpu"
KERNELS = pathlib.Path(__file__).parents[1] / "ffi"
COMPILERS = (os.environ.get("CXX", ""), "g++", "clang++", "c++")


def compiled(folder: pathlib.Path, caller: str, *headers: str, changed: dict[str, str] | None = None) -> ctypes.CDLL:
    """The library of `cuda_on_cpu/<caller>.cc` with `ffi/<header>.h` as they are, or with the text that `changed` has for one.

    Whatever else they include stands beside the caller.
    """
    for header in headers:
        (folder / f"{header}.h").write_text((changed or {}).get(header) or (KERNELS / f"{header}.h").read_text())
    library = folder / f"{caller}.so"
    options = ["-std=c++20", "-O2", "-fno-strict-aliasing", "-fPIC", "-shared", "-Wall", "-Werror", "-Wno-unknown-pragmas"]
    options += ["-I", str(folder), "-I", str(SOURCES)]
    compiler = next(filter(shutil.which, COMPILERS), COMPILERS[-1])
    command = [compiler, *options, "-o", str(library), str(SOURCES / f"{caller}.cc")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return ctypes.CDLL(str(library))


def call(function, *arrays: np.ndarray) -> int:
    """Calls a C function with the addresses of contiguous arrays."""
    assert all(array.flags.c_contiguous for array in arrays)
    return function(*(ctypes.c_void_p(array.ctypes.data) for array in arrays))


def without(text: str, statement: str, number: int) -> str:
    """`text` with its `number`-th `statement`, from 0 on, replaced by one that does nothing."""
    parts = text.split(statement)
    return statement.join(parts[: number + 1]) + ";" + statement.join(parts[number + 1 :])


def fails(check: Callable[[], object]) -> bool:
    """Whether `check` raises, or what it runs crashes, in a process of its own."""
    with warnings.catch_warnings(action="ignore"):  # JAX warns of forks: its threads are not in the child, nor is it called there
        child = os.fork()
    if child == 0:
        code = 1
        try:
            with open(os.devnull, "w") as nowhere:
                os.dup2(nowhere.fileno(), 2)
            check()
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    return os.waitpid(child, 0)[1] != 0
