"""Makes recurrent.npz: what torch's recurrent layers give for recurrent_cases.py, in float64.

Run with an interpreter that has torch 2.13.0: ``python tests/golden/make_recurrent.py``. No test needs torch.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import torch
from torch.nn.utils import rnn

sys.path.insert(0, str(Path(__file__).parent))
import recurrent_cases as cases

found = {}
for name, (kind, options, packed) in cases.CASES.items():
    layer = getattr(torch.nn, kind)(4, 6, **options).double()
    for key, parameter in layer.named_parameters():
        parameter.data = torch.tensor(cases.values(f"{name}.{key}", tuple(parameter.shape))).double()
    x, *states = (
        torch.tensor(cases.values(f"{name}.{i}", shape)).double().requires_grad_()
        for i, shape in enumerate([(4, 3, 4), *cases.state_shapes(kind, options)])
    )
    given = rnn.pack_padded_sequence(x, cases.LENGTHS, enforce_sorted=False) if packed else x
    y, ends = layer(given, tuple(states) if len(states) > 1 else states[0])
    outputs = [rnn.pad_packed_sequence(y)[0] if packed else y, *(ends if isinstance(ends, tuple) else (ends,))]
    sum((out * torch.tensor(cases.values(f"{name}.g{i}", tuple(out.shape)))).sum() for i, out in enumerate(outputs)).backward()
    found |= {f"{name}/out{i}": out for i, out in enumerate(outputs)}
    found |= {f"{name}/dx{i}": part.grad for i, part in enumerate([x, *states])}
    found |= {f"{name}/{key}": parameter.grad for key, parameter in layer.named_parameters()}
np.savez_compressed(Path(__file__).with_name("recurrent.npz"), **{key: value.detach().float().numpy() for key, value in found.items()})
