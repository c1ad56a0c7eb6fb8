"""The table of ``module.summary(input_shape)``, and a context manager for evaluation mode."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import netcl.autograd as ag
from netcl.core.tensor import Tensor


@dataclass(frozen=True)
class SummaryRow:
    """One module of a summary; counts include the modules inside it."""

    path: str
    kind: str
    depth: int
    output_shape: Any
    parameters: int
    flops: int


@dataclass(frozen=True)
class Summary:
    """The summary of a model: a row per module, and totals; ``str`` formats it as a table."""

    rows: tuple[SummaryRow, ...]
    parameters: int
    learned: int
    nbytes: int
    flops: int

    def __str__(self) -> str:
        cells = [("layer", "output shape", "parameters", "FLOPs")]
        for row in self.rows:
            name = f"{row.path.rpartition('.')[2]} {row.kind}".strip()
            shape = "-" if row.output_shape is None else str(row.output_shape)
            cells.append(("  " * row.depth + name, shape, f"{row.parameters:,}", f"{row.flops:,}"))
        widths = [max(len(row[column]) for row in cells) for column in range(4)]
        lines = [f"{a:<{widths[0]}}  {b:<{widths[1]}}  {c:>{widths[2]}}  {d:>{widths[3]}}" for a, b, c, d in cells]
        total = f"{self.parameters:,} parameters, {self.learned:,} of them learned, {self.nbytes:,} bytes; {self.flops:,} FLOPs"
        return "\n".join([*lines, total])

    __repr__ = __str__


@contextmanager
def evaluating(module: Any) -> Iterator[None]:
    """Set evaluation mode inside the block; afterwards restore the mode of every module."""
    modes = [(part, part.training) for part in module.modules()]
    module.eval()
    try:
        yield
    finally:
        module.train(modes[0][1])  # replicas on other devices are not child modules
        for part, mode in modes:
            part.__dict__["training"] = mode


def summarize(module: Any, input_shape: Any, dtype: str) -> Summary:
    """Return the summary of a module. The module runs once, in evaluation mode, on zeros of ``input_shape``."""
    shapes = [input_shape] if not input_shape or isinstance(input_shape[0], int) else list(input_shape)
    seen: dict[int, Any] = {}
    own: dict[int, int] = {}

    def note(part: Any, args: tuple[Any, ...], out: Any) -> None:
        seen.setdefault(id(part), _shapes(out))
        own[id(part)] = own.get(id(part), 0) + part.flops(args, out)

    with ExitStack() as stack:
        for part in module.modules():
            stack.enter_context(part.register_forward_hook(note))
        stack.enter_context(ag.no_grad())
        stack.enter_context(evaluating(module))
        module(*[Tensor.zeros(tuple(shape), dtype, queue=module.queue) for shape in shapes])
    rows = []
    for path, part in module.named_modules():
        flops, depth = sum(own.get(id(inside), 0) for inside in part.modules()), path.count(".") + bool(path)
        rows.append(SummaryRow(path, type(part).__name__, depth, seen.get(id(part)), _count(part.parameters()), flops))
    tensors = module.parameters()
    learned, nbytes = _count(t for t in tensors if t.requires_grad), sum(t.nbytes for t in tensors)
    return Summary(tuple(rows), _count(tensors), learned, nbytes, rows[0].flops)


def _count(tensors: Iterable[Tensor]) -> int:
    return sum(tensor.size for tensor in tensors)


def _shapes(out: Any) -> Any:
    if isinstance(out, Tensor):
        return out.shape
    return tuple(_shapes(part) for part in out) if isinstance(out, tuple | list) else None
