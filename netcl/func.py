"""Transforms of functions under the names of ``torch.func``. Arguments may be nested in dicts, lists and tuples.

``vmap`` calls the function once per sample and stacks the results: it gives torch's values, not torch's speed.

>>> import netcl
>>> from netcl.func import grad, vmap
>>> vmap(grad(lambda x: (x**3).sum()))(netcl.tensor([[1.0], [2.0]])).tolist()
[[3.0], [12.0]]
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from netcl.autograd.functional import derivatives, finished, fresh, jacobian_of, leaves_of, tangent, with_leaves
from netcl.autograd.ops import twin
from netcl.autograd.tape import enable_grad
from netcl.core.device import get_active_device
from netcl.core.errors import ShapeError, message
from netcl.core.tensor import Tensor
from netcl.ops import random

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


def _dims(name: str, dims: object, tree: object) -> list[int | None]:
    """Return the dimension of each leaf of ``tree``; ``None`` for leaves that every call gets whole."""
    if dims is None or (isinstance(dims, int) and not isinstance(dims, bool)):
        return [dims] * len(leaves_of(tree))
    if isinstance(dims, dict) and isinstance(tree, dict) and [*dims] == [*tree]:
        pairs = zip(dims.values(), tree.values(), strict=True)
    elif isinstance(dims, list | tuple) and isinstance(tree, list | tuple) and len(dims) == len(tree):
        pairs = zip(dims, tree, strict=True)
    else:
        what = f"{name} must be an integer, None, or nested like the {'results' if name == 'out_dims' else 'arguments'}"
        raise ValueError(message("vmap", what, given=dims))
    return [dim for part in pairs for dim in _dims(name, *part)]


def _mapped_size(x: object, dim: int | None) -> int | None:
    """Return the size of ``x`` along a dimension that is mapped."""
    if dim is None:
        return None
    if not isinstance(x, Tensor):
        raise ValueError(
            message("vmap", "only tensors can be mapped", "set in_dims to None for the others", dim=dim, given=type(x).__name__)
        )
    if not -x.ndim <= dim < x.ndim:
        raise ShapeError(message("vmap", "in_dims must be a dimension of the argument", dim=dim, shape=x.shape))
    return x.shape[dim]


def vmap(func: Callable[..., Any], in_dims: Any = 0, out_dims: Any = 0, randomness: str = "error", *, chunk_size: Any = None) -> Any:
    """Return a function that calls ``func`` for each slice of its arguments along ``in_dims`` and stacks the results along ``out_dims``.

    - **randomness**: ``"different"`` draws other random numbers in every call, ``"same"`` the same in all calls; ``"error"`` raises when
      ``func`` draws random numbers.
    - **chunk_size** has no effect: one sample is computed at a time.
    """
    if randomness not in ("error", "same", "different"):
        raise ValueError(message("vmap", "randomness must be 'error', 'same' or 'different'", randomness=repr(randomness)))
    if chunk_size is not None and chunk_size < 1:
        raise ValueError(message("vmap", "chunk_size must be positive or None", chunk_size=chunk_size))

    def call(*args: Any, **kwargs: Any) -> Any:
        leaves, dims = leaves_of(args), _dims("in_dims", in_dims, args)
        lengths = [_mapped_size(x, dim) for x, dim in zip(leaves, dims, strict=True)]
        sizes = {size for size in lengths if size is not None}
        if len(sizes) != 1:
            raise ShapeError(message("vmap", "the mapped dimensions must have one common size", sizes=sorted(sizes), in_dims=in_dims))
        count = sizes.pop()
        if not count:
            raise ShapeError(message("vmap", "the mapped dimensions must not be empty", "the function is not called", in_dims=in_dims))
        made = []
        with ExitStack() as stack:
            if randomness == "error":
                what = "the function must not draw random numbers"
                text = message("vmap", what, "pass randomness='same' or 'different'", randomness="'error'")
                for queue in {get_active_device().queue, *(x.queue for x in leaves if isinstance(x, Tensor))}:
                    stack.enter_context(random.without_numbers(queue, text))
            back = random.repeating() if randomness == "same" else None
            for i in range(count):
                sample = [x if dim is None else x.select(dim, i) for x, dim in zip(leaves, dims, strict=True)]
                if back is not None:
                    back()
                made.append(func(*with_leaves(args, iter(sample)), **kwargs))
        return _stacked(made)

    def _stacked(made: list[Any]) -> Any:
        single = isinstance(made[0], Tensor) and isinstance(out_dims, list | tuple) and len(out_dims) == 1
        ends = _dims("out_dims", out_dims[0] if single else out_dims, made[0])
        for x, end in zip(leaves_of(made[0]), ends, strict=True):
            if not isinstance(x, Tensor) or end is None:
                what = "the function must return tensors, which are stacked along out_dims"
                raise ValueError(message("vmap", what, "return other values outside of vmap", given=type(x).__name__, out_dims=out_dims))
        columns = zip(*map(leaves_of, made), strict=True)
        return with_leaves(made[0], iter([twin("stack")(list(column), end) for column, end in zip(columns, ends, strict=True)]))

    return call


@contextmanager
def _holding(module: Any, tensors: dict[str, Any], tied: bool = True) -> Iterator[None]:
    """Put tensors in place of parameters and buffers, under every name that these have if ``tied``."""
    held = {}
    for path, part in module.named_modules(remove_duplicate=False):
        for name, tensor in (*part.named_parameters(recurse=False, remove_duplicate=False), *part.named_buffers(recurse=False)):
            held[f"{path}.{name}".lstrip(".")] = part, name, tensor
    if unknown := [name for name in tensors if name not in held]:
        raise ValueError(message("functional_call", f"the module must have a parameter or buffer {unknown[0]!r}", has=list(held)[:8]))
    key = {name: id(entry[2]) if tied else name for name, entry in held.items()}
    replaced: dict[Any, Any] = {}
    for name, tensor in tensors.items():
        if replaced.setdefault(key[name], tensor) is not tensor:
            what = f"{name!r} is the same parameter as another name that has another tensor"
            raise ValueError(message("functional_call", what, "pass tie_weights=False"))
    changed = [(*entry, replaced[key[path]]) for path, entry in held.items() if key[path] in replaced]
    counters = [(*entry, entry[2].clone()) for entry in changed if isinstance(getattr(type(entry[0]), entry[1], None), property)]
    for part, name, _, given in changed:
        vars(part)[name] = given
    for part, name, _, given, _ in counters:  # of batches, which a batch norm keeps as a number
        setattr(part, name, given)
    try:
        yield
    finally:
        for part, name, _, given, count in counters:
            given.copy_(getattr(part, name))
            setattr(part, name, count)
        for part, name, tensor, _ in changed:
            vars(part)[name] = tensor


def functional_call(
    module: Any, parameter_and_buffer_dicts: Any, args: Any = None, kwargs: Any = None, *, tie_weights: bool = True, strict: bool = False
) -> Any:
    """Call a module with tensors in place of its parameters and buffers, named as in its state dict; all of them if ``strict``."""
    given = parameter_and_buffer_dicts
    parts = [given] if isinstance(given, dict) else list(given)
    tensors = {name: x for part in parts for name, x in part.items()}
    if len(tensors) != sum(map(len, parts)):
        raise ValueError(message("functional_call", "every name must be in one dictionary only", names=[list(part)[:8] for part in parts]))
    names = [name for name, _ in (*module.named_parameters(), *module.named_buffers())] if strict else []
    if missing := [name for name in names if name not in tensors]:
        raise ValueError(message("functional_call", "strict=True requires every parameter and buffer", missing=missing[:8]))
    with _holding(module, tensors, tie_weights):
        return module(*(args if isinstance(args, tuple) else () if args is None else (args,)), **(kwargs or {}))


def stack_module_state(models: Any) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return the parameters and the buffers of modules of one kind, each stacked along a new first dimension."""
    models = list(models)
    parameters, buffers = (
        {name: twin("stack")([dict(getattr(m, kind)())[name].detach() for m in models]) for name, _ in getattr(models[0], kind)()}
        for kind in ("named_parameters", "named_buffers")
    )
    return {name: x.requires_grad_() for name, x in parameters.items()}, buffers
