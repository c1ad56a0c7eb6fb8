"""Embeddings: vectors looked up by index."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np

import netcl.autograd as ag
from netcl.core.errors import ShapeError, message
from netcl.core.hooks import hooks
from netcl.core.tensor import Tensor
from netcl.nn import init
from netcl.nn.module import Module
from netcl.nn.parameter import Parameter, empty

# ---- functions


def embedding(input: Tensor, weight: Tensor, padding_idx: int | None = None, max_norm: float | None = None, norm_type: float = 2.0,
              scale_grad_by_freq: bool = False, sparse: bool = False) -> Tensor:  # fmt: skip
    """Return ``weight[input]``. Used vectors with a norm above ``max_norm`` are first shortened in place. ``sparse`` is ignored."""
    if max_norm is not None:
        with ag.no_grad():
            length = ag.norm(weight, norm_type, axis=1, keepdims=True)
            long = ag.logical_and(ag.gt(_counts(weight, input), 0.0), ag.gt(length, max_norm))
            hooks.call("in_place", "mul", weight, ag.where(long, ag.div(max_norm, ag.add(length, 1e-7)), 1.0))
    found = ag.embedding(input, weight, padding_idx=padding_idx)
    if not scale_grad_by_freq:
        return found
    share = ag.unsqueeze(ag.div(1.0, ag.embedding(input, _counts(weight, input))), -1)
    still = found.detach()
    return ag.add(still, ag.mul(ag.sub(found, still), ag.reshape(share, (*input.shape, 1))))  # the difference is 0, its gradient is not


def _counts(weight: Tensor, index: Tensor) -> Tensor:
    """Return how often each vector is looked up, as a column."""
    flat = ag.reshape(index, (-1,))
    ones = Tensor.ones((flat.size,), weight.dtype, queue=weight.queue)
    return ag.reshape(ag.index_add(Tensor.zeros((weight.shape[0],), weight.dtype, queue=weight.queue), 0, flat, ones), (-1, 1))


def embedding_bag(
    input: Tensor, weight: Tensor, offsets: Tensor | None = None, max_norm: float | None = None, norm_type: float = 2,
    scale_grad_by_freq: bool = False, mode: str = "mean", sparse: bool = False, per_sample_weights: Tensor | None = None,
    include_last_offset: bool = False, padding_idx: int | None = None,
) -> Tensor:  # fmt: skip
    """Reduce the vectors of each bag by ``mode``: sum, mean or max. A bag is a row of ``input``, or a part of ``input`` with ``offsets``.

    ``offsets`` holds the start of each bag, begins with 0 and must not decrease. For ``max``, the host splits ``input`` at ``offsets``. For
    ``sum``, ``per_sample_weights`` scales the vectors. Indices equal to ``padding_idx`` are ignored. An empty bag gives zeros.
    """
    _check_bags(input, offsets, mode, per_sample_weights)
    counted = Tensor.ones(input.shape, "bool", queue=input.queue)
    if offsets is not None and mode == "max":
        input, counted = _rows_of_bags(input, offsets, include_last_offset)
    if padding_idx is not None:
        counted = ag.logical_and(counted, ag.ne(input, padding_idx % weight.shape[0]))
    found = embedding(input, weight, padding_idx, max_norm, norm_type, scale_grad_by_freq)
    if mode == "max":
        best = ag.max(ag.where(ag.unsqueeze(counted, -1), found, -np.inf), 1).values
        return ag.where(ag.unsqueeze(ag.any(counted, axis=1), -1), best, 0.0)
    weights = ag.unsqueeze(ag.cast(counted, found.dtype), -1)
    summed = found if per_sample_weights is None else ag.mul(found, ag.unsqueeze(per_sample_weights, -1))
    total, count = (_bagged(part, offsets, include_last_offset) for part in (ag.mul(summed, weights), weights))
    return total if mode == "sum" else ag.div(total, ag.clamp(count, min=1.0))


def _check_bags(input: Tensor, offsets: Tensor | None, mode: str, weights: Tensor | None) -> None:
    if mode not in ("sum", "mean", "max"):
        raise ValueError(message("embedding_bag", "mode must be sum, mean or max", mode=repr(mode)))
    if (input.ndim, offsets is None) not in ((1, False), (2, True)):
        what = "input must have 2 axes without offsets, or 1 axis with offsets"
        raise ShapeError(message("embedding_bag", what, offsets=offsets is not None, **{"input.shape": input.shape}))
    if weights is not None and (mode != "sum" or weights.shape != input.shape):
        what = 'per_sample_weights must have the shape of the input, and mode must be "sum"'
        raise ShapeError(message("embedding_bag", what, mode=mode, per_sample_weights=weights.shape, input=input.shape))


def _bagged(values: Tensor, offsets: Tensor | None, include_last: bool) -> Tensor:
    """Return the sum of the vectors ``values`` in each bag. With ``include_last``, the last offset is the end of the last bag."""
    if offsets is None:
        return ag.sum(values, axis=1)
    bags, count = offsets.size - include_last, values.shape[0]
    ones = Tensor.ones((offsets.size,), "int64", queue=values.queue)
    begins = ag.index_add(Tensor.zeros((count + 1,), "int64", queue=values.queue), 0, offsets, ones)
    bag = ag.sub(ag.narrow(ag.cumsum(begins, 0), 0, 0, count), 1)
    return ag.index_add(Tensor.zeros((bags, values.shape[1]), values.dtype, queue=values.queue), 0, bag, values)


def _rows_of_bags(input: Tensor, offsets: Tensor, include_last: bool) -> tuple[Tensor, Tensor]:
    """Return bags as rows of one length, padded with valid indices, and a mask that is False for padding."""
    index, begins = input.to_host(), offsets.to_host().astype(np.int64)
    edges = begins if include_last else np.append(begins, len(index))
    if edges[0] != 0 or edges[-1] > len(index) or (np.diff(edges) < 0).any():
        raise ShapeError(message("embedding_bag", f"offsets must start at 0, not decrease and be at most {len(index)}", offsets=begins))
    bags = [index[a:b] for a, b in pairwise(edges)]
    rows = np.full((len(bags), max([1, *map(len, bags)])), index[0] if len(index) else 0, np.int64)
    for row, bag in zip(rows, bags, strict=True):
        row[: len(bag)] = bag
    there = np.arange(rows.shape[1]) < np.array([[len(bag)] for bag in bags]).reshape(-1, 1)
    return Tensor.from_host(input.queue, rows), Tensor.from_host(input.queue, there)


# ---- layers


class Embedding(Module):
    """A table of vectors: ``y = weight[index]``.

    - **num_embeddings**: how many vectors there are.
    - **embedding_dim**: their length.
    - **padding_idx**: an index whose vector starts as zeros and gets no gradient.
    - **max_norm**, **norm_type**: looked-up vectors whose ``norm_type`` norm exceeds ``max_norm`` are first shortened to it, in place.
    - **scale_grad_by_freq**: whether gradients are divided by how often an index occurs. **sparse** is ignored: gradients are dense.

    Shapes: ``index`` of any shape and any dtype of integers, ``y`` ``(*index.shape, embedding_dim)``, ``weight``
    ``(num_embeddings, embedding_dim)``, which starts as standard normal values.

    >>> from netcl import nn
    >>> nn.Embedding(10, 4)([[1, 2, 3]]).shape
    (1, 3, 4)
    """

    def __init__(self, num_embeddings: int, embedding_dim: int, padding_idx: int | None = None, max_norm: float | None = None,
                 norm_type: float = 2.0, scale_grad_by_freq: bool = False, sparse: bool = False):  # fmt: skip
        super().__init__()
        if padding_idx is not None and not -num_embeddings <= padding_idx < num_embeddings:
            what = "padding_idx must be from -num_embeddings to num_embeddings - 1"
            raise ShapeError(message(type(self).__name__, what, padding_idx=padding_idx, num_embeddings=num_embeddings))
        self.num_embeddings, self.embedding_dim = num_embeddings, embedding_dim
        self.padding_idx = None if padding_idx is None else padding_idx % num_embeddings
        self.max_norm, self.norm_type, self.scale_grad_by_freq = max_norm, norm_type, scale_grad_by_freq
        self.weight = empty((num_embeddings, embedding_dim))
        self.reset_parameters()

    @classmethod
    def from_pretrained(cls, embeddings: Any, freeze: bool = True, **options: Any) -> Any:
        """Return a layer with the given vectors; ``freeze`` excludes them from training.

        >>> from netcl import nn
        >>> nn.Embedding.from_pretrained([[1.0, 2.0], [3.0, 4.0]])([1]).tolist()
        [[3.0, 4.0]]
        """
        table = embeddings if isinstance(embeddings, Tensor) else Tensor.from_host(embeddings)
        layer = cls(*table.shape, **options)
        layer.weight = Parameter(table)
        return layer.requires_grad_(not freeze)

    def reset_parameters(self) -> None:
        """Reinitialize the vectors."""
        init.normal_(self.weight)
        if self.padding_idx is not None:
            values = self.weight.to_host()
            values[self.padding_idx] = 0
            self.weight.write(values)

    def forward(self, index: Tensor) -> Tensor:
        if self.max_norm is None and not self.scale_grad_by_freq:
            return ag.embedding(index, self.weight, padding_idx=self.padding_idx)
        return embedding(index, self.weight, self.padding_idx, self.max_norm, self.norm_type, self.scale_grad_by_freq)


class EmbeddingBag(Embedding):
    """An embedding that returns the sum, mean or maximum of each bag of vectors: see :func:`embedding_bag`; arguments as in torch.

    Shapes: ``input`` ``(B, N)``, or ``(N,)`` with ``offsets`` ``(B,)``; ``y`` ``(B, embedding_dim)``.

    >>> from netcl import nn, tensor
    >>> nn.EmbeddingBag(10, 4)(tensor([1, 2, 3, 4]), tensor([0, 3])).shape
    (2, 4)
    """

    def __init__(self, num_embeddings: int, embedding_dim: int, max_norm: float | None = None, norm_type: float = 2.0,
                 scale_grad_by_freq: bool = False, mode: str = "mean", sparse: bool = False, include_last_offset: bool = False,
                 padding_idx: int | None = None):  # fmt: skip
        super().__init__(num_embeddings, embedding_dim, padding_idx, max_norm, norm_type, scale_grad_by_freq)
        self.mode, self.include_last_offset = mode, include_last_offset

    def forward(self, input: Tensor, offsets: Tensor | None = None, per_sample_weights: Tensor | None = None) -> Tensor:
        return embedding_bag(
            input, self.weight, offsets, self.max_norm, self.norm_type, self.scale_grad_by_freq, self.mode,
            per_sample_weights=per_sample_weights, include_last_offset=self.include_last_offset, padding_idx=self.padding_idx,
        )  # fmt: skip


FUNCTIONS = ["embedding", "embedding_bag"]
