"""AlexNet, VGG, SqueezeNet, DenseNet, GoogLeNet and Inception v3."""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Sequence
from typing import Any

import netcl.autograd as ag
from netcl import nn
from netcl.core.errors import message
from netcl.core.tensor import Tensor
from netcl.nn import init
from netcl.vision.models.blocks import LayerChain, architecture, draw


class AlexNet(LayerChain):
    """AlexNet (Krizhevsky 2014)."""

    def __init__(self, num_classes: int = 1000, dropout: float = 0.5):
        super().__init__()
        rows = ((3, 64, 11, 4, 2), (64, 192, 5, 1, 2), (192, 384, 3, 1, 1), (384, 256, 3, 1, 1), (256, 256, 3, 1, 1))
        layers = [part for row in rows for part in (nn.Conv2d(*row), nn.ReLU(), *([nn.MaxPool2d(3, 2)] if row[1] in (64, 192) else []))]
        self.features, self.avgpool = nn.Sequential(*layers, nn.MaxPool2d(3, 2)), nn.AdaptiveAvgPool2d(6)
        hidden = [nn.Dropout(dropout), nn.Linear(256 * 36, 4096), nn.ReLU(), nn.Dropout(dropout), nn.Linear(4096, 4096), nn.ReLU()]
        self.classifier = nn.Sequential(*hidden, nn.Linear(4096, num_classes))


class VGG(LayerChain):
    """VGG (Simonyan and Zisserman 2014); ``features`` are layers of :func:`make_layers`."""

    def __init__(self, features: nn.Module, num_classes: int = 1000, init_weights: bool = True, dropout: float = 0.5):
        super().__init__()
        self.features, self.avgpool = features, nn.AdaptiveAvgPool2d(7)
        hidden = [nn.Linear(512 * 49, 4096), nn.ReLU(), nn.Dropout(dropout), nn.Linear(4096, 4096), nn.ReLU(), nn.Dropout(dropout)]
        self.classifier = nn.Sequential(*hidden, nn.Linear(4096, num_classes))
        if init_weights:
            draw(self, "kaiming_normal fan_out", "normal 0.01")


def make_layers(cfg: Sequence[int | str], batch_norm: bool = False) -> nn.Sequential:
    """Return the layers of VGG: a number is a convolution with that many channels, ``"M"`` a pooling (``"C"`` one that rounds up)."""
    layers, inside = list[nn.Module](), 3
    for out in cfg:
        if isinstance(out, str):
            layers.append(nn.MaxPool2d(2, 2, ceil_mode=out == "C"))
        else:
            layers += [nn.Conv2d(inside, out, 3, padding=1), *([nn.BatchNorm2d(out)] if batch_norm else []), nn.ReLU()]
            inside = out
    return nn.Sequential(*layers)


def _vgg(counts: Sequence[int], batch_norm: bool, **options: Any) -> VGG:
    cfg: list[Any] = []
    for count, width in zip(counts, (64, 128, 256, 512, 512), strict=True):
        cfg += [*[width] * count, "M"]
    return VGG(make_layers(cfg, batch_norm), **options)


class Fire(nn.Module):
    """A 1 x 1 convolution, followed by a 1 x 1 and a 3 x 3 convolution side by side."""

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
        layers, inside = [first, nn.ReLU()], first.out_channels
        for i, squeezed in enumerate((0, 16, 16, 32, 32, 48, 48, 64, 64)):
            layers += [Fire(inside, squeezed, 4 * squeezed)] if i else []
            layers += [nn.MaxPool2d(3, 2, ceil_mode=True)] if i in pooled else []
            inside = 8 * squeezed or inside
        self.features = nn.Sequential(*layers)
        last = nn.Conv2d(512, num_classes, 1)
        self.classifier, self.flatten = nn.Sequential(nn.Dropout(dropout), last, nn.ReLU(), nn.AdaptiveAvgPool2d(1)), nn.Flatten()
        draw(self, "kaiming_uniform")
        init.normal_(last.weight, std=0.01)


class DenseLayer(nn.Sequential):
    """Applies layers to all previous feature maps and appends the result to them."""

    def forward(self, x: Tensor) -> Tensor:
        return ag.cat([x, super().forward(x)], axis=1)


