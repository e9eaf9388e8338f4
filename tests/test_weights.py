"""Names, shapes and random weights; loading published checkpoints; every way one can be refused."""

import dataclasses
import io
import json
import pathlib
import zipfile

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hisparse_jax import checkpoint_files
from hisparse_jax.checkpoint import CheckpointError, load_checkpoint
from hisparse_jax.config import ConfigError, preset
from hisparse_jax.weights import init_weights, model_dtype, tensor_dtype, tensor_shapes
from tests import checkpoints
from tests.checkpoints import (
    QUANTISED,
    SMALL,
    config_json,
    published_checkpoint,
    write_checkpoint,
    write_index,
    write_safetensors,
)

GOLDEN = pathlib.Path(__file__).parent / "golden" / "deepseek_v4_tiny.npz"


# Names, shapes, dtypes


@pytest.mark.parametrize(("name", "billions"), [("v4-flash", 284), ("v4-pro", 1_600)])
def test_published_models_have_their_published_size(name, billions):
    total = sum(np.prod(shape, dtype=float) for shape in tensor_shapes(preset(name)).values())
    assert total == pytest.approx(billions * 1e9, rel=0.02)


def test_shapes_of_the_published_checkpoint():
    shapes = tensor_shapes(preset("v4-flash"))
    assert shapes["layers.2.attn.wo_a.weight"] == (8_192, 4_096)
    assert shapes["layers.2.attn.wq_a.weight"] == (1_024, 4_096)
    assert shapes["layers.2.attn.indexer.wq_b.weight"] == (8_192, 1_024)
    assert shapes["layers.2.attn.indexer.compressor.ape"] == (4, 256)
    assert shapes["layers.3.attn.compressor.ape"] == (128, 512)
    assert shapes["layers.2.attn.compressor.wkv.weight"] == (1_024, 4_096)
    assert shapes["layers.0.ffn.gate.tid2eid"] == (129_280, 6)
    assert shapes["layers.42.ffn.experts.w1.weight"] == shapes["layers.42.ffn.experts.w3.weight"] == (256, 2_048, 4_096)
    assert shapes["layers.42.ffn.experts.w2.weight"] == (256, 4_096, 2_048)
    assert shapes["layers.5.hc_ffn_fn"] == (24, 16_384) and shapes["hc_head_fn"] == (4, 16_384)
    assert not any(
        name.startswith(("layers.0.attn.compressor", "layers.3.attn.indexer", "layers.3.ffn.gate.tid")) for name in shapes
    )


def test_followers_have_no_indexer():
    demo = dataclasses.replace(preset("demo"), index_leaders=(1, 5))
    layers = {int(name.split(".")[1]) for name in tensor_shapes(demo) if ".indexer." in name}
    assert layers == {1, 5}


def test_random_weights_follow_seed_names_and_dtype_rule():
    config = dataclasses.replace(preset("tiny"), num_hidden_layers=2)
    weights, again, other = (jax.tree.map(np.asarray, init_weights(config, seed, jnp.bfloat16)) for seed in (3, 3, 4))
    assert {name: weight.shape for name, weight in weights.items()} == tensor_shapes(config)
    chex.assert_trees_all_equal(weights, again)
    assert all((weights[name] != other[name]).any() for name in weights)
    kept = {name for name, weight in weights.items() if weight.dtype == jnp.float32}
    assert kept == {n for n in weights if n.endswith(("attn_sink", ".ape", "gate.bias")) or ".hc_" in n or n.startswith("hc_")}
    assert {n for n, w in weights.items() if w.dtype == jnp.int32} == {"layers.0.ffn.gate.tid2eid"}
    assert all(weight.dtype in (jnp.float32, jnp.int32) for weight in init_weights(config, 3, "float32").values())


def test_random_weights_move_every_branch():
    config = preset("tiny")
    weights = {name: np.asarray(weight, np.float64) for name, weight in init_weights(config, 0, "float32").items()}
    spread = {
        "embed.weight": 1,
        "layers.1.attn.compressor.ape": 0.7,
        "layers.1.ffn.experts.w2.weight": 32**-0.5,
        "layers.1.ffn.experts.w1.weight": 64**-0.5,
        "layers.0.hc_attn_fn": 256**-0.5,
        "layers.1.attn_norm.weight": 0.1,
    }
    for name, expected in spread.items():
        assert weights[name].std() == pytest.approx(expected, rel=0.3)
    assert weights["layers.1.attn_norm.weight"].mean() == pytest.approx(1, abs=0.1)
    ids = weights["layers.0.ffn.gate.tid2eid"]
    assert all(len(set(row)) == config.num_experts_per_tok for row in ids.tolist()) and set(ids.flat) == set(range(8))


