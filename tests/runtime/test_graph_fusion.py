"""fuse_graph: batch norms folded into the layer before them, ops fused, and the outputs as they were."""

import numpy as np
import pytest

import netcl.autograd as ag
from netcl import nn
from netcl.core.errors import ShapeError
from netcl.core.hooks import hooks
from netcl.core.nested import tensors_in
from netcl.io import load_model, save_model
from netcl.runtime.graph_fusion import fuse_graph


def settled(model, rng):
    """In evaluation, with statistics and weights that are not ones and zeros."""
    for module in model.modules():
        if getattr(module, "running_mean", None) is not None:
            n = module.num_features
            module.running_mean.write(rng.normal(size=n).astype(np.float32))
            module.running_var.write(rng.uniform(0.5, 2.0, n).astype(np.float32))
            module.weight.write(rng.uniform(0.5, 1.5, n).astype(np.float32))
            module.bias.write(rng.normal(size=n).astype(np.float32))
    return model.eval()


def launches(function, x):
    names = []
    seen = lambda kernel, *rest: names.append(kernel.name)  # noqa: E731
    hooks.launch_observers.append(seen)
    try:
        with ag.no_grad():
            result = function(x).to_host()
    finally:
        hooks.launch_observers.remove(seen)
    return result, names


def test_a_sequence_is_folded(device, rng):
    model = settled(nn.Sequential(nn.Conv2d(3, 5, 3, padding=1, bias=False), nn.BatchNorm2d(5), nn.ReLU(), nn.Flatten(),
                                  nn.Linear(5 * 36, 4), nn.BatchNorm1d(4)), rng)  # fmt: skip
    x = ag.tensor(rng.normal(size=(2, 3, 6, 6)).astype(np.float32), queue=device.queue)
    fused = fuse_graph(model, x)
    want, plain = launches(model, x)
    got, fewer = launches(fused, x)
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-4)
    if device.backend == "cl":
        assert len(fewer) < len(plain) and "norm" not in " ".join(fewer)
    np.testing.assert_allclose(model(x).to_host(), want, rtol=1e-6)  # the model itself is as it was


def test_a_residual_block_is_two_kernels(device, rng):
    """Convolution, folded norm, shortcut and activation in one launch each; and again when the graph is replayed."""
    model = settled(nn.BasicBlock(33, 33), rng)
    x = ag.tensor(rng.normal(size=(2, 33, 5, 5)).astype(np.float32), queue=device.queue)
    want, _ = launches(model, x)
    fused = fuse_graph(model, x)
    for _ in range(4):
        got, names = launches(fused, x)
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-4)
        assert not [name for name in names if name.startswith("op_")]
        assert device.backend == "cpu" or len([name for name in names if name not in ("sum_splits", "pack_taps")]) == 2, names


class Twice(nn.Module):
    """The input of a norm is used beside it."""

    def __init__(self):
        super().__init__()
        self.first, self.norm = nn.Conv2d(2, 2, 1), nn.BatchNorm2d(2)
        self.second, self.other = nn.Conv2d(2, 2, 1), nn.BatchNorm2d(2)

    def forward(self, x):
        y = self.first(x)
        return self.other(self.second(self.norm(y) + y)), y


class Rectified(nn.Linear):
    def forward(self, x):
        return ag.relu(super().forward(x))


def tied():
    layers = [nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4), nn.BatchNorm1d(4)]
    layers[2].weight = layers[0].weight
    return nn.Sequential(*layers)


def one_layer_called_twice():
    layer = nn.Linear(4, 4)
    return nn.Sequential(layer, nn.BatchNorm1d(4), layer, nn.BatchNorm1d(4))


MODELS = {
    "the input of a norm is used elsewhere": (Twice, (1, 2, 3, 3)),
    "tied weights": (tied, (3, 4)),
    "one layer called twice": (one_layer_called_twice, (3, 4)),
    "another forward": (lambda: nn.Sequential(Rectified(4, 4), nn.BatchNorm1d(4)), (3, 4)),
    "channels are not features": (lambda: nn.Sequential(nn.Linear(2, 4), nn.BatchNorm1d(4)), (5, 4, 2)),
    "two norms": (lambda: nn.Sequential(nn.Conv2d(2, 4, 1), nn.BatchNorm2d(4), nn.BatchNorm2d(4)), (1, 2, 3, 3)),
    "groups": (lambda: nn.Sequential(nn.Conv2d(4, 4, 3, groups=4, bias=False), nn.BatchNorm2d(4), nn.ReLU6()), (2, 4, 5, 5)),
    "a line": (lambda: nn.Sequential(nn.Conv1d(2, 4, 3), nn.BatchNorm1d(4), nn.SiLU()), (2, 2, 7)),
    "a transposed convolution": (lambda: nn.Sequential(nn.ConvTranspose2d(2, 4, 2, 2), nn.BatchNorm2d(4), nn.ReLU()), (2, 2, 3, 3)),
}


@pytest.mark.parametrize("name", list(MODELS))
def test_outputs_are_those_of_the_model(device, rng, name):
    make, shape = MODELS[name]
    model, x = settled(make(), rng), ag.tensor(rng.normal(size=shape).astype(np.float32), queue=device.queue)
    fused = fuse_graph(model, x)
    for _ in range(2):
        with ag.no_grad():
            want, got = tensors_in(model(x)), tensors_in(fused(x))
        for one, other in zip(want, got, strict=True):
            np.testing.assert_allclose(other.to_host(), one.to_host(), rtol=1e-4, atol=1e-5)


def test_float64_is_folded_in_float64(device, rng):
    model = settled(nn.Sequential(nn.Linear(2, 4), nn.BatchNorm1d(4)), rng).to("float64")
    x = ag.tensor(rng.normal(size=(3, 2)), "float64", queue=device.queue)
    np.testing.assert_allclose(fuse_graph(model, x)(x).to_host(), model(x).to_host(), rtol=1e-13)


def test_a_fused_model_is_saved_as_the_model(rng, tmp_path):
    with nn.parameter.placed("cpu"):
        model = settled(nn.Sequential(nn.Linear(3, 2, bias=False), nn.BatchNorm1d(2)), rng)
    x = ag.tensor(rng.normal(size=(2, 3)).astype(np.float32), queue=model.queue)
    save_model(fuse_graph(model, x), tmp_path / "model.netcl")
    np.testing.assert_array_equal(load_model(tmp_path / "model.netcl", "cpu")(x).to_host(), model(x).to_host())


def test_functions_are_recorded_with_fused_ops(device):
    fused = fuse_graph(lambda x: ag.relu(x * 2.0 + 1.0) * 0.5)
    x = ag.tensor([1.0, -2.0], queue=device.queue)
    for _ in range(5):
        assert fused(x).tolist() == [1.5, 0.0]


def test_a_model_in_training_is_refused():
    with (
        nn.parameter.placed("cpu"),
        pytest.raises(ShapeError, match=r"\[fuse_graph\] the model must be in evaluation mode; call model.eval\(\)"),
    ):
        fuse_graph(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)))
