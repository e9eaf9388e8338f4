"""Which CUDA kernels can be called: those of a loaded library, Hopper's only on Hopper."""

import types

import jax
import pytest

from pallas_kernels import cuda_kernels


@pytest.fixture
def library(monkeypatch):
    """As if a library with every kernel were loaded."""
    monkeypatch.setattr(cuda_kernels, "_loaders", [])
    monkeypatch.setattr(cuda_kernels, "_registered", set(cuda_kernels.KERNELS))


@pytest.mark.parametrize(
    ("capabilities", "missing"),
    [((), set()), (("9.0", "9.0"), set()), (("10.0",), set(cuda_kernels.HOPPER)), (("9.0", "8.0"), set(cuda_kernels.HOPPER))],
)
def test_kernels_of_hopper_are_there_where_every_gpu_is_one(monkeypatch, library, capabilities, missing):
    def local_devices(backend):
        if not capabilities:
            raise RuntimeError(f"Unknown backend {backend}")
        return [types.SimpleNamespace(compute_capability=each) for each in capabilities]

    monkeypatch.setattr(jax, "local_devices", local_devices)
    assert set(cuda_kernels.KERNELS) - set(cuda_kernels.registered()) == missing
    for name in missing:
        with pytest.raises(NotImplementedError, match="a GPU here is no Hopper"):
            cuda_kernels.require(name)


def test_a_kernel_that_is_not_built_says_how_to_build_it(monkeypatch, library):
    monkeypatch.setattr(cuda_kernels, "_registered", set())
    with pytest.raises(NotImplementedError, match="topk_select is not in a loaded library; build ffi/ with -DHISPARSE_CUDA=ON"):
        cuda_kernels.require("topk_select")


def test_a_library_that_cannot_be_loaded_leaves_no_kernel(monkeypatch, library):
    def fail():
        raise RuntimeError("not built")

    monkeypatch.setattr(cuda_kernels, "_registered", set())
    monkeypatch.setattr(cuda_kernels, "_loaders", [fail])
    assert cuda_kernels.registered() == ()
