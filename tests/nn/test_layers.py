"""Layers beyond torch's numbers (test_golden.py): modes, randomness, configurations, what they refuse."""

from __future__ import annotations

import copy
import inspect
import json

import numpy as np
import pytest

import netcl
import netcl.autograd as ag
import netcl.nn.functional as F
from netcl import nn
from netcl.core.errors import AutogradError, ShapeError
from netcl.core.tensor import Tensor
from netcl.nn import factory
from netcl.ops import random

ARGUMENTS = {
    "AdaptiveAvgPool1d": (2,), "AdaptiveAvgPool2d": (2,), "AdaptiveMaxPool1d": (2,), "AdaptiveMaxPool2d": ([2, 3],), "AvgPool1d": (2,),
    "AvgPool2d": (2,), "BasicBlock": (4, 4), "BatchNorm1d": (3,), "BatchNorm2d": (3,), "Bilinear": (2, 3, 4), "Bottleneck": (16, 4),
    "CausalSelfAttention": (8, 2), "Conv1d": (2, 4, 3), "Conv2d": (2, 4, (3, 1)), "ConvTranspose2d": (2, 4, 3), "DepthwiseConv2d": (4, 3),
    "Embedding": (7, 3), "FeedForward": (4,), "GPT": (11, 8, 1, 2, 8), "GRU": (3, 4), "GroupNorm": (2, 4), "InstanceNorm2d": (3,),
    "QuantizedEmbedding": (7, 32), "QuantizedLinear": (32, 5),
    "LSTM": (3, 4), "LayerNorm": ((3, 4),), "Linear": (2, 3), "MLP": (4, [8, 8], 2), "MaxPool1d": (2,), "MaxPool2d": ((2, 1),),
    "MultiheadAttention": (8, 2), "PixelShuffle": (2,), "PixelUnshuffle": (2,), "RMSNorm": (4,), "RNN": (3, 4),
    "RotaryAttention": (8, 2), "SwiGLU": (4,), "TransformerBlock": (8, 2), "TransformerEncoderLayer": (8, 2, 16), "Unflatten": (1, (2, 2)),
    "ConvTranspose1d": (2, 4, 3), "GRUCell": (3, 4), "InstanceNorm1d": (3,), "LSTMCell": (3, 4), "RNNCell": (3, 4),
    "Transformer": (8, 2, 1, 1, 16), "TransformerDecoderLayer": (8, 2, 16),
    "Upsample": (5,), "ChannelShuffle": (2,), "Fold": (4, 2), "LPPool1d": (2, 2), "LPPool2d": (2, 2), "LocalResponseNorm": (3,),
    "Threshold": (0.1, 2.0), "Unfold": (2,), "AdaptiveAvgPool3d": (2,), "AdaptiveMaxPool3d": ([2, 3, 2],), "AvgPool3d": (2,),
    "AdaptiveLogSoftmaxWithLoss": (8, 12, [3, 6]), "BatchNorm3d": (3,), "Conv3d": (2, 4, (3, 1, 2)), "ConvTranspose3d": (2, 4, 3),
    "EmbeddingBag": (7, 3), "InstanceNorm3d": (3,), "LPPool3d": (2, 2),
    "LazyLinear": (3,), "MaxPool3d": (2,), "UpsamplingBilinear2d": (5,), "UpsamplingNearest2d": (5,),
    **{f"MaxUnpool{n}d": (2,) for n in (1, 2, 3)}, **{f"LazyConv{kind}{n}d": (4, 3) for kind in ("", "Transpose") for n in (1, 2, 3)},
    **{f"{kind}Pad{n}d": (1, *((2.0,) if kind == "Constant" else ()))
       for kind in ("Constant", "Zero", "Reflection", "Replication", "Circular") for n in (1, 2, 3)},
}  # fmt: skip
NESTED = {
    "Residual": lambda: nn.Residual(nn.ReLU()),
    "TransformerEncoder": lambda: nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16), 2, nn.LayerNorm(8)),
    "TransformerDecoder": lambda: nn.TransformerDecoder(nn.TransformerDecoderLayer(8, 2, 16), 2, nn.LayerNorm(8)),
    "ResNet": lambda: nn.ResNet(nn.BasicBlock, (1, 1, 1, 1), 10, stem="cifar", width=4),
    "ParameterList": lambda: nn.ParameterList([[1.0, 2.0], [3.0]]),
    "ParameterDict": lambda: nn.ParameterDict({"a": [1.0, 2.0]}),
    "KVCache": lambda: nn.KVCache(2, 8),
    "ViT": lambda: nn.ViT(8, 4, 1, 2, 8, 8, 3),
    "VisionTransformer": lambda: nn.VisionTransformer(8, 4, 1, 2, 8, 8, 3),
}
FUNCTIONS = ("ResNet18", "resnet18", "resnet34", "resnet50", "resnet101", "resnet152", "vit_small")


