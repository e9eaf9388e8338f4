"""The planner: worked numbers of both rules, refusals, and invariants over schedules, formats and page sizes."""

import dataclasses
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hisparse_jax.config import CacheConfig, ConfigError, ModelConfig, preset
from hisparse_jax.groups import Group, check_groups, check_specs
from hisparse_jax.layout import CacheLayout, LayoutError, plan_layout, steady_blocks
from hisparse_jax.specs import (
    CompressedSpec,
    HotSpec,
    IndexSpec,
    ResidentSpec,
    SourceSpec,
    WindowSpec,
    kind_of,
    model_specs,
    register,
)

GIB = 2**30
P = 37_440
"""Bytes of one C4 page of one layer in the product's format."""


def layout_of(model: str | ModelConfig, *, tiered: bool = True, **cache: Any) -> CacheLayout:
    defaults: dict[str, Any] = {"max_model_len": 131_072, "gpu_pool_bytes": 40 * GIB, "host_pool_bytes": 128 * GIB}
    for pool in ("gpu", "host"):
        if f"{pool}_blocks" in cache:
            del defaults[f"{pool}_pool_bytes"]
    return plan_layout(preset(model) if isinstance(model, str) else model, CacheConfig(**(defaults | cache)), tiered=tiered)


def sizes(groups) -> list[int]:
    return [len(g) for g in groups]


# Worked numbers


@pytest.mark.parametrize(
    ("model", "groups", "packed", "stride", "row_step", "host_page", "c128", "blocks", "offsets"),
    [
        ("v4-flash", [4, 4, 4, 4, 4, 1], 149_760, 187_200, 320, 786_240, 34_560, 229_432, (23, 39)),
        ("v4-pro", [6, 6, 6, 6, 6], 224_640, 262_080, 448, 1_123_200, 53_568, 163_880, (34, 58)),
    ],
)
def test_base_rule_worked_numbers(model, groups, packed, stride, row_step, host_page, c128, blocks, offsets):
    layout = layout_of(model, rule="base")
    by_role = {role: [g for g in layout.groups if g.role == role] for role in ("source", "indexer", "resident", "hot", "c128")}
    assert sizes(layout.resident_groups) == groups and layout.num_base_groups == 2
    assert [g.block_bytes for g in by_role["resident"][:-1]] == [packed] * (len(groups) - 1)
    assert by_role["resident"][-1].block_bytes == groups[-1] * P
    assert [g.block_bytes for g in by_role["indexer"]] == [{"v4-flash": 181_440, "v4-pro": 259_200}[model]]
    assert [g.block_bytes for g in by_role["c128"]] == [c128]
    assert (layout.stride, layout.row_step, layout.host_page, layout.gpu_blocks) == (stride, row_step, host_page, blocks)
    assert len({p.offset for g in layout.groups if g.pool == "gpu" and g.role != "c128" for p in g.places}) == offsets[0]
    assert len([t for t in layout.tensors if t.pool == "gpu"]) == offsets[1]
    assert layout.growing_groups == len(groups) + 2


@pytest.mark.parametrize(("model", "blocks"), [("v4-flash", (87_402, 174_805, 349_610)), ("v4-pro", (61_181, 122_363, 244_727))])
def test_host_blocks_of_a_budget(model, blocks):
    assert tuple(layout_of(model, host_pool_bytes=gib * GIB).host_blocks for gib in (64, 128, 256)) == blocks


@pytest.mark.parametrize(
    ("model", "tokens", "blocks", "host_bytes"),
    [
        ("v4-flash", 131_072, 514, 404_127_360),
        ("v4-pro", 131_072, 514, 577_324_800),
        ("v4-flash", 1_048_576, 4_098, 3_222_011_520),
        ("v4-pro", 1_048_576, 4_098, 4_602_873_600),
    ],
)
def test_least_host_blocks(model, tokens, blocks, host_bytes):
    layout = layout_of(model, max_model_len=tokens, host_pool_bytes=host_bytes)
    assert (layout.host_blocks, layout.host_bytes, layout.max_pages) == (blocks, host_bytes, blocks - 2)
    message = rf"has {blocks - 1} blocks, max_model_len={tokens} needs {blocks} .*raise host_pool_bytes to {host_bytes:,}"
    with pytest.raises(LayoutError, match=message):
        layout_of(model, max_model_len=tokens, host_pool_bytes=host_bytes - 1)


