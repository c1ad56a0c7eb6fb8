"""Mixed precision against float32: the loss a short training ends with, and the memory its activations take.

    python benchmarks/amp.py [selector] [--seeds 3] [--steps 200] [--out results/amp_pocl.json]

A CNN on the bundled digits and a small GPT on this repository's licence and papers, both with Adam and clipped gradients, in
float32, float16 (with a GradScaler) and bfloat16, from the same weights over the same batches. The final loss is the mean over
the last tenth of the steps; activations are what the pool leases more after a forward pass than before it, less the half copies
of the parameters.
"""

from __future__ import annotations

import argparse
import gc
import json
from collections.abc import Callable
from pathlib import Path

import numpy as np

import netcl.autograd as ag
from netcl import device, nn, optim
from netcl.amp import GradScaler, autocast
from netcl.amp.autocast import autocast_block
from netcl.core import memory
from netcl.core.tensor import Tensor
from netcl.data.datasets import digits
from netcl.ops import random

ROOT = Path(__file__).parent.parent
MODES = ("float32", "float16", "bfloat16")
Batch = tuple[np.ndarray, np.ndarray]


def cnn() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(),
        nn.MaxPool2d(2), nn.Flatten(), nn.Linear(32 * 16, 10),
    )  # fmt: skip


def gpt() -> nn.Module:
    return nn.GPT(128, block_size=64, n_layer=2, n_head=4, n_embd=64)


def images(rng: np.random.Generator, x: np.ndarray, y: np.ndarray) -> Batch:
    chosen = rng.integers(0, len(x), 64)
    return x[chosen], y[chosen]


def lines(rng: np.random.Generator, text: np.ndarray) -> Batch:
    starts = rng.integers(0, len(text) - 65, 16)
    rows = np.stack([text[s : s + 65] for s in starts])
    return rows[:, :-1], rows[:, 1:].reshape(-1)


def digit_source() -> Callable[[np.random.Generator], Batch]:
    train, _ = digits()
    x, y = (np.stack([np.asarray(sample[part]) for sample in train]) for part in (0, 1))
    return lambda rng: images(rng, x, y)


def text_source() -> Callable[[np.random.Generator], Batch]:
    pages = [ROOT / "LICENSE", *sorted((ROOT / "docs").glob("*.md"))]
    text = "\n".join(page.read_text(encoding="utf-8") for page in pages)
    codes = np.frombuffer(text.encode("ascii", "replace"), np.uint8).astype(np.int64)
    return lambda rng: lines(rng, codes)


CASES = {"cnn on digits": (cnn, digit_source), "gpt on text": (gpt, text_source)}


def loss_of(model: nn.Module, batch: Batch, mode: str) -> Tensor:
    with autocast(mode != "float32", "float16" if mode == "float32" else mode):
        out = model(Tensor.from_host(batch[0]))
        return ag.cross_entropy(ag.reshape(out, (-1, out.shape[-1])), Tensor.from_host(batch[1]))


def activation_bytes(model: nn.Module, batch: Batch, mode: str) -> int:
    """What a forward pass leaves leased, without the copies of the parameters; the second pass is measured."""
    loss_of(model, batch, mode).backward()
    for p in model.parameters():
        p.zero_grad()
    with autocast(mode != "float32", "float16" if mode == "float32" else mode):
        gc.collect()
        before = memory.memory_stats()["bytes_in_use"]
        loss = loss_of(model, batch, mode)
        gc.collect()
        copies = sum(memory.eighth_steps(kept.half.nbytes) for kept in autocast_block.get().casts.values())
        held = memory.memory_stats()["bytes_in_use"] - before - copies
    del loss
    return int(held)


def final_loss(make: Callable[[], nn.Module], source: Callable[[np.random.Generator], Batch], mode: str, seed: int, steps: int) -> dict:
    random.manual_seed(seed)
    model, rng = make(), np.random.default_rng(seed)
    opt, scaler = optim.Adam(model.parameters(), lr=1e-3), GradScaler(enabled=mode == "float16")
    losses = []
    for _ in range(steps):
        loss = loss_of(model, source(rng), mode)
        opt.zero_grad()
        scaler.scale_loss(loss).backward()
        scaler.step(opt, max_norm=1.0)
        scaler.update()
        losses.append(loss.detach())
    tail = [loss.item() for loss in losses[-max(1, steps // 10) :]]
    return {"loss": float(np.mean(tail)), "activation_bytes": activation_bytes(model, source(rng), mode), "scale": scaler.scale}


def compare(seeds: int, steps: int) -> dict:
    """Per case and dtype: final losses, their mean relative to float32, the share of its activation memory."""
    results = {}
    for name, (make, source) in CASES.items():
        draw = source()
        runs = {mode: [final_loss(make, draw, mode, seed, steps) for seed in range(seeds)] for mode in MODES}
        plain = np.mean([run["loss"] for run in runs["float32"]])
        held = runs["float32"][0]["activation_bytes"]
        results[name] = {
            mode: {
                "losses": [round(run["loss"], 5) for run in of],
                "mean_relative_to_float32": round(float(np.mean([run["loss"] for run in of]) / plain), 5),
                "activation_share": round(of[0]["activation_bytes"] / held, 4) if held else None,
                "scale": of[0]["scale"],
            }
            for mode, of in runs.items()
        }
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("selector", nargs="?", default="auto")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results" / "amp_pocl.json")
    given = parser.parse_args()
    with device(given.selector) as handle:
        results = compare(given.seeds, given.steps)
    report = {"device": handle.device_name, "platform": handle.platform_name, "seeds": given.seeds, "steps": given.steps, "cases": results}
    given.out.write_text(json.dumps(report, indent=1) + "\n")
    print(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
