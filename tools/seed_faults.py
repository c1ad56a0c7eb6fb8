"""Seeds faults into the rows of the op table and counts how many the generated checks catch.

    python tools/seed_faults.py [--device cpu] [--out benchmarks/results/seeded_faults.json]

Formulas get a wrong constant, a dropped term, swapped operands, a flipped comparison or sign; functions get a scaled, shifted or
forgotten gradient and a slightly wrong result. A fault that no check notices is listed by name: each is either a hole in the checks
or a change that means nothing (and then belongs into EQUIVALENT with the reason).
"""

from __future__ import annotations

import argparse
import ast
import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

from netcl import ops, selftest  # noqa: E402
from netcl.autograd import ops as twins  # noqa: E402
from netcl.core.device import DeviceHandle, manager  # noqa: E402
from netcl.engine.registry import REGISTRY, Composite, Op, Pointwise, Reduction  # noqa: E402

#: Faults that change nothing a caller could see: (op, fault) -> why.
_GUARD = "the guard only keeps an unused branch from overflowing"
EQUIVALENT: dict[tuple[str, str], str] = {
    ("elu", "fwd: constant 0"): _GUARD,
    ("elu", "vjp 0: constant 0"): _GUARD,
    ("selu", "fwd: constant 0"): _GUARD,
    ("selu", "vjp 0: constant 0"): _GUARD,
    ("lerp", "fwd: flipped comparison"): "both forms are the same line; each is exact at one end",
    ("lerp", "fwd: constant 0.5"): "both forms are the same line; each is exact at one end",
    ("logsumexp", "map: constant 0"): "the shift cancels, whatever it is",
    ("logsumexp", "finish: constant 0"): "the shift cancels, whatever it is",
}
#: Rows without a reference of their own, and the row that proves them.
PROVED_BY = {"pool_max": "max_pool2d", "pool_average": "avg_pool2d"}
#: What no sample of a row can show, and the test that does.
ELSEWHERE = {
    "bernoulli": "tests/ops/test_random.py", "keep_mask": "tests/ops/test_random.py", "rand": "tests/ops/test_random.py",
    "randint": "tests/ops/test_random.py", "randn": "tests/ops/test_random.py", "setitem": "tests/ops/test_index.py",
    "cast": "tests/ops/test_pointwise.py", "maximum": "tests/ops/test_pointwise.py", "minimum": "tests/ops/test_pointwise.py",
    "pow": "tests/ops/test_pointwise.py",
}  # fmt: skip
FLIPPED = {ast.Lt: ast.GtE, ast.GtE: ast.Lt, ast.Gt: ast.LtE, ast.LtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq}


def formula_faults(text: str) -> Iterator[tuple[str, str]]:
    """Every single fault of an expression: what was done, and the new text."""
    count = sum(1 for _ in ast.walk(ast.parse(text, mode="eval")))
    for index in range(count):
        tree = ast.parse(text, mode="eval")
        node = list(ast.walk(tree))[index]
        for what, change in _changes(node):
            change()
            yield what, ast.unparse(tree)
            break


def _changes(node: ast.AST) -> Iterator[tuple[str, Callable[[], None]]]:
    if isinstance(node, ast.Constant) and isinstance(node.value, int | float):
        yield f"constant {node.value}", lambda: setattr(node, "value", node.value * 1.25 + 0.125)
    elif isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        yield "dropped term", lambda: _become(node, node.left)
    elif isinstance(node, ast.BinOp) and isinstance(node.op, ast.Sub | ast.Div):
        yield "swapped operands", lambda: _swap(node)
    elif isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult):
        yield "dropped factor", lambda: _become(node, node.left)
    elif isinstance(node, ast.UnaryOp):
        yield "lost sign", lambda: _become(node, node.operand)
    elif isinstance(node, ast.Compare) and type(node.ops[0]) in FLIPPED:
        yield "flipped comparison", lambda: setattr(node, "ops", [FLIPPED[type(node.ops[0])]()])


def _swap(node: ast.BinOp) -> None:
    node.left, node.right = node.right, node.left


def _become(node: ast.AST, other: ast.AST) -> None:
    """Turn ``node`` into ``0 + other``: the tree keeps its shape, the value is the other's."""
    assert isinstance(node, ast.BinOp | ast.UnaryOp)
    if isinstance(node, ast.UnaryOp):
        node.op = ast.UAdd()
        return
    node.left, node.op, node.right = other, ast.Add(), ast.Constant(0)  # type: ignore[assignment]


