"""Makes losses.npz with PyTorch: values and gradients of losses. Run: python tests/golden/make_losses.py (needs torch 2.13)."""

from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F

rng = np.random.default_rng(0)
x, y = rng.normal(size=(6, 5)).astype("f4"), rng.normal(size=(6, 5)).astype("f4")
dense = rng.normal(size=(2, 5, 3, 4)).astype("f4")
labels, dense_labels = rng.integers(0, 5, 6), rng.integers(0, 5, (2, 3, 4))
labels[1] = dense_labels[0, 1, 2] = -100
weight = rng.uniform(0.5, 2, 5).astype("f4")
p, q = rng.uniform(0.05, 0.95, (6, 5)).astype("f4"), rng.uniform(0.05, 0.95, (6, 5)).astype("f4")
signs = np.where(rng.random((6, 5)) < 0.5, -1, 1).astype("f4")
t = torch.tensor
DATA = {"x": x, "y": y, "dense": dense, "labels": labels, "dense_labels": dense_labels, "weight": weight, "p": p, "q": q, "signs": signs}
CASES = {
    "cross_entropy": ("x", lambda a: F.cross_entropy(a, t(labels))),
    "cross_entropy_weight": ("x", lambda a: F.cross_entropy(a, t(labels), t(weight))),
    "cross_entropy_smooth": ("x", lambda a: F.cross_entropy(a, t(labels), t(weight), label_smoothing=0.2)),
    "cross_entropy_sum": ("x", lambda a: F.cross_entropy(a, t(labels), reduction="sum", label_smoothing=0.1)),
    "cross_entropy_soft": ("x", lambda a: F.cross_entropy(a, t(p), t(weight), label_smoothing=0.1)),
    "cross_entropy_dense": ("dense", lambda a: F.cross_entropy(a, t(dense_labels), t(weight))),
    "nll": ("x", lambda a: F.nll_loss(a, t(labels), t(weight))),
    "mse": ("x", lambda a: F.mse_loss(a, t(y))),
    "l1": ("x", lambda a: F.l1_loss(a, t(y))),
    "smooth_l1": ("x", lambda a: F.smooth_l1_loss(a, t(y), beta=0.7)),
    "huber": ("x", lambda a: F.huber_loss(a, t(y), delta=0.6)),
    "bce": ("p", lambda a: F.binary_cross_entropy(a, t(q))),
    "bce_with_logits": ("x", lambda a: F.binary_cross_entropy_with_logits(a, t(q), pos_weight=t(weight))),
    "kl_div": ("x", lambda a: F.kl_div(a, t(q), reduction="batchmean")),
    "cosine_similarity": ("x", lambda a: F.cosine_similarity(a, t(y)).sum()),
    "triplet": ("x", lambda a: F.triplet_margin_loss(a, t(y), t(signs))),
    "hinge": ("x", lambda a: torch.clamp(1 - a * t(signs), min=0).mean()),
}
out = dict(DATA)
for name, (key, loss) in CASES.items():
    leaf = t(DATA[key], requires_grad=True)
    value = loss(leaf)
    value.backward()
    out[f"{name}.value"], out[f"{name}.grad"] = value.detach().numpy(), leaf.grad.numpy()
np.savez_compressed(Path(__file__).with_name("losses.npz"), **out)
