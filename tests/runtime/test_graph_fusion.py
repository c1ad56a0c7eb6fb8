"""fuse_graph: batch norms folded into the layer before them, ops fused, and the outputs as they were."""

import numpy as np
import pytest

import netcl.autograd as ag
from netcl import nn
from netcl.core.errors import ShapeError
from netcl.core.hooks import hooks
from netcl.io import load_model, save_model
from netcl.runtime.capture import compile
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
    assert fused.folded == ["0", "4"] and fuse_graph(model).folded == ["0", "4"]
    want, plain = launches(model, x)
    got, fewer = launches(fused, x)
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-4)
    if device.backend == "cl":
        assert len(fewer) < len(plain) and "batch_norm" not in " ".join(fewer)
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
        assert device.backend == "cpu" or len([name for name in names if name.startswith("conv_")]) == 2, names


def test_what_goes_elsewhere_is_left_alone(rng):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.norm = nn.Conv2d(2, 2, 1), nn.BatchNorm2d(2)
            self.second, self.other = nn.Conv2d(2, 2, 1), nn.BatchNorm2d(2)

        def forward(self, x):
            y = self.first(x)
            return self.other(self.second(self.norm(y) + y))

    with nn.parameter.placed("cpu"):
        model = settled(Net(), rng)
    x = ag.tensor(rng.normal(size=(1, 2, 3, 3)).astype(np.float32), queue=model.queue)
    fused = fuse_graph(model, x)
    assert fused.folded == ["second"]
    np.testing.assert_allclose(fused(x).to_host(), model(x).to_host(), rtol=1e-4, atol=1e-5)


def test_without_an_example_only_what_is_sure_is_folded(rng):
    class Reaching(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))

        def forward(self, x):
            return self.body(x) + self.body[0](x)

    with nn.parameter.placed("cpu"):
        shared = nn.Linear(3, 3)
        twice = nn.Sequential(shared, nn.BatchNorm1d(3), shared, nn.BatchNorm1d(3))
        nested = nn.Sequential(nn.Sequential(nn.Linear(3, 3)), nn.BatchNorm1d(3))
        cases = [(Reaching(), []), (twice, []), (nested, ["0.0"])]
        x = ag.tensor(rng.normal(size=(2, 3)).astype(np.float32), queue=shared.queue)
        for model, folded in cases:
            fused = fuse_graph(settled(model, rng))
            assert fused.folded == folded
            np.testing.assert_allclose(fused(x).to_host(), model(x).to_host(), rtol=1e-4, atol=1e-5)


def test_outputs_of_any_size_and_kind_tell_a_wrong_fold(rng):
    class Both(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer, self.norm, self.last, self.other = nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Linear(3, 3), nn.BatchNorm1d(3)

        def forward(self, x):
            y = self.layer(x)
            z = self.other(self.last(self.norm(y) + y))
            return z * 1e-5, z > 0.0

    with nn.parameter.placed("cpu"):
        model = settled(Both(), rng)
    assert fuse_graph(model, ag.tensor(rng.normal(size=(2, 3)).astype(np.float32), queue=model.queue)).folded == ["last"]


def test_features_of_linear_layers_are_channels_of_vectors_only(rng):
    with nn.parameter.placed("cpu"):
        model, other = (settled(nn.Sequential(nn.Linear(2, n), nn.BatchNorm1d(4)), rng) for n in (4, 3))
        training = settled(nn.Sequential(nn.Linear(2, 4), nn.BatchNorm1d(4)), rng)
    training[1].train()
    x = ag.tensor(rng.normal(size=(5, 4, 2)).astype(np.float32), queue=model.queue)
    assert fuse_graph(model, x).folded == fuse_graph(other, x).folded == fuse_graph(other).folded == fuse_graph(training).folded == []
    with pytest.raises(
        ShapeError,
        match=r"\[fuse_graph\] x must be a batch of vectors: a norm over channels was folded into a linear layer.*shape=\(5, 4, 4\)",
    ):
        fuse_graph(model, x[0])(x)


def test_float64_is_folded_in_float64(rng):
    with nn.parameter.placed("cpu"):
        model = settled(nn.Sequential(nn.Linear(2, 4), nn.BatchNorm1d(4)), rng).to("float64")
    x = ag.tensor(rng.normal(size=(3, 2)), "float64", queue=model.queue)
    np.testing.assert_allclose(fuse_graph(model, x)(x).to_host(), model(x).to_host(), rtol=1e-13)


class Rectified(nn.Linear):
    def forward(self, x):
        return ag.relu(super().forward(x))


def test_without_an_example_shared_weights_and_forwards_of_others_are_left_alone(rng):
    tied, one_bias = ([nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4)] for _ in range(2))
    tied[2].weight, one_bias[2].bias = tied[0].weight, one_bias[0].bias
    models = [nn.Sequential(*tied), nn.Sequential(*one_bias), nn.Sequential(Rectified(4, 4), nn.BatchNorm1d(4))]
    models.append(fuse_graph(settled(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)), rng)).function)  # its norm passes on by now
    x = rng.normal(size=(3, 4)).astype(np.float32)
    for model in models:
        want = settled(model, rng)(x).to_host()
        fused = fuse_graph(model)
        assert fused.folded == []
        np.testing.assert_allclose(fused(x).to_host(), want, rtol=1e-4, atol=1e-5)


def test_a_compiled_model_is_saved_and_a_folded_one_refused(rng, tmp_path):
    with nn.parameter.placed("cpu"):
        model = settled(nn.Sequential(nn.Linear(3, 2, bias=False), nn.BatchNorm1d(2)), rng)
    x = ag.tensor(rng.normal(size=(2, 3)).astype(np.float32), queue=model.queue)
    save_model(compile(model), tmp_path / "model.netcl")
    np.testing.assert_array_equal(load_model(tmp_path / "model.netcl", "cpu")(x).to_host(), model(x).to_host())
    with pytest.raises(ValueError, match=r"\[save_model\] a model with folded batch norms cannot be saved; into=\['0'\]"):
        save_model(fuse_graph(model, x), tmp_path / "folded.netcl")


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