@pytest.mark.parametrize("dtype", ["float16", "int32", "no such type", None])
def test_a_model_is_held_in_float32_or_bfloat16(dtype):
    with pytest.raises(ConfigError, match="hold the weights in float32 or bfloat16"):
        model_dtype(dtype if dtype is not None else object())


# Loading


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("num_shards", [3, 0])
def test_a_quantised_checkpoint_is_exact(tmp_path, dtype, num_shards):
    stored, numbers = published_checkpoint(QUANTISED)
    config, weights, report = load_checkpoint(write_checkpoint(tmp_path, config_json(QUANTISED), stored, num_shards), dtype)
    assert config == QUANTISED and list(weights) == list(tensor_shapes(QUANTISED))
    for name, weight in weights.items():
        assert weight.dtype == tensor_dtype(name, dtype)
        np.testing.assert_array_equal(np.asarray(weight, np.float64), numbers[name], err_msg=name)
    num_fp4 = sum(array.dtype == np.int8 for array in stored.values())
    num_scales = sum(name.endswith(".scale") and not name.startswith("mtp.") for name in stored)
    assert (report.num_fp4, report.num_fp8, report.num_skipped) == (num_fp4, num_scales - num_fp4, 4)
    assert report.num_files == max(num_shards, 1)
    assert report.num_bytes == sum(array.nbytes for name, array in stored.items() if not name.startswith("mtp."))
    assert "skipped 4 mtp.* tensors" in str(report) and "\n" not in str(report) and "[" not in str(report)[len(str(tmp_path)) :]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_golden_fixture_loads(dtype):
    config, weights, report = load_checkpoint(GOLDEN, dtype)
    assert config == preset("tiny") and (report.num_tensors, report.num_skipped) == (210, 0)
    with np.load(GOLDEN) as arrays:
        stored = {key.removeprefix("w/"): array for key, array in arrays.items() if key.startswith("w/")}
    for name, weight in weights.items():
        if ".experts." in name:
            before, after = name.split("experts.")
            expected = np.stack([stored[f"{before}experts.{expert}.{after}"] for expert in range(8)])
        else:
            expected = stored[name]
        np.testing.assert_array_equal(np.asarray(weight), expected.astype(tensor_dtype(name, dtype)))


@pytest.mark.parametrize("dtype", ["i1", "u1", "i2", "u2", "i4", "u4", "i8", "u8"])
def test_token_tables_of_any_integer_type(tmp_path, dtype):
    stored, numbers = published_checkpoint(SMALL)
    name = "layers.0.ffn.gate.tid2eid"
    stored[name] = stored[name].astype(dtype)
    _, weights, _ = load_checkpoint(write_checkpoint(tmp_path, config_json(SMALL), stored, 1), "bfloat16")
    chex.assert_trees_all_equal(np.asarray(weights[name]), numbers[name].astype(np.int32))


def test_an_npz_may_hold_packed_experts(tmp_path):
    stored, numbers = published_checkpoint(SMALL)
    arrays = {}
    for name, array in stored.items():
        if ".experts." in name:
            arrays[name] = array.view(np.uint8)
        elif not name.endswith(".scale") and not name.startswith("mtp."):
            arrays[name] = np.asfortranarray(numbers[name].astype(np.float64) if array.dtype.kind == "V" else numbers[name])
    path = save_npz(tmp_path / "small.npz", arrays)
    _, weights, report = load_checkpoint(path, "float32")
    chex.assert_trees_all_equal(
        {name: np.asarray(weight, np.float64) for name, weight in weights.items()},
        {name: np.asarray(array, np.float64) for name, array in numbers.items()},
    )
    assert report.num_fp4 == 9


def test_scales_may_be_plain_bytes(tmp_path):
    stored, _ = published_checkpoint(SMALL)
    _, weights, _ = load_checkpoint(write_checkpoint(tmp_path / "a", config_json(SMALL), stored), "bfloat16")
    raw = {name: array.view(np.uint8) if array.dtype in (np.int8, checkpoints.E8M0) else array for name, array in stored.items()}
    _, again, _ = load_checkpoint(write_checkpoint(tmp_path / "b", config_json(SMALL), raw), "bfloat16")
    chex.assert_trees_all_equal(again, weights)