OWN = [name for name in factory.registered() if name not in FUNCTIONS and factory.constructor_of(name).__module__.startswith("netcl.nn.")]


@pytest.mark.parametrize("name", OWN)
def test_every_registered_class_goes_through_json(name):
    made = NESTED[name]() if name in NESTED else factory.constructor_of(name)(*ARGUMENTS.get(name, ()), device="cpu")
    again = nn.build(json.loads(json.dumps(made.config)), "cpu")
    assert type(again) is type(made)
    assert json.dumps(again.config) == json.dumps(made.config)  # JSON has lists where Python has tuples
    assert {k: v.shape for k, v in again.state_dict().items()} == {k: v.shape for k, v in made.state_dict().items()}


def test_models_made_by_functions_go_through_json():
    model = nn.ResNet18(num_classes=3, width=4, device="cpu")
    again = nn.build(json.loads(json.dumps(model.config)), "cpu")
    again.load_state_dict(model.state_dict())
    assert nn.build({"type": "ResNet18", "args": {"num_classes": 3, "width": 4}}, "cpu").config == model.config
    model.fc = nn.Linear(32, 7)
    assert nn.build(json.loads(json.dumps(model.config))).fc.out_features == 7


@pytest.mark.parametrize("name", sorted(nn.__all__))
def test_every_public_class_is_documented_with_an_example(name):
    made = getattr(nn, name)
    if isinstance(made, type):
        assert ">>>" in inspect.getdoc(made) or name == "Activation"


# ---- dropout


def test_dropout_drops_while_training(device):
    random.manual_seed(0)
    x = np.ones((400, 50), np.float32)
    layer = nn.Dropout(0.25)
    y = layer(x).to_host()
    assert set(np.unique(y)) == {0.0, np.float32(1 / 0.75)} and abs((y == 0).mean() - 0.25) < 0.02
    assert (layer(x).to_host() != y).any()
    np.testing.assert_array_equal(layer.eval()(x).to_host(), x)
    with pytest.raises(ValueError, match=r"\[Dropout\] p must be a number from 0 to 1; p=1\.5"):
        nn.Dropout(1.5)
    with pytest.raises(ValueError, match=r"\[Dropout\] p must be a number from 0 to 1; p='0\.5'"):
        nn.Dropout("0.5")


def test_dropout_of_channels(device):
    random.manual_seed(0)
    y = nn.Dropout2d(0.5)(np.ones((20, 30, 2, 2), np.float32)).to_host()
    assert (y == y[:, :, :1, :1]).all() and 0.4 < (y == 0).mean() < 0.6
    assert nn.Dropout2d(0.5).eval()(np.ones((1, 1, 2, 2), np.float32)).tolist() == [[[[1, 1], [1, 1]]]]
    signal, volume = nn.Dropout1d(0.5)(netcl.ones(64, 3)).to_host(), nn.Dropout3d(0.5)(netcl.ones(64, 3, 2, 2)).to_host()
    assert (signal == signal[:, :1]).all() and (volume == volume[:, :1, :1, :1]).all()  # without a batch, channels come first
    with pytest.raises(ShapeError, match=r"\[dropout\] dropout of channels must have at least 2 dimensions"):
        nn.FeatureAlphaDropout(0.5)(netcl.ones(4))


# ---- norms


