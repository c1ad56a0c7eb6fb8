"""Layers and utilities of torch beyond its numbers (test_golden.py): lazy layers, containers, copies, sequences, what is refused."""

from __future__ import annotations

import copy
import pickle

import numpy as np
import pytest

import netcl
import netcl.autograd as ag
import netcl.nn.functional as F
from netcl import nn, optim
from netcl.core.errors import AutogradError, ShapeError
from netcl.core.tensor import Tensor


@pytest.fixture(autouse=True)
def _on_numpy():
    with netcl.device("cpu"):
        yield


def same_state(a, b):
    left, right = a.state_dict(), b.state_dict()
    return list(left) == list(right) and all(np.array_equal(left[key].to_host(), right[key].to_host()) for key in left)


# ---- parameters


def test_next_takes_parameters_and_lists_stay_lists():
    model = nn.Linear(3, 2)
    parameters = model.parameters()
    assert next(model.parameters()) is model.weight and next(model.parameters()) is model.weight
    assert next(parameters) is model.weight and next(parameters) is model.bias and next(parameters, None) is None
    assert len(parameters) == 2 and list(parameters) == [model.weight, model.bias] and isinstance(parameters, list)
    assert next(nn.BatchNorm1d(2).buffers()).shape == (2,)
    assert len(optim.SGD(parameters, lr=0.1).param_groups[0]["params"]) == 2


def test_compiled_functions_guard_the_list(device):
    with netcl.device(device):
        model = nn.Linear(3, 2)
        kept = model.parameters()
        for p in kept:
            nn.init.ones_(p)  # sums that are exact in any order

        def total(x):
            with netcl.no_grad():
                return sum((p.sum() for p in kept), model(x).sum())

        compiled, x = netcl.compile(total), netcl.ones(2, 3)
        assert {compiled(x).item() for _ in range(4)} == {total(x).item()} and not compiled.refused
        kept.pop()
        assert compiled(x).item() == total(x).item()


def test_lists_and_dicts_of_parameters():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.parts = nn.ParameterList([netcl.ones(2), nn.Parameter(netcl.zeros(3))])
            self.named = nn.ParameterDict({"scale": netcl.ones(1)})

    net = Net()
    net.named["shift"] = netcl.zeros(1)
    assert list(net.state_dict()) == ["parts.0", "parts.1", "named.scale", "named.shift"] and len(net.parameters()) == 4
    net.parts.append(netcl.ones(4))
    del net.parts[0]
    assert [p.shape for p in net.parts] == [(3,), (4,)] and list(net.parts.state_dict()) == ["0", "1"] and len(net.parts[:1]) == 1
    assert "scale" in net.named and net.named.pop("scale").requires_grad and list(net.named) == ["shift"]
    with pytest.raises(KeyError, match=r"\[ParameterDict\] there is no parameter of this name; name='scale'"):
        net.named["scale"]
    with pytest.raises(IndexError, match=r"\[ParameterList\] index must be in \[-length, length\)"):
        net.parts[2]


def test_buffers_by_assignment():
    layer = nn.Identity()
    layer.kept, layer.scratch = nn.Buffer(netcl.ones(2)), nn.Buffer([1.0], persistent=False)
    assert list(layer.state_dict()) == ["kept"] and [name for name, _ in layer.named_buffers()] == ["kept", "scratch"]


# ---- copies


def test_pickles_hold_the_state():
    model = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2), nn.PReLU())
    model[2].weight = model[0].bias  # shared
    model(np.ones((4, 3), np.float32))
    again = pickle.loads(pickle.dumps(model.eval()))
    assert same_state(model, again) and again[2].weight is again[0].bias and not again.training
    assert again[1].num_batches_tracked.item() == 1 and again.config == model.config
    assert all(p.requires_grad and p.persistent for p in again.parameters())
    x = np.ones((2, 3), np.float32)
    assert np.array_equal(again(x).to_host(), model(x).to_host())
    loss = pickle.loads(pickle.dumps(nn.CrossEntropyLoss(weight=netcl.tensor([1.0, 2.0]))))
    assert loss.weight.tolist() == [1.0, 2.0]


