"""Calls that torchvision has been asked for: function, arguments, and which of three kinds of image it takes."""

from __future__ import annotations

from typing import Any

import numpy as np

ALL = ("pil", "uint8", "float")
TENSORS = ("uint8", "float")

#: Function of torchvision.transforms.functional, its arguments after the image (modes of interpolation by their value), kinds.
CASES: list[tuple[str, dict[str, Any], tuple[str, ...]]] = [
    *[("resize", {"size": size, "interpolation": mode}, ALL)
      for mode in ("nearest", "bilinear", "bicubic") for size in ([9, 14], [40, 33])],
    ("resize", {"size": [7], "interpolation": "bilinear"}, ALL),
    ("resize", {"size": 16, "max_size": 20, "interpolation": "bilinear"}, ALL),
    ("resize", {"size": [9, 14], "interpolation": "bilinear", "antialias": False}, TENSORS),
    ("resize", {"size": [31, 40], "interpolation": "bicubic", "antialias": False}, TENSORS),
    ("resize", {"size": [13, 17], "interpolation": "nearest-exact"}, TENSORS),
    ("resize", {"size": [9, 14], "interpolation": "lanczos"}, ("pil",)),
    ("center_crop", {"output_size": [10, 13]}, ALL),
    ("center_crop", {"output_size": [25, 21]}, ALL),
    ("crop", {"top": 3, "left": 5, "height": 9, "width": 11}, ALL),
    ("crop", {"top": -2, "left": 20, "height": 9, "width": 20}, ALL),
    ("resized_crop", {"top": 3, "left": 5, "height": 9, "width": 11, "size": [16, 8], "interpolation": "bilinear"}, ALL),
    ("pad", {"padding": 3}, ALL),
    ("pad", {"padding": [1, 2], "fill": 1}, ALL),
    *[("pad", {"padding": [1, 2, 3, 4], "padding_mode": mode}, ALL) for mode in ("edge", "reflect", "symmetric")],
    ("hflip", {}, ALL),
    ("vflip", {}, ALL),
    ("rgb_to_grayscale", {}, ALL),
    ("rgb_to_grayscale", {"num_output_channels": 3}, ALL),
    *[(f"adjust_{name}", {f"{name}_factor": factor}, ALL) for name in ("brightness", "contrast", "saturation") for factor in (0.4, 1.7)],
    *[("adjust_hue", {"hue_factor": factor}, ALL) for factor in (-0.3, 0.1)],
    ("invert", {}, ALL),
    ("gaussian_blur", {"kernel_size": [5, 3], "sigma": [1.3, 0.7]}, ALL),
    ("gaussian_blur", {"kernel_size": 3}, ALL),
    *[("rotate", {"angle": angle, "interpolation": mode, "fill": [7, 0, 3]}, ALL)
      for angle in (25, -110) for mode in ("nearest", "bilinear")],
    ("rotate", {"angle": 33, "expand": True, "interpolation": "nearest"}, ALL),
    ("rotate", {"angle": 40, "center": [3, 4], "interpolation": "bilinear"}, ALL),
    *[("affine", {"angle": 17, "translate": [2, -3], "scale": 1.2, "shear": [8.0, 5.0], "interpolation": mode}, ALL)
      for mode in ("nearest", "bilinear")],
    ("erase", {"i": 2, "j": 3, "h": 4, "w": 5, "v": 0}, TENSORS),
    ("normalize", {"mean": [0.4, 0.5, 0.6], "std": [0.2, 0.3, 0.4]}, ("float",)),
    ("convert_image_dtype", {"dtype": "uint8"}, ("float",)),
    ("convert_image_dtype", {"dtype": "float32"}, ("uint8",)),
    ("convert_image_dtype", {"dtype": "int32"}, ("uint8",)),
    ("to_tensor", {}, ("pil",)),
    ("pil_to_tensor", {}, ("pil",)),
]  # fmt: skip
GRIDS = [{}, {"nrow": 2, "padding": 1, "pad_value": 0.5}, {"normalize": True}, {"normalize": True, "scale_each": True, "nrow": 3},
         {"normalize": True, "value_range": (0.2, 0.7)}]  # fmt: skip


def pixels(shape: tuple[int, ...] = (20, 27, 3)) -> np.ndarray:
    """Colors that change smoothly, with some noise: neither flat nor without neighbors that are alike."""
    rng = np.random.default_rng(5)
    y, x, c = np.meshgrid(*[np.arange(n) for n in shape], indexing="ij")
    smooth = 127 + 90 * np.sin(x / 4 + c) * np.cos(y / 5 - c)
    return np.clip(smooth + rng.normal(0, 20, shape), 0, 255).astype(np.uint8)


def listed() -> list[tuple[str, str, dict[str, Any], str]]:
    """One name per case and kind, with the function, its arguments and the kind."""
    return [(f"{i}.{kind}", name, options, kind) for i, (name, options, kinds) in enumerate(CASES) for kind in kinds]
