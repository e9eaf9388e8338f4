"""How much host memory there is for a pool, the refusal of more, and the making of a pool.

A pinned pool that outgrows its machine is not an error message but a killed process or a stalled node, so the check comes
before the first byte. What is available is the least of: the kernel's MemAvailable; for this process's cgroup and every
ancestor, limit - usage + reclaimable file cache; the locked-memory limit, where memory is locked by this process itself; and
the cap of XLA's pinned allocator, where a GPU backend makes the pool. Source: cgroup v1 and v2 documentation; XLA's
`XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB`.
"""

import functools
import os
import pathlib
import resource
from collections.abc import Iterator, Mapping

import jax
import numpy as np
import psutil
from jaxtyping import Array, UInt8

from hisparse_jax.config import ConfigError

PAGE_BYTES = 4_096
"""The kernel's page: pools take whole ones."""

USABLE_SHARE = 0.95
"""Share of the available memory that pools may take."""

PINNED_CAP_VARIABLE = "XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB"
_PINNED_CAP_GIB = 64
_GIB = 1 << 30


class HostMemoryError(ConfigError):
    """The host tier does not fit in this machine's memory; the message names need, limit and remedy."""


def host_memory_limits(
    *,
    gpu: bool | None = None,
    locked: bool = False,
    root: pathlib.Path = pathlib.Path("/"),
    environ: Mapping[str, str] = os.environ,
) -> dict[str, int]:
    """Every limit that holds here, by name, in bytes: none is negative.

    `gpu`: pools are made by a GPU backend, so XLA's pinned cap holds (None: whatever JAX's default backend is). `locked`:
    this process locks the memory itself, so RLIMIT_MEMLOCK holds. `root`: where `proc` and the cgroup mounts are looked for.
    """
    limits = {"MemAvailable": _mem_available(root)}
    for name, limit in _cgroup_limits(root):
        limits[name] = min(limit, limits.get(name, limit))
    if locked and (soft := resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]) != resource.RLIM_INFINITY:
        limits["RLIMIT_MEMLOCK"] = soft
    if jax.default_backend() == "gpu" if gpu is None else gpu:
        limits[PINNED_CAP_VARIABLE] = _pinned_cap(environ)
    return {name: max(limit, 0) for name, limit in limits.items()}


def available_host_memory(**where) -> int:
    """The least of `host_memory_limits(**where)`, in bytes."""
    return min(host_memory_limits(**where).values())


