"""Jacobians, Hessians and products with them, under the names of ``torch.autograd.functional``.

>>> import netcl
>>> from netcl.autograd import functional
>>> functional.hessian(lambda x: (x**3).sum(), netcl.tensor([1.0, 2.0])).tolist()
[[6.0, 0.0], [0.0, 12.0]]
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from netcl.autograd.backward_pass import grad
from netcl.autograd.ops import twin
from netcl.autograd.tape import Node, enable_grad
from netcl.core.errors import ShapeError, message
from netcl.core.tensor import Tensor

# ---- nested values


def leaves_of(tree: Any) -> list[Any]:
    """List the values in dicts, lists and tuples at any depth."""
    parts = tree.values() if isinstance(tree, dict) else tree
    return [leaf for part in parts for leaf in leaves_of(part)] if isinstance(tree, dict | list | tuple) else [tree]


def with_leaves(tree: Any, leaves: Iterator[Any]) -> Any:
    """Return ``tree`` with other leaves, in the order of :func:`leaves_of`."""
    if isinstance(tree, dict):
        return type(tree)((key, with_leaves(part, leaves)) for key, part in tree.items())
    if isinstance(tree, list | tuple):
        parts = [with_leaves(part, leaves) for part in tree]
        return type(tree)(*parts) if hasattr(tree, "_fields") else type(tree)(parts)
    return next(leaves)


# ---- derivatives of functions over flat tuples


def fresh(x: Tensor) -> Tensor:
    """Return a tensor that derivatives are taken with respect to: a recorded copy of a tensor that requires grad, else a leaf."""
    with enable_grad():
        return twin("clone")(x) if x.requires_grad else x.detach().requires_grad_()


def finished(result: Any, inputs: Sequence[Tensor]) -> Any:
    """Return a derivative. Its history is dropped if it leads only to ``inputs``, leaves that no other code refers to."""
    own, waiting, seen = {id(x) for x in inputs}, [result.grad_fn], set()
    while waiting:
        node = waiting.pop()
        if isinstance(node, Node) and id(node) not in seen:
            seen.add(id(node))
            ends = [edge[0] for edge in node.edges if edge is not None]
            if any(isinstance(end, Tensor) and id(end) not in own for end in ends):
                return result
            waiting += ends
    return result.detach()


def derivatives(out: Tensor, inputs: Sequence[Tensor], weights: Tensor | None = None) -> tuple[Tensor, ...]:
    """Return the recorded gradients of ``out`` with respect to ``inputs``, zeros where it does not depend on them."""
    if not out.requires_grad:
        return tuple(Tensor.zeros(x.shape, x.dtype, queue=x.queue) for x in inputs)
    return grad(out, inputs, weights, create_graph=True, materialize_grads=True)  # type: ignore[return-value]


def jacobian_of(out: Tensor, inputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Return the recorded derivative of every element of ``out``: a tensor of shape ``out.shape + x.shape`` per input."""
    with enable_grad():
        flat = out.reshape(-1)
        rows = [derivatives(flat[i], inputs) for i in range(out.numel())]
        return tuple(twin("stack")([row[k] for row in rows]).reshape((*out.shape, *x.shape)) for k, x in enumerate(inputs))


