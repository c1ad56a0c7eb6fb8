"""Activations: functions of one element (and softmax, of a row) as modules. Shapes: the output has the input's, unless said otherwise.

``inplace`` is taken as torch takes it and changes nothing: results always have memory of their own.
"""

from __future__ import annotations

from typing import Any

import netcl.autograd as ag
from netcl.core.errors import ShapeError, message
from netcl.core.tensor import Tensor
from netcl.nn.module import Module
from netcl.nn.parameter import full


class Activation(Module):
    """The base of activations: counts one operation per element."""

    def flops(self, args: tuple[Any, ...], output: Any) -> int:
        return output.size


class _Plain(Activation):
    """Activations without settings."""

    def __init__(self, inplace: bool = False):
        super().__init__()


class _AlongAxis(Activation):
    """Activations of the values along an axis."""

    def __init__(self, dim: int = -1):
        super().__init__()
        self.dim = dim


class ReLU(_Plain):
    """The positive part: ``max(x, 0)``.

    >>> from netcl import nn
    >>> nn.ReLU()([-1.0, 2.0]).tolist()
    [0.0, 2.0]
    """

    def forward(self, x: Tensor) -> Tensor:
        return ag.relu(x)

    def extra_repr(self) -> str:
        return ""


class ReLU6(_Plain):
    """The positive part, cut at 6: ``min(max(x, 0), 6)``.

    >>> from netcl import nn
    >>> nn.ReLU6()([-1.0, 8.0]).tolist()
    [0.0, 6.0]
    """

    def forward(self, x: Tensor) -> Tensor:
        return ag.relu6(x)


class LeakyReLU(Activation):
    """A slope for each sign: ``x`` where positive, else ``negative_slope * x``.

    >>> from netcl import nn
    >>> nn.LeakyReLU(0.5)([-1.0, 2.0]).tolist()
    [-0.5, 2.0]
    """

    def __init__(self, negative_slope: float = 0.01, inplace: bool = False):
        super().__init__()
        self.negative_slope = negative_slope

    def forward(self, x: Tensor) -> Tensor:
        return ag.leaky_relu(x, negative_slope=self.negative_slope)


class PReLU(Activation):
    """A learned slope for negative values: ``x`` where positive, else ``a * x``.

    - **num_parameters**: 1, or one per channel (axis 1).
    - **init**: where the slopes start.

    >>> from netcl import nn
    >>> nn.PReLU()([-1.0, 2.0]).tolist()
    [-0.25, 2.0]
    """

    def __init__(self, num_parameters: int = 1, init: float = 0.25):
        super().__init__()
        self.weight = full((num_parameters,), init).requires_grad_()

    def forward(self, x: Tensor) -> Tensor:
        return ag.prelu(x, self.weight)


class ELU(Activation):
    """Exponential below zero: ``x`` where positive, else ``alpha * (exp(x) - 1)``.

    >>> from netcl import nn
    >>> nn.ELU()([-100.0, 2.0]).tolist()
    [-1.0, 2.0]
    """

    def __init__(self, alpha: float = 1.0, inplace: bool = False):
        super().__init__()
        self.alpha = alpha

    def forward(self, x: Tensor) -> Tensor:
        return ag.elu(x, alpha=self.alpha)


class CELU(Activation):
    """ELU whose slope is continuous for every ``alpha``: ``x`` where positive, else ``alpha * (exp(x / alpha) - 1)``.

    >>> from netcl import nn
    >>> nn.CELU(2.0)([-100.0, 2.0]).tolist()
    [-2.0, 2.0]
    """

    def __init__(self, alpha: float = 1.0, inplace: bool = False):
        super().__init__()
        self.alpha = alpha

    def forward(self, x: Tensor) -> Tensor:
        return ag.mul(ag.elu(ag.div(x, self.alpha)), self.alpha)


class SELU(_Plain):
    """ELU scaled so that activations keep mean 0 and variance 1 from layer to layer.

    >>> from netcl import nn
    >>> nn.SELU()([0.0]).tolist()
    [0.0]
    """

    def forward(self, x: Tensor) -> Tensor:
        return ag.selu(x)


class GELU(Activation):
    """``x * P(X <= x)`` of a standard normal ``X``; ``approximate="tanh"`` is the faster form.

    >>> from netcl import nn
    >>> nn.GELU()([0.0]).tolist(), nn.GELU(approximate="tanh")([0.0]).tolist()
    ([0.0], [0.0])
    """

    def __init__(self, approximate: str = "none"):
        super().__init__()
        self.approximate = approximate

    def forward(self, x: Tensor) -> Tensor:
        return ag.gelu(x, approximate=self.approximate)


class SiLU(_Plain):
    """``x * sigmoid(x)``, also called swish.

    >>> from netcl import nn
    >>> nn.SiLU()([0.0]).tolist()
    [0.0]
    """

    def forward(self, x: Tensor) -> Tensor:
        return ag.silu(x)


class Mish(_Plain):
    """``x * tanh(softplus(x))``.

    >>> from netcl import nn
    >>> nn.Mish()([0.0]).tolist()
    [0.0]
    """

    def forward(self, x: Tensor) -> Tensor:
        return ag.mish(x)


