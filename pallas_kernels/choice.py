"""Which implementation of an op runs: by name, or the platform's default, chosen when the program is lowered.

`xla` is the reference and what a CPU runs; `pallas` a Pallas kernel by the Triton lowering; `cuda` a kernel of `ffi/`, where
it is built and registered (`cuda_kernels`).
"""

from collections.abc import Callable, Mapping
from typing import Any

import jax

from pallas_kernels import cuda_kernels

ON_CUDA = {
    "topk_select": ("cuda", "pallas"),
    "resolve_topk": ("cuda", "xla"),
    "sinkhorn": ("pallas",),
    "index_scores": ("cuda", "xla"),
    "sparse_attention": ("cuda", "xla"),
}
"""By op: on CUDA the first of these that is there is the default."""


def choose(name: str, implementation: str | None, implementations: Mapping[str, Callable], *operands: Any) -> Any:
    """Runs op `name` on `operands` by `implementation`; by None as `xla` on a CPU, as `ON_CUDA` says on CUDA."""
    if implementation is None:
        there = [kind for kind in ON_CUDA[name] if kind != "cuda" or name in cuda_kernels.registered()]
        if there[0] == "xla":
            return implementations["xla"](*operands)
        return jax.lax.platform_dependent(*operands, cpu=implementations["xla"], cuda=implementations[there[0]])
    if implementation not in implementations:
        known = ", ".join(repr(kind) for kind in implementations)
        raise ValueError(f"{implementation=} is unknown; choose from {known}, or None for the platform's default.")
    return implementations[implementation](*operands)
