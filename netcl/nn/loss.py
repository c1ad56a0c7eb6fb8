"""Losses as modules. ``reduction`` is ``mean``, ``sum`` or ``none`` everywhere."""

from __future__ import annotations

from typing import Any

import netcl.autograd as ag
from netcl.core.errors import message
from netcl.core.tensor import Tensor
from netcl.nn.module import Module
from netcl.nn.parameter import here


class Loss(Module):
    """The base of losses."""

    weight: Tensor | None
    pos_weight: Tensor | None

    def __init__(self, reduction: str = "mean"):
        super().__init__()
        self._reduce(reduction)

    def _reduce(self, reduction: str) -> None:
        if reduction not in ("mean", "sum", "none", "batchmean"):
            raise ValueError(message(type(self).__name__, "reduction is mean, sum or none", reduction=repr(reduction)))
        self.reduction = reduction

    def keep_weight(self, name: str, weight: Any) -> None:
        """Keep given weights as a buffer that is not part of the state, since they are part of the configuration."""
        if weight is not None and not isinstance(weight, Tensor):
            weight = Tensor.from_host(here(), weight, "float32")
        self.register_buffer(name, weight, persistent=False)


class CrossEntropyLoss(Loss):
    """Softmax and negative log-likelihood in one: ``-log(exp(x[y]) / sum over c of exp(x[c]))``.

    - **weight**: one factor per class.
    - **ignore_index**: targets of this class count nothing.
    - **reduction**: ``mean`` divides by the weight of the targets.
    - **label_smoothing**: how much of the target is spread over all classes.

    Shapes: logits ``(N, C)`` or ``(N, C, ...)``; targets ``(N,)`` or ``(N, ...)`` are class numbers of any dtype, targets of the logits'
    shape are probabilities.

    >>> from netcl import nn
    >>> round(nn.CrossEntropyLoss()([[0.0, 0.0]], [1]).item(), 4)
    0.6931
    """

    def __init__(self, weight: Any = None, ignore_index: int = -100, reduction: str = "mean", label_smoothing: float = 0.0):
        super().__init__(reduction)
        self.keep_weight("weight", weight)
        self.ignore_index, self.label_smoothing = ignore_index, label_smoothing

    def forward(self, logits: Tensor, target: Tensor) -> Tensor:
        return ag.cross_entropy(logits, target, weight=self.weight, ignore_index=self.ignore_index, reduction=self.reduction,
                                label_smoothing=self.label_smoothing)  # fmt: skip


class NLLLoss(Loss):
    """Negative log-likelihood of log-probabilities: ``-x[y]``.

    - **weight**, **ignore_index**, **reduction**: as in :class:`CrossEntropyLoss`.

    Shapes: log-probabilities ``(N, C)`` or ``(N, C, ...)``, targets ``(N,)`` or ``(N, ...)``.

    >>> from netcl import nn
    >>> nn.NLLLoss()([[-1.0, -2.0]], [1]).item()
    2.0
    """

    def __init__(self, weight: Any = None, ignore_index: int = -100, reduction: str = "mean"):
        super().__init__(reduction)
        self.keep_weight("weight", weight)
        self.ignore_index = ignore_index

    def forward(self, log_probabilities: Tensor, target: Tensor) -> Tensor:
        return ag.nll(log_probabilities, target, weight=self.weight, ignore_index=self.ignore_index, reduction=self.reduction)


class MSELoss(Loss):
    """The squared difference: ``(x - y)^2``.

    >>> from netcl import nn
    >>> nn.MSELoss()([1.0, 2.0], [1.0, 4.0]).item()
    2.0
    """

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        return ag.mse(x, target, reduction=self.reduction)


class L1Loss(Loss):
    """The absolute difference: ``|x - y|``.

    >>> from netcl import nn
    >>> nn.L1Loss()([1.0, 2.0], [1.0, 4.0]).item()
    1.0
    """

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        return ag.l1(x, target, reduction=self.reduction)


class SmoothL1Loss(Loss):
    """Squared where small, straight where large: ``d^2 / (2 beta)`` if ``d = |x - y| < beta``, else ``d - beta / 2``.

    >>> from netcl import nn
    >>> nn.SmoothL1Loss()([0.0], [2.0]).item()
    1.5
    """

    def __init__(self, reduction: str = "mean", beta: float = 1.0):
        super().__init__(reduction)
        self.beta = beta

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        return ag.smooth_l1(x, target, beta=self.beta, reduction=self.reduction)


class HuberLoss(Loss):
    """Squared where small, straight where large: ``d^2 / 2`` if ``d = |x - y| < delta``, else ``delta (d - delta / 2)``.

    >>> from netcl import nn
    >>> nn.HuberLoss(delta=2.0)([0.0], [3.0]).item()
    4.0
    """

    def __init__(self, reduction: str = "mean", delta: float = 1.0):
        super().__init__(reduction)
        self.delta = delta

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        return ag.huber(x, target, delta=self.delta, reduction=self.reduction)


