"""Recurrent layers whose results recurrent.npz holds: lengths, states, projections, several layers and both directions."""

from __future__ import annotations

import zlib

import numpy as np

LENGTHS = [2, 4, 1]
BOTH = {"num_layers": 2, "bidirectional": True}
#: Class, keyword arguments, and whether rows have LENGTHS. Inputs are (4 steps, 3 rows, 4 features), there are 6 hidden units.
CASES = {
    "lstm": ("LSTM", BOTH, False),
    "lstm_lengths": ("LSTM", BOTH, True),
    "lstm_projected": ("LSTM", {**BOTH, "proj_size": 3}, True),
    "gru_lengths": ("GRU", BOTH, True),
    "gru_no_bias": ("GRU", {"bias": False}, True),
    "tanh_lengths": ("RNN", BOTH, True),
    "relu_lengths": ("RNN", {"nonlinearity": "relu", "bidirectional": True}, True),
}


def values(name: str, shape: tuple[int, ...]) -> np.ndarray:
    """Numbers from -0.5 to 0.5 that depend on the name alone."""
    return np.random.default_rng(zlib.crc32(name.encode())).uniform(-0.5, 0.5, shape).astype(np.float32)


def state_shapes(kind: str, options: dict) -> list[tuple[int, ...]]:
    rows = options.get("num_layers", 1) * (2 if options.get("bidirectional") else 1)
    return [(rows, 3, options.get("proj_size") or 6), (rows, 3, 6)][: 2 if kind == "LSTM" else 1]
