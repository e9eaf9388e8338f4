"""What a test on a GPU needs of the handler library."""

import pytest

from hisparse_jax import ffi
from pallas_kernels import cuda_kernels


def need(implementation: str, kernel: str) -> str:
    """`implementation`, with the library loaded; skips the test where it is "cuda" and this build has no such kernel."""
    ffi.load_library()
    if implementation == "cuda" and kernel not in cuda_kernels.registered():
        pytest.skip(f"the library has no CUDA kernel {kernel}: build with -DHISPARSE_CUDA=ON")
    return implementation
