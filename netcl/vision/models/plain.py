"""AlexNet, VGG, SqueezeNet and DenseNet."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import netcl.autograd as ag
from netcl import nn
from netcl.core.errors import message
from netcl.core.tensor import Tensor
from netcl.nn import init
from netcl.vision.models.blocks import LayerChain, architecture, start


class AlexNet(LayerChain):
    """AlexNet (Krizhevsky 2014)."""

    def __init__(self, num_classes: int = 1000, dropout: float = 0.5):
        super().__init__()
        rows = ((3, 64, 11, 4, 2), (64, 192, 5, 1, 2), (192, 384, 3, 1, 1), (384, 256, 3, 1, 1), (256, 256, 3, 1, 1))
        layers = [[nn.Conv2d(*row), nn.ReLU(), *([nn.MaxPool2d(3, 2)] if i in (0, 1, 4) else [])] for i, row in enumerate(rows)]
        self.features, self.avgpool = nn.Sequential(*sum(layers, [])), nn.AdaptiveAvgPool2d(6)
        hidden = [nn.Dropout(dropout), nn.Linear(256 * 36, 4096), nn.ReLU(), nn.Dropout(dropout), nn.Linear(4096, 4096), nn.ReLU()]
        self.classifier = nn.Sequential(*hidden, nn.Linear(4096, num_classes))


class VGG(LayerChain):
    """VGG (Simonyan and Zisserman 2014); ``features`` are those of :func:`make_layers`."""

    def __init__(self, features: nn.Module, num_classes: int = 1000, init_weights: bool = True, dropout: float = 0.5):
        super().__init__()
        self.features, self.avgpool = features, nn.AdaptiveAvgPool2d(7)
        hidden = [nn.Linear(512 * 49, 4096), nn.ReLU(), nn.Dropout(dropout), nn.Linear(4096, 4096), nn.ReLU(), nn.Dropout(dropout)]
        self.classifier = nn.Sequential(*hidden, nn.Linear(4096, num_classes))
        if init_weights:
            start(self, "fan_out", "normal 0.01")


def make_layers(cfg: Sequence[int | str], batch_norm: bool = False) -> nn.Sequential:
    """The convolutions of VGG: a number of channels each, ``"M"`` for a pooling (``"C"`` for one that rounds up)."""
    layers: list[nn.Module] = []
    inside = 3
    for out in cfg:
        if isinstance(out, str):
            layers.append(nn.MaxPool2d(2, 2, ceil_mode=out == "C"))
        else:
            layers += [nn.Conv2d(inside, out, 3, padding=1), *([nn.BatchNorm2d(out)] if batch_norm else []), nn.ReLU()]
            inside = out
    return nn.Sequential(*layers)


def _vgg(counts: Sequence[int], batch_norm: bool, **options: Any) -> VGG:
    cfg = [out for count, width in zip(counts, (64, 128, 256, 512, 512), strict=True) for out in [*[width] * count, "M"]]
    return VGG(make_layers(cfg, batch_norm), **options)


class Fire(nn.Module):
    """A 1 x 1 convolution, and behind it one of 1 x 1 beside one of 3 x 3."""

    def __init__(self, inplanes: int, squeeze_planes: int, expand_planes: int):
        super().__init__()
        self.squeeze, self.expand1x1 = nn.Conv2d(inplanes, squeeze_planes, 1), nn.Conv2d(squeeze_planes, expand_planes, 1)
        self.expand3x3 = nn.Conv2d(squeeze_planes, expand_planes, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        x = ag.relu(self.squeeze(x))
        return ag.relu(ag.cat([self.expand1x1(x), self.expand3x3(x)], axis=1))


class SqueezeNet(LayerChain):
    """SqueezeNet (Iandola et al. 2016), ``version`` 1_0 or 1_1."""

    flat = ()

    def __init__(self, version: str = "1_0", num_classes: int = 1000, dropout: float = 0.5):
        super().__init__()
        if version not in ("1_0", "1_1"):
            raise ValueError(message("SqueezeNet", 'version must be "1_0" or "1_1"', version=repr(version)))
        first, pooled = (nn.Conv2d(3, 96, 7, 2), (0, 3, 7)) if version == "1_0" else (nn.Conv2d(3, 64, 3, 2), (0, 2, 4))
        layers: list[nn.Module] = [first, nn.ReLU()]
        inside = first.out_channels
        for i, squeezed in enumerate((0, 16, 16, 32, 32, 48, 48, 64, 64)):
            layers += [Fire(inside, squeezed, 4 * squeezed)] if i else []
            layers += [nn.MaxPool2d(3, 2, ceil_mode=True)] if i in pooled else []
            inside = 8 * squeezed or inside
        self.features = nn.Sequential(*layers)
        last = nn.Conv2d(512, num_classes, 1)
        self.classifier, self.flatten = nn.Sequential(nn.Dropout(dropout), last, nn.ReLU(), nn.AdaptiveAvgPool2d(1)), nn.Flatten()
        start(self, "kaiming_uniform")
        init.normal_(last.weight, std=0.01)


class DenseLayer(nn.Module):
    """A bottleneck over all feature maps so far, whose result becomes one more of them."""

    def __init__(self, inside: int, growth_rate: int, bn_size: int, drop_rate: float):
        super().__init__()
        hidden = bn_size * growth_rate
        self.norm1, self.conv1 = nn.BatchNorm2d(inside), nn.Conv2d(inside, hidden, 1, bias=False)
        self.norm2, self.conv2 = nn.BatchNorm2d(hidden), nn.Conv2d(hidden, growth_rate, 3, padding=1, bias=False)
        self.drop = nn.Dropout(drop_rate)

    def forward(self, x: Tensor) -> Tensor:
        made = self.conv2(ag.relu(self.norm2(self.conv1(ag.relu(self.norm1(x))))))
        return ag.cat([x, self.drop(made)], axis=1)


class DenseNet(LayerChain):
    """DenseNet (Huang et al. 2017). ``memory_efficient`` is accepted and changes nothing."""

    def __init__(self, growth_rate: int = 32, block_config: Sequence[int] = (6, 12, 24, 16), num_init_features: int = 64, bn_size: int = 4,
                 drop_rate: float = 0.0, num_classes: int = 1000, memory_efficient: bool = False):  # fmt: skip
        super().__init__()
        width, pool = num_init_features, nn.MaxPool2d(3, 2, 1)
        layers = {"conv0": nn.Conv2d(3, width, 7, 2, 3, bias=False), "norm0": nn.BatchNorm2d(width), "relu0": nn.ReLU(), "pool0": pool}
        for i, count in enumerate(block_config, 1):
            block = {f"denselayer{j + 1}": DenseLayer(width + j * growth_rate, growth_rate, bn_size, drop_rate) for j in range(count)}
            layers[f"denseblock{i}"] = nn.Sequential(block)
            width += count * growth_rate
            if i < len(block_config):
                parts = {"norm": nn.BatchNorm2d(width), "relu": nn.ReLU(), "conv": nn.Conv2d(width, width // 2, 1, bias=False)}
                layers[f"transition{i}"] = nn.Sequential({**parts, "pool": nn.AvgPool2d(2, 2)})
                width //= 2
        self.features = nn.Sequential({**layers, "norm5": nn.BatchNorm2d(width)})
        self.relu, self.avgpool, self.classifier = nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Linear(width, num_classes)
        start(self, "kaiming_normal")
        init.zeros_(self.classifier.bias)  # type: ignore[arg-type]


architecture("alexnet", AlexNet)
for _depth, _counts in {11: (1, 1, 2, 2, 2), 13: (2,) * 5, 16: (2, 2, 3, 3, 3), 19: (2, 2, 4, 4, 4)}.items():
    architecture(f"vgg{_depth}", _vgg, _counts, False)
    architecture(f"vgg{_depth}_bn", _vgg, _counts, True)
for _version in ("1_0", "1_1"):
    architecture(f"squeezenet{_version}", SqueezeNet, _version)
for _depth, _growth, _counts, _width in ((121, 32, (6, 12, 24, 16), 64), (161, 48, (6, 12, 36, 24), 96), (169, 32, (6, 12, 32, 32), 64),
                                         (201, 32, (6, 12, 48, 32), 64)):  # fmt: skip
    architecture(f"densenet{_depth}", DenseNet, _growth, _counts, _width)
