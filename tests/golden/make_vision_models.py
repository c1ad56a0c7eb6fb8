"""Makes vision_models.json: what torchvision's models give for the weights and inputs of vision_model_cases.py.

Run with an interpreter that has torchvision 0.29: ``python tests/golden/make_vision_models.py [NAME ...]``. No test needs it. With names,
only their entries are made anew. Per model: the hash of its state dict's names and shapes, the number of parameters, the gain that
keeps its results near 1, and the results in float32.
"""

from __future__ import annotations

import json
import sys
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torchvision import models

sys.path.insert(0, str(Path(__file__).parent))
import vision_model_cases as cases

for _name in ("kaiming_normal_", "kaiming_uniform_", "normal_", "trunc_normal_", "uniform_", "xavier_uniform_"):
    setattr(torch.nn.init, _name, lambda tensor, *args, **options: tensor)  # every value is overwritten
FILE = Path(__file__).with_name("vision_models.json")
LEFT_OUT = ("quantized_*", "mvit*", "maxvit*", "swin3d*", "raft*", "r3d*", "r2plus1d*", "mc3*", "s3d*", "*rcnn*", "fcos*", "retinanet*",
            "ssdlite*", "mnasnet*")  # fmt: skip


def make(name: str, **options: Any) -> torch.nn.Module:
    own = {"weights_backbone": None} if name.startswith((*cases.SEGMENTATION, "ssd")) else {}
    own |= {"init_weights": False} if name in ("googlenet", "inception_v3") else {}
    return models.get_model(name, weights=None, **own, **options).eval()


def fill(name: str, model: torch.nn.Module, gain: float) -> None:
    own = model.state_dict()
    for key, value in cases.weights(name, {key: tuple(value.shape) for key, value in own.items()}, gain):
        own[key].copy_(torch.from_numpy(value))


def results(name: str, model: torch.nn.Module) -> dict[str, np.ndarray]:
    x = torch.from_numpy(cases.images(name))
    return {key: value.numpy() for key, value in cases.summary(model(x)).items()}


def detections(name: str, model: Any) -> dict[str, Any]:
    """Of the detector: its boxes, and the losses in training."""
    x, goals = torch.from_numpy(cases.images(name)), [{k: torch.from_numpy(v) for k, v in t.items()} for t in cases.targets()]
    found = [{key: value[:20].numpy().tolist() for key, value in image.items()} for image in model(list(x))]
    losses = {key: float(value) for key, value in model.train()(list(x), goals).items()}
    return {"detections": found, "losses": losses}


def entry(name: str) -> dict[str, Any]:
    whole = make(name)
    kept: dict[str, Any] = {"keys": cases.keys_and_shapes(whole.state_dict()), "parameters": sum(p.numel() for p in whole.parameters())}
    del whole
    model = make(name, **cases.options(name))
    if name.startswith("ssd"):
        fill(name, model, 1.0)
        return {**kept, "gain": 1.0, **detections(name, model)}
    low, high, gain = 0.0, None, 1.0
    for _ in range(12):
        fill(name, model, gain)
        out = results(name, model)
        spread = float(np.std(out["out"]))
        if 0.4 < spread < 2.5:
            break
        low, high = (low, gain) if not spread < 2.5 else (gain, high)
        gain = float(np.float32(2 * gain if high is None else (low + high) / 2))
    else:
        raise SystemExit(f"{name}: no gain found, {gain=} {spread=}")
    apart = float(np.abs(out["out"][0] - out["out"][1]).max())
    print(f"{name:32} gain {gain:8.4f} std {spread:.3f} between inputs {apart:.3f}", flush=True)
    assert apart > 0.005, "the model hardly depends on its input"
    return {**kept, "gain": gain, **{key: np.round(value, 7).tolist() for key, value in out.items()}}


def main() -> None:
    warnings.simplefilter("ignore")
    kept = json.loads(FILE.read_text()) if FILE.exists() else {}
    with torch.no_grad():
        for name in sys.argv[1:] or models.list_models(exclude=LEFT_OUT):
            kept[name] = entry(name)
            FILE.write_text("{\n" + ",\n".join(f'"{key}": {json.dumps(kept[key])}' for key in sorted(kept)) + "\n}\n")


if __name__ == "__main__":
    main()