def test_batch_norm_counts_batches(device):
    layer = nn.BatchNorm1d(2, momentum=None)
    batches = [np.float32([[0, 1], [2, 5]]), np.float32([[4, 0], [6, 1]]), np.float32([[1, 1], [2, 8]])]
    for x in batches:
        layer(x)
    np.testing.assert_allclose(layer.running_mean.to_host(), np.mean([x.mean(0) for x in batches], axis=0), rtol=1e-5)
    assert layer.num_batches_tracked.item() == 3
    assert list(layer.state_dict()) == ["weight", "bias", "running_mean", "running_var", "num_batches_tracked"]
    again = nn.BatchNorm1d(2, momentum=None)
    again.load_state_dict(layer.state_dict())
    again(batches[0])
    assert again.num_batches_tracked.item() == 4
    again.reset_running_stats()
    assert (again.num_batches_tracked.item(), again.running_var.tolist()) == (0, [1.0, 1.0])
    assert nn.BatchNorm1d(2, track_running_stats=False).num_batches_tracked is None


def test_writes_to_the_number_of_batches_count(device):
    x, layer = np.float32([[0, 1], [2, 5]]), nn.BatchNorm1d(2, momentum=None)
    held = layer.num_batches_tracked
    layer(x)
    held.fill_(9)
    layer(2 * x)
    assert layer.num_batches_tracked.item() == 10
    np.testing.assert_allclose(layer.running_mean.to_host(), 0.9 * x.mean(0) + 0.1 * 2 * x.mean(0), rtol=1e-6)
    layer.num_batches_tracked = netcl.tensor(3)
    layer(x)
    copied = copy.deepcopy(layer)  # while the counter on the device is behind
    layer.num_batches_tracked += 1
    assert (layer.num_batches_tracked.item(), copied.num_batches_tracked.item()) == (5, 4)
    layer.state_dict()["num_batches_tracked"].zero_()
    layer(x)
    assert layer.num_batches_tracked.item() == 1
    with pytest.raises(TypeError, match=r"\[BatchNorm1d\] num_batches_tracked must be a count"):
        layer.num_batches_tracked = None
    assert "num_batches_tracked" in layer.state_dict()


def test_running_statistics_are_changed_in_place(device):
    layer = nn.BatchNorm2d(3)
    held, before = layer.running_mean, layer.running_mean.to_host()
    layer(np.ones((2, 3, 4, 4), np.float32))
    assert layer.running_mean is held and (held.to_host() != before).all()
    assert layer.half().running_mean.dtype == "float16" and layer.num_batches_tracked.dtype == "int64"


