"""Combination of a list of samples of equal structure into one batch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from netcl.data.errors import SampleError, message


class WholeBatch(NamedTuple):
    """A batch of any structure. If ``ended`` is true, it holds no samples: the worker's stream has no more batches."""

    value: Any
    ended: bool = False


def only_sample(convert: Callable[[Any], Any] | None, batch: Sequence[Any]) -> Any:
    """Return the only sample of a list, converted by ``convert`` if given: the ``collate_fn`` of loaders without batches."""
    return batch[0] if convert is None else convert(batch[0])


def is_structured(sample: Any) -> bool:
    """Whether a sample is or contains a dict, a named tuple or a string; lists inside of it are not searched."""
    if hasattr(sample, "_fields") or isinstance(sample, Mapping | str | bytes):
        return True
    return isinstance(sample, tuple | list) and any(is_structured(part) for part in sample if not isinstance(part, list))


def default_collate(batch: Sequence[Any]) -> Any:
    """Combine samples of equal structure: arrays and numbers are stacked, tuples and strings become lists, dicts and named tuples are kept.

    >>> default_collate([{"x": 1.0, "name": "a"}, {"x": 2.0, "name": "b"}])
    {'x': array([1., 2.]), 'name': ['a', 'b']}
    """
    first = batch[0]
    if hasattr(first, "__array__") or isinstance(first, int | float | complex):
        arrays = [np.asarray(sample) for sample in batch]
        if len({array.shape for array in arrays}) > 1:
            what, remedy = "samples of one batch must have equal shapes", "pad them, or pass a collate_fn"
            raise SampleError(message("default_collate", what, remedy, shapes=sorted({array.shape for array in arrays})))
        stacked = np.stack(arrays)
        if stacked.dtype.hasobject or (stacked.dtype.kind in "SU" and any(array.dtype.kind != stacked.dtype.kind for array in arrays)):
            raise _unlike(batch)
        return stacked
    if isinstance(first, str | bytes):
        if not all(isinstance(sample, type(first)) for sample in batch):
            raise _unlike(batch)
        return list(batch)
    if isinstance(first, Mapping):
        other = next((sample for sample in batch if not isinstance(sample, Mapping) or sample.keys() != first.keys()), None)
        if other is not None:
            keys = list(other) if isinstance(other, Mapping) else type(other).__name__
            what, remedy = "samples of one batch must have equal keys", "fill in the missing ones, or pass a collate_fn"
            raise SampleError(message("default_collate", what, remedy, keys=keys, first=list(first)))
        return {key: default_collate([sample[key] for sample in batch]) for key in first}
    if not isinstance(first, tuple | list):
        what = f"a sample must be arrays, numbers, strings, or dicts, tuples and lists of them, got {type(first).__name__}"
        raise SampleError(message("default_collate", what, "pass a collate_fn"))
    if not all(isinstance(sample, tuple | list) for sample in batch):
        raise _unlike(batch)
    if len({len(sample) for sample in batch}) > 1:
        raise SampleError(message("default_collate", "samples of one batch must have equal lengths", lengths=[len(s) for s in batch]))
    parts = [default_collate(part) for part in zip(*batch, strict=True)]
    return type(first)(*parts) if hasattr(first, "_fields") else parts


def _unlike(batch: Sequence[Any]) -> SampleError:
    types = sorted({type(sample).__name__ for sample in batch})
    return SampleError(message("default_collate", "samples of one batch must have equal types", "pass a collate_fn", types=types))


def map_arrays(function: Callable[[np.ndarray], Any], value: Any) -> Any:
    """Return ``value`` with every array in it replaced by ``function(array)``."""
    if isinstance(value, np.ndarray | np.generic):
        return function(np.asarray(value))
    if isinstance(value, Mapping):
        return {key: map_arrays(function, part) for key, part in value.items()}
    if isinstance(value, tuple | list):
        parts = [map_arrays(function, part) for part in value]
        return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
    return value
