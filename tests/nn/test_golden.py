"""Layers and models against torch: the same weights and inputs give the same outputs and gradients (tests/golden/make_nn.py)."""

from __future__ import annotations

import importlib.util
from functools import cache, partial
from operator import attrgetter
from pathlib import Path

import numpy as np
import pytest

import netcl.autograd as ag
from netcl import nn, optim
from netcl.core.tensor import Tensor

GOLDEN = Path(__file__).parent.parent / "golden"


def _load(name: str):
    spec = importlib.util.spec_from_file_location(name, GOLDEN / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


cases = _load("nn_cases")


@cache
def golden() -> dict[str, np.ndarray]:
    with np.load(GOLDEN / "nn.npz") as file:
        return dict(file)


def expected(prefix: str) -> dict[str, np.ndarray]:
    return {name.removeprefix(prefix): value for name, value in golden().items() if name.startswith(prefix)}


class Encoder(nn.Module):
    def __init__(self, **options):
        super().__init__()
        layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True, **options)
        self.encoder = nn.TransformerEncoder(layer, 2, norm=nn.LayerNorm(32))

    def forward(self, x):
        return ag.flatten(self.encoder(x, src_key_padding_mask=cases.PADDING), 0, 1)


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(10, 12, num_layers=2, batch_first=True, bidirectional=True)

    def forward(self, x):
        return ag.flatten(self.lstm(x)[0], 0, 1)


MODELS = {
    "lenet": nn.LeNet,
    "resnet18_cifar": nn.ResNet18,
    "bottleneck": lambda: nn.ResNet(nn.Bottleneck, [1, 2, 1, 1], num_classes=10, width=8),
    "encoder": Encoder,
    "encoder_norm_first": lambda: Encoder(norm_first=True, activation="gelu"),
    "gpt": lambda: nn.GPT(**cases.GPT),
    "lstm": Recurrent,
    "vit": lambda: nn.ViT(**cases.VIT),
}


def filled(module: nn.Module, name: str = "", lift: float = 0.0) -> nn.Module:
    """The module with the values of nn_cases: its state dict has torch's names and shapes, or this fails."""
    shapes = {key: value.shape for key, value in module.state_dict().items()}
    module.load_state_dict(cases.state(shapes, cases.TIED.get(name), lift))
    return module


def close(got, want, what: str, rtol: float = 1e-4, atol: float = 2e-5) -> None:
    got = got.to_host() if isinstance(got, Tensor) else got
    np.testing.assert_allclose(got, want, rtol=rtol, atol=atol, err_msg=what)


def _layers():
    """Losses and activations are one op each or composed of a few, and those are held to torch on every device by tests/ops and the op
    table; so are all but a few of the other composed layers, and those whose kernels other cases run. One case of a layer runs on
    OpenCL devices, the others with --full."""
    few = ("local_response_norm", "multi_margin", "pad_Reflection2", "fold")
    known = ("max_pool1d_indices", "max_pool2d_indices", "adaptive_max_pool1d_indices", "adaptive_max_pool2d_indices", "avg_pool3d_padded",
             "group_norm_no_bias", "lp_pool3d", "max_unpool1d", "max_unpool3d", "bag", "bag_sum", "conv3d_replicate",
             "conv_transpose3d_dilated", "upsampling_nearest", "upsampling_bilinear")  # other cases run their kernels  # fmt: skip
    seen = set()
    for name, (kind, *_) in cases.LAYERS.items():
        alone = kind.endswith("Loss") or name.startswith("activation_") or (kind in vars(nn.composed) and name not in few) or name in known
        yield pytest.param(name, marks=pytest.mark.matrix if alone or kind in seen else ())
        seen |= set() if alone else {kind}


def check(name, function, inputs, want):
    """Outputs and the gradients of inputs."""
    given = [ag.log_softmax(inputs[0], axis=-1), *inputs[1:]] if name.startswith(cases.SOFTENED) else inputs
    total = None
    for i, out in enumerate(cases.several(function(*given))):
        close(out, want[f"out{i}"], f"output {i}")
        part = ag.sum(out * cases.uniform(f"{name}.g{i}", out.shape))
        total = part if total is None else total + part
    total.backward()
    for i, x in enumerate(inputs):
        if f"dx{i}" in want:
            close(x.grad, want[f"dx{i}"], f"gradient of input {i}", atol=1e-4)


@pytest.mark.parametrize("name", cases.FUNCTIONS)
def test_function(name, device):
    function, _, options = cases.FUNCTIONS[name]
    inputs = [Tensor.from_host(device.queue, x, requires_grad=x.dtype == np.float32) for x in cases.layer_inputs(name)]
    options = {key: Tensor.from_host(device.queue, v) if isinstance(v, np.ndarray) else v for key, v in options.items()}
    check(name, partial(getattr(nn.functional, function), **options), inputs, expected(f"function/{name}/"))


@pytest.mark.parametrize("name", cases.WRAPPED)
def test_computed_weights(name, device):
    wrapper, kind, args, kwargs, _ = cases.WRAPPED[name]
    check_module(name, filled(attrgetter(wrapper)(nn.utils)(getattr(nn, kind)(*args, **kwargs))), device, f"wrapped/{name}/")