@pytest.mark.parametrize(
    ("make", "shape", "text"),
    [
        (lambda: nn.BatchNorm2d(3), (2, 3), r"\[BatchNorm2d\] x must have 4 dimensions with 3 channels in dim 1; shape=\(2, 3\)"),
        (lambda: nn.BatchNorm1d(3), (2, 4), r"\[BatchNorm1d\] x must have 2 or 3 dimensions with 3 channels in dim 1; shape=\(2, 4\)"),
        (lambda: nn.GroupNorm(2, 3), (), r"\[GroupNorm\] num_groups must be at least 1 and divide num_channels"),
        (lambda: nn.Conv2d(3, 4, 3, groups=2), (), r"\[Conv2d\] groups must be at least 1 and divide in_channels and out_channels"),
        (lambda: nn.Conv2d(3, 4, (3, 3, 3)), (), r"\[conv\] kernel_size must be an integer or 2 integers, one per axis"),
        (lambda: nn.Conv2d(3, 4, 2, 2, padding="same"), (), r'\[Conv2d\] padding="same" requires stride 1'),
        (
            lambda: nn.LSTM(3, 4),
            (2, 5, 7),
            r"\[LSTM\] the input must be \(time, batch, features\) or \(time, features\), with 3 features; shape=\(2, 5, 7\)",
        ),
        (lambda: nn.GRU(3, 4), (0, 5, 3), r"\[GRU\] the input must have at least 1 time step"),
        (lambda: nn.PixelShuffle(2), (1, 6, 2, 2), r"\[pixel_shuffle\] .* factor must be at least 1 and have a square that divides"),
        (
            lambda: nn.MultiheadAttention(7, 2),
            (),
            r"\[MultiheadAttention\] the number of heads must be at least 1 and divide the width; width=7, heads=2",
        ),
        (lambda: nn.RotaryAttention(6, 2), (), r"\[RotaryAttention\] the head size must be even"),
        (lambda: nn.LeNet(image_size=8), (), r"\[LeNet\] images must be at least 12 x 12; image_size=8"),
        (lambda: nn.ViT(image_size=30), (), r"\[ViT\] patch_size must divide image_size"),
        (lambda: nn.Embedding(3, 2, padding_idx=3), (), r"\[Embedding\] padding_idx must be from -num_embeddings to num_embeddings - 1"),
    ],
)
def test_wrong_shapes_are_told(make, shape, text):
    with pytest.raises(ShapeError, match=text):
        make()(np.zeros(shape, np.float32))


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: nn.Conv2d(3, 4, 3, padding_mode="mirror"), r"\[Conv2d\] unknown padding_mode; padding_mode='mirror'; known: zeros"),
        (lambda: nn.RNN(3, 4, nonlinearity="gelu"), r"\[RNN\] nonlinearity must be tanh or relu"),
        (lambda: nn.MSELoss("avg"), r"\[MSELoss\] reduction must be mean, sum or none; reduction='avg'"),
        (lambda: nn.MSELoss("batchmean"), r"\[MSELoss\] reduction must be mean, sum or none; reduction='batchmean'"),
        (lambda: nn.CTCLoss(reduction="batchmean"), r"\[CTCLoss\] reduction must be mean, sum or none; reduction='batchmean'"),
        (
            lambda: nn.SoftMarginLoss(reduction="batchmean"),
            r"\[SoftMarginLoss\] reduction must be mean, sum or none; reduction='batchmean'",
        ),
        (lambda: nn.KLDivLoss("avg"), r"\[KLDivLoss\] reduction must be mean, sum, batchmean or none; reduction='avg'"),
        (lambda: nn.Upsample(), r"\[Upsample\] exactly one of size and scale_factor is required"),
        (lambda: nn.ResNet(nn.BasicBlock, [1, 1], 10), r"\[ResNet\] layers must have four numbers"),
        (lambda: nn.ResNet18(stem="mnist"), r"\[ResNet\] stem must be imagenet or cifar"),
        (lambda: nn.TransformerBlock(8, 2, norm="batch"), r"\[TransformerBlock\] unknown norm; norm='batch'; known: layer, rms"),
        (lambda: nn.MLP(2, [3], 1, activation="softmax"), r"\[activation\] unknown activation; activation='softmax'"),
    ],
)
def test_wrong_options_are_told(make, text):
    with pytest.raises(ValueError, match=text):
        make()


# ---- other layers


def test_padding_has_two_names(device):
    x = np.ones((1, 2, 5, 5), np.float32)
    assert nn.Conv2d(2, 3, 3, pad=1)(x).shape == (1, 3, 5, 5) == nn.Conv2d(2, 3, 3, padding=1)(x).shape
    assert nn.ConvTranspose2d(2, 3, 3, pad=1)(x).shape == (1, 3, 5, 5)
    assert nn.MaxPool2d(3, 1, pad=1)(x).shape == nn.AvgPool2d(3, 1, pad=1)(x).shape == x.shape


def test_depthwise_convolution_keeps_channels_apart(device):
    layer = nn.DepthwiseConv2d(3, 3, padding=1, multiplier=2)
    assert layer.weight.shape == (6, 1, 3, 3)
    x = np.zeros((1, 3, 4, 4), np.float32)
    x[:, 1] = 1
    y = layer(x).to_host() - layer.bias.to_host()[None, :, None, None]
    assert (y[:, [0, 1, 4, 5]] == 0).all() and (y[:, 2:4] != 0).any()


def test_running_statistics_keep_their_memory(device):
    """What was recorded over a module (a captured graph, say) goes on seeing them."""
    x = np.random.default_rng(0).standard_normal((2, 3, 4, 4)).astype(np.float32)
    for layer in (nn.InstanceNorm2d(3, track_running_stats=True), nn.BatchNorm2d(3)):
        seen = layer.running_mean.detach()
        layer(x)
        assert layer.running_mean.to_host().any()
        np.testing.assert_array_equal(seen.to_host(), layer.running_mean.to_host())


