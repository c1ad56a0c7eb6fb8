"""Weights and inputs of the model zoo, the same for torchvision (make_vision_models.py) and for netcl: drawn, so that none is stored."""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

SEGMENTATION = ("deeplabv3_", "fcn_", "lraspp_")
_MADE_BY_THE_MODEL = ("num_batches_tracked", "relative_position_index", "relative_coords_table")


def options(name: str) -> dict[str, Any]:
    """What a model of few classes and for small images is made with."""
    found: dict[str, Any] = {"num_classes": 10}
    if name.startswith("vit_"):
        found["image_size"] = 56 if name == "vit_h_14" else 64
    if name.startswith(SEGMENTATION):
        found["num_classes"] = 3
        found |= {"aux_loss": True} if not name.startswith("lraspp") else {}
    return {"num_classes": 4} if name.startswith("ssd") else found


def images(name: str) -> np.ndarray:
    side = {"inception_v3": 75, "vit_h_14": 56}.get(name, 64)
    shape = (2, 3, 40, 60) if name.startswith("ssd") else (2, 3, side, side)
    rng = np.random.default_rng(7)
    return rng.random(shape, np.float32) if name.startswith("ssd") else rng.standard_normal(shape, np.float32)


def targets() -> list[dict[str, np.ndarray]]:
    """Boxes and labels for the detector's losses; the second image has none."""
    boxes = np.array([[5, 5, 30, 35], [20, 10, 58, 38], [2, 20, 12, 30]], np.float32)
    first = {"boxes": boxes, "labels": np.array([1, 3, 2])}
    return [first, {"boxes": np.zeros((0, 4), np.float32), "labels": np.zeros(0, np.int64)}]


def keys_and_shapes(state: Mapping[str, Any]) -> str:
    """A hash of the names and shapes of a state dict."""
    lines = "\n".join(f"{key} {tuple(state[key].shape)}" for key in sorted(state))
    return hashlib.sha256(lines.encode()).hexdigest()[:16]


def weights(name: str, shapes: Mapping[str, tuple[int, ...]], gain: float) -> Iterator[tuple[str, np.ndarray]]:
    """The entries of a state dict, in sorted order; matrices and convolutions have variance ``gain / fan_in``."""
    rng = np.random.default_rng(zlib.crc32(name.encode()))
    for key in sorted(shapes):
        shape, last = shapes[key], key.rpartition(".")[2]
        if last in _MADE_BY_THE_MODEL:
            continue
        if len(shape) > 1 and last.endswith("weight"):
            value = rng.standard_normal(shape, np.float32) * np.float32(np.sqrt(gain / np.prod(shape[1:])))
        elif last in ("running_var", "weight"):
            value = rng.uniform(0.6, 1.4, shape)
        elif last == "scale_weight":
            value = rng.uniform(5, 15, shape)
        elif last in ("layer_scale", "logit_scale"):
            value = rng.uniform(0.5, 1.5, shape)
        else:
            value = rng.standard_normal(shape, np.float32) * np.float32(0.1 if last in ("bias", "running_mean") else 0.5)
        yield key, value.astype(np.float32)


def summary(result: Any) -> dict[str, np.ndarray]:
    """What is compared of a result: logits, every eighth position of maps."""
    found = result if isinstance(result, dict) else {"out": result}
    return {key: value[..., ::8, ::8] if value.ndim == 4 else value for key, value in found.items()}
