"""``Function``, an op with a user-defined gradient, and ``checkpoint``, which trades time for memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any

from netcl.amp.autocast import autocast, get_autocast_dtype
from netcl.autograd.backward_pass import run_backward
from netcl.autograd.tape import Node, edges_to, enable_grad, grad_mode, intact, modes, no_grad, recording
from netcl.core.device import get_active_device
from netcl.core.errors import message
from netcl.core.nested import map_leaves, tensors_in
from netcl.core.tensor import Tensor
from netcl.core.writes import clock
from netcl.ops import random


def move(x: Tensor, queue: Any) -> Tensor:
    """Return a copy of ``x`` on another device, whose gradient is moved back to the device of ``x``."""
    out = x.detach().to(queue)
    if recording((x,)):
        Node("to", lambda node, F, grads: [grads[0].to(node.saved)], *edges_to((x,)), x.queue).attach((out,))
    return out


class Context:
    """The values that ``forward`` passes to ``backward``: tensors by ``save_for_backward``, others as attributes."""

    def __init__(self) -> None:
        self.saved_tensors: tuple[Any, ...] = ()
        self.needs_input_grad: tuple[bool, ...] = ()
        self._integral: tuple[Any, ...] = ()
        self._are_tensors: list[bool] = []  # per result of forward
        self._makes_zeros = True

    def save_for_backward(self, *tensors: Any) -> None:
        """Keep tensors for backward, which reads them as ``saved_tensors``."""
        self.saved_tensors = tensors

    def mark_non_differentiable(self, *outputs: Tensor) -> None:
        """Exclude results of ``forward``, such as indices, from the gradient."""
        self._integral = outputs

    def set_materialize_grads(self, value: bool) -> None:
        """Set whether ``backward`` gets zeros (the default) or ``None`` for results without a gradient."""
        self._makes_zeros = value

    def mark_dirty(self, *tensors: Tensor) -> None:
        """Raise: ``forward`` must not modify its arguments."""
        raise NotImplementedError(message("Function", "forward must not modify its arguments in place", "return a new tensor"))


class Function:
    """The base class of an op with a user-defined gradient; call the op by ``apply``.

    >>> import netcl.autograd as ag
    >>> class Cube(ag.Function):
    ...     @staticmethod
    ...     def forward(ctx, x):
    ...         ctx.save_for_backward(x)
    ...         return x * x * x
    ...     @staticmethod
    ...     def backward(ctx, g):
    ...         (x,) = ctx.saved_tensors
    ...         return g * 3.0 * x * x
    >>> x = ag.tensor([2.0], requires_grad=True)
    >>> Cube.apply(x).backward()
    >>> x.grad.tolist()
    [12.0]
    """

    #: ``setup_context(ctx, inputs, output)``, if defined, saves tensors for backward; ``forward`` then has no ``ctx``.
    setup_context: Callable[..., None] | None = None

    @staticmethod
    def forward(*args: Any, **kwargs: Any) -> Any:
        """Compute the result of ``forward(ctx, ...)``; ops in here are not recorded."""
        raise NotImplementedError(message("Function", "forward must be defined by the subclass"))

    @staticmethod
    def backward(ctx: Context, *gradients: Any) -> Any:
        """Return one gradient, or ``None``, per positional argument of ``forward``."""
        raise NotImplementedError(message("Function", "backward must be defined by the subclass"))

    @classmethod
    def apply(cls, *args: Any, **kwargs: Any) -> Any:
        """Run ``forward``, record the call if an argument requires a gradient, and return the result."""
        ctx = Context()
        ctx.needs_input_grad = tuple(isinstance(x, Tensor) and x.requires_grad for x in args)
        with no_grad():
            out = cls.forward(*args, **kwargs) if cls.setup_context is not None else cls.forward(ctx, *args, **kwargs)
            if cls.setup_context is not None:
                cls.setup_context(ctx, args, out)
        if not recording(args):
            return out
        results = [r.detach() if r is not None and any(r is x for x in args) else r for r in (out if isinstance(out, tuple) else (out,))]
        ctx._are_tensors = [isinstance(r, Tensor) for r in results]
        Node(cls.__name__, _function_rule(cls), *edges_to(args), ctx).attach([r for r in results if isinstance(r, Tensor)])
        for r in results:
            if any(r is x for x in ctx._integral):
                r.grad_fn, r.requires_grad = None, False
        return tuple(results) if isinstance(out, tuple) else results[0]


class _Once(Function):
    """The identity of the gradients behind an ``anchor`` that requires a gradient, which raises when it is differentiated."""

    @staticmethod
    def forward(ctx: Context, anchor: Tensor, *gradients: Any) -> Any:
        return gradients

    @staticmethod
    def backward(ctx: Context, *gradients: Any) -> Any:
        remedy = "remove the decorator, if its ops can be recorded"
        raise RuntimeError(message("once_differentiable", "a backward with this decorator cannot be differentiated", remedy))


def once_differentiable(backward: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate ``Function.backward`` so that its ops are not recorded; a gradient of its gradients raises."""

    @wraps(backward)
    def run(ctx: Context, *gradients: Any) -> Any:
        with no_grad():
            found = backward(ctx, *gradients)
        found = found if isinstance(found, tuple) else (found,)
        return _Once.apply(Tensor.zeros((), requires_grad=True), *found) if grad_mode.get() else found

    return run