def test_embedding_ignores_its_padding(device):
    layer = nn.Embedding(5, 3, padding_idx=-1)
    assert layer.weight.to_host()[4].tolist() == [0, 0, 0]
    layer(np.array([[0, 4, 4]])).sum().backward()
    assert layer.weight.grad.to_host()[[0, 1, 4]].tolist() == [[1, 1, 1], [0, 0, 0], [0, 0, 0]]


def test_recurrent_dropout_is_between_layers(device):
    random.manual_seed(0)
    x = np.ones((4, 2, 3), np.float32)
    one = nn.LSTM(3, 5, dropout=0.9)
    np.testing.assert_array_equal(one(x)[0].to_host(), one(x)[0].to_host())
    two = nn.LSTM(3, 5, num_layers=2, dropout=0.9)
    assert (two(x)[0].to_host() != two(x)[0].to_host()).any()
    two.eval()
    np.testing.assert_array_equal(two(x)[0].to_host(), two(x)[0].to_host())


def test_a_recurrent_state_continues(device):
    layer = nn.GRU(3, 4, num_layers=2)
    x = np.random.default_rng(0).standard_normal((6, 2, 3)).astype(np.float32)
    whole, end = layer(x)
    first, state = layer(x[:3])
    second, final = layer(x[3:], state)
    np.testing.assert_allclose(np.concatenate([first.to_host(), second.to_host()]), whole.to_host(), atol=1e-6)
    np.testing.assert_allclose(final.to_host(), end.to_host(), atol=1e-6)
    with pytest.raises(ShapeError, match=r"\[GRU\] the state must be h_0 of shape \(2, 2, 4\)"):
        layer(x, Tensor.zeros((2, 3, 4)))


def test_functions_have_torchs_names(device):
    x = np.float32([[1.0, -2.0, 3.0, -4.0]])
    assert F.relu(x).tolist() == [[1, 0, 3, 0]]
    assert F.hardtanh(x).tolist() == [[1, -1, 1, -1]]
    np.testing.assert_allclose(F.softmax(x, dim=1).to_host().sum(), 1, rtol=1e-6)
    np.testing.assert_allclose(F.softmin(x, dim=1).to_host(), F.softmax(-x, dim=1).to_host())
    np.testing.assert_allclose(np.exp(F.log_softmax(x, dim=-1).to_host()), F.softmax(x, dim=-1).to_host(), rtol=1e-5)
    np.testing.assert_allclose((F.normalize(x).to_host() ** 2).sum(), 1, rtol=1e-5)
    t = Tensor.from_host(device.queue, x)
    assert F.glu(t).shape == (1, 2) and F.rms_norm(t, 4).shape == (1, 4) and F.celu(t).shape == (1, 4)
    image = np.ones((1, 4, 3, 3), np.float32)
    assert F.conv2d(image, np.ones((2, 4, 3, 3), np.float32), None, 1, 1).shape == (1, 2, 3, 3)
    assert F.pixel_unshuffle(F.pixel_shuffle(image, 2), 2).shape == (1, 4, 3, 3)
    assert F.mse_loss(x, x).item() == 0 == F.l1_loss(x, x).item()
    assert F.triplet_margin_loss(x, x, -x).item() == 0
    assert F.cosine_similarity(x, x).to_host() == pytest.approx(1)
    assert F.binary_cross_entropy_with_logits(x, np.ones_like(x)).item() > 0
    assert "mse_loss" in dir(F) and F.linear is ag.linear
    with pytest.raises(AttributeError):
        F.no_such_function  # noqa: B018


def test_rms_norm_of_half_takes_the_epsilon_of_its_arithmetic():
    x = Tensor.from_host(np.array([[0.01, 0.02, 0.03]], np.float16))
    np.testing.assert_allclose(F.rms_norm(x, 3).to_host(), [[0.4629, 0.9258, 1.3887]], rtol=1e-3)
    assert nn.RMSNorm(3).half()(x).tolist() == F.rms_norm(x, 3).tolist()


