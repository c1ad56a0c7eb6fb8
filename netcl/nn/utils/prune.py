"""``torch.nn.utils.prune``: a pruned parameter is the product of ``weight_orig``, a parameter, and ``weight_mask``, a buffer.

>>> from netcl import nn
>>> from netcl.nn.utils import prune
>>> layer = prune.l1_unstructured(nn.Linear(4, 2), "weight", amount=0.5)
>>> int((layer.weight == 0).sum().item()), sorted(layer.state_dict())
(4, ['bias', 'weight_mask', 'weight_orig'])
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import netcl.autograd as ag
from netcl.autograd import creation
from netcl.core.errors import ShapeError, message
from netcl.core.tensor import Tensor
from netcl.nn.module import Module
from netcl.nn.utils.parametrize import other_axes, put_back, recompute, taken


def _number_to_prune(amount: float, n: int) -> int:
    """Return how many of ``n`` elements to prune: ``amount`` is a number of elements or a fraction."""
    if not 0 <= amount <= (n if isinstance(amount, int) else 1.0):
        raise ValueError(message("prune", f"amount must be an integer from 0 to {n}, or a float from 0 to 1", amount=amount))
    return amount if isinstance(amount, int) else round(amount * n)


def is_pruned(module: Module) -> bool:
    """Whether a module, or one inside it, has a pruned parameter."""
    return any(name.endswith("_mask") for name, _ in module.named_buffers())


def custom_from_mask(module: Module, name: str, mask: Tensor) -> Module:
    """Prune the elements where ``mask`` is 0, in addition to elements pruned before; returns the module."""
    values = getattr(module, name)
    if mask.shape != values.shape:
        raise ShapeError(message("prune", "mask must have the shape of the parameter", mask=mask.shape, shape=values.shape))
    mask = mask.to(dtype=values.dtype)
    if hasattr(module, f"{name}_mask"):
        vars(module)[f"{name}_mask"].copy_(vars(module)[f"{name}_mask"] * mask)
        return module
    module.register_parameter(f"{name}_orig", taken(module, name, "prune"))
    module.register_buffer(f"{name}_mask", mask)
    recompute(module, name, lambda m: vars(m)[f"{name}_orig"] * vars(m)[f"{name}_mask"])
    return module


def remove(module: Module, name: str) -> Module:
    """Make the pruned values a plain parameter again; returns the module."""
    if not hasattr(module, f"{name}_mask"):
        raise ValueError(message("prune.remove", f"{name!r} must be a pruned parameter", module=type(module).__name__))
    pruned, own = getattr(module, name).detach(), vars(module)[f"{name}_orig"]
    for part in ("orig", "mask"):
        delattr(module, f"{name}_{part}")
    return put_back(module, name, pruned, own)


def _mask(scores: Tensor, kept: Tensor, amount: float) -> Tensor:
    """Return ``kept`` without the ``amount`` elements of least score that it still has."""
    flat = ag.where(kept.reshape(-1) > 0, scores.reshape(-1), float("inf"))
    lowest = flat.topk(_number_to_prune(amount, int((kept > 0).sum().item())), largest=False).indices
    return kept.reshape(-1).index_fill(0, lowest, 0.0).reshape(kept.shape)


def _current_mask(module: Module, name: str) -> Tensor:
    if hasattr(module, f"{name}_mask"):
        return vars(module)[f"{name}_mask"]
    return creation.CREATION_FUNCTIONS["ones_like"](getattr(module, name).detach())


def identity(module: Module, name: str) -> Module:
    """Give a parameter the form of a pruned one, without pruning it."""
    return custom_from_mask(module, name, _current_mask(module, name))


def l1_unstructured(module: Module, name: str, amount: float, importance_scores: Tensor | None = None) -> Module:
    """Prune the elements of least absolute value."""
    return custom_from_mask(module, name, _mask(_importance(module, name, importance_scores), _current_mask(module, name), amount))


def _importance(module: Module, name: str, importance_scores: Tensor | None) -> Tensor:
    """Return the absolute values of a parameter, or of the scores that are given for it."""
    values = getattr(module, name).detach()
    if importance_scores is not None and importance_scores.shape != values.shape:
        what = "importance_scores must have the shape of the parameter"
        raise ShapeError(message("prune", what, scores=importance_scores.shape, shape=values.shape))
    return ag.abs(values if importance_scores is None else importance_scores)


def random_unstructured(module: Module, name: str, amount: float) -> Module:
    """Prune random elements."""
    kept = _current_mask(module, name)
    return custom_from_mask(module, name, _mask(creation.CREATION_FUNCTIONS["rand"](kept.shape, queue=kept.queue), kept, amount))


def _slices(module: Module, name: str, scores: Tensor, amount: float, dim: int) -> Module:
    kept = _current_mask(module, name)
    axis, others = other_axes(dim, kept.ndim, "prune")
    shape = [kept.shape[axis] if a == axis else 1 for a in range(kept.ndim)]
    alive = ag.amax(kept, others)
    return custom_from_mask(module, name, kept * _mask(scores, alive, amount).reshape(shape))


def ln_structured(module: Module, name: str, amount: float, n: float, dim: int, importance_scores: Tensor | None = None) -> Module:
    """Prune the slices along ``dim`` of least n-norm."""
    values = getattr(module, name).detach() if importance_scores is None else importance_scores
    return _slices(module, name, ag.norm(values, n, other_axes(dim, values.ndim, "prune")[1]), amount, dim)


def random_structured(module: Module, name: str, amount: float, dim: int) -> Module:
    """Prune random slices along ``dim``."""
    values = getattr(module, name)
    return _slices(module, name, creation.CREATION_FUNCTIONS["rand"]((values.shape[dim],), queue=values.queue), amount, dim)


L1Unstructured, RandomUnstructured = l1_unstructured, random_unstructured  # names of the method of global_unstructured


def global_unstructured(
    parameters: Sequence[tuple[Module, str]], pruning_method: Any, importance_scores: Any = None, *, amount: float
) -> None:
    """Prune the elements of least absolute value, or random ones, of several parameters together."""
    if pruning_method not in (l1_unstructured, random_unstructured):
        what = "pruning_method must be L1Unstructured or RandomUnstructured"
        raise ValueError(message("global_unstructured", what, given=pruning_method))
    kept = [_current_mask(module, name) for module, name in parameters]
    if pruning_method is l1_unstructured:
        scores = [_importance(m, name, (importance_scores or {}).get((m, name))) for m, name in parameters]
    else:
        scores = [creation.CREATION_FUNCTIONS["rand"](mask.shape, queue=mask.queue) for mask in kept]
    flat = _mask(ag.cat([x.reshape(-1) for x in scores]), ag.cat([x.reshape(-1) for x in kept]), amount)
    for (module, name), mask, part in zip(parameters, kept, ag.split(flat, [x.numel() for x in kept]), strict=True):
        custom_from_mask(module, name, part.reshape(mask.shape))
