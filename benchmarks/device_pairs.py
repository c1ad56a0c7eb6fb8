"""After 20 steps, how far parameters trained on several devices are from those of one device on the whole batch.

    python benchmarks/device_pairs.py intel intel/2 intel,pthread --out FILE

The first selector is the one device; ``a/2`` are two sub-devices of ``a``, ``a,b`` two devices. Gradients are clipped: the tiny ResNet is
chaotic otherwise, and rounding alone would part two runs.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np

ROOT = Path(__file__).parent.parent
MODELS = ("mlp", "resnet", "gpt")
LIMIT = 1e-5


def parameters(model: str, one: str, devices: str, folder: Path) -> list[np.ndarray]:
    """What ``tests/distributed/job.py`` ends with: the losses, then the parameters."""
    out = folder / "end.npz"
    chosen = ["--devices", devices] if devices else []
    command = [sys.executable, str(ROOT / "tests" / "distributed" / "job.py"), model, str(out), "--max-norm", "1", *chosen]
    subprocess.run(command, check=True, env={**os.environ, "NETCL_DEVICE": one, "PYTHONPATH": str(ROOT)})
    with np.load(out) as ended:
        return [ended[name] for name in ended.files]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("one", help="the device that does it alone")
    parser.add_argument("several", nargs="+", help="a/2 or a,b")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for model in MODELS:
            alone = parameters(model, args.one, "", Path(folder))
            for devices in args.several:
                together = parameters(model, args.one, devices, Path(folder))
                far = max(float(np.abs(a - b).max()) for a, b in zip(alone[1:], together[1:], strict=True))
                rows.append({"model": model, "alone": args.one, "together": devices, "steps": len(alone[0]), "largest difference": far,
                             "within": far <= LIMIT})  # fmt: skip
                print(rows[-1], flush=True)
    if args.out:
        args.out.write_text(json.dumps({"command": " ".join(sys.argv), "limit": LIMIT, "rows": rows}, indent=1) + "\n")
    return 0 if all(row["within"] for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