def test_copies_share_or_do_not():
    model = nn.Sequential(nn.Linear(3, 2), nn.PReLU())
    model[1].weight = model[0].bias
    deep, shallow = copy.deepcopy(model), copy.copy(model)
    assert same_state(model, deep) and deep[0].weight is not model[0].weight and deep[1].weight is deep[0].bias
    assert shallow[0] is model[0] and shallow is not model


def test_weights_of_losses_are_state():
    loss = nn.BCEWithLogitsLoss(pos_weight=[1.0, 3.0])
    assert list(loss.state_dict()) == ["pos_weight"] and nn.MSELoss().state_dict() == {}
    loss.load_state_dict({"pos_weight": [2.0, 4.0]})
    assert loss.pos_weight.tolist() == [2.0, 4.0] and not loss.parameters()


@pytest.mark.parametrize("mode", ["zeros", "reflect", "circular"])
@pytest.mark.parametrize(("real", "shape"), [("Conv1d", (2, 7)), ("Conv2d", (2, 6, 7)), ("Conv3d", (2, 4, 5, 6))])
def test_same_padding_of_even_kernels_is_larger_at_the_end(real, shape, mode, device):
    if real == "Conv3d" and mode == "reflect":
        return
    with netcl.device(device):
        x = netcl.tensor(np.arange(np.prod(shape), dtype=np.float32).reshape(1, *shape))
        layer = getattr(nn, real)(2, 1, 2, padding="same", dilation=1, padding_mode=mode)
        padded = F.pad(x, (0, 1) * (len(shape) - 1), mode="constant" if mode == "zeros" else mode)
        plain = getattr(nn, real)(2, 1, 2)
        plain.load_state_dict(layer.state_dict())
        np.testing.assert_allclose(layer(x).detach().to_host(), plain(padded).detach().to_host(), rtol=1e-4, atol=1e-3)


# ---- lazy layers


@pytest.mark.parametrize(("lazy", "args", "real", "shape"), [
    ("LazyLinear", (4,), "Linear", (2, 5)), ("LazyConv2d", (4, 3), "Conv2d", (2, 6, 5, 5)),
    ("LazyConvTranspose3d", (4, 2), "ConvTranspose3d", (1, 6, 3, 3, 3)), ("LazyBatchNorm1d", (), "BatchNorm1d", (4, 6)),
    ("LazyConv1d", (4, 3), "Conv1d", (6, 9)),
])  # fmt: skip
def test_lazy_layers_become_real_ones(lazy, args, real, shape):
    layer = getattr(nn, lazy)(*args)
    seen = []
    layer.register_forward_hook(lambda *call: seen.append(1))
    assert isinstance(layer, getattr(nn, real)) and layer.state_dict() == {}
    with pytest.raises(ValueError, match=rf"\[{lazy}\] there are no parameters before the first input; call the model once"):
        layer.parameters()
    y = layer.eval()(np.ones(shape, np.float32))
    other = getattr(nn, real)(shape[-1] if real == "Linear" else 6, *args)
    assert type(layer) is getattr(nn, real) and layer.config == other.config and list(layer.state_dict()) == list(other.state_dict())
    assert not layer.training and seen == [1] and layer(np.ones(shape, np.float32)).shape == y.shape


def test_lazy_layers_take_sizes_from_a_state_dict():
    real = nn.Sequential(nn.Conv2d(6, 4, 3, groups=2), nn.BatchNorm2d(4), nn.ConvTranspose2d(4, 6, 2, groups=2), nn.Linear(3, 2))
    lazy = nn.Sequential(nn.LazyConv2d(4, 3, groups=2), nn.LazyBatchNorm2d(), nn.LazyConvTranspose2d(6, 2, groups=2), nn.LazyLinear(2))
    lazy.load_state_dict(real.state_dict())
    assert same_state(real, lazy) and lazy.config == real.config
    assert nn.LazyInstanceNorm2d()._made_from["affine"] and not nn.InstanceNorm2d(2).affine  # as in torch


# ---- functions


