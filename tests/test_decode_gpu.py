"""Tiered decode on a GPU: bit-equal to the resident twin by every kernel, in place, and with nothing that waits for the host."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gpu import need
from test_speculative import check_patterns, layout_of

from hisparse_jax import decode, ffi
from hisparse_jax.config import CacheConfig, preset
from hisparse_jax.generation import compare, generate, resident_layout
from hisparse_jax.layout import CacheLayout, plan_layout
from hisparse_jax.model.blocks import DeepseekV4
from hisparse_jax.weights import init_weights
from pallas_kernels import host_pool

pytestmark = pytest.mark.gpu

STEPS = 24
PROMPTS = [np.random.default_rng([9, n]).integers(0, 256, n).tolist() for n in (1_801, 1_270)]
"""8 and 5 pages, of which the last two stay."""


def small_model() -> DeepseekV4:
    """The demo's schedule and heads in four layers, fp8 rows."""
    fields = dict(
        num_hidden_layers=4, compress_ratios=(4, 128, 4, 4), hidden_size=128, n_routed_experts=4, moe_intermediate_size=64
    )
    config = preset("demo").__class__(**{**vars(preset("demo")), **fields})
    return DeepseekV4(config, init_weights(config, 0, jnp.bfloat16))


def tight(model: DeepseekV4, backup: str) -> CacheLayout:
    """A slab with room for a third of the prompts' C4 pages."""
    cache = CacheConfig(
        max_model_len=4_096, max_requests=2, gpu_blocks=2, host_blocks=40, num_hot_slots=64, rows="fp8", backup=backup
    )  # fmt: skip
    draft = plan_layout(model.config, cache)
    pages = sum(draft.num_pages(len(p) + STEPS + 256) for p in PROMPTS)
    tails = 2 * (3 * draft.num_resident_groups + draft.hot_blocks)
    blocks = 1 + draft.num_base_groups * pages + tails + draft.num_resident_groups
    return plan_layout(model.config, CacheConfig(**{**vars(cache), "gpu_blocks": blocks}))


@pytest.mark.parametrize(
    ("backup", "kernels"),
    [("write_through", ("cuda", "pallas")), ("spill", ("cuda", "pallas")), ("write_through", ("pallas",))],
    ids=["write_through-cuda", "spill-cuda", "write_through-pallas"],
)
def test_tiered_equals_resident_in_every_bit(backup, kernels, monkeypatch):
    need(kernels[0], "gather_rows")
    monkeypatch.setattr(host_pool, "CUDA_PREFERENCE", kernels)
    jax.clear_caches()
    model = small_model()
    layout = tight(model, backup)
    tiered = generate(model, PROMPTS, layout, max_new_tokens=STEPS + 1, call_steps=STEPS)
    assert sum(r.pages_lost for r in tiered.reports) > 0, "nothing was lost"
    assert sum(tiered.layer_counts["misses"]) > 0, "nothing was swapped in"
    resident = generate(model, PROMPTS, resident_layout(layout), max_new_tokens=STEPS + 1, twin="resident", call_steps=STEPS)
    assert compare(tiered, resident).equal


def test_drafts_change_no_bit():
    ffi.load_library()
    check_patterns(layout_of(small_model().config, rows="fp8", num_hot_slots=128))


def test_a_step_waits_for_the_host_nowhere():
    """What XLA compiled: no copy of a pool or the slab, no transfer or callback; inside a step no branch and no open loop, each
    of which would bring its predicate to the host. The loops over steps and stretches, and the head of a stretch, may."""
    ffi.load_library()
    model = small_model()
    layout = tight(model, "write_through")
    state = decode.init_state(layout)
    lowered = decode.decode_steps.lower(model, state, jnp.int32(STEPS), layout=layout, max_steps=STEPS)
    text = lowered.compile().as_text()
    assert text is not None and "callback" not in text
    lines = [line.strip() for line in text.splitlines()]

    def found(op: str, *also: str) -> list[str]:
        return [
            line[:200] for line in lines if re.search(rf"\b{op}(-start|-done)?\(", line) and all(word in line for word in also)
        ]

    for op in ("infeed", "outfeed", "send", "recv"):
        assert not found(op)
    for array in (state.slab, *state.pools):
        assert not found("copy", f"u8[{','.join(map(str, array.shape))}]")
    assert not found("copy", "S(5)")

    in_step = [line for line in lines if "/while/body/while/body/" in line]
    assert len(in_step) > 100, "the step was not found"
    assert not [line[:200] for line in in_step if " conditional(" in line]
    assert not [line[:200] for line in in_step if " while(" in line and "known_trip_count" not in line]
