"""The kernel benchmark's cases: each op of the tiers at its V4 shapes, with its check, its targets and its peer."""

import functools
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
from bench_inputs import HBM, Case, Sizes, on_gpu, variants_of
from bench_model import attention_cases, index_cases, sinkhorn_cases
from bench_swap_in import gather_cases, resolve_cases, skewed_cases, swap_in_cases, trace_cases
from bench_way_out import backup_cases, store_cases

from pallas_kernels import ref, topk_select


def topk_cases(s: Sizes) -> Iterator[Case]:
    shapes = (
        (64, 32_768, 512, "18", "9", "9.0"), (64, 8_192, 512, "9", "4.5", "4.5"), (64, 262_144, 512, "116", "58", "58.1"),
        (64, 32_768, 1_024, "20", "10", "9.9"), (1, 32_768, 512, "", "", "8.4"),
    )  # fmt: skip
    for batch, size, k, first, then, peer in shapes if on_gpu() else ((2, 256, 64, "", "", ""),):

        def draw(key, launches, batch=batch, size=size):
            return tuple((jax.random.normal(jax.random.fold_in(key, i), (batch, size)),) for i in range(launches))

        def step(fixed, state, inputs, variant, batch=batch, size=size, k=k, ctas=None):
            lengths = jnp.full(batch, size, jnp.int32)
            return state, topk_select.topk_select(inputs[0], lengths, k, implementation=variant, ctas_per_row=ctas)

        def check(run, batch=batch, size=size, k=k):
            scores = jnp.round(jax.random.normal(jax.random.key(1), (batch, size)) * 64) / 64  # ties
            _, got = run(None, (scores,))
            want = jax.jit(ref.topk_select, static_argnums=2)(scores, jnp.full(batch, size, jnp.int32), k)
            np.testing.assert_array_equal(got, want)

        variants = {v: functools.partial(step, variant=v) for v in variants_of(topk_select)}
        if "cuda" in variants and size <= 32_768 and batch > 1:
            variants["cuda/2"] = functools.partial(step, variant="cuda", ctas=2)
        yield Case(
            "topk_select", f"[{batch}, {size:,}] k {k}", variants,
            lambda: jnp.zeros(()), draw, check, floor_us=batch * size * 4 / HBM * 1e6, first=first, then=then, peer=peer,
        )  # fmt: skip


def cases(s: Sizes) -> Iterator[Case]:
    for make in (
        resolve_cases, swap_in_cases, skewed_cases, trace_cases, store_cases, topk_cases, index_cases, attention_cases,
        sinkhorn_cases, gather_cases, backup_cases,
    ):  # fmt: skip
        yield from make(s)
