"""The host memory check on made-up machines, and what a pool is made of."""

import pathlib
import resource

import jax
import jax.numpy as jnp
import pytest

from hisparse_jax import host_memory
from hisparse_jax.config import ConfigError
from hisparse_jax.host_memory import HostMemoryError, available_host_memory, check_host_budget, host_memory_limits, make_host_pool

GIB = 1 << 30
V2_MOUNT = "31 23 0:28 {top} /sys/fs/cgroup rw,relatime shared:4 - cgroup2 cgroup2 rw"
V1_MOUNT = "35 31 0:32 {top} /sys/fs/cgroup/memory rw,relatime - cgroup cgroup rw,memory"
V1_CPU_MOUNT = "32 31 0:29 / /sys/fs/cgroup/cpu rw,relatime - cgroup cgroup rw,cpu"


class Machine:
    """A tree of `proc` and cgroup files under `root`."""

    def __init__(self, root: pathlib.Path, available: int = 100 * GIB):
        self.root = root
        self.write("proc/meminfo", f"MemTotal: 1 kB\nMemAvailable:   {available // 1024} kB\n")

    def write(self, path: str, text: str) -> None:
        (self.root / path).parent.mkdir(parents=True, exist_ok=True)
        (self.root / path).write_text(text)

    def cgroups(self, membership: str, *mounts: str) -> None:
        self.write("proc/self/cgroup", membership)
        self.write("proc/self/mountinfo", "\n".join(["23 1 0:1 / / rw - ext4 /dev/vda rw", *mounts]) + "\n")

    def v2(self, group: str, limit: int | str, usage: int, active: int = 0, inactive: int = 0) -> None:
        folder = f"sys/fs/cgroup{group}"
        self.write(f"{folder}/memory.max", f"{limit}\n")
        self.write(f"{folder}/memory.current", f"{usage}\n")
        self.write(f"{folder}/memory.stat", f"anon 5\nfile 7\nactive_file {active}\ninactive_file {inactive}\nslab 3\n")

    def v1(self, group: str, limit: int, usage: int, active: int = 0, inactive: int = 0) -> None:
        folder = f"sys/fs/cgroup/memory{group}"
        self.write(f"{folder}/memory.limit_in_bytes", f"{limit}\n")
        self.write(f"{folder}/memory.usage_in_bytes", f"{usage}\n")
        stat = f"cache 7\nactive_file 1\ninactive_file 1\ntotal_active_file {active}\ntotal_inactive_file {inactive}\n"
        self.write(f"{folder}/memory.stat", stat)

    def available(self, **more) -> int:
        return available_host_memory(root=self.root, gpu=more.pop("gpu", False), environ={}, **more)


@pytest.fixture
def machine(tmp_path) -> Machine:
    return Machine(tmp_path)


def test_without_cgroups_memavailable_decides(machine):
    assert machine.available() == 100 * GIB


def test_v2_the_tightest_ancestor_decides_and_its_file_cache_counts_as_free(machine):
    machine.cgroups("0::/a/b/c\n", V2_MOUNT.format(top="/"))
    machine.v2("/a/b/c", "max", 1 * GIB)
    machine.v2("/a/b", 40 * GIB, 30 * GIB, active=2 * GIB, inactive=3 * GIB)
    machine.v2("/a", 60 * GIB, 35 * GIB)
    assert machine.available() == 15 * GIB
    machine.v2("/a", 60 * GIB, 50 * GIB)
    assert machine.available() == 10 * GIB


def test_v1_only_the_memory_controller_and_totals_count(machine):
    machine.cgroups("9:cpu:/slow\n4:cpuacct,memory:/jobs/7\n0::/\n", V1_CPU_MOUNT, V1_MOUNT.format(top="/"))
    machine.v1("/jobs/7", 9223372036854771712, 1 * GIB)
    machine.v1("/jobs", 20 * GIB, 12 * GIB, active=1 * GIB, inactive=3 * GIB)
    machine.v1("", 9223372036854771712, 70 * GIB)
    assert machine.available() == 12 * GIB


