"""What goes from the arithmetic to a cache, and back, goes through a border: rows, masks, entry numbers, the span itself.

Read off the traced model, so that every crossing is seen; what XLA makes of a missing one depends on shapes and versions
(`h200_programs/decode_geometry.py`).
"""

import jax
import jax.numpy as jnp
import pytest
from runs import TINY, build, tight_layout

from hisparse_jax.entries import Entries, EntryCache
from hisparse_jax.layer_state import init_layer_states
from hisparse_jax.model.span import make_span

BATCH = 2


class Recorder(EntryCache):
    """Gives `given` arrays to every read and keeps what it was handed."""

    handed = []
    given = {}

    def _take(self, what: str, *crossing):
        self.handed.extend((what, leaf) for leaf in jax.tree.leaves(crossing))
        return self

    def store_c4(self, layer, rows, numbers, real, span, layout):
        return self._take("store_c4", rows, numbers, real, span)

    def store_c128(self, layer, rows, numbers, real, span, layout):
        return self._take("store_c128", rows, numbers, real, span)

    def store_index(self, layer, rows, numbers, real, span, layout):
        return self._take("store_index", rows, numbers, real, span)

    def read_index(self, layer, first_page, num_pages, span, layout):
        self._take("read_index", span)
        return self.given["index"]

    def read_c128(self, layer, span, layout):
        self._take("read_c128", span)
        return Entries(self.given["c128"], self.given["seen"], None)

    def fetch_c4(self, layer, selection, span, layout):
        self._take("fetch_c4", span)
        return Entries(self.given["c4"], selection.indices >= 0, None), self, selection


def float_users(traced, variables) -> list:
    """Equations with a float result that depend on integers computed from `variables`, borders and selections apart."""
    reached, found = {id(var) for var in variables}, []
    for eqn in traced.eqns:
        if reached & {id(var) for var in eqn.invars} and eqn.primitive.name != "optimization_barrier":
            floats = [var for var in eqn.outvars if jnp.issubdtype(var.aval.dtype, jnp.floating)]
            found += [eqn] if floats else []
            reached |= {id(var) for var in eqn.outvars if var not in floats}
    return found


@pytest.mark.parametrize("num_tokens", [1, 4], ids=["decode", "drafts"])
def test_everything_crosses_a_border(num_tokens):
    layout = tight_layout(
        TINY, (2,), slack=2, max_model_len=1_024, max_requests=BATCH, num_hot_slots=64, rows="f32", draft_rows=num_tokens - 1
    )
    model, row, entries = build(TINY, "f32"), layout.entry.row_bytes, layout.max_pages * layout.page_entries
    c128 = layout.max_pages * layout.page_tokens // 128
    given = dict(
        index=jnp.zeros((BATCH, entries, layout.index.row_bytes), jnp.uint8),
        c128=jnp.zeros((BATCH, c128, row), jnp.uint8),
        seen=jnp.ones((BATCH, num_tokens, c128), bool),
        c4=jnp.zeros((BATCH, num_tokens, TINY.index_topk, row), jnp.uint8),
    )
    one = jnp.zeros((1, BATCH, layout.max_pages), jnp.int32)
    cache = Recorder(slab=jnp.zeros((2, layout.stride), jnp.uint8), base=one, resident=one)

    def call(given, tokens, start, count):
        Recorder.given, Recorder.handed = given, []
        model(tokens, make_span(None, start, count, num_tokens), init_layer_states(layout), cache, layout)
        return [leaf for _, leaf in Recorder.handed]

    numbers = jnp.full(BATCH, num_tokens, jnp.int32)
    traced = jax.make_jaxpr(call)(given, jnp.zeros((BATCH, num_tokens), jnp.int32), 300 + numbers, numbers).jaxpr
    made_by = {id(var): eqn.primitive.name for eqn in traced.eqns for var in eqn.outvars}
    names = [what for what, _ in Recorder.handed]
    assert {"store_c4", "store_c128", "store_index", "read_index", "read_c128", "fetch_c4"} == set(names)
    bare = [f"{what}: {var.aval}" for what, var in zip(names, traced.outvars) if made_by.get(id(var)) != "optimization_barrier"]
    assert not bare, f"handed to the cache without a border: {bare}"

    spans = [var for what, var in zip(names, traced.outvars) if what == "fetch_c4"]
    shared = [str(eqn) for eqn in float_users(traced, spans)]
    assert not shared, f"the arithmetic reads the span that the cache has: {shared}"
    used = [
        f"{name} by {eqn.primitive.name}"
        for name, var in zip(sorted(given), traced.invars)
        for eqn in traced.eqns
        if any(var is operand for operand in eqn.invars) and eqn.primitive.name not in ("optimization_barrier", "ge")
    ]
    assert not used, f"read from the cache and used without a border: {used}"