@pytest.mark.parametrize(
    ("model", "groups", "stride", "indexer_page"),
    [("v4-flash", [2] * 10 + [1], 112_320, 96_768), ("v4-pro", [3] * 10, 149_760, 138_240)],
)
def test_base_rule_with_fp4_index_keys(model, groups, stride, indexer_page):
    layout = layout_of(model, rule="base", index_keys="fp4")
    assert sizes(layout.resident_groups) == groups and layout.stride == stride
    assert next(g for g in layout.groups if g.role == "indexer").block_bytes == indexer_page


@pytest.mark.parametrize(
    ("model", "index_keys", "m", "base", "groups", "stride", "per_page", "hot", "blocks"),
    [
        ("v4-flash", "fp8", 6, 216_000, 4, 224_640, 1_123_200, 14_376_960, 191_193),
        ("v4-flash", "fp4", 4, 131_328, 6, 149_760, 1_048_320, 14_376_960, 286_790),
        ("v4-pro", "fp8", 9, 312_768, 4, 336_960, 1_684_800, 43_130_880, 127_462),
        ("v4-pro", "fp4", 6, 191_808, 5, 224_640, 1_347_840, 35_942_400, 191_193),
    ],
)
def test_searched_rule_worked_numbers(model, index_keys, m, base, groups, stride, per_page, hot, blocks):
    layout = layout_of(model, index_keys=index_keys)
    assert layout.cache.rule == "searched"  # the default
    assert sizes(layout.resident_groups)[:-1] == [m] * (groups - 1) and layout.num_resident_groups == groups
    assert [sum(p.page_bytes for p in g) for g in layout.base_groups] == [base]
    assert (layout.stride, layout.gpu_blocks) == (stride, blocks)
    assert layout.growing_groups * layout.stride == per_page
    assert layout.hot_blocks * layout.stride == hot


def test_demo_packs_two_layers_a_group_by_the_base_rule():
    layout = layout_of("demo", rule="base", max_model_len=8_192, gpu_blocks=100, host_blocks=34)
    assert [[p.layer for p in g] for g in layout.resident_groups] == [[1, 2], [4, 5], [6, 7]]
    assert [[p.layer for p in g] for g in layout.base_groups] == [[1, 2, 4, 5, 6, 7], [3]]
    assert layout.index_place(2) == layout.base_groups[0][1] and layout.index_place(2).page_bytes == 16_704
    assert layout.c128_place(3) == layout.base_groups[1][0]
    assert layout.stride == 3 * P and layout.row_step == 3 * 64
    assert (layout.gpu_blocks, layout.host_blocks) == (100, 34)


def test_b3_layers_of_a_group_stand_at_their_own_offsets():
    layout = layout_of("v4-flash", rule="base")
    assert [(p.layer, p.group, p.offset) for p in layout.resident_groups[1]] == [
        (10, 1, 0), (12, 1, P), (14, 1, 2 * P), (16, 1, 3 * P)
    ]  # fmt: skip
    assert layout.resident_place(14) == layout.resident_groups[1][2]


# Groups and tensors


def test_group_records_stand_in_order_with_their_flags():
    layout = layout_of("demo", rule="base", max_model_len=8_192)
    facts = [(g.role, g.pool, g.grows, g.prefix, set(g.transfer)) for g in layout.groups]
    assert facts == (
        [("source", "host", True, True, {"yes"}), ("indexer", "gpu", True, True, {"yes"})]
        + [("resident", "gpu", True, False, {"no"})] * 3
        + [("hot", "gpu", False, False, {"no"})] * 3
        + [("c128", "gpu", True, True, {"own"})]
    )
    names = [g.names[0] for g in layout.groups if g.layers[0] == 1]
    assert names == ["layers.1.c4", "layers.1.index", "layers.1.c4.resident", "layers.1.c4.hot"]


def test_tensors_cover_every_cache_once_and_fill_the_pools():
    layout = layout_of("v4-flash", rule="base")
    host = [t for t in layout.tensors if t.pool == "host"]
    gpu = [t for t in layout.tensors if t.pool == "gpu"]
    assert sorted(n for t in layout.tensors for n in t.names) == sorted(n for g in layout.groups for n in g.names)
    assert {t.num_bytes for t in host} == {P * 174_805} and sum(t.num_bytes for t in host) == layout.host_bytes
    assert {t.num_bytes for t in gpu} == {layout.slab_bytes} and {t.block_stride for t in gpu} == {187_200}


