"""What stands in a checkpoint's files, and one tensor of it at a time: `.npz` archives and safetensors shards.

Headers are read and checked on opening, data only in `read`, so no file is ever held whole.
"""

import abc
import dataclasses
import json
import pathlib
import zipfile
import zlib
from typing import Any, override

import ml_dtypes
import numpy as np
import safetensors

from hisparse_jax.config import ConfigError

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"
_DTYPES = {
    "F64": np.float64, "F32": np.float32, "F16": np.float16, "BF16": ml_dtypes.bfloat16, "F8_E4M3": np.uint8, "F8_E8M0": np.uint8,
    "I64": np.int64, "U64": np.uint64, "I32": np.int32, "U32": np.uint32, "I16": np.int16, "U16": np.uint16, "I8": np.int8,
    "U8": np.uint8,
}  # fmt: skip
"""How `read` presents a stored dtype."""
_NAMES = {np.dtype(dtype): name for name, dtype in _DTYPES.items() if not name.startswith("F8")}


class CheckpointError(ConfigError):
    """A checkpoint that cannot be loaded; the message names file or tensor, and the remedy."""


@dataclasses.dataclass(frozen=True)
class Stored:
    """One tensor as it stands in a file: dtype in safetensors' words, shape of the stored elements, bytes."""

    dtype: str
    shape: tuple[int, ...]
    num_bytes: int


class CheckpointFiles(abc.ABC):
    """An opened checkpoint. `tensors` maps every stored name, in file order."""

    num_files: int
    tensors: dict[str, Stored]

    @abc.abstractmethod
    def read(self, name: str) -> np.ndarray:
        """The elements of one tensor, in `Stored.shape`; 8-bit floats as their bytes."""

    @abc.abstractmethod
    def close(self) -> None:
        """Lets go of open files; nothing is read afterwards."""


def config_path(path: pathlib.Path) -> pathlib.Path:
    """Where the config of a checkpoint stands: `config.json` in its folder, or the `.json` beside an `.npz`."""
    if path.is_dir():
        config = path / "config.json"
        if not config.is_file():
            raise CheckpointError(f"{path} is no checkpoint: it has no config.json; name a folder with one and safetensors.")
        return config
    if path.suffix == ".npz" and path.is_file():
        config = path.with_suffix(".json")
        if not config.is_file():
            raise CheckpointError(f"{path} has no config beside it; put the model's config.json there as {config.name}.")
        return config
    state = "is neither a folder nor an .npz" if path.exists() else "does not exist"
    raise CheckpointError(f"{path} {state}; name a folder with config.json and safetensors, or an .npz with its .json.")


def open_files(path: pathlib.Path) -> CheckpointFiles:
    """Opens the files of a checkpoint whose config has been found. Close what it returns."""
    return SafetensorsFolder(path) if path.is_dir() else NpzArchive(path)


class NpzArchive(CheckpointFiles):
    """Arrays `w/NAME` of an `.npz`; arrays under other keys are no weights and stay unread."""

    num_files = 1

    def __init__(self, path: pathlib.Path):
        self._path = path
        self.tensors = {}
        try:
            with zipfile.ZipFile(path) as archive:
                for member in archive.namelist():
                    if member.startswith("w/"):
                        _add(self.tensors, member.removeprefix("w/").removesuffix(".npy"), _npy_header(archive, member), path)
            if not self.tensors:
                raise CheckpointError(f"{path} holds no weights; store each as `w/NAME`, by its published name.")
            self._arrays = np.load(path, allow_pickle=False)
        except CheckpointError:
            raise
        except (OSError, ValueError, EOFError, zipfile.BadZipFile, zlib.error) as error:
            raise CheckpointError(f"{path} is not a readable .npz ({error}); make or copy it again.") from None

    @override
    def read(self, name: str) -> np.ndarray:
        try:
            return self._arrays[f"w/{name}"]
        except (OSError, ValueError, EOFError, zipfile.BadZipFile, zlib.error) as error:
            raise CheckpointError(f"{self._path}: {name} is not readable ({error}); make or copy the file again.") from None

    @override
    def close(self) -> None:
        self._arrays.close()


def _npy_header(archive: zipfile.ZipFile, member: str) -> Stored:
    with archive.open(member) as file:
        version = np.lib.format.read_magic(file)
        read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
        shape, _, dtype = read(file)
    return Stored(_NAMES.get(dtype, str(dtype)), shape, dtype.itemsize * int(np.prod(shape)))


