"""Compares netcl's sessions with torchvision's models as torch exports them, with the weights and inputs of vision_model_cases.py.

    python tests/golden/torchvision_onnx.py export FOLDER NAME ...   with an interpreter that has torchvision and onnx
    python tests/golden/torchvision_onnx.py compare FOLDER           with one that has netcl and onnx

No test needs it. The weights have the gain of vision_models.json, which keeps logits near 1. The difference is relative to the largest
expected value, and at most 1e-4.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))
import vision_model_cases as cases  # noqa: E402

EXPECTED = json.loads((HERE / "vision_models.json").read_text(encoding="utf-8"))


def export(folder: Path, names: list[str]) -> None:
    import make_vision_models
    import torch

    torch.backends.mha.set_fastpath_enabled(False)  # which has no ONNX form
    for name in names:
        model = make_vision_models.make(name, **cases.options(name))
        with torch.no_grad():
            make_vision_models.fill(name, model, EXPECTED[name]["gain"])
        x = torch.from_numpy(cases.images(name))
        torch.onnx.export(model, (x,), folder / f"{name}.onnx", dynamo=False, opset_version=17)
        print(f"{name}: exported", flush=True)


def compare(folder: Path) -> None:
    import netcl.onnx

    wrong = []
    for path in sorted(folder.glob("*.onnx")):
        session, wanted = netcl.onnx.InferenceSession(path), np.array(EXPECTED[path.stem]["out"], np.float32)
        feed = {session.get_inputs()[0].name: cases.images(path.stem)}
        for _ in range(3):  # eager, recorded, replayed
            made = session.run(None, feed)[0]
        made = cases.summary(netcl.tensor(made))["out"].to_host()
        error = float(np.abs(made - wanted).max() / np.abs(wanted).max())
        wrong += [path.stem] if not error <= 1e-4 else []
        print(f"{path.stem:32} {error:.1e} of {np.abs(wanted).max():.2f}; {dict(session.rewrites)}", flush=True)
    if wrong:
        raise SystemExit(f"wrong: {', '.join(wrong)}")


if __name__ == "__main__":
    verb, place, *rest = sys.argv[1:]
    export(Path(place), rest) if verb == "export" else compare(Path(place))
