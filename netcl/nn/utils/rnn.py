"""The functions of ``torch.nn.utils.rnn``: sequences of different lengths as one padded tensor, or packed without padding."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

import netcl.autograd as ag
from netcl.core.device import queue_of
from netcl.core.errors import ShapeError, message
from netcl.core.tensor import Tensor


class PackedSequence(NamedTuple):
    """The time steps of several sequences, without padding: ordered by time, within a step the longest sequence first.

    - **data**: ``(steps of all sequences, *)``. **batch_sizes**: the number of sequences at each time step; on the host.
    - **sorted_indices**, **unsorted_indices**: the order of the sequences by length, and its inverse. ``None`` if they came sorted.
    """

    data: Tensor
    batch_sizes: Tensor
    sorted_indices: Tensor | None = None
    unsorted_indices: Tensor | None = None

    def to(self, *args: Any, **kwargs: Any) -> PackedSequence:
        """Return the sequences on another device, or with ``data`` of another dtype; ``batch_sizes`` stays on the host."""
        data = self.data.to(*args, **kwargs)
        indices = [None if i is None else i.to(data.queue) for i in (self.sorted_indices, self.unsorted_indices)]
        return PackedSequence(data, self.batch_sizes, *indices)

    def lengths(self) -> np.ndarray:
        """Return the lengths of the sequences, the longest first."""
        sizes = self.batch_sizes.to_host()
        return (sizes[None, :] > np.arange(sizes[0])[:, None]).sum(axis=1)

    def padded(self) -> tuple[Tensor, Tensor]:
        """Return ``(time, batch, features)``, the longest sequence first, and the int32 lengths. Padding repeats a sequence's last step."""
        lengths, starts = self.lengths(), np.concatenate(([0], np.cumsum(self.batch_sizes.to_host())[:-1]))
        at = starts[np.minimum(np.arange(len(starts))[:, None], lengths - 1)] + np.arange(len(lengths))
        return _packed_rows(self.data, at), Tensor.from_host(self.data.queue, lengths.astype(np.int32))

    def with_data(self, y: Tensor) -> PackedSequence:
        """Return the same sequences with the values of a padded tensor, the longest sequence first."""
        at = np.flatnonzero(np.arange(y.shape[0])[:, None] < self.lengths())
        return self._replace(data=_packed_rows(ag.reshape(y, (-1, *y.shape[2:])), at))


def reordered(state: Any, order: Tensor | None) -> Any:
    """Return a state ``(layers, batch, features)``, or a tuple of them, with its sequences in another order; ``None`` keeps the order."""
    if order is None or state is None:
        return state
    if isinstance(state, tuple | list):
        return tuple(ag.index_select(part, 1, order) for part in state)
    return ag.index_select(state, 1, order)


def _on_host(values: np.ndarray) -> Tensor:
    return Tensor.from_host(queue_of("cpu"), values.astype(np.int64))


def _packed_rows(x: Tensor, index: np.ndarray) -> Tensor:
    """Return the rows of a tensor in the order and the shape of ``index``."""
    found = ag.index_select(x, 0, Tensor.from_host(x.queue, index.astype(np.int64).reshape(-1)))
    return ag.reshape(found, (*index.shape, *x.shape[1:]))


