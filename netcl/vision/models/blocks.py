"""Common blocks of the models: convolutions with a norm, squeeze and excitation, residual paths, initialization, the model table."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable
from typing import Any, ClassVar

import netcl.autograd as ag
from netcl import nn
from netcl.core.errors import message
from netcl.core.tensor import Tensor
from netcl.io import load
from netcl.nn import init
from netcl.nn.parameter import constructor
from netcl.vision.ops import StochasticDepth

VISION_MODELS: dict[str, Callable[..., Any]] = {}  # the function of every model


def divisible(value: float, divisor: int = 8) -> int:
    """Return the multiple of ``divisor`` nearest to ``value``, at least ``divisor`` and at least 90 % of ``value``."""
    near = max(divisor, int(value + divisor / 2) // divisor * divisor)
    return near + divisor if near < 0.9 * value else near


def conv_norm(inside: int, out: int, kernel: int = 3, stride: int = 1, groups: int = 1, activation: Any = nn.ReLU, dilation: int = 1,
              **norm: Any) -> nn.Sequential:  # fmt: skip
    """Return a convolution, a batch norm and an optional ``activation``. Due to padding, only ``stride`` shrinks the image."""
    conv = nn.Conv2d(inside, out, kernel, stride, (kernel - 1) // 2 * dilation, dilation, groups, bias=False)
    return nn.Sequential(conv, nn.BatchNorm2d(out, **norm), *([activation()] if activation else []))


class SqueezeExcitation(nn.Module):
    """Scales each channel by a factor that two 1 x 1 convolutions compute from the means of all channels."""

    def __init__(self, input_channels: int, squeeze_channels: int, activation: Any = nn.ReLU, scale_activation: Any = nn.Sigmoid):
        super().__init__()
        self.fc1, self.fc2 = nn.Conv2d(input_channels, squeeze_channels, 1), nn.Conv2d(squeeze_channels, input_channels, 1)
        self.activation, self.scale_activation = activation(), scale_activation()

    def forward(self, x: Tensor) -> Tensor:
        return ag.mul(self.scale_activation(self.fc2(self.activation(self.fc1(ag.adaptive_avg_pool2d(x, 1))))), x)


class ResidualPath(nn.Module):
    """Layers in the submodule ``path``, with an optional shortcut. In training each sample skips the layers with probability ``p``."""

    def __init__(self, path: str, layers: Iterable[Any], shortcut: bool, p: float = 0.0):
        super().__init__()
        setattr(self, path, nn.Sequential(*layers))
        self.path, self.shortcut, self.stochastic_depth = path, shortcut, StochasticDepth(p, "row")

    def forward(self, x: Tensor) -> Tensor:
        out = getattr(self, self.path)(x)
        return ag.add(x, self.stochastic_depth(out)) if self.shortcut else out


class LayerChain(nn.Module):
    """Base class of models that apply their layers in the order of the constructor."""

    flat: tuple[str, ...] = ("classifier", "fc")  # layers that take flattened maps
    auxiliary: ClassVar[dict[str, str]] = {}  # layers, and those that classify their results in training
    outputs: Any = None  # the tuple that training then gives
    _order: tuple[str, ...]

    def _made_with(self, arguments: Any) -> None:
        super()._made_with(arguments)
        self.__dict__["_order"] = tuple(name for name, _ in self.named_children() if name not in self.auxiliary.values())

    def forward(self, x: Tensor) -> Any:
        found: list[Tensor] = []
        for name in self._order:
            x = getattr(self, name)(ag.flatten(x, 1) if name in self.flat else x)
            aux = getattr(self, self.auxiliary.get(name, ""), None)
            if aux is not None and self.training:
                found.insert(0, aux(x))
        return self.outputs(x, *found) if found else x


def draw(model: nn.Module, conv: str = "", linear: str = "") -> None:
    """Initialize weights by the rules ``conv`` and ``linear`` (``"normal 0.01"``, ``"kaiming_normal fan_out"``), and biases to 0."""
    for module in model.modules():
        kind, _, rest = (conv if isinstance(module, nn.Conv2d) else linear if isinstance(module, nn.Linear) else "").partition(" ")
        if kind and isinstance(module, nn.Conv2d | nn.Linear):
            getattr(init, f"{kind}_")(module.weight, **({"mode": rest} if rest == "fan_out" else {"std": float(rest)} if rest else {}))
            if module.bias is not None:
                init.zeros_(module.bias)


def architecture(name: str, make: Callable[..., Any], *settings: Any, **defaults: Any) -> Callable[..., Any]:
    """Register and return torchvision's function ``name``, which calls ``make(*settings, **defaults)`` and loads ``weights`` if given."""

    def build(*, weights: Any = None, progress: bool = True, pretrained: bool = False, in_channels: int = 3, **options: Any) -> Any:
        backbone = options.pop("weights_backbone", None)
        if pretrained or backbone or not (weights is None or (isinstance(weights, str | os.PathLike) and os.path.exists(weights))):
            remedy = "pass weights= the path of a state dict of torchvision (.pth or .safetensors)"
            what = "weights must be an existing file or None, weights_backbone None, and pretrained False: netcl downloads nothing"
            raise ValueError(message(name, what, remedy, weights=weights, weights_backbone=backbone, pretrained=pretrained))
        if weights is None:
            return _with_channels(make(*settings, **{**defaults, **options}), in_channels)
        scaled, aux = name in ("googlenet", "inception_v3"), name.startswith(("fcn_", "deeplabv3_"))  # torchvision's files are for these
        given = {"transform_input": True} if scaled else {"aux_loss": True} if aux else {}
        with init.skipped():
            model = _with_channels(make(*settings, **{**defaults, **given, **options}), in_channels)
        state = {re.sub(r"(denselayer\d+\.(?:norm|conv))\.([12])", r"\1\2", key): value for key, value in load(weights, "cpu").items()}
        model.load_state_dict(state)
        return model

    build.__name__ = build.__qualname__ = name
    build.__doc__ = f"Return torchvision's {name}; ``weights`` is the path of a state dict, other options are those of the model's class."
    return VISION_MODELS.setdefault(name, constructor(build))


def _with_channels(model: nn.Module, in_channels: int) -> nn.Module:
    """Return the model; unless ``in_channels`` is 3, its first convolution is replaced by one with that many channels."""
    if in_channels != 3:
        path, old = next((path, module) for path, module in model.named_modules() if isinstance(module, nn.Conv2d))
        owner, _, last = path.rpartition(".")
        made = nn.Conv2d(in_channels, old.out_channels, old.kernel_size, old.stride, old.padding, bias=old.bias is not None)
        model.get_submodule(owner).add_module(last, made)
    return model
