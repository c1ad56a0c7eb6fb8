"""The modules that answer ``import torchvision``: :mod:`netcl.vision` under torchvision's names."""

from __future__ import annotations

from typing import Any

from netcl.vision import models

_TRANSFORMS = ("netcl.vision.transforms",)
_FUNCTIONAL = ("netcl.vision.functional",)

#: Rows of the table in :mod:`netcl.torch.names`.
MODULES: dict[str, tuple[tuple[str, ...], dict[str, Any]]] = {
    "torchvision": ((), {"__version__": "0.28.0+netcl"}),
    "torchvision.datasets": (("netcl.vision.datasets",), {}),
    "torchvision.datasets.folder": (("netcl.vision.datasets",), {}),
    "torchvision.models": (("netcl.vision.models",), {name: getattr(models, name) for name in models.__all__}),  # scripts list __dict__
    **{f"torchvision.models.{part}": ((f"netcl.vision.models.{part}",), {}) for part in ("detection", "segmentation")},
    "torchvision.ops": (("netcl.vision.ops",), {}),
    "torchvision.transforms": (_TRANSFORMS, {}),
    "torchvision.transforms.functional": (_FUNCTIONAL, {}),
    "torchvision.transforms.v2": (_TRANSFORMS, {}),
    "torchvision.transforms.v2.functional": (_FUNCTIONAL, {}),
    "torchvision.utils": (("netcl.vision.utils",), {}),
}
