"""Models of ``torchvision.models`` by their names. Parameters have torchvision's names, so that torchvision's state dicts load.

>>> from netcl.vision import models
>>> model = models.get_model("mobilenet_v3_small", num_classes=10).eval()
>>> models.list_models(include="swin_v2_*")
['swin_v2_b', 'swin_v2_s', 'swin_v2_t']
"""

from __future__ import annotations

import fnmatch
from collections.abc import Sequence
from types import ModuleType
from typing import Any

from netcl.core.errors import did_you_mean, message
from netcl.nn import Module, ResNet, VisionTransformer, register_layer
from netcl.vision.functional import InterpolationMode
from netcl.vision.models import classic, detection, residual, segmentation, transformers
from netcl.vision.models.blocks import VISION_MODELS
from netcl.vision.transforms import ImageClassification, ToTensor


def get_model(name: str, weights: Any = None, **options: Any) -> Any:
    """Return the model ``name``, with the weights of a file (a state dict of torchvision: ``.pth``, ``.safetensors``) or random weights.

    - **options**: arguments of the model (``num_classes``, ``dropout``, ...), ``in_channels`` and ``device``.
    """
    if name not in VISION_MODELS:
        remedy = did_you_mean(name, VISION_MODELS, "list_models() gives the names")
        raise ValueError(message("get_model", "unknown model", remedy, name=repr(name)))
    return VISION_MODELS[name](weights=weights, **options)


def list_models(module: ModuleType | None = None, include: str | Sequence[str] = "*", exclude: str | Sequence[str] = ()) -> list[str]:
    """Return the sorted names of models, of ``module`` if given, that match a pattern of ``include`` and none of ``exclude``."""
    found = {name for pattern in ([include] if isinstance(include, str) else include) for name in fnmatch.filter(VISION_MODELS, pattern)}
    found -= {name for pattern in ([exclude] if isinstance(exclude, str) else exclude) for name in fnmatch.filter(VISION_MODELS, pattern)}
    return sorted(name for name in found if module is None or hasattr(module, name))


# Sides that images are cropped and resized to where they are not 224 and 256, of the first weights that torchvision published for a model.
_PRESETS: dict[str, tuple[int, int]] = {
    "inception_v3": (299, 342), "convnext_tiny": (224, 236), "convnext_small": (224, 230), "regnet_y_128gf": (384, 384),
    **dict.fromkeys(("convnext_base", "convnext_large", "resnext101_64x4d", "shufflenet_v2_x1_5", "shufflenet_v2_x2_0"), (224, 232)),
    "vit_l_16": (224, 242), "vit_h_14": (518, 518), "swin_t": (224, 232), "swin_s": (224, 246), "swin_b": (224, 238),
    "swin_v2_t": (256, 260), "swin_v2_s": (256, 260), "swin_v2_b": (256, 272), "efficientnet_b1": (240, 256), "efficientnet_b2": (288, 288),
    "efficientnet_b3": (300, 320), "efficientnet_b4": (380, 384), "efficientnet_b5": (456, 456), "efficientnet_b6": (528, 528),
    "efficientnet_b7": (600, 600), "efficientnet_v2_s": (384, 384), "efficientnet_v2_m": (480, 480), "efficientnet_v2_l": (480, 480),
}  # fmt: skip
_BICUBIC = ("swin_", "efficientnet_b", "efficientnet_v2_l", "regnet_y_128gf", "vit_h_14")


def get_transforms(name: str) -> Any:
    """Return the preprocessing that torchvision's weights of a model expect. It converts an image to a normalized tensor."""
    if hasattr(detection, name):
        return ToTensor()
    crop, resize = (None, 520) if hasattr(segmentation, name) else _PRESETS.get(name, (224, 256))
    half: dict[str, Any] = {"mean": (0.5,) * 3, "std": (0.5,) * 3} if name == "efficientnet_v2_l" else {}
    mode = InterpolationMode("bicubic" if name.startswith(_BICUBIC) else "bilinear")
    return ImageClassification(crop_size=crop, resize_size=resize, interpolation=mode, **half)


for _part in (classic, residual, transformers, segmentation, detection):
    for _name, _made in list(vars(_part).items()):
        if isinstance(_made, type) and issubclass(_made, Module) and _made.__module__ == _part.__name__ and _name[0] != "_":
            globals()[_name] = register_layer(_made)
globals().update(VISION_MODELS)
__all__ = ["ResNet", "VisionTransformer", "get_model", "get_transforms", "list_models", *sorted(VISION_MODELS)]
