"""Makes conv.npz, pool.npz and resample.npz: torch's results and gradients for the calls of image_cases.py, computed in float64.

Run with an interpreter that has torch 2.13.0: ``python tests/golden/make_images.py``. No test needs torch.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import torch
from torch.nn import functional as F

sys.path.insert(0, str(Path(__file__).parent))
import image_cases as cases

HERE = Path(__file__).parent
NAMES = {"im2col": "unfold", "col2im": "fold"}
OPTIONS = {"kernel": "kernel_size", "size": "output_size"}


def torch_call(case: cases.Case, tensors: list[torch.Tensor | None]) -> torch.Tensor:
    options = dict(case.options)
    if case.op in NAMES:
        return getattr(F, NAMES[case.op])(*tensors, **{OPTIONS.get(name, name): value for name, value in options.items()})
    if case.op in ("pixel_shuffle", "pixel_unshuffle"):
        return getattr(F, case.op)(*tensors, options["factor"])
    return getattr(F, case.op)(*tensors, **options)


def answers(case: cases.Case) -> list[np.ndarray]:
    """The result, then the gradient of every input."""
    tensors = [None if x is None else torch.from_numpy(x).double().requires_grad_() for x in case.inputs()]
    y = torch_call(case, tensors)
    y.backward(torch.from_numpy(case.gradient(tuple(y.shape))).double())
    found = [y.detach(), *(torch.zeros_like(t) if t.grad is None else t.grad for t in tensors if t is not None)]
    return [a.numpy().astype(np.float32) for a in found]


def main() -> None:
    for name, listed in cases.FILES.items():
        stored = {f"{k}_{i}": a for k, case in enumerate(listed) for i, a in enumerate(answers(case))}
        np.savez_compressed(HERE / f"{name}.npz", **stored)


if __name__ == "__main__":
    main()
