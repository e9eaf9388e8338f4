"""The verdict can fail: one wrong byte in either tier, and `generate.py` says "different" and exits with 1."""

import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from runs import run_script
from test_generate import FLAGS, write_prompts

from hisparse_jax import decode
from hisparse_jax.generation import Generation, compare
from hisparse_jax.layout import CacheLayout
from hisparse_jax.state import TieredState

SIGN = 0x80
"""Of the high byte of a bf16 number: a wrong row, never a NaN."""


def copied(state: TieredState) -> TieredState:
    return jax.tree.map(lambda x: jax.device_put(np.array(x), x.sharding), state)


def flipped(array: jax.Array, row: int, byte: int) -> jax.Array:
    changed = np.array(array)
    changed[row, byte] ^= SIGN
    return jax.device_put(changed, array.sharding)


def spoil_host_page(state: TieredState, ahead: TieredState, layout: CacheLayout, counts: np.ndarray) -> TieredState:
    """One byte of a host row that the next step misses: the maps were empty, and now a slot holds it."""
    assert counts[0, 0, 3] > 0 and (np.asarray(state.hot_maps[0].slot_host)[0] == -1).all()
    held = np.asarray(ahead.hot_maps[0].slot_host)[0]
    block, slot = divmod(int(held[held >= 0][0]), layout.page_entries)
    pool = flipped(state.pools[0], block, slot * layout.entry.value_bytes + 1)
    return state.replace(pools=(pool, *state.pools[1:]))


def spoil_hot_slot(state: TieredState, ahead: TieredState, layout: CacheLayout, counts: np.ndarray) -> TieredState:
    """One byte of a hot slot that the next step hits: hits stand last in the LRU order."""
    assert counts[0, 0, 2] > 0
    slot = int(np.asarray(ahead.hot_maps[0].lru)[0, -1])
    before, after = (np.asarray(s.hot_maps[0].slot_host)[0, slot] for s in (state, ahead))
    assert before == after >= 0
    place = layout.resident_place(layout.model.c4_layers[0])
    page, at = divmod(slot, layout.page_entries)
    block = int(state.ledger.hot[place.group, 0, page])
    return state.replace(slab=flipped(state.slab, block, place.offset + at * layout.entry.value_bytes + 1))


@pytest.mark.xdist_group("generate")
@pytest.mark.parametrize(("spoil", "at_call"), [(spoil_host_page, 1), (spoil_hot_slot, 2), (None, 1)])
def test_one_wrong_byte_is_seen(spoil, at_call, tmp_path, capsys, monkeypatch):
    untouched, calls = decode.decode_steps, []

    @functools.wraps(untouched)
    def spoiled(model, state, num_steps, *, layout, **options):
        if spoil is not None and len(calls) == at_call:  # call 0 compiles
            ahead, output, _ = untouched(model, copied(state), jnp.int32(1), layout=layout, **options)
            state = spoil(state, ahead, layout, np.asarray(output.counts))
        calls.append(int(num_steps))
        return untouched(model, state, num_steps, layout=layout, **options)

    monkeypatch.setattr(decode, "decode_steps", spoiled)
    code, out, err = run_script("generate.py", *FLAGS, "--prompts", *write_prompts(tmp_path), capsys=capsys)
    result = json.loads(out)
    assert calls == [0, 32, 28] and code == int(spoil is not None)
    assert result["logits_bit_equal"] is (spoil is None)
    assert ("logits different, bit for bit" in " ".join(err.split())) is (spoil is not None)


def generation(tokens: list[int], logits: list[float]) -> Generation:
    return Generation("tiered", [np.array(tokens, np.int32)], [np.array([logits], np.float32)], [], {}, 0, 0.0, 0.0, 0.0, 1)


def test_equal_means_every_bit():
    base = generation([1, 2], [0.0, 1.0])
    assert compare(base, generation([1, 2], [0.0, 1.0])).equal
    other_zero = compare(base, generation([1, 2], [-0.0, 1.0]))
    assert other_zero.tokens_equal and not other_zero.logits_bit_equal and not other_zero.equal
    other_token = compare(base, generation([1, 3], [0.0, 1.0]))
    assert not other_token.tokens_equal and other_token.logits_bit_equal and not other_token.equal
    nan = generation([1], [float("nan")])
    assert compare(nan, generation([1], [float("nan")])).equal
    assert not compare(base, generation([1, 2, 3], [0.0, 1.0])).equal, "another length"
    nothing = Generation("tiered", [], [], [], {}, 0, 0.0, 0.0, 0.0, 1)
    assert not compare(nothing, nothing).equal, "two empty runs prove nothing"
