"""``torchvision.models`` by their names: modules whose parameters have torchvision's names, so that its state dicts load unchanged.

>>> from netcl.vision import models
>>> model = models.get_model("mobilenet_v3_small", num_classes=10).eval()
>>> len(models.list_models()) > 80, models.list_models(include="swin_v2_*")
(True, ['swin_v2_b', 'swin_v2_s', 'swin_v2_t'])

Nothing is downloaded: ``weights`` is the path of a file.
"""

from __future__ import annotations

import difflib
import fnmatch
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

from netcl.core.errors import message
from netcl.nn import Module, ResNet, VisionTransformer, register_layer
from netcl.vision.models import detection, inception, mobile, plain, residual, segmentation, transformers
from netcl.vision.models.blocks import ARCHITECTURES
from netcl.vision.transforms import ImageClassification, InterpolationMode, ToTensor


def get_model_builder(name: str) -> Callable[..., Any]:
    """The function that makes the model of a name."""
    if str(name).lower() not in ARCHITECTURES:
        near = difflib.get_close_matches(str(name), ARCHITECTURES, n=3)
        remedy = f"did you mean {', '.join(near)}?" if near else "list_models() gives the names"
        raise ValueError(message("get_model", "there is no model of this name", remedy, name=repr(name)))
    return ARCHITECTURES[name.lower()]


def get_model(name: str, weights: Any = None, **options: Any) -> Any:
    """The model of a name, with the weights of a file (a state dict of torchvision: ``.pth``, ``.safetensors``) or fresh ones.

    - **options**: those of the model (``num_classes``, ``dropout``, ...), ``in_channels``, and where it is made (``device``).
    """
    return get_model_builder(name)(weights=weights, **options)


def list_models(module: ModuleType | None = None, include: str | Sequence[str] | None = None, exclude: str | Sequence[str] = ()) -> list[str]:
    """The names of the models, sorted: of a module such as ``segmentation``, that match a pattern of ``include`` and none of ``exclude``."""
    wanted, unwanted = ([given] if isinstance(given, str) else list(given) for given in ("*" if include is None else include, exclude))
    return sorted(
        name for name in ARCHITECTURES
        if (module is None or hasattr(module, name))
        and any(fnmatch.fnmatch(name, pattern) for pattern in wanted) and not any(fnmatch.fnmatch(name, pattern) for pattern in unwanted)
    )  # fmt: skip


#: Sides that images are cropped and resized to where they are not 224 and 256; a third value is the interpolation. Of the first weights
#: that torchvision published for a model.
_PRESETS: dict[str, tuple[Any, ...]] = {
    "inception_v3": (299, 342), "convnext_tiny": (224, 236), "convnext_small": (224, 230), "convnext_base": (224, 232),
    "convnext_large": (224, 232), "mnasnet0_75": (224, 232), "mnasnet1_3": (224, 232), "resnext101_64x4d": (224, 232),
    "shufflenet_v2_x1_5": (224, 232), "shufflenet_v2_x2_0": (224, 232), "regnet_y_128gf": (384, 384, "bicubic"), "vit_l_16": (224, 242),
    "vit_h_14": (518, 518, "bicubic"), "swin_t": (224, 232, "bicubic"), "swin_s": (224, 246, "bicubic"), "swin_b": (224, 238, "bicubic"),
    "swin_v2_t": (256, 260, "bicubic"), "swin_v2_s": (256, 260, "bicubic"), "swin_v2_b": (256, 272, "bicubic"),
    **{f"efficientnet_b{i}": (*row, "bicubic") for i, row in enumerate(((224, 256), (240, 256), (288, 288), (300, 320), (380, 384), (456, 456),
                                                                       (528, 528), (600, 600)))},
    "efficientnet_v2_s": (384, 384), "efficientnet_v2_m": (480, 480), "efficientnet_v2_l": (480, 480, "bicubic"),
}  # fmt: skip


def get_transforms(name: str) -> Any:
    """The preprocessing that torchvision's weights of a model expect: an image becomes a normalized tensor.

    >>> from netcl.vision import models
    >>> models.get_transforms("inception_v3").crop_size
    299
    """
    get_model_builder(name)
    if hasattr(detection, name):
        return ToTensor()
    if hasattr(segmentation, name):
        return ImageClassification(crop_size=None, resize_size=520)
    crop, resize, mode = (*_PRESETS.get(name, (224, 256)), "bilinear")[:3]
    half = {"mean": (0.5,) * 3, "std": (0.5,) * 3} if name == "efficientnet_v2_l" else {}
    return ImageClassification(crop_size=crop, resize_size=resize, interpolation=InterpolationMode(mode), **half)


_MADE = {name: made for part in (plain, inception, mobile, residual, transformers, segmentation, detection)
         for name, made in vars(part).items() if isinstance(made, type) and issubclass(made, Module) and made.__module__ == part.__name__
         and name[0] != "_"}  # fmt: skip
for _name, _class in _MADE.items():
    register_layer(_name, _class)
globals().update({**_MADE, **ARCHITECTURES})
__all__ = ["ResNet", "VisionTransformer", "detection", "get_model", "get_model_builder", "get_transforms", "list_models", "segmentation",
           *_MADE, *ARCHITECTURES]  # fmt: skip
