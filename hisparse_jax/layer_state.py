"""What a layer keeps of every running request outside the slab: window latents and compressor rings, one dense slot each.

Windows are rows of the entry format, rings hold raw compressor projections; of `W` rows, position p stands at `p mod W`. Both
have a row for each draft beyond what reads reach back: rejected drafts then overwrote nothing that is needed again. Neither is
cleared between requests: reads are masked by position, so an earlier request cannot be seen.
"""

import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Float32, UInt8

from hisparse_jax.config import C4, SWA
from hisparse_jax.layout import CacheLayout
from hisparse_jax.model.compressor import ring_rows, ring_width


class LayerState(struct.PyTreeNode):
    """One layer's dense state of `B` request slots.

    window: u8[B, W, row_bytes]           packed latents of the sliding window.
    ring: f32[B, rows, floats] or None    compressor projections (kv, then gate); C4 and C128 layers.
    index_ring: the same of the index compressor; C4 layers that lead.
    """

    window: UInt8[Array, "B W row_bytes"]
    ring: Float32[Array, "B rows floats"] | None
    index_ring: Float32[Array, "B rows index_floats"] | None


def init_layer_states(layout: CacheLayout) -> tuple[LayerState, ...]:
    """Zeroed state of every layer of the model, in order."""
    model, batch, drafts = layout.model, layout.cache.max_requests, layout.cache.draft_rows

    def ring(ratio: int, width: int):
        return jnp.zeros((batch, ring_rows(ratio) + drafts, ring_width(ratio, width)), jnp.float32)

    return tuple(
        LayerState(
            window=jnp.zeros((batch, model.sliding_window + drafts, layout.entry.row_bytes), jnp.uint8),
            ring=None if ratio == SWA else ring(ratio, model.head_dim),
            index_ring=ring(ratio, model.index_head_dim) if ratio == C4 and model.leader_of(layer) == layer else None,
        )
        for layer, ratio in enumerate(model.compress_ratios)
    )