def _function_rule(cls: type[Function]) -> Callable[..., Sequence[Any]]:
    def rule(node: Node, F: Any, grads: Sequence[Any]) -> Sequence[Any]:
        queue, given = next(g for g in grads if g is not None).queue, zip(grads, node.outputs, strict=True)
        makes = node.saved._makes_zeros
        zeros = iter([Tensor.zeros(like.shape, like.dtype, queue=queue) if g is None and makes else g for g, like in given])
        node.saved.saved_tensors = intact(node, *node.saved.saved_tensors)
        back = cls.backward(node.saved, *(next(zeros) if is_tensor else None for is_tensor in node.saved._are_tensors))
        back = back if isinstance(back, tuple) else (back,)
        count = len(node.edges)  # those of arguments that forward was called without are None
        if len(back) < count or any(g is not None for g in back[count:]):
            what = f"backward must return {count} gradients, got {len(back)}"
            raise ValueError(message(cls.__name__, what, "return one, or None, per argument of forward"))
        return back[:count]

    return rule


def checkpoint(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Return the result of ``function`` without saving intermediate tensors for its gradient; backward runs the function again.

    The second run uses the state of ``autocast`` and of the random generators that the first run had: those of the active device and of the
    devices of the arguments.
    """
    if not grad_mode.get():
        return function(*args, **kwargs)
    queues = dict.fromkeys([get_active_device().queue, *(x.queue for x in tensors_in([args, kwargs]))])
    states = [(random.get_state(queue), queue) for queue in queues]
    with no_grad():
        out = map_leaves(function(*args, **kwargs), _result)  # not the tensors themselves: they may be arguments, weights or buffers
    node = Node("checkpoint", _checkpoint_rule, *edges_to(args), (function, args, kwargs, states, get_autocast_dtype()))
    node.attach(tensors_in(out))
    return out


def _result(leaf: Any) -> Any:
    if isinstance(leaf, Tensor):
        return leaf.detach()
    if leaf is None or isinstance(leaf, bool | int | float | str):
        return leaf
    what = "function must return tensors, numbers, strings or None, or lists, tuples and dicts of them"
    raise TypeError(message("checkpoint", what, given=type(leaf).__name__))


def _checkpoint_rule(node: Node, F: object, grads: Sequence[Any]) -> list[Any]:
    function, args, kwargs, states, half = node.saved
    args = intact(node, *args)
    if grad_mode.get():
        raise RuntimeError(message("checkpoint", "a checkpoint cannot be differentiated twice", "call the function without checkpoint"))
    fresh = [x.detach().requires_grad_(x.requires_grad) if isinstance(x, Tensor) else x for x in args]
    now, since = [(random.get_state(queue), queue) for _, queue in states], clock.tick()
    for state, queue in states:
        random.set_state(state, queue)
    with enable_grad(), autocast(half is not None, half or "float16"):
        out = function(*fresh, **kwargs)
    for state, queue in now:
        random.set_state(state, queue)
    pairs = [(r, g) for r, g in zip(tensors_in(out), grads, strict=True) if g is not None and r.requires_grad]
    outs, given, walk = [r for r, _ in pairs], [g for _, g in pairs], modes.walk
    if walk.wanted is None:
        run_backward(outs, given, into=walk, since=since)
        return [x.grad if isinstance(x, Tensor) else None for x in fresh]
    found = run_backward(outs, given, wanted=[x for x in fresh if isinstance(x, Tensor)], into=walk, since=since)
    return [found.pop(0) if isinstance(x, Tensor) else None for x in fresh]
