"""Makes linalg.npz: special functions, scans, scatters, resampling, linear algebra and Fourier transforms with gradients, by PyTorch.

Run with torch 2.13.0 installed: ``python tests/golden/make_linalg.py``. ``linalg_cases.py`` has the calls, written once for both.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from linalg_cases import CASES, inputs_of

made: dict[str, np.ndarray] = {}
for name, (call, *given) in CASES.items():
    leaves = [torch.from_numpy(x).requires_grad_(x.dtype.kind == "f") for x in inputs_of(name, given)]
    out = call(torch, *leaves)
    outs = [out] if isinstance(out, torch.Tensor) else list(out)
    floats = [x for x in outs if x.requires_grad]
    rng = np.random.default_rng(7)
    fed = [torch.from_numpy(rng.uniform(-1, 1, tuple(x.shape)).astype(np.float32)) for x in floats]
    learning = [x for x in leaves if x.requires_grad]
    grads = torch.autograd.grad(floats, learning, fed, allow_unused=True) if floats and learning else []
    made.update({f"{name}/out/{i}": x.detach().resolve_neg().numpy() for i, x in enumerate(outs)})
    made.update({f"{name}/grad/{i}": x.resolve_neg().numpy() for i, x in enumerate(grads) if x is not None})
np.savez_compressed(Path(__file__).with_name("linalg.npz"), **made)
