"""``jit_compile``: fuses the ops of a function into few kernels, forwards and backwards.

The function runs as written, but formulas, broadcasting, casts, folds of innermost axes, softmax and row norms are deferred where possible
(:class:`TraceNode`). Results are computed at the end of the call, in few kernels. Other values are computed when Python or an op that is
not deferred reads them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import update_wrapper
from inspect import isroutine
from typing import Any

from netcl.autograd.backward_pass import grad, run_backward
from netcl.core.errors import message
from netcl.core.nested import tensors_in
from netcl.core.tensor import Tensor
from netcl.engine import lazy_graph
from netcl.engine.lazy_graph import TraceNode
from netcl.engine.modes import deferral


class TracingContext:
    """A context manager that defers ops that can be fused: ``with TracingContext() as trace:``; ``trace.nodes`` lists them in order.

    On exit, the values that are still referenced are computed.

    >>> import netcl.autograd as ag
    >>> x = ag.tensor([1.0, 2.0])
    >>> with ag.TracingContext() as trace:
    ...     y = ag.relu(x * 2.0)
    >>> [node.name for node in trace.nodes]
    ['mul', 'relu']
    >>> y.tolist()
    [2.0, 4.0]
    """

    def __init__(self, fast_math: bool = False):
        self.fast_math = fast_math
        self.nodes: list[TraceNode] = []

    def __enter__(self) -> TracingContext:
        self._outer, deferral.trace = deferral.trace, self.nodes
        self._mode = lazy_graph.fusing(True, self.fast_math)
        self._mode.__enter__()
        return self

    def __exit__(self, *exc: Any) -> None:
        self._mode.__exit__(*exc)
        deferral.trace = self._outer
        for node in self.nodes:
            if node.made is None and node.alive():
                node.compute()


@dataclass
class CompiledGraph:
    """A traced call: its deferred ops in order, and the sources of the fused kernels that it launched forwards and backwards."""

    ops: list[str] = field(default_factory=list)
    forward: list[str] = field(default_factory=list)
    backward: list[str] = field(default_factory=list)

    @property
    def kernels(self) -> int:
        """The number of fused kernels that the call launched."""
        return len(self.forward) + len(self.backward)

    def __str__(self) -> str:
        parts = []
        for name, texts in (("forward", self.forward), ("backward", self.backward)):
            for i, text in enumerate(texts):
                kernel = text[max(text.find("__kernel"), 0) :]  # without the functions that load and store
                parts.append(f"// {name} {i + 1} of {len(texts)}\n{kernel}")
        return "\n".join(parts)


@contextmanager
def _collecting(texts: list[str], ops: list[str] | None = None) -> Iterator[None]:
    """Add the sources of the fused kernels that the block launches to ``texts``, and the names of its deferred ops to ``ops``."""
    nodes: list[TraceNode] = []
    before = deferral.shown, deferral.trace
    deferral.shown, deferral.trace = texts, deferral.trace if ops is None else nodes
    try:
        yield
    finally:
        deferral.shown, deferral.trace = before
    if ops is not None:
        ops += [node.name for node in nodes]


class CompiledFunction:
    """A function compiled by :func:`jit_compile`; ``source(*args)`` returns the source of its kernels."""

    def __init__(self, function: Callable[..., Any], fast_math: bool):
        # Copied from the function; attributes of an object may change and may have these names.
        update_wrapper(self, function, updated=("__dict__",) if isroutine(function) else ())
        self.function = function
        self.fast_math = fast_math

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if deferral.mode is not None:  # called from another compiled function
            return self.function(*args, **kwargs)
        with lazy_graph.fusing(True, self.fast_math):
            result = self.function(*args, **kwargs)
        lazy_graph.compute(tensors_in(result))
        return result

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        bind = getattr(self.function, "__get__", None)
        return self if instance is None or bind is None else CompiledFunction(bind(instance, owner), self.fast_math)

    def graph(self, *args: Any, **kwargs: Any) -> CompiledGraph:
        """Call the function, and backward if a result and an argument require gradients; returns the deferred ops and fused kernels."""
        found = CompiledGraph()
        with _collecting(found.forward, found.ops):
            outputs = [t for t in tensors_in(self(*args, **kwargs)) if t.requires_grad]
        wanted = [t for t in tensors_in([*args, *kwargs.values()]) if t.requires_grad]
        if outputs and wanted:
            ones = [Tensor.ones(t.shape, t.dtype, queue=t.queue) for t in outputs]
            with _collecting(found.backward):
                grad(outputs, wanted, ones, allow_unused=True)
        return found

    def source(self, *args: Any, **kwargs: Any) -> str:
        """Return the sources of the kernels in :meth:`graph` of a call with these arguments."""
        return str(self.graph(*args, **kwargs))


def jit_compile(fn: Callable[..., Any] | None = None, fast_math: bool = False) -> Any:
    """Fuse the ops of a function, forwards and backwards: ``@jit_compile`` or ``jit_compile(fast_math=True)(fn)``.

    ``fast_math`` builds its kernels with ``-cl-fast-relaxed-math``: divisions and roots may be faster, NaN and Inf are not reliable.

    >>> import netcl.autograd as ag
    >>> @ag.jit_compile
    ... def f(a, b):
    ...     return ag.relu(a * b + 1.0) * 0.5
    >>> f(ag.tensor([1.0, -2.0]), ag.tensor([3.0, 4.0])).tolist()
    [2.0, 0.0]
    """
    if fn is None:
        return lambda function: jit_compile(function, fast_math)
    if not callable(fn):
        raise TypeError(message("jit_compile", "fn must be a function", given=type(fn).__name__))
    return CompiledFunction(fn, fast_math)


class TrainingGraphCompiler:
    """Computes a loss and its gradients in fused kernels: ``loss, gradients = TrainingGraphCompiler(loss_function, parameters)(x, y)``.

    It returns a gradient, or ``None``, per parameter and does not change ``.grad``; ``compile(x, y)`` returns a step's ops and kernels.
    """

    def __init__(self, function: Callable[..., Tensor], parameters: Sequence[Tensor], fast_math: bool = False):
        self.function = jit_compile(function, fast_math)
        self.parameters = list(parameters)

    def __call__(self, *args: Any, **kwargs: Any) -> tuple[Tensor, list[Tensor | None]]:
        loss = self.function(*args, **kwargs)
        return loss.detach(), run_backward([loss], [None], wanted=self.parameters)

    def compile(self, *args: Any, **kwargs: Any) -> CompiledGraph:
        """Run one step and return its deferred ops and fused kernels."""
        found = CompiledGraph()
        with _collecting(found.forward, found.ops):
            loss = self.function(*args, **kwargs)
        with _collecting(found.backward):
            run_backward([loss], [None], wanted=self.parameters)
        return found