def test_a_resident_twin_has_the_same_groups_and_no_host_tier():
    tiered, twin = layout_of("demo", max_model_len=8_192), layout_of("demo", max_model_len=8_192, tiered=False)
    no_budget = CacheConfig(max_model_len=8_192, gpu_pool_bytes=40 * GIB)
    assert plan_layout(preset("demo"), no_budget, tiered=False).host_blocks == twin.host_blocks == 0
    assert (twin.stride, twin.resident_groups, twin.base_groups) == (tiered.stride, tiered.resident_groups, tiered.base_groups)
    assert {g.role for g in twin.groups} == {"indexer", "resident"}


def test_equal_plans_are_equal_keys():
    a, b = layout_of("v4-flash"), layout_of("v4-flash")
    assert a == b and hash(a) == hash(b) and a != layout_of("v4-flash", rule="base")


# Refusals


def test_overrides_replace_one_count_each():
    layout = layout_of("v4-flash", gpu_blocks=5_000)
    assert (layout.gpu_blocks, layout.host_blocks) == (5_000, 174_805)
    layout = layout_of("v4-flash", host_blocks=600)
    assert (layout.gpu_blocks, layout.host_blocks) == (191_193, 600)


@pytest.mark.parametrize(("pool", "other"), [("gpu", "host"), ("host", "gpu")])
def test_a_missing_budget_is_named(pool, other):
    with pytest.raises(LayoutError, match=f"{pool}_pool_bytes and {pool}_blocks are both missing; give one"):
        layout_of("v4-flash", **{f"{pool}_pool_bytes": None, f"{other}_blocks": 1_000})


@pytest.mark.parametrize(
    ("budgets", "message"),
    [
        ({"gpu_pool_bytes": 1_000}, r"no allocatable blocks, host=174805, gpu=0.*raise gpu_pool_bytes to at least 449,280"),
        ({"gpu_blocks": 1}, r"no allocatable blocks, host=174805, gpu=1: block 0 is the null block"),
        ({"host_pool_bytes": 786_239}, r"no allocatable blocks, host=0, gpu=191193.*raise host_pool_bytes to at least 1,572,480"),
    ],
)
def test_a_pool_without_allocatable_blocks_is_refused(budgets, message):
    with pytest.raises(LayoutError, match=message):
        layout_of("v4-flash", **budgets)


def test_row_ids_must_fit_int32():
    with pytest.raises(LayoutError, match="ids are int32; lower gpu_blocks to 5592405"):
        layout_of("v4-flash", gpu_blocks=5_592_406)


def test_a_model_without_c4_layers_is_refused():
    model = dataclasses.replace(preset("tiny"), compress_ratios=(0, 128, 128, 0))
    with pytest.raises(LayoutError, match="expose its C4 caches: found 0 .* 0 .*both kinds are required"):
        layout_of(model, rows="bf16", max_model_len=4_096)


def test_a_context_beyond_the_model_is_refused():
    with pytest.raises(LayoutError, match="max_model_len=4097 exceeds .*max_position_embeddings=4096; lower max_model_len"):
        layout_of("tiny", rows="bf16", max_model_len=4_097)


def test_fp8_rows_of_another_head_dim_are_refused():
    with pytest.raises(ConfigError, match="head_dim=64"):
        layout_of("tiny", max_model_len=4_096)


def test_hot_slots_below_one_transaction_are_refused():
    with pytest.raises(ConfigError, match="num_hot_slots=1000 holds 1000, one transaction needs 1024"):
        layout_of("v4-pro", num_hot_slots=1_000)


def test_caches_with_two_block_sizes_are_refused():
    specs = model_specs(preset("demo"), CacheConfig(max_model_len=8_192))
    index = tuple((i, dataclasses.replace(s, block_size=128)) for i, s in specs.index)
    with pytest.raises(LayoutError, match=r"one block size, got \[128, 256\]"):
        check_specs(dataclasses.replace(specs, index=index))
    with pytest.raises(LayoutError, match="found 6 of C4 entries and 0 of index keys"):
        check_specs(dataclasses.replace(specs, index=()))