def test_tensors_are_read_one_by_one_and_mtp_never(tmp_path, monkeypatch):
    stored, _ = published_checkpoint(SMALL)
    reads = []
    read = checkpoint_files.SafetensorsFolder.read
    monkeypatch.setattr(checkpoint_files.SafetensorsFolder, "read", lambda self, name: reads.append(name) or read(self, name))
    load_checkpoint(write_checkpoint(tmp_path, config_json(SMALL), stored), "bfloat16")
    assert sorted(reads) == sorted(name for name in stored if not name.startswith("mtp."))


# Refusals

EXPERT, LINEAR, IDS = "layers.0.ffn.experts.1.w2", "layers.0.attn.wq_a", "layers.0.ffn.gate.tid2eid"


def save_npz(path: pathlib.Path, arrays: dict[str, np.ndarray], config=SMALL) -> pathlib.Path:
    np.savez(path, allow_pickle=True, **{f"w/{name}": array for name, array in arrays.items()})
    path.with_suffix(".json").write_text(json.dumps(config_json(config)))
    return path


def drop(*names):
    return lambda stored: [stored.pop(name) for name in names]


def put(name, array):
    return lambda stored: stored.update({name: array})


def change(name, edit):
    return lambda stored: stored.update({name: edit(stored[name])})


BAD_TENSORS = {
    "unknown": (put("layers.0.attn.wq_c.weight", np.zeros(3, np.float32)), r"holds layers\.0\.attn\.wq_c\.weight, unknown"),
    "layer past the last": (
        put("layers.1.attn_norm.weight", np.zeros(32, np.float32)),
        r"holds layers\.1\.attn_norm\.weight, unknown",
    ),
    "expert past the last": (
        put("layers.0.ffn.experts.3.w1.weight", np.zeros((4, 4), np.int8)),
        r"experts\.3\.w1\.weight, unknown",
    ),
    "stacked experts": (put("layers.0.ffn.experts.w1.weight", np.zeros((3, 4, 4), np.int8)), r"experts\.w1\.weight, unknown"),
    "other prefix": (put("model.norm.weight", np.zeros(32, np.float32)), r"holds model\.norm\.weight, unknown"),
    "missing": (drop("norm.weight"), r"lacks norm\.weight"),
    "missing expert": (drop(EXPERT + ".weight"), r"lacks layers\.0\.ffn\.experts\.1\.w2\.weight"),
    "many missing": (lambda stored: stored.clear() or stored.update(x=np.zeros(1)), r"holds x, unknown"),
    "scale without weight": (
        put("layers.0.attn.wq_c.scale", np.zeros((1, 1), checkpoints.E8M0)),
        r"wq_c\.scale without a quantised",
    ),
    "scale beside numbers": (put("embed.scale", np.zeros((1, 1), checkpoints.E8M0)), r"embed\.scale without a quantised weight"),
    "fp8 without scale": (drop(LINEAR + ".scale"), r"wq_a\.weight is stored as F8_E4M3 without .*wq_a\.scale"),
    "fp4 without scale": (drop(EXPERT + ".scale"), r"w2\.weight is stored as I8 without .*w2\.scale"),
    "shape": (change("norm.weight", lambda a: a[:-1]), r"norm\.weight has shape \[31\], its config asks for \[32\]"),
    "fp8 shape": (change(LINEAR + ".weight", lambda a: a.T), r"wq_a\.weight has shape \[32, 8\], its config asks for \[8, 32\]"),
    "fp4 shape": (
        change(EXPERT + ".weight", lambda a: a[:, :-1]),
        r"w2\.weight has shape \[32, 15\], its config asks for \[32, 16\]",
    ),
    "scale shape": (change(LINEAR + ".scale", lambda a: a[0]), r"wq_a\.scale has shape \[1\], its config asks for \[1, 1\]"),
    "scale dtype": (
        change(LINEAR + ".scale", lambda a: a.astype(np.float32)),
        r"wq_a\.scale is stored as F32; a scale is F8_E8M0",
    ),
    "weight dtype": (change(LINEAR + ".weight", lambda a: a.view(np.int8)), r"wq_a\.weight is stored as I8; it may be F64"),
    "norm in fp8": (change("norm.weight", lambda a: a.astype(checkpoints.E4M3)), r"norm\.weight is stored as F8_E4M3; it may be"),
    "ids as numbers": (change(IDS, lambda a: a.astype(np.float32)), r"tid2eid is stored as F32; it may be I64"),
    "id too large": (change(IDS, lambda a: np.where(a == a[0, 0], 3, a)), r"tid2eid holds expert 3; experts are numbered 0 to 2"),
    "id negative": (change(IDS, lambda a: np.where(a == a[0, 0], -1, a)), r"tid2eid holds expert -1"),
    "huge id": (change(IDS, lambda a: np.full(a.shape, 2**64 - 2, np.uint64)), r"tid2eid holds expert 18446744073709551614"),
}


