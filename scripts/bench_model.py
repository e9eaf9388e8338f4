"""The kernel benchmark's cases of the model's own ops: index scores, attention, Sinkhorn."""

import functools
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
from bench_inputs import ENTRIES, FP8, HBM, INDEX, Case, Sizes, on_gpu, variants_of

from hisparse_jax.model.attention import sink_attention
from hisparse_jax.model.numerics import numbers_of
from hisparse_jax.pages import read_rows
from pallas_kernels import index_scores, ref, sinkhorn, sparse_attention


def index_cases(s: Sizes) -> Iterator[Case]:
    """64 heads of 128 channels, as V4-Flash has them, over the keys of 32,768 and of 131,072 tokens."""
    shapes = ((64, 128), (64, 512), (1, 128)) if on_gpu() else ((2, 2),)
    stride = 65 * 576  # a block of V4-Flash
    for batch, pages in shapes:
        columns = pages * ENTRIES

        @jax.jit
        def fixed(batch=batch, pages=pages):
            num_blocks = 1 + batch * pages
            keys = jax.random.normal(jax.random.key(0), (num_blocks, ENTRIES, INDEX.channels), jnp.bfloat16)
            pages_of = INDEX.join_page(INDEX.pack(keys))
            slab = jnp.pad(pages_of, ((0, 0), (0, stride - pages_of.shape[1])))
            return slab, 1 + jax.random.permutation(jax.random.key(2), batch * pages).astype(jnp.int32).reshape(batch, pages)

        @functools.partial(jax.jit, static_argnums=1)
        def draw(key, launches, batch=batch):
            def one(key):
                queries = jax.random.normal(key, (batch, 1, 64, 128), jnp.bfloat16).astype(jnp.float8_e4m3fn)
                queries = jax.lax.optimization_barrier(queries).astype(jnp.bfloat16)  # or XLA keeps what the rounding takes
                return queries, jax.random.normal(jax.random.fold_in(key, 1), (batch, 1, 64))

            return tuple(zip(*jax.lax.map(one, jax.random.split(key, launches))))

        def step(fixed, state, inputs, variant, batch=batch, columns=columns):
            lengths = jnp.full(batch, columns, jnp.int32)
            place = dict(page_entries=ENTRIES, offset=0)
            return state, index_scores.index_scores(*fixed, *inputs, lengths, **place, implementation=variant)

        def check(run, fixed=fixed, draw=draw):
            (inputs,) = draw(jax.random.key(3), 1)
            _, got = run(None, inputs)
            want = jax.jit(ref.index_scores, static_argnames=("page_entries", "offset"))(
                *fixed(), *inputs, page_entries=ENTRIES, offset=0
            )
            np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5 * float(jnp.abs(want).max()))

        yield Case(
            "index_scores", f"B {batch}, {columns:,} keys",
            {v: functools.partial(step, variant=v) for v in variants_of(index_scores)},
            lambda: jnp.zeros(()), draw, check, floor_us=batch * columns * INDEX.row_bytes / HBM * 1e6, fixed=fixed, most=16,
        )  # fmt: skip


