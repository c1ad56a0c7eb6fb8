"""Einstein's summation, reduced to permutations, sums, and elementwise and matrix products."""

from __future__ import annotations

import math
import string
from collections import Counter
from collections.abc import Collection, Sequence
from typing import Any

from netcl.core.errors import ShapeError, message
from netcl.core.tensor import Tensor
from netcl.engine import launch
from netcl.engine.registry import composite


class _Term:
    """A tensor and the label of each of its axes; an axis may have size one where the same label is larger in another term."""

    def __init__(self, F: Any, x: Any, labels: str):
        self.F, self.x, self.labels = F, x, labels

    def size(self, label: str) -> int:
        return self.x.shape[self.labels.index(label)] if label in self.labels else 1

    def ordered(self, labels: str) -> Any:
        order = [self.labels.index(label) for label in labels]
        return self.x if order == list(range(len(order))) else self.F.permute(self.x, order)

    def without(self, labels: Collection[str]) -> _Term:
        """Return the term summed over the axes of ``labels``."""
        axes = tuple(i for i, label in enumerate(self.labels) if label in labels)
        if not axes:
            return self
        return _Term(self.F, self.F.sum(self.x, axis=axes), "".join(label for label in self.labels if label not in labels))

    def diagonal(self) -> _Term:
        """Return the term with the axes of each repeated label replaced by their diagonal."""
        twice = next((label for label, count in Counter(self.labels).items() if count > 1), None)
        if twice is None:
            return self
        first, second = [i for i, label in enumerate(self.labels) if label == twice][:2]
        rest = "".join(self.labels[i] for i in range(len(self.labels)) if i not in (first, second))
        return _Term(self.F, self.F.diagonal(self.x, 0, first, second), rest + twice).diagonal()

    def grown(self, sizes: dict[str, int], labels: str) -> _Term:
        """Return the term with axes of size one among ``labels`` expanded to their full size."""
        shape = tuple(sizes[label] if label in labels else n for label, n in zip(self.labels, self.x.shape, strict=True))
        return self if shape == self.x.shape else _Term(self.F, self.F.expand(self.x, shape), self.labels)


def _parse(equation: str, ndims: Sequence[int]) -> tuple[list[str], str]:
    """Return the labels of every operand and of the result, with letters in place of the ellipsis."""
    text = equation.replace(" ", "")
    left, arrow, right = text.partition("->")
    inputs = left.split(",")
    if len(inputs) != len(ndims):
        raise ShapeError(message("einsum", "the equation must have one term per operand", equation=repr(equation), operands=len(ndims)))
    if not set(text.replace("->", "").replace("...", "")) <= set(string.ascii_letters + ","):
        raise ShapeError(message("einsum", "the equation must consist of letters, commas, '...' and '->'", equation=repr(equation)))
    free = [c for c in string.ascii_letters if c not in text]
    dots = [ndim - len(part.replace("...", "")) if "..." in part else 0 for part, ndim in zip(inputs, ndims, strict=True)]
    if min(dots, default=0) < 0:
        raise ShapeError(message("einsum", "every operand must have an axis per label", equation=repr(equation), axes=list(ndims)))
    letters = "".join(free[: max(dots, default=0)])
    spelled = [part.replace("...", letters[len(letters) - n :]) for part, n in zip(inputs, dots, strict=True)]
    if not arrow:
        counts = Counter("".join(spelled))
        return spelled, letters + "".join(sorted(c for c, n in counts.items() if n == 1 and c not in letters))
    result = right.replace("...", letters)
    if len(set(result)) != len(result) or not set(result) <= set("".join(spelled)):
        raise ShapeError(message("einsum", "the result must name labels of the operands, each at most once", equation=repr(equation)))
    return spelled, result


def _label_sizes(terms: Sequence[_Term], equation: str) -> dict[str, int]:
    sizes: dict[str, int] = {}
    for term in terms:
        if len(term.labels) != len(term.x.shape):
            what = f"an operand must have one label per axis, got {len(term.labels)} labels for {len(term.x.shape)} axes"
            raise ShapeError(message("einsum", what, equation=repr(equation), shape=term.x.shape))
        for label, n in zip(term.labels, term.x.shape, strict=True):
            if 1 not in (n, sizes.get(label, 1)) and sizes[label] != n:
                what = f"axes of one label must have the same size, got {sizes[label]} and {n} for {label}"
                raise ShapeError(message("einsum", what, equation=repr(equation), shapes=[t.x.shape for t in terms]))
            sizes[label] = n if sizes.get(label, 1) == 1 else sizes[label]
    return sizes


def _contract(F: Any, a: _Term, b: _Term, kept: set[str], sizes: dict[str, int]) -> _Term:
    """Return the product of two terms, summed over the labels that neither the result nor a later term needs."""
    a, b = a.without(set(a.labels) - set(b.labels) - kept), b.without(set(b.labels) - set(a.labels) - kept)
    shared = [label for label in a.labels if label in b.labels]
    summed = "".join(label for label in shared if label not in kept)
    a, b = a.grown(sizes, summed), b.grown(sizes, summed)
    batch = "".join(label for label in shared if label in kept)
    left = "".join(label for label in a.labels if label not in shared)
    right = "".join(label for label in b.labels if label not in shared)
    if not summed:
        x, y = a.ordered(batch + left), b.ordered(batch + right)
        x = F.reshape(x, (*x.shape, *(1 for _ in right)))
        y = F.reshape(y, (*y.shape[: len(batch)], *(1 for _ in left), *y.shape[len(batch) :]))
        return _Term(F, F.mul(x, y), batch + left + right)
    trans_a, trans_b = a.labels == batch + summed + left, b.labels == batch + right + summed
    x = a.ordered(batch + summed + left if trans_a else batch + left + summed)
    y = b.ordered(batch + right + summed if trans_b else batch + summed + right)
    rows, columns, depth = (math.prod(sizes[label] if label in summed else term.size(label) for label in labels)
                            for term, labels in ((a, left), (b, right), (a, summed)))  # fmt: skip
    x = F.reshape(x, (*x.shape[: len(batch)], *((depth, rows) if trans_a else (rows, depth))))
    y = F.reshape(y, (*y.shape[: len(batch)], *((columns, depth) if trans_b else (depth, columns))))
    out = F.matmul(x, y, transpose_a=trans_a, transpose_b=trans_b)
    shape = (*out.shape[: len(batch)], *(a.size(label) for label in left), *(b.size(label) for label in right))
    return _Term(F, F.reshape(out, shape), batch + left + right)


@composite(ref=None, inputs=("operands",))
def einsum(F: Any, equation: str, *operands: Any) -> Tensor:
    """Sums of products by labels: ``einsum("bij,bjk->bik", a, b)``.

    Labels are letters. A label that is missing after ``->`` is summed, a label that occurs twice in an operand takes the diagonal, and
    ``...`` represents further axes, which broadcast. Operands are multiplied from left to right.
    """
    given = operands[0] if len(operands) == 1 and isinstance(operands[0], (list, tuple)) else operands
    tensors = launch.as_tensors("einsum", *given)
    inputs, result = _parse(equation, [x.ndim for x in tensors])
    terms = [_Term(F, x, labels) for x, labels in zip(tensors, inputs, strict=True)]
    sizes = _label_sizes(terms, equation)
    terms = [term.diagonal() for term in terms]
    total = terms[0]
    for i, term in enumerate(terms[1:], 1):
        kept = set(result).union(*(later.labels for later in terms[i + 1 :]))
        total = _contract(F, total, term, kept, sizes)
    total = total.without([label for label in total.labels if label not in result])
    return total.grown(sizes, result).ordered(result)
