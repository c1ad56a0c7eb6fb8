"""What the models share: convolutions with a norm, squeeze and excitation, residual paths, start values, and the table of models."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import netcl.autograd as ag
from netcl import nn
from netcl.core.errors import message
from netcl.core.tensor import Tensor
from netcl.io import load
from netcl.nn import init
from netcl.nn.parameter import constructor
from netcl.vision.ops import StochasticDepth

#: Every model by name: its function, and what :func:`get_preset` needs.
ARCHITECTURES: dict[str, Callable[..., Any]] = {}
fan_out = partial(init.kaiming_normal_, mode="fan_out", nonlinearity="relu")
narrow_normal, narrow_trunc = partial(init.normal_, std=0.01), partial(init.trunc_normal_, std=0.02)


def divisible(value: float, divisor: int = 8) -> int:
    """The multiple of ``divisor`` nearest to ``value``, at least ``divisor`` and at least 90 % of ``value``."""
    near = max(divisor, int(value + divisor / 2) // divisor * divisor)
    return near + divisor if near < 0.9 * value else near


def conv_norm(inside: int, out: int, kernel: int = 3, stride: int = 1, groups: int = 1, activation: Any = nn.ReLU, dilation: int = 1,
              **norm: Any) -> nn.Sequential:  # fmt: skip
    """A convolution that keeps the image's size (divided by ``stride``), a batch norm, and an ``activation`` unless it is ``None``."""
    conv = nn.Conv2d(inside, out, kernel, stride, (kernel - 1) // 2 * dilation, dilation, groups, bias=False)
    return nn.Sequential(conv, nn.BatchNorm2d(out, **norm), *([activation()] if activation else []))


class SqueezeExcitation(nn.Module):
    """Channels scaled by what two 1 x 1 convolutions make of their means."""

    def __init__(self, input_channels: int, squeeze_channels: int, activation: Any = nn.ReLU, scale_activation: Any = nn.Sigmoid):
        super().__init__()
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.fc1, self.fc2 = nn.Conv2d(input_channels, squeeze_channels, 1), nn.Conv2d(squeeze_channels, input_channels, 1)
        self.activation, self.scale_activation = activation(), scale_activation()

    def forward(self, x: Tensor) -> Tensor:
        return ag.mul(self.scale_activation(self.fc2(self.activation(self.fc1(self.avgpool(x))))), x)


class ResidualPath(nn.Module):
    """Layers under the name ``path``, beside a shortcut if ``shortcut``; training drops the layers of a sample with probability ``p``."""

    def __init__(self, path: str, layers: Iterable[Any], shortcut: bool, p: float = 0.0):
        super().__init__()
        setattr(self, path, nn.Sequential(*layers))
        self.path, self.shortcut, self.stochastic_depth = path, shortcut, StochasticDepth(p, "row")

    def forward(self, x: Tensor) -> Tensor:
        out = getattr(self, self.path)(x)
        return ag.add(x, self.stochastic_depth(out)) if self.shortcut else out


class FeatureClassifier(nn.Module):
    """Models made of ``features``, ``avgpool`` and ``classifier``."""

    features: nn.Module
    avgpool: nn.Module
    classifier: nn.Module

    def forward(self, x: Tensor) -> Tensor:
        return self.classifier(ag.flatten(self.avgpool(self.features(x)), 1))


def start(model: nn.Module, conv: Callable[..., Any] | None = None, linear: Callable[..., Any] | None = None) -> None:
    """Draw the weights of convolutions and linear layers by functions of ``nn.init``; their biases become zero."""
    for module in model.modules():
        draw = conv if isinstance(module, nn.Conv2d) else linear if isinstance(module, nn.Linear) else None
        if draw is not None and isinstance(module, nn.Conv2d | nn.Linear):
            draw(module.weight)
            if module.bias is not None:
                init.zeros_(module.bias)


def architecture(name: str, make: Callable[..., Any], *settings: Any, **defaults: Any) -> Callable[..., Any]:
    """The function ``name`` of torchvision: ``make(*settings, **defaults)``, with other options and weights from a file if given."""

    def build(*, weights: Any = None, progress: bool = True, pretrained: bool = False, in_channels: int = 3, **options: Any) -> Any:
        if pretrained or not (weights is None or (isinstance(weights, str | os.PathLike) and os.path.exists(weights))):
            remedy = "pass weights= the path of a state dict of torchvision (.pth or .safetensors)"
            raise ValueError(message(name, "weights must be a file that exists; netcl downloads none", remedy, weights=weights))
        if weights is None:
            return _with_channels(make(*settings, **{**defaults, **options}), in_channels)
        from_file = {"transform_input": True} if name in ("googlenet", "inception_v3") else {}
        with init.skipped():
            model = _with_channels(make(*settings, **{**defaults, **from_file, **options}), in_channels)
        state = {re.sub(r"(denselayer\d+\.(?:norm|conv))\.([12])", r"\1\2", key): value for key, value in load(weights, "cpu").items()}
        model.load_state_dict(state)
        return model

    build.__name__ = build.__qualname__ = name
    made_by = make.__annotations__.get("return", make.__name__) if hasattr(make, "__annotations__") else make.__name__
    build.__doc__ = f"{name}; ``weights`` is the path of a state dict. Other options are those of :class:`{made_by}`."
    ARCHITECTURES[name] = made = constructor(build)
    return made


def _with_channels(model: nn.Module, in_channels: int) -> nn.Module:
    """The model with another first convolution, if images have other than three channels."""
    if in_channels != 3:
        path, old = next((path, module) for path, module in model.named_modules() if isinstance(module, nn.Conv2d))
        made = nn.Conv2d(in_channels, old.out_channels, old.kernel_size, old.stride, old.padding, bias=old.bias is not None)
        owner, _, last = path.rpartition(".")
        model.get_submodule(owner).add_module(last, made)
    return model
