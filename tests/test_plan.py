"""What fits: hot regions, concurrency, bytes per token, least slabs; and `scripts/plan.py` from outside."""

import dataclasses
import json
import os
import pathlib
import subprocess
import sys
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from runs import run_script

from hisparse_jax import capacity
from hisparse_jax.config import CacheConfig, preset
from hisparse_jax.layout import CacheLayout, plan_layout
from scripts import plan

ROOT = pathlib.Path(__file__).parents[1]
GIB = 2**30
CONTEXTS = tuple(2**i for i in range(12, 21))
"""4K to 1M tokens."""


def layout_of(model: str, tokens: int = 131_072, *, host_gib: int = 128, tiered: bool = True, **cache) -> CacheLayout:
    config = CacheConfig(max_model_len=tokens, gpu_pool_bytes=40 * GIB, host_pool_bytes=host_gib * GIB)
    return plan_layout(preset(model), dataclasses.replace(config, **cache), tiered=tiered)


# The hot region


@pytest.mark.parametrize(
    ("slots", "pages", "flash", "pro", "break_even"),
    [
        (512, 8, (48, 6_289_920, 8_985_600), None, 2_560),
        (1_024, 16, (96, 12_579_840, 17_971_200), (80, 17_971_200, 20_966_400), 4_608),
        (1_536, 24, (144, 18_869_760, 26_956_800), (120, 26_956_800, 31_449_600), 6_656),
        (2_048, 32, (192, 25_159_680, 35_942_400), (160, 35_942_400, 41_932_800), 8_704),
        (2_560, 40, (240, 31_449_600, 44_928_000), (200, 44_928_000, 52_416_000), 10_752),
        (3_072, 48, (288, 37_739_520, 53_913_600), (240, 53_913_600, 62_899_200), 12_800),
        (4_096, 64, (384, 50_319_360, 71_884_800), (320, 71_884_800, 83_865_600), 16_896),
        (5_120, 80, (480, 62_899_200, 89_856_000), (400, 89_856_000, 104_832_000), 20_992),
    ],
)
def test_hot_region_worked_numbers(slots, pages, flash, pro, break_even):
    for model, numbers in (("v4-flash", flash), ("v4-pro", pro)):
        if numbers is None:
            continue  # below Pro's top-k: refused, see test_layout
        layout = layout_of(model, rule="base", num_hot_slots=slots)
        hot = capacity.hot_region(layout)
        assert (hot.blocks, hot.payload_bytes, hot.pool_bytes) == numbers
        assert hot.pages == pages and hot.unused_rows == 0
        assert capacity.break_even_tokens(layout) == break_even


@pytest.mark.parametrize(
    ("model", "slots", "map_bytes", "alone"), [("v4-flash", 1_024, 129_024, 4_096), ("v4-pro", 2_048, 368_640, 8_192)]
)
def test_default_hot_region(model, slots, map_bytes, alone):
    layout = layout_of(model)
    assert layout.num_hot_slots == slots
    assert capacity.hot_region(layout).map_bytes == map_bytes
    assert layout.hot_pages * layout.page_tokens == alone


def test_b4_the_hot_region_is_divided_by_entries_not_by_tokens():
    assert layout_of("v4-flash", num_hot_slots=1_024).hot_pages == 16  # not 4
    layout = layout_of("v4-flash", num_hot_slots=1_025)
    assert layout.hot_pages == 17 and capacity.hot_region(layout).unused_rows == 63


# Requests that fit


