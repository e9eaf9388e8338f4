"""Both twins' programs at V4-Flash's geometry: 64 requests of 131,072 tokens, a 40 GiB slab, 64 GiB of host pools.

The tiered program may copy neither a pool nor the slab, nor want host memory beside the pools. And both compute with the same
kernels wherever numbers are rounded, or they could differ in a bit. Without an argument the decode call, two C4 layers
and one of each other kind standing for 43, written through, by CUDA kernels. With one: `pallas`, the same without them;
`prefill`, a chunk; C4 layers alone for `spill`, the copies of a lazy spill, `verify`, steps of 4 rows, and `prefetch`, a
layer that gets its leader's rows early.
"""

import dataclasses
import inspect
import sys
from collections.abc import Callable
from unittest import mock

import jax
import jax.numpy as jnp
from float_kernels import float_kernels
from h200 import assert_in_place, compile_for_h200, pretend_cuda_kernels, spec, specs_like

from hisparse_jax import decode, resident
from hisparse_jax.config import CacheConfig, preset
from hisparse_jax.generation import resident_layout
from hisparse_jax.layout import CacheLayout, plan_layout
from hisparse_jax.model.blocks import DeepseekV4
from hisparse_jax.programs import COMPILER_OPTIONS
from hisparse_jax.resident import ResidentState
from hisparse_jax.speculative import Replay
from hisparse_jax.state import TieredState, assemble_state
from hisparse_jax.weights import tensor_dtype, tensor_shapes

DEVICE_TEMP = 2 * 2**30


def tiered_specs(layout: CacheLayout) -> TieredState:
    pools = tuple(spec((layout.host_blocks, layout.page_bytes), jnp.uint8, "pinned_host") for _ in layout.model.c4_layers)
    slab = spec((layout.gpu_blocks, layout.stride), jnp.uint8)
    rest = jax.eval_shape(lambda: assemble_state(layout, jnp.zeros((1, 1), jnp.uint8), ()))
    return jax.tree.map(lambda x: spec(x.shape, x.dtype), rest).replace(slab=slab, pools=pools)


def resident_specs(layout: CacheLayout) -> ResidentState:
    with mock.patch.object(resident, "committed", lambda state: state):
        state = jax.eval_shape(lambda: resident.init_state(layout))
    return jax.tree.map(lambda x: spec(x.shape, x.dtype), state)


def decode_call(module, layout: CacheLayout) -> tuple[Callable, tuple]:
    def call(model, state, num_steps):
        return inspect.unwrap(module.decode_steps)(model, state, num_steps, layout=layout, max_steps=64)

    return call, (spec((), jnp.int32),)


def verify_call(module, layout: CacheLayout) -> tuple[Callable, tuple]:
    def call(model, state, num_steps, drafts):
        return inspect.unwrap(module.verify_steps)(model, state, drafts, num_steps, layout=layout, max_steps=64)

    guesses = jax.eval_shape(lambda: Replay(jnp.zeros((64, 64 * layout.cache.query_rows), jnp.int32), jnp.zeros(64, jnp.int32)))
    return call, (spec((), jnp.int32), specs_like(guesses))


def prefill_call(module, layout: CacheLayout) -> tuple[Callable, tuple]:
    def call(model, state, *operands):
        return inspect.unwrap(module.prefill_chunk)(model, state, *operands, layout=layout)

    number, ids = spec((), jnp.int32), spec((layout.cache.chunk_pages,), jnp.int32, "pinned_host")
    backed_up = ((ids,) * layout.num_resident_groups, ids) if module is decode else ()
    return call, (spec((layout.cache.chunk_tokens,), jnp.int32), number, number, *backed_up)


def check(
    call_of: Callable, compress_ratios: tuple[int, ...], leaders: tuple[int, ...] | None = None, attentions: int = 0, **options
) -> None:
    """`attentions`: how many layers attend by the CUDA kernel."""
    flash = dataclasses.replace(
        preset("v4-flash"), num_hidden_layers=len(compress_ratios), compress_ratios=compress_ratios, index_leaders=leaders
    )
    cache = CacheConfig(max_model_len=131_072, max_requests=64, gpu_pool_bytes=40 * 2**30, host_pool_bytes=64 * 2**30, **options)
    layout = plan_layout(flash, cache)
    weights = {n: spec(shape, tensor_dtype(n, jnp.bfloat16)) for n, shape in tensor_shapes(flash).items()}
    model, state = DeepseekV4(flash, weights), tiered_specs(layout)

    def compiled(module, state, layout: CacheLayout):
        call, operands = call_of(module, layout)
        return compile_for_h200(call, model, state, *operands, donate=1, triton=True, options=COMPILER_OPTIONS)

    tiered = compiled(decode, state, layout)
    print(options, tiered.stats)
    assert_in_place(tiered, state.slab, *state.pools)
    assert tiered.stats.temp_size_in_bytes < DEVICE_TEMP, f"device temp {tiered.stats.temp_size_in_bytes / 2**30:.2f} GiB"

    whole = compiled(resident, resident_specs(resident_layout(layout)), resident_layout(layout))
    ours, theirs = float_kernels(tiered.hlo), float_kernels(whole.hlo)
    assert theirs.total() > 20 * len(compress_ratios), "the kernels were not found"
    calls = [program.hlo.count('custom_call_target="hisparse_sparse_attention"') for program in (tiered, whole)]
    assert calls == [attentions] * 2, f"{calls} layers of the twins attend by the kernel, not {attentions}"
    alone = [f"tiered alone:\n{kernel}" for kernel in ours - theirs] + [f"resident alone:\n{kernel}" for kernel in theirs - ours]
    assert not alone, "\n\n".join([f"{len(alone)} of {len(ours | theirs)} kernels that round differ", *alone])[:6_000]


CASES = {
    "decode": lambda: check(decode_call, (0, 4, 128, 4), attentions=4),
    "pallas": lambda: check(decode_call, (0, 4, 128, 4)),
    "prefill": lambda: check(prefill_call, (0, 4, 128)),
    "spill": lambda: check(decode_call, (4, 4), attentions=2, backup="spill"),
    "verify": lambda: check(verify_call, (4, 4), attentions=2, draft_rows=3),
    "prefetch": lambda: check(decode_call, (4, 4, 4), leaders=(0, 2), attentions=2, prefetch_followers=True),
}
case = sys.argv[1] if len(sys.argv) > 1 else "decode"
if case != "pallas":
    pretend_cuda_kernels()
CASES[case]()
