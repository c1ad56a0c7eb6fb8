"""The adaptive softmax (Grave et al. 2017): rare classes are in clusters with narrower projections."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import netcl.autograd as ag
from netcl.core.errors import ShapeError, message
from netcl.core.tensor import Tensor
from netcl.nn.container import ModuleList, Sequential
from netcl.nn.linear import Linear
from netcl.nn.module import Module


class ASMoutput(NamedTuple):
    """``output``: the log-probability of each target. ``loss``: the negative mean of ``output``."""

    output: Tensor
    loss: Tensor


class AdaptiveLogSoftmaxWithLoss(Module):
    """Log-probabilities of many classes (adaptive softmax): rare classes are in clusters with narrower projections.

    - **in_features**: width of the input. **n_classes**: number of classes; the most frequent ones come first.
    - **cutoffs**: the first class of each cluster, ascending. **div_value**: how many times narrower each cluster is than the previous.
    - **head_bias**: whether the projection to the frequent classes and the clusters has a bias.

    ``forward(input, target)`` gives ``(output, loss)``; ``log_prob(input)`` and ``predict(input)`` take no target. Every row is projected
    to all clusters, so the work does not depend on the targets.

    >>> from netcl import nn, zeros
    >>> layer = nn.AdaptiveLogSoftmaxWithLoss(8, 20, cutoffs=[5, 10])
    >>> output, loss = layer(zeros((2, 8)), [3, 17])
    >>> output.shape, loss.shape, layer.log_prob(zeros((2, 8))).shape
    ((2,), (), (2, 20))
    """

    def __init__(self, in_features: int, n_classes: int, cutoffs: Sequence[int], div_value: float = 4.0, head_bias: bool = False):
        super().__init__()
        ends = [*cutoffs]
        if not ends or ends != sorted({*ends}) or ends[0] < 1 or ends[-1] >= n_classes:
            what = "cutoffs must be one or more strictly ascending numbers from 1 to n_classes - 1"
            raise ShapeError(message("AdaptiveLogSoftmaxWithLoss", what, cutoffs=ends, n_classes=n_classes))
        self.in_features, self.n_classes, self.cutoffs = in_features, n_classes, (*ends, n_classes)
        self.head = Linear(in_features, ends[0] + len(ends), head_bias)
        widths = [int(in_features // div_value ** (i + 1)) for i in range(len(ends))]
        sizes = [end - begin for begin, end in zip(self.cutoffs, self.cutoffs[1:], strict=False)]
        pairs = zip(widths, sizes, strict=True)
        self.tail = ModuleList(Sequential(Linear(in_features, width, False), Linear(width, size, False)) for width, size in pairs)

    def log_prob(self, input: Tensor) -> Tensor:
        """Return the log-probabilities of all classes, ``(N, n_classes)``."""
        head = ag.log_softmax(self.head(input), axis=1)
        first = self.cutoffs[0]
        parts = [ag.narrow(head, 1, 0, first)]
        for i, cluster in enumerate(self.tail):
            parts.append(ag.add(ag.log_softmax(cluster(input), axis=1), ag.narrow(head, 1, first + i, 1)))
        return ag.cat(parts, axis=1)

    def predict(self, input: Tensor) -> Tensor:
        """Return the most probable class of each row."""
        return ag.argmax(self.log_prob(input), axis=1)

    def forward(self, input_: Tensor, target_: Tensor) -> ASMoutput:
        single = input_.ndim == 1
        x, target = (ag.unsqueeze(input_, 0), ag.reshape(target_, (1,))) if single else (input_, target_)
        found = ag.squeeze(ag.gather(self.log_prob(x), 1, ag.unsqueeze(target, 1)), 1)
        return ASMoutput(ag.squeeze(found, 0) if single else found, ag.neg(ag.mean(found)))