def _altered(role: str, change) -> list[Group]:
    """The demo's groups by the base rule, with `change` applied to the first of a role."""
    groups = list(layout_of("demo", rule="base", max_model_len=8_192).groups)
    first = next(i for i, g in enumerate(groups) if g.role == role)
    groups[first] = change(groups[first])
    return groups


def _with_spec(group: Group, **changes) -> Group:
    return dataclasses.replace(group, specs=tuple(dataclasses.replace(s, **changes) for s in group.specs))


def _with_place(group: Group, **changes) -> Group:
    return dataclasses.replace(group, places=(dataclasses.replace(group.places[0], **changes), *group.places[1:]))


class PooledElsewhere(HotSpec):
    pool = "host"


register(PooledElsewhere, kind_of(HotSpec).manager, HotSpec)


@pytest.mark.parametrize(
    ("role", "change", "message"),
    [
        ("hot", lambda g: _with_place(g, page_bytes=37_376), r"one page size, got \[37376, 37440\]"),
        ("source", lambda g: _with_spec(g, block_size=384), "host blocks of 384 tokens and resident blocks of 256"),
        ("resident", lambda g: _with_spec(g, block_size=128), r"resident groups need one block size, got \[128, 256\]"),
        ("hot", lambda g: _with_place(g, offset=64), r"views of a layer must match .*\(1, 0\).*\(1, 64\)"),
        (
            "hot",
            lambda g: dataclasses.replace(g, specs=(PooledElsewhere(256, P, 1),) * len(g.specs)),
            r"must be in one pool, got \['gpu', 'host'\]",
        ),
        (
            "indexer",
            lambda g: dataclasses.replace(g, specs=(WindowSpec(256, 128, 584), *g.specs[1:])),
            "indexer group mixes WindowSpec .* with IndexSpec",
        ),
    ],
)
def test_groups_that_do_not_fit_together_are_refused(role, change, message):
    with pytest.raises(LayoutError, match=message):
        check_groups(_altered(role, change))


def test_the_host_group_is_one_and_stands_first():
    source, *rest = layout_of("demo", max_model_len=8_192).groups
    with pytest.raises(LayoutError, match="one host group, got 2"):
        check_groups([source, source, *rest])
    with pytest.raises(LayoutError, match="host group comes after a resident group; put it first"):
        check_groups([*rest, source])
    check_groups([source, *rest])


# Invariants


SCHEDULES = st.lists(st.sampled_from((0, 4, 4, 4, 128)), min_size=1, max_size=24).filter(lambda ratios: 4 in ratios)


def model_of(ratios: list[int], index_head_dim: int, leads: list[bool] | None = None) -> ModelConfig:
    """The demo with another schedule. `leads[i]`: the i-th C4 layer has an indexer of its own; the first always has."""
    c4 = [i for i, r in enumerate(ratios) if r == 4]
    leaders = None if leads is None else tuple(i for n, i in enumerate(c4) if n == 0 or (n < len(leads) and leads[n]))
    return dataclasses.replace(
        preset("demo"), num_hidden_layers=len(ratios), compress_ratios=tuple(ratios), index_leaders=leaders,
        index_head_dim=index_head_dim,
    )  # fmt: skip


