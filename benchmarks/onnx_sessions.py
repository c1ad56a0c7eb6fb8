"""Sessions of netcl beside onnxruntime's on the same cores: published OCR and file-type models, ResNet-50, MobileNetV2, EfficientNet-B0.

    python tools/fetch_models.py build/models
    python benchmarks/onnx_sessions.py [--device auto] [--threads 2] [--repeats 9] [--batches 1,8] [--only NAME] [--commit ID] [--quick]
    [--models build/models] [--exports FOLDER] [--out FILE]

Both sessions are warm, take turns, and the best of the repeats counts; outputs are compared before. On CPUs that others use as well,
compare the CPU seconds of a run: ``ours_cpu_s`` of all threads, ``theirs_cpu_s`` of onnxruntime with one thread, because its other
threads spin while they wait. The vision models are exported here with seeded random weights, into a folder that ``--exports`` keeps.
Rows also say how many commands a replay enqueues. Writes ``results/onnx_sessions_<device>.json`` after every row. A row with a wrong result
holds the error instead of times.
"""

from __future__ import annotations

import argparse
import json
import re
import shlex
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np

sys.path[:0] = [str(Path(__file__).parent.parent), str(Path(__file__).parent)]
from run import facts, hold_to, kind_of  # noqa: E402

VISION = ("resnet50", "mobilenet_v2", "efficientnet_b0")
#: Published models: a part of the file's name, the shape of an input without its batch, a smaller one for --quick.
PUBLISHED = {
    "ocr detection": ("_det_", (3, 640, 640), (3, 64, 64)),
    "ocr recognition": ("_rec_", (3, 48, 320), (3, 48, 64)),
    "ocr classification": ("_cls_", (3, 48, 192), (3, 48, 192)),
    "magika": ("model", (2048,), (2048,)),
}


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--batches", default="1,8")
    parser.add_argument("--only", default="", help="a part of a model's name")
    parser.add_argument("--models", default="build/models")
    parser.add_argument("--exports", default="", help="folder of exported vision models; those that it has are not exported again")
    parser.add_argument("--commit", default="", help="of a copy without a repository")
    parser.add_argument("--quick", action="store_true", help="small inputs, two repeats")
    parser.add_argument("--out", default="")
    parser.set_defaults(cases="", sweep=False)  # which facts() reads
    return parser.parse_args()


def cases(chosen: argparse.Namespace, folder: Path) -> Iterator[tuple[str, Path, tuple[int, ...]]]:
    """Each model: its name, its file and the shape of an input without the batch."""
    import netcl
    from netcl import io
    from netcl.vision import models

    for name, (part, shape, small) in PUBLISHED.items():
        found = [path for path in sorted(Path(chosen.models).rglob("*.onnx")) if part in path.name]
        if chosen.only in name and found:
            yield name, found[0], small if chosen.quick else shape
        elif chosen.only in name:
            print(f"{name}: not in {chosen.models}; python tools/fetch_models.py {chosen.models} fetches it", flush=True)
    size = 64 if chosen.quick else 224
    for name in VISION:
        path = folder / f"{name}_{size}.onnx"
        if chosen.only in name and path.exists():
            yield name, path, (3, size, size)
        elif chosen.only in name:
            with netcl.device("cpu"), netcl.no_grad():
                netcl.manual_seed(0)
                x = np.zeros((2, 3, size, size), np.float32)
                io.export_onnx(models.get_model(name).eval(), path, netcl.tensor(x), dynamic_batch=True)
            yield name, path, (3, size, size)


def _best(sessions: dict[str, Any], feed: dict[str, np.ndarray], repeats: int, clock: Callable[[], float]) -> dict[str, float]:
    """Return the least time of a run of each session by ``clock``; they take turns, after two runs that do not count."""
    best = dict.fromkeys(sessions, float("inf"))
    for i in range(repeats + 2):
        for key, session in sessions.items():
            begin = clock()
            session.run(None, feed)
            best[key] = min(best[key], clock() - begin) if i > 1 else best[key]
    return best


def measure(name: str, path: Path, shape: tuple[int, ...], batch: int, chosen: argparse.Namespace) -> dict[str, Any]:
    """A row of the results; without times if the outputs differ."""
    import onnxruntime

    import netcl.onnx

    def rival(threads: int) -> Any:
        settings = onnxruntime.SessionOptions()
        settings.intra_op_num_threads = threads
        return onnxruntime.InferenceSession(str(path), settings, providers=["CPUExecutionProvider"])

    mine = netcl.onnx.InferenceSession(path, device=chosen.device)
    (entry,) = mine.get_inputs()
    rng = np.random.default_rng(0)
    whole = entry.dtype.kind in "iu"
    x = (rng.integers(0, 256, (batch, *shape)) if whole else rng.standard_normal((batch, *shape))).astype(entry.dtype)
    title = f"{name} {'x'.join(map(str, shape))}, batch {batch}"
    feed, repeats = {entry.name: x}, 2 if chosen.quick else chosen.repeats
    sessions = {"netcl": mine, "one thread": rival(1)}
    for _ in range(3):  # eager, recorded, replayed
        results = {key: session.run(None, feed)[0] for key, session in sessions.items()}
    error = np.abs(results["netcl"] - results["one thread"]).max() / max(np.abs(results["one thread"]).max(), 1e-6)
    if not error < 1e-3 and name != "ocr detection":  # which answers noise with numbers that onnxruntime rounds to 0
        return {"case": title, "error": f"the outputs differ by {error:.2e} (relative)"}
    spent = _best(sessions, feed, repeats, time.process_time)
    best = _best({"netcl": mine, "onnxruntime": rival(chosen.threads)}, feed, repeats, time.perf_counter)
    return {
        "case": title, "yardstick": "onnxruntime", "ours_s": best["netcl"], "theirs_s": best["onnxruntime"],
        "ratio": (ratio := best["netcl"] / best["onnxruntime"]), "target": 1.0, "met": ratio <= 1.0,
        "ours_cpu_s": spent["netcl"], "theirs_cpu_s": spent["one thread"], "commands": mine.commands, "rewrites": dict(mine.rewrites),
    }  # fmt: skip


def main() -> None:
    chosen = options()
    if kind_of(chosen.device) == "cpu":
        hold_to(chosen.threads)
    from netcl.bench import setting

    where = setting(chosen.device, repeats=chosen.repeats, quick=chosen.quick, with_torch=False)
    device = re.sub(r"\W+", "_", f"{where.handle.platform_name} {where.handle.device_name}".lower()).strip("_")
    target = Path(chosen.out or Path(__file__).parent / "results" / f"onnx_sessions_{device}.json")
    made_by = (
        f"python benchmarks/onnx_sessions.py --device {shlex.quote(chosen.device)} --threads {chosen.threads} --repeats {chosen.repeats}"
    )
    known, rows = {**facts(where, chosen), "made by": made_by}, list[dict[str, Any]]()
    known["versions"]["onnxruntime"] = metadata.version("onnxruntime")
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(chosen.exports or scratch)
        folder.mkdir(parents=True, exist_ok=True)
        for name, path, shape in cases(chosen, folder):
            for batch in map(int, chosen.batches.split(",")):
                rows.append(measure(name, path, shape, batch, chosen))
                print(json.dumps(rows[-1]), flush=True)
                target.write_text(json.dumps({"facts": known, "rows": rows}, indent=1) + "\n", encoding="utf-8")
    print(f"written: {target}")
    if any("error" in row for row in rows):
        raise SystemExit("wrong results")


if __name__ == "__main__":
    main()
