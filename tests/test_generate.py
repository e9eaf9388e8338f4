"""`scripts/generate.py` from prompts to verdict on a small model, and each way in which it refuses its input."""

import inspect
import json

import pytest
from checkpoints import SMALL, config_json, published_checkpoint, write_checkpoint
from runs import run_script

from hisparse_jax import ffi

TEXT = bytes(i * 7 % 96 + 32 for i in range(1_500))
"""Six pages of the tiny model's own vocabulary."""
FLAGS = ("--model", "tiny", "--rows", "bf16", "--max-model-len", 2_048, "--hot-slots", 16, "--steps", 60, "--call-steps", 32,
         "--slab-share", 0.65)  # fmt: skip
FIELDS = {"tokens_equal", "logits_bit_equal", "spilled_pages", "resident_hits", "newest", "hot_hits", "misses", "invalid",
          "tokens_per_s", "traces"}  # fmt: skip


@pytest.fixture
def prompts(tmp_path):
    paths = [tmp_path / f"{name}.txt" for name in ("long", "middle", "brief")]
    for path, length in zip(paths, (1_500, 1_270, 40), strict=True):
        path.write_bytes(TEXT[:length])
    return paths


def test_generates_loses_pages_and_is_exact(prompts, capsys):
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
    for words in ("long.txt", "middle.txt", "host pools", "verdict: tokens equal", "hit rate"):
        assert words in err


def refused(capsys, tmp_path, *arguments) -> str:
    """The one line that a refusal prints; nothing is written, neither to stdout nor to the folder."""
    before = sorted(path.name for path in tmp_path.rglob("*"))
    code, out, err = run_script("generate.py", *arguments, capsys=capsys)
    assert code == 2 and out == "" and "Traceback" not in err
    assert sorted(path.name for path in tmp_path.rglob("*")) == before
    line = err.splitlines()[-1]
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
        (("--gpu-blocks", 8), "the GPU pool has too few free blocks; raise gpu_pool_bytes"),
        (("--temperature", -1), "temperature=-1.0 must not be negative"),
    ],
)
def test_a_flag_that_cannot_work(prompts, tmp_path, capsys, flags, message):
    assert message in refused(capsys, tmp_path, *FLAGS, "--prompts", *prompts, *flags)


def test_prompt_files_that_are_missing_or_empty(prompts, tmp_path, capsys):
    assert "a prompt file cannot be read:" in refused(capsys, tmp_path, *FLAGS, "--prompts", tmp_path / "none.txt")
    prompts[1].write_bytes(b"")
    assert "the prompt has no tokens; give at least one" in refused(capsys, tmp_path, *FLAGS, "--prompts", *prompts)
    prompts[1].write_bytes(b"\xff")
    assert "token id 255 is outside the vocabulary 0..127" in refused(capsys, tmp_path, *FLAGS, "--prompts", *prompts)


def test_checkpoints_that_are_none(prompts, tmp_path, capsys):
    stored, _ = published_checkpoint(SMALL)

    def load(folder):
        return refused(capsys, tmp_path, "--checkpoint", folder, "--rows", "bf16", "--prompts", *prompts)

    (tmp_path / "empty").mkdir()
    assert "empty is no checkpoint: it has no config.json; name a folder" in load(tmp_path / "empty")
    assert "does not exist" in load(tmp_path / "none")
    extra = stored | {"layers.0.attn.wq_c.weight": stored["norm.weight"]}
    assert "layers.0.attn.wq_c.weight, unknown to its config" in load(
        write_checkpoint(tmp_path / "extra", config_json(SMALL), extra)
    )
    lacking = {name: array for name, array in stored.items() if name != "norm.weight"}
    assert "lacks norm.weight" in load(write_checkpoint(tmp_path / "lacking", config_json(SMALL), lacking))
    corrupt = write_checkpoint(tmp_path / "corrupt", config_json(SMALL), stored, num_shards=1)
    shard = next(corrupt.glob("*.safetensors"))
    shard.write_bytes(shard.read_bytes()[:100])
    assert shard.name in load(corrupt)


def test_a_missing_handler_library_says_what_to_do(prompts, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("HISPARSE_FFI_LIBRARY", str(tmp_path / "none.so"))
    monkeypatch.setattr(ffi, "load_library", inspect.unwrap(ffi.load_library))  # this process may have loaded the real one
    message = refused(capsys, tmp_path, *FLAGS, "--hot-slots", 17, "--prompts", *prompts)
    assert "none.so cannot be used" in message and "run `pip install -e .` again" in message
