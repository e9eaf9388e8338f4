"""`scripts/generate.py` from prompts to verdict on a small model, and each way in which it refuses its input."""

import dataclasses
import inspect
import io
import json
import pathlib
import runpy
import sysconfig
from typing import Any

import numpy as np
import pytest
from checkpoints import QUANTISED, config_json, published_checkpoint, write_checkpoint
from rich.console import Console
from runs import TINY, run_script, tight_layout

from hisparse_jax import decode, ffi, resident, weights
from hisparse_jax.config import ConfigError
from hisparse_jax.generation import Generation, RequestReport, check_run, generate, resident_layout
from hisparse_jax.model.blocks import DeepseekV4
from hisparse_jax.prompts import PromptError
from hisparse_jax.tiered import COUNT_NAMES

TEXT = bytes(i * 7 % 96 + 32 for i in range(1_500))
"""Six pages of the tiny model's own vocabulary."""
FLAGS = ("--model", "tiny", "--rows", "bf16", "--max-model-len", 2_048, "--hot-slots", 16, "--steps", 60, "--call-steps", 32,
         "--slab-share", 0.65)  # fmt: skip
FIELDS = {"tokens_equal", "logits_bit_equal", "spilled_pages", "resident_hits", "newest", "hot_hits", "misses", "invalid",
          "tokens_per_s", "traces"}  # fmt: skip
SCRIPT = pathlib.Path(__file__).parent.parent / "scripts" / "generate.py"