def test_fold_adds_up_what_unfold_took_apart():
    x = Tensor.from_host(np.arange(20, dtype=np.float32).reshape(1, 1, 4, 5))
    columns = F.unfold(x, (2, 3), 1, 0, 1)
    assert columns.shape == (1, 6, 9)
    counts = F.fold(F.unfold(Tensor.ones(x.shape), (2, 3)), (4, 5), (2, 3))
    np.testing.assert_array_equal(F.fold(columns, (4, 5), (2, 3)).to_host(), (x * counts).to_host())


def test_functions_take_what_torchs_take():
    x = Tensor.from_host(np.array([[-1.0, 2.0]], np.float32))
    assert F.relu(x.clone(), inplace=True).tolist() == F.relu(x.clone(), True).tolist() == [[0.0, 2.0]]
    assert F.leaky_relu(x.clone(), 0.5, True).tolist() == F.leaky_relu(x, negative_slope=0.5).tolist() == [[-0.5, 2.0]]
    assert F.dropout(x, 0.5, training=False, inplace=True).tolist() == x.tolist()
    assert F.pad(x, pad=(1, 0), value=7.0).tolist() == [[7.0, -1.0, 2.0]]
    images = Tensor.from_host(np.arange(8, dtype=np.float32).reshape(1, 2, 2, 2))
    assert F.instance_norm(images, None, None, None, None, True, 0.1, 1e-3).tolist() == ag.instance_norm(images, eps=1e-3).tolist()
    wide = F.interpolate(images, scale_factor=(1.3, 2), mode="bilinear")  # the first axis keeps its size
    assert wide[0, 0].tolist() == [[0.0, 0.25, 0.75, 1.0], [2.0, 2.25, 2.75, 3.0]]
    assert F.interpolate(images, scale_factor=1.3, mode="bicubic", antialias=True).tolist() == images.tolist()
    loss = nn.GaussianNLLLoss(reduction="none")(images, images + 1.0, 0.5)
    np.testing.assert_allclose(loss.to_host(), np.full(images.shape, np.log(0.5) / 2 + 1), rtol=1e-6)
    with pytest.raises(ShapeError, match=r"\[GLU\] the size of dim must be even; dim=-1, shape=\(3,\)"):
        F.glu(Tensor.ones((3,)))
    with pytest.raises(ShapeError, match=r"\[pixel_shuffle\] x must have four dimensions"):
        nn.PixelShuffle(2)(Tensor.ones((4,)))


# A layer, the value that it writes over -1, and the gradient there.
IN_PLACE = [
    (nn.ReLU(True), 0.0, 0.0), (nn.LeakyReLU(0.5, True), -0.5, 0.5), (nn.Hardtanh(-0.5, 9, True), -0.5, 0.0),
    (nn.SiLU(True), -0.2689, 0.0723), (nn.CELU(1.0, True), -0.6321, 0.3679), (nn.Threshold(0.0, 3.0, True), 3.0, 0.0),
    (nn.RReLU(0.5, 0.5, True).eval(), -0.5, 0.5), (nn.Dropout(1.0, True), 0.0, 0.0), (nn.AlphaDropout(1.0, True), 0.0, 0.0),
    (nn.Dropout2d(1.0, True), 0.0, 0.0),
]  # fmt: skip


@pytest.mark.parametrize("before", ["computed", "written", "shared"])
@pytest.mark.parametrize("layer, value, slope", IN_PLACE, ids=[type(layer).__name__ for layer, *_ in IN_PLACE])
def test_inplace_changes_the_input(layer, value, slope, before, queue):
    x = Tensor.from_host(queue, np.full((2, 2), -1.0, np.float32), requires_grad=True)
    y = x * 2.0 + 1.0
    if before == "written":
        y += 0.0
    alias = y.detach() if before == "shared" else y
    assert layer(y) is y
    ag.sum(y * 3.0).backward()  # reads y, not the result of the layer
    np.testing.assert_allclose(alias.to_host(), np.full((2, 2), value), atol=1e-4)
    np.testing.assert_allclose(x.grad.to_host(), np.full((2, 2), 6.0 * slope), atol=1e-3)
    with ag.no_grad():
        given = Tensor.from_host(queue, np.full((2, 2), -1.0, np.float32))
        layer(given)
    np.testing.assert_allclose(given.to_host(), np.full((2, 2), value), atol=1e-4)