@pytest.mark.parametrize(("edit", "message"), BAD_TENSORS.values(), ids=BAD_TENSORS)
def test_a_tensor_that_does_not_fit_is_refused_by_name(tmp_path, edit, message):
    stored, _ = published_checkpoint(SMALL)
    edit(stored)
    folder = write_checkpoint(tmp_path, config_json(SMALL), stored, 1)
    with pytest.raises(CheckpointError, match=message) as refusal:
        load_checkpoint(folder, "bfloat16")
    assert isinstance(refusal.value, ConfigError) and "\n" not in str(refusal.value)


def test_a_long_list_of_names_is_cut(tmp_path):
    stored, _ = published_checkpoint(SMALL)
    folder = write_checkpoint(tmp_path, config_json(SMALL), {"norm.weight": stored["norm.weight"]}, 0)
    num_missing = sum(not name.endswith(".scale") and not name.startswith("mtp.") for name in stored) - 1
    with pytest.raises(CheckpointError, match=rf"lacks embed\.weight, .* and {num_missing - 4} more"):
        load_checkpoint(folder, "bfloat16")


def test_fp4_needs_whole_groups(tmp_path):
    config = dataclasses.replace(SMALL, moe_intermediate_size=48)
    stored, _ = published_checkpoint(dataclasses.replace(SMALL, moe_intermediate_size=64))
    folder = write_checkpoint(tmp_path, config_json(config), stored, 0)
    with pytest.raises(CheckpointError, match=r"has 16 inputs past a group of 32|has shape"):
        load_checkpoint(folder, "bfloat16")


def small_folder(tmp_path: pathlib.Path) -> tuple[pathlib.Path, dict[str, np.ndarray], pathlib.Path]:
    """A valid folder of two shards, its tensors and its index."""
    stored, _ = published_checkpoint(SMALL)
    folder = write_checkpoint(tmp_path / "model", config_json(SMALL), stored, 2)
    return folder, stored, folder / "model.safetensors.index.json"


SECOND = "model-00002-of-00002.safetensors"


def test_a_tensor_in_two_shards_is_refused(tmp_path):
    folder, stored, _ = small_folder(tmp_path)
    names = list(stored)
    write_safetensors(folder / SECOND, {name: stored[name] for name in [*names[1::2], names[0]]})
    with pytest.raises(CheckpointError, match=rf"{SECOND} holds {names[0]} a second time"):
        load_checkpoint(folder, "float32")


def test_a_tensor_twice_in_an_index_or_archive_is_refused(tmp_path):
    folder, _, index = small_folder(tmp_path)
    index.write_text('{"weight_map": {"norm.weight": "a", "norm.weight": "b"}}')
    with pytest.raises(CheckpointError, match=r"norm\.weight stands there twice"):
        load_checkpoint(folder, "float32")
    path = tmp_path / "twice.npz"
    single = io.BytesIO()
    np.save(single, np.zeros(32, np.float32))
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("w/norm.weight.npy", single.getvalue())
        with pytest.warns(UserWarning, match="Duplicate name"):
            archive.writestr("w/norm.weight.npy", single.getvalue())
    path.with_suffix(".json").write_text(json.dumps(config_json(SMALL)))
    with pytest.raises(CheckpointError, match=r"holds norm\.weight a second time"):
        load_checkpoint(path, "float32")


def test_a_missing_shard_is_named(tmp_path):
    folder, _, _ = small_folder(tmp_path)
    (folder / SECOND).unlink()
    with pytest.raises(CheckpointError, match=rf"{SECOND} is named by .*index\.json and missing; download"):
        load_checkpoint(folder, "float32")


