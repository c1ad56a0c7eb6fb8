"""``fuse_graph``: runs a model in evaluation mode, or a step, in fewer and larger kernels.

Batch norms that follow a convolution or a linear layer are folded into its weights, since both are linear in evaluation. The rest is
recorded with ``fuse=True``.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any

import numpy as np

from netcl.core.errors import ShapeError, message
from netcl.core.hooks import hooks
from netcl.core.tensor import Tensor
from netcl.replay.compiled import CompiledFunction, compile
from netcl.replay.graph import tensors_in

# The largest relative difference between the outputs of a folded model and the model: halves are rounded between layers.
CLOSE = {"float16": 4e-3, "bfloat16": 3e-2}
OTHERS_CLOSE = 1e-3


def fuse_graph(target: Callable[..., Any], *example: Any) -> Any:
    """Fold the batch norms of a model in evaluation mode, or record a function with fused ops; the result is called as before.

    A model is copied, not changed. One call with ``example`` determines the order of layers and checks the folded model's outputs;
    without it, only a sequential model is folded. ``folded`` of the result names the layers whose norm was removed. A model in
    training mode raises, because its batch norms are not linear.

    >>> import numpy as np
    >>> from netcl import nn
    >>> from netcl.replay.fold_batchnorm import fuse_graph
    >>> model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.ReLU()).eval()
    >>> x = np.ones((1, 1, 4, 4), np.float32)
    >>> fused = fuse_graph(model, x)
    >>> fused.folded
    ['0']
    >>> bool(np.allclose(fused(x).to_host(), model(x).to_host(), atol=1e-5))
    True
    """
    if isinstance(target, CompiledFunction):
        target = target.function
    if not callable(target):
        raise TypeError(message("fuse_graph", "the argument must be a model or a function", given=type(target).__name__))
    model: Any = target
    if not (hasattr(model, "forward") and hasattr(model, "training")):
        made = compile(target, fuse=True)
        made.folded = []
        return made
    if model.training:
        raise ShapeError(message("fuse_graph", "the model must be in evaluation mode", "call model.eval() first"))
    model, folded = _folded_copy(model, example)
    made = compile(model, fuse=True)
    made.__dict__["folded"] = folded
    return made


def _folded_copy(model: Any, example: tuple[Any, ...]) -> tuple[Any, list[str]]:
    """Return a copy with every fold that preserves the outputs; a layer whose output is also used elsewhere is skipped."""
    pairs = _pairs_called(model, example) if example else _neighbours(model)
    made = copy.deepcopy(model)
    for first, norm in pairs:
        _fold_norm(made, first, norm)
    if not example or _agree(model, made, example):
        return made, [first for first, _ in pairs]
    made, kept = copy.deepcopy(model), []
    for first, norm in pairs:
        trial = copy.deepcopy(made)
        _fold_norm(trial, first, norm)
        if _agree(model, trial, example):
            made = trial
            kept.append(first)
    return made, kept


# ---- order of layers


def _is_norm(module: Any) -> bool:
    """Whether a module normalizes by running statistics, which is linear in evaluation only."""
    if getattr(module, "training", True):
        return False
    return getattr(module, "running_mean", None) is not None and hasattr(module, "eps") and hasattr(module, "num_features")


def _is_linear(module: Any) -> bool:
    """Whether a module is a convolution or a linear layer, with one filter per row of the weight."""
    weight = getattr(module, "weight", None)
    sizes = hasattr(module, "out_channels") or hasattr(module, "out_features")
    return sizes and isinstance(weight, Tensor) and weight.ndim >= 2 and not getattr(module, "transposed", False)


def _channels_match(layer: Any, norm: Any) -> bool:
    """Whether there are as many channels as filters."""
    return layer.weight.shape[0] == norm.num_features


def _runs_in_order(module: Any) -> bool:
    """Whether a module is known to call each of its children once, each with the previous result."""
    kinds: list[Any] = [kind for kind in type(module).__mro__ if kind.__name__ == "Sequential"]
    return bool(kinds) and type(module).forward is kinds[-1].forward and not module._module_hooks


def _layers_in_order(module: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the layers of nested sequences with their names, in call order."""
    for name, child in module.named_children():
        where = f"{path}.{name}" if path else name
        if _runs_in_order(child):
            yield from _layers_in_order(child, where)
        else:
            yield where, child