def test_inplace_refuses_leaves_and_values_that_backward_reads():
    x = Tensor.from_host(np.ones(2, np.float32), requires_grad=True)
    with pytest.raises(AutogradError, match="cannot write in place to a leaf"):
        F.relu(x, inplace=True)
    y = x * 2.0
    z = y * y
    nn.ReLU(inplace=True)(y)
    with pytest.raises(AutogradError, match="must not be changed in place"):
        z.sum().backward()


def test_a_number_can_be_folded_over_its_last_axis():
    x = Tensor.from_host(np.float32(3.0), requires_grad=True)
    assert (ag.sum(x, axis=-1).shape, ag.mean(x, axis=0, keepdims=True).item(), ag.argmax(x, axis=-1).item()) == ((), 3.0, 0)
    ag.norm(x, 2, axis=0).backward()
    assert x.grad.item() == 1.0


# ---- what torch's names are made of


def test_cells_are_steps_of_their_layers(device):
    x = Tensor.from_host(device.queue, np.linspace(-1, 1, 24, dtype=np.float32).reshape(4, 2, 3))
    for cell, layer in ((nn.RNNCell, nn.RNN), (nn.LSTMCell, nn.LSTM), (nn.GRUCell, nn.GRU)):
        whole, step, state = layer(3, 5), cell(3, 5), None
        step.load_state_dict({name.removesuffix("_l0"): value for name, value in whole.state_dict().items()})
        for t in range(4):
            state = step(x[t], state)
        np.testing.assert_allclose(ag.cat(list(state)).to_host() if cell is nn.LSTMCell else state.to_host(),
                                   ag.cat([part[0] for part in whole(x)[1]]).to_host() if cell is nn.LSTMCell
                                   else whole(x)[1][0].to_host(), rtol=1e-5, atol=1e-6)  # fmt: skip
    with pytest.raises(ShapeError, match=r"\[GRUCell\] the last axis of the input must have 3 elements; input.shape=\(2, 4\)"):
        nn.GRUCell(3, 5)(np.zeros((2, 4), np.float32))
    with pytest.raises(ShapeError, match=r"\[LSTMCell\] state must be 2 tensor\(s\) of shape \(2, 5\); shapes=\[\(2, 5\)\]"):
        nn.LSTMCell(3, 5)(np.zeros((2, 3), np.float32), Tensor.zeros((2, 5)))
    with pytest.raises(ValueError, match=r"\[RNNCell\] nonlinearity must be tanh or relu; nonlinearity='gelu'"):
        nn.RNNCell(3, 5, nonlinearity="gelu")


def test_a_transformer_looks_only_back(device):
    model = nn.Transformer(8, 2, 1, 1, 16, dropout=0.0, batch_first=True)
    src, tgt = (Tensor.from_host(device.queue, np.random.default_rng(i).random((1, 4, 8), np.float32)) for i in range(2))
    mask = model.generate_square_subsequent_mask(4)
    assert mask.tolist()[1] == [0.0, 0.0, -np.inf, -np.inf]
    before = model(src, tgt, tgt_mask=mask).to_host()
    changed = tgt.to_host()
    changed[:, 3] += 1
    after = model(src, Tensor.from_host(device.queue, changed), tgt_mask=mask).to_host()
    np.testing.assert_allclose(after[:, :3], before[:, :3], rtol=1e-5, atol=1e-6)
    assert np.abs(after[:, 3] - before[:, 3]).max() > 1e-3
    hidden = model(src, tgt, tgt_mask=mask, memory_key_padding_mask=np.array([[False, False, True, True]])).to_host()
    assert np.abs(hidden - before).max() > 1e-4


def test_slopes_of_rrelu_are_drawn_while_training(device):
    random.manual_seed(0)
    layer, x = nn.RReLU(0.1, 0.3), Tensor.from_host(device.queue, np.full((40, 50), -1.0, np.float32))
    slopes = -layer(x).to_host()
    assert 0.1 <= slopes.min() < 0.11 and 0.29 < slopes.max() <= 0.3
    assert np.unique(layer.eval()(x).to_host()).tolist() == [np.float32(-0.2)]


