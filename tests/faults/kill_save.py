"""Trains in a child process that saves after every step, and kills it at random instants; run by test_kill_save.py.

Prints one JSON object: how often the child was killed, which checkpoints were found, and every loss that was ever computed.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import time
from pathlib import Path

import numpy as np

from netcl import nn, optim
from netcl.core.device import device
from netcl.io import latest, load_checkpoint, save_checkpoint
from netcl.ops.random import manual_seed

STALLED = 5  # kills in a row without a new checkpoint


def made():
    manual_seed(3)
    model = nn.Sequential(nn.Linear(16, 96), nn.ReLU(), nn.Dropout(0.2), nn.Linear(96, 96), nn.Tanh(), nn.Linear(96, 1))
    optimizer = optim.Adam(model.parameters(), lr=0.01)
    return model, optimizer, optim.CosineAnnealingLR(optimizer, T_max=50), np.random.default_rng(5)


def train(folder: Path, until: int, log, save: bool = True) -> None:
    """Go on from the latest checkpoint, if there is one."""
    model, optimizer, scheduler, rng = made()
    parts = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "rng": rng}
    start = load_checkpoint(folder, **parts).step if latest(folder) else 0
    for step in range(start + 1, until + 1):
        x = rng.standard_normal((8, 16)).astype(np.float32)
        optimizer.zero_grad()
        loss = ((model(x) - x.sum(axis=1, keepdims=True)) ** 2).mean()
        loss.backward()
        optimizer.step()
        scheduler.step()
        log(step, float(loss.item()).hex())
        if save:
            save_checkpoint(folder, **parts, step=step, extra={"loss": loss.item()}, keep_last=3)


def child(folder: Path, until: int, written: Path) -> int:
    pid = os.fork()
    if pid:
        return pid
    with open(written, "a", buffering=1) as file:
        train(folder, until, lambda step, loss: file.write(f"\n{step} {loss} whole"))
    os._exit(0)


def pace(folder: Path) -> float:
    """Seconds from the start of a child to the end of its third step on this machine, as busy as it is."""
    train(folder, 1, lambda step, loss: None)
    start = time.monotonic()
    train(folder, 4, lambda step, loss: None)
    return time.monotonic() - start


def main(folder: Path, kills: int, seed: int) -> None:
    straight: dict[int, str] = {}
    train(folder / "nowhere", 8 * kills, straight.__setitem__, save=False)
    checkpoints, written = folder / "run", folder / "losses.txt"
    checkpoints.mkdir()
    instants, seen, killed, longest = random.Random(seed), [], 0, 2 * pace(folder / "trial")
    while killed < kills:
        pid = child(checkpoints, 8 * kills, written)
        time.sleep(instants.uniform(0.0, longest))
        os.kill(pid, signal.SIGKILL)
        _, status = os.waitpid(pid, 0)
        killed += os.WIFSIGNALED(status)
        if latest(checkpoints):
            model, optimizer, scheduler, rng = made()
            seen.append(load_checkpoint(checkpoints, model=model, optimizer=optimizer, scheduler=scheduler, rng=rng).step)
        if len(seen) >= STALLED and len(set(seen[-STALLED:])) == 1:
            longest = min(1.5 * longest, 60.0)  # the machine has become busier than when its pace was taken
    # A kill may cut a line anywhere; the next one begins on its own.
    lines = [line.split() for line in written.read_text().splitlines() if line.endswith(" whole")]
    wrong = [line for line in lines if straight[int(line[0])] != line[1]]
    left = [path.name for path in checkpoints.iterdir()]
    print(json.dumps({"killed": killed, "seen": seen, "losses": len(lines), "wrong": wrong, "left": left}))


if __name__ == "__main__":
    with device("cpu"):
        main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
