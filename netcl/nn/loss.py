"""Losses as modules."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import netcl.autograd as ag  # noqa: F401, the expressions below are in it
from netcl.autograd.ops import older_reduction
from netcl.core.errors import message
from netcl.core.tensor import Tensor
from netcl.nn.layer_class import layer_class
from netcl.nn.module import Module
from netcl.nn.parameter import here


class _Reducing(type(Module)):  # type: ignore[misc]
    """Metaclass of losses; their constructors also take torch's older ``size_average=`` and ``reduce=``."""

    def __call__(cls, *args: Any, size_average: Any = None, reduce: Any = None, **kwargs: Any) -> Any:
        refuse_bools(cls.__name__, cls.__init__, (None, *args))  # type: ignore[misc]
        return super().__call__(*args, **kwargs | older_reduction(size_average, reduce))


def refuse_bools(name: str, function: Callable[..., object], args: tuple[object, ...]) -> None:
    """Raise if a positional argument is a bool but its default is none: torch takes ``size_average`` in that place."""
    given = zip(inspect.signature(function).parameters.values(), args, strict=False)
    if wrong := [p.name for p, value in given if isinstance(value, bool) and not isinstance(p.default, bool)]:
        raise TypeError(message(name, f"{wrong[0]} must not be a bool", "pass torch's size_average and reduce by name"))


class Loss(Module, metaclass=_Reducing):
    """Base class of losses; ``reduction`` is ``mean``, ``sum`` or ``none``, for :class:`KLDivLoss` also ``batchmean``."""

    WEIGHTS = ("weight", "pos_weight")  # settings that are kept as buffers
    weight: Tensor | None
    pos_weight: Tensor | None

    def __init__(self, reduction: str = "mean"):
        super().__init__()
        known = ("mean", "sum", *(("batchmean",) if isinstance(self, KLDivLoss) else ()))
        if reduction not in (*known, "none"):
            raise ValueError(message(type(self).__name__, f"reduction must be {', '.join(known)} or none", reduction=repr(reduction)))
        self.reduction = reduction

    def keep_weight(self, name: str, weight: Any) -> None:
        """Register ``weight`` as the buffer ``name``. The state dict has the buffer unless ``weight`` is ``None``."""
        if weight is not None and not isinstance(weight, Tensor):
            weight = Tensor.from_host(here(), weight, "float32")
        self.register_buffer(name, weight)