def test_weights_of_composed_losses(device):
    x, y = np.float32([[0.5, 1.0, -0.5]]), [1]
    plain, weighted = nn.MultiMarginLoss(), nn.MultiMarginLoss(weight=[1.0, 3.0, 1.0])
    np.testing.assert_allclose(weighted(x, y).item(), 3 * plain(x, y).item(), rtol=1e-6)
    labels = np.float32([[0.0, 1.0, 0.0]])
    per_class = ag.bce_with_logits(Tensor.from_host(x), Tensor.from_host(labels), reduction="none").to_host()
    loss = nn.MultiLabelSoftMarginLoss(weight=[1.0, 3.0, 2.0])(x, labels).item()
    np.testing.assert_allclose(loss, (per_class * [1, 3, 2]).mean(), rtol=1e-6)
    with pytest.raises(ValueError, match=r"\[SoftMarginLoss\] reduction must be mean, sum or none; reduction='max'"):
        nn.SoftMarginLoss(reduction="max")


def test_composed_functions_have_torchs_names():
    assert F.hardshrink([0.2, 1.0]).tolist() == [0.0, 1.0] and F.softmin([[1.0, 1.0]], dim=1).tolist() == [[0.5, 0.5]]
    np.testing.assert_array_equal(F.hardshrink([np.nan, -np.inf, 0.5]).to_host(), [np.nan, -np.inf, 0.0])
    assert {"softshrink", "unfold", "poisson_nll_loss", "local_response_norm"} <= set(dir(F))


def test_gradients_are_clipped_under_torchs_names(device):
    p = Tensor.from_host(device.queue, np.zeros(2, np.float32), requires_grad=True)
    for error in (False, True):
        p.grad = Tensor.from_host(device.queue, np.float32([30, 40]))
        assert nn.utils.clip_grad_norm_([p], 5.0, error_if_nonfinite=error).item() == 50.0
        np.testing.assert_allclose(p.grad.to_host(), [3, 4], rtol=1e-5)
    nn.utils.clip_grad_value_(p, 3.5)
    np.testing.assert_allclose(p.grad.to_host(), [3, 3.5], rtol=1e-5)
    p.grad = Tensor.from_host(device.queue, np.float32([np.inf, 0]))
    with pytest.raises(FloatingPointError):
        nn.utils.clip_grad_norm_(p, 1.0, error_if_nonfinite=True)


def test_parameters_as_a_vector(device):
    layer = nn.Linear(3, 2)
    layer.to(device.queue)
    vector = nn.utils.parameters_to_vector(layer.parameters())
    assert vector.shape == (8,) and vector.requires_grad
    nn.utils.vector_to_parameters(vector.detach() * 2.0, layer.parameters())
    np.testing.assert_allclose(nn.utils.parameters_to_vector(layer.parameters()).to_host(), 2 * vector.to_host(), rtol=1e-6)
    with pytest.raises(ShapeError, match=r"as many elements as the parameters together; elements=8, vec.shape=\(7,\)"):
        nn.utils.vector_to_parameters(Tensor.zeros((7,)), layer.parameters())


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_K", "Q8_0"])
def test_packed_states_of_another_layout_are_refused(kind):
    made, other = nn.QuantizedLinear.from_linear(nn.Linear(256, 20), kind), nn.QuantizedLinear(256, 20, kind=kind)
    state = {name: tensor.to_host() for name, tensor in made.state_dict().items()}
    other.load_state_dict(state)
    np.testing.assert_array_equal(other.blocks(), made.blocks())
    state["weight"] = state["weight"].reshape(-1)  # as versions wrote it whose 4-bit codes had another order
    for options in ({}, {"strict": False}):
        if kind == "Q8_0":
            assert not any(other.load_state_dict(state, **options))
        else:
            with pytest.raises(ValueError, match=rf"weight must have the current layout of {kind}, .*quantize the unpacked model again"):
                other.load_state_dict(state, **options)