@dataclasses.dataclass(frozen=True)
class _Place:
    """Where a tensor's bytes stand."""

    shard: pathlib.Path
    start: int


class SafetensorsFolder(CheckpointFiles):
    """Shards named by `model.safetensors.index.json`, or a single `model.safetensors`."""

    def __init__(self, folder: pathlib.Path):
        self.tensors = {}
        self._places: dict[str, _Place] = {}
        index = folder / INDEX_NAME
        if index.is_file():
            weight_map = _read_index(index)
            shards = sorted(set(weight_map.values()))
        elif (folder / SINGLE_NAME).is_file():
            weight_map, shards = None, [SINGLE_NAME]
        else:
            raise CheckpointError(f"{folder} is no checkpoint: it has neither {INDEX_NAME} nor {SINGLE_NAME}.")
        self.num_files = len(shards)
        for shard in shards:
            self._add_shard(folder / shard)
        if weight_map is not None:
            self._compare_with_index(weight_map, index)

    def _add_shard(self, path: pathlib.Path) -> None:
        if not path.is_file():
            raise CheckpointError(f"{path} is named by {INDEX_NAME} and missing; download that shard.")
        header, data = _read_header(path)
        for name, entry in header.items():
            start, end = entry["data_offsets"]
            stored = Stored(entry["dtype"], tuple(entry["shape"]), end - start)
            _add(self.tensors, name, stored, path)
            self._places[name] = _Place(path, data + start)

    def _compare_with_index(self, weight_map: dict[str, str], index: pathlib.Path) -> None:
        for name, shard in weight_map.items():
            if name not in self._places or self._places[name].shard.name != shard:
                raise CheckpointError(f"{index} places {name} in {shard}, which lacks it; download both again.")
        if extra := sorted(set(self._places) - set(weight_map)):
            raise CheckpointError(
                f"{self._places[extra[0]].shard} holds {extra[0]}, unknown to {INDEX_NAME}; download both again."
            )

    @override
    def read(self, name: str) -> np.ndarray:
        stored, place = self.tensors[name], self._places[name]
        try:
            data = np.fromfile(place.shard, np.uint8, count=stored.num_bytes, offset=place.start)
        except OSError as error:
            raise CheckpointError(f"{place.shard}: {name} is not readable ({error}).") from None
        if len(data) != stored.num_bytes:
            raise CheckpointError(f"{place.shard}: {name} ends after {len(data)} of {stored.num_bytes} bytes; download it again.")
        return data.view(_DTYPES[stored.dtype]).reshape(stored.shape)

    @override
    def close(self) -> None:
        """Every read opens and closes its shard."""


def _read_index(path: pathlib.Path) -> dict[str, str]:
    try:
        index = json.loads(path.read_text(), object_pairs_hook=_unique)
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} is not readable ({error}); download it again.") from None
    weight_map = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{path} has no weight_map of tensor names to shards; download it again.")
    for name, shard in weight_map.items():
        if not isinstance(shard, str) or pathlib.PurePath(shard).name != shard:
            raise CheckpointError(f"{path} places {name} in {shard!r}, not a file name of its folder; download it again.")
    return weight_map


def _read_header(path: pathlib.Path) -> tuple[dict[str, Any], int]:
    """A shard's header, checked by the safetensors library (offsets, sizes, cover), and where its data starts."""
    try:
        with safetensors.safe_open(path, framework="numpy"):
            pass
        with path.open("rb") as file:
            size = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(size), object_pairs_hook=_unique)
    except (OSError, ValueError, safetensors.SafetensorError) as error:
        raise CheckpointError(f"{path} is not a readable safetensors file ({error}); download it again.") from None
    header.pop("__metadata__", None)
    return header, 8 + size


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object none of whose keys stands twice; Python's own reader keeps the last in silence."""
    members = dict(pairs)
    if len(members) != len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"{next(name for name in names if names.count(name) > 1)} stands there twice")
    return members


def _add(tensors: dict[str, Stored], name: str, stored: Stored, path: pathlib.Path) -> None:
    if name in tensors:
        raise CheckpointError(f"{path} holds {name} a second time; a tensor stands in one place, download the checkpoint again.")
    tensors[name] = stored
