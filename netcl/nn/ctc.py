"""Connectionist temporal classification (Graves et al. 2006): the loss of label sequences without a known alignment to the input."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

import netcl.autograd as ag
from netcl.core.errors import ShapeError, message
from netcl.core.tensor import Tensor

_NEVER = -1e30  # stands for log(0): its gradient is 0, where that of -inf is NaN


def ctc_loss(log_probs: Tensor, targets: Tensor, input_lengths: Any, target_lengths: Any, blank: int = 0, reduction: str = "mean",
             zero_infinity: bool = False) -> Tensor:  # fmt: skip
    """Return ``-log(p)`` of each target; ``p`` is the sum of the probabilities of all alignments of its labels with the input.

    - **log_probs**: ``(T, N, C)``, or ``(T, C)`` for one sequence: the output of ``log_softmax``. **blank**: the index of the blank label.
    - **targets**: ``(N, S)``, or all labels in one vector. **input_lengths**, **target_lengths**: one length per sequence.
    - **reduction**: ``mean`` first divides each loss by the length of its target. **zero_infinity**: whether infinite losses become 0.

    The sum runs forward through time on the device; the labels and lengths are read on the host.
    """
    single = log_probs.ndim == 2
    x = ag.unsqueeze(log_probs, 1) if single else log_probs
    x = ag.cast(x, "float32") if x.dtype in ("float16", "bfloat16") else x
    lengths, counts = (np.asarray(given, np.int64).reshape(-1) for given in (input_lengths, target_lengths))
    labels = _padded_targets(np.asarray(targets), counts)
    if len(lengths) != x.shape[1] or len(counts) != x.shape[1] or not ((lengths > 0) & (lengths <= x.shape[0])).all():
        what = f"input_lengths must have a number from 1 to {x.shape[0]}, and target_lengths a number, for each sequence"
        raise ShapeError(message("ctc_loss", what, input_lengths=lengths.tolist(), target_lengths=counts.tolist(), sequences=x.shape[1]))
    if reduction not in ("mean", "sum", "none"):
        raise ValueError(message("ctc_loss", "reduction must be mean, sum or none", reduction=repr(reduction)))
    loss = _negative_log(x, labels, lengths, counts, blank)
    impossible = ag.gt(loss, -_NEVER / 2)
    # By a factor, so that the gradient of an infinite loss is not 0 but NaN or infinite.
    loss = ag.where(impossible, 0.0, loss) if zero_infinity else ag.mul(loss, ag.where(impossible, math.inf, 1.0))
    if reduction == "mean":
        return ag.mean(ag.div(loss, Tensor.from_host(x.queue, np.maximum(counts, 1), x.dtype)))
    return ag.sum(loss) if reduction == "sum" else ag.squeeze(loss, 0) if single else loss


def _padded_targets(targets: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """Return the labels as int64 rows ``(N, S)``; a vector is split by ``counts``, and shorter rows are padded with zeros."""
    if targets.ndim == 2:
        return targets.astype(np.int64)
    if targets.ndim != 1 or targets.size < counts.sum():
        what = "targets must be (N, S), or one vector with at least as many labels as the target lengths add up to"
        raise ShapeError(message("ctc_loss", what, target_lengths=counts.tolist(), **{"targets.shape": targets.shape}))
    rows = np.zeros((len(counts), counts.max(initial=0)), np.int64)
    rows[np.arange(rows.shape[1]) < counts[:, None]] = targets[: counts.sum()]
    return rows


def _negative_log(x: Tensor, labels: np.ndarray, lengths: np.ndarray, counts: np.ndarray, blank: int) -> Tensor:
    """Return the losses of all sequences. States are blank, label, ..., blank; the blank between two different labels may be skipped."""
    batch, states = len(labels), 2 * labels.shape[1] + 1
    path = np.full((batch, states), blank)
    path[:, 1::2] = labels
    skips = np.zeros((batch, states), bool)
    skips[:, 2:] = path[:, 2:] != path[:, :-2]
    where = Tensor.from_host(x.queue, path)
    emitted = ag.unbind(ag.gather(x, 2, ag.expand(where, (x.shape[0], batch, states))), axis=0)
    barred = Tensor.from_host(x.queue, np.where(skips, 0.0, _NEVER), x.dtype)
    running = Tensor.from_host(x.queue, np.arange(x.shape[0])[:, None, None] < lengths[:, None], "bool")
    alpha = ag.where(Tensor.from_host(x.queue, np.broadcast_to(np.arange(states) < 2, (batch, states))), emitted[0], _NEVER)
    never = Tensor.full((batch, 2), _NEVER, x.dtype, queue=x.queue)
    for step in range(1, x.shape[0]):
        longer = ag.cat([never, alpha], axis=1)
        ways = ag.stack([alpha, longer[:, 1:-1], ag.add(longer[:, :-2], barred)], axis=0)
        alpha = ag.where(running[step], ag.add(ag.logsumexp(ways, axis=0), emitted[step]), alpha)
    ends = np.stack([2 * counts, np.maximum(2 * counts - 1, 0)], axis=1)
    last = ag.gather(alpha, 1, Tensor.from_host(x.queue, ends))
    one_way = Tensor.from_host(x.queue, np.where((counts == 0)[:, None] & (np.arange(2) == 1), _NEVER, 0.0), x.dtype)
    return ag.neg(ag.logsumexp(ag.add(last, one_way), axis=1))


FUNCTIONS = ["ctc_loss"]