def _dense_layer(inside: int, hidden: int, growth: int, drop_rate: float) -> DenseLayer:
    parts = {"norm1": nn.BatchNorm2d(inside), "relu1": nn.ReLU(), "conv1": nn.Conv2d(inside, hidden, 1, bias=False)}
    more = {"norm2": nn.BatchNorm2d(hidden), "relu2": nn.ReLU(), "conv2": nn.Conv2d(hidden, growth, 3, padding=1, bias=False)}
    return DenseLayer({**parts, **more, "drop": nn.Dropout(drop_rate)})


class DenseNet(LayerChain):
    """DenseNet (Huang et al. 2017). ``memory_efficient`` is ignored."""

    def __init__(self, growth_rate: int = 32, block_config: Sequence[int] = (6, 12, 24, 16), num_init_features: int = 64, bn_size: int = 4,
                 drop_rate: float = 0.0, num_classes: int = 1000, memory_efficient: bool = False):  # fmt: skip
        super().__init__()
        width, pool = num_init_features, nn.MaxPool2d(3, 2, 1)
        layers = {"conv0": nn.Conv2d(3, width, 7, 2, 3, bias=False), "norm0": nn.BatchNorm2d(width), "relu0": nn.ReLU(), "pool0": pool}
        for i, count in enumerate(block_config, 1):
            rows = [(width + j * growth_rate, bn_size * growth_rate, growth_rate, drop_rate) for j in range(count)]
            layers[f"denseblock{i}"] = nn.Sequential({f"denselayer{j}": _dense_layer(*row) for j, row in enumerate(rows, 1)})
            width += count * growth_rate
            if i < len(block_config):
                parts = {"norm": nn.BatchNorm2d(width), "relu": nn.ReLU(), "conv": nn.Conv2d(width, width // 2, 1, bias=False)}
                layers[f"transition{i}"] = nn.Sequential({**parts, "pool": nn.AvgPool2d(2, 2)})
                width //= 2
        self.features = nn.Sequential({**layers, "norm5": nn.BatchNorm2d(width)})
        self.relu, self.avgpool, self.classifier = nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Linear(width, num_classes)
        draw(self, "kaiming_normal")
        init.zeros_(self.classifier.bias)  # type: ignore[arg-type]


architecture("alexnet", AlexNet)
for _depth, _counts in {11: (1, 1, 2, 2, 2), 13: (2,) * 5, 16: (2, 2, 3, 3, 3), 19: (2, 2, 4, 4, 4)}.items():
    architecture(f"vgg{_depth}", _vgg, _counts, False)
    architecture(f"vgg{_depth}_bn", _vgg, _counts, True)
for _version in ("1_0", "1_1"):
    architecture(f"squeezenet{_version}", SqueezeNet, _version)
for _depth, _growth, _blocks, _width in ((121, 32, (6, 12, 24, 16), 64), (161, 48, (6, 12, 36, 24), 96), (169, 32, (6, 12, 32, 32), 64),
                                         (201, 32, (6, 12, 48, 32), 64)):  # fmt: skip
    architecture(f"densenet{_depth}", DenseNet, _growth, _blocks, _width)

# ---- GoogLeNet and Inception v3: blocks of parallel branches

GoogLeNetOutputs = namedtuple("GoogLeNetOutputs", "logits aux_logits2 aux_logits1")
InceptionOutputs = namedtuple("InceptionOutputs", "logits aux_logits")


def _cbr(inside: int, out: int, kernel: Any = 1, **options: Any) -> nn.Sequential:
    conv = nn.Conv2d(inside, out, kernel, bias=False, **options)
    return nn.Sequential({"conv": conv, "bn": nn.BatchNorm2d(out, eps=0.001), "relu": nn.ReLU()})


class _ScaledInput(LayerChain):
    """Base class that, with ``transform_input``, converts images normalized for torchvision's other models to the range from -1 to 1."""

    transform_input: bool

    def forward(self, x: Tensor) -> Any:
        if self.transform_input:
            scale, shift = ([[[[v]] for v in row]] for row in ((0.458, 0.448, 0.45), (-0.03, -0.088, -0.188)))
            x = ag.add(ag.mul(x, Tensor.from_host(x.queue, scale, x.dtype)), Tensor.from_host(x.queue, shift, x.dtype))
        return super().forward(x)


class Inception(nn.Module):
    """Concatenates four branches: a 1 x 1 convolution, two with a 3 x 3 convolution, and one with pooling."""

    def __init__(self, in_channels: int, ch1x1: int, ch3x3red: int, ch3x3: int, ch5x5red: int, ch5x5: int, pool_proj: int):
        super().__init__()
        self.branch1 = _cbr(in_channels, ch1x1)
        self.branch2 = nn.Sequential(_cbr(in_channels, ch3x3red), _cbr(ch3x3red, ch3x3, 3, padding=1))
        self.branch3 = nn.Sequential(_cbr(in_channels, ch5x5red), _cbr(ch5x5red, ch5x5, 3, padding=1))
        self.branch4 = nn.Sequential(nn.MaxPool2d(3, 1, 1, ceil_mode=True), _cbr(in_channels, pool_proj))

    def forward(self, x: Tensor) -> Tensor:
        return ag.cat([self.branch1(x), self.branch2(x), self.branch3(x), self.branch4(x)], axis=1)


def _googlenet_aux(inside: int, num_classes: int, dropout: float) -> nn.Sequential:
    head = {"pool": nn.AdaptiveAvgPool2d(4), "conv": _cbr(inside, 128), "flatten": nn.Flatten(), "fc1": nn.Linear(2048, 1024)}
    return nn.Sequential({**head, "relu": nn.ReLU(), "dropout": nn.Dropout(dropout), "fc2": nn.Linear(1024, num_classes)})


# Channels of the blocks: in; 1 x 1; 3 x 3 and what is in front of it; the second 3 x 3 likewise; behind the pooling.
_GOOGLENET = {
    "3a": (192, 64, 96, 128, 16, 32, 32), "3b": (256, 128, 128, 192, 32, 96, 64), "4a": (480, 192, 96, 208, 16, 48, 64),
    "4b": (512, 160, 112, 224, 24, 64, 64), "4c": (512, 128, 128, 256, 24, 64, 64), "4d": (512, 112, 144, 288, 32, 64, 64),
    "4e": (528, 256, 160, 320, 32, 128, 128), "5a": (832, 256, 160, 320, 32, 128, 128), "5b": (832, 384, 192, 384, 48, 128, 128),
}  # fmt: skip


class GoogLeNet(_ScaledInput):
    """GoogLeNet (Szegedy et al. 2014). With ``aux_logits``, training returns ``GoogLeNetOutputs``, with logits of inner layers too."""

    auxiliary, outputs = {"inception4a": "aux1", "inception4d": "aux2"}, GoogLeNetOutputs

    def __init__(self, num_classes: int = 1000, aux_logits: bool = True, transform_input: bool = False, init_weights: bool = True,
                 dropout: float = 0.2, dropout_aux: float = 0.7):  # fmt: skip
        super().__init__()
        self.transform_input = transform_input
        self.conv1, self.maxpool1 = _cbr(3, 64, 7, stride=2, padding=3), nn.MaxPool2d(3, 2, ceil_mode=True)
        self.conv2, self.conv3, self.maxpool2 = _cbr(64, 64), _cbr(64, 192, 3, padding=1), nn.MaxPool2d(3, 2, ceil_mode=True)
        for name, row in _GOOGLENET.items():
            setattr(self, f"inception{name}", Inception(*row))
            if name in ("3b", "4e"):
                setattr(self, f"maxpool{name[0]}", nn.MaxPool2d(3 if name == "3b" else 2, 2, ceil_mode=True))
        self.aux1, self.aux2 = (_googlenet_aux(width, num_classes, dropout_aux) if aux_logits else None for width in (512, 528))
        self.avgpool, self.dropout, self.fc = nn.AdaptiveAvgPool2d(1), nn.Dropout(dropout), nn.Linear(1024, num_classes)
        if init_weights:
            draw(self, "trunc_normal 0.01", "trunc_normal 0.01")


# Branches are separated by ";", their layers by spaces: NAME=CHANNELS, NAME=CHANNELS:KERNEL or NAME=CHANNELS:KERNEL/STRIDE is a
# convolution branchNAME, and two with "|" between them get the same input. {0} are the channels in which the blocks of a kind differ.
_DOUBLE = "3x3dbl_1=64 3x3dbl_2=96:3 3x3dbl_3=96:3"
_INCEPTION = {
    "A": f"1x1=64; 5x5_1=48 5x5_2=64:5; {_DOUBLE}; avg _pool={{0}}",
    "B": f"3x3=384:3/2; {_DOUBLE}/2; max",
    "C": "1x1=192; 7x7_1={0} 7x7_2={0}:1x7 7x7_3=192:7x1; "
    "7x7dbl_1={0} 7x7dbl_2={0}:7x1 7x7dbl_3={0}:1x7 7x7dbl_4={0}:7x1 7x7dbl_5=192:1x7; avg _pool=192",
    "D": "3x3_1=192 3x3_2=320:3/2; 7x7x3_1=192 7x7x3_2=192:1x7 7x7x3_3=192:7x1 7x7x3_4=192:3/2; max",
    "E": "1x1=320; 3x3_1=384 3x3_2a=384:1x3|3x3_2b=384:3x1; 3x3dbl_1=448 3x3dbl_2=384:3 3x3dbl_3a=384:1x3|3x3dbl_3b=384:3x1; avg _pool=192",
}
_MIXED: dict[str, Any] = {
    "5b": ("A", 192, 32), "5c": ("A", 256, 64), "5d": ("A", 288, 64), "6a": ("B", 288), "6b": ("C", 768, 128), "6c": ("C", 768, 160),
    "6d": ("C", 768, 160), "6e": ("C", 768, 192), "7a": ("D", 768), "7b": ("E", 1280), "7c": ("E", 2048)}  # fmt: skip


class MixedBlock(nn.Module):
    """A block of Inception v3, which concatenates the results of its branches."""

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
        setattr(self, f"branch{name}", _cbr(inside, out, tuple(kernel), stride=int(stride or 1), padding=padding))
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


class Inception3(_ScaledInput):
    """Inception v3 (Szegedy et al. 2015), for at least 75 x 75 pixels. With ``aux_logits``, training returns ``InceptionOutputs``."""

    auxiliary, outputs = {"Mixed_6e": "AuxLogits"}, InceptionOutputs

    def __init__(self, num_classes: int = 1000, aux_logits: bool = True, transform_input: bool = False, init_weights: bool = True,
                 dropout: float = 0.5):  # fmt: skip
        super().__init__()
        self.transform_input = transform_input
        self.Conv2d_1a_3x3, self.Conv2d_2a_3x3 = _cbr(3, 32, 3, stride=2), _cbr(32, 32, 3)
        self.Conv2d_2b_3x3, self.maxpool1 = _cbr(32, 64, 3, padding=1), nn.MaxPool2d(3, 2)
        self.Conv2d_3b_1x1, self.Conv2d_4a_3x3, self.maxpool2 = _cbr(64, 80), _cbr(80, 192, 3), nn.MaxPool2d(3, 2)
        head = {"pool": nn.AvgPool2d(5, 3), "conv0": _cbr(768, 128), "conv1": _cbr(128, 768, 5), "avgpool": nn.AdaptiveAvgPool2d(1)}
        fc = nn.Linear(768, num_classes)
        for name, row in _MIXED.items():
            setattr(self, f"Mixed_{name}", MixedBlock(*row))
            if name == "6e":
                self.AuxLogits = nn.Sequential({**head, "flatten": nn.Flatten(), "fc": fc}) if aux_logits else None
        self.avgpool, self.dropout, self.fc = nn.AdaptiveAvgPool2d(1), nn.Dropout(dropout), nn.Linear(2048, num_classes)
        if init_weights:
            draw(self, "trunc_normal 0.1", "trunc_normal 0.1")


architecture("googlenet", GoogLeNet)
architecture("inception_v3", Inception3)