@pytest.mark.parametrize(
    ("model", "rule", "index_keys", "admission", "steady", "gpu", "host", "resident"),
    [
        ("v4-flash", "base", "fp8", 4_192, 1_132, 199.98, 341.42, 56.01),
        ("v4-pro", "base", "fp8", 3_744, 1_194, 135.12, 238.99, 45.73),
        ("v4-flash", "searched", "fp8", 2_624, 584, 323.89, 341.42, 74.68),
        ("v4-flash", "searched", "fp4", 3_680, 620, 457.63, 341.42, 80.02),
        ("v4-pro", "searched", "fp8", 2_688, 648, 193.55, 238.99, 49.79),
        ("v4-pro", "searched", "fp4", 3_232, 682, 276.60, 238.99, 62.24),
    ],
)
def test_concurrency_worked_numbers(model, rule, index_keys, admission, steady, gpu, host, resident):
    requests = capacity.concurrency(layout_of(model, rule=rule, index_keys=index_keys), 131_072)
    assert (requests.pages, requests.admission, requests.steady) == (512, admission, steady)
    assert [round(float(x), 2) for x in (requests.gpu, requests.host, requests.resident)] == [gpu, host, resident]
    assert requests.tiered == min(requests.gpu, requests.host)
    assert requests.bound_by == ("host" if host < gpu else "gpu")
    assert (requests.requests_tiered, requests.requests_resident) == (int(min(gpu, host)), int(resident))


def test_concurrency_below_one_admission_and_with_an_admission_window():
    requests = capacity.concurrency(layout_of("v4-flash", rule="base", gpu_blocks=4_000), 131_072)
    assert requests.gpu == Fraction(4_000, 4_192) and round(float(requests.gpu), 3) == 0.954 and requests.requests_tiered == 0
    capped = capacity.concurrency(layout_of("v4-flash", rule="base"), 131_072, window_tokens=8_192)
    assert capped.admission == 1_312 and round(float(capped.gpu), 2) == 202.52