def tangent(outs: Sequence[Tensor], inputs: Sequence[Tensor], directions: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Return the directional derivative of each output, as the gradient of a gradient."""
    made = []
    for out in outs:
        weights = Tensor.zeros(out.shape, out.dtype, queue=out.queue, requires_grad=True)
        with enable_grad():
            back = derivatives(out, inputs, weights)
            total = sum(((g * d).sum() for g, d in zip(back, directions, strict=True)), Tensor.zeros((), out.dtype, queue=out.queue))
        made.append(derivatives(total, (weights,))[0])
    return tuple(made)


# ---- torch.autograd.functional


def _outputs_of(func: Callable[..., Any], inputs: Any, strict: bool) -> tuple[tuple[Tensor, ...], Any]:
    """Return fresh leaves for ``inputs``, and the outputs of ``func`` for them; torch's ``strict`` check is refused."""
    if strict:
        raise NotImplementedError(message("functional", "strict must be False: independent outputs have the derivative 0"))
    given = tuple(map(fresh, inputs if isinstance(inputs, tuple) else (inputs,)))
    with enable_grad():
        return given, func(*given)


def _as_result(made: Sequence[Tensor], given: Sequence[Tensor], create_graph: bool, single: bool) -> Any:
    made = tuple(x if create_graph else x.detach() for x in made)
    return made[0] if single else made


def jacobian(
    func: Callable[..., Any], inputs: Any, create_graph: bool = False, strict: bool = False, vectorize: bool = False,
    strategy: str = "reverse-mode",
) -> Any:  # fmt: skip
    """Return the derivatives of the outputs of ``func`` with respect to its inputs, nested in tuples where either are tuples."""
    given, out = _outputs_of(func, inputs, strict)
    single = not isinstance(inputs, tuple)
    made = [_as_result(jacobian_of(y, given), given, create_graph, single) for y in (out if isinstance(out, tuple) else (out,))]
    return tuple(made) if isinstance(out, tuple) else made[0]


def hessian(
    func: Callable[..., Any], inputs: Any, create_graph: bool = False, strict: bool = False, vectorize: bool = False,
    outer_jacobian_strategy: str = "reverse-mode",
) -> Any:  # fmt: skip
    """Return the second derivatives of a function with one value."""

    def gradient(*xs: Tensor) -> tuple[Tensor, ...]:
        return derivatives(_one_value("hessian", func(*xs)), xs)

    made = jacobian(gradient, inputs, create_graph, strict)
    return made if isinstance(inputs, tuple) else made[0]


def _one_value(name: str, out: Tensor) -> Tensor:
    if out.numel() != 1:
        raise ShapeError(message(name, "the function must return one value", shape=out.shape))
    return out.reshape(())


def vjp(func: Callable[..., Any], inputs: Any, v: Any = None, create_graph: bool = False, strict: bool = False) -> tuple[Any, Any]:
    """Return the outputs, and the product of ``v`` with the Jacobian."""
    given, out = _outputs_of(func, inputs, strict)
    made = derivatives(out, given, v)
    return out if create_graph else out.detach(), _as_result(made, given, create_graph, not isinstance(inputs, tuple))


def jvp(func: Callable[..., Any], inputs: Any, v: Any = None, create_graph: bool = False, strict: bool = False) -> tuple[Any, Any]:
    """Return the outputs, and the product of the Jacobian with ``v``."""
    given, out = _outputs_of(func, inputs, strict)
    if v is None and (len(given) > 1 or given[0].numel() != 1):
        raise ShapeError(message("jvp", "v must be given unless the input is one value", shapes=[x.shape for x in given]))
    directions = (Tensor.ones(given[0].shape, given[0].dtype, queue=given[0].queue),) if v is None else v if isinstance(v, tuple) else (v,)
    outs = out if isinstance(out, tuple) else (out,)
    made = _as_result(tangent(outs, given, directions), given, create_graph, not isinstance(out, tuple))
    return _as_result(outs, given, create_graph, not isinstance(out, tuple)), made


def hvp(func: Callable[..., Any], inputs: Any, v: Any = None, create_graph: bool = False, strict: bool = False) -> tuple[Any, Any]:
    """Return the value of a function, and the product of its Hessian with ``v``."""
    given, out = _outputs_of(func, inputs, strict)
    directions = v if isinstance(v, tuple) else (v,)
    with enable_grad():
        back = derivatives(_one_value("hvp", out), given)
        total = sum(((g * d).sum() for g, d in zip(back, directions, strict=True)), Tensor.zeros((), out.dtype, queue=out.queue))
    made = derivatives(total, given)
    return out if create_graph else out.detach(), _as_result(made, given, create_graph, not isinstance(inputs, tuple))


vhp = hvp  # the Hessian is symmetric
