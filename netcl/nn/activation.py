"""Activations as modules: elementwise functions, gates and softmax. Most layers call one op and take the settings of that op.

With ``inplace``, which some have in torch, the result is also the new value of the input.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import netcl.autograd as ag
from netcl.autograd.in_place import overwrite
from netcl.core.errors import ShapeError, message
from netcl.core.tensor import Tensor
from netcl.nn.layer_class import function_layer, layer_class
from netcl.nn.module import Module
from netcl.nn.parameter import Parameter, full

#: The names that ``activation=`` of models and layers accepts.
ACTIVATIONS: dict[str, type[Module]] = {}
#: Ops whose layers and functions accept ``inplace``.
IN_PLACE_LAYERS: set[str] = set()


class Activation(Module):
    """Base class of activations; :meth:`flops` counts one operation per element."""

    def flops(self, args: tuple[Any, ...], output: Any) -> int:
        return output.size

    def extra_repr(self) -> str:
        return ", ".join(part for part in super().extra_repr().split(", ") if not part.startswith("inplace="))


def activation_class(name: str, op: str, example: str, gives: str, inplace: bool = False) -> Any:
    """Make the layer class of a pointwise op with one input. ``gives`` is the result of ``example``. ``inplace`` adds torch's parameter."""
    doc, more = f"{getattr(ag, op).__doc__}\n\nShapes: the output has the shape of the input.", "inplace: bool = False" * inplace
    IN_PLACE_LAYERS.update([op] * inplace)
    ACTIVATIONS[op] = made = function_layer(globals(), name, getattr(ag, op), example, gives, Activation, more, doc)
    return made


ReLU = activation_class("ReLU", "relu", "nn.ReLU()([-1.0, 2.0]).tolist()", "[0.0, 2.0]", inplace=True)
ReLU6 = activation_class("ReLU6", "relu6", "nn.ReLU6()([-1.0, 8.0]).tolist()", "[0.0, 6.0]", inplace=True)
LeakyReLU = activation_class("LeakyReLU", "leaky_relu", "nn.LeakyReLU(0.5)([-1.0, 2.0]).tolist()", "[-0.5, 2.0]", inplace=True)
ELU = activation_class("ELU", "elu", "nn.ELU()([-100.0, 2.0]).tolist()", "[-1.0, 2.0]", inplace=True)
SELU = activation_class("SELU", "selu", "nn.SELU()([0.0]).tolist()", "[0.0]", inplace=True)
GELU = activation_class("GELU", "gelu", 'nn.GELU()([0.0]).tolist(), nn.GELU(approximate="tanh")([0.0]).tolist()', "([0.0], [0.0])")
SiLU = activation_class("SiLU", "silu", "nn.SiLU()([0.0]).tolist()", "[0.0]", inplace=True)
Mish = activation_class("Mish", "mish", "nn.Mish()([0.0]).tolist()", "[0.0]", inplace=True)
Sigmoid = activation_class("Sigmoid", "sigmoid", "nn.Sigmoid()([0.0]).tolist()", "[0.5]")
LogSigmoid = activation_class("LogSigmoid", "log_sigmoid", "nn.LogSigmoid()([-100.0]).tolist()", "[-100.0]")
Tanh = activation_class("Tanh", "tanh", "nn.Tanh()([0.0]).tolist()", "[0.0]")
Softplus = activation_class("Softplus", "softplus", "nn.Softplus()([50.0]).tolist()", "[50.0]")
Softsign = activation_class("Softsign", "softsign", "nn.Softsign()([1.0]).tolist()", "[0.5]")
Hardsigmoid = activation_class(
    "Hardsigmoid", "hard_sigmoid", "nn.Hardsigmoid()([-4.0, 0.0, 4.0]).tolist()", "[0.0, 0.5, 1.0]", inplace=True
)
Hardswish = activation_class("Hardswish", "hard_swish", "nn.Hardswish()([0.0, 4.0]).tolist()", "[0.0, 4.0]", inplace=True)
Hardtanh = activation_class("Hardtanh", "hard_tanh", "nn.Hardtanh()([-4.0, 0.5]).tolist()", "[-1.0, 0.5]", inplace=True)


class PReLU(Activation):
    """An activation with learned slopes ``a`` for negative values: ``x`` where positive, else ``a * x``.

    - **num_parameters**: 1, or one per channel (axis 1).
    - **init**: the initial value of the slopes.

    >>> from netcl import nn
    >>> nn.PReLU()([-1.0, 2.0]).tolist()
    [-0.25, 2.0]
    """

    def __init__(self, num_parameters: int = 1, init: float = 0.25):
        super().__init__()
        self.weight = Parameter(full((num_parameters,), init))

    def forward(self, x: Tensor) -> Tensor:
        return ag.prelu(x, self.weight)


def celu(input: Tensor, alpha: float = 1.0, inplace: bool = False) -> Tensor:
    """ELU whose slope is continuous for every ``alpha``: ``x`` where positive, else ``alpha * (exp(x / alpha) - 1)``."""
    return overwrite(celu, input, alpha) if inplace else ag.mul(ag.elu(ag.div(input, alpha)), alpha)


def glu(input: Tensor, dim: int = -1) -> Tensor:
    """A gate: the first half along ``dim`` times the sigmoid of the second half."""
    if not input.shape or input.shape[dim] % 2:
        raise ShapeError(message("GLU", "the size of dim must be even", dim=dim, shape=input.shape))
    value, gate = ag.split(input, input.shape[dim] // 2, axis=dim)
    return ag.mul(value, ag.sigmoid(gate))


_layer = partial(layer_class, globals(), base=Activation)
CELU = function_layer(globals(), "CELU", celu, "nn.CELU(2.0)([-100.0, 2.0]).tolist()", "[-2.0, 2.0]", Activation)
GLU = function_layer(globals(), "GLU", glu, "nn.GLU()([[4.0, 0.0]]).tolist()", "[[2.0]]", Activation)
Softmax = _layer(
    "Softmax(dim: int = -1)", "ag.softmax(x, axis=dim)", "Exponentials that sum to one along ``dim``: ``exp(x) / sum(exp(x))``.",
    "nn.Softmax(dim=-1)([[0.0, 0.0]]).tolist()", "[[0.5, 0.5]]",
)  # fmt: skip
LogSoftmax = _layer(
    "LogSoftmax(dim: int = -1)", "ag.log_softmax(x, axis=dim)", "The logarithm of the softmax along ``dim``.",
    "nn.LogSoftmax()([[0.0]]).tolist()", "[[0.0]]",
)  # fmt: skip
Swish = SiLU
FUNCTIONS = ["celu", "glu"]
ACTIVATIONS |= {"prelu": PReLU, "celu": CELU, "swish": Swish}


def make_activation(name: str) -> Module:
    """Make the activation module ``name`` with its default settings.

    >>> from netcl import nn
    >>> nn.activation.make_activation("gelu")
    GELU(approximate='none')
    """
    if name not in ACTIVATIONS:
        raise ValueError(message("activation", "unknown activation", f"known: {', '.join(ACTIVATIONS)}", activation=repr(name)))
    return ACTIVATIONS[name]()