class Sigmoid(Activation):
    """``1 / (1 + exp(-x))``.

    >>> from netcl import nn
    >>> nn.Sigmoid()([0.0]).tolist()
    [0.5]
    """

    def forward(self, x: Tensor) -> Tensor:
        return ag.sigmoid(x)


class LogSigmoid(Activation):
    """``log(sigmoid(x))`` without overflow.

    >>> from netcl import nn
    >>> nn.LogSigmoid()([-100.0]).tolist()
    [-100.0]
    """

    def forward(self, x: Tensor) -> Tensor:
        return ag.log_sigmoid(x)


class Tanh(Activation):
    """The hyperbolic tangent.

    >>> from netcl import nn
    >>> nn.Tanh()([0.0]).tolist()
    [0.0]
    """

    def forward(self, x: Tensor) -> Tensor:
        return ag.tanh(x)


class Softplus(Activation):
    """A smooth ReLU: ``log(1 + exp(beta * x)) / beta``; linear where ``beta * x`` is above ``threshold``.

    >>> from netcl import nn
    >>> nn.Softplus()([50.0]).tolist()
    [50.0]
    """

    def __init__(self, beta: float = 1.0, threshold: float = 20.0):
        super().__init__()
        self.beta, self.threshold = beta, threshold

    def forward(self, x: Tensor) -> Tensor:
        return ag.softplus(x, beta=self.beta, threshold=self.threshold)


class Softsign(Activation):
    """``x / (1 + |x|)``.

    >>> from netcl import nn
    >>> nn.Softsign()([1.0]).tolist()
    [0.5]
    """

    def forward(self, x: Tensor) -> Tensor:
        return ag.softsign(x)


class Hardsigmoid(_Plain):
    """A sigmoid of three straight pieces: ``relu6(x + 3) / 6``.

    >>> from netcl import nn
    >>> nn.Hardsigmoid()([-4.0, 0.0, 4.0]).tolist()
    [0.0, 0.5, 1.0]
    """

    def forward(self, x: Tensor) -> Tensor:
        return ag.hard_sigmoid(x)


class Hardswish(_Plain):
    """``x * hardsigmoid(x)``.

    >>> from netcl import nn
    >>> nn.Hardswish()([0.0, 4.0]).tolist()
    [0.0, 4.0]
    """

    def forward(self, x: Tensor) -> Tensor:
        return ag.hard_swish(x)


class Hardtanh(Activation):
    """``x`` held between ``min_val`` and ``max_val``.

    >>> from netcl import nn
    >>> nn.Hardtanh()([-4.0, 0.5]).tolist()
    [-1.0, 0.5]
    """

    def __init__(self, min_val: float = -1.0, max_val: float = 1.0, inplace: bool = False):
        super().__init__()
        self.min_val, self.max_val = min_val, max_val

    def forward(self, x: Tensor) -> Tensor:
        return ag.hard_tanh(x, min_val=self.min_val, max_val=self.max_val)


class GLU(_AlongAxis):
    """A gate: the first half along ``dim`` times the sigmoid of the second.

    Shapes: the axis ``dim`` of the output is half of the input's.

    >>> from netcl import nn
    >>> nn.GLU()([[4.0, 0.0]]).tolist()
    [[2.0]]
    """

    def forward(self, x: Tensor) -> Tensor:
        if x.shape[self.dim] % 2:
            raise ShapeError(message("GLU", "the axis has no two halves", dim=self.dim, shape=x.shape))
        value, gate = ag.split(x, x.shape[self.dim] // 2, axis=self.dim)
        return ag.mul(value, ag.sigmoid(gate))


class Softmax(_AlongAxis):
    """Exponentials that sum to one along ``dim``: ``exp(x) / sum(exp(x))``.

    >>> from netcl import nn
    >>> nn.Softmax(dim=-1)([[0.0, 0.0]]).tolist()
    [[0.5, 0.5]]
    """

    def forward(self, x: Tensor) -> Tensor:
        return ag.softmax(x, axis=self.dim)


class LogSoftmax(_AlongAxis):
    """The logarithm of the softmax along ``dim``.

    >>> from netcl import nn
    >>> nn.LogSoftmax()([[0.0]]).tolist()
    [[0.0]]
    """

    def forward(self, x: Tensor) -> Tensor:
        return ag.log_softmax(x, axis=self.dim)


Swish = SiLU
#: What ``activation=`` of models and layers may name.
ACTIVATIONS: dict[str, type[Module]] = {
    "relu": ReLU, "relu6": ReLU6, "leaky_relu": LeakyReLU, "prelu": PReLU, "elu": ELU, "celu": CELU, "selu": SELU, "gelu": GELU,
    "silu": SiLU, "swish": SiLU, "mish": Mish, "sigmoid": Sigmoid, "log_sigmoid": LogSigmoid, "tanh": Tanh, "softplus": Softplus,
    "softsign": Softsign, "hard_sigmoid": Hardsigmoid, "hard_swish": Hardswish, "hard_tanh": Hardtanh,
}  # fmt: skip


def make_activation(name: str) -> Module:
    """The activation of a name.

    >>> from netcl import nn
    >>> nn.activation.make_activation("gelu")
    GELU(approximate='none')
    """
    if name not in ACTIVATIONS:
        raise ValueError(message("activation", "unknown activation", f"known: {', '.join(ACTIVATIONS)}", activation=repr(name)))
    return ACTIVATIONS[name]()
