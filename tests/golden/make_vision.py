"""Makes vision.npz: torchvision's results for the calls of vision_cases.py.

Run with an interpreter that has torch 2.13.0 and torchvision 0.28.0: ``python tests/golden/make_vision.py``. No test needs them.
"""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path

import numpy as np
import torch
from PIL import Image

_library = torch.library.Library("torchvision", "FRAGMENT")
for _name in ("nms", "qnms"):  # declared where torchvision's compiled ops do not load; transforms do not use them
    with contextlib.suppress(RuntimeError):
        _library.define(f"{_name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
from torchvision import utils  # noqa: E402
from torchvision.transforms import functional  # noqa: E402

sys.path.insert(0, str(Path(__file__).parent))
import vision_cases as cases  # noqa: E402


def image(kind: str) -> object:
    array = cases.pixels()
    if kind == "pil":
        return Image.fromarray(array)
    tensor = torch.from_numpy(np.moveaxis(array, -1, 0).copy())
    return tensor if kind == "uint8" else tensor.float() / 255


def main() -> None:
    kept = {}
    for key, name, options, kind in cases.listed():
        given = dict(options)
        if "interpolation" in given:
            given["interpolation"] = functional.InterpolationMode(given["interpolation"])
        if "dtype" in given:
            given["dtype"] = getattr(torch, given["dtype"])
        if "v" in given:
            given["v"] = torch.tensor(given["v"])
        kept[key] = np.asarray(getattr(functional, name)(image(kind), **given))
    batch = torch.from_numpy(np.random.default_rng(6).random((5, 3, 4, 6), np.float32))
    for i, options in enumerate(cases.GRIDS):
        kept[f"grid.{i}"] = utils.make_grid(batch, **options).numpy()
    np.savez_compressed(Path(__file__).with_name("vision.npz"), **kept)


if __name__ == "__main__":
    main()
