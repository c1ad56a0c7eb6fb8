"""Weights of the tiny language models, as functions of their names and shapes: the golden file has none."""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence

import numpy as np


def weights(shapes: Mapping[str, Sequence[int]], seed: int) -> dict[str, np.ndarray]:
    """Values that keep activations and logits of a useful size; each tensor has its own generator."""
    found = {}
    for name in sorted(shapes):
        shape = tuple(shapes[name])
        drawn = np.asarray(np.random.default_rng([seed, zlib.crc32(name.encode())]).standard_normal(shape))
        if len(shape) < 2:
            drawn = 0.1 * drawn + (1 if "norm" in name.lower() or ".ln_" in name else 0) * (not name.endswith("bias"))
        elif "emb" in name or "wte" in name or "wpe" in name:
            drawn *= 0.25  # of a tied head: larger ones let every token predict itself
        else:
            drawn *= 1.5 / np.sqrt(shape[-1] if "c_" not in name else shape[0])
        if name.endswith("Attention.q.weight"):
            drawn *= 0.6  # T5 does not scale scores: trained queries are small
        elif name == "shared.weight":
            drawn *= 0.3  # of T5: larger ones let every token predict itself
        found[name] = np.array(drawn, np.float32)
    return found


def adapter_weights(tensors: Mapping[str, np.ndarray], seed: int) -> dict[str, np.ndarray]:
    """Values of an adapter large enough to be seen in the logits; lengths of rows are changed by a tenth."""
    found = {}
    for name in sorted(tensors):
        drawn = np.random.default_rng([seed, zlib.crc32(name.encode())]).standard_normal(np.shape(tensors[name]))
        own = np.asarray(tensors[name]) * (1 + 0.1 * drawn) if "magnitude" in name else 0.2 * drawn
        found[name] = np.array(own, np.float32)
    return found
