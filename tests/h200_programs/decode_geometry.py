"""The tiered decode call at V4-Flash's geometry: 64 requests of 131,072 tokens, a 40 GiB slab, 64 GiB of host pools.

Two layers of each compressed kind and one of the window stand for 43, written through. With an argument C4 layers alone:
`spill`, for the copies of a lazy spill; `verify`, for steps of 4 rows; `prefetch`, for a layer that gets its leader's rows early.
Nothing may copy a pool or the slab, nor want host memory beside the pools.
"""

import dataclasses
import inspect
import sys

import jax
import jax.numpy as jnp
from h200 import assert_in_place, compile_for_h200, spec, specs_like

from hisparse_jax import decode
from hisparse_jax.config import CacheConfig, preset
from hisparse_jax.layout import CacheLayout, plan_layout
from hisparse_jax.model.blocks import DeepseekV4
from hisparse_jax.speculative import Replay
from hisparse_jax.state import TieredState, assemble_state
from hisparse_jax.weights import tensor_dtype, tensor_shapes

DEVICE_TEMP = 2 * 2**30


def state_specs(layout: CacheLayout) -> TieredState:
    pools = tuple(spec((layout.host_blocks, layout.page_bytes), jnp.uint8, "pinned_host") for _ in layout.model.c4_layers)
    slab = spec((layout.gpu_blocks, layout.stride), jnp.uint8)
    rest = jax.eval_shape(lambda: assemble_state(layout, jnp.zeros((1, 1), jnp.uint8), ()))
    return jax.tree.map(lambda x: spec(x.shape, x.dtype), rest).replace(slab=slab, pools=pools)


def check(compress_ratios: tuple[int, ...], leaders: tuple[int, ...] | None = None, **options) -> None:
    flash = dataclasses.replace(
        preset("v4-flash"), num_hidden_layers=len(compress_ratios), compress_ratios=compress_ratios, index_leaders=leaders
    )
    cache = CacheConfig(max_model_len=131_072, max_requests=64, gpu_pool_bytes=40 * 2**30, host_pool_bytes=64 * 2**30, **options)
    layout = plan_layout(flash, cache)
    weights = {n: spec(shape, tensor_dtype(n, jnp.bfloat16)) for n, shape in tensor_shapes(flash).items()}
    model, state = DeepseekV4(flash, weights), state_specs(layout)

    def call(model, state, num_steps, drafts):
        if cache.draft_rows:
            return inspect.unwrap(decode.verify_steps)(model, state, drafts, num_steps, layout=layout, max_steps=64)
        return inspect.unwrap(decode.decode_steps)(model, state, num_steps, layout=layout, max_steps=64)

    guesses = jax.eval_shape(lambda: Replay(jnp.zeros((64, 64 * cache.query_rows), jnp.int32), jnp.zeros(64, jnp.int32)))
    compiled = compile_for_h200(call, model, state, spec((), jnp.int32), specs_like(guesses), donate=1, triton=True)
    print(options, compiled.stats)
    assert_in_place(compiled, state.slab, *state.pools)
    assert compiled.stats.temp_size_in_bytes < DEVICE_TEMP, f"device temp {compiled.stats.temp_size_in_bytes / 2**30:.2f} GiB"


CASES = {
    "spill": lambda: check((4, 4), backup="spill"),
    "verify": lambda: check((4, 4), draft_rows=3),
    "prefetch": lambda: check((4, 4, 4), leaders=(0, 2), prefetch_followers=True),
}

if len(sys.argv) > 1:
    CASES[sys.argv[1]]()
else:
    check((0, 4, 128, 4, 128))
