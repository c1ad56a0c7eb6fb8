"""Trains for an hour with two loaders, batches of varied shapes and a compiled step, and watches what the process keeps: ``make soak``.

    python tools/soak.py [--minutes 60] [--device pocl] [--out benchmarks/results/soak.txt]

Prints memory, descriptors, threads and child processes as it goes. At the end: the slope of resident memory in the second half, by least
squares, and what is left once the loaders are closed. The status is 1 if memory grows by more than a megabyte an hour (runs of ten minutes
and more), or if a descriptor or a process is left.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import os
import platform
import subprocess
import sys
import time
from pathlib import Path

import numpy as np

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

import netcl as nc  # noqa: E402
from netcl import nn, optim  # noqa: E402
from netcl.core.device import manager  # noqa: E402
from netcl.data import DataLoader, Dataset  # noqa: E402

MOST_GROWTH = 1.0  # megabytes an hour
WIDTHS = (8, 12, 16, 20)


class Images(Dataset):
    """Random images of one width and their labels, made from the index."""

    def __init__(self, width: int):
        self.width = width

    def __len__(self) -> int:
        return 96

    def __getitem__(self, index: int):
        rng = np.random.default_rng(index)
        return rng.standard_normal((1, self.width, self.width), np.float32), index % 4


def kept() -> dict[str, float]:
    """What the process has now: megabytes in memory, descriptors, threads, children."""
    status = Path("/proc/self/status").read_text()
    fields = dict(line.split(":\t", 1) for line in status.splitlines() if ":\t" in line)
    return {
        "megabytes": int(fields["VmRSS"].split()[0]) / 1024,
        "descriptors": len(os.listdir("/proc/self/fd")),
        "threads": int(fields["Threads"]),
        "processes": len(descendants()),
    }


def descendants() -> list[int]:
    """Processes that this one has started, directly or not."""
    parents = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            parents[int(path.parent.name)] = int(path.read_text().rsplit(")", 1)[1].split()[1])
        except (FileNotFoundError, ProcessLookupError):
            continue  # it has ended meanwhile
    found = [os.getpid()]
    for pid in found:
        found += [child for child, parent in parents.items() if parent == pid]
    return found[1:]


def slope(points: list[tuple[float, float]]) -> float:
    """Megabytes an hour of ``(seconds, megabytes)``, by least squares."""
    if len(points) < 3:
        return 0.0
    times, values = np.array(points).T
    return float(np.polyfit(times / 3600, values, 1)[0])


class Soak:
    """A model, its step (eager for two of the widths, compiled for the others) and two loaders per width, one of them with processes."""

    def __init__(self, handle):
        nc.manual_seed(0)
        self.model = nn.Sequential(nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten(),
                                   nn.Dropout(0.1), nn.Linear(32, 4))  # fmt: skip
        self.optimizer = optim.AdamW(self.model.parameters(), lr=1e-3)
        model, optimizer = self.model, self.optimizer

        def step(x, y):
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step(max_norm=1.0)
            return loss

        self.steps = {width: nc.compile(step) if i % 2 else step for i, width in enumerate(WIDTHS)}
        plain = [DataLoader(Images(width), batch_size=12 + i, device_queue=handle) for i, width in enumerate(WIDTHS)]
        forked = [DataLoader(Images(width), batch_size=16, num_workers=2, device_queue=handle) for width in WIDTHS[:1]]
        self.loaders = [*plain, *forked]

    def epoch(self, loader) -> float:
        loss = 0.0
        for x, y in loader:
            loss = self.steps[loader.dataset.width](x, y).item()
        return loss

    def close(self) -> None:
        for loader in self.loaders:
            loader.close()


def after_one_round(handle) -> dict[str, float]:
    """What the process has once everything is open that it keeps for life.

    These are the servers of multiprocessing, the SQLite file in which PyOpenCL caches the code that sets arguments, and the pair of sockets
    by which Ctrl-C reaches a process inside a driver.
    """
    soak = Soak(handle)
    for loader in soak.loaders:
        soak.epoch(loader)
    soak.close()
    del soak, loader
    gc.collect()
    nc.synchronize()
    return kept()


def run(handle, minutes: float, say) -> int:
    first = after_one_round(handle)
    soak, began, points, epochs, shown = Soak(handle), time.monotonic(), [], 0, -1e9
    for loader in itertools.cycle(soak.loaders):
        passed = time.monotonic() - began
        if passed > 60 * minutes:
            break
        loss = soak.epoch(loader)
        assert np.isfinite(loss)
        epochs += 1
        if passed - shown > max(60 * minutes / 60, 1):  # seldom: the list itself must not grow
            shown, now = passed, kept()
            points.append((passed, now["megabytes"]))
            words = "  ".join(f"{name} {value:.1f}" if name == "megabytes" else f"{name} {value:.0f}" for name, value in now.items())
            say(f"{passed / 60:6.1f} min  {epochs} epochs  {words}")
    soak.close()
    growth = slope([point for point in points if point[0] > points[-1][0] / 2])
    del soak
    gc.collect()
    nc.synchronize()
    last = kept()
    left = {name: last[name] - first[name] for name in ("descriptors", "processes")}
    say(f"{epochs} epochs, {minutes:g} min; memory grows by {growth:.2f} MB an hour in the second half; left at the end: {left}")
    grown = growth > MOST_GROWTH and minutes >= 10
    return 1 if grown or left["processes"] > 0 or left["descriptors"] > 0 else 0


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--device", default="auto", help="a selector as in `netcl devices`")
    parser.add_argument("--out", type=Path, help="also written there")
    given = parser.parse_args()
    handle = manager.default(given.device)
    if handle is None:
        parser.error(f"there is no device {given.device!r}")
    lines = []

    def say(text: str) -> None:
        lines.append(text)
        sys.stdout.write(f"{text}\n")
        sys.stdout.flush()

    commit = subprocess.run(["git", "-C", str(ROOT), "rev-parse", "--short", "HEAD"], capture_output=True, text=True).stdout.strip()
    say(f"netcl {commit or 'unknown'} on {handle.profile.title}, Python {platform.python_version()}, {platform.machine()}")
    with nc.device(handle):
        status = run(handle, given.minutes, say)
    if given.out:
        given.out.write_text("\n".join(lines) + "\n")
    return status


if __name__ == "__main__":
    sys.exit(main())
