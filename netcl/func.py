"""Transforms of functions under the names of ``torch.func``. Arguments may be nested in dicts, lists and tuples.

``vmap`` calls the function once per sample and stacks the results: it gives torch's values, not torch's speed.

>>> import netcl
>>> from netcl.func import grad, vmap
>>> vmap(grad(lambda x: (x**3).sum()))(netcl.tensor([[1.0], [2.0]])).tolist()
[[3.0], [12.0]]
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from netcl.autograd.functional import derivatives, finished, fresh, jacobian_of, leaves_of, tangent, with_leaves
from netcl.autograd.ops import twin
from netcl.autograd.tape import enable_grad
from netcl.core.errors import ShapeError, message
from netcl.core.tensor import Tensor

__all__ = ["functional_call", "grad", "grad_and_value", "hessian", "jacfwd", "jacrev", "jvp", "stack_module_state", "vjp", "vmap"]


def _call_with_leaves(
    func: Callable[..., Any], args: tuple[Any, ...], argnums: Any, has_aux: bool, kwargs: Any
) -> tuple[Any, list[Tensor], Any, Any]:
    """Call ``func``. Returns the chosen arguments, their fresh leaves, the output and the auxiliary output."""
    single = isinstance(argnums, int)
    chosen = args[argnums] if single else tuple(args[i] for i in argnums)
    leaves = [fresh(x) for x in leaves_of(chosen)]
    placed = with_leaves(chosen, iter(leaves))
    given = list(args)
    for i, value in [(argnums, placed)] if single else zip(argnums, placed, strict=True):
        given[i] = value
    with enable_grad():
        out = func(*given, **kwargs)
    return chosen, leaves, *(out if has_aux else (out, None))


def _finished_output(out: Any, leaves: list[Tensor]) -> Any:
    return with_leaves(out, iter([finished(x, leaves) if isinstance(x, Tensor) else x for x in leaves_of(out)]))


def grad_and_value(func: Callable[..., Any], argnums: Any = 0, has_aux: bool = False) -> Callable[..., Any]:
    """Return a function that returns the gradient of ``func``, which must return one value, and that value."""

    def call(*args: Any, **kwargs: Any) -> Any:
        chosen, leaves, out, aux = _call_with_leaves(func, args, argnums, has_aux, kwargs)
        if not isinstance(out, Tensor) or out.numel() != 1:
            raise ShapeError(message("func.grad", "the function must return a tensor with one value", shape=getattr(out, "shape", None)))
        made = [finished(g, leaves) for g in derivatives(out, leaves)]
        value = _finished_output((out, aux), leaves) if has_aux else _finished_output(out, leaves)
        return with_leaves(chosen, iter(made)), value

    return call


def grad(func: Callable[..., Any], argnums: Any = 0, has_aux: bool = False) -> Callable[..., Any]:
    """Return a function that returns the gradient of ``func`` with respect to the arguments ``argnums``; with ``has_aux`` a pair."""

    def call(*args: Any, **kwargs: Any) -> Any:
        made, value = grad_and_value(func, argnums, has_aux)(*args, **kwargs)
        return (made, value[1]) if has_aux else made

    return call


def jacrev(func: Callable[..., Any], argnums: Any = 0, has_aux: bool = False, **unused: Any) -> Callable[..., Any]:
    """Return a function that returns the Jacobian of ``func`` with respect to the arguments ``argnums``."""

    def call(*args: Any, **kwargs: Any) -> Any:
        chosen, leaves, out, aux = _call_with_leaves(func, args, argnums, has_aux, kwargs)
        rows = [with_leaves(chosen, iter([finished(j, leaves) for j in jacobian_of(y, leaves)])) for y in leaves_of(out)]
        made = with_leaves(out, iter(rows))
        return (made, _finished_output(aux, leaves)) if has_aux else made

    return call


jacfwd = jacrev


def hessian(func: Callable[..., Any], argnums: Any = 0) -> Callable[..., Any]:
    """Return a function that returns the second derivatives of ``func``."""
    return jacrev(jacrev(func, argnums), argnums)


def vjp(func: Callable[..., Any], *primals: Any, has_aux: bool = False) -> tuple[Any, ...]:
    """Return the output of ``func``, and a function from its cotangents to those of ``primals``."""
    chosen, leaves, out, aux = _call_with_leaves(func, primals, tuple(range(len(primals))), has_aux, {})

    def pull(cotangents: Any, **unused: Any) -> Any:
        pairs = list(zip(leaves_of(out), leaves_of(cotangents), strict=True))
        with enable_grad():
            parts = [derivatives(y, leaves, weights) for y, weights in pairs]
            made = [finished(sum(column[1:], column[0]), leaves) for column in zip(*parts, strict=True)]
        return with_leaves(chosen, iter(made))

    return (_finished_output(out, leaves), pull, _finished_output(aux, leaves)) if has_aux else (_finished_output(out, leaves), pull)


def jvp(func: Callable[..., Any], primals: Any, tangents: Any, *, strict: bool = False, has_aux: bool = False) -> tuple[Any, ...]:
    """Return the output of ``func``, and its derivative in the direction of ``tangents``."""
    if strict:
        raise NotImplementedError(message("func.jvp", "strict must be False: independent outputs have the derivative 0"))
    _, leaves, out, aux = _call_with_leaves(func, tuple(primals), tuple(range(len(primals))), has_aux, {})
    made = with_leaves(out, iter([finished(t, leaves) for t in tangent(leaves_of(out), leaves, leaves_of(tangents))]))
    return (_finished_output(out, leaves), made, _finished_output(aux, leaves)) if has_aux else (_finished_output(out, leaves), made)


def _dims(in_dims: Any, tree: Any) -> list[int | None]:
    """Return the dimension of each leaf that ``vmap`` walks along; ``None`` for leaves that every call gets whole."""
    if isinstance(in_dims, int) or in_dims is None:
        return [in_dims] * len(leaves_of(tree))
    parts = zip(in_dims.values(), tree.values(), strict=True) if isinstance(in_dims, dict) else zip(in_dims, tree, strict=True)
    return [dim for dims, part in parts for dim in _dims(dims, part)]


def vmap(func: Callable[..., Any], in_dims: Any = 0, out_dims: Any = 0, randomness: str = "error", *, chunk_size: Any = None) -> Any:
    """Return a function that calls ``func`` for each slice of its arguments along ``in_dims`` and stacks the results along ``out_dims``.

    Every call draws random numbers of its own; ``randomness`` and ``chunk_size`` are ignored.
    """

    def call(*args: Any, **kwargs: Any) -> Any:
        leaves, dims = leaves_of(args), _dims(in_dims if isinstance(in_dims, int) else tuple(in_dims), args)
        sizes = {x.shape[dim] for x, dim in zip(leaves, dims, strict=True) if dim is not None}
        if len(sizes) != 1:
            raise ShapeError(message("vmap", "the mapped dimensions must have one common size", sizes=sorted(sizes), in_dims=in_dims))
        made = []
        for i in range(sizes.pop()):
            sample = [x if dim is None else x.select(dim, i) for x, dim in zip(leaves, dims, strict=True)]
            made.append(func(*with_leaves(args, iter(sample)), **kwargs))
        ends = _dims(out_dims, made[0])
        columns = zip(*map(leaves_of, made), strict=True)
        return with_leaves(made[0], iter([twin("stack")(list(column), end) for column, end in zip(columns, ends, strict=True)]))

    return call


@contextmanager
def _holding(module: Any, tensors: dict[str, Any]) -> Iterator[None]:
    """Put tensors in place of parameters and buffers, under every name that these have."""
    held = {}
    for path, part in module.named_modules(remove_duplicate=False):
        for name, tensor in (*part.named_parameters(recurse=False, remove_duplicate=False), *part.named_buffers(recurse=False)):
            held[f"{path}.{name}".lstrip(".")] = part, name, tensor
    if unknown := [name for name in tensors if name not in held]:
        raise ValueError(message("functional_call", f"the module must have a parameter or buffer {unknown[0]!r}", has=list(held)[:8]))
    replaced = {id(held[name][2]): tensor for name, tensor in tensors.items()}
    changed = [entry for entry in held.values() if id(entry[2]) in replaced]
    for part, name, tensor in changed:
        vars(part)[name] = replaced[id(tensor)]
    try:
        yield
    finally:
        for part, name, tensor in changed:
            vars(part)[name] = tensor


def functional_call(
    module: Any, parameter_and_buffer_dicts: Any, args: Any = None, kwargs: Any = None, *, tie_weights: bool = True, strict: bool = False
) -> Any:
    """Call a module with tensors in place of its parameters and buffers, named as in its state dict; all of them if ``strict``."""
    given = parameter_and_buffer_dicts
    tensors = dict(given) if isinstance(given, dict) else {name: x for part in given for name, x in part.items()}
    names = [name for name, _ in (*module.named_parameters(), *module.named_buffers())] if strict else []
    if missing := [name for name in names if name not in tensors]:
        raise ValueError(message("functional_call", "strict=True requires every parameter and buffer", missing=missing[:8]))
    with _holding(module, tensors):
        return module(*(args if isinstance(args, tuple) else () if args is None else (args,)), **(kwargs or {}))


def stack_module_state(models: Any) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return the parameters and the buffers of modules of one kind, each stacked along a new first dimension."""
    models = list(models)
    parameters, buffers = (
        {name: twin("stack")([dict(getattr(m, kind)())[name].detach() for m in models]) for name, _ in getattr(models[0], kind)()}
        for kind in ("named_parameters", "named_buffers")
    )
    return {name: x.requires_grad_() for name, x in parameters.items()}, buffers
