"""Compiles a jitted function for an H200 on a machine without a GPU, and shows what XLA made of it.

For programs under `tests/h200_programs`, which run in a process of their own (`run_h200` in conftest.py): JAX_PLATFORMS=cpu
must be set before jax starts, and importing this module loads XLA's CUDA compiler. Needs jax-cuda13-plugin and
jax-cuda13-pjrt of jax's own version, and no driver. A program looks so:

    from h200 import assert_in_place, compile_for_h200, spec

    pool, slab = spec((n, page_bytes), jnp.uint8, "pinned_host"), spec((b, stride), jnp.uint8)
    compiled = compile_for_h200(step, pool, slab, donate=(0, 1))
    assert_in_place(compiled, pool, slab)

Compile-only devices have no memories, so JAX would drop every `memory_kind` on its public path; tracing on a CPU mesh and
lowering for CUDA keeps them. This leans on private JAX calls, in this file alone. Source: JAX's aot_test.py.
"""

import contextlib
import dataclasses
import os
import pathlib
import re
from collections.abc import Callable, Sequence
from typing import Any
from unittest import mock

os.environ["JAX_PLATFORMS"] = "cpu"

import jax
import numpy as np
from jax._src import compiler
from jax._src.lib import xla_client  # pyright: ignore[reportPrivateImportUsage]
from jax._src.pallas.triton import gpu_info
from jax.experimental import topologies
from jax.sharding import AbstractDevice, AbstractMesh, AxisType, NamedSharding, PartitionSpec, use_abstract_mesh

from hisparse_jax import ffi
from pallas_kernels import cuda_kernels

_CONFIG = pathlib.Path(__file__).with_name("h200_target_config.txtpb").read_text()
_TOPOLOGY = topologies.get_topology_desc(platform="cuda", target_config=_CONFIG, topology="1x1x1")
_MESH = jax.make_mesh((1,), ("x",), axis_types=(AxisType.Auto,))
with use_abstract_mesh(
    AbstractMesh((1,), ("x",), axis_types=(AxisType.Auto,), abstract_device=AbstractDevice("NVIDIA H200", 132, "cuda"))
):  # tracing a whole program under this mesh would clash with the one its arguments stand on
    _GPU_INFO = gpu_info.get_gpu_info()
_HLO_DTYPE = {
    "uint8": "u8", "int8": "s8", "int16": "s16", "int32": "s32", "uint32": "u32", "float32": "f32", "bfloat16": "bf16",
    "bool": "pred",
}  # fmt: skip


def spec(shape: Sequence[int], dtype: Any, memory_kind: str = "device") -> jax.ShapeDtypeStruct:
    """An abstract array on the H200; `memory_kind="pinned_host"` for a host pool or for page ids."""
    sharding = NamedSharding(_MESH, PartitionSpec(), memory_kind=memory_kind)
    return jax.ShapeDtypeStruct(tuple(shape), dtype, sharding=sharding)


def specs_like(tree: Any) -> Any:
    """`tree` of arrays or `ShapeDtypeStruct`s to `spec`s, memory kinds kept."""
    return jax.tree.map(lambda x: spec(x.shape, x.dtype, getattr(x.sharding, "memory_kind", None) or "device"), tree)


@dataclasses.dataclass(frozen=True)
class Compiled:
    """An H200 program: optimized HLO text, and XLA's CompiledMemoryStats (bytes by space, temporary and aliased)."""

    hlo: str
    stats: Any


def compile_for_h200(
    fn: Callable,
    *args: Any,
    donate: int | Sequence[int] = (),
    static: int | Sequence[int] = (),
    options: dict[str, Any] | None = None,
    triton: bool = False,
) -> Compiled:
    """Compiles `jit(fn)(*args)` for an H200; `fn` may be jitted already, then its own donations hold.

    `args` are pytrees of `spec`s, and plain values at the `static` positions. `triton=True` where `pl.pallas_call` is inside.
    `options` are XLA's compiler options.
    """
    jitted = fn if hasattr(fn, "trace") else jax.jit(fn, donate_argnums=donate, static_argnums=static)
    with mock.patch.object(gpu_info, "get_gpu_info", return_value=_GPU_INFO) if triton else contextlib.nullcontext():
        lowered = jitted.trace(*args).lower(lowering_platforms=("cuda",))
    device = _TOPOLOGY.devices[0]
    compile_options = compiler.get_compile_options(
        num_replicas=1,
        num_partitions=1,
        device_assignment=np.array([[device.id]]),
        env_options_overrides=options or {},
    )
    executable = device.client.compile(
        lowered.compiler_ir("stablehlo"),
        executable_devices=xla_client.DeviceList((device,)),
        compile_options=compile_options,
    )
    text = "\n".join(module.to_string() for module in executable.hlo_modules())
    return Compiled(text, executable.get_compiled_memory_stats())


def pretend_cuda_kernels() -> None:
    """Has programs of this process call the CUDA kernels, built or not.

    To compile a call, XLA wants a handler of its name, whatever that does.
    """
    handler = getattr(ffi.load_library(), "hisparse_backup_pages_cuda")  # noqa: B009
    for name in set(cuda_kernels.KERNELS) - set(cuda_kernels.registered()):
        jax.ffi.register_ffi_target(cuda_kernels.target(name), jax.ffi.pycapsule(handler), platform="CUDA")
    cuda_kernels._registered.update(cuda_kernels.KERNELS)


def copies_of(hlo: str, *arrays: Any) -> list[str]:
    """Lines of `hlo` that copy a whole array of the shape and dtype of one of `arrays`, in any memory space.

    Finds `copy`, `copy-start` and `copy-done`, so a move of a host pool to the device counts too.
    """
    shapes = {f"{_HLO_DTYPE[np.dtype(a.dtype).name]}[{','.join(map(str, a.shape))}]" for a in arrays}
    copying = re.compile(r"\bcopy(-start|-done)?\(")
    return [line.strip() for line in hlo.splitlines() if copying.search(line) and any(s in line for s in shapes)]


def num_bytes(*arrays: Any) -> int:
    """Bytes of `arrays` together."""
    return sum(int(np.prod(a.shape)) * np.dtype(a.dtype).itemsize for a in arrays)


def faults_in_place(compiled: Compiled, *arrays: Any) -> list[str]:
    """Why `compiled` does not update all of `arrays`, its pools and slab, in place; nothing where it does."""
    faults = [f"copied: {line}" for line in copies_of(compiled.hlo, *arrays)]
    stats = compiled.stats
    if stats.host_temp_size_in_bytes:
        faults.append(f"host temp is {stats.host_temp_size_in_bytes} bytes, not 0")
    aliased = stats.alias_size_in_bytes + stats.host_alias_size_in_bytes
    if aliased < num_bytes(*arrays):
        faults.append(f"{aliased} bytes are aliased, the arrays have {num_bytes(*arrays)}; donate them")
    return faults


def assert_in_place(compiled: Compiled, *arrays: Any) -> None:
    """Fails with every fault that `faults_in_place` finds."""
    faults = faults_in_place(compiled, *arrays)
    assert not faults, "\n".join(faults)
