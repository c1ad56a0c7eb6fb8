"""Signatures of the methods that call ops, for ``help`` and editors."""

from __future__ import annotations

import inspect
from types import MappingProxyType
from typing import Any

from netcl.core.hooks import hooks


class OpSignature(inspect.Signature):
    """The signature of a method that calls an op, with torch's names. It is looked up when read, after the ops are imported."""

    __slots__ = ("op",)

    def __init__(self, op: str):
        super().__init__()
        self.op = op

    @property
    def parameters(self) -> Any:
        found = hooks.call("signature", self.op)[0].parameters
        first = inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY)
        return MappingProxyType({p.name: p for p in (first, *list(found.values())[1:])})

    def replace(self, *, parameters: Any = None, return_annotation: Any = None) -> inspect.Signature:  # type: ignore[override]
        return inspect.Signature(self.parameters.values() if parameters is None else parameters)
