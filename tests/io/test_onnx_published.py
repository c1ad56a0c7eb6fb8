"""Published models give onnxruntime's outputs. Run by ``make test-models``, which fetches them with pip into build/models."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("onnx")
runtime = pytest.importorskip("onnxruntime")

import netcl.onnx as nonnx  # noqa: E402
from netcl.core.device import CPUQueue  # noqa: E402

FOLDER = os.environ.get("TEST_MODELS", "")
FILES = sorted(Path(FOLDER).rglob("*.onnx")) if FOLDER else []
#: Wheels that tools/fetch_models.py unpacks, and how many files each must hold.
WHEELS = {"magika": 1, "rapidocr_onnxruntime": 3, "silero_vad": 6}
SHAPES = {"_det_": (1, 3, 96, 128), "_rec_": (2, 3, 48, 160), "_cls_": (2, 3, 48, 192)}

pytestmark = pytest.mark.skipif(not FOLDER, reason="published models are fetched by `make test-models` only")


def page(shape: tuple[int, ...], rng: np.random.Generator) -> np.ndarray:
    """A light page with lines of dark strokes: a detector answers 0 to noise, and the smallest sigmoid of onnxruntime is 0."""
    image = np.full(shape, 0.9, np.float32)
    for top in range(8, shape[2] - 12, 24):
        for left in range(8, shape[3] - 12, 8):
            image[:, :, top : top + 12, left : left + 3] = rng.uniform(-1, 0)
    return image + rng.normal(0, 0.02, shape).astype(np.float32)


def inputs(path: Path, session, rng: np.random.Generator) -> dict[str, np.ndarray]:
    """Seeded values that the model is made for."""
    shape = next((shape for word, shape in SHAPES.items() if word in path.name), None)
    if shape:
        return {session.get_inputs()[0].name: page(shape, rng)}
    feed = {}
    for entry in session.get_inputs():
        known = {"input": [1, 576], "state": [2, 1, 128]} if "silero" in path.name else {}
        sizes = known.get(entry.name) or [size if isinstance(size, int) else 2 for size in entry.shape]
        whole = "int" in entry.type
        feed[entry.name] = rng.integers(0, 256, sizes).astype(np.int32) if whole else rng.normal(0, 0.3, sizes).astype(np.float32)
    return feed | ({"sr": np.array(16000)} if "sr" in feed else {})


def test_every_wheel_is_here():
    names = [path.relative_to(FOLDER).parts[0] for path in FILES]
    assert {name: names.count(name) for name in WHEELS} == WHEELS


@pytest.mark.timeout(600)
@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_outputs_are_onnxruntimes(path, device, rng):
    other = runtime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    session = nonnx.InferenceSession(path, device=device)
    for _ in range(5):  # eager, recorded, replayed; a model with a branch is recorded one run later
        feed = inputs(path, other, rng)
        wanted = other.run(None, feed)
        for entry, mine, expected in zip(session.get_outputs(), session.run(None, feed), wanted, strict=True):
            assert (mine.shape, mine.dtype) == (expected.shape, expected.dtype)
            np.testing.assert_allclose(mine, expected, rtol=1e-3, atol=1e-3 * np.abs(expected).max(), err_msg=entry.name)
            assert np.abs(expected).max() > 1e-5  # not all of it underflows
    assert isinstance(device.queue, CPUQueue) or [*session.plans.values()] == ["replay"]