def check_host_budget(nbytes: int, **where) -> None:
    """Raises `HostMemoryError` where `nbytes`, in whole kernel pages, exceed 95 % of what is available."""
    limits = host_memory_limits(**where)
    tightest = min(limits, key=lambda name: limits[name])
    needed = -(-nbytes // PAGE_BYTES) * PAGE_BYTES
    if needed <= USABLE_SHARE * limits[tightest]:
        return
    remedy = "lower host_pool_bytes"
    if tightest == PINNED_CAP_VARIABLE:
        remedy += f", or set {PINNED_CAP_VARIABLE} before JAX starts"
    elif tightest.startswith("cgroup"):
        remedy += ", or raise the container's memory limit"
    raise HostMemoryError(
        f"the host pools need {needed:,} bytes ({needed / _GIB:.2f} GiB), above {USABLE_SHARE:.0%} of the {limits[tightest]:,} "
        f"bytes available ({limits[tightest] / _GIB:.2f} GiB, by {tightest}); {remedy}."
    )


def make_host_pool(
    num_blocks: int,
    page_bytes: int,
    device: jax.Device | None = None,  # pyright: ignore[reportInvalidTypeForm]
) -> UInt8[Array, "H page_bytes"]:
    """A zeroed pool `u8[num_blocks, page_bytes]` in `pinned_host` of `device`. Check the budget of all pools first.

    Made from numpy: jitted zeros would first take as much device memory. On a CPU `device_put` may hand on numpy's own
    memory, which the first donation would copy, so the pool passes once through a donated identity.
    """
    home = device or jax.local_devices()[0]
    sharding = jax.sharding.SingleDeviceSharding(home, memory_kind="pinned_host")
    pool = jax.device_put(np.zeros((num_blocks, page_bytes), np.uint8), sharding)
    if home.platform == "cpu":
        pool = _own(sharding)(pool)
    return jax.block_until_ready(pool)


@functools.cache
def _own(sharding: jax.sharding.Sharding):
    """A donated identity: its result is memory of XLA's own."""
    return jax.jit(lambda x: x, donate_argnums=0, out_shardings=sharding)


def _mem_available(root: pathlib.Path) -> int:
    for line in _lines(root / "proc/meminfo"):
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return psutil.virtual_memory().available  # no Linux


def _pinned_cap(environ: Mapping[str, str]) -> int:
    cap = environ.get(PINNED_CAP_VARIABLE, str(_PINNED_CAP_GIB))
    if not cap.isdecimal():
        raise HostMemoryError(f"{PINNED_CAP_VARIABLE}={cap!r} is not a whole number of GiB; set one, or unset it.")
    return int(cap) * _GIB


def _cgroup_limits(root: pathlib.Path) -> Iterator[tuple[str, int]]:
    """(name, bytes left) of this process's memory cgroup and its ancestors, v1 and v2, up to each mount's top."""
    paths = _cgroup_paths(root)
    for version, mounted, mount in _cgroup_mounts(root):
        if version not in paths:
            continue
        below = pathlib.PurePosixPath(paths[version])
        # A container may see its own cgroup as the mount's top while proc still tells the outer path.
        inner = below.relative_to(mounted) if below.is_relative_to(mounted) else below.relative_to("/")
        for group in (inner, *inner.parents):
            left = _bytes_left(root / mount.lstrip("/") / group, version)
            if left is not None:
                yield f"cgroup v{version} /{'' if str(group) == '.' else group}", left


def _cgroup_paths(root: pathlib.Path) -> dict[int, str]:
    """Cgroup version to this process's path; v1's memory controller only. Empty where there are no cgroups."""
    paths = {}
    for line in _lines(root / "proc/self/cgroup"):
        _, controllers, path = line.split(":", 2)
        if not controllers:
            paths[2] = path
        elif "memory" in controllers.split(","):
            paths[1] = path
    return paths


def _cgroup_mounts(root: pathlib.Path) -> Iterator[tuple[int, str, str]]:
    """(version, the cgroup at the mount's top, mount point) of every memory cgroup mount. Source: proc(5), mountinfo."""
    for line in _lines(root / "proc/self/mountinfo"):
        fields, _, rest = line.partition(" - ")
        kind, _, options = rest.split(" ", 2)
        mounted, mount = fields.split()[3:5]
        if kind == "cgroup2":
            yield 2, mounted, mount
        elif kind == "cgroup" and "memory" in options.split(","):
            yield 1, mounted, mount


_FILES = {
    1: ("memory.limit_in_bytes", "memory.usage_in_bytes", ("total_active_file", "total_inactive_file")),
    2: ("memory.max", "memory.current", ("active_file", "inactive_file")),
}


def _bytes_left(group: pathlib.Path, version: int) -> int | None:
    """Limit - usage + file cache of one cgroup; None where it sets no limit or has no memory controller."""
    limit_file, usage_file, cache_fields = _FILES[version]
    try:
        limit = (group / limit_file).read_text().strip()
        if limit == "max":
            return None
        stat = dict(line.split()[:2] for line in (group / "memory.stat").read_text().splitlines())
        cache = sum(int(stat.get(field, 0)) for field in cache_fields)
        return int(limit) - int((group / usage_file).read_text()) + cache
    except OSError:
        return None


def _lines(path: pathlib.Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:
        return []