def test_functions_that_write_into_their_input():
    x = netcl.tensor([-2.0, 0.5, 3.0])
    assert F.relu_(x) is x and x.tolist() == [0.0, 0.5, 3.0]
    assert F.threshold_(x, 1.0, -1.0).tolist() == x.tolist() == [-1.0, -1.0, 3.0]
    assert F.hardtanh_(x, -0.5, 2.0).tolist() == [-0.5, -0.5, 2.0]
    leaf = netcl.tensor([-1.0, 2.0], requires_grad=True)
    with pytest.raises(AutogradError, match="a leaf that requires grad"):
        F.elu_(leaf)
    F.leaky_relu_(leaf * 1.0, 0.5).sum().backward()
    assert leaf.grad.tolist() == [0.5, 1.0]


def test_gumbel_softmax(device):
    netcl.manual_seed(0)
    logits = Tensor.from_host(device.queue, np.tile(np.float32([0, 1, 2]), (2000, 1)), requires_grad=True)
    soft = F.gumbel_softmax(logits, tau=0.5)
    np.testing.assert_allclose(soft.to_host().sum(1), 1, rtol=1e-5)
    hard = F.gumbel_softmax(logits, hard=True)
    values = hard.to_host()
    assert set(np.unique(values)) <= {0.0, 1.0} and (values.sum(1) == 1).all()
    np.testing.assert_allclose(values.mean(0), np.exp([0, 1, 2]) / np.exp([0, 1, 2]).sum(), atol=0.05)
    (hard * netcl.tensor([1.0, 2.0, 3.0], device=device)).sum().backward()
    assert np.abs(logits.grad.to_host()).sum() > 0


def test_alpha_dropout_keeps_mean_and_variance(device):
    netcl.manual_seed(0)
    x = ag.randn(400, 500, queue=device.queue)
    y = nn.AlphaDropout(0.3)(x).to_host()
    assert abs(y.mean()) < 0.02 and abs(y.std() - 1) < 0.02 and 0.28 < np.unique(y, return_counts=True)[1].max() / y.size < 0.32
    z = F.feature_alpha_dropout(netcl.ones(40, 50, 2, device=device), 0.5, training=True).to_host()
    assert (z == z[:, :, :1]).all() and len(np.unique(z)) == 2
    assert F.alpha_dropout(x, 0.3) is x and nn.FeatureAlphaDropout().eval()(x) is x


def test_attention_by_function_is_that_of_the_layer():
    layer = nn.MultiheadAttention(6, 2, add_bias_kv=True)
    x, y = ag.randn(4, 2, 6), ag.randn(5, 2, 6)
    given = (layer.in_proj_weight, layer.in_proj_bias, layer.bias_k, layer.bias_v, False, 0.0, layer.out_proj.weight, layer.out_proj.bias)
    out, weights = F.multi_head_attention_forward(x, y, y, 6, 2, *given, is_causal=True)
    wanted, others = layer(x, y, y, is_causal=True)
    assert np.array_equal(out.to_host(), wanted.to_host()) and np.array_equal(weights.to_host(), others.to_host())
    assert weights.shape == (2, 4, 6) and (weights.to_host()[:, 0, 1:5] == 0).all()
    with pytest.raises(ShapeError, match="must have embed_dim_to_check elements"):
        F.multi_head_attention_forward(x, y, y, 5, 2, *given)


def test_max_norm_shortens_what_is_looked_up(device):
    layer = nn.Embedding.from_pretrained(Tensor.from_host(device.queue, np.float32([[3, 4], [6, 8], [0.3, 0.4]])), max_norm=1.0)
    np.testing.assert_allclose(layer(netcl.tensor([0, 2], device=device)).to_host(), [[0.6, 0.8], [0.3, 0.4]], rtol=1e-6)
    np.testing.assert_allclose(layer.weight.to_host(), [[0.6, 0.8], [6, 8], [0.3, 0.4]], rtol=1e-6)
    assert not layer.weight.requires_grad and nn.Embedding.from_pretrained([[1.0]], freeze=False).weight.requires_grad