@pytest.fixture(autouse=True)
def _eighty_columns(monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")  # what rich takes where stderr is no terminal


def write_prompts(folder: pathlib.Path) -> list[pathlib.Path]:
    """Three text files: six pages, five, and one."""
    paths = [folder / f"{name}.txt" for name in ("long", "middle", "brief")]
    for path, length in zip(paths, (1_500, 1_270, 40), strict=True):
        path.write_bytes(TEXT[:length])
    return paths


@pytest.fixture
def prompts(tmp_path):
    return write_prompts(tmp_path)


@pytest.mark.xdist_group("generate")  # the programs of test_verdict
def test_generates_loses_pages_and_is_exact(prompts, capsys):
    decode.decode_steps.clear_cache()  # pyright: ignore[reportAttributeAccessIssue]  # test_verdict runs the same program
    code, out, err = run_script("generate.py", *FLAGS, "--prompts", *prompts, capsys=capsys)
    assert code == 0, err
    lines = out.splitlines()
    result = json.loads(lines[-1])
    assert len(lines) == 1, "only the JSON goes to stdout"
    assert set(result) >= FIELDS
    assert result["tokens_equal"] is True and result["logits_bit_equal"] is True and result["traces"] == 1
    assert 2 * result["spilled_pages"] >= result["pages"] and result["spilled_in_decode"] > 0
    assert len(result["misses_per_layer"]) == 2 and all(count > 0 for count in result["misses_per_layer"])
    total = sum(result[name] for name in ("resident_hits", "newest", "hot_hits", "misses", "invalid"))
    assert total == 3 * 60 * 16 * 2, "requests x steps x top-k x C4 layers"
    assert result["tokens_per_s"] > 0 and 0 <= result["hit_rate"] <= 1
    assert result["bytes_to_gpu"] >= result["misses"] * 128, "a bf16 row of 64 channels is 128 bytes"
    for words in ("long.txt", "middle.txt", "host pools", "tokens equal", "hit rate", "in decode"):
        assert words in err
    assert "…" not in err and max(map(len, err.splitlines())) <= 80


def test_tables_show_every_number_whole_at_80_columns():
    script = runpy.run_path(str(SCRIPT), run_name="generate")
    names = ["a_module_with_a_very_long_name_of_its_own.py", "b[red].txt"]
    numbers = iter(range(98_765_432, 99_999_999, 1_234))
    reports = [
        RequestReport(1_048_576, 2, 4_094, 17, {n: next(numbers) for n in COUNT_NAMES}, 300 << 30, 20 << 30) for _ in names
    ]
    layer_counts = {n: [next(numbers), next(numbers)] for n in COUNT_NAMES}
    logits = [np.zeros((2, 3), np.float32)] * 2
    run = Generation("tiered", [np.arange(20)] * 2, logits, reports, layer_counts, 4_096, 12_345.6, 98_765.4, 1_234.5, 1)
    layout = tight_layout(TINY, (2, 1), slack=2, max_model_len=512, max_requests=2, rows="f32", chunk_tokens=64)
    console = Console(width=80, record=True, file=io.StringIO())
    tables = (
        script["page_table"](run, names), script["reference_table"](run, names), script["layer_table"](run, layout),
        script["speed_table"](run, run), script["describe"](layout, [[1] * 1_234_567] * 2, "random, seed 0"),
    )  # fmt: skip
    console.print(*tables, script["token_lines"](run, names), sep="\n")
    text = console.export_text()
    assert "…" not in text and "b[red].txt" in text
    words = text.split()
    shown = [n for report in reports for n in report.counts.values()] + [n for row in layer_counts.values() for n in row]
    for number in (*(f"{n:,}" for n in shown), "1,048,576", "4,094", "307,200.0", "20,480.0", "98,765.4", "12,345.6"):
        assert number in words


def test_the_default_prompts_are_texts_of_the_length_asked_for():
    lengths = [
        (pathlib.Path(sysconfig.get_path("stdlib")) / name).stat().st_size
        for name in runpy.run_path(str(SCRIPT), run_name="generate")["DEFAULT_PROMPTS"]
    ]
    assert len(set(lengths)) == 3 and all(2_000 <= n <= 4_000 for n in lengths) and 6_500 <= sum(lengths) <= 7_500
    assert sum(-(-(n + 128) // 256) > -(-n // 256) for n in lengths) >= 2, "pages that decode adds"


def test_a_share_too_small_for_the_prompts_is_raised_with_a_note(prompts, capsys, monkeypatch):
    def stop(*_):
        raise PromptError("far enough.")

    monkeypatch.setattr(weights, "init_weights", stop)
    code, _, err = run_script("generate.py", *FLAGS, "--slab-share", 0.01, "--prompts", *prompts, capsys=capsys)
    assert code == 2 and err.splitlines()[-1] == "generate: far enough."
    note = next(line for line in err.splitlines() if line.startswith("Note: "))
    blocks = int(note.split("using ")[1].split()[0])
    assert f"these requests need {blocks}; using {blocks} (about 0." in note
    share = note.rpartition("(about ")[2].removesuffix(").")
    code, _, err = run_script("generate.py", *FLAGS, "--slab-share", share, "--prompts", *prompts, capsys=capsys)
    assert "Note: " not in err and err.splitlines()[-1] == "generate: far enough."
    flags = (*FLAGS, "--gpu-blocks", blocks - 1)
    _, _, err = run_script("generate.py", *flags, "--prompts", *prompts, capsys=capsys)
    assert f"gpu_blocks={blocks - 1} is too small a slab" in err and f"need {blocks} blocks at once" in err


def refused(capsys, tmp_path, *arguments) -> str:
    """The one line that a refusal prints; nothing is written, neither to stdout nor to the folder."""
    before = sorted(path.name for path in tmp_path.rglob("*"))
    code, out, err = run_script("generate.py", *arguments, capsys=capsys)
    assert code == 2 and out == "" and "Traceback" not in err
    assert sorted(path.name for path in tmp_path.rglob("*")) == before
    (line,) = err.splitlines()
    assert line.startswith("generate: ")
    return line


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (
            ("--max-model-len", 1_024),
            "a prompt of 1500 tokens and 60 new ones make 1560, max_model_len is 1024; shorten the prompt",
        ),
        (("--max-model-len", 8_192), "max_model_len=8192 exceeds the model's max_position_embeddings=4096; lower max_model_len"),
        (("--host-gib", 0.0001), "the host pool has 6 blocks, max_model_len=2048 needs 10"),
        (("--hot-slots", 15), "num_hot_slots=15 holds 15, one transaction needs 16; raise num_hot_slots to 16"),
        (("--model", "huge"), "model 'huge' is unknown; presets are tiny, demo, v4-flash, v4-pro"),
        (("--rows", "int8"), "rows='int8' is unknown; choose from f32, bf16, fp8"),
        (("--rows", "fp8"), "rows=fp8 packs head_dim=512"),
        (("--steps", 0), "--steps 0 must be at least 1"),
        (("--steps", 10**9), "and 1000000000 new ones make 1000001500, max_model_len is 2048; shorten the prompt or raise"),
        (("--call-steps", 0), "call_steps=0 must be at least 1"),
        (("--gpu-blocks", 8), "gpu_blocks=8 is too small a slab: 3 requests of 2,990 tokens in all need"),
        (("--gpu-blocks", 0), "gpu_blocks=0 must be positive"),
        (("--slab-share", 0), "--slab-share 0.0 must be a positive number"),
        (("--slab-share", "nan"), "--slab-share nan must be a positive number"),
        (
            ("--host-gib", 0.00018),
            "host_blocks=11 is too small a host pool: 3 requests of 2,990 tokens in all need 15, one a page and",
        ),
        (("--host-gib", 0), "--host-gib 0.0 must be a number of GiB above 0"),
        (("--temperature", -1), "temperature=-1.0 must be a finite number and not negative; 0 is greedy"),
        (("--temperature", "nan"), "temperature=nan must be a finite number"),
        (("--seed", -1), "seed=-1 must lie in 0..2^32-1"),
        (("--seed", 2**32 - 2), "seed=4294967294 leaves too few for 3 requests, which take one each; lower it to 4294967293"),
    ],
)
def test_a_flag_that_cannot_work(prompts, tmp_path, capsys, monkeypatch, flags, message):
    monkeypatch.setattr(weights, "init_weights", None)  # nothing is made before the refusal
    assert message in refused(capsys, tmp_path, *FLAGS, "--prompts", *prompts, *flags)


def test_prompt_files_that_are_missing_or_empty(prompts, tmp_path, capsys):
    assert "a prompt file cannot be read:" in refused(capsys, tmp_path, *FLAGS, "--prompts", tmp_path / "none.txt")
    prompts[1].write_bytes(b"")
    assert "the prompt has no tokens; give at least one" in refused(capsys, tmp_path, *FLAGS, "--prompts", *prompts)
    prompts[1].write_bytes(b"\xff")
    assert "token id 255 is outside the vocabulary 0..127" in refused(capsys, tmp_path, *FLAGS, "--prompts", *prompts)


def test_checkpoints_that_are_none(prompts, tmp_path, capsys):
    stored, _ = published_checkpoint(QUANTISED)
    prompts[0].write_bytes(bytes(n % QUANTISED.vocab_size for n in range(500)))

    def load(folder):
        return refused(capsys, tmp_path, "--checkpoint", folder, "--rows", "bf16", "--gpu-blocks", 40, "--prompts", prompts[0])

    (tmp_path / "empty").mkdir()
    assert "empty is no checkpoint: it has no config.json; name a folder" in load(tmp_path / "empty")
    assert "does not exist" in load(tmp_path / "none")
    extra = stored | {"layers.0.attn.wq_c.weight": stored["norm.weight"]}
    assert "layers.0.attn.wq_c.weight, unknown to its config" in load(
        write_checkpoint(tmp_path / "extra", config_json(QUANTISED), extra)
    )
    lacking = {name: array for name, array in stored.items() if name != "norm.weight"}
    assert "lacks norm.weight" in load(write_checkpoint(tmp_path / "lacking", config_json(QUANTISED), lacking))
    corrupt = write_checkpoint(tmp_path / "corrupt", config_json(QUANTISED), stored, num_shards=1)
    shard = next(corrupt.glob("*.safetensors"))
    shard.write_bytes(shard.read_bytes()[:100])
    assert shard.name in load(corrupt)


def test_a_missing_handler_library_says_what_to_do(prompts, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(weights, "init_weights", None)
    monkeypatch.setenv("HISPARSE_FFI_LIBRARY", str(tmp_path / "none.so"))
    monkeypatch.setattr(ffi, "load_library", inspect.unwrap(ffi.load_library))  # this process may have loaded the real one
    message = refused(capsys, tmp_path, *FLAGS, "--hot-slots", 17, "--prompts", *prompts)
    assert "none.so cannot be used" in message and "run `pip install -e .` again" in message


class Unused(DeepseekV4):
    """A model without weights: whoever calls it fails."""

    def __init__(self):
        pass


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"max_new_tokens": 0}, PromptError, "max_new_tokens=0 must be at least 1"),
        ({"max_new_tokens": 500}, PromptError, "a prompt of 300 tokens and 499 new ones make 799, max_model_len is 512"),
        ({"call_steps": 0}, PromptError, "call_steps=0 must be at least 1"),
        ({"temperature": -0.5}, PromptError, "temperature=-0.5 must be a finite number and not negative"),
        ({"seed": -1}, PromptError, "seed=-1 must lie in"),
        ({"chunks": (0,)}, PromptError, r"a chunk of 0 tokens; chunks hold 1\.\.64 tokens"),
        ({"twin": "other"}, ConfigError, "twin='other' is unknown; choose from tiered, resident"),
        ({"gpu_blocks": 4}, ConfigError, r"gpu_blocks=4 is too small a slab: 2 requests of 310 tokens in all need \d+ blocks"),
        ({"host_blocks": 3}, ConfigError, "host_blocks=3 is too small a host pool: 2 requests of 310 tokens in all need 4, one"),
        ({"host_blocks": 0}, ConfigError, "a layout without a host tier is the resident twin's; plan the tiered twin's with"),
    ],
)
def test_the_library_refuses_before_anything_is_taken(options, error, message, monkeypatch):
    layout = tight_layout(TINY, (2, 1), slack=2, max_model_len=512, max_requests=2, rows="f32", chunk_tokens=64)
    sizes = {name: options[name] for name in ("gpu_blocks", "host_blocks") if name in options}
    rest: dict[str, Any] = {"max_new_tokens": 2} | {name: value for name, value in options.items() if name not in sizes}
    for twin in (decode, resident):
        monkeypatch.setattr(twin, "init_state", None)
    with pytest.raises(error, match=message):
        generate(Unused(), [[1] * 300, [1] * 8], dataclasses.replace(layout, **sizes), **rest)


def test_the_resident_twin_needs_no_handler_library(monkeypatch):
    def missing():
        raise ffi.FfiError("no library here.")

    monkeypatch.setattr(ffi, "load_library", missing)
    layout = tight_layout(TINY, (2, 1), slack=2, max_model_len=512, max_requests=2, rows="f32", chunk_tokens=64)
    check_run([[1] * 300], resident_layout(layout), max_new_tokens=2, twin="resident")
    with pytest.raises(ffi.FfiError, match="no library here"):
        check_run([[1] * 300], layout, max_new_tokens=2)