def _places(lengths: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the time and the sequence of every step, in packed order."""
    time, sequence = np.nonzero(lengths[None, :] > np.arange(lengths.max(initial=0))[:, None])
    return time, sequence


def pad_sequence(sequences: Sequence[Tensor], batch_first: bool = False, padding_value: float = 0.0, padding_side: str = "right") -> Tensor:
    """Pad sequences ``(length, *)`` with ``padding_value`` to ``(longest, batch, *)``, or ``(batch, longest, *)``.

    >>> from netcl import tensor
    >>> pad_sequence([tensor([1.0, 2.0]), tensor([3.0])], batch_first=True).tolist()
    [[1.0, 2.0], [3.0, 0.0]]
    """
    longest = max(x.shape[0] for x in sequences)
    sides = [(longest - x.shape[0], 0) if padding_side == "left" else (0, longest - x.shape[0]) for x in sequences]
    padded = [ag.pad(x, (0, 0) * (x.ndim - 1) + side, value=padding_value) for x, side in zip(sequences, sides, strict=True)]
    return ag.stack(padded, axis=0 if batch_first else 1)


def unpad_sequence(padded_sequences: Tensor, lengths: Any, batch_first: bool = False) -> list[Tensor]:
    """Return the sequences of a padded tensor, without padding."""
    x = padded_sequences if batch_first else ag.transpose(padded_sequences, 0, 1)
    return [x[i, : int(length)] for i, length in enumerate(np.asarray(lengths))]


def invert_permutation(permutation: Tensor | None) -> Tensor | None:
    """Return the inverse of a permutation; ``None`` stays ``None``."""
    return None if permutation is None else ag.argsort(permutation)


def pack_padded_sequence(input: Tensor, lengths: Any, batch_first: bool = False, enforce_sorted: bool = True) -> PackedSequence:
    """Pack a padded tensor; the lengths must descend unless ``enforce_sorted=False``."""
    sizes = np.asarray(lengths, np.int64).reshape(-1)
    time, batch = input.shape[:2][:: -1 if batch_first else 1]
    if len(sizes) != batch or sizes.min(initial=1) < 1 or sizes.max(initial=1) > time:
        what = f"lengths must have a number from 1 to {time} for each sequence"
        raise ShapeError(message("pack_padded_sequence", what, lengths=sizes.tolist(), sequences=batch, **{"input.shape": input.shape}))
    order = np.arange(batch) if enforce_sorted else np.argsort(-sizes, kind="stable")
    if (np.diff(sizes[order]) > 0).any():
        remedy = "sort the batch, or pass enforce_sorted=False"
        raise ShapeError(message("pack_padded_sequence", "lengths must be in descending order", remedy, lengths=sizes.tolist()))
    step, sequence = _places(sizes[order])
    row = order[sequence] * time + step if batch_first else step * batch + order[sequence]
    data = _packed_rows(ag.reshape(input, (time * batch, *input.shape[2:])), row)
    indices = [None, None] if enforce_sorted else [Tensor.from_host(input.queue, i) for i in (order, np.argsort(order))]
    return PackedSequence(data, _on_host(np.bincount(step, minlength=sizes.max(initial=0))), *indices)


def pack_sequence(sequences: Sequence[Tensor], enforce_sorted: bool = True) -> PackedSequence:
    """Pack sequences ``(length, *)``."""
    return pack_padded_sequence(pad_sequence(sequences), [x.shape[0] for x in sequences], enforce_sorted=enforce_sorted)


def pad_packed_sequence(
    sequence: PackedSequence, batch_first: bool = False, padding_value: float = 0.0, total_length: int | None = None
) -> tuple[Tensor, Tensor]:
    """Return the padded tensor of packed sequences, and their lengths; the inverse of :func:`pack_padded_sequence`.

    >>> from netcl import ones
    >>> packed = pack_padded_sequence(ones((3, 2, 1)), [3, 1])
    >>> packed.batch_sizes.tolist(), pad_packed_sequence(packed)[0].shape
    ([2, 1, 1], (3, 2, 1))
    """
    lengths, data = sequence.lengths(), sequence.data
    time = int(lengths.max()) if total_length is None else total_length
    if time < lengths.max():
        raise ShapeError(message("pad_packed_sequence", f"total_length must be at least {int(lengths.max())}", total_length=total_length))
    index = np.full((time, len(lengths)), len(data))  # the row behind the last one is the padding
    index[_places(lengths)] = np.arange(len(data))
    order = np.arange(len(lengths)) if sequence.unsorted_indices is None else sequence.unsorted_indices.to_host()
    filled = ag.cat([data, Tensor.full((1, *data.shape[1:]), padding_value, data.dtype, queue=data.queue)], axis=0)
    return _packed_rows(filled, index[:, order].T if batch_first else index[:, order]), _on_host(lengths[order])


def unpack_sequence(packed_sequences: PackedSequence) -> list[Tensor]:
    """Return the sequences of a :class:`PackedSequence` as a list."""
    return unpad_sequence(*pad_packed_sequence(packed_sequences))
