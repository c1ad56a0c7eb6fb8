"""``torchvision.models.segmentation``: FCN, DeepLab v3 and LR-ASPP on ResNet and MobileNet v3."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import netcl.autograd as ag
from netcl import nn
from netcl.core.tensor import Tensor
from netcl.vision.models.blocks import VISION_MODELS, architecture, conv_norm


def _upsampled(x: Tensor, size: Sequence[int]) -> Tensor:
    return ag.interpolate(x, size=tuple(size), mode="bilinear", align_corners=False)


def _fcn_head(in_channels: int, channels: int) -> nn.Sequential:
    hidden = in_channels // 4
    return nn.Sequential(*conv_norm(in_channels, hidden), nn.Dropout(0.1), nn.Conv2d(hidden, channels, 1))


class ASPP(nn.Module):
    """Atrous spatial pyramid pooling: combines convolutions with several dilations and the mean of the image."""

    def __init__(self, in_channels: int, atrous_rates: Sequence[int], out_channels: int = 256):
        super().__init__()
        convs = [conv_norm(in_channels, out_channels, 1), *(conv_norm(in_channels, out_channels, dilation=rate) for rate in atrous_rates)]
        self.convs = nn.ModuleList([*convs, nn.Sequential(nn.AdaptiveAvgPool2d(1), *conv_norm(in_channels, out_channels, 1))])
        self.project = nn.Sequential(*conv_norm(len(self.convs) * out_channels, out_channels, 1), nn.Dropout(0.5))

    def forward(self, x: Tensor) -> Tensor:
        *maps, mean = (conv(x) for conv in self.convs)
        return self.project(ag.cat([*maps, _upsampled(mean, x.shape[2:])], axis=1))


class LRASPPHead(nn.Module):
    """Adds the class scores of deep and shallow features. Deep features are first scaled by a gate computed from their means."""

    def __init__(self, low_channels: int, high_channels: int, num_classes: int, inter_channels: int):
        super().__init__()
        self.cbr = conv_norm(high_channels, inter_channels, 1)
        self.scale = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Conv2d(high_channels, inter_channels, 1, bias=False), nn.Sigmoid())
        self.low_classifier, self.high_classifier = nn.Conv2d(low_channels, num_classes, 1), nn.Conv2d(inter_channels, num_classes, 1)

    def forward(self, x: Mapping[str, Tensor]) -> Tensor:
        high = ag.mul(self.cbr(x["out"]), self.scale(x["out"]))
        return ag.add(self.low_classifier(x["aux"]), self.high_classifier(_upsampled(high, x["aux"].shape[2:])))


class SegmentationModel(nn.Module):
    """A backbone, a classifier of every position and, with ``aux_loss``, a second classifier of shallower features.

    - **head**: ``fcn``, ``deeplabv3`` or ``lraspp``. **backbone**: ``resnet50``, ``resnet101`` or ``mobilenet_v3_large``.
    - **num_classes**: how many classes there are. **aux_loss**: whether the result also has the key ``aux`` (never for ``lraspp``).

    Shapes: ``(N, 3, H, W)`` becomes ``{"out": (N, num_classes, H, W)}``.
    """

    def __init__(self, head: str, backbone: str, num_classes: int = 21, aux_loss: bool | None = False):
        super().__init__()
        mobile = backbone == "mobilenet_v3_large"
        options: dict[str, Any] = {"dilated": True} if mobile else {"replace_stride_with_dilation": (False, True, True)}
        model = VISION_MODELS[backbone](**options)
        self._taps, (low, high) = (("4", "16"), (40, 960)) if mobile else (("layer3", "layer4"), (1024, 2048))
        layers = (model.features if mobile else model).named_children()
        self.backbone = nn.ModuleDict({name: layer for name, layer in layers if name not in ("avgpool", "fc")})
        heads: dict[str, Callable[[], nn.Module]] = {
            "deeplabv3": lambda: nn.Sequential(ASPP(high, (12, 24, 36)), *conv_norm(256, 256), nn.Conv2d(256, num_classes, 1)),
            "fcn": lambda: _fcn_head(high, num_classes), "lraspp": lambda: LRASPPHead(low, high, num_classes, 128)}  # fmt: skip
        self.classifier = heads[head]()
        self.head, self.aux_classifier = head, _fcn_head(low, num_classes) if aux_loss and head != "lraspp" else None

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        size, found = x.shape[2:], {}
        for name, layer in self.backbone.items():
            x = layer(x)
            found[name] = x
        maps = {key: found[name] for key, name in zip(("aux", "out"), self._taps, strict=True)}
        out = {"out": _upsampled(self.classifier(maps if self.head == "lraspp" else maps["out"]), size)}
        return out if self.aux_classifier is None else {**out, "aux": _upsampled(self.aux_classifier(maps["aux"]), size)}


for _head, _backbone in (("fcn", "resnet50"), ("fcn", "resnet101"), ("deeplabv3", "resnet50"), ("deeplabv3", "resnet101"),
                         ("deeplabv3", "mobilenet_v3_large"), ("lraspp", "mobilenet_v3_large")):  # fmt: skip
    globals()[f"{_head}_{_backbone}"] = architecture(f"{_head}_{_backbone}", SegmentationModel, _head, _backbone)
