"""The built library: where it is, and what of it XLA knows from then on.

Either twin imports this module, so which CUDA kernels there are does not depend on what else a process has imported.
"""

import ctypes
import functools
import importlib.util
import os

import jax

from pallas_kernels import cuda_kernels

_HANDLERS = ("backup_pages", "backup_pages_fork", "backup_pages_join", "restore_pages")
_PLATFORMS = ("cpu", "CUDA")


class FfiError(RuntimeError):
    """The handler library is missing or cannot be used; the message says what to do."""


def library_path() -> str:
    """Where the built handler library is: `$HISPARSE_FFI_LIBRARY`, or `_ffi.so` as installed beside this package."""
    if path := os.environ.get("HISPARSE_FFI_LIBRARY"):
        return path
    found = importlib.util.find_spec("hisparse_jax._ffi")
    if found is None or found.origin is None:
        raise FfiError(
            "hisparse_jax/_ffi.so is not built; run `pip install -e .` (needs a C++17 compiler), or set "
            "HISPARSE_FFI_LIBRARY to a built copy."
        )
    return found.origin


@functools.cache
def load_library() -> ctypes.CDLL:
    """Loads the handlers and registers them for CPU and CUDA, and CUDA kernels where they are built, once per process.

    No backend needs to be there: registering for an absent platform lets a machine without a GPU compile for one.
    """
    path = library_path()
    try:
        library = ctypes.CDLL(path)
        handlers = {
            (name, platform): getattr(library, f"hisparse_{name}_{platform.lower()}")
            for name in _HANDLERS
            for platform in _PLATFORMS
        }
    except (OSError, AttributeError) as error:
        raise FfiError(f"{path} cannot be used: {error}; run `pip install -e .` again to rebuild it.") from error
    for (name, platform), handler in handlers.items():
        jax.ffi.register_ffi_target(cuda_kernels.target(name), jax.ffi.pycapsule(handler), platform=platform)
    cuda_kernels.register(library)
    return library


cuda_kernels.load_with(load_library)


def ffi_version() -> tuple[int, int]:
    """XLA FFI version (major, minor) of the headers the library was built with; a runtime refuses newer than its own."""
    return divmod(load_library().hisparse_ffi_version(), 1000)