def test_the_search_beats_the_strides_of_least_pool_bytes_per_page():
    for model, m, gpu in (("v4-flash", 7, 286.84), ("v4-pro", 10, 184.34)):
        layout = layout_of(model)
        layers, stride = layout.model.c4_layers, m * layout.page_bytes
        groups = tuple(layers[i : i + m] for i in range(0, len(layers), m))
        places = tuple(tuple(layout.resident_place(layer) for layer in group) for group in groups)
        wide = dataclasses.replace(layout, stride=stride, gpu_blocks=40 * GIB // stride, resident_groups=places)
        assert round(float(capacity.concurrency(wide, 131_072).gpu), 2) == gpu
        assert wide.growing_groups * stride < layout.growing_groups * layout.stride
        assert capacity.concurrency(layout, 131_072).gpu > gpu


@pytest.mark.parametrize("rule", ["base", "searched"])
@pytest.mark.parametrize("model", ["v4-flash", "v4-pro"])
def test_d9_tiering_never_lowers_concurrency_above_break_even(model, rule):
    for tokens in (*CONTEXTS, 4_864, 8_960):  # the last two: first gain by the base rule
        layout = layout_of(model, tokens, host_gib=2_048, rule=rule)
        requests = capacity.concurrency(layout, tokens)
        untiered = capacity.concurrency(layout_of(model, tokens, rule=rule, tiered=False), tokens)
        assert untiered.resident == requests.resident  # nothing of the slab is set aside for the host tier
        if tokens > capacity.break_even_tokens(layout):
            assert requests.requests_tiered >= requests.requests_resident
            assert not any("break-even" in note for note in plan.notes(layout))
        else:
            assert any("not above break-even" in note for note in plan.notes(layout))


def test_break_even_is_where_gain_begins():
    layout = layout_of("v4-flash", rule="base")
    pages = capacity.break_even_tokens(layout) // layout.page_tokens
    resident = [layout.growing_groups * n for n in (pages, pages + 1)]
    steady = [capacity.concurrency(layout, n * layout.page_tokens).steady for n in (pages, pages + 1)]
    assert pages == 18 and steady[0] == resident[0] and steady[1] < resident[1]


# Least slabs


def test_d11_a_context_that_fits_only_because_history_can_leave_is_accepted():
    least = capacity.min_gpu_blocks(layout_of("v4-flash", rule="base"), 131_072)
    assert least == 1 + 2 * 512 + 6 * (16 + 2 + 1)
    layout = layout_of("v4-flash", rule="base", gpu_blocks=least)
    assert layout.gpu_blocks < layout.growing_groups * layout.max_pages  # resident and hot are not counted beside the source
    twin = layout_of("v4-flash", rule="base", gpu_blocks=least, tiered=False)
    assert capacity.min_gpu_blocks(twin, 131_072) == 1 + 8 * 512 > twin.gpu_blocks


@pytest.mark.parametrize(
    ("chunk_tokens", "page_entries", "added"),
    [(256, 64, 1), (64, 64, 1), (1_024, 64, 4), (256, 32, 2), (256, 96, 1), (512, 96, 2)],
)
def test_a_long_request_needs_its_base_pages_its_hot_region_its_tail_and_what_a_chunk_adds(chunk_tokens, page_entries, added):
    layout = layout_of("v4-flash", chunk_tokens=chunk_tokens, page_entries=page_entries)
    base = layout.num_base_groups * layout.max_pages
    least = capacity.min_gpu_blocks(layout, layout.cache.max_model_len)
    assert least == 1 + base + layout.num_resident_groups * (layout.hot_pages + 2 + added)


@settings(deadline=None)
@given(tokens=st.integers(1, 8_192), chunk=st.sampled_from((16, 256, 2_048)), slots=st.integers(32, 600))
def test_the_least_slab_grows_with_length_and_never_exceeds_residency(tokens, chunk, slots):
    layout = layout_of("demo", 8_192, chunk_tokens=chunk, num_hot_slots=slots, host_blocks=34)
    least = capacity.min_gpu_blocks(layout, tokens)
    assert least <= 1 + layout.growing_groups * layout.num_pages(tokens)
    assert least <= capacity.min_gpu_blocks(layout, tokens + layout.page_tokens)


# Bytes


@pytest.mark.parametrize(
    ("model", "c4", "index", "c128", "total", "share", "pool", "pool_share", "backup"),
    [
        ("v4-flash", 3_071.25, 708.75, 135, 3_915, 0.784, (4_387.5, 731.25, 731.25, 5_850), 0.669, 3_066),
        ("v4-pro", 4_387.5, 1_012.5, 209.25, 5_609.25, 0.782, (5_118.75, 1_023.75, 1_023.75, 7_166.25), 0.783, 4_380),
    ],
)
def test_bytes_per_token_worked_numbers(model, c4, index, c128, total, share, pool, pool_share, backup):
    token = capacity.token_bytes(layout_of(model, rule="base"))
    assert (token.c4, token.index, token.c128, token.payload) == (c4, index, c128, total)
    assert (token.pool_resident, *token.pool_base, token.pool) == pool
    assert token.backup == backup
    assert round(float(token.c4 / token.payload), 3) == share and round(float(token.payload_share), 3) == pool_share


@pytest.mark.parametrize(
    ("model", "formats", "total"),
    [
        ("v4-flash", {}, 3_850.25),
        ("v4-flash", {"index_keys": "fp4"}, 3_514.25),
        ("v4-flash", {"rows": "bf16"}, 6_880),
        ("v4-pro", {}, 5_511.4375),
        ("v4-pro", {"index_keys": "fp4"}, 5_031.4375),
        ("v4-pro", {"rows": "bf16"}, 9_848),
    ],
)
def test_bytes_per_token_without_padding(model, formats, total):
    token = capacity.token_bytes(layout_of(model, **formats))
    assert token.unpadded == total
    if "rows" in formats:
        assert token.payload == token.unpadded  # plain rows are not padded
    else:
        share = float(token.backup / token.unpadded)
        assert round(share, 2 if formats else 3) == (0.87 if formats else {"v4-flash": 0.796, "v4-pro": 0.795}[model])


@pytest.mark.parametrize(
    ("model", "windows", "c4", "index", "c128"), [("v4-flash", 3.07, 1.31, 0.33, 10.0), ("v4-pro", 4.35, 1.88, 0.47, 15.5)]
)
def test_fixed_bytes_of_a_request(model, windows, c4, index, c128):
    fixed = capacity.fixed_bytes(preset(model), CacheConfig(max_model_len=131_072))
    mib = [round(x / 2**20, 2) for x in (fixed.windows, fixed.c4_states, fixed.index_states, fixed.c128_states)]
    assert mib == pytest.approx([windows, c4, index, c128], abs=0.011)
    assert round(fixed.states / 2**20, 2) == {"v4-flash": 11.64, "v4-pro": 17.84}[model]


@pytest.mark.parametrize("rows", ["f32", "bf16", "fp8"])
@pytest.mark.parametrize("rule", ["base", "searched"])
@pytest.mark.parametrize("model", ["v4-flash", "v4-pro", "demo"])
def test_f4_payload_share_is_reported_and_above_a_floor(model, rule, rows, capsys):
    token = capacity.token_bytes(layout_of(model, 8_192, rule=rule, rows=rows))
    assert 0.55 < token.payload_share <= 1
    plan.main(plan.Args(model=model, rule=rule, rows=rows, context=8_192))
    assert f"payload {float(token.payload_share):.1%} of it" in " ".join(capsys.readouterr().err.split())


# The script


def run_plan(*flags: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "scripts" / "plan.py"), *flags]
    env = os.environ | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=env, check=False)


