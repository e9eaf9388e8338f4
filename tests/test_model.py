"""Each stage of the model against numbers worked out apart from it, in float64 or by hand."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hisparse_jax.config import C4, C128, SWA, preset
from hisparse_jax.model.attention import sink_attention
from hisparse_jax.model.compressor import Compressor, ring_rows, ring_width
from hisparse_jax.model.moe import MoE
from hisparse_jax.model.rope import frequencies, rotate
from hisparse_jax.model.span import make_span
from hisparse_jax.sequences import sample

RNG = np.random.default_rng(11)
FLASH, TINY = preset("v4-flash"), preset("tiny")


def normal(*shape: int) -> np.ndarray:
    return RNG.standard_normal(shape).astype(np.float32)


def test_yarn_leaves_fast_pairs_and_divides_slow_ones():
    """Published configs: pairs 0-15 as they are, 25-31 by 16, a linear blend between."""
    plain = 160_000.0 ** (-np.arange(0, 64, 2) / 64)
    for ratio in (C4, C128):
        share = frequencies(FLASH, ratio) / plain
        np.testing.assert_allclose(share[:16], 1, rtol=1e-6)
        np.testing.assert_allclose(share[25:], 1 / 16, rtol=1e-6)
        np.testing.assert_allclose(share[15:26], 1 - np.arange(11) / 10 * (1 - 1 / 16), rtol=1e-6)
    np.testing.assert_allclose(frequencies(FLASH, SWA), 10_000.0 ** (-np.arange(0, 64, 2) / 64), rtol=1e-6)
    unscaled = dataclasses.replace(FLASH, rope_scaling=None)
    np.testing.assert_allclose(frequencies(unscaled, C4), plain, rtol=1e-6)


def test_rotation_turns_pairs_of_the_last_channels_and_back():
    x, freqs = normal(3, 10), np.array([0.5, 0.25], np.float32)
    turned = np.asarray(rotate(jnp.asarray(x), jnp.int32([0, 1, 6]), freqs))
    np.testing.assert_array_equal(turned[:, :6], x[:, :6])
    np.testing.assert_array_equal(turned[0], x[0])
    for row, position in ((1, 1), (2, 6)):
        for pair, freq in enumerate(freqs):
            a, b = x[row, 6 + 2 * pair : 8 + 2 * pair]
            cos, sin = math.cos(position * freq), math.sin(position * freq)
            expected = [a * cos - b * sin, b * cos + a * sin]
            np.testing.assert_allclose(turned[row, 6 + 2 * pair : 8 + 2 * pair], expected, rtol=1e-5, atol=1e-6)
    back = rotate(jnp.asarray(turned), jnp.int32([0, 1, 6]), freqs, inverse=True)
    np.testing.assert_allclose(back, x, rtol=1e-5, atol=1e-6)


def compressor_and_reference(ratio: int, tokens: int):
    """A compressor, its input, and every entry it must give: softmax pooling token by token, float64."""
    config, width = dataclasses.replace(TINY, hidden_size=6), TINY.qk_rope_head_dim + 2
    wide = width * (2 if ratio == C4 else 1)
    weights = {
        "wkv.weight": normal(wide, 6),
        "wgate.weight": normal(wide, 6),
        "ape": normal(ratio, wide),
        "norm.weight": normal(width),
    }
    module = Compressor(config, ratio, width, {name: jnp.asarray(w) for name, w in weights.items()}, "")
    x = normal(1, tokens, 6)
    kv = x[0].astype(np.float64) @ weights["wkv.weight"].T
    gate = x[0].astype(np.float64) @ weights["wgate.weight"].T + weights["ape"][np.arange(tokens) % ratio]
    entries = []
    for j in range(tokens // ratio):
        own, older = range(ratio * j, ratio * (j + 1)), range(max(ratio * (j - 1), 0), ratio * j)
        if ratio == C4:
            z = np.concatenate([gate[older, :width], gate[own, width:]])
            c = np.concatenate([kv[older, :width], kv[own, width:]])
        else:
            z, c = gate[own], kv[own]
        weight = np.exp(z - z.max(axis=0))
        pooled = (weight / weight.sum(axis=0) * c).sum(axis=0)
        pooled = pooled / np.sqrt((pooled**2).mean() + config.rms_norm_eps) * weights["norm.weight"]
        angle = ratio * j * frequencies(config, ratio).astype(np.float64)
        first, second = pooled[-16::2].copy(), pooled[-15::2].copy()
        pooled[-16::2] = first * np.cos(angle) - second * np.sin(angle)
        pooled[-15::2] = second * np.cos(angle) + first * np.sin(angle)
        entries.append(pooled)
    return module, jnp.asarray(x), np.array(entries), width


@pytest.mark.parametrize(("ratio", "tokens"), [(C4, 13), (C128, 260)])
@pytest.mark.parametrize("chunks", [(260,), (1, 2, 3, 5, 249)])
def test_compressor_worked_examples(ratio, tokens, chunks):
    """Entry j closes at token ratio * j + ratio - 1; entry 0 has no older half; an open window gives nothing."""
    module, x, expected, width = compressor_and_reference(ratio, tokens)
    ring = jnp.full((2, ring_rows(ratio), ring_width(ratio, width)), jnp.nan)  # E5: leftovers of an earlier request
    start, found = 0, {}
    for count in chunks:
        count = min(count, tokens - start)
        span = make_span(jnp.int32([1]), jnp.int32([start]), jnp.int32([count]), count)
        values, numbers, real, ring = module(x[:, start : start + count], span, ring)
        for number, value in zip(np.asarray(numbers)[np.asarray(real)], np.asarray(values)[np.asarray(real)], strict=True):
            assert start <= ratio * number + ratio - 1 < start + count and number not in found
            found[int(number)] = value
        start += count
        if start >= tokens:
            break
    assert sorted(found) == list(range(tokens // ratio))
    np.testing.assert_allclose([found[j] for j in sorted(found)], expected, rtol=2e-4, atol=2e-5)


def test_entries_seen_by_position():
    span = make_span(jnp.int32([0]), jnp.int32([0]), jnp.int32([1_001]), 1_001)
    c4, c128 = span.num_entries(C4)[0], span.num_entries(C128)[0]
    assert c4[jnp.array([2, 3, 6, 7, 11, 127, 1_000])].tolist() == [0, 1, 1, 2, 3, 32, 250]
    assert c128[jnp.array([126, 127, 255, 639, 1_000])].tolist() == [0, 1, 2, 5, 7]


def attention_inputs():
    q, window, picked, sink = normal(2, 3, 2, 8), normal(2, 3, 4, 8), normal(2, 3, 5, 8), normal(2)
    masks = RNG.random((2, 3, 4)) < 0.6, RNG.random((2, 3, 5)) < 0.6
    return q, (window, picked), masks, sink


def attend(q, keys, masks, sink) -> np.ndarray:
    return np.asarray(
        sink_attention(jnp.asarray(q), tuple(map(jnp.asarray, keys)), tuple(map(jnp.asarray, masks)), jnp.asarray(sink))
    )


def test_attention_is_one_softmax_with_a_sink():
    q, keys, masks, sink = attention_inputs()
    every, mask = np.concatenate(keys, axis=2).astype(np.float64), np.concatenate(masks, axis=2)
    weight = np.exp(np.einsum("rthc,rtnc->rthn", q, every) * 8**-0.5) * mask[:, :, None, :]
    total = np.exp(sink.astype(np.float64))[None, None, :] + weight.sum(axis=-1)
    expected = np.einsum("rthn,rtnc->rthc", weight / total[..., None], every)
    np.testing.assert_allclose(attend(q, keys, masks, sink), expected, rtol=1e-5, atol=1e-6)


def test_a_masked_key_weighs_nothing_and_a_query_without_keys_gives_zeros():
    q, keys, (near, far), sink = attention_inputs()
    near[0, 1], far[0, 1] = False, False
    got = attend(q, keys, (near, far), sink)
    assert np.isfinite(got).all() and not got[0, 1].any()
    zeroed = tuple(np.where(mask[..., None], key, 0) for key, mask in zip(keys, (near, far), strict=True))
    assert attend(q, zeroed, (near, far), sink).tobytes() == got.tobytes()


def test_a10_valid_keys_count_wherever_they_stand():
    """Selected [5, -1, 8, -1] attends 5 and 8: -1 may stand before valid ones."""
    q, (window, picked), (near, far), sink = attention_inputs()
    far[:] = [True, False, True, False, False]
    packed = np.concatenate([picked[:, :, [0, 2]], np.zeros_like(picked[:, :, :3])], axis=2)
    front = np.broadcast_to([True, True, False, False, False], far.shape)
    got = attend(q, (window, picked), (near, far), sink)
    np.testing.assert_allclose(got, attend(q, (window, packed), (near, front), sink), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("hashed", [True, False])
def test_experts_are_chosen_and_weighed_as_published(hashed):
    config = dataclasses.replace(
        TINY, hidden_size=6, moe_intermediate_size=5, n_routed_experts=4, vocab_size=9, num_hash_layers=int(hashed)
    )
    shapes = {"gate.weight": (4, 6)}
    shapes |= {f"experts.{n}.weight": (4, *s) for n, s in (("w1", (5, 6)), ("w3", (5, 6)), ("w2", (6, 5)))}
    shapes |= {f"shared_experts.{n}.weight": s for n, s in (("w1", (5, 6)), ("w3", (5, 6)), ("w2", (6, 5)))}
    w = {name: normal(*shape) for name, shape in shapes.items()}
    w["experts.w1.weight"] *= 40  # past the clamp at 10
    table, bias = np.stack([RNG.permutation(4)[:2] for _ in range(9)]).astype(np.int32), np.array([3, 0, 0, -3], np.float32)
    w |= {"gate.tid2eid": table} if hashed else {"gate.bias": bias}
    module = MoE(config, 0, {f"layers.0.ffn.{name}": jnp.asarray(a) for name, a in w.items()})
    x, tokens = normal(1, 7, 6), RNG.integers(0, 9, (1, 7)).astype(np.int32)

    def expert(y, w1, w3, w2):
        gate, up = np.minimum(w1 @ y, 10), np.clip(w3 @ y, -10, 10)
        return w2 @ (gate / (1 + np.exp(-gate)) * up)

    share, expected = np.zeros((7, 4)), np.zeros((7, 6))
    for t, y in enumerate(x[0].astype(np.float64)):
        scores = np.sqrt(np.log1p(np.exp(w["gate.weight"] @ y)))
        chosen = table[tokens[0, t]] if hashed else np.argsort(-(scores + bias))[:2]
        share[t, chosen] = 1.5 * scores[chosen] / scores[chosen].sum()
        expected[t] = expert(y, *(w[f"shared_experts.{n}.weight"] for n in ("w1", "w3", "w2")))
        for e in chosen:
            expected[t] += share[t, e] * expert(y, *(w[f"experts.{n}.weight"][e] for n in ("w1", "w3", "w2")))
    np.testing.assert_allclose(module.route(jnp.asarray(x), jnp.asarray(tokens))[0], share, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(module(jnp.asarray(x), jnp.asarray(tokens))[0], expected, rtol=1e-4, atol=1e-4)


def test_sampling_depends_on_seed_and_position_alone():
    logits = jnp.asarray(np.repeat(normal(1, 50), 4, axis=0))

    def draw(seeds, positions, temperature=1.0):
        return sample(logits, jnp.uint32(seeds), jnp.full(4, temperature, jnp.float32), jnp.int32(positions)).tolist()

    seeds, positions = [5, 5, 6, 2**32 - 1], [10, 11, 10, 10]
    tokens = draw(seeds, positions)
    order = [2, 0, 3, 1]
    assert draw([seeds[i] for i in order], [positions[i] for i in order]) == [tokens[i] for i in order]
    assert len({tuple(draw([s] * 4, range(4))) for s in range(8)}) > 4, "seeds matter"
    assert draw(seeds, positions, temperature=0.0) == [int(logits[0].argmax())] * 4
    tied = jnp.zeros((4, 50)).at[:, jnp.array([7, 20])].set(1.0)
    assert sample(tied, jnp.zeros(4, jnp.uint32), jnp.zeros(4), jnp.zeros(4, jnp.int32)).tolist() == [7] * 4


def test_sampled_frequencies_follow_the_softmax():
    logits, draws = jnp.array([0.0, 1.0, 2.0], np.float32), 3_000
    tokens = sample(
        jnp.broadcast_to(logits, (draws, 3)),
        jnp.full(draws, 3, jnp.uint32),
        jnp.full(draws, 2.0),
        jnp.arange(draws, dtype=jnp.int32),
    )
    share = np.bincount(np.asarray(tokens), minlength=3) / draws
    np.testing.assert_allclose(share, jax.nn.softmax(logits / 2), atol=0.04)