def row_faults(row: Any) -> Iterator[tuple[str, Any]]:
    """Every faulty version of a row: what is wrong, and the row."""
    if isinstance(row, Pointwise):
        for what, text in formula_faults(row.fwd):
            yield f"fwd: {what}", _built(row, fwd=text)
        for i, vjp in enumerate(row.vjp):
            for what, text in formula_faults(vjp) if vjp else ():
                yield f"vjp {i}: {what}", _built(row, vjp=(*row.vjp[:i], text, *row.vjp[i + 1 :]))
    elif isinstance(row, Reduction):
        for column in ("map", "combine", "finish"):
            for what, text in formula_faults(getattr(row, column)):
                yield f"{column}: {what}", _built(row, **{column: text})
        yield from _gradient_faults(row)
    elif isinstance(row, Op):
        yield "result off by 1 %", _built(row, call=lambda *a, **k: _scaled(row.call(*a, **k)))
        yield from _gradient_faults(row)


def _built(row: Any, **columns: Any) -> Any:
    """The row with other columns, or ``None`` where the registry's own rules refuse it (which is catching it, too)."""
    try:
        return replace(row, **columns)
    except ValueError:
        return None


def _gradient_faults(row: Any) -> Iterator[tuple[str, Any]]:
    if row.vjp is None:
        return
    for what, spoil in (("gradient off by 3 %", lambda g: ops.mul(g, 1.03)), ("gradient forgotten", lambda g: None),
                        ("gradient shifted", lambda g: ops.add(g, 0.05))):  # fmt: skip
        yield what, _built(row, vjp=_spoiled(row.vjp, spoil))


def _spoiled(vjp: Callable[..., Any], spoil: Callable[[Any], Any]) -> Callable[..., Any]:
    def wrong(*args: Any, **kwargs: Any) -> Any:
        back = vjp(*args, **kwargs)
        return _each(back, spoil)

    wrong.__signature__ = __import__("inspect").signature(vjp)  # type: ignore[attr-defined]
    return wrong


def _each(value: Any, change: Callable[[Any], Any]) -> Any:
    if isinstance(value, tuple):
        return tuple(_each(part, change) for part in value)
    if isinstance(value, list):
        return [_each(part, change) for part in value]
    return value if value is None else change(value)


def _scaled(out: Any) -> Any:
    return _each(out, lambda t: ops.mul(t, 1.01) if t.dtype.startswith(("float", "bfloat")) else ops.add(t, 1))


def caught(row: Any, name: str, handle: DeviceHandle) -> bool:
    """Whether some check of the row fails."""
    if row is None:
        return True
    original = _put(name, row)
    try:
        return any(result.state == "FAILED" for result in selftest.results(handle, [name, *filter(None, [PROVED_BY.get(name)])]))
    finally:
        _put(name, original)


def _put(name: str, row: Any) -> Any:
    """Exchange a row, also where its functions are kept; returns the old one."""
    original, REGISTRY[name] = REGISTRY[name], row
    vars(ops).pop(name, None)
    twins._twins.pop(name, None)
    return original


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--out", type=Path)
    parser.add_argument("names", nargs="*")
    options = parser.parse_args()
    handle = manager.default(options.device)
    assert handle is not None
    report: dict[str, Any] = {"device": handle.device_name, "faults": 0, "caught": 0, "equivalent": {}, "elsewhere": {}, "missed": []}
    for name in options.names or sorted(REGISTRY):
        if isinstance(REGISTRY[name], Composite):
            continue
        for what, row in row_faults(REGISTRY[name]):
            if (name, what) in EQUIVALENT:
                report["equivalent"][f"{name}, {what}"] = EQUIVALENT[name, what]
                continue
            report["faults"] += 1
            if caught(row, name, handle):
                report["caught"] += 1
            elif name in ELSEWHERE:
                report["elsewhere"][f"{name}, {what}"] = ELSEWHERE[name]
            else:
                report["missed"].append(f"{name}, {what}")
    text = json.dumps(report, indent=2)
    if options.out:
        options.out.write_text(text + "\n")
    print(text)
    return 1 if report["missed"] else 0


if __name__ == "__main__":
    sys.exit(main())
