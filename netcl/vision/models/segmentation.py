"""``torchvision.models.segmentation``: FCN, DeepLab v3 and LR-ASPP on ResNet and MobileNet v3. They give a dictionary of logits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import netcl.autograd as ag
from netcl import nn
from netcl.core.tensor import Tensor
from netcl.vision.models.blocks import ARCHITECTURES, architecture, conv_norm


class IntermediateLayerGetter(nn.ModuleDict):
    """The layers of a model up to the last of ``return_layers``, whose outputs are returned under its values."""

    def __init__(self, model: nn.Module, return_layers: Mapping[str, str]):
        names = [name for name, _ in model.named_children()]
        end = 1 + max(names.index(name) for name in return_layers)
        super().__init__({name: child for name, child in model.named_children() if name in names[:end]})
        self.return_layers = dict(return_layers)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        found = {}
        for name, layer in self.named_children():
            x = layer(x)
            if name in self.return_layers:
                found[self.return_layers[name]] = x
        return found


def _resized(x: Tensor, size: Sequence[int]) -> Tensor:
    return ag.interpolate(x, size=tuple(size), mode="bilinear", align_corners=False)


def fcn_head(in_channels: int, channels: int) -> nn.Sequential:
    """A classifier of every position, behind one hidden layer."""
    hidden = in_channels // 4
    return nn.Sequential(*conv_norm(in_channels, hidden), nn.Dropout(0.1), nn.Conv2d(hidden, channels, 1))


class ASPPPooling(nn.Sequential):
    """The mean of the image, behind a convolution, at every position."""

    def forward(self, x: Tensor) -> Tensor:
        return _resized(super().forward(x), x.shape[2:])


class ASPP(nn.Module):
    """Convolutions with several dilations side by side (atrous spatial pyramid pooling)."""

    def __init__(self, in_channels: int, atrous_rates: Sequence[int], out_channels: int = 256):
        super().__init__()
        convs = [conv_norm(in_channels, out_channels, 1), *(conv_norm(in_channels, out_channels, dilation=rate) for rate in atrous_rates)]
        self.convs = nn.ModuleList([*convs, ASPPPooling(nn.AdaptiveAvgPool2d(1), *conv_norm(in_channels, out_channels, 1))])
        self.project = nn.Sequential(*conv_norm(len(self.convs) * out_channels, out_channels, 1), nn.Dropout(0.5))

    def forward(self, x: Tensor) -> Tensor:
        return self.project(ag.cat([conv(x) for conv in self.convs], axis=1))


class LRASPPHead(nn.Module):
    """Deep features, scaled by their means, added to shallow ones."""

    def __init__(self, low_channels: int, high_channels: int, num_classes: int, inter_channels: int):
        super().__init__()
        self.cbr = conv_norm(high_channels, inter_channels, 1)
        self.scale = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Conv2d(high_channels, inter_channels, 1, bias=False), nn.Sigmoid())
        self.low_classifier = nn.Conv2d(low_channels, num_classes, 1)
        self.high_classifier = nn.Conv2d(inter_channels, num_classes, 1)

    def forward(self, x: Mapping[str, Tensor]) -> Tensor:
        high = ag.mul(self.cbr(x["high"]), self.scale(x["high"]))
        return ag.add(self.low_classifier(x["low"]), self.high_classifier(_resized(high, x["low"].shape[2:])))


class SegmentationModel(nn.Module):
    """A backbone, a classifier of every position and, with ``aux_loss``, a second one of shallower features.

    - **head**: ``fcn``, ``deeplabv3`` or ``lraspp``. **backbone**: ``resnet50``, ``resnet101`` or ``mobilenet_v3_large``.
    - **num_classes**, **aux_loss**: how many classes there are; whether the result also has the key ``aux``.

    Shapes: ``(N, 3, H, W)`` becomes ``{"out": (N, num_classes, H, W)}``.
    """

    def __init__(self, head: str, backbone: str, num_classes: int = 21, aux_loss: bool = False):
        super().__init__()
        mobile = backbone == "mobilenet_v3_large"
        options: dict[str, Any] = {"dilated": True} if mobile else {"replace_stride_with_dilation": (False, True, True)}
        model = ARCHITECTURES[backbone](**options)
        names, (low, high) = (("4", "16"), (40, 960)) if mobile else (("layer3", "layer4"), (1024, 2048))
        keys = ("low", "high") if head == "lraspp" else ("aux", "out")
        taps = dict(zip(names, keys, strict=True)) if aux_loss or head == "lraspp" else {names[1]: "out"}
        self.backbone = IntermediateLayerGetter(model.features if mobile else model, taps)
        if head == "lraspp":
            self.classifier: nn.Module = LRASPPHead(low, high, num_classes, 128)
        elif head == "deeplabv3":
            self.classifier = nn.Sequential(ASPP(high, (12, 24, 36)), *conv_norm(256, 256), nn.Conv2d(256, num_classes, 1))
        else:
            self.classifier = fcn_head(high, num_classes)
        self.aux_classifier = fcn_head(low, num_classes) if aux_loss and head != "lraspp" else None

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        found, size = self.backbone(x), x.shape[2:]
        given = found if "high" in found else found["out"]
        out = {"out": _resized(self.classifier(given), size)}
        return out if self.aux_classifier is None else {**out, "aux": _resized(self.aux_classifier(found["aux"]), size)}


def _segmentation(head: str, backbone: str, num_classes: int | None = None, aux_loss: bool | None = None,
                  weights_backbone: None = None) -> SegmentationModel:  # fmt: skip
    return SegmentationModel(head, backbone, num_classes or 21, bool(aux_loss))


for _head, _backbone in (("fcn", "resnet50"), ("fcn", "resnet101"), ("deeplabv3", "resnet50"), ("deeplabv3", "resnet101"),
                         ("deeplabv3", "mobilenet_v3_large"), ("lraspp", "mobilenet_v3_large")):  # fmt: skip
    architecture(f"{_head}_{_backbone}", _segmentation, _head, _backbone)
globals().update({name: make for name, make in ARCHITECTURES.items() if name.partition("_")[0] in ("fcn", "deeplabv3", "lraspp")})