#: The op, its inputs, the parameters of the layer, which the op takes by the same names, the documentation, an example and its result.
_LOSSES: dict[str, tuple[str, str, str, str, str, str]] = {
    "CrossEntropyLoss": ("cross_entropy", "logits, target",
        "weight: Any = None, ignore_index: int = -100, reduction: str = 'mean', label_smoothing: float = 0.0",
        "Softmax and negative log-likelihood in one: ``-log(exp(x[y]) / sum over c of exp(x[c]))``.\n\n"
        "- **weight**: one factor per class.\n- **ignore_index**: targets of this class are ignored.\n"
        "- **reduction**: ``mean`` divides by the total weight of the class indices, or the number of rows of probabilities.\n"
        "- **label_smoothing**: how much of the target is spread over all classes.\n\n"
        "Shapes: logits ``(N, C)`` or ``(N, C, ...)``; targets ``(N,)`` or ``(N, ...)`` are class indices of any dtype, targets of the\n"
        "logits' shape are probabilities.", "round(nn.CrossEntropyLoss()([[0.0, 0.0]], [1]).item(), 4)", "0.6931"),
    "NLLLoss": ("nll", "log_probabilities, target", "weight: Any = None, ignore_index: int = -100, reduction: str = 'mean'",
        "Negative log-likelihood of log-probabilities: ``-x[y]``.\n\n"
        "- **weight**, **ignore_index**, **reduction**: as in :class:`CrossEntropyLoss`.\n\n"
        "Shapes: log-probabilities ``(N, C)`` or ``(N, C, ...)``, targets ``(N,)`` or ``(N, ...)``.",
        "nn.NLLLoss()([[-1.0, -2.0]], [1]).item()", "2.0"),
    "MSELoss": ("mse", "x, target", "reduction: str = 'mean'", "The squared difference: ``(x - y)^2``.",
        "nn.MSELoss()([1.0, 2.0], [1.0, 4.0]).item()", "2.0"),
    "L1Loss": ("l1", "x, target", "reduction: str = 'mean'", "The absolute difference: ``|x - y|``.",
        "nn.L1Loss()([1.0, 2.0], [1.0, 4.0]).item()", "1.0"),
    "SmoothL1Loss": ("smooth_l1", "x, target", "reduction: str = 'mean', beta: float = 1.0",
        "Quadratic where small, linear where large: ``d^2 / (2 beta)`` if ``d = |x - y| < beta``, else ``d - beta / 2``.",
        "nn.SmoothL1Loss()([0.0], [2.0]).item()", "1.5"),
    "HuberLoss": ("huber", "x, target", "reduction: str = 'mean', delta: float = 1.0",
        "Quadratic where small, linear where large: ``d^2 / 2`` if ``d = |x - y| < delta``, else ``delta (d - delta / 2)``.",
        "nn.HuberLoss(delta=2.0)([0.0], [3.0]).item()", "4.0"),
    "BCELoss": ("bce", "x, target", "weight: Any = None, reduction: str = 'mean'",
        "Binary cross-entropy of probabilities: ``-(y log x + (1 - y) log(1 - x))``.\n\n- **weight**: a factor per element, broadcast.",
        "round(nn.BCELoss()([0.5], [1.0]).item(), 4)", "0.6931"),
    "BCEWithLogitsLoss": ("bce_with_logits", "x, target", "weight: Any = None, reduction: str = 'mean', pos_weight: Any = None",
        "Sigmoid and binary cross-entropy in one, without overflow.\n\n"
        "- **weight**: a factor per element, broadcast. **pos_weight**: a factor for positive targets.",
        "round(nn.BCEWithLogitsLoss()([0.0], [1.0]).item(), 4)", "0.6931"),
    "KLDivLoss": ("kl_div", "x, target", "reduction: str = 'mean', log_target: bool = False",
        "Kullback-Leibler divergence of a distribution ``y`` from log-probabilities ``x``: ``y (log y - x)``.\n\n"
        "- **reduction**: also ``batchmean``, the sum divided by the batch size: the mathematical definition.\n"
        "- **log_target**: whether the target is given as logarithms too.", 'nn.KLDivLoss(reduction="sum")([0.0], [1.0]).item()', "0.0"),
    "HingeLoss": ("hinge", "x, target", "margin: float = 1.0, reduction: str = 'mean'",
        "``max(0, margin - y x)`` for targets ``y`` of -1 and 1.", "nn.HingeLoss()([0.5, -2.0], [1.0, -1.0]).item()", "0.25"),
    "InfoNCELoss": ("info_nce", "query, key", "temperature: float = 0.07, reduction: str = 'mean'",
        "Each query must find its own key among all: cross-entropy of ``cos(query_i, key_j) / temperature`` with targets ``j = i``.\n\n"
        "Shapes: queries and keys ``(N, D)``.", "round(nn.InfoNCELoss()([[1.0, 0.0], [0.0, 1.0]], [[1.0, 0.0], [0.0, 1.0]]).item(), 4)",
        "0.0"),
    "ContrastiveLoss": ("contrastive", "x1, x2, target", "margin: float = 1.0, reduction: str = 'mean'",
        "Pulls pairs with ``y = 1`` together and pushes others apart: ``y d^2 + (1 - y) max(0, margin - d)^2``.\n\n"
        "Shapes: both inputs ``(N, D)``, targets ``(N,)``.", "nn.ContrastiveLoss()([[0.0]], [[3.0]], [0.0]).item()", "0.0"),
}  # fmt: skip
for _name, (_op, _inputs, _parameters, _doc, _example, _gives) in _LOSSES.items():
    _given = ", ".join(f"{part.split(':')[0]}={part.split(':')[0]}" for part in _parameters.split(", "))
    _call = f"ag.{_op}({_inputs}, {_given})"
    globals()[_name] = layer_class(globals(), f"{_name}({_parameters})", _call, _doc, _example, _gives, Loss)
NLLLoss2d, KLDivLoss = globals()["NLLLoss"], globals()["KLDivLoss"]
