"""Residual networks (He et al. 2016), by default with torchvision's layout and names, so that torchvision's weights load."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import netcl.autograd as ag
from netcl.core.errors import message
from netcl.core.tensor import Tensor
from netcl.nn import init
from netcl.nn.activation import ReLU
from netcl.nn.container import Identity, Sequential
from netcl.nn.conv import Conv2d
from netcl.nn.linear import Linear
from netcl.nn.module import Module
from netcl.nn.norm import BatchNorm2d
from netcl.nn.parameter import constructor
from netcl.nn.pool import AdaptiveAvgPool2d, MaxPool2d


class BasicBlock(Module):
    """Two 3 x 3 convolutions beside a shortcut: ``y = relu(bn2(conv2(relu(bn1(conv1(x))))) + shortcut(x))``.

    - **inplanes**, **planes**: channels in and out.
    - **stride**: stride of the first convolution. **downsample**: the module of the shortcut, required where shapes change.

    >>> from netcl import nn, zeros
    >>> nn.BasicBlock(4, 4)(zeros((1, 4, 8, 8))).shape
    (1, 4, 8, 8)
    """

    expansion = 1

    def __init__(self, inplanes: int, planes: int, stride: int = 1, downsample: Module | None = None, groups: int = 1,
                 base_width: int = 64, dilation: int = 1):  # fmt: skip
        super().__init__()
        if groups != 1 or base_width != 64 or dilation != 1:
            what = "groups must be 1, base_width 64 and dilation 1"
            raise ValueError(message("BasicBlock", what, "use Bottleneck", groups=groups, base_width=base_width, dilation=dilation))
        self.conv1 = Conv2d(inplanes, planes, 3, stride, 1, bias=False)
        self.bn1 = BatchNorm2d(planes)
        self.relu = ReLU()
        self.conv2 = Conv2d(planes, planes, 3, 1, 1, bias=False)
        self.bn2 = BatchNorm2d(planes)
        self.downsample = downsample

    def forward(self, x: Tensor) -> Tensor:
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out))
        return self.relu(ag.add(out, x if self.downsample is None else self.downsample(x)))


class Bottleneck(Module):
    """A narrow 3 x 3 convolution between two 1 x 1 convolutions, beside a shortcut; the output has ``4 planes`` channels.

    - **inplanes**: channels in. **planes**: a quarter of the channels out.
    - **stride**: stride of the 3 x 3 convolution. **downsample**: the module of the shortcut, required where shapes change.
    - **groups**, **base_width**, **dilation**: settings of the 3 x 3 convolution (ResNeXt, wide ResNet, segmentation).

    >>> from netcl import nn, zeros
    >>> nn.Bottleneck(16, 4)(zeros((1, 16, 8, 8))).shape
    (1, 16, 8, 8)
    """

    expansion = 4

    def __init__(self, inplanes: int, planes: int, stride: int = 1, downsample: Module | None = None, groups: int = 1,
                 base_width: int = 64, dilation: int = 1):  # fmt: skip
        super().__init__()
        width = planes * base_width // 64 * groups
        self.conv1 = Conv2d(inplanes, width, 1, bias=False)
        self.bn1 = BatchNorm2d(width)
        self.conv2 = Conv2d(width, width, 3, stride, dilation, dilation, groups, bias=False)
        self.bn2 = BatchNorm2d(width)
        self.conv3 = Conv2d(width, planes * self.expansion, 1, bias=False)
        self.bn3 = BatchNorm2d(planes * self.expansion)
        self.relu = ReLU()
        self.downsample = downsample

    def forward(self, x: Tensor) -> Tensor:
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.relu(self.bn2(self.conv2(out)))
        out = self.bn3(self.conv3(out))
        return self.relu(ag.add(out, x if self.downsample is None else self.downsample(x)))


class ResNet(Module):
    """A residual network: a stem, four stages of blocks, mean over the image, a linear layer.

    - **block**: :class:`BasicBlock` or :class:`Bottleneck`. **layers**: how many blocks each stage has.
    - **num_classes**: width of the output. **in_channels**: channels of the input.
    - **stem**: ``imagenet`` (7 x 7, stride 2, then pooling) or ``cifar`` (3 x 3, stride 1, no pooling: for images of about 32 x 32).
    - **width**: channels of the stem. **groups**, **width_per_group**: settings of the bottlenecks.
    - **zero_init_residual**: whether the last norm of every block starts with weights of 0, so that the branch gives 0.
    - **replace_stride_with_dilation**: three flags: whether each of the last three stages dilates instead of halving the image.

    Shapes: ``(N, in_channels, H, W)`` becomes ``(N, num_classes)``.

    >>> from netcl import nn, zeros
    >>> model = nn.ResNet(nn.BasicBlock, [1, 1, 1, 1], num_classes=10, stem="cifar", width=8)
    >>> model(zeros((2, 3, 32, 32))).shape
    (2, 10)
    """

    def __init__(self, block: type[BasicBlock | Bottleneck], layers: Sequence[int], num_classes: int = 1000, in_channels: int = 3,
                 stem: str = "imagenet", width: int = 64, groups: int = 1, width_per_group: int = 64,
                 zero_init_residual: bool = False, replace_stride_with_dilation: Sequence[bool] | None = None):  # fmt: skip
        super().__init__()
        if stem not in ("imagenet", "cifar"):
            raise ValueError(message("ResNet", "stem must be imagenet or cifar", stem=repr(stem)))
        if len(layers) != 4:
            raise ValueError(message("ResNet", "layers must have four numbers, one per stage", layers=list(layers)))
        large = stem == "imagenet"
        self.inplanes, self.groups, self.base_width = width, groups, width_per_group
        self.conv1 = Conv2d(in_channels, width, 7 if large else 3, 2 if large else 1, 3 if large else 1, bias=False)
        self.bn1 = BatchNorm2d(width)
        self.relu = ReLU()
        self.maxpool = MaxPool2d(3, 2, 1) if large else Identity()
        self.dilation = 1
        for stage, (count, dilate) in enumerate(zip(layers, (False, *(replace_stride_with_dilation or (False,) * 3)), strict=True)):
            setattr(self, f"layer{stage + 1}", self._stage(block, width << stage, count, 1 if stage == 0 else 2, dilate))
        self.avgpool = AdaptiveAvgPool2d(1)
        self.fc = Linear((width << 3) * block.expansion, num_classes)
        self._start(zero_init_residual)

    layer1: Sequential
    layer2: Sequential
    layer3: Sequential
    layer4: Sequential

    def _stage(self, block: Any, planes: int, count: int, stride: int, dilate: bool) -> Sequential:
        downsample, out, first = None, planes * block.expansion, self.dilation
        if dilate:
            self.dilation, stride = self.dilation * stride, 1
        if stride != 1 or self.inplanes != out:
            downsample = Sequential(Conv2d(self.inplanes, out, 1, stride, bias=False), BatchNorm2d(out))
        blocks = [block(self.inplanes, planes, stride, downsample, self.groups, self.base_width, first)]
        self.inplanes = out
        return Sequential(*blocks, *[block(out, planes, 1, None, self.groups, self.base_width, self.dilation) for _ in range(1, count)])

    def _start(self, zero_init_residual: bool) -> None:
        for module in self.modules():
            if isinstance(module, Conv2d):
                init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
            last = getattr(module, "bn3", None) or getattr(module, "bn2", None)
            if zero_init_residual and isinstance(module, BasicBlock | Bottleneck) and last is not None:
                init.zeros_(last.weight)

    def forward(self, x: Tensor) -> Tensor:
        x = self.maxpool(self.relu(self.bn1(self.conv1(x))))
        for stage in (self.layer1, self.layer2, self.layer3, self.layer4):
            x = stage(x)
        return self.fc(ag.flatten(self.avgpool(x), 1))


def _resnet(depth: int, block: type[BasicBlock | Bottleneck], *layers: int) -> Callable[..., ResNet]:
    def make(num_classes: int = 1000, **options: Any) -> ResNet:
        return ResNet(block, layers, num_classes, **options)

    make.__name__ = make.__qualname__ = f"resnet{depth}"
    make.__doc__ = f"""Return a ResNet-{depth}; ``options`` as in :class:`ResNet`: ``resnet{depth}(num_classes=10, stem="cifar")``."""
    return constructor(make)


resnet18 = _resnet(18, BasicBlock, 2, 2, 2, 2)
resnet34 = _resnet(34, BasicBlock, 3, 4, 6, 3)
resnet50 = _resnet(50, Bottleneck, 3, 4, 6, 3)
resnet101 = _resnet(101, Bottleneck, 3, 4, 23, 3)
resnet152 = _resnet(152, Bottleneck, 3, 8, 36, 3)


@constructor
def ResNet18(num_classes: int = 10, stem: str = "cifar", **options: Any) -> ResNet:
    """Return a ResNet-18 for small images: by default ten classes and the CIFAR stem.

    >>> from netcl import nn
    >>> sum(p.size for p in nn.ResNet18().parameters())
    11173962
    """
    return ResNet(BasicBlock, [2, 2, 2, 2], num_classes, stem=stem, **options)
