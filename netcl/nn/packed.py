"""Sequences of different lengths, by the names of ``torch.nn.utils.rnn``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

import netcl.autograd as ag
from netcl.core.errors import ShapeError, message
from netcl.core.tensor import Tensor


class PackedSequence(NamedTuple):
    """Sequences step by step: of each step the rows that are that long, the longest first. Made by :func:`pack_padded_sequence`.

    - **data**: ``(sum of lengths, features)``. - **batch_sizes**: rows of each step. - **sorted_indices**, **unsorted_indices**: the order
      of the rows by length, and back; ``None`` if they came in that order.
    """

    data: Tensor
    batch_sizes: tuple[int, ...]
    sorted_indices: Tensor | None = None
    unsorted_indices: Tensor | None = None

    def _lengths(self) -> np.ndarray:
        sizes = np.asarray(self.batch_sizes)
        return (sizes[:, None] > np.arange(sizes[0])).sum(0)

    def padded(self) -> tuple[Tensor, Tensor]:
        """``(time, batch, features)``, rows in order of length, and their lengths as int32. Values after the end are the row's last."""
        lengths, starts = self._lengths(), np.concatenate(([0], np.cumsum(self.batch_sizes)[:-1]))
        at = starts[np.minimum(np.arange(len(starts))[:, None], lengths - 1)] + np.arange(len(lengths))
        flat = ag.index_select(self.data, 0, _index(self.data, at.reshape(-1)))
        return ag.reshape(flat, (*at.shape, *self.data.shape[1:])), _index(self.data, lengths)

    def with_data(self, y: Tensor) -> PackedSequence:
        """The same sequences with the values of a padded tensor, rows in order of length."""
        steps, rows = y.shape[:2]
        at = np.flatnonzero(np.arange(steps)[:, None] < self._lengths())
        data = ag.index_select(ag.reshape(y, (steps * rows, *y.shape[2:])), 0, _index(y, at))
        return PackedSequence(data, *self[1:])

    def to_sorted(self, state: Any) -> Any:
        """A state (layers, batch, features), or a tuple of them, in order of length."""
        return _reordered(state, self.sorted_indices)

    def to_given(self, state: Any) -> Any:
        """A state in the order in which the rows were given."""
        return _reordered(state, self.unsorted_indices)


def _index(like: Tensor, values: np.ndarray) -> Tensor:
    return Tensor.from_host(like.queue, values.astype(np.int32))


def _reordered(state: Any, order: Tensor | None) -> Any:
    if order is None or state is None:
        return state
    if isinstance(state, tuple | list):
        return tuple(ag.index_select(part, 1, order) for part in state)
    return ag.index_select(state, 1, order)


def pack_padded_sequence(input: Tensor, lengths: Any, batch_first: bool = False, enforce_sorted: bool = True) -> PackedSequence:
    """Pack a padded batch ``(time, batch, ...)``, with ``batch_first`` ``(batch, time, ...)``, of sequences of these ``lengths``.

    ``enforce_sorted=False`` sorts the rows by length; else they must come in that order.

    >>> pack_padded_sequence(Tensor.ones((4, 2, 3)), [4, 2]).batch_sizes
    (2, 2, 1, 1)
    """
    x = ag.transpose(input, 0, 1) if batch_first else input
    counts = np.asarray(lengths.to_host() if isinstance(lengths, Tensor) else lengths, np.int64)
    if counts.shape != x.shape[1:2] or not counts.size or counts.min() < 1 or counts.max() > x.shape[0]:
        what = f"lengths must be {x.shape[1]} numbers from 1 to the {x.shape[0]} steps"
        raise ShapeError(message("pack_padded_sequence", what, lengths=counts.tolist()))
    order = np.argsort(-counts, kind="stable")
    if enforce_sorted and (np.diff(counts) > 0).any():
        remedy = "sort them, or pass enforce_sorted=False"
        raise ShapeError(message("pack_padded_sequence", "lengths must be in decreasing order", remedy, lengths=counts.tolist()))
    sizes = (counts > np.arange(counts.max())[:, None]).sum(1)
    known = () if enforce_sorted else (_index(x, order), _index(x, np.argsort(order)))
    empty = PackedSequence(x, tuple(map(int, sizes)), *known)
    return empty.with_data(empty.to_sorted(x)[: len(sizes)])


def pad_packed_sequence(
    sequence: PackedSequence, batch_first: bool = False, padding_value: float = 0.0, total_length: int | None = None
) -> tuple[Tensor, Tensor]:
    """The inverse of :func:`pack_padded_sequence`: the padded batch in the order given, and the lengths as int64."""
    x, _ = sequence.padded()
    steps, counts = x.shape[0], sequence._lengths()
    inside = np.arange(steps)[:, None] < counts
    mask = Tensor.from_host(x.queue, inside.reshape(*inside.shape, *(1,) * (x.ndim - 2)))
    x = ag.where(mask, x, padding_value)
    if total_length is not None and total_length != steps:
        if total_length < steps:
            raise ShapeError(message("pad_packed_sequence", f"total_length must be at least {steps}", total_length=total_length))
        rest = Tensor.full((total_length - steps, *x.shape[1:]), padding_value, x.dtype, queue=x.queue)
        x = ag.cat([x, rest], axis=0)
    x = sequence.to_given(x)
    back = slice(None) if sequence.unsorted_indices is None else sequence.unsorted_indices.to_host()
    return (ag.transpose(x, 0, 1) if batch_first else x), Tensor.from_host(x.queue, counts[back].astype(np.int64))


def pad_sequence(sequences: Sequence[Tensor], batch_first: bool = False, padding_value: float = 0.0) -> Tensor:
    """Stack tensors ``(steps, ...)`` of different lengths, padded to the longest.

    >>> pad_sequence([Tensor.ones((3,)), Tensor.ones((1,))]).tolist()
    [[1.0, 1.0], [1.0, 0.0], [1.0, 0.0]]
    """
    most = max(x.shape[0] for x in sequences)
    fill = [Tensor.full((most - x.shape[0], *x.shape[1:]), padding_value, x.dtype, queue=x.queue) for x in sequences]
    return ag.stack([ag.cat([x, rest], axis=0) for x, rest in zip(sequences, fill, strict=True)], axis=0 if batch_first else 1)
