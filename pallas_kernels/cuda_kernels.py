"""Kernels written in CUDA, where they are built: the `implementation="cuda"` of some ops, as XLA custom calls.

They live in the handler library (`ffi/*.cu`, compiled with `-DHISPARSE_CUDA=ON`), which whoever loads it hands to
`register`; a library built without nvcc has none. Each may be captured into a CUDA graph.
"""

import contextlib
import ctypes
from collections.abc import Callable

import jax

KERNELS = (
    "gather_rows", "store_entry", "copy_pages", "topk_select", "resolve_topk", "resolve_and_gather", "index_scores",
    "sparse_attention",
)  # fmt: skip

HOPPER = ("sparse_attention",)
"""Those with instructions of compute capability 9.0 alone."""

_registered: set[str] = set()
_loaders: list[Callable[[], object]] = []


def load_with(loader: Callable[[], object]) -> None:
    """Has `loader`, which calls `register`, run before the first question which kernels there are."""
    _loaders.append(loader)


def register(library: ctypes.CDLL) -> tuple[str, ...]:
    """Makes the kernels that `library` holds known to XLA; their names."""
    for name in KERNELS:
        handler = getattr(library, f"hisparse_{name}_cuda", None)
        if handler is not None and name not in _registered:
            jax.ffi.register_ffi_target(target(name), jax.ffi.pycapsule(handler), platform="CUDA")
            _registered.add(name)
    return tuple(sorted(_registered))


def registered() -> tuple[str, ...]:
    """Names of the kernels that can be called: none where no library can be loaded, those of `HOPPER` unless a GPU is another."""
    while _loaders:
        with contextlib.suppress(RuntimeError):
            _loaders.pop()()
    return tuple(sorted(_registered if _registered.isdisjoint(HOPPER) or _is_hopper() else _registered.difference(HOPPER)))


def _is_hopper() -> bool:
    """Whether every GPU here is of compute capability 9.0. True where there is none: programs are compiled for others."""
    try:
        devices = jax.local_devices(backend="cuda")
    except (RuntimeError, AssertionError):  # no such backend, or none that starts: what needs one says so itself
        return True
    return all(device.compute_capability == "9.0" for device in devices)


def target(name: str) -> str:
    """XLA's name of a kernel or handler of the library, there or not."""
    return f"hisparse_{name}"


def require(name: str) -> str:
    """`target(name)`, or the reason why there is none."""
    if name not in registered():
        or_other = ", or a GPU here is no Hopper" if name in HOPPER else ""
        raise NotImplementedError(
            f"implementation='cuda': {name} is not in a loaded library{or_other}; build ffi/ with -DHISPARSE_CUDA=ON and call "
            "hisparse_jax.ffi.load_library(), or choose another implementation."
        )
    return target(name)
