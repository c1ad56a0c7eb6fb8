"""Residual networks: ResNet, ResNeXt and wide ResNet (by netcl.nn), RegNet, ConvNeXt, MobileNet, EfficientNet, ShuffleNet."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

import netcl.autograd as ag
from netcl import nn
from netcl.core.tensor import Tensor
from netcl.nn import init
from netcl.nn.functional import channel_shuffle
from netcl.nn.parameter import empty
from netcl.vision.models.blocks import LayerChain, ResidualPath, SqueezeExcitation, architecture, conv_norm, divisible, draw
from netcl.vision.ops import Permute, StochasticDepth

_DEEP = {50: (3, 4, 6, 3), 101: (3, 4, 23, 3), 152: (3, 8, 36, 3)}
for _depth, _counts in {18: (2, 2, 2, 2), 34: (3, 4, 6, 3), **_DEEP}.items():
    architecture(f"resnet{_depth}", nn.ResNet, nn.Bottleneck if _depth > 34 else nn.BasicBlock, _counts)
for _depth, _groups, _width in ((50, 32, 4), (101, 32, 8), (101, 64, 4)):
    _name = f"resnext{_depth}_{_groups}x{_width}d"
    architecture(_name, nn.ResNet, nn.Bottleneck, _DEEP[_depth], groups=_groups, width_per_group=_width)
for _depth in (50, 101):
    architecture(f"wide_resnet{_depth}_2", nn.ResNet, nn.Bottleneck, _DEEP[_depth], width_per_group=128)


class RegNetBlock(nn.Module):
    """A bottleneck of grouped convolutions, with squeeze and excitation if ``squeezed``, beside a shortcut."""

    def __init__(self, width_in: int, width_out: int, stride: int, group_width: int, squeezed: int):
        super().__init__()
        self.proj = conv_norm(width_in, width_out, 1, stride, activation=None) if width_in != width_out or stride != 1 else None
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
            group, blocks = min(group_width, width), {}
            out = divisible(width, group)
            for i in range(widths.count(width)):
                blocks[f"block{stage}-{i}"] = RegNetBlock(inside, out, 1 if i else 2, group, round(se_ratio * inside))
                inside = out
            stages[f"block{stage}"] = nn.Sequential(blocks)
        self.trunk_output, self.avgpool, self.fc = nn.Sequential(stages), nn.AdaptiveAvgPool2d(1), nn.Linear(inside, num_classes)
        draw(self, "kaiming_normal fan_out", "normal 0.01")


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
    """A depthwise 7 x 7 convolution and a feed-forward network over channels. The scaled result is added to the input."""

    def __init__(self, dim: int, layer_scale: float, stochastic_depth_prob: float):
        super().__init__()
        hidden = [nn.LayerNorm(dim, eps=1e-6), nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim)]
        self.block = nn.Sequential(nn.Conv2d(dim, dim, 7, padding=3, groups=dim), Permute((0, 2, 3, 1)), *hidden, Permute((0, 3, 1, 2)))
        self.layer_scale = init.constant_(empty((dim, 1, 1)), layer_scale)
        self.stochastic_depth = StochasticDepth(stochastic_depth_prob, "row")

    def forward(self, x: Tensor) -> Tensor:
        return ag.add(self.stochastic_depth(ag.mul(self.layer_scale, self.block(x))), x)


class ConvNeXt(LayerChain):
    """ConvNeXt (Liu et al. 2022). Entries of ``block_setting``: channels in, channels out (``None`` in the last), blocks."""

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
        draw(self, "trunc_normal 0.02", "trunc_normal 0.02")


for _name, _width, _deep, _drop in (("tiny", 96, 9, 0.1), ("small", 96, 27, 0.4), ("base", 128, 27, 0.5), ("large", 192, 27, 0.5)):
    _stages = [(_width << i, _width << i + 1 if i < 3 else None, count) for i, count in enumerate((3, 3, _deep, 3))]
    architecture(f"convnext_{_name}", ConvNeXt, _stages, stochastic_depth_prob=_drop)

# ---- inverted residual blocks

_MOBILENET_V2 = ((1, 16, 1, 1), (6, 24, 2, 2), (6, 32, 3, 2), (6, 64, 4, 2), (6, 96, 3, 1), (6, 160, 3, 2), (6, 320, 1, 1))


class MobileNetV2(LayerChain):
    """MobileNet v2 (Sandler et al. 2018). ``inverted_residual_setting``: expansion, channels, blocks and first stride per stage."""

    def __init__(self, num_classes: int = 1000, width_mult: float = 1.0, inverted_residual_setting: Sequence[Any] = _MOBILENET_V2,
                 round_nearest: int = 8, dropout: float = 0.2):  # fmt: skip
        super().__init__()
        inside, last = divisible(32 * width_mult, round_nearest), divisible(1280 * max(1.0, width_mult), round_nearest)
        layers: list[nn.Module] = [conv_norm(3, inside, 3, 2, activation=nn.ReLU6)]
        for expansion, channels, count, stride in inverted_residual_setting:
            out = divisible(channels * width_mult, round_nearest)
            for i in range(count):
                step, hidden = stride if i == 0 else 1, inside * expansion
                parts = [conv_norm(inside, hidden, 1, activation=nn.ReLU6)] if expansion != 1 else []
                parts.append(conv_norm(hidden, hidden, 3, step, hidden, nn.ReLU6))
                layers.append(ResidualPath("conv", [*parts, *conv_norm(hidden, out, 1, activation=None)], step == 1 and inside == out))
                inside = out
        self.features, self.avgpool = nn.Sequential(*layers, conv_norm(inside, last, 1, activation=nn.ReLU6)), nn.AdaptiveAvgPool2d(1)
        self.classifier = nn.Sequential(nn.Dropout(dropout), nn.Linear(last, num_classes))
        draw(self, "kaiming_normal fan_out", "normal 0.01")


def _inverted(inside: int, hidden: int, out: int, kernel: int, stride: int, activation: Any, gate: Any, squeezed: int, norm: dict[str, Any],
              dilation: int = 1) -> list[nn.Module]:  # fmt: skip
    """Return layers that expand to ``hidden`` channels, convolve each channel, scale by ``gate`` if ``squeezed``, project to ``out``."""
    parts: list[nn.Module] = [conv_norm(inside, hidden, 1, activation=activation, **norm)] if hidden != inside else []
    parts.append(conv_norm(hidden, hidden, kernel, stride, hidden, activation, dilation, **norm))
    parts += [SqueezeExcitation(hidden, squeezed, *gate)] if squeezed else []
    return [*parts, conv_norm(hidden, out, 1, activation=None, **norm)]


# Kernel, expanded channels, channels out, stride; "s" squeeze and excitation, "h" hard swish, "d" where ``dilated`` replaces strides.
_V3_LARGE = """3 16 16 1, 3 64 24 2, 3 72 24 1, 5 72 40 2 s, 5 120 40 1 s, 5 120 40 1 s, 3 240 80 2 h, 3 200 80 1 h, 3 184 80 1 h,
    3 184 80 1 h, 3 480 112 1 sh, 3 672 112 1 sh, 5 672 160 2 shd, 5 960 160 1 shd, 5 960 160 1 shd"""
_V3_SMALL = """3 16 16 2 s, 3 72 24 2, 3 88 24 1, 5 96 40 2 sh, 5 240 40 1 sh, 5 240 40 1 sh, 5 120 48 1 sh, 5 144 48 1 sh,
    5 288 96 2 shd, 5 576 96 1 shd, 5 576 96 1 shd"""


class MobileNetV3(LayerChain):
    """MobileNet v3 (Howard et al. 2019). ``dilated`` and ``reduced_tail`` are for segmentation."""

    def __init__(self, inverted_residual_setting: str, last_channel: int, num_classes: int = 1000, dropout: float = 0.2,
                 width_mult: float = 1.0, reduced_tail: bool = False, dilated: bool = False):  # fmt: skip
        super().__init__()
        norm: dict[str, Any] = {"eps": 0.001, "momentum": 0.01}
        inside, tail = divisible(16 * width_mult), 2 if reduced_tail else 1
        layers: list[nn.Module] = [conv_norm(3, inside, 3, 2, activation=nn.Hardswish, **norm)]
        for row in inverted_residual_setting.split(","):
            (kernel, expanded, channels, stride), flags = map(int, row.split()[:4]), "".join(row.split()[4:])
            out = divisible(channels // (tail if "d" in flags else 1) * width_mult)
            hidden = divisible(expanded // (tail if "d" in flags and stride == 1 else 1) * width_mult)
            dilation, activation = 2 if "d" in flags and dilated else 1, nn.Hardswish if "h" in flags else nn.ReLU
            squeezed, step = divisible(hidden // 4) if "s" in flags else 0, stride if dilation == 1 else 1
            parts = _inverted(inside, hidden, out, kernel, step, activation, (nn.ReLU, nn.Hardsigmoid), squeezed, norm, dilation)
            layers.append(ResidualPath("block", parts, stride == 1 and inside == out))
            inside = out
        self.features = nn.Sequential(*layers, conv_norm(inside, 6 * inside, 1, activation=nn.Hardswish, **norm))
        self.avgpool, last = nn.AdaptiveAvgPool2d(1), divisible(last_channel // tail * width_mult)
        self.classifier = nn.Sequential(nn.Linear(6 * inside, last), nn.Hardswish(), nn.Dropout(dropout), nn.Linear(last, num_classes))
        draw(self, "kaiming_normal fan_out", "normal 0.01")


# Expansion, kernel, stride, channels in and out, blocks; a seventh value if expansion and depthwise convolution are one ("fused").
_B0 = ((1, 3, 1, 32, 16, 1), (6, 3, 2, 16, 24, 2), (6, 5, 2, 24, 40, 2), (6, 3, 2, 40, 80, 3), (6, 5, 1, 80, 112, 3),
       (6, 5, 2, 112, 192, 4), (6, 3, 1, 192, 320, 1))  # fmt: skip
_V2 = {
    "s": ((1, 3, 1, 24, 24, 2, 1), (4, 3, 2, 24, 48, 4, 1), (4, 3, 2, 48, 64, 4, 1), (4, 3, 2, 64, 128, 6), (6, 3, 1, 128, 160, 9),
          (6, 3, 2, 160, 256, 15)),
    "m": ((1, 3, 1, 24, 24, 3, 1), (4, 3, 2, 24, 48, 5, 1), (4, 3, 2, 48, 80, 5, 1), (4, 3, 2, 80, 160, 7), (6, 3, 1, 160, 176, 14),
          (6, 3, 2, 176, 304, 18), (6, 3, 1, 304, 512, 5)),
    "l": ((1, 3, 1, 32, 32, 4, 1), (4, 3, 2, 32, 64, 7, 1), (4, 3, 2, 64, 96, 7, 1), (4, 3, 2, 96, 192, 10), (6, 3, 1, 192, 224, 19),
          (6, 3, 2, 224, 384, 25), (6, 3, 1, 384, 640, 7)),
}  # fmt: skip


class EfficientNet(LayerChain):
    """EfficientNet (Tan and Le 2019, 2021). ``eps`` and ``momentum`` are those of the batch norms."""

    def __init__(self, inverted_residual_setting: Sequence[Sequence[int]], dropout: float, stochastic_depth_prob: float = 0.2,
                 num_classes: int = 1000, last_channel: int | None = None, eps: float = 1e-5, momentum: float = 0.1):  # fmt: skip
        super().__init__()
        norm: dict[str, Any] = {"eps": eps, "momentum": momentum}
        layers: list[nn.Module] = [conv_norm(3, inverted_residual_setting[0][3], 3, 2, activation=nn.SiLU, **norm)]
        done, total = 0, sum(row[5] for row in inverted_residual_setting)
        for expansion, kernel, stride, inside, out, count, *fused in inverted_residual_setting:
            blocks = []
            for i in range(count):
                width, step = (out, 1) if i else (inside, stride)
                hidden = divisible(width * expansion)
                if fused:
                    wide = conv_norm(width, out if hidden == width else hidden, kernel, step, activation=nn.SiLU, **norm)
                    parts: list[nn.Module] = [wide] if hidden == width else [wide, conv_norm(hidden, out, 1, activation=None, **norm)]
                else:
                    parts = _inverted(width, hidden, out, kernel, step, nn.SiLU, (nn.SiLU,), max(1, width // 4), norm)
                blocks.append(ResidualPath("block", parts, width == out and step == 1, stochastic_depth_prob * done / total))
                done += 1
            layers.append(nn.Sequential(*blocks))
        last, bound = last_channel or 4 * out, 1 / math.sqrt(num_classes)
        self.features, self.avgpool = nn.Sequential(*layers, conv_norm(out, last, 1, activation=nn.SiLU, **norm)), nn.AdaptiveAvgPool2d(1)
        self.classifier = nn.Sequential(nn.Dropout(dropout), nn.Linear(last, num_classes))
        draw(self, "kaiming_normal fan_out", "zeros")
        init.uniform_(self.classifier[1].weight, -bound, bound)


class ShuffleUnit(nn.Module):
    """Convolves half of the channels (with stride 2, all channels in two branches), then shuffles the channels of both halves."""

    def __init__(self, inp: int, oup: int, stride: int):
        super().__init__()
        self.stride, half, inside = stride, oup // 2, inp if stride > 1 else oup // 2
        self.branch1 = nn.Sequential(*([*conv_norm(inp, inp, 3, stride, inp, None), *conv_norm(inp, half, 1)] if stride > 1 else []))
        self.branch2 = nn.Sequential(*conv_norm(inside, half, 1), *conv_norm(half, half, 3, stride, half, None), *conv_norm(half, half, 1))

    def forward(self, x: Tensor) -> Tensor:
        kept, changed = (self.branch1(x), x) if self.stride > 1 else ag.chunk(x, 2, axis=1)
        return channel_shuffle(ag.cat([kept, self.branch2(changed)], axis=1), 2)


class ShuffleNetV2(LayerChain):
    """ShuffleNet v2 (Ma et al. 2018)."""

    def __init__(self, stages_repeats: Sequence[int], stages_out_channels: Sequence[int], num_classes: int = 1000):
        super().__init__()
        inside, *outs, last = stages_out_channels
        self.conv1, self.maxpool = conv_norm(3, inside, 3, 2), nn.MaxPool2d(3, 2, 1)
        for stage, (count, out) in enumerate(zip(stages_repeats, outs, strict=True), 2):
            setattr(self, f"stage{stage}", nn.Sequential(*(ShuffleUnit(out if i else inside, out, 1 if i else 2) for i in range(count))))
            inside = out
        self.conv5, self.avgpool, self.fc = conv_norm(inside, last, 1), nn.AdaptiveAvgPool2d(1), nn.Linear(last, num_classes)


architecture("mobilenet_v2", MobileNetV2)
architecture("mobilenet_v3_large", MobileNetV3, _V3_LARGE, 1280)
architecture("mobilenet_v3_small", MobileNetV3, _V3_SMALL, 1024)
for _i, (_wider, _deeper, _drop) in enumerate(((1.0, 1.0, 0.2), (1.0, 1.1, 0.2), (1.1, 1.2, 0.3), (1.2, 1.4, 0.3), (1.4, 1.8, 0.4),
                                               (1.6, 2.2, 0.4), (1.8, 2.6, 0.5), (2.0, 3.1, 0.5))):  # fmt: skip
    _scaled = tuple((*row[:3], divisible(row[3] * _wider), divisible(row[4] * _wider), math.ceil(row[5] * _deeper)) for row in _B0)
    architecture(f"efficientnet_b{_i}", EfficientNet, _scaled, _drop, **({"eps": 0.001, "momentum": 0.01} if _i > 4 else {}))
for (_size, _rows), _drop in zip(_V2.items(), (0.2, 0.3, 0.4), strict=True):
    architecture(f"efficientnet_v2_{_size}", EfficientNet, _rows, _drop, last_channel=1280, eps=0.001)
for _name, _first, _last in (("0_5", 48, 1024), ("1_0", 116, 1024), ("1_5", 176, 1024), ("2_0", 244, 2048)):
    architecture(f"shufflenet_v2_x{_name}", ShuffleNetV2, (4, 8, 4), (24, _first, 2 * _first, 4 * _first, _last))