def test_packed_sequences(device):
    lstm, want = filled(nn.LSTM(4, 3, num_layers=2, bidirectional=True)), expected("packed/lstm/")
    x = Tensor.from_host(device.queue, cases.uniform("packed.x", (5, 5, 4)), requires_grad=True)
    state = tuple(Tensor.from_host(device.queue, cases.uniform(f"packed.{part}", (4, 5, 3))) for part in "hc")

    def run(x):
        y, final = lstm(nn.utils.rnn.pack_padded_sequence(x, cases.PACKED_LENGTHS, enforce_sorted=False), state)
        return nn.utils.rnn.pad_packed_sequence(y, padding_value=0.5)[0], final

    check("lstm", run, [x], want)
    for key, parameter in lstm.named_parameters():
        close(parameter.grad, want[f"d_{key}"], f"gradient of {key}", atol=1e-4)


@pytest.mark.parametrize("name", list(_layers()))
def test_layer(name, device):
    kind, args, kwargs, _ = cases.LAYERS[name]
    check_module(name, filled(getattr(nn, kind)(*args, **kwargs)), device, f"layer/{name}/")


def check_module(name, module, device, prefix):
    want = expected(prefix)
    inputs = [Tensor.from_host(device.queue, x, requires_grad=x.dtype == np.float32) for x in cases.layer_inputs(name)]
    check(name, module, inputs, want)
    for key, parameter in module.named_parameters():
        close(parameter.grad, want[f"d_{key}"], f"gradient of {key}", atol=1e-4)
    if name.startswith(cases.EVALUATED):
        state = {key: value for key, value in module.state_dict().items() if "running" in key}
        for key, value in state.items():
            close(value, want[f"state_{key}"], key)
        close(module.eval()(inputs[0]), want["eval"], "evaluation")


def loss_of(model: nn.Module, x: Tensor, target: np.ndarray) -> Tensor:
    logits = model(x)
    return ag.cross_entropy(ag.reshape(logits, (-1, logits.shape[-1])), target)


@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.matrix] * (name == "resnet18_cifar")) for name in MODELS])
def test_model(name, device):
    """ResNet-18 on OpenCL devices with --full: its blocks and layers run there in other tests, its many convolutions compile for long."""
    want = expected(f"model/{name}/")
    model, x = filled(MODELS[name](), name), Tensor.from_host(device.queue, cases.INPUTS[name])
    with ag.no_grad():
        np.testing.assert_allclose(model.eval()(x).to_host(), want["eval"], rtol=0, atol=1e-4)
        np.testing.assert_allclose(model.train()(x).to_host(), want["train"], rtol=0, atol=1e-4)
    model = filled(MODELS[name](), name, cases.LIFT)
    loss = loss_of(model, x, cases.TARGETS[name])
    close(loss, want["loss"], "loss")
    loss.backward()
    gradients = [p.grad.to_host() for p in model.parameters()]
    close(np.array([np.linalg.norm(g) for g in gradients]), want["norms"], "norms of gradients", rtol=1e-3, atol=1e-5)
    close(np.concatenate([cases.shown(g) for g in gradients]), want["grads"], "gradients", rtol=1e-3, atol=1e-4)
    buffers = [cases.shown(b.to_host()) for b in model.buffers()] or [np.zeros(0)]
    close(np.concatenate(buffers), want["buffers"], "buffers")


@pytest.mark.parametrize("use_cache", [True, False])
def test_gpt_writes_what_torch_writes(device, use_cache):
    model = filled(nn.GPT(**cases.GPT), "gpt")
    written = model.generate(cases.INPUTS["gpt"][:, :5], 40, temperature=0, use_cache=use_cache)
    np.testing.assert_array_equal(written.to_host(), golden()["model/gpt/greedy"])


def _trainings():
    """Every model with every optimizer; on OpenCL devices LeNet with all, the others with one each, the next with the next."""
    for i, name in enumerate(cases.TRAINED):
        for k, optimizer in enumerate(cases.OPTIMIZERS):
            its_turn = name == "lenet" or k == i % len(cases.OPTIMIZERS)
            yield pytest.param(name, optimizer, marks=() if its_turn else pytest.mark.matrix)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("name", "optimizer"), list(_trainings()))
def test_ten_steps(name, optimizer, device, full):
    """Clipping by norm, an optimizer with all its options, a schedule: parameters after ten steps agree with torch's to 1e-3."""
    if name == "resnet18_cifar" and not full:
        pytest.skip("LeNet takes the same steps, and test_model holds the gradients of ResNet-18; --full runs it")
    want = expected(f"train/{name}/{optimizer}/")
    model, x = filled(MODELS[name](), name, cases.LIFT), Tensor.from_host(device.queue, cases.TRAINING_INPUTS[name])
    steps = getattr(optim, optimizer)(model.parameters(), **cases.OPTIMIZERS[optimizer])
    schedule = optim.StepLR(steps, **cases.SCHEDULE)
    losses = []
    for _ in range(cases.STEPS):
        steps.zero_grad()
        loss = loss_of(model, x, cases.TRAINING_TARGETS[name])
        loss.backward()
        steps.step(max_norm=cases.CLIP)
        schedule.step()
        losses.append(loss.item())
    np.testing.assert_allclose(losses, want["losses"], rtol=1e-3, atol=1e-4)
    parameters = np.concatenate([cases.shown(p.to_host()) for p in model.parameters()])
    np.testing.assert_allclose(parameters, want["parameters"], rtol=0, atol=1e-3)