def _neighbours(model: Any) -> list[tuple[str, str]]:
    """List consecutive pairs of a sequential model. Other models may call a layer from several places."""
    layers = list(_layers_in_order(model)) if _runs_in_order(model) else []
    used = Counter(id(layer) for _, layer in layers)
    used.update(id(part) for module in model.modules() for part in vars(module).values() if isinstance(part, Tensor))
    pairs = [(a, b) for a, b in pairwise(layers) if _is_linear(a[1]) and _is_norm(b[1]) and _channels_match(a[1], b[1])]
    alone = [pair for pair in pairs if all(used[id(m)] == 1 and _as_it_was_made(m) for _, m in pair)]
    return [(a, b) for (a, first), (b, _) in alone if all(used[id(part)] == 1 for part in (first.weight, first.bias) if part is not None)]


def _as_it_was_made(module: Any) -> bool:
    """Whether a module behaves as its class defines: no hooks, and no overridden forward."""
    return not module._module_hooks and module.forward.__module__.startswith("netcl.nn.")


def _pairs_called(model: Any, example: tuple[Any, ...]) -> list[tuple[str, str]]:
    """List pairs of layers of which the second was called with the result of the first, each called once."""
    made_by: dict[int, tuple[str, Any]] = {}
    held: list[Any] = []
    calls: dict[str, int] = {}
    pairs: list[tuple[str, str]] = []

    def listener(name: str, module: Any) -> Callable[..., None]:
        def listen(_: Any, args: tuple[Any, ...], output: Any) -> None:
            calls[name] = calls.get(name, 0) + 1
            held.extend((output, *args))  # an id is unique as long as the tensor is alive
            if _is_linear(module):
                made_by[id(output)] = (name, module)
            elif args and id(args[0]) in made_by:
                first, layer = made_by[id(args[0])]
                if _channels_match(layer, module) and (_by_channel(layer) or args[0].ndim == 2):
                    pairs.append((first, name))

        return listen

    modules = [(name, module) for name, module in model.named_modules() if _is_linear(module) or _is_norm(module)]
    handles = [module.register_forward_hook(listener(name, module)) for name, module in modules]
    try:
        _run_example(model, example)
    finally:
        for handle in handles:
            handle.remove()
    return [(first, norm) for first, norm in pairs if calls[first] == 1 and calls[norm] == 1]


def _run_example(model: Any, example: tuple[Any, ...]) -> list[Tensor]:
    with hooks.call("no_grad"):
        return tensors_in(model(*example))


def _agree(model: Any, other: Any, example: tuple[Any, ...]) -> bool:
    return all(_outputs_close(a, b) for a, b in zip(_run_example(model, example), _run_example(other, example), strict=True))


def _outputs_close(a: Tensor, b: Tensor) -> bool:
    x, y = a.to_host().astype(np.float64), b.to_host().astype(np.float64)
    return bool(np.abs(x - y).max(initial=0.0) <= CLOSE.get(a.dtype, OTHERS_CLOSE) * np.abs(x).max(initial=0.0))


# ---- folding


def _fold_norm(model: Any, first: str, norm: str) -> None:
    """Fold ``(w x + b - mean) / sqrt(var + eps) * gamma + beta`` to ``w' x + b'``; the norm then returns its input."""
    modules = dict(model.named_modules())
    layer, of = modules[first], modules[norm]
    channels = of.num_features
    gamma = np.ones(channels) if of.weight is None else of.weight.to_host().astype(np.float64)
    beta = np.zeros(channels) if of.bias is None else of.bias.to_host().astype(np.float64)
    scale = gamma / np.sqrt(of.running_var.to_host().astype(np.float64) + of.eps)
    before = np.zeros(channels) if layer.bias is None else layer.bias.to_host().astype(np.float64)
    weight = layer.weight.to_host().astype(np.float64)
    layer.weight.write(weight * scale.reshape(-1, *(1,) * (weight.ndim - 1)))
    bias = (before - of.running_mean.to_host()) * scale + beta
    if layer.bias is None:
        layer.bias = Tensor.from_host(layer.weight.queue, bias, layer.weight.dtype, requires_grad=layer.weight.requires_grad)
    else:
        layer.bias.write(bias)
    of.forward = _pass_on if _by_channel(layer) else _pass_vectors_on


def _by_channel(layer: Any) -> bool:
    """Whether the filters of a layer are the channels of its output for any number of dimensions."""
    return hasattr(layer, "out_channels")


def _pass_on(x: Tensor) -> Tensor:
    return x


def _pass_vectors_on(x: Tensor) -> Tensor:
    if x.ndim != 2:
        what = "x must be a batch of vectors: a norm over channels was folded into a linear layer"
        raise ShapeError(message("fuse_graph", what, "pass an example of this shape to fuse_graph", shape=x.shape))
    return x
