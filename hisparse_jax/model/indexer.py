"""Scores every compressed entry of a request against a query, to pick the few that attention reads.

Source: DeepSeek V4's published inference code: `I = sum_h g_h relu(q_h . k)`, no norm on index queries, weights of either
sign. Keys are read page by page from the cache and scored in blocks, so that no array over heads x all entries exists.
"""

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Float32

from hisparse_jax.config import C4, ModelConfig
from hisparse_jax.entries import EntryCache
from hisparse_jax.layout import CacheLayout
from hisparse_jax.model.compressor import Compressor
from hisparse_jax.model.numerics import border, contract, linear, numbers_of
from hisparse_jax.model.rope import frequencies, rotate
from hisparse_jax.model.span import Span
from hisparse_jax.rows import RowFormat, hadamard
from pallas_kernels.choice import choose
from pallas_kernels.index_scores import fits, index_scores

DECODE_BLOCK, PREFILL_BLOCK = 4_096, 512
"""Entries scored at a time; in decode by all query rows of a request together."""


class Indexer(nnx.Module):
    """Index queries, their weights, and the compressor of index keys of one C4 layer."""

    def __init__(self, config: ModelConfig, weights, prefix: str):
        self.config = config
        self.wq_b = nnx.Param(weights[f"{prefix}wq_b.weight"])
        self.weights_proj = nnx.Param(weights[f"{prefix}weights_proj.weight"])
        self.compressor = Compressor(config, C4, config.index_head_dim, weights, f"{prefix}compressor.")

    def queries(
        self, x: Float[Array, "R T D"], qr: Float[Array, "R T q"], span: Span, index: RowFormat, *, rotated: bool
    ) -> tuple[Float[Array, "R T H d"], Float32[Array, "R T H"]]:
        """Index queries as stored numbers of the index format, and head weights with every scale folded in."""
        cfg = self.config
        heads, dim = cfg.index_n_heads, cfg.index_head_dim
        q = linear(qr, self.wq_b[...]).reshape(*qr.shape[:-1], heads, dim)
        q = rotate(q, span.positions[..., None], frequencies(cfg, C4))
        if rotated:
            q = hadamard(q)
        values, scale = index.unpack_scaled(index.pack(q))
        weight = contract("rtd,hd->rth", x, self.weights_proj[...])
        return values, weight * scale * (dim**-0.5 * heads**-0.5)


def score_entries(
    queries: Float[Array, "R T H d"],
    weights: Float32[Array, "R T H"],
    cache: EntryCache,
    layer: int,
    span: Span,
    layout: CacheLayout,
) -> Float32[Array, "R T N"]:
    """Index score of every entry that a request may hold; columns past its newest hold anything, to be masked.

    In decode (R > 1, or one row) one CUDA kernel scores all of them where the library has it and the shapes fit. The scores are a
    border: selection reads exactly these numbers in both twins.
    """
    decoding, heads, channels = queries.shape[0] > 1 or queries.shape[1] == 1, *queries.shape[2:]
    blocks, offset = cache.index_pages(layer, span, layout)

    def by_blocks(queries, weights):
        return _by_blocks(queries, weights, cache, layer, span, layout, decoding=decoding)

    def by_kernel(queries, weights):
        lengths = span.num_entries(C4).max(axis=1)
        place = dict(page_entries=layout.page_entries, offset=offset)
        return border(index_scores(cache.slab, blocks, queries, weights, lengths, **place, implementation="cuda"))

    shape = dict(stride=layout.stride, page_entries=layout.page_entries, offset=offset)
    if not (decoding and layout.index.name == "fp8" and fits(queries.shape[0] * queries.shape[1], heads, channels, **shape)):
        return by_blocks(queries, weights)
    return choose("index_scores", None, dict(xla=by_blocks, cuda=by_kernel), queries, weights)


def _by_blocks(queries, weights, cache: EntryCache, layer: int, span: Span, layout: CacheLayout, *, decoding: bool):
    """By XLA, in blocks of entries. Prefill scores as many as the longest request needs. Decode scores all of them: a loop whose
    length the GPU has to tell the host would cost more."""
    num_pages, page_entries = layout.max_pages, layout.page_entries
    wanted = max(DECODE_BLOCK // queries.shape[1], PREFILL_BLOCK) if decoding else PREFILL_BLOCK
    block_pages = min(num_pages, max(1, wanted // page_entries))
    blocks, width = -(-num_pages // block_pages), block_pages * page_entries

    def block(number):
        packed = cache.read_index(layer, number * block_pages, block_pages, span, layout)
        keys, scale = numbers_of(packed, layout.index)
        dots = jax.nn.relu(contract("rthd,rnd->rthn", queries, keys))
        return border(contract("rth,rthn->rtn", weights, dots) * scale[:, None, :])

    if blocks == 1:
        return block(jnp.int32(0))
    if decoding:
        scored = jnp.moveaxis(jax.lax.map(block, jnp.arange(blocks, dtype=jnp.int32)), 0, 2)
        return scored.reshape(*scored.shape[:2], -1)[..., : num_pages * page_entries]

    def fill(number, scores):
        return jax.lax.dynamic_update_slice_in_dim(scores, block(number), number * width, axis=2)

    scores = jnp.zeros((*queries.shape[:2], blocks * width), jnp.float32)
    limit = span.num_entries(C4).max()
    return jax.lax.fori_loop(0, -(-limit // width), fill, scores)[..., : num_pages * page_entries]