def test_transposed_convolutions_take_an_output_size():
    layer = nn.ConvTranspose2d(2, 3, 3, stride=2, padding=1)
    x = netcl.ones(1, 2, 4, 5)
    assert layer(x).shape == (1, 3, 7, 9) and layer(x, output_size=(8, 9)).shape == (1, 3, 8, 9)
    assert nn.ConvTranspose1d(2, 3, 3, stride=2)(netcl.ones(1, 2, 4), [1, 3, 10]).shape == (1, 3, 10)
    assert F.conv_transpose1d(netcl.ones(1, 2, 4), netcl.ones(2, 3, 3), None, 2, 1, 1).shape == (1, 3, 8)
    with pytest.raises(ShapeError, match=r"\[ConvTranspose2d\] output_size must be at least \(7, 9\)"):
        layer(x, output_size=(9, 9))


def test_ctc_of_an_impossible_target():
    logits = netcl.randn(2, 1, 3, requires_grad=True)
    given = (ag.log_softmax(logits, axis=-1), netcl.tensor([[1, 1]]), [2], [2])  # two equal labels need a blank between
    assert F.ctc_loss(*given).item() == np.inf
    loss = F.ctc_loss(*given, zero_infinity=True)
    loss.backward()
    assert loss.item() == 0.0 and not logits.grad.to_host().any()
    half = (ag.cast(given[0].detach(), "float16"), given[1][:, :1], [2], [1])
    assert abs(F.ctc_loss(*half).item() - F.ctc_loss(given[0], *half[1:]).item()) < 1e-2
    with pytest.raises(ShapeError, match=r"input_lengths must have a number from 1 to 2, .*; input_lengths=\[3\]"):
        F.ctc_loss(given[0], given[1], [3], [2])


@pytest.mark.parametrize(("call", "text"), [
    (lambda: F.conv3d(netcl.ones(2, 3, 3), netcl.ones(1, 2, 1, 1, 1)), r"\[conv3d\] input must have 5 dimensions .*, got 3"),
    (lambda: F.conv3d(netcl.ones(1, 2, 2, 3, 3), netcl.ones(1, 2, 3, 1, 1)), "the kernel must fit the padded input, got depth 3 > 2"),
    (lambda: F.max_pool3d(netcl.ones(2, 3, 3), 2), r"\[max_pool3d\] input must have 5 dimensions"),
    (lambda: nn.Conv3d(2, 3, (1, 2)), r"\[conv\] kernel_size must be an integer or 3 integers, one per axis"),
    (lambda: F.max_unpool2d(netcl.ones(1, 1, 2, 2), netcl.ones(1, 1, 2, 1), 2), r"\[max_unpool2d\] input and indices must have 4 dim"),
    (lambda: F.embedding_bag(netcl.tensor([1]), netcl.ones(2, 3)), r"\[embedding_bag\] input must have 2 axes without offsets"),
    (lambda: F.embedding_bag(netcl.tensor([[1]]), netcl.ones(2, 3), per_sample_weights=netcl.ones(1, 1)), 'mode must be "sum"'),
    (lambda: nn.AdaptiveLogSoftmaxWithLoss(4, 9, [3, 3]), r"\[AdaptiveLogSoftmaxWithLoss\] cutoffs must be one or more strictly ascending"),
    (lambda: nn.utils.rnn.pack_padded_sequence(netcl.ones(3, 2, 1), [1, 3]), r"lengths must be in descending order; lengths=\[1, 3\]"),
    (lambda: nn.utils.rnn.pack_padded_sequence(netcl.ones(3, 2, 1), [4, 1]), "lengths must have a number from 1 to 3 for each sequence"),
])  # fmt: skip
def test_wrong_shapes_are_refused(call, text):
    with pytest.raises(ShapeError, match=text):
        call()


# ---- sequences


