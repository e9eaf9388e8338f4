"""Specs in bytes, blocks per request, and the registry."""

import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hisparse_jax.config import CacheConfig, ConfigError, preset
from hisparse_jax.specs import (
    C4StateSpec,
    C128Spec,
    C128StateSpec,
    CacheSpec,
    CompressedSpec,
    HotSpec,
    IndexSpec,
    IndexStateSpec,
    ResidentSpec,
    SourceSpec,
    WindowSpec,
    kind_of,
    may_share_group,
    model_specs,
)


def first[S: CacheSpec](spec_class: type[S], model: str = "v4-flash", **cache) -> S:
    """The spec of the first layer that has one of this class."""
    specs = model_specs(preset(model), CacheConfig(max_model_len=131_072, **cache))
    return next(
        s for kind in (specs.source, specs.index, specs.c128, specs.sliding) for _, s in kind if isinstance(s, spec_class)
    )


FLASH_KINDS = first(SourceSpec), first(IndexSpec), first(C128Spec)


@pytest.mark.parametrize(
    ("spec_class", "cache", "page_bytes"),
    [
        (SourceSpec, {}, 37_440),
        (IndexSpec, {}, 8_640),
        (IndexSpec, {"index_keys": "fp4"}, 4_608),
        (C128Spec, {}, 1_728),
        (WindowSpec, {}, 37_440),
        (C4StateSpec, {}, 32_832),
        (IndexStateSpec, {}, 8_640),
        (C128StateSpec, {}, 32_832),
        (SourceSpec, {"rows": "bf16"}, 64 * 1_024),
        (IndexSpec, {"rows": "bf16"}, 64 * 256),
        (C128Spec, {"rows": "f32"}, 2 * 2_048),
        (C128Spec, {"rows": "f32", "page_entries": 32}, 2_048),
        (SourceSpec, {"page_entries": 32}, 33 * 576),
    ],
)
def test_page_bytes_of_one_layer(spec_class, cache, page_bytes):
    assert first(spec_class, **cache).page_bytes == page_bytes


def test_demo_index_page_is_16704_bytes():
    specs = model_specs(preset("demo"), CacheConfig(max_model_len=8_192))
    assert {s.page_bytes for _, s in specs.index} == {16_704}


@pytest.mark.parametrize(
    ("spec_class", "blocks"), [(WindowSpec, 3), (C4StateSpec, 3), (IndexStateSpec, 3), (C128StateSpec, 17), (SourceSpec, 512)]
)
def test_blocks_and_most_bytes_of_a_long_request(spec_class, blocks):
    spec = first(spec_class)
    assert spec.num_blocks(131_072) == blocks
    assert spec.max_bytes(131_072) == blocks * spec.page_bytes


def test_a_short_context_caps_a_window():
    assert first(C128StateSpec).num_blocks(8) == 2
    assert first(C128StateSpec, draft_rows=7, stretch_steps=32).num_blocks(131_072) == 18


def test_the_hot_region_has_one_size_whatever_the_length():
    hot = HotSpec(256, 37_440, blocks_per_request=16)
    assert {hot.num_blocks(tokens) for tokens in (1, 256, 131_072)} == {16}
    assert hot.max_bytes(131_072) == 16 * 37_440


@settings(deadline=None)
@given(tokens=st.integers(1, 520))
def test_b4_a_page_is_256_tokens_and_64_entries(tokens):
    source, index, c128 = FLASH_KINDS
    pages = 1 + (tokens > 256) + (tokens > 512)
    assert (source.entries, index.entries, c128.entries) == (64, 64, 2)
    assert {s.num_blocks(tokens) for s in (source, index, c128, ResidentSpec(256, 37_440))} == {pages}
    assert (pages - 1) * source.entries <= tokens // source.ratio <= pages * source.entries


def test_index_layers_are_the_leaders():
    model = dataclasses.replace(preset("demo"), index_leaders=(1, 5))
    specs = model_specs(model, CacheConfig(max_model_len=8_192))
    assert [layer for layer, _ in specs.index] == [1, 5]
    assert [layer for layer, _ in specs.source] == [1, 2, 4, 5, 6, 7]
    assert [layer for layer, s in specs.sliding if type(s) is IndexStateSpec] == [1, 5]


def test_flags_say_what_serves_a_prefix_and_what_moves():
    flags = {c: (c.pool, c.prefix, c.transfer) for c in (HotSpec, ResidentSpec, SourceSpec, IndexSpec, C128Spec, WindowSpec)}
    assert flags == {
        HotSpec: ("gpu", False, "no"),
        ResidentSpec: ("gpu", False, "no"),
        SourceSpec: ("host", True, "yes"),
        IndexSpec: ("gpu", True, "yes"),
        C128Spec: ("gpu", True, "own"),
        WindowSpec: ("gpu", True, "own"),
    }


def test_the_registry_names_an_unregistered_class():
    class RopeSpec(CompressedSpec):
        pass

    with pytest.raises(ConfigError, match="RopeSpec is not registered.*SourceSpec"):
        kind_of(RopeSpec)


def test_managers_say_what_grows_and_what_may_be_lost():
    def traits(spec_class: type[CacheSpec]):
        manager = kind_of(spec_class).manager
        return manager.name, manager.grows, manager.loses_pages

    assert traits(SourceSpec) == traits(IndexSpec) == traits(C128Spec) == ("full attention", True, False)
    assert traits(ResidentSpec) == ("resident", True, True)
    assert traits(HotSpec) == ("hot", False, False)
    assert {traits(c)[:2] for c in (WindowSpec, C4StateSpec, IndexStateSpec, C128StateSpec)} == {("sliding window", False)}


def test_specs_share_a_group_by_base_block_size_and_pool():
    source, index, c128 = first(SourceSpec), first(IndexSpec), first(C128Spec)
    resident, hot = ResidentSpec(256, 37_440), HotSpec(256, 37_440, 16)
    assert may_share_group(index, c128)
    assert not may_share_group(index, source)  # another pool
    assert not may_share_group(resident, hot)  # another base
    assert not may_share_group(index, dataclasses.replace(index, block_size=128))
