"""ResNet, ResNeXt and wide ResNet (the classes are those of netcl.nn), RegNet and ConvNeXt."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

import netcl.autograd as ag
from netcl import nn
from netcl.core.tensor import Tensor
from netcl.nn import init
from netcl.nn.parameter import empty
from netcl.vision.models.blocks import LayerChain, SqueezeExcitation, architecture, conv_norm, start
from netcl.vision.ops import Permute, StochasticDepth

_DEEP = {50: (3, 4, 6, 3), 101: (3, 4, 23, 3), 152: (3, 8, 36, 3)}
for _depth, _counts in {18: (2, 2, 2, 2), 34: (3, 4, 6, 3), **_DEEP}.items():
    architecture(f"resnet{_depth}", nn.ResNet, nn.Bottleneck if _depth > 34 else nn.BasicBlock, _counts)
for _depth, _groups, _width in ((50, 32, 4), (101, 32, 8), (101, 64, 4)):
    _options = {"groups": _groups, "width_per_group": _width}
    architecture(f"resnext{_depth}_{_groups}x{_width}d", nn.ResNet, nn.Bottleneck, _DEEP[_depth], **_options)
for _depth in (50, 101):
    architecture(f"wide_resnet{_depth}_2", nn.ResNet, nn.Bottleneck, _DEEP[_depth], width_per_group=128)


class RegNetBlock(nn.Module):
    """A bottleneck of grouped convolutions, with squeeze and excitation if ``squeezed``, beside a shortcut."""

    def __init__(self, width_in: int, width_out: int, stride: int, group_width: int, squeezed: int):
        super().__init__()
        changes = width_in != width_out or stride != 1
        self.proj = conv_norm(width_in, width_out, 1, stride, activation=None) if changes else None
        parts = {"a": conv_norm(width_in, width_out, 1), "b": conv_norm(width_out, width_out, 3, stride, width_out // group_width)}
        se = {"se": SqueezeExcitation(width_out, squeezed)} if squeezed else {}
        self.f = nn.Sequential({**parts, **se, "c": conv_norm(width_out, width_out, 1, activation=None)})

    def forward(self, x: Tensor) -> Tensor:
        return ag.relu(ag.add(x if self.proj is None else self.proj(x), self.f(x)))


class RegNet(LayerChain):
    """RegNet (Radosavovic et al. 2020). Block widths grow linearly, ``w_0 + i w_a``, quantized to powers of ``w_m`` times ``w_0``."""

    def __init__(self, depth: int, w_0: int, w_a: float, w_m: float, group_width: int, se_ratio: float = 0.0, num_classes: int = 1000,
                 stem_width: int = 32):  # fmt: skip
        super().__init__()
        powers = np.round(np.log((w_0 + w_a * np.arange(depth)) / w_0) / math.log(w_m))
        widths = (np.round(w_0 * w_m**powers / 8) * 8).astype(int).tolist()
        self.stem, inside, stages = conv_norm(3, stem_width, 3, 2), stem_width, {}
        for stage, width in enumerate(dict.fromkeys(widths), 1):
            group = min(group_width, width)
            out = width if width % group == 0 else max(group, round(width / group) * group)
            blocks = {}
            for i in range(widths.count(width)):
                blocks[f"block{stage}-{i}"] = RegNetBlock(inside, out, 1 if i else 2, group, round(se_ratio * inside))
                inside = out
            stages[f"block{stage}"] = nn.Sequential(blocks)
        self.trunk_output, self.avgpool, self.fc = nn.Sequential(stages), nn.AdaptiveAvgPool2d(1), nn.Linear(inside, num_classes)
        start(self, "fan_out", "normal 0.01")


# Depth, w_0, w_a, w_m, width of a group.
_REGNET = {
    "y_400mf": (16, 48, 27.89, 2.09, 8), "y_800mf": (14, 56, 38.84, 2.4, 16), "y_1_6gf": (27, 48, 20.71, 2.65, 24),
    "y_3_2gf": (21, 80, 42.63, 2.66, 24), "y_8gf": (17, 192, 76.82, 2.19, 56), "y_16gf": (18, 200, 106.23, 2.48, 112),
    "y_32gf": (20, 232, 115.89, 2.53, 232), "y_128gf": (27, 456, 160.83, 2.52, 264), "x_400mf": (22, 24, 24.48, 2.54, 16),
    "x_800mf": (16, 56, 35.73, 2.28, 16), "x_1_6gf": (18, 80, 34.01, 2.25, 24), "x_3_2gf": (25, 88, 26.31, 2.25, 48),
    "x_8gf": (23, 80, 49.56, 2.88, 120), "x_16gf": (22, 216, 55.59, 2.1, 128), "x_32gf": (23, 320, 69.86, 2.0, 168),
}  # fmt: skip
for _name, _row in _REGNET.items():
    architecture(f"regnet_{_name}", RegNet, *_row, 0.25 if _name[0] == "y" else 0.0)


class LayerNorm2d(nn.LayerNorm):
    """Layer norm over the channels of images ``(N, C, H, W)``."""

    def forward(self, x: Tensor) -> Tensor:
        return ag.permute(super().forward(ag.permute(x, (0, 2, 3, 1))), (0, 3, 1, 2))


class CNBlock(nn.Module):
    """A depthwise 7 x 7 convolution and a feed-forward network over channels, scaled, beside a shortcut."""

    def __init__(self, dim: int, layer_scale: float, stochastic_depth_prob: float):
        super().__init__()
        hidden = [nn.LayerNorm(dim, eps=1e-6), nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim)]
        self.block = nn.Sequential(nn.Conv2d(dim, dim, 7, padding=3, groups=dim), Permute((0, 2, 3, 1)), *hidden, Permute((0, 3, 1, 2)))
        self.layer_scale = init.constant_(empty((dim, 1, 1)), layer_scale)
        self.stochastic_depth = StochasticDepth(stochastic_depth_prob, "row")

    def forward(self, x: Tensor) -> Tensor:
        return ag.add(self.stochastic_depth(ag.mul(self.layer_scale, self.block(x))), x)


class ConvNeXt(LayerChain):
    """ConvNeXt (Liu et al. 2022). Rows of the setting: channels in, channels out (``None`` in the last), blocks."""

    flat = ()

    def __init__(self, block_setting: Sequence[Any], stochastic_depth_prob: float = 0.0, layer_scale: float = 1e-6,
                 num_classes: int = 1000):  # fmt: skip
        super().__init__()
        layers = [nn.Sequential(nn.Conv2d(3, block_setting[0][0], 4, 4), LayerNorm2d(block_setting[0][0], eps=1e-6))]
        done, total = 0, sum(row[2] for row in block_setting)
        for width, out, count in block_setting:
            shares = [stochastic_depth_prob * (done + i) / (total - 1) for i in range(count)]
            layers.append(nn.Sequential(*[CNBlock(width, layer_scale, share) for share in shares]))
            done += count
            layers += [nn.Sequential(LayerNorm2d(width, eps=1e-6), nn.Conv2d(width, out, 2, 2))] if out is not None else []
        self.features, self.avgpool = nn.Sequential(*layers), nn.AdaptiveAvgPool2d(1)
        self.classifier = nn.Sequential(LayerNorm2d(width, eps=1e-6), nn.Flatten(), nn.Linear(width, num_classes))
        start(self, "trunc_normal 0.02", "trunc_normal 0.02")


for _name, (_width, _deep, _drop) in {"tiny": (96, 9, 0.1), "small": (96, 27, 0.4), "base": (128, 27, 0.5), "large": (192, 27, 0.5)}.items():
    _stages = [(_width << i, _width << i + 1 if i < 3 else None, count) for i, count in enumerate((3, 3, _deep, 3))]
    architecture(f"convnext_{_name}", ConvNeXt, _stages, stochastic_depth_prob=_drop)