def test_sequences_pack_and_unpack(device):
    rnn = nn.utils.rnn
    parts = [Tensor.from_host(device.queue, np.full((n, 2), n, np.float32)) for n in (2, 4, 1)]
    packed = rnn.pack_sequence(parts, enforce_sorted=False)
    assert packed.batch_sizes.tolist() == [3, 2, 1, 1] and packed.sorted_indices.tolist() == [1, 0, 2]
    assert packed.data.to_host()[:, 0].tolist() == [4, 2, 1, 4, 2, 4, 4] and packed.data.device == device
    padded, lengths = rnn.pad_packed_sequence(packed, batch_first=True, padding_value=-1.0, total_length=5)
    assert padded.shape == (3, 5, 2) and lengths.tolist() == [2, 4, 1] and padded.to_host()[2, :, 0].tolist() == [1, -1, -1, -1, -1]
    assert [x.tolist() for x in rnn.unpack_sequence(packed)] == [x.tolist() for x in parts]
    assert rnn.pad_sequence(parts, padding_side="left").to_host()[:, 2, 0].tolist() == [0, 0, 0, 1]
    assert rnn.invert_permutation(netcl.tensor([2, 0, 1])).tolist() == [1, 2, 0]
    half = packed.to("float16")
    assert half.data.dtype == "float16" and half.sorted_indices.dtype == packed.sorted_indices.dtype == "int64"


def test_packed_sequences_move_with_their_order(cl_device):
    layer = nn.GRU(3, 4)
    parts = [Tensor.from_host(cl_device.queue, np.full((n, 3), n / 4, np.float32)) for n in (2, 4, 1)]
    packed = nn.utils.rnn.pack_sequence(parts, enforce_sorted=False)
    there = packed.to("cpu")
    assert {t.device.backend for t in there} == {"cpu"} and there.to(device=cl_device).sorted_indices.device == cl_device
    output, final = layer(packed)
    moved, last = layer.to("cpu")(there)
    np.testing.assert_allclose(moved.data.to_host(), output.data.to_host(), atol=1e-5)
    np.testing.assert_allclose(last.to_host(), final.to_host(), atol=1e-5)
    sorted_before = nn.utils.rnn.pack_sequence(parts[1:])
    assert sorted_before.to("cpu").sorted_indices is None


@pytest.mark.parametrize("kind", [nn.RNN, nn.GRU])
def test_packed_runs_are_those_of_each_sequence(kind):
    layer = kind(3, 4, bidirectional=True, batch_first=True)
    parts = [netcl.randn(n, 3) for n in (3, 1, 3)]
    output, final = layer(nn.utils.rnn.pack_sequence(parts, enforce_sorted=False))
    padded, _ = nn.utils.rnn.pad_packed_sequence(output, batch_first=True)
    for i, x in enumerate(parts):
        y, h = layer(x)
        np.testing.assert_allclose(padded.to_host()[i, : len(x)], y.to_host(), atol=1e-6)
        np.testing.assert_allclose(final.to_host()[:, i], h.to_host(), atol=1e-6)


# ---- computed weights


def test_normalized_weights_train_and_are_removed():
    layer = nn.Linear(3, 2)
    before = layer.weight.to_host()
    assert nn.utils.weight_norm(layer) is layer and repr(layer) == "Linear(in_features=3, out_features=2, bias=True)"
    np.testing.assert_allclose(layer.weight.to_host(), before, rtol=1e-6)
    optimizer = optim.SGD(layer.parameters(), lr=0.1)
    layer(netcl.ones(1, 3)).sum().backward()
    optimizer.step()
    after = layer.weight.to_host()
    assert (after != before).any() and copy.deepcopy(layer).weight.tolist() == after.tolist()
    with pytest.raises(ValueError, match="is not registered; save its state_dict, or remove the parametrization first"):
        _ = layer.config
    nn.utils.remove_weight_norm(layer)
    assert type(layer) is nn.Linear and list(layer.state_dict()) == ["bias", "weight"] and layer.weight.tolist() == after.tolist()
    with pytest.raises(ValueError, match=r"\[remove_weight_norm\] 'weight' of Linear must be normalized by weight_norm"):
        nn.utils.remove_weight_norm(layer)