def attention_cases(s: Sizes) -> Iterator[Case]:
    """64 heads over a window of 128 and 512 selected fp8 rows, as a C4 layer of V4-Flash decodes."""
    shapes = (64, "60", "43", "43"), (128, "60", "43", "43"), (32, "", "", ""), (16, "", "", "16"), (1, "", "", "12")
    heads, width, top_k, num_pages = (64, 128, 512, 128) if on_gpu() else (2, 8, 16, 2)
    step, stride, apart = 65 * ENTRIES, 65 * 576, num_pages * ENTRIES // top_k
    for batch, first, then, peer in shapes if on_gpu() else ((2, "", "", ""),):

        @jax.jit
        def fixed(batch=batch):
            def pages_of(key):
                rows = FP8.pack(jax.random.normal(key, (num_pages, ENTRIES, 512), jnp.bfloat16))
                return jnp.pad(FP8.join_page(rows), ((0, 0), (0, stride - FP8.page_bytes(ENTRIES))))

            each = jax.lax.map(pages_of, jax.random.split(jax.random.key(0), batch))
            slab = jnp.concatenate((jnp.zeros((1, stride), jnp.uint8), each.reshape(-1, stride)))
            window = FP8.pack(jax.random.normal(jax.random.key(1), (batch, width, 512), jnp.bfloat16))
            return slab, window, jnp.zeros(heads)

        @functools.partial(jax.jit, static_argnums=1)
        def draw(key, launches, batch=batch):
            def one(key):
                gaps = jax.random.randint(jax.random.fold_in(key, 1), (batch, 1, top_k), 1, apart)
                entries = jnp.cumsum(gaps, axis=2)
                block = 1 + jnp.arange(batch)[:, None, None] * num_pages + entries // ENTRIES
                return 4 * jax.random.normal(key, (batch, 1, heads, 512), jnp.bfloat16), block * step + entries % ENTRIES

            q, rows = jax.lax.map(one, jax.random.split(key, launches))
            return tuple(zip(q, rows))

        def by_op(fixed, q, rows, implementation, batch=batch):
            slab, window, sink = fixed
            positions, lengths = jnp.full((batch, 1), 32_767, jnp.int32), jnp.full((batch, 1), top_k, jnp.int32)
            operands = q, window, positions, slab, rows, lengths, sink
            static = dict(window_width=width, page_entries=ENTRIES, offset=0, row_step=step)
            return sparse_attention.sparse_attention(*operands, **static, implementation=implementation)

        def by_model(fixed, q, rows):  # as the model does without the kernel
            slab, window, sink = fixed
            packed = read_rows(slab, rows, FP8, page_entries=ENTRIES, offset=0, row_step=step)
            keys = tuple(numbers_of(part, FP8)[0] for part in (window[:, None], packed))
            return sink_attention(q, keys, tuple(jnp.ones(key.shape[:3], bool) for key in keys), sink)

        def launch(fixed, state, inputs, variant, by_op=by_op):
            return state, by_model(fixed, *inputs) if variant == "xla" else by_op(fixed, *inputs, variant)

        def check(run, fixed=fixed, draw=draw, by_op=by_op):
            (inputs,) = draw(jax.random.key(3), 1)
            got, want = run(None, inputs)[1], by_op(fixed(), *inputs, "xla")
            np.testing.assert_allclose(np.asarray(got, np.float32), np.asarray(want, np.float32), atol=0.05)

        variants = {v: functools.partial(launch, variant=v) for v in variants_of(sparse_attention)}
        yield Case(
            "sparse_attention", f"B {batch}, {heads} heads, {width} + {top_k} keys", variants,
            lambda: jnp.zeros(()), draw, check,
            floor_us=batch * ((width + top_k) * FP8.row_bytes + 4 * heads * 512) / HBM * 1e6, fixed=fixed, most=16,
            first=first, then=then, peer=peer,
        )  # fmt: skip


def sinkhorn_cases(s: Sizes) -> Iterator[Case]:
    def draw(key, launches):
        return tuple((jnp.exp(jax.random.normal(jax.random.fold_in(key, i), (s.requests, 4, 4))),) for i in range(launches))

    def step(fixed, state, inputs, variant):
        return state, sinkhorn.sinkhorn(inputs[0], 20, 1e-6, implementation=variant)

    def check(run):
        (inputs,) = draw(jax.random.key(1), 1)
        np.testing.assert_allclose(run(None, inputs)[1], ref.sinkhorn(*inputs, 20, 1e-6), rtol=1e-5)

    variants = {v: functools.partial(step, variant=v) for v in (("xla", "pallas") if on_gpu() else ("xla",))}
    yield Case("sinkhorn", f"[{s.requests}, 4, 4] 20 passes", variants, lambda: jnp.zeros(()), draw, check)
