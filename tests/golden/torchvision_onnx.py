"""Compares netcl's zoo and its ONNX sessions with torchvision's models, with the weights and inputs of vision_model_cases.py.

    python tests/golden/torchvision_onnx.py export FOLDER NAME ...   with an interpreter that has torchvision and onnx
    python tests/golden/torchvision_onnx.py compare FOLDER           with one that has netcl and onnx

No test needs it. The weights have the gain of vision_models.json, which keeps logits near 1. Differences are relative to the largest
expected value, and at most 1e-4: of the model of ``netcl.vision.models``, and of a session with the file that torch exported.
``compare`` writes them to benchmarks/results/torchvision_onnx.json, which keeps the entries of other models.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))
import vision_model_cases as cases  # noqa: E402

RECORD, LIMIT = HERE.parent.parent / "benchmarks/results/torchvision_onnx.json", 1e-4
EXPECTED = json.loads((HERE / "vision_models.json").read_text(encoding="utf-8"))


def images(name: str) -> np.ndarray:
    """The images of vision_model_cases.py; of 224 pixels for models whose pooling torch does not export for smaller ones."""
    if not name.startswith(("alexnet", "vgg")):
        return cases.images(name)
    return np.random.default_rng(7).standard_normal((2, 3, 224, 224), np.float32)


def export(folder: Path, names: list[str]) -> None:
    import make_vision_models
    import torch

    torch.backends.mha.set_fastpath_enabled(False)  # which has no ONNX form
    for name in names:
        model = make_vision_models.make(name, **cases.options(name))
        x = torch.from_numpy(images(name))
        with torch.no_grad():
            make_vision_models.fill(name, model, EXPECTED[name]["gain"])
            np.save(folder / f"{name}.npy", cases.summary(model(x))["out"].numpy())
        torch.onnx.export(model, (x,), folder / f"{name}.onnx", dynamo=False, opset_version=17)
        print(f"{name}: exported", flush=True)


def difference(made: Any, wanted: np.ndarray) -> float:
    return float(np.abs(cases.summary(made)["out"].to_host() - wanted).max() / np.abs(wanted).max())


def of_zoo(name: str) -> float:
    """The difference of the model of the zoo."""
    import netcl
    from netcl.nn import init
    from netcl.vision import models

    with netcl.no_grad():
        with init.skipped():
            model = models.get_model(name, **cases.options(name)).eval()
        own = model.state_dict()
        for key, value in cases.weights(name, {key: tensor.shape for key, tensor in own.items()}, EXPECTED[name]["gain"]):
            own[key].write(value)
        return difference(model(netcl.tensor(cases.images(name))), np.array(EXPECTED[name]["out"], np.float32))


def of_session(path: Path) -> tuple[float, dict[str, int]]:
    """The difference of torch's export, and what was rewritten in it."""
    import netcl.onnx

    session = netcl.onnx.InferenceSession(path)
    feed = {session.get_inputs()[0].name: images(path.stem)}
    for _ in range(3):  # eager, recorded, replayed
        made = session.run(None, feed)[0]
    return difference(netcl.tensor(made), np.load(path.with_suffix(".npy"))), dict(session.rewrites)


def compare(folder: Path) -> None:
    import netcl

    where = netcl.get_default_device().device_name
    kept = json.loads(RECORD.read_text(encoding="utf-8"))["models"] if RECORD.exists() else {}
    for path in sorted(folder.glob("*.onnx")):
        error, rewrites = of_session(path)
        kept[path.stem] = {"zoo": float(f"{of_zoo(path.stem):.1e}"), "onnx": float(f"{error:.1e}")}
        print(f"{path.stem:32} {kept[path.stem]}; {rewrites}", flush=True)
        right = sum(max(entry.values()) <= LIMIT for entry in kept.values())
        facts = {"made by": "python tests/golden/torchvision_onnx.py", "device": where, "limit": LIMIT, "right": f"{right} of {len(kept)}"}
        RECORD.write_text(json.dumps({"facts": facts, "models": dict(sorted(kept.items()))}, indent=1) + "\n", encoding="utf-8")
    if wrong := [name for name, entry in kept.items() if not max(entry.values()) <= LIMIT]:
        raise SystemExit(f"wrong: {', '.join(wrong)}")


if __name__ == "__main__":
    verb, place, *rest = sys.argv[1:]
    export(Path(place), rest) if verb == "export" else compare(Path(place))
