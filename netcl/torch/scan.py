"""Finds the names of torch that a script uses and netcl lacks, in its syntax tree, without running it."""

from __future__ import annotations

import ast
import os
from pathlib import Path

from netcl.torch.names import TABLE, TorchModule, modules

_GUARDS = {"ImportError", "ModuleNotFoundError", "AttributeError", "Exception"}


def missing(path: str | os.PathLike[str]) -> dict[str, str]:
    """Return the names ``torch.x.y`` that a script or a module beside it uses and netcl lacks, with their first use, ``script.py:12``.

    Names inside ``try`` blocks that handle their absence are left out.
    """
    found: dict[str, str] = {}
    waiting, seen = [Path(path)], set()
    while waiting:
        file = waiting.pop(0)
        if file not in seen:
            seen.add(file)
            scan = _Scan(file, found)
            scan.visit(ast.parse(file.read_bytes(), os.fspath(file)))
            waiting += scan.beside
    return found


def is_guarded(path: str | os.PathLike[str]) -> bool:
    """Whether a script has a top-level ``if`` on ``__name__``. Without this guard, worker processes that import the script would run it."""
    tests = [node.test for node in ast.parse(Path(path).read_bytes()).body if isinstance(node, ast.If)]
    return any(isinstance(part, ast.Name) and part.id == "__name__" for test in tests for part in ast.walk(test))


class _Scan(ast.NodeVisitor):
    def __init__(self, file: Path, found: dict[str, str]):
        self.file, self.found = file, found
        self.bound: dict[str, str] = {}  # a variable of the script: the module of torch it is
        self.beside: list[Path] = []

    def check(self, name: str, node: ast.AST) -> None:
        """Note a dotted name of torch that netcl lacks; attributes of functions and classes are not checked."""
        top, *parts = name.split(".")
        owner: object = modules()[top]
        for part in parts:
            if isinstance(owner, TorchModule) and not hasattr(owner, part):
                self.found.setdefault(name, f"{self.file.name}:{getattr(node, 'lineno', 0)}")
                return
            owner = getattr(owner, part, None)

    def visit_Import(self, node: ast.Import) -> None:
        for alias in node.names:
            top = alias.name.split(".")[0]
            if top in TABLE:
                self.check(alias.name, node)
                self.bound[alias.asname or top] = alias.name if alias.asname else top
            else:
                self.local(alias.name)

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        module = node.module or ""
        if node.level or module.split(".")[0] not in TABLE:
            for name in (module, *(f"{module}.{alias.name}".lstrip(".") for alias in node.names)):
                self.local(name)
            return
        for alias in node.names:
            name = module if alias.name == "*" else f"{module}.{alias.name}"
            self.check(name, node)
            if name in TABLE:
                self.bound[alias.asname or alias.name] = name

    def local(self, name: str) -> None:
        """Add a module beside this file to the files to scan."""
        base = self.file.parent.joinpath(*name.split("."))
        self.beside += [p for p in (base.with_suffix(".py"), base / "__init__.py") if name and p.is_file()]

    def visit_Assign(self, node: ast.Assign) -> None:
        for part in (node.value, *node.targets):
            self.visit(part)

    def visit_Name(self, node: ast.Name) -> None:
        if isinstance(node.ctx, ast.Store):  # optim = optim.SGD(...)
            self.bound.pop(node.id, None)

    def visit_Attribute(self, node: ast.Attribute) -> None:
        parts: list[str] = []
        inner: ast.expr = node
        while isinstance(inner, ast.Attribute):
            parts, inner = [inner.attr, *parts], inner.value
        if isinstance(inner, ast.Name) and inner.id in self.bound:
            if isinstance(node.ctx, ast.Load):
                self.check(".".join([self.bound[inner.id], *parts]), node)
        else:
            self.visit(inner)

    def visit_Try(self, node: ast.Try) -> None:
        caught = {n.id for handler in node.handlers for n in ast.walk(handler.type or ast.Name("Exception")) if isinstance(n, ast.Name)}
        for part in (*([] if caught & _GUARDS else node.body), *node.handlers, *node.orelse, *node.finalbody):
            self.visit(part)
