"""Models in one file: any registered architecture, with everything that was learned."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import numpy as np
import pytest

import netcl
from netcl import nn
from netcl.core.device import device as activate
from netcl.io import load_model, load_params, save_model
from netcl.ops import random

IMAGES, TOKENS = np.linspace(-1, 1, 2 * 3 * 8 * 8).reshape(2, 3, 8, 8).astype(np.float32), np.arange(12).reshape(2, 6) % 11
ARCHITECTURES = {
    "sequential": (
        lambda: nn.Sequential(nn.Flatten(), nn.Linear(192, 9), nn.BatchNorm1d(9), nn.ReLU(), nn.Dropout(0.5), nn.Linear(9, 3)),
        IMAGES,
    ),
    "nested": (
        lambda: nn.Sequential(nn.Conv2d(3, 4, 3, padding="same"), nn.Residual(nn.Sequential(nn.Conv2d(4, 4, 1), nn.GELU()))),
        IMAGES,
    ),
    "mlp": (lambda: nn.Sequential(nn.Flatten(), nn.MLP(192, [8, 7], 3)), IMAGES),
    "lenet": (lambda: nn.LeNet(10, 3, 20), np.tile(IMAGES, (1, 1, 3, 3))[:, :, :20, :20]),
    "resnet18": (lambda: nn.resnet18(num_classes=4), IMAGES),
    "lstm": (lambda: nn.LSTM(8, 5, num_layers=2), IMAGES[0]),
    "vit": (lambda: nn.ViT(image_size=8, patch_size=4, num_layers=2, num_heads=2, hidden_dim=8, mlp_dim=16, num_classes=3), IMAGES),
    "gpt": (lambda: nn.GPT(11, block_size=6, n_layer=2, n_head=2, n_embd=8), TOKENS),
}


@pytest.fixture(autouse=True)
def on_numpy():
    with activate("cpu"):
        random.manual_seed(1)
        yield


def first(value):
    return value[0] if isinstance(value, tuple) else value


def bits(model: nn.Module) -> dict[str, tuple]:
    return {name: (t.dtype, t.shape, t.to_host().tobytes()) for name, t in model.state_dict().items()}


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_any_registered_architecture_comes_back(tmp_path, name):
    make, x = ARCHITECTURES[name]
    model = make()
    model.train()(x)  # moves running statistics away from where they start
    save_model(model.eval(), tmp_path / "model.netcl")
    assert os.listdir(tmp_path) == ["model.netcl"]
    again = load_model(tmp_path / "model.netcl")
    assert type(again) is type(model) and repr(again) == repr(model) and bits(again) == bits(model) and not again.training
    assert first(again(x)).tolist() == first(model(x)).tolist()


def test_a_fresh_process_loads_the_page_of_the_manual(tmp_path):
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    save_model(model, tmp_path / "checkpoint.netcl")
    code = """from netcl.core.device import device
with device("cpu"):
    from netcl.io import save_model, load_model
    model = load_model("checkpoint.netcl")
    print(model([[1.0, 2.0, 3.0, 4.0]]).tolist())"""
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True)
    assert (done.stdout.strip(), done.stderr) == (str(model([[1.0, 2.0, 3.0, 4.0]]).tolist()), "")


def test_the_file_is_an_npz_archive_with_json(tmp_path):
    save_model(nn.Linear(3, 2), tmp_path / "m.netcl")
    with np.load(tmp_path / "m.netcl", allow_pickle=False) as file:
        meta = json.loads(str(file["__netcl_meta__"]))
        assert sorted(file.files) == ["__netcl_meta__", "bias", "weight"] and file["weight"].shape == (2, 3)
    assert (meta["type"], meta["version"], meta["config"]["args"]["in_features"]) == ("Linear", 1, 3)
    assert sorted(load_params(tmp_path / "m.netcl")) == ["bias", "weight"]


def test_dtypes_frozen_parameters_and_mode_come_back(tmp_path):
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    model[0].freeze()
    model[0].to("bfloat16")
    model[1].half()
    save_model(model.train(), tmp_path / "m.netcl")
    again = load_model(tmp_path / "m.netcl")
    assert bits(again) == bits(model) and again.training
    assert [p.requires_grad for p in again.parameters()] == [False, False, True, True]
    model[1].eval()  # as batch norms that are frozen
    save_model(nn.Sequential(model, model[1]), tmp_path / "m.netcl")
    again = load_model(tmp_path / "m.netcl")
    assert [again.training, again[0].training, again[0][0].training, again[0][1].training, again[1].training] == [True] * 3 + [False] * 2


def test_loading_draws_no_random_numbers(tmp_path):
    save_model(nn.Linear(3, 4), tmp_path / "m.netcl")
    before = random.get_state().as_dict()
    load_model(tmp_path / "m.netcl")
    assert random.get_state().as_dict() == before


def test_children_that_were_replaced_come_back(tmp_path):
    model = nn.resnet18(num_classes=4)
    model.fc = nn.Sequential(nn.Linear(512, 8), nn.ReLU(), nn.Linear(8, 2))
    save_model(model, tmp_path / "m.netcl")
    assert bits(load_model(tmp_path / "m.netcl")) == bits(model)


def test_the_root_shortcuts(tmp_path):
    model = nn.Linear(3, 2)
    netcl.save(model, tmp_path / "m.netcl")
    assert bits(netcl.load(tmp_path / "m.netcl")) == bits(model)
    for suffix in ("npz", "safetensors", "pt"):
        netcl.save(model, tmp_path / f"m.{suffix}")
        other = nn.Linear(3, 2)
        other.load_state_dict(netcl.load(tmp_path / f"m.{suffix}"))
        assert bits(other) == bits(model)


def test_a_model_moves_between_devices(device, tmp_path):
    model = nn.Sequential(nn.Linear(device.queue, 4, 3), nn.BatchNorm1d(device.queue, 3))
    save_model(model.eval(), tmp_path / "m.netcl")
    there, here = load_model(tmp_path / "m.netcl", device.queue), load_model(tmp_path / "m.netcl", "cpu")
    assert there.queue is device.queue and bits(there) == bits(here) == bits(model)
    x = [[1.0, 2.0, 3.0, 4.0]]
    assert there(x).tolist() == model(x).tolist()


def test_weights_that_are_one_come_back_as_one(tmp_path):
    """A layer in two places, and a weight two layers share: as two, they would be trained apart."""
    shared, tied = nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4).half())
    tied[2].weight = tied[0].weight
    for model, count in ((nn.Sequential(shared, nn.BatchNorm1d(4), shared), 4), (tied, 3)):
        save_model(model, tmp_path / "m.netcl")
        again = load_model(tmp_path / "m.netcl")
        assert len(again.parameters()) == len(model.parameters()) == count
        assert again[0].weight is again[2].weight
        for name, value in model.state_dict().items():
            assert again.state_dict()[name].dtype == value.dtype
            np.testing.assert_array_equal(again.state_dict()[name].to_host(), value.to_host())


def test_arguments_that_are_tuples_come_back_as_tuples(tmp_path):
    model = nn.Sequential(nn.Conv2d(2, 4, (3, 5), padding=(1, 2)), nn.Unflatten(1, (2, 2)))
    save_model(model, tmp_path / "m.netcl")
    assert repr(load_model(tmp_path / "m.netcl")) == repr(model)
