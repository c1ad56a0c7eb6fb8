"""Makes oracle.npz: torch's results and gradients for the calls of oracle_cases.py, in float64.

Run with an interpreter that has torch 2.13.0: ``python tests/golden/make_oracle.py``. No test needs torch.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from oracle_cases import CASES, several, tensors, values

made: dict[str, np.ndarray] = {}
for name, case in CASES.items():
    leaves: list[torch.Tensor] = []

    def leaf(x: np.ndarray, leaves: list[torch.Tensor] = leaves) -> torch.Tensor:
        leaves.append(torch.from_numpy(x.copy()).requires_grad_(x.dtype.kind == "f"))
        return leaves[-1]

    outs = several(case.torch(torch, *tensors(case.inputs, leaf)))
    made.update({f"{name}/out/{i}": x.detach().numpy() for i, x in enumerate(outs)})
    floats = {i: x for i, x in enumerate(outs) if x.requires_grad}
    learning = {i: x for i, x in enumerate(leaves) if x.requires_grad}
    if floats:
        fed = [torch.from_numpy(values(f"{name} fed {i}", *x.shape)) for i, x in floats.items()]
        found = torch.autograd.grad(list(floats.values()), list(learning.values()), fed, allow_unused=True)
        made.update({f"{name}/grad/{i}": g.numpy() for i, g in zip(learning, found, strict=True) if g is not None})
np.savez_compressed(Path(__file__).with_name("oracle.npz"), **made)
