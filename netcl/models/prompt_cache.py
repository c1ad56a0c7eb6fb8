"""The keys and values of a prompt in a file, so that a later run does not compute them again."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np

import netcl.autograd as ag
from netcl.core.tensor import Tensor
from netcl.core.writes import writes_of
from netcl.io import archive, tree
from netcl.nn.attention import KVCache
from netcl.nn.pickling import Recomputed

_KIND = "prompt cache"
_FLOATS = ("float16", "float32", "float64", "bfloat16")


def model_hash(model: Any) -> str:
    """Return the SHA-256 of a model's configuration and weights; cached until a weight is written or replaced."""
    tensors = [*model.named_parameters(), *model.named_buffers()]
    stamp = [(name, t.dtype, writes_of(t), writes_of(t).last) for name, t in tensors]
    kept = model.__dict__.setdefault("_hash", Recomputed())
    if kept.get("stamp") != stamp:
        digest = hashlib.sha256(json.dumps(model.config.source, sort_keys=True, default=str).encode())
        for name, tensor in tensors:
            digest.update(f"{name} {tensor.dtype} {archive.checksum(tree.host_bits(tensor))}".encode())
        kept.update(stamp=stamp, digest=digest.hexdigest())
    return kept["digest"]


class PromptFile:
    """A file with the keys and values of the positions of one prompt, for one model.

    ``restore`` fills a cache with the positions that a prompt shares with the file; ``store`` writes the positions of a prompt if there is
    no file yet, or if the prompt continues the stored prompt. Files of other models and damaged files raise an error.
    """

    def __init__(self, path: Any, model: Any):
        self.path, self.model = Path(path), model
        self._whole = True  # whether the prompt continues what the file holds

    def restore(self, cache: KVCache, ids: list[int]) -> int:
        """Fill an empty cache from the file; returns how many positions of ``ids`` the cache then holds, at most all but the last."""
        if not self.path.exists():
            return 0
        tokens, tensors = self._read(cache)
        stretch = self.model.rope_stretch
        if stretch(len(tokens)) != stretch(len(ids)):  # the stored keys are rotated by other frequencies
            self._whole = tokens == ids[: len(tokens)]
            return 0
        same = next((i for i, (a, b) in enumerate(zip(tokens, ids, strict=False)) if a != b), min(len(tokens), len(ids)))
        count, self._whole = min(same, len(ids) - 1), same == len(tokens) < len(ids)
        if count:
            cache.fill({name: ag.narrow(t, 2, 0, count) for name, t in tensors.items()})
            cache.ids = Tensor.from_host(self.model.queue, np.array([ids[:count]], np.int64))
        return count

    def store(self, cache: KVCache, ids: list[int]) -> None:
        """Write the keys and values of a prompt from a cache, unless the file holds a prompt that ``ids`` does not continue."""
        if not self._whole:
            return
        found = {name: ag.narrow(t, 2, 0, len(ids)) for name, t in cache.named_buffers() if name != "lengths"}
        meta = {"kind": _KIND, "model": model_hash(self.model), "dtypes": {name: t.dtype for name, t in found.items()}}
        arrays = {name: tree.host_bits(t) for name, t in found.items()}
        archive.write(self.path, meta, {"tokens": np.array(ids, np.int64), **arrays}, "prompt_cache")

    def _read(self, cache: KVCache) -> tuple[list[int], dict[str, Tensor]]:
        meta, arrays = archive.read(self.path, "prompt_cache", _KIND)
        if meta.get("model") != model_hash(self.model):
            raise archive.refusal("prompt_cache", "the file must belong to this model", "remove it, or name another", file=self.path)
        config, tokens = self.model.config, arrays.pop("tokens", None)
        dtypes: Any = meta.get("dtypes")
        fits = isinstance(tokens, np.ndarray) and tokens.dtype == np.int64 and tokens.ndim == 1 and isinstance(dtypes, dict)
        if not fits or not tokens.size or not 0 <= tokens.min() <= tokens.max() < config.vocab_size:  # type: ignore[union-attr]
            what = f"the file must have dtypes, and tokens as a vector of int64 ids from 0 to {config.vocab_size - 1}"
            raise archive.refusal("prompt_cache", what, file=self.path)
        shape, coded = (1, config.kv_heads, len(tokens)), cache.dtype == "int8"  # type: ignore[arg-type]
        wanted = {f"{name}{layer}": config.head_size for layer in range(config.layers) for name in ("keys", "values")}
        wanted |= {name.replace("s", "_scales"): 1 for name in wanted} if coded else {}
        archive.names_differ("prompt_cache", self.path, "entries", wanted, arrays)
        found = {}
        for name, array in arrays.items():
            dtype = dtypes.get(name)
            allowed = ("float32",) if "scales" in name else ("int8",) if coded else _FLOATS
            stored = np.uint16 if dtype == "bfloat16" else dtype
            if dtype not in allowed or array.dtype != stored or array.shape != (*shape, wanted[name]):
                what = f"an entry must have shape {(*shape, wanted[name])} and dtype {' or '.join(allowed)}, as in the model's cache"
                raise archive.refusal("prompt_cache", what, file=self.path, entry=name, shape=array.shape, dtype=dtype, stored=array.dtype)
            queues = self.model.layer_queues
            place = queues[int(name.lstrip("abcdefghijklmnopqrstuvwxyz_"))] if queues else self.model.queue
            found[name] = tree.tensor_of(array, dtype, place)
        return tokens.tolist(), found  # type: ignore[union-attr]
