"""A slab that no memory could hold is refused by whoever would make it, before it is made."""

import contextlib
import types

import jax
import pytest
from runs import TINY

from hisparse_jax import decode, resident
from hisparse_jax.config import CacheConfig, ConfigError
from hisparse_jax.device_memory import check_slab_budget
from hisparse_jax.layout import plan_layout

HUGE = plan_layout(
    TINY, CacheConfig(max_model_len=1_024, max_requests=2, gpu_blocks=2**24, host_blocks=20, rows="f32", page_entries=32)
)


@pytest.mark.parametrize("make", [check_slab_budget, decode.init_state, resident.init_state])
def test_a_slab_beyond_the_machine_is_refused(make):
    with pytest.raises(ConfigError, match=f"gpu_blocks={2**24} make a slab of .* GiB, and .* has .*; lower gpu_blocks"):
        make(HUGE)


@pytest.mark.parametrize(("less", "fits"), [(0, True), (1, False)])
def test_the_limit_is_the_devices(monkeypatch, less, fits):
    device = types.SimpleNamespace(memory_stats=lambda: {"bytes_limit": HUGE.slab_bytes - less})
    monkeypatch.setattr(jax, "local_devices", lambda: [device])
    with contextlib.nullcontext() if fits else pytest.raises(ConfigError, match="lower gpu_blocks"):
        check_slab_budget(HUGE)
