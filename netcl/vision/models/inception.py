"""GoogLeNet and Inception v3: blocks of parallel branches, written as tables."""

from __future__ import annotations

from collections import namedtuple
from typing import Any

import netcl.autograd as ag
from netcl import nn
from netcl.core.tensor import Tensor
from netcl.vision.models.blocks import LayerChain, architecture, start

GoogLeNetOutputs = namedtuple("GoogLeNetOutputs", "logits aux_logits2 aux_logits1")
InceptionOutputs = namedtuple("InceptionOutputs", "logits aux_logits")


class BasicConv2d(nn.Module):
    """A convolution, a batch norm, ReLU."""

    def __init__(self, in_channels: int, out_channels: int, kernel_size: Any = 1, **options: Any):
        super().__init__()
        self.conv = nn.Conv2d(in_channels, out_channels, kernel_size, bias=False, **options)
        self.bn = nn.BatchNorm2d(out_channels, eps=0.001)

    def forward(self, x: Tensor) -> Tensor:
        return ag.relu(self.bn(self.conv(x)))


class _ScaledInput(LayerChain):
    """With ``transform_input``, images normalized as torchvision's other models want them come into the range from -1 to 1."""

    transform_input: bool

    def forward(self, x: Tensor) -> Any:
        if self.transform_input:
            scale, shift = ([[[[v]] for v in row]] for row in ((0.458, 0.448, 0.45), (-0.03, -0.088, -0.188)))
            x = ag.add(ag.mul(x, Tensor.from_host(x.queue, scale, x.dtype)), Tensor.from_host(x.queue, shift, x.dtype))
        return super().forward(x)


class Inception(nn.Module):
    """Convolutions of 1 x 1, 3 x 3, 3 x 3 again and a pooling side by side."""

    def __init__(self, in_channels: int, ch1x1: int, ch3x3red: int, ch3x3: int, ch5x5red: int, ch5x5: int, pool_proj: int):
        super().__init__()
        self.branch1 = BasicConv2d(in_channels, ch1x1)
        self.branch2 = nn.Sequential(BasicConv2d(in_channels, ch3x3red), BasicConv2d(ch3x3red, ch3x3, 3, padding=1))
        self.branch3 = nn.Sequential(BasicConv2d(in_channels, ch5x5red), BasicConv2d(ch5x5red, ch5x5, 3, padding=1))
        self.branch4 = nn.Sequential(nn.MaxPool2d(3, 1, 1, ceil_mode=True), BasicConv2d(in_channels, pool_proj))

    def forward(self, x: Tensor) -> Tensor:
        return ag.cat([self.branch1(x), self.branch2(x), self.branch3(x), self.branch4(x)], axis=1)