def test_spectral_norm_is_one_in_the_end():
    netcl.manual_seed(0)
    layer = nn.Linear(4, 3)
    layer.weight.write(np.diag([3.0, 1.0, 0.5, 0.0])[:3].astype(np.float32))
    nn.utils.spectral_norm(layer, n_power_iterations=20)
    layer(netcl.ones(1, 4))
    assert abs(np.linalg.norm(layer.eval().weight.to_host(), 2) - 1) < 1e-3
    kept = layer.weight_u.tolist()
    layer(netcl.ones(1, 4))
    assert layer.weight_u.tolist() == kept
    nn.utils.remove_spectral_norm(layer)
    assert abs(np.linalg.norm(layer.weight.to_host(), 2) - 1) < 1e-3 and list(layer.state_dict()) == ["bias", "weight"]


def test_parametrizations_follow_each_other():
    class Times(nn.Module):
        def __init__(self, factor):
            super().__init__()
            self.factor = factor

        def forward(self, x):
            return x * self.factor

    parametrize = nn.utils.parametrize
    layer = nn.Linear(2, 2)
    before = layer.weight.to_host()
    for factor in (2.0, 5.0):
        parametrize.register_parametrization(layer, "weight", Times(factor))
    assert parametrize.is_parametrized(layer, "weight") and not parametrize.is_parametrized(layer, "bias")
    np.testing.assert_allclose(layer.weight.to_host(), 10 * before, rtol=1e-6)
    parametrize.register_parametrization(layer, "bias", Times(0.0))
    parametrize.remove_parametrizations(layer, "weight", leave_parametrized=False)
    assert layer.weight.tolist() == before.tolist() and layer.bias.tolist() == [0.0, 0.0]
    parametrize.remove_parametrizations(layer, "bias")
    assert type(layer) is nn.Linear and not parametrize.is_parametrized(layer) and len(layer.parameters()) == 2
    with pytest.raises(ValueError, match=r"\[weight_norm\] Linear has no parameter 'scale'; it has \['weight', 'bias'\]"):
        nn.utils.weight_norm(layer, "scale")
    with pytest.raises(ValueError, match=r"\[weight_norm\] dim must be from -2 to 1, got 2"):
        nn.utils.weight_norm(nn.Linear(2, 2), dim=2)
    assert nn.utils.weight_norm(nn.Linear(2, 2), dim=-2).weight_g.shape == (2, 1)
    with pytest.raises(ValueError, match=r"a parametrization must keep shape and dtype; before=\(2,\) float32, after=\(1, 2\) float32"):
        parametrize.register_parametrization(layer, "bias", nn.Unflatten(0, (1, 2)))
    assert isinstance(layer.bias, nn.Parameter) and not parametrize.is_parametrized(layer)


@pytest.mark.parametrize(
    ("change", "restore"),
    [
        (lambda m: nn.utils.prune.l1_unstructured(m, "weight", 1), lambda m: nn.utils.prune.remove(m, "weight")),
        (nn.utils.spectral_norm, None),
        (nn.utils.parametrizations.spectral_norm, lambda m: nn.utils.parametrize.remove_parametrizations(m, "weight")),
        (nn.utils.parametrizations.orthogonal, lambda m: nn.utils.parametrize.remove_parametrizations(m, "weight", False)),
    ],
)
def test_a_computed_parameter_keeps_its_parameter(change, restore):
    """An optimizer that has the parameter goes on with it; a frozen one stays frozen."""
    layer = nn.Linear(3, 3, bias=False).eval()
    parameter = layer.weight.requires_grad_(False)
    change(layer)
    assert layer.parameters()[0] is parameter and not parameter.requires_grad
    value = layer.weight.tolist()
    if restore is not None:
        restore(layer)
        assert layer.weight is parameter and (layer.weight.tolist() == value or change is nn.utils.parametrizations.orthogonal)


def test_older_parameters_of_reductions():
    x, y = netcl.tensor([1.0, 2.0]), netcl.tensor([0.0, 4.0])
    assert F.mse_loss(x, y, size_average=False).item() == nn.MSELoss(size_average=False)(x, y).item() == 5.0
    assert F.mse_loss(x, y, reduce=False).tolist() == nn.MSELoss(reduce=False)(x, y).tolist() == [1.0, 4.0]
    assert F.mse_loss(x, y, size_average=True).item() == F.mse_loss(x, y).item() == 2.5
    assert F.hinge_embedding_loss(x, y, size_average=False).shape == ()
    assert nn.HingeEmbeddingLoss(reduce=False)(x, y).shape == (2,)
    with pytest.raises(TypeError, match="missing a required argument: 'target'"):
        F.mse_loss(x)


