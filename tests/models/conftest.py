"""The tiny models of tests/golden/models.json as folders."""

from __future__ import annotations

import importlib.util
import json
from functools import cache
from pathlib import Path

import numpy as np
import pytest

GOLDEN = Path(__file__).parent.parent / "golden"
spec = importlib.util.spec_from_file_location("model_cases", GOLDEN / "model_cases.py")
cases = importlib.util.module_from_spec(spec)
spec.loader.exec_module(cases)


@cache
def described() -> dict:
    return json.loads((GOLDEN / "models.json").read_text(encoding="utf-8"))


@pytest.fixture(scope="session")
def golden() -> dict[str, np.ndarray]:
    """What transformers computed, by ``case/result``."""
    with np.load(GOLDEN / "models.npz") as file:
        return dict(file)


@pytest.fixture(scope="session")
def folder_of(tmp_path_factory):
    """Writes a case as a Hugging Face folder, once; returns its path."""
    safetensors = pytest.importorskip("safetensors.numpy")

    @cache
    def write(case: str) -> Path:
        row, folder = described()[case], tmp_path_factory.mktemp(case)
        (folder / "config.json").write_text(json.dumps(row["config"]), encoding="utf-8")
        safetensors.save_file(cases.weights(row["shapes"], row["seed"]), folder / "model.safetensors", metadata={"format": "pt"})
        return folder

    return write
