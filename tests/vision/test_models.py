"""The model zoo against torchvision: names and shapes of every state dict, results of the smallest of each family (of all with --full)."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import numpy as np
import pytest

import netcl
from netcl.nn import init
from netcl.vision import models

GOLDEN = Path(__file__).parent.parent / "golden"
EXPECTED = json.loads((GOLDEN / "vision_models.json").read_text(encoding="utf-8"))
_spec = importlib.util.spec_from_file_location("vision_model_cases", GOLDEN / "vision_model_cases.py")
cases = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(cases)

SMALL = ("convnext_tiny", "deeplabv3_mobilenet_v3_large", "densenet121", "efficientnet_b0", "efficientnet_v2_s", "googlenet",
         "inception_v3", "lraspp_mobilenet_v3_large", "mobilenet_v2", "mobilenet_v3_small", "regnet_y_400mf", "resnet18", "resnext50_32x4d",
         "shufflenet_v2_x0_5", "squeezenet1_1", "swin_t", "swin_v2_t")  # fmt: skip


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "compared" in metafunc.fixturenames:
        metafunc.parametrize("compared", sorted(EXPECTED) if metafunc.config.getoption("--full") else SMALL)


def filled(name: str):
    """The model with the weights that torchvision's had."""
    with init.skipped():
        model = models.get_model(name, **cases.options(name)).eval()
    own = model.state_dict()
    for key, value in cases.weights(name, {key: tensor.shape for key, tensor in own.items()}, EXPECTED[name]["gain"]):
        own[key].write(value)
    return model


def check(name: str, result) -> None:
    found = cases.summary(result)
    assert set(found) == set(EXPECTED[name]) - {"keys", "parameters", "gain"}
    for key, value in found.items():
        np.testing.assert_allclose(value.to_host(), EXPECTED[name][key], rtol=1e-4, atol=1e-4, err_msg=key)


def test_the_names_are_torchvisions():
    assert models.list_models() == sorted(EXPECTED)


@pytest.mark.parametrize("name", sorted(EXPECTED))
def test_state_dicts_have_torchvisions_names_and_shapes(name):
    with netcl.device("cpu"), init.skipped():
        model = models.get_model(name)
    assert cases.keys_and_shapes(model.state_dict()) == EXPECTED[name]["keys"]
    assert sum(p.size for p in model.parameters()) == EXPECTED[name]["parameters"]


def test_results_are_torchvisions(compared):
    with netcl.device("cpu"), netcl.no_grad():
        model = filled(compared)
        if compared.startswith("ssd"):
            check_detections(compared, model)
        else:
            check(compared, model(netcl.tensor(cases.images(compared))))


def check_detections(name: str, model) -> None:
    x = list(netcl.tensor(cases.images(name)))
    for found, expected in zip(model(x), EXPECTED[name]["detections"], strict=True):
        assert found["labels"].tolist() == expected["labels"]
        np.testing.assert_allclose(found["scores"].to_host(), expected["scores"], atol=1e-4)
        np.testing.assert_allclose(found["boxes"].to_host(), expected["boxes"], atol=1e-2)
    losses = model.train()(x, cases.targets())
    for key, value in EXPECTED[name]["losses"].items():
        np.testing.assert_allclose(float(losses[key].item()), value, rtol=1e-4)