def test_index_and_shards_must_agree(tmp_path):
    folder, _, index = small_folder(tmp_path)
    weight_map = json.loads(index.read_text())["weight_map"]
    write_index(folder, weight_map | {"norm.weight": SECOND, "head.weight": SECOND, "embed.weight": SECOND})
    with pytest.raises(CheckpointError, match=rf"places embed\.weight in {SECOND}, which lacks it"):
        load_checkpoint(folder, "float32")
    write_index(folder, {name: shard for name, shard in weight_map.items() if name != "norm.weight"})
    with pytest.raises(CheckpointError, match=r"holds norm\.weight, unknown to model\.safetensors\.index\.json"):
        load_checkpoint(folder, "float32")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "is not readable"),
        ("[]", "has no weight_map"),
        ('{"weight_map": {}}', "has no weight_map"),
        ('{"weight_map": {"norm.weight": "../elsewhere.safetensors"}}', "not a file name of its folder"),
        ('{"weight_map": {"norm.weight": 3}}', "places norm.weight in 3, not a file name"),
    ],
)
def test_a_broken_index_is_refused(tmp_path, text, message):
    folder, _, index = small_folder(tmp_path)
    index.write_text(text)
    with pytest.raises(CheckpointError, match=message):
        load_checkpoint(folder, "float32")


@pytest.mark.parametrize("damage", ["empty", "text", "cut", "longer", "header"])
def test_corrupt_safetensors_are_refused(tmp_path, damage):
    folder, _, _ = small_folder(tmp_path)
    path = folder / SECOND
    data = path.read_bytes()
    damaged = {
        "empty": b"",
        "text": b"no tensors here",
        "cut": data[:-1],
        "longer": data + b"x",
        "header": data[:20] + b"!" + data[21:],
    }
    path.write_bytes(damaged[damage])
    with pytest.raises(CheckpointError, match=rf"{SECOND} is not a readable safetensors file .*; download it again"):
        load_checkpoint(folder, "float32")


def test_a_shard_cut_after_opening_is_refused(tmp_path):
    folder, _, index = small_folder(tmp_path)
    files = checkpoint_files.SafetensorsFolder(folder)
    path = folder / SECOND
    path.write_bytes(path.read_bytes()[:100])
    weight_map = json.loads(index.read_text())["weight_map"]
    last = [name for name, shard in weight_map.items() if shard == SECOND][-1]
    with pytest.raises(CheckpointError, match=rf"{last} ends after 0 of .* download it again"):
        files.read(last)
    path.unlink()
    with pytest.raises(CheckpointError, match=rf"{last} is not readable"):
        files.read(last)


def test_what_is_no_checkpoint_is_refused(tmp_path):
    folder, _, index = small_folder(tmp_path)
    with pytest.raises(CheckpointError, match=r"absent does not exist; name a folder"):
        load_checkpoint(tmp_path / "absent", "float32")
    with pytest.raises(CheckpointError, match=r"config\.json is neither a folder nor an \.npz"):
        load_checkpoint(folder / "config.json", "float32")
    with pytest.raises(CheckpointError, match=r"is no checkpoint: it has no config\.json"):
        load_checkpoint(tmp_path, "float32")
    index.unlink()
    with pytest.raises(CheckpointError, match=r"has neither model\.safetensors\.index\.json nor model\.safetensors"):
        load_checkpoint(folder, "float32")
    (folder / "config.json").write_text(json.dumps(config_json(SMALL) | {"scoring_func": "softmax"}))
    (folder / SECOND).rename(folder / "model.safetensors")
    with pytest.raises(ConfigError, match="scoring_func='softmax' is not built"):
        load_checkpoint(folder, "float32")


@pytest.mark.parametrize("damage", ["no weights", "no config", "text", "cut", "flipped", "pickled"])
def test_a_broken_npz_is_refused(tmp_path, damage):
    shapes = {name: shape for name, shape in tensor_shapes(SMALL).items() if ".experts." not in name}
    arrays = {name: np.zeros(shape, np.int16 if name == IDS else np.float32) for name, shape in shapes.items()}
    for expert in range(3):
        arrays |= {f"layers.0.ffn.experts.{expert}.w{i}.weight": np.zeros((32, 32), np.float32) for i in (1, 2, 3)}
    path = save_npz(tmp_path / "small.npz", arrays)
    load_checkpoint(path, "float32")
    data = path.read_bytes()
    if damage == "no weights":
        np.savez(path, input_ids=np.zeros(3))
    elif damage == "no config":
        path.with_suffix(".json").unlink()
    elif damage == "pickled":
        save_npz(path, arrays | {"norm.weight": np.array([None] * 32)})
    else:
        path.write_bytes({"text": b"no archive", "cut": data[:-100], "flipped": data[:1_000] + b"!" + data[1_001:]}[damage])
    messages = {
        "no weights": "holds no weights",
        "no config": "has no config beside it",
        "pickled": "norm.weight is stored as object",
    }
    with pytest.raises(CheckpointError, match=messages.get(damage, "is not (a )?readable")):
        load_checkpoint(path, "float32")