class GoogLeNetAux(nn.Module):
    """A classifier of an inner feature map."""

    def __init__(self, in_channels: int, num_classes: int, dropout: float):
        super().__init__()
        self.conv, self.dropout = BasicConv2d(in_channels, 128), nn.Dropout(dropout)
        self.fc1, self.fc2 = nn.Linear(2048, 1024), nn.Linear(1024, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(self.dropout(ag.relu(self.fc1(ag.flatten(self.conv(ag.adaptive_avg_pool2d(x, 4)), 1)))))


# Channels of the blocks: in; 1 x 1; 3 x 3 and what is in front of it; the second 3 x 3 likewise; behind the pooling.
_GOOGLENET = {
    "3a": (192, 64, 96, 128, 16, 32, 32), "3b": (256, 128, 128, 192, 32, 96, 64), "4a": (480, 192, 96, 208, 16, 48, 64),
    "4b": (512, 160, 112, 224, 24, 64, 64), "4c": (512, 128, 128, 256, 24, 64, 64), "4d": (512, 112, 144, 288, 32, 64, 64),
    "4e": (528, 256, 160, 320, 32, 128, 128), "5a": (832, 256, 160, 320, 32, 128, 128), "5b": (832, 384, 192, 384, 48, 128, 128),
}  # fmt: skip


class GoogLeNet(_ScaledInput):
    """GoogLeNet (Szegedy et al. 2014). With ``aux_logits``, training gives ``GoogLeNetOutputs``: also logits of inner layers."""

    auxiliary, outputs = {"inception4a": "aux1", "inception4d": "aux2"}, GoogLeNetOutputs

    def __init__(self, num_classes: int = 1000, aux_logits: bool = True, transform_input: bool = False, init_weights: bool = True,
                 dropout: float = 0.2, dropout_aux: float = 0.7):  # fmt: skip
        super().__init__()
        self.transform_input = transform_input
        self.conv1, self.maxpool1 = BasicConv2d(3, 64, 7, stride=2, padding=3), nn.MaxPool2d(3, 2, ceil_mode=True)
        self.conv2, self.conv3, self.maxpool2 = BasicConv2d(64, 64), BasicConv2d(64, 192, 3, padding=1), nn.MaxPool2d(3, 2, ceil_mode=True)
        for name, row in _GOOGLENET.items():
            setattr(self, f"inception{name}", Inception(*row))
            if name in ("3b", "4e"):
                setattr(self, f"maxpool{name[0]}", nn.MaxPool2d(3 if name == "3b" else 2, 2, ceil_mode=True))
        self.aux1, self.aux2 = (GoogLeNetAux(width, num_classes, dropout_aux) if aux_logits else None for width in (512, 528))
        self.avgpool, self.dropout, self.fc = nn.AdaptiveAvgPool2d(1), nn.Dropout(dropout), nn.Linear(1024, num_classes)
        if init_weights:
            start(self, "trunc_normal 0.01", "trunc_normal 0.01")


# Branches are separated by ";", their layers by spaces: NAME=CHANNELS, NAME=CHANNELS:KERNEL or NAME=CHANNELS:KERNEL/STRIDE is a
# convolution branchNAME, and two with "|" between them get the same input. {0} are the channels in which the blocks of a kind differ.
_DOUBLE = "3x3dbl_1=64 3x3dbl_2=96:3 3x3dbl_3=96:3"
_INCEPTION = {
    "A": f"1x1=64; 5x5_1=48 5x5_2=64:5; {_DOUBLE}; avg _pool={{0}}",
    "B": f"3x3=384:3/2; {_DOUBLE}/2; max",
    "C": "1x1=192; 7x7_1={0} 7x7_2={0}:1x7 7x7_3=192:7x1; "
    "7x7dbl_1={0} 7x7dbl_2={0}:7x1 7x7dbl_3={0}:1x7 7x7dbl_4={0}:7x1 7x7dbl_5=192:1x7; avg _pool=192",
    "D": "3x3_1=192 3x3_2=320:3/2; 7x7x3_1=192 7x7x3_2=192:1x7 7x7x3_3=192:7x1 7x7x3_4=192:3/2; max",
    "E": "1x1=320; 3x3_1=384 3x3_2a=384:1x3|3x3_2b=384:3x1; "
    "3x3dbl_1=448 3x3dbl_2=384:3 3x3dbl_3a=384:1x3|3x3dbl_3b=384:3x1; avg _pool=192",
}
_MIXED = {"5b": ("A", 192, 32), "5c": ("A", 256, 64), "5d": ("A", 288, 64), "6a": ("B", 288), "6b": ("C", 768, 128), "6c": ("C", 768, 160),
          "6d": ("C", 768, 160), "6e": ("C", 768, 192), "7a": ("D", 768), "7b": ("E", 1280), "7c": ("E", 2048)}  # fmt: skip


class MixedBlock(nn.Module):
    """A block of Inception v3: its branches side by side."""

    def __init__(self, kind: str, in_channels: int, channels: int = 0):
        super().__init__()
        self._branches = []
        for branch in _INCEPTION[kind].format(channels).split(";"):
            inside, names = in_channels, []
            for step in branch.split():
                parts = [part.partition("=")[::2] for part in step.split("|")]
                names.append([name for name, _ in parts])
                for name, text in parts:
                    inside = self._add_conv(name, text, inside) if text else inside
            self._branches.append(names)

    def _add_conv(self, name: str, text: str, inside: int) -> int:
        size, _, stride = text.partition("/")
        out, *kernel = map(int, size.replace("x", ":").split(":"))
        kernel = kernel * 2 if len(kernel) == 1 else kernel or [1, 1]
        padding = (0, 0) if stride else (kernel[0] // 2, kernel[1] // 2)
        setattr(self, f"branch{name}", BasicConv2d(inside, out, tuple(kernel), stride=int(stride or 1), padding=padding))
        return out

    def forward(self, x: Tensor) -> Tensor:
        outs = []
        pools = {"avg": lambda x: ag.avg_pool2d(x, 3, 1, 1), "max": lambda x: ag.max_pool2d(x, 3, 2)}
        for branch in self._branches:
            made = [x]
            for step in branch:
                made = [(pools.get(name) or getattr(self, f"branch{name}"))(made[0]) for name in step]
            outs += made
        return ag.cat(outs, axis=1)


class InceptionAux(nn.Module):
    """A classifier of the 768 channels in the middle."""

    def __init__(self, in_channels: int, num_classes: int):
        super().__init__()
        self.conv0, self.conv1, self.fc = BasicConv2d(in_channels, 128), BasicConv2d(128, 768, 5), nn.Linear(768, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(ag.mean(self.conv1(self.conv0(ag.avg_pool2d(x, 5, 3))), axis=(2, 3)))


class Inception3(_ScaledInput):
    """Inception v3 (Szegedy et al. 2015), for images from 75 x 75 on. With ``aux_logits``, training gives ``InceptionOutputs``."""

    auxiliary, outputs = {"Mixed_6e": "AuxLogits"}, InceptionOutputs

    def __init__(self, num_classes: int = 1000, aux_logits: bool = True, transform_input: bool = False, init_weights: bool = True,
                 dropout: float = 0.5):  # fmt: skip
        super().__init__()
        self.transform_input = transform_input
        self.Conv2d_1a_3x3, self.Conv2d_2a_3x3 = BasicConv2d(3, 32, 3, stride=2), BasicConv2d(32, 32, 3)
        self.Conv2d_2b_3x3, self.maxpool1 = BasicConv2d(32, 64, 3, padding=1), nn.MaxPool2d(3, 2)
        self.Conv2d_3b_1x1, self.Conv2d_4a_3x3, self.maxpool2 = BasicConv2d(64, 80), BasicConv2d(80, 192, 3), nn.MaxPool2d(3, 2)
        for name, row in _MIXED.items():
            setattr(self, f"Mixed_{name}", MixedBlock(*row))
        self.AuxLogits = InceptionAux(768, num_classes) if aux_logits else None
        self.avgpool, self.dropout, self.fc = nn.AdaptiveAvgPool2d(1), nn.Dropout(dropout), nn.Linear(2048, num_classes)
        if init_weights:
            start(self, "trunc_normal 0.1", "trunc_normal 0.1")


architecture("googlenet", GoogLeNet)
architecture("inception_v3", Inception3)
