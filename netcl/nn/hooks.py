"""Hooks of modules: functions called before and after forward, and when gradients pass a module in backward."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import netcl.autograd as ag
from netcl.core.tensor import RemovableHandle, Tensor

_handle_numbers = itertools.count()


def add_hook(hooks: dict[str, dict[int, Callable[..., Any]]], kind: str, hook: Callable[..., Any], first: bool = False) -> RemovableHandle:
    """Add a hook to those of a module, the ``first`` or the last; the returned handle removes it."""
    number = next(_handle_numbers)
    group = hooks.setdefault(kind, {})
    later = dict(group) if first else {}
    for other in later:
        del group[other]
    group |= {number: hook} | later

    def remove() -> None:
        group = hooks.get(kind, {})
        group.pop(number, None)
        if not group:
            hooks.pop(kind, None)

    return RemovableHandle(remove)


def take_hooks(module: object, source: object) -> None:
    """Give a copy of a module the hooks that its source has now; it keeps its own copies of those it was copied with."""
    own, wanted = vars(module)["_module_hooks"], vars(source)["_module_hooks"]
    kept = {kind: {number: own.get(kind, {}).get(number, hook) for number, hook in group.items()} for kind, group in wanted.items()}
    if kept != own:
        own.clear()
        own.update(kept)


def with_keywords(hook: Callable[..., Any], given: bool) -> Callable[..., Any]:
    """Return a hook of forward in the form ``hook(module, args, kwargs, *output)``; ``given``: it already has this form."""
    return hook if given else _without_keywords(hook)


def _without_keywords(hook: Callable[..., Any]) -> Callable[..., Any]:
    def call(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any], *output: Any) -> Any:
        answer = hook(module, args, *output)
        if output or answer is None:
            return answer
        return answer if isinstance(answer, tuple) else (answer,), kwargs

    return call


def register_load_state_dict_pre_hook(module: object, hook: Callable[..., object]) -> RemovableHandle:
    """Register a hook, called as in torch, that may change a copy of the state dict before it is loaded; returns a handle."""
    return add_hook(vars(module).setdefault("_loading_hooks", {}), "before", hook)


def register_pre_hook_without_module(module: object, hook: Callable[..., object], with_module: bool = False) -> RemovableHandle:
    return register_load_state_dict_pre_hook(module, hook if with_module else lambda module, *args: hook(*args))


def register_load_state_dict_post_hook(module: object, hook: Callable[..., object]) -> RemovableHandle:
    """Register ``hook(module, keys)`` to run after a state dict was loaded; ``keys`` is the result. Returns a handle."""
    return add_hook(vars(module).setdefault("_loading_hooks", {}), "after", hook)


def call_loading_hooks(module: object, kind: str, *arguments: object) -> None:
    for hook in list(vars(module).get("_loading_hooks", {}).get(kind, {}).values()):
        hook(module, *arguments)


def call(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call the forward of a module with its hooks; returns the output, which a hook may have replaced."""
    hooks = {kind: list(group.values()) for kind, group in module._module_hooks.items()}
    for hook in hooks.get("forward_pre", ()):
        answer = hook(module, args, kwargs)
        if answer is not None:
            args, kwargs = answer
    watched = hooks.keys() & {"backward", "backward_pre"} and ag.is_grad_enabled()
    watch = _Passage(module, hooks.get("backward", []), hooks.get("backward_pre", [])) if watched else None
    if watch is not None:
        args = watch.enter(args)
    out = module.forward(*args, **kwargs)
    for hook in hooks.get("forward", ()):
        answer = hook(module, args, kwargs, out)
        out = out if answer is None else answer
    return out if watch is None else watch.leave(out)


class _Passage:
    """One call of a module with backward hooks. Hooks run when input gradients are known, or output gradients if inputs have none."""

    def __init__(self, module: Any, hooks: list[Callable[..., Any]], before: list[Callable[..., Any]]):
        self.module, self.hooks, self.before = module, hooks, before
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
        for hook in self.before:
            answer = hook(self.module, grads)
            if answer is not None:
                grads = answer if isinstance(answer, tuple) else (answer,)
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