@pytest.mark.parametrize("kind", ["matrix_exp", "cayley"])
@pytest.mark.parametrize("shape", [(3, 3), (2, 4), (4, 2)])
def test_orthogonal_weights(shape, kind):
    netcl.manual_seed(0)
    layer = nn.utils.parametrizations.orthogonal(nn.Linear(*shape[::-1]), orthogonal_map=kind)
    assert sorted(layer.state_dict()) == ["bias", "parametrizations.weight.0.base", "parametrizations.weight.original"]
    original = layer.parametrizations.weight.original
    for _ in range(2):
        w = layer.weight.to_host()
        np.testing.assert_allclose(w @ w.T if shape[0] <= shape[1] else w.T @ w, np.eye(min(shape)), atol=1e-5)
        layer(netcl.ones(1, shape[1])).square().sum().backward()
        assert original.grad.abs().sum().item() > 0
        with netcl.no_grad():
            original += original.grad
    with pytest.raises(ValueError, match=r"\[orthogonal\] the weight must be a matrix, orthogonal_map matrix_exp or cayley"):
        nn.utils.parametrizations.orthogonal(nn.Linear(2, 2), orthogonal_map="householder")


# ---- arguments that must not be ignored


@pytest.mark.parametrize("name", ["adaptive_avg_pool", "adaptive_max_pool"])
@pytest.mark.parametrize("axes", [1, 2, 3])
def test_adaptive_pools_refuse_sizes_of_other_axes(name, axes):
    pool, x = getattr(F, f"{name}{axes}d"), Tensor.ones((1, 2, *(4,) * axes))
    for length in {1, 2, 3, 4} - {axes}:
        with pytest.raises(ShapeError, match="output_size must be"):
            pool(x, (2,) * length)
    assert pool(x, (2,) * axes).shape == (1, 2, *(2,) * axes)


def test_arguments_are_given_once():
    x = Tensor.from_host([[0.0, 1.0], [2.0, 3.0]])
    for call in (lambda: ag.sum(x, dim=0, axis=1), lambda: ag.sub(x, input=x), lambda: ag.sub(x, x, other=x)):
        with pytest.raises(TypeError):
            call()
    with pytest.raises(ValueError, match="mask and attn_mask must not both be given"):
        ag.scaled_dot_product_attention(x, x, x, x, attn_mask=x)
    with pytest.raises(ValueError, match=r"\[pad\] value must be 0 unless mode is constant; mode='reflect', value=3.0"):
        F.pad(x, (1, 1), mode="reflect", value=3.0)


def test_input_of_torch_is_the_second_argument_of_two_ops():
    x, edges = Tensor.from_host([2.5, 0.0]), Tensor.from_host([1.0, 2.0, 3.0])
    assert netcl.searchsorted(edges, input=x).tolist() == netcl.searchsorted(edges, x).tolist() == [2, 0]
    assert netcl.where(x > 1, input=x, other=-x).tolist() == netcl.where(condition=x > 1, input=x, other=-x).tolist() == [2.5, 0.0]
    for options in ({"side": "most"}, {"side": "left", "right": True}):
        with pytest.raises(ValueError, match=r"\[searchsorted\] side must be left or right and agree with right"):
            netcl.searchsorted(edges, x, **options)


def test_alpha_of_rsub_scales_the_first_argument():
    x, y = Tensor.from_host([1.0, 2.0]), Tensor.from_host([10.0, 20.0])
    assert netcl.rsub(x, y, alpha=3).tolist() == [7.0, 14.0]


