"""Writes golden/rows.npz: softmax, normalisation and attention with their gradients, by PyTorch 2.13.0 in float32.

``pip install torch==2.13.0`` and ``python tests/golden/make_rows.py``; the tests themselves need no torch.
"""

from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F

rng = np.random.default_rng(20260301)
data: dict[str, np.ndarray] = {}


def leaf(name: str, *shape: int, low: float = -2.0, high: float = 2.0) -> torch.Tensor:
    data[name] = rng.uniform(low, high, shape).astype(np.float32)
    return torch.from_numpy(data[name]).requires_grad_()


def case(name: str, result: torch.Tensor, **leaves: torch.Tensor) -> None:
    """Keep a result and, for a random upstream gradient, the gradients of the leaves."""
    data[f"{name}.out"] = result.detach().numpy()
    data[f"{name}.g"] = rng.uniform(-1, 1, tuple(result.shape)).astype(np.float32)
    for leaf_name, gradient in zip(
        leaves, torch.autograd.grad(result, list(leaves.values()), torch.from_numpy(data[f"{name}.g"])), strict=True
    ):
        data[f"{name}.d_{leaf_name}"] = gradient.numpy()


x = leaf("x", 3, 6, 7, 5, low=-3.0, high=5.0)
w, b = leaf("w", 6, low=0.5, high=1.5), leaf("b", 6)
lw, lb = leaf("lw", 7, 5, low=0.5, high=1.5), leaf("lb", 7, 5)
mean, var = leaf("mean", 6), leaf("var", 6, low=0.5, high=3.0)
rows = leaf("rows", 9, 6, low=98.0, high=102.0)
case("softmax", F.softmax(x, -1), x=x)
case("softmax_channels", F.softmax(x, 1), x=x)
case("log_softmax", F.log_softmax(x, 1), x=x)
case("layer_norm", F.layer_norm(x, (7, 5), lw, lb), x=x, lw=lw, lb=lb)
case("rms_norm", F.rms_norm(x, (7, 5), lw, 1e-6), x=x, lw=lw)
case("group_norm", F.group_norm(x, 3, w, b), x=x, w=w, b=b)
case("instance_norm", F.instance_norm(x, weight=w, bias=b), x=x, w=w, b=b)
for name, input_ in (("batch_norm", x), ("batch_norm_rows", rows)):
    running_mean, running_var = mean.detach().clone(), var.detach().clone()
    case(name, F.batch_norm(input_, running_mean, running_var, w, b, training=True, momentum=0.3), x=input_, w=w, b=b)
    data[f"{name}.running_mean"], data[f"{name}.running_var"] = running_mean.numpy(), running_var.numpy()
case("batch_norm_eval", F.batch_norm(x, mean.detach(), var.detach(), w, b), x=x, w=w, b=b)

q, k, v = leaf("q", 2, 4, 19, 8), leaf("k", 2, 4, 35, 8), leaf("v", 2, 4, 35, 5)
k2, v2 = leaf("k2", 2, 2, 35, 8), leaf("v2", 2, 2, 35, 5)
added = leaf("added", 2, 1, 19, 35)
data["seen"] = rng.random((19, 35)) < 0.6
data["seen"][:, 0] = True
attention = F.scaled_dot_product_attention
case("attention", attention(q, k, v), q=q, k=k, v=v)
case("attention_causal", attention(q, k, v, is_causal=True, scale=0.4), q=q, k=k, v=v)
case("attention_seen", attention(q, k, v, attn_mask=torch.from_numpy(data["seen"])), q=q, k=k, v=v)
case("attention_added", attention(q, k, v, attn_mask=added), q=q, k=k, v=v, added=added)
case("attention_grouped", attention(q, k2, v2, enable_gqa=True), q=q, k2=k2, v2=v2)

np.savez_compressed(Path(__file__).with_name("rows.npz"), **data)
