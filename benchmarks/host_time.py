"""Host time of warm calls, in several trees of netcl: CPU time of the calling thread, best of several rounds.

    python benchmarks/host_time.py [--device pocl] [--rounds 5] [--out FILE] NAME=PATH [NAME=PATH ...]

Each round starts one process per tree, in turn. A PATH is a checkout; the first one is the yardstick. Kernels that run in the driver's own
threads do not count. Quiet machine: both modes of a shared one (6 and 10 us for the same call) show up in single runs.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

REPEATS = 25
CALLS = {"add 4x4": 50, "softmax 64x128": 50, "Linear + ReLU": 50, "MLP step, forward": 10, "MLP step, eager": 10, "MLP step, replayed": 10}


def ways(queue: Any) -> dict[str, Callable[[], object]]:
    """The calls to time, on data that is already on the device."""
    import netcl
    import netcl.autograd as ag
    from netcl import nn, optim
    from netcl.core.tensor import Tensor

    rng = np.random.default_rng(0)
    small, wide, x = (Tensor.from_host(queue, rng.normal(size=n).astype("float32")) for n in ((4, 4), (64, 128), (64, 784)))
    y = Tensor.from_host(queue, rng.integers(0, 10, 64).astype("int32"))
    layer = nn.Sequential(nn.Linear(784, 128), nn.ReLU())
    model = nn.Sequential(nn.Linear(784, 128), nn.ReLU(), nn.Linear(128, 10))
    optimizer = optim.SGD(model.parameters(), lr=0.1)

    def step(x: Any, y: Any) -> Any:
        optimizer.zero_grad()
        loss = ag.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        return loss

    compiled = netcl.compile(step)
    return {
        "add 4x4": lambda: ag.add(small, small),
        "softmax 64x128": lambda: ag.softmax(wide),
        "Linear + ReLU": lambda: layer(x),
        "MLP step, forward": lambda: ag.cross_entropy(model(x), y),
        "MLP step, eager": lambda: step(x, y),
        "MLP step, replayed": lambda: compiled(x, y),
    }


def measure(selector: str) -> dict[str, float]:
    """Microseconds per call in this process, whose netcl is that of ``PYTHONPATH``."""
    import netcl
    from netcl.core.device import manager

    queue, best = manager.default(selector).queue, {}
    with netcl.device(selector):
        for name, way in ways(queue).items():
            for _ in range(30):
                way()
            queue.finish()
            best[name] = float("inf")
            for _ in range(REPEATS):
                start = time.thread_time()
                for _ in range(CALLS[name]):
                    way()
                best[name] = min(best[name], (time.thread_time() - start) / CALLS[name] * 1e6)
                queue.finish()
    return best


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("trees", nargs="*")
    parser.add_argument("--device", default="pocl")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        print(json.dumps(measure(options.device)))
        return
    trees = dict(tree.split("=", 1) for tree in options.trees)
    best: dict[str, dict[str, float]] = {name: {} for name in trees}
    for _ in range(options.rounds):
        for name, path in trees.items():
            command = [sys.executable, __file__, "--worker", "--device", options.device]
            first_on_the_path = os.pathsep.join([str(Path(path).resolve()), os.environ.get("PYTHONPATH", "")])
            done = subprocess.run(
                command, stdout=subprocess.PIPE, text=True, check=True, env={**os.environ, "PYTHONPATH": first_on_the_path}
            )
            for case, value in json.loads(done.stdout.splitlines()[-1]).items():
                best[name][case] = round(min(value, best[name].get(case, float("inf"))), 1)
    first = next(iter(best.values()))
    rows = [{"case": case, **{name: found[case] for name, found in best.items()},
             "ratio": {name: round(found[case] / first[case], 3) for name, found in best.items()}} for case in CALLS]  # fmt: skip
    for row in rows:
        print(json.dumps(row))
    if options.out:
        facts = {"device": options.device, "machine": platform.machine(), "python": platform.python_version(), "rounds": options.rounds}
        options.out.write_text(json.dumps({"facts": facts, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
