"""Creates layer classes whose ``forward`` is one expression: one call makes the constructor, ``forward`` and the documentation.

>>> from netcl.nn.layer_class import layer_class
>>> import netcl.autograd as ag
>>> example = ("nn.Scaled(2.0)([1.0]).tolist()", "[2.0]")
>>> Scaled = layer_class(globals(), "Scaled(factor: float = 1.0)", "ag.mul(x, factor)", "``factor * x``.", *example)
>>> Scaled(2.0), Scaled(2.0)([1.0]).tolist()
(Scaled(factor=2.0), [2.0])
"""

from __future__ import annotations

import ast
import inspect
from collections.abc import Callable
from typing import Any

from netcl.nn.module import Module


def layer_class(scope: dict[str, Any], head: str, call: str, doc: str, example: str, gives: str, base: type[Module] = Module) -> Any:
    """Return the class of a layer, in the module whose ``globals()`` is ``scope``.

    - **head**: the name and the parameters of the constructor; without parameters the constructor is that of ``base``.
    - **call**: the expression that ``forward`` returns. Names other than parameters, ``training``, modules and called
      functions are inputs of ``forward``. Parameters that neither the expression nor ``base`` uses are ignored.
    - **doc**: the documentation; **example** and **gives** are its doctest.
    """
    name, _, parameters = head.removesuffix("()").partition("(")
    of_base = list(inspect.signature(base).parameters)
    given = ast.parse(f"def {head}: ...").body[0].args if parameters else None  # type: ignore[attr-defined]
    settings = [arg.arg for arg in (*given.args, *given.kwonlyargs)] if given else of_base
    forward, inputs, used = _forward(call, {*settings, "training"}, scope)
    text = f"class {name}({base.__name__}):\n"
    if given:
        own = [setting for setting in settings if setting in used and setting not in of_base]
        text += f"    def __init__(self, {parameters}:\n        super().__init__({', '.join(of_base)})\n"
        weights = getattr(base, "WEIGHTS", ())
        text += "".join(f"        self.keep_weight({s!r}, {s})\n" if s in weights else f"        self.{s} = {s}\n" for s in own)
    text += f"    def forward(self, {', '.join(f'{x}: Tensor' for x in inputs)}) -> Tensor:\n        return {forward}\n"
    made: dict[str, Any] = {base.__name__: base}
    exec(compile(text, f"<layer {name}>", "exec"), scope, made)
    setup = ">>> import numpy as np\n" if "np." in example else ""
    made[name].__doc__ = f"{doc}\n\n{setup}>>> from netcl import nn\n>>> {example}\n{gives}\n"
    return made[name]


def function_layer(scope: dict[str, Any], name: str, function: Callable[..., Any], example: str, gives: str, base: type[Module] = Module,
                   more: str = "", doc: str = "") -> Any:  # fmt: skip
    """Return the layer class of a function in ``scope``, or of an op: ``forward`` takes its tensors, ``__init__`` the other parameters.

    ``more`` is the parameter ``inplace`` of ops, which writes the result into the input. ``doc`` is by default that of the function.
    """
    known = [p for p in inspect.signature(function).parameters.values() if p.name != "out"]
    inputs = [p.name for p in known if p is known[0] or p.annotation == "Tensor"]
    given = [p for p in known if p.name not in (*inputs, "training")]
    kinds = {p.name: type(p.default).__name__ if p.annotation is p.empty else p.annotation for p in given}
    head = [f"{p.name}: {kinds[p.name]}" + ("" if p.default is p.empty else f" = {p.default!r}") for p in given] + [more] * bool(more)
    own = function.__name__ in scope
    star = ["*"] if own and given and given[0].kind is inspect.Parameter.KEYWORD_ONLY else []
    words = ", ".join(p.name if p.name in inputs else f"{p.name}={p.name}" for p in known)
    call = f"{'' if own else 'ag.'}{function.__name__}({words})"
    if more:
        call = f"overwrite(ag.{function.__name__}, {words}) if inplace else {call}"
    return layer_class(scope, f"{name}({', '.join(star + head)})", call, doc or function.__doc__ or "", example, gives, base)


def _forward(call: str, settings: set[str], scope: dict[str, Any]) -> tuple[str, list[str], set[str]]:
    """Return the expression ``call`` with settings read from ``self``, the names of its inputs by first use, and the settings it uses."""
    tree = ast.parse(call, mode="eval")
    functions = {id(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call)}
    used_names = (node for node in ast.walk(tree) if isinstance(node, ast.Name) and id(node) not in functions)
    names = [node for node in used_names if not inspect.ismodule(scope.get(node.id))]
    names.sort(key=lambda node: node.col_offset)
    used = {node.id for node in names}
    inputs = [name for name in dict.fromkeys(node.id for node in names) if name not in settings]
    for node in names:
        node.id = f"self.{node.id}" if node.id in settings else node.id
    return ast.unparse(tree), inputs, used & settings