def test_the_script_ends_with_its_json():
    done = run_plan(
        "--model", "v4-flash", "--rule", "base", "--hbm-gib", "40", "--host-gib", "128", "--context", "131072"
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    groups = found.pop("groups")
    assert [len(g) for g in groups] == [4, 4, 4, 4, 4, 1] and groups[0] == [2, 4, 6, 8]
    assert found == {
        "rule": "base",
        "stride": 187_200,
        "host_page": 786_240,
        "gpu_blocks": 229_432,
        "host_blocks": 174_805,
        "pool_bytes_per_page": 1_497_600,
        "hot_bytes_per_request": 17_971_200,
        "requests_resident": 56,
        "requests_tiered": 199,
    }
    for word in ("resident, hot", "4,608", "199.98", "17,971,200", "host pools"):
        assert word in done.stderr


def test_the_script_takes_the_other_flags():
    done = run_plan(
        "--model", "v4-flash", "--rule", "searched", "--hot-slots", "1024", "--index-keys", "fp4", "--host-gib", "256"
    )
    found = json.loads(done.stdout.splitlines()[-1])
    assert (found["rule"], found["stride"], found["requests_tiered"]) == ("searched", 149_760, 457)
    assert [len(g) for g in found["groups"]] == [4, 4, 4, 4, 4, 1]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model": "v3"}, "model 'v3' is unknown; presets are"),
        ({"rule": "best"}, "rule='best' is unknown; choose from searched, base"),
        ({"hbm_gib": 0.0}, "--hbm-gib 0.0 must be a number of GiB"),
        ({"hbm_gib": float("nan")}, "--hbm-gib nan must be a number of GiB"),
        ({"host_gib": float("inf")}, "--host-gib inf must be a number of GiB"),
        ({"host_gib": 0.25}, "max_model_len=131072 needs 514"),
        ({"hbm_gib": 1e-6}, "no allocatable blocks, host=174805, gpu=0"),
        ({"hot_slots": 100}, "num_hot_slots=100 holds 100, one transaction needs 512"),
        ({"index_keys": "int4"}, "index_keys='int4' is unknown"),
        ({"context": 0}, "max_model_len=0 must be at least 1"),
        ({"context": 2**21}, "max_model_len=2097152 exceeds"),
        ({"model": "tiny", "context": 4_096}, "head_dim=64"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(change, message, capsys):
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in change.items()]
    code, out, err = run_script("plan.py", *flags, capsys=capsys)
    assert code == 2 and out == ""
    assert err.count("\n") == 1 and message in err
