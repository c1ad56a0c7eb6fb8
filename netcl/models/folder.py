"""Hugging Face folders: ``config.json``, safetensors in one file or several, generation settings."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from netcl.io import tree
from netcl.io.archive import bad_name, refusal, refusing, regular_file, replacing
from netcl.io.state import refusing_safetensors, safetensors_library, save_safetensors

_ONE_FILE, _SHARD_INDEX = "model.safetensors", "model.safetensors.index.json"
_LONGEST_JSON = 1 << 28
_SHARD_BYTES = 4 << 30


def read_object(path: Path, op: str = "models") -> dict[str, Any]:
    """Return the JSON object in a file; raises ``FileError`` if the file is too large or holds no object."""
    if (size := os.path.getsize(regular_file(path, op))) > _LONGEST_JSON:
        raise refusal(op, f"the file must have at most {_LONGEST_JSON} bytes", file=path, bytes=size)
    with refusing(op, path, (ValueError, RecursionError)):
        found = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(found, dict):
        raise refusal(op, "the file must hold a JSON object", file=path, given=type(found).__name__)
    return found


class HubFolder:
    """An opened Hugging Face folder: ``config``, ``generation`` and tensors that are read when they are needed."""

    def __init__(self, path: Path):
        self.path = path
        self.config = read_object(path / "config.json")
        there = path / "generation_config.json"
        self.generation = read_object(there) if there.is_file() else {}
        self._files: dict[str, Any] = {}
        self._places: dict[str, str] = {}
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.kinds: dict[str, str] = {}
        for name in self._shards():
            self._open(name)

    def _shards(self) -> list[str]:
        """Return the names of the files with tensors; raises if there are none, or if an index names files outside of this folder."""
        if (self.path / _ONE_FILE).is_file():  # which transformers prefers, too
            return [_ONE_FILE]
        if not (self.path / _SHARD_INDEX).is_file():
            remedy = "convert other formats with save_pretrained(..., safe_serialization=True)"
            raise refusal("models", "the folder must have model.safetensors or its index", remedy, folder=self.path)
        index = read_object(self.path / _SHARD_INDEX).get("weight_map")
        names = sorted(set(index.values())) if isinstance(index, dict) and all(isinstance(n, str) for n in index.values()) else []
        wrong = [name for name in names if bad_name(name) or "/" in name or not name.endswith(".safetensors")]
        if wrong or not names:
            raise refusal("models", "weight_map must name safetensors files of the folder", file=self.path / _SHARD_INDEX, files=wrong[:3])
        return names

    def _open(self, name: str) -> None:
        path = regular_file(self.path / name, "models")
        with refusing_safetensors(path, "models"):
            file = self._files[name] = safetensors_library().safe_open(path, framework="np")
            for key in file.keys():  # noqa: SIM118 (not a mapping)
                if key in self.shapes:
                    raise ValueError(f"a tensor must be in one file only, got two with {key}")
                part = file.get_slice(key)
                self._places[key], self.shapes[key], self.kinds[key] = name, tuple(part.get_shape()), part.get_dtype()

    def read(self, name: str) -> np.ndarray:
        """Return a tensor's values as an array."""
        if self.kinds[name] == "BF16":
            tree.bfloat16()
        with refusing_safetensors(self.path / self._places[name], "models"):
            return self._files[self._places[name]].get_tensor(name)


def write_json(path: Path, value: Any) -> None:
    """Write a value as a JSON file, atomically."""
    with replacing(path) as file:
        file.write((json.dumps(value, indent=2, ensure_ascii=False) + "\n").encode())


def write_tensors(folder: Path, tensors: Mapping[str, Callable[[], np.ndarray]], shard_bytes: int = _SHARD_BYTES) -> None:
    """Write tensors as ``model.safetensors``, or as shards of at most ``shard_bytes`` with an index; a larger tensor has its own shard.

    The other of the two, of a model that was in the folder before, is removed.
    """
    shard: dict[str, np.ndarray] = {}
    places: dict[str, int] = {}
    total = held = 0
    made = [folder / "model-0.safetensors"]
    try:
        for name, make in tensors.items():
            array = make()
            if shard and held + array.nbytes > shard_bytes:
                save_safetensors(shard, made[-1])
                shard, held = {}, 0
                made.append(folder / f"model-{len(made)}.safetensors")
            shard[name] = array
            places[name], held, total = len(made) - 1, held + array.nbytes, total + array.nbytes
        if len(made) == 1:
            save_safetensors(shard, folder / _ONE_FILE)
            return (folder / _SHARD_INDEX).unlink(missing_ok=True)
        save_safetensors(shard, made[-1])
        final = [f"model-{i + 1:05d}-of-{len(made):05d}.safetensors" for i in range(len(made))]
        (folder / _SHARD_INDEX).unlink(missing_ok=True)  # if this process is killed, no index may name shards of two models
        for path, name in zip(made, final, strict=True):
            os.replace(path, folder / name)
    finally:
        for path in made:
            path.unlink(missing_ok=True)
    write_json(folder / _SHARD_INDEX, {"metadata": {"total_size": total}, "weight_map": {n: final[at] for n, at in sorted(places.items())}})
    return (folder / _ONE_FILE).unlink(missing_ok=True)
