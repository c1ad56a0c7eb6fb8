"""Memory of a training step on an NVIDIA GPU: what the whole process holds after five steps, ours and torch's.

    python benchmarks/gpu_memory.py [--models "ResNet-18" "U-Net" ...] [--out FILE.json]

Each way runs in a process of its own, ours after one that compiles its programs; the figure is that of ``nvidia-smi``, so pools, caches of
freed memory, programs and the driver's own share count on both sides. ResNet-18 is torchvision's form with the CIFAR stem (batch of 256);
the others are those of ``zoo.py``.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np

sys.path[:0] = [str(Path(__file__).parent.parent), str(Path(__file__).parent)]
WAYS = ("torch", "eager", "compiled")
STEPS = 5


def _held() -> float:
    """Megabytes of the only process on the GPU."""
    query = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    return float(subprocess.run(query, capture_output=True, check=True, text=True).stdout.split()[0])


def _problem(name: str, framework: Any) -> tuple[Any, np.ndarray, np.ndarray]:
    from torch_models import resnet18
    from zoo_models import ZOO, build

    if name != "ResNet-18":
        x, y = ZOO[name].batch(ZOO[name].gpu)
        return build(name, framework), x, y
    draw = np.random.default_rng(0)
    model = resnet18(framework) if framework.__name__ == "torch" else framework.nn.ResNet18()
    model.loss = lambda x, y: framework.nn.functional.cross_entropy(model(x), y)
    return model, draw.standard_normal((256, 3, 32, 32), np.float32), draw.integers(0, 10, 256)


def _run(name: str, way: str) -> None:
    before = _held()
    if way == "torch":
        import torch as framework

        model, x, y = _problem(name, framework)
        model, data = model.cuda(), [framework.from_numpy(a).cuda() for a in (x, y)]
    else:
        import netcl as framework

        framework.set_default_device("gpu")
        model, x, y = _problem(name, framework)
        data = [framework.tensor(a) for a in (x, y)]
    update = framework.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)

    def step(x: Any, y: Any) -> Any:
        update.zero_grad()
        loss = model.loss(x, y)
        loss.backward()
        update.step()
        return loss

    if way == "compiled":
        step = framework.compile(step)
    loss = 0.0
    for _ in range(STEPS):
        loss = float(step(*data))
    print(json.dumps({"MB": _held() - before, "loss": loss}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=["ResNet-18", "ResNet-50", "U-Net", "GPT-2", "ViT-S"])
    parser.add_argument("--way", help="run one way in this process")
    parser.add_argument("--commit", default="", help="of a copy without a repository")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    if options.way:
        return _run(options.models[0], options.way)
    rows = {}
    for name in options.models:
        rows[name] = {}
        for way in WAYS:
            command = [sys.executable, __file__, "--models", name, "--way", way]
            for _ in range(1 if way == "torch" else 2):  # processes that compile programs hold memory of the GPU, too, for a while
                done = subprocess.run(command, capture_output=True, text=True)
            if done.returncode:
                sys.exit(f"{name}, {way}: {done.stderr[-2000:]}")
            rows[name][way] = json.loads(done.stdout.splitlines()[-1])
        ratios = ", ".join(f"{way} {rows[name][way]['MB'] / rows[name]['torch']['MB']:.2f}" for way in WAYS[1:])
        print(f"{name}: torch {rows[name]['torch']['MB']:.0f} MB, of that {ratios}", flush=True)
    if options.out:
        options.out.write_text(json.dumps({"commit": options.commit, "rows": rows}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
