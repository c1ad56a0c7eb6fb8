"""Hooks of modules: functions called before and after forward, and when gradients pass a module in backward."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import netcl.autograd as ag
from netcl.core.tensor import RemovableHandle, Tensor

_handle_numbers = itertools.count()


def add_hook(hooks: dict[str, dict[int, Callable[..., Any]]], kind: str, hook: Callable[..., Any]) -> RemovableHandle:
    """Add a hook to those of a module; the returned handle removes it."""
    number = next(_handle_numbers)
    hooks.setdefault(kind, {})[number] = hook

    def remove() -> None:
        group = hooks.get(kind, {})
        group.pop(number, None)
        if not group:
            hooks.pop(kind, None)

    return RemovableHandle(remove)


def call(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call the forward of a module with its hooks; returns the output, which a hook may have replaced."""
    hooks = {kind: list(group.values()) for kind, group in module._module_hooks.items()}
    for hook in hooks.get("forward_pre", ()):
        answer = hook(module, args)
        if answer is not None:
            args = answer if isinstance(answer, tuple) else (answer,)
    watch = _Passage(module, hooks["backward"]) if "backward" in hooks and ag.is_grad_enabled() else None
    if watch is not None:
        args = watch.enter(args)
    out = module.forward(*args, **kwargs)
    for hook in hooks.get("forward", ()):
        answer = hook(module, args, out)
        out = out if answer is None else answer
    return out if watch is None else watch.leave(out)


class _Passage:
    """One call of a module with backward hooks. Hooks run when input gradients are known, or output gradients if inputs have none."""

    def __init__(self, module: Any, hooks: list[Callable[..., Any]]):
        self.module, self.hooks = module, hooks
        self.arguments: list[bool] = []
        self.outgoing: tuple[Any, ...] = ()

    def enter(self, args: tuple[Any, ...]) -> tuple[Any, ...]:
        self.arguments = [isinstance(x, Tensor) and x.requires_grad for x in args]
        return _through(self.inputs_known, args, self.arguments)

    def leave(self, out: Any) -> Any:
        outputs = out if isinstance(out, tuple) else (out,)
        watched = [isinstance(x, Tensor) and x.requires_grad for x in outputs]
        outputs = _through(self.outputs_known, outputs, watched)
        return outputs if isinstance(out, tuple) else outputs[0]

    def outputs_known(self, grads: tuple[Any, ...]) -> tuple[Any, ...]:
        self.outgoing = grads
        if not any(self.arguments):
            self.run((None,) * len(self.arguments))
        return grads

    def inputs_known(self, grads: tuple[Any, ...]) -> tuple[Any, ...]:
        known = iter(grads)
        answer = self.run(tuple(next(known) if watched else None for watched in self.arguments))
        return tuple(g for g, watched in zip(answer, self.arguments, strict=True) if watched)

    def run(self, incoming: tuple[Any, ...]) -> tuple[Any, ...]:
        for hook in self.hooks:
            answer = hook(self.module, incoming, self.outgoing)
            if answer is not None:
                incoming = answer if isinstance(answer, tuple) else (answer,)
        return incoming


def _through(observe: Callable[..., Any], values: tuple[Any, ...], watched: list[bool]) -> tuple[Any, ...]:
    """Return ``values``. Those with a true flag in ``watched`` pass a graph node that replaces gradients by ``observe(gradients)``."""
    if not any(watched):
        return values
    passed = iter(_Watched.apply(observe, *[x for x, w in zip(values, watched, strict=True) if w]))
    return tuple(next(passed) if w else x for x, w in zip(values, watched, strict=True))


class _Watched(ag.Function):
    @staticmethod
    def forward(ctx: Any, *args: Any, **kwargs: Any) -> Any:
        ctx.observe = args[0]
        return tuple(args[1:])

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return (None, *ctx.observe(gradients))
