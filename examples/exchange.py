"""Models in and out: torch state dicts, safetensors, ONNX and netcl's own files, all without torch.

python examples/exchange.py [--device gpu]
"""

import argparse
import importlib.util
import tempfile
from pathlib import Path

import numpy as np

import netcl
from netcl import io, nn


def model() -> nn.Module:
    return nn.Sequential(nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(16 * 8 * 8, 10))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--smoke", action="store_true", help="it is short anyway")
    arguments = parser.parse_args()
    x = np.random.default_rng(0).standard_normal((2, 1, 8, 8)).astype(np.float32)
    with netcl.device(arguments.device), tempfile.TemporaryDirectory() as name:
        folder, mine = Path(name), model().eval()
        wanted = mine(x).to_host()

        io.save_model(mine, folder / "model.netcl")  # architecture and weights
        answers = {"netcl": io.load_model(folder / "model.netcl").eval()(x)}

        io.save_torch(mine, folder / "weights.pt")  # torch.load(..., weights_only=True) reads it
        io.save_safetensors(mine, folder / "weights.safetensors")
        for file, load in (("weights.pt", io.load_torch), ("weights.safetensors", io.load_safetensors)):
            again = model().eval()
            again.load_state_dict(load(folder / file))
            answers[file] = again(x)

        if importlib.util.find_spec("onnx"):
            io.export_onnx(mine, folder / "model.onnx", x, dynamic_batch=True)
            answers["onnx"] = io.import_onnx(folder / "model.onnx").eval()(x)

        for what, answer in answers.items():
            np.testing.assert_allclose(answer.to_host(), wanted, rtol=1e-5, atol=1e-6)
            print(f"{what:20} the same answers")


if __name__ == "__main__":
    main()