def test_a_container_that_sees_its_own_cgroup_as_the_top(machine):
    machine.cgroups("0::/docker/1f/job\n", V2_MOUNT.format(top="/docker/1f"))
    machine.v2("", 8 * GIB, 2 * GIB)
    machine.v2("/job", "max", 1 * GIB)
    assert machine.available() == 6 * GIB


def test_a_path_that_this_mount_does_not_show_still_meets_the_tops_limit(machine):
    machine.cgroups("4:memory:/kubepods/pod9\n", V1_MOUNT.format(top="/"))
    machine.v1("", 8 * GIB, 3 * GIB)
    assert machine.available() == 5 * GIB


def test_usage_above_the_limit_leaves_nothing_rather_than_less(machine):
    machine.cgroups("0::/\n", V2_MOUNT.format(top="/"))
    machine.v2("", 4 * GIB, 5 * GIB)
    assert machine.available() == 0


def test_xlas_pinned_cap_holds_for_a_gpu_only(machine):
    assert machine.available(gpu=True) == 64 * GIB
    name = host_memory.PINNED_CAP_VARIABLE
    assert host_memory_limits(gpu=True, root=machine.root, environ={name: "512"})[name] == 512 * GIB
    with pytest.raises(HostMemoryError, match=f"{name}='lots' is not a whole number"):
        host_memory_limits(gpu=True, root=machine.root, environ={name: "lots"})


def test_the_locked_memory_limit_holds_where_memory_is_locked_here(machine, monkeypatch):
    monkeypatch.setattr(resource, "getrlimit", lambda which: (8 * 1024 * 1024, resource.RLIM_INFINITY))
    assert machine.available() == 100 * GIB
    assert machine.available(locked=True) == 8 * 1024 * 1024
    monkeypatch.setattr(resource, "getrlimit", lambda which: (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    assert machine.available(locked=True) == 100 * GIB


def test_the_budget_is_95_percent_in_whole_kernel_pages(machine):
    where = {"root": machine.root, "gpu": False, "environ": {}}
    most = int(0.95 * 100 * GIB) // 4096 * 4096
    check_host_budget(most, **where)
    check_host_budget(most - 4095, **where)
    with pytest.raises(HostMemoryError):
        check_host_budget(most + 1, **where)


def test_a_refusal_names_need_limit_and_remedy(machine):
    machine.cgroups("0::/pod\n", V2_MOUNT.format(top="/"))
    machine.v2("/pod", 16 * GIB, 8 * GIB)
    with pytest.raises(ConfigError) as caught:
        check_host_budget(9 * GIB, root=machine.root, gpu=False, environ={})
    for words in ("9.00 GiB", "95%", "8.00 GiB", "cgroup v2 /pod", "lower host_pool_bytes", "container's memory limit"):
        assert words in str(caught.value)
    machine.cgroups("")
    with pytest.raises(ConfigError, match="set XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB before JAX starts"):
        check_host_budget(62 * GIB, root=machine.root, gpu=True, environ={})


def test_this_machine_has_memory_and_a_limit_to_name():
    assert 0 < available_host_memory() <= host_memory_limits()["MemAvailable"] * 2
    with pytest.raises(HostMemoryError, match="the host pools need"):
        check_host_budget(1 << 60)


def test_a_pool_is_zeroed_pinned_and_donated_in_place_from_the_start():
    pool = make_host_pool(5, 300)
    assert pool.shape == (5, 300) and pool.dtype == jnp.uint8 and pool.sharding.memory_kind == "pinned_host"
    assert not jax.device_put(pool, jax.memory.Space.Device).any()
    place = pool.unsafe_buffer_pointer()
    pool = jax.jit(lambda x: jax.device_put(jax.device_put(x, jax.memory.Space.Device).at[1].set(7), jax.memory.Space.Host),
                   donate_argnums=0)(pool)  # fmt: skip
    assert pool.unsafe_buffer_pointer() == place
