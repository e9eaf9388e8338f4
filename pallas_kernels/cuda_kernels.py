"""Kernels written in CUDA, where they are built: the `implementation="cuda"` of some ops, as XLA custom calls.

They live in the handler library (`ffi/*.cu`, compiled with `-DHISPARSE_CUDA=ON`), which whoever loads it hands to
`register`; a library built without nvcc has none. Each may be captured into a CUDA graph.
"""

import ctypes

import jax

KERNELS = ("gather_rows", "store_entry", "copy_pages", "topk_select", "resolve_topk")

_registered: set[str] = set()


def register(library: ctypes.CDLL) -> tuple[str, ...]:
    """Makes the kernels that `library` holds known to XLA; their names."""
    for name in KERNELS:
        handler = getattr(library, f"hisparse_{name}_cuda", None)
        if handler is not None and name not in _registered:
            jax.ffi.register_ffi_target(target(name), jax.ffi.pycapsule(handler), platform="CUDA")
            _registered.add(name)
    return registered()


def registered() -> tuple[str, ...]:
    """Names of the kernels that can be called."""
    return tuple(sorted(_registered))


def target(name: str) -> str:
    """XLA's name of a kernel. Raises nothing: `require` does."""
    return f"hisparse_{name}"


def require(name: str) -> str:
    """`target(name)`, or the reason why there is none."""
    if name not in _registered:
        raise NotImplementedError(
            f"implementation='cuda': {name} is not in a loaded library; build ffi/ with -DHISPARSE_CUDA=ON and call "
            "hisparse_jax.ffi.load_library(), or choose another implementation."
        )
    return target(name)
