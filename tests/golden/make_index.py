"""Makes index.npz: indexing ops and their gradients by PyTorch. Run with torch 2.13.0 installed: ``python tests/golden/make_index.py``."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from torch.nn import functional

torch.manual_seed(0)
made: dict[str, np.ndarray] = {}


def keep(name: str, inputs: dict[str, torch.Tensor], outputs: list[torch.Tensor]) -> None:
    """Inputs, outputs, the gradients fed back and those that arrive at the inputs."""
    floats = [out for out in outputs if out.requires_grad]
    fed = [torch.randn_like(out) for out in floats]
    leaves = {key: x for key, x in inputs.items() if x.requires_grad}
    grads = torch.autograd.grad(floats, list(leaves.values()), fed) if leaves else []
    for key, x in inputs.items():
        made[f"{name}/in/{key}"] = x.detach().numpy()
    for i, out in enumerate(outputs):
        made[f"{name}/out/{i}"] = out.detach().numpy()
    for i, g in enumerate(fed):
        made[f"{name}/fed/{i}"] = g.numpy()
    for key, g in zip(leaves, grads, strict=True):
        made[f"{name}/grad/{key}"] = g.numpy()


def floats(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, requires_grad=True)


x, index = floats(5, 7, 3), torch.randint(0, 7, (5, 4, 3))
keep("gather", {"x": x, "index": index}, [torch.gather(x, 1, index)])
x, src, index = floats(6, 5), floats(9, 5), torch.randint(0, 6, (9, 5))
keep("scatter_add", {"x": x, "index": index, "src": src}, [torch.scatter_add(x, 0, index, src)])
x, index = floats(4, 6, 5), torch.tensor([5, 0, 0, 3, 5, 1])
keep("index_select", {"x": x, "index": index}, [torch.index_select(x, 1, index)])
x, src, index = floats(4, 3, 5), floats(4, 8, 5), torch.tensor([2, 0, 0, 1, 2, 2, 1, 0])
keep("index_add", {"x": x, "index": index, "src": src}, [torch.index_add(x, 1, index, src)])
weight, index = floats(11, 8), torch.randint(0, 11, (3, 17))
keep("embedding", {"index": index, "weight": weight}, [functional.embedding(index, weight, padding_idx=4)])
x = floats(6, 33)
keep("sort", {"x": x}, list(torch.sort(x, dim=1, descending=True, stable=True)))
keep("topk", {"x": x}, list(torch.topk(x, 5, dim=1)))
x, mask = floats(2, 3, 6, 6), torch.rand(6, 6) < 0.4
keep("masked_fill", {"x": x, "mask": mask}, [x.masked_fill(mask, -1.5)])
x, rows, columns = floats(6, 5, 4), torch.tensor([[0], [5]]), torch.tensor([1, 1, -1])
keep("getitem", {"x": x, "rows": rows, "columns": columns}, [x[rows, :, columns], x[1:5:2, None, ..., ::2], x[:, -2]])
x = floats(6, 5)
mask = x.detach() > 0.3
keep("getitem_mask", {"x": x, "mask": mask}, [x[mask], x[mask[:, 0], 1:3]])
x = floats(4, 6)
keep("take", {"x": x, "index": (index := torch.tensor([[0, 23], [-1, 7]]) % 24)}, [torch.take(x, index)])
x = torch.tensor([[3.0, float("nan"), -0.0, 0.0, float("inf"), -1.0, 0.0, float("-inf")]])
keep("nan", {"x": x}, [*torch.sort(x, dim=1, stable=True), *torch.sort(x, dim=1, stable=True, descending=True)])

np.savez_compressed(Path(__file__).with_name("index.npz"), **made)
