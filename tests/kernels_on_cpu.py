"""CUDA kernels' own sources, compiled for a CPU with `cuda_on_cpu/emulator.h`, which says what that can show."""

import ctypes
import os
import pathlib
import shutil
import subprocess

import numpy as np

SOURCES = pathlib.Path(__file__).parent / "cuda_on_cpu"
KERNELS = pathlib.Path(__file__).parents[1] / "ffi"
COMPILERS = (os.environ.get("CXX", ""), "g++", "clang++", "c++")


def compiled(folder: pathlib.Path, caller: str, kernel: str, text: str | None = None) -> ctypes.CDLL:
    """The library of `cuda_on_cpu/<caller>.cc`, with `text` in the place of `ffi/<kernel>.h`."""
    (folder / f"{kernel}.h").write_text((KERNELS / f"{kernel}.h").read_text() if text is None else text)
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