class BCELoss(Loss):
    """Binary cross-entropy of probabilities: ``-(y log x + (1 - y) log(1 - x))``.

    - **weight**: a factor per element, broadcast. **reduction**: as everywhere.

    >>> from netcl import nn
    >>> round(nn.BCELoss()([0.5], [1.0]).item(), 4)
    0.6931
    """

    def __init__(self, weight: Any = None, reduction: str = "mean"):
        super().__init__(reduction)
        self.keep_weight("weight", weight)

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        return ag.bce(x, target, weight=self.weight, reduction=self.reduction)


class BCEWithLogitsLoss(Loss):
    """Sigmoid and binary cross-entropy in one, without overflow.

    - **weight**: a factor per element, broadcast. **pos_weight**: a factor for positive targets. **reduction**: as everywhere.

    >>> from netcl import nn
    >>> round(nn.BCEWithLogitsLoss()([0.0], [1.0]).item(), 4)
    0.6931
    """

    def __init__(self, weight: Any = None, reduction: str = "mean", pos_weight: Any = None):
        super().__init__(reduction)
        self.keep_weight("weight", weight)
        self.keep_weight("pos_weight", pos_weight)

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        return ag.bce_with_logits(x, target, weight=self.weight, pos_weight=self.pos_weight, reduction=self.reduction)


class KLDivLoss(Loss):
    """Kullback-Leibler divergence of a distribution ``y`` from log-probabilities ``x``: ``y (log y - x)``.

    - **reduction**: also ``batchmean``, the sum over the batch size, which is the divergence proper.
    - **log_target**: whether the target is given as logarithms too.

    >>> from netcl import nn
    >>> nn.KLDivLoss(reduction="sum")([0.0], [1.0]).item()
    0.0
    """

    def __init__(self, reduction: str = "mean", log_target: bool = False):
        super().__init__(reduction)
        self.log_target = log_target

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        return ag.kl_div(x, target, reduction=self.reduction, log_target=self.log_target)


class HingeLoss(Loss):
    """``max(0, margin - y x)`` for targets ``y`` of -1 and 1.

    >>> from netcl import nn
    >>> nn.HingeLoss()([0.5, -2.0], [1.0, -1.0]).item()
    0.25
    """

    def __init__(self, margin: float = 1.0, reduction: str = "mean"):
        super().__init__(reduction)
        self.margin = margin

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        return ag.hinge(x, target, margin=self.margin, reduction=self.reduction)


class CosineSimilarity(Module):
    """The cosine of the angle between vectors: ``x1 x2 / max(|x1| |x2|, eps)`` along ``dim``.

    >>> from netcl import nn
    >>> nn.CosineSimilarity()([[3.0, 4.0]], [[6.0, 8.0]]).tolist()
    [1.0]
    """

    def __init__(self, dim: int = 1, eps: float = 1e-8):
        super().__init__()
        self.dim, self.eps = dim, eps

    def forward(self, x1: Tensor, x2: Tensor) -> Tensor:
        return ag.cosine_similarity(x1, x2, axis=self.dim, eps=self.eps)


class TripletMarginLoss(Loss):
    """``max(0, d(anchor, positive) - d(anchor, negative) + margin)`` with the p-norm as distance ``d``.

    Shapes: three times ``(N, D)``.

    >>> from netcl import nn
    >>> nn.TripletMarginLoss()([[0.0]], [[1.0]], [[3.0]]).item()
    0.0
    """

    def __init__(self, margin: float = 1.0, p: float = 2.0, eps: float = 1e-6, reduction: str = "mean"):
        super().__init__(reduction)
        self.margin, self.p, self.eps = margin, p, eps

    def forward(self, anchor: Tensor, positive: Tensor, negative: Tensor) -> Tensor:
        return ag.triplet(anchor, positive, negative, margin=self.margin, p=self.p, eps=self.eps, reduction=self.reduction)


class InfoNCELoss(Loss):
    """Each query must find its own key among all: cross-entropy of ``cos(query_i, key_j) / temperature`` with targets ``j = i``.

    Shapes: queries and keys ``(N, D)``.

    >>> from netcl import nn
    >>> round(nn.InfoNCELoss()([[1.0, 0.0], [0.0, 1.0]], [[1.0, 0.0], [0.0, 1.0]]).item(), 4)
    0.0
    """

    def __init__(self, temperature: float = 0.07, reduction: str = "mean"):
        super().__init__(reduction)
        self.temperature = temperature

    def forward(self, query: Tensor, key: Tensor) -> Tensor:
        return ag.info_nce(query, key, temperature=self.temperature, reduction=self.reduction)


class ContrastiveLoss(Loss):
    """Pairs that belong together (``y = 1``) are pulled, others pushed apart: ``y d^2 + (1 - y) max(0, margin - d)^2``.

    Shapes: two times ``(N, D)``, targets ``(N,)``.

    >>> from netcl import nn
    >>> nn.ContrastiveLoss()([[0.0]], [[3.0]], [0.0]).item()
    0.0
    """

    def __init__(self, margin: float = 1.0, reduction: str = "mean"):
        super().__init__(reduction)
        self.margin = margin

    def forward(self, x1: Tensor, x2: Tensor, target: Tensor) -> Tensor:
        return ag.contrastive(x1, x2, target, margin=self.margin, reduction=self.reduction)