@settings(deadline=None)
@given(
    ratios=SCHEDULES,
    leads=st.none() | st.lists(st.booleans(), max_size=24),
    index_head_dim=st.sampled_from((64, 128, 256)),
    rows=st.sampled_from(("f32", "bf16", "fp8")),
    rule=st.sampled_from(("base", "searched")),
    page_entries=st.sampled_from((32, 64, 96)),
    max_model_len=st.integers(1, 8_192),
)
def test_every_layout_is_sound(ratios, leads, index_head_dim, rows, rule, page_entries, max_model_len):
    model = model_of(ratios, index_head_dim, leads)
    layout = layout_of(
        model, rows=rows, rule=rule, page_entries=page_entries, max_model_len=max_model_len, gpu_blocks=50, host_blocks=70
    )
    page = layout.page_bytes
    assert layout.stride % page == 0 and layout.row_step * page == layout.stride * page_entries
    leaders = [i for i in model.c4_layers if model.leader_of(i) == i]
    assert tuple(p.layer for g in layout.resident_groups for p in g) == model.c4_layers
    assert [p.layer for g in layout.base_groups for p in g] == [*leaders, *model.c128_layers]
    for groups in (layout.resident_groups, layout.base_groups):
        for number, group in enumerate(groups):
            ends = [p.offset + p.page_bytes for p in group]
            assert [p.offset for p in group] == [0, *ends[:-1]] and ends[-1] <= layout.stride
            assert {p.group for p in group} == {number}
    for layer in model.c4_layers:  # hot units are never split, and resident pages lie on page boundaries
        assert layout.resident_place(layer).group == layout.resident_place(model.leader_of(layer)).group
        assert layout.resident_place(layer).offset % page == 0
        if layer in leaders:
            assert layout.index_place(layer).layer == layer
        else:
            with pytest.raises(LayoutError, match=f"layer {layer} stores no index keys"):
                layout.index_place(layer)
    for layer in model.c128_layers:
        assert layout.c128_place(layer).page_bytes == layout.entry.page_bytes(page_entries * 4 // 128)
    assert layout.max_pages == -(-max_model_len // (4 * page_entries))
    assert layout.num_base_groups == (2 if rule == "base" and model.c128_layers else 1)


@settings(deadline=None)
@given(ratios=SCHEDULES, max_model_len=st.integers(1, 8_192), hot=st.integers(32, 640))
def test_the_search_finds_the_least_bytes_per_request(ratios, max_model_len, hot):
    model = model_of(ratios, 256)
    layout = layout_of(model, max_model_len=max_model_len, num_hot_slots=hot)
    base, layers = sum(p.page_bytes for p in layout.base_groups[0]), len(model.c4_layers)
    pages, hot_pages = -(-max_model_len // 256), -(-hot // 64)
    costs = {
        m: (pages + -(-layers // m) * (min(pages, 2) + hot_pages)) * m
        for m in range(1, max(layers, -(-base // P)) + 1)
        if m * P >= base
    }
    assert layout.stride == max(m for m, cost in costs.items() if cost == min(costs.values())) * P
    steady = steady_blocks(1, layout.num_resident_groups, pages, layout.hot_pages, layout.cache.tail_pages)
    assert steady * layout.stride == min(costs.values()) * P


def test_index_sharing_keeps_followers_with_their_leader():
    model = dataclasses.replace(
        preset("demo"), num_hidden_layers=12, compress_ratios=(4,) * 12, index_leaders=(0, 3, 4, 8), index_head_dim=1_024
    )
    layout = layout_of(model, rule="base", max_model_len=8_192)
    assert sum(p.page_bytes for p in layout.base_groups[0]) == 4 * 66_240  # 7 pages of 37,440
    assert [[p.layer for p in g] for g in layout.resident_groups] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]]


def test_a_unit_wider_than_the_indexer_widens_the_stride_alone():
    model = dataclasses.replace(preset("demo"), index_leaders=(1, 6))
    layout = layout_of(model, rule="base", max_model_len=8_192)
    assert [[p.layer for p in g] for g in layout.resident_groups] == [[1, 2, 4, 5], [6, 7]]
    assert layout.stride == 4 * P


def test_f4_windows_as_one_group_would_inflate_every_block():
    for model, width in (("v4-flash", 1_609_920), ("v4-pro", 2_283_840)):
        windows = [s for _, s in model_specs(preset(model), CacheConfig(max_model_len=1)).sliding if isinstance(s, WindowSpec)]
        assert sum(s.page_bytes for s in windows) == width
        for rule in ("base", "searched"):
            layout = layout_of(model, rule=rule)
            assert layout.stride < width / 5  # windows stand outside the slab
            assert max(g.block_bytes for g in layout.groups if g.pool == "gpu") <= layout.stride


def test_specs_of_a_layout_are_those_of_its_rows():
    layout = layout_of("v4-flash", rule="base")
    for group in layout.groups:
        for place, spec in zip(group.places, group.specs, strict=True):
            assert place.page_bytes == spec.page_bytes
            assert isinstance(spec, CompressedSpec | ResidentSpec | HotSpec)
    assert {type(s) for g in layout.groups[:2] for s in g.specs} == {SourceSpec, IndexSpec}