def test_losses_refuse_older_arguments_by_position():
    for make in (lambda: nn.CrossEntropyLoss(None, False), lambda: nn.NLLLoss(None, True), lambda: nn.PoissonNLLLoss(True, False, False)):
        with pytest.raises(TypeError, match="must not be a bool; pass torch's size_average and reduce by name"):
            make()
    x = Tensor.ones((2, 3))
    for loss in (lambda: F.poisson_nll_loss(x, x, True, False, False), lambda: F.binary_cross_entropy_with_logits(x, x, None, False)):
        with pytest.raises((TypeError, ValueError), match=r"must not be a bool|reduction=False"):
            loss()
    assert nn.PoissonNLLLoss(False, True)(x, x).shape == ()
    with pytest.raises(ValueError, match=r"reduction must be mean, sum or none; reduction='meen'"):
        F.soft_margin_loss(x, x, reduction="meen")


@pytest.mark.parametrize("offsets", [[1, 2], [0, 5], [0, 2, 1]])
def test_offsets_of_maxima_are_checked(offsets):
    with pytest.raises(ShapeError, match=r"\[embedding_bag\] offsets must start at 0, not decrease and be at most 3"):
        F.embedding_bag(Tensor.from_host([0, 1, 2]), Tensor.ones((4, 2)), Tensor.from_host(offsets), mode="max")


def test_ctc_loss_refuses_an_unknown_reduction():
    with pytest.raises(ValueError, match=r"\[ctc_loss\] reduction must be mean, sum or none; reduction='most'"):
        nn.functional.ctc_loss(netcl.zeros((4, 1, 3)), netcl.tensor([[1]]), [4], [1], reduction="most")


def test_lp_pools_of_negative_sums(device):
    with netcl.device(device):
        x = netcl.tensor([[[-1.0, -2.0, 3.0, 4.0]]])
        np.testing.assert_allclose(F.lp_pool1d(x, 1.0, 2).to_host(), [[[-3.0, 7.0]]], rtol=1e-6)
        np.testing.assert_allclose(F.lp_pool1d(x, 3.0, 2).to_host(), [[[np.nan, 91 ** (1 / 3)]]], rtol=1e-5)


@pytest.mark.parametrize(
    "call, shape",
    [
        (lambda x: F.conv3d(x, netcl.ones(3, 2, 2, 2, 2), stride=(2,)), (2, 4, 4, 4)),
        (lambda x: F.conv_transpose3d(x, netcl.ones(2, 3, 2, 2, 2)), (2, 3, 3, 3)),
        (lambda x: F.max_pool3d(x, 2, return_indices=True), (2, 4, 4, 4)),
        (lambda x: F.avg_pool3d(x, 2, padding=(1,)), (2, 4, 4, 4)),
        (lambda x: F.adaptive_avg_pool3d(x, 2), (2, 3, 3, 3)),
        (lambda x: F.adaptive_max_pool3d(x, 2, return_indices=True), (2, 3, 3, 3)),
        (lambda x: F.adaptive_max_pool1d(x, 2, return_indices=True), (2, 5)),
        (lambda x: F.max_unpool2d(*F.max_pool2d(x, 2, return_indices=True), 2), (2, 4, 4)),
        (lambda x: nn.InstanceNorm1d(2, affine=True)(x), (2, 5)),
        (lambda x: nn.InstanceNorm3d(2, track_running_stats=True).eval()(x), (2, 3, 3, 3)),
    ],
)
def test_one_sample_without_the_batch_dimension(call, shape):
    x = netcl.arange(float(np.prod(shape))).reshape(shape)
    one, several = call(x), call(x[None])
    pairs = zip(one, several, strict=True) if isinstance(one, tuple) else [(one, several)]
    for y, batch in pairs:
        np.testing.assert_array_equal(y.to_host(), batch[0].to_host(), strict=True)


def test_a_size_in_a_tuple_is_that_of_all_axes():
    x = netcl.arange(32.0).reshape(1, 2, 4, 4)
    assert F.avg_pool2d(x, (2,), padding=(1,)).tolist() == F.avg_pool2d(x, 2, padding=1).tolist()
    assert F.conv2d(x, netcl.ones(3, 2, 2, 2), stride=(2,)).tolist() == F.conv2d(x, netcl.ones(3, 2, 2, 2), stride=2).tolist()
