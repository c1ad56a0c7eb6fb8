"""Module: names, state, modes, places, hooks, descriptions."""

from __future__ import annotations

import copy
import json
import pickle

import numpy as np
import pytest

import netcl
import netcl.autograd as ag
from netcl import nn
from netcl.core.device import manager
from netcl.core.errors import DtypeError, ShapeError
from netcl.core.tensor import Tensor
from netcl.nn.state import StateDictError
from netcl.nn.utils import prune
from netcl.ops import random


class Net(nn.Module):
    def __init__(self, width: int = 3):
        super().__init__()
        self.first = nn.Linear(2, width)
        self.act = nn.ReLU()
        self.second = nn.Linear(width, 1)

    def forward(self, x):
        return self.second(self.act(self.first(x)))


def names(pairs):
    return [name for name, _ in pairs]


# ---- parameters, buffers, modules


def test_parameters_come_in_order_of_registration(device):
    net = Net()
    assert names(net.named_parameters()) == ["first.weight", "first.bias", "second.weight", "second.bias"]
    assert all(type(p) is Tensor and p.requires_grad and p.persistent for p in net.parameters())
    assert isinstance(net.parameters(), list)
    assert names(net.named_modules()) == ["", "first", "act", "second"]
    assert [type(m).__name__ for m in net.children()] == ["Linear", "ReLU", "Linear"]


def test_shared_parameters_are_listed_once_and_saved_twice(device):
    net = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    net[1].weight = net[0].weight
    assert len(net.parameters()) == 3
    assert list(net.state_dict()) == ["0.weight", "0.bias", "1.weight", "1.bias"]
    assert copy.deepcopy(net)[0].weight is not net[0].weight
    twin = copy.deepcopy(net)
    assert twin[0].weight is twin[1].weight


def test_parameters_are_what_was_made_as_parameter(device):
    net = Net()
    net.fixed = nn.Parameter(ag.tensor([1.0, 2.0]), requires_grad=False)
    net.points = ag.tensor([1.0], requires_grad=True)
    assert names(net.named_parameters())[0] == "fixed" and "points" not in net.state_dict() and not net.fixed.requires_grad
    assert isinstance(net.fixed, nn.Parameter) and not isinstance(net.points, nn.Parameter)
    net.again = copy.deepcopy(net.fixed)
    assert "again" in net.state_dict() and net.half().fixed.dtype == "float16" and net.points.dtype == "float32"


def test_attributes_are_read_and_written_as_in_torch(device):
    net = Net()
    assert list(net._modules) == ["first", "act", "second"] and list(net.first._parameters) == ["weight", "bias"] and not net._buffers
    net._modules["act"] = nn.Tanh()
    net._modules["third"] = nn.Identity()
    del net._modules["third"]
    assert (
        isinstance(net.act, nn.Tanh)
        and len(net._modules) == 3
        and net._get_name() == "Net"
        and net.type("float16").first.bias.dtype == "float16"
    )
    net.register_module("more", net.act)
    twins = nn.Sequential(net.first, net.first)
    assert names(twins.named_parameters(remove_duplicate=False)) == ["0.weight", "0.bias", "1.weight", "1.bias"]
    assert names(twins.named_modules(remove_duplicate=False)) == ["", "0", "1"] and names(twins.named_modules(set(), "p")) == ["p", "p.0"]
    with pytest.raises(RuntimeError, match="must have exactly the parameters"):
        net.load_state_dict({"first.weight": np.zeros((3, 2))})


def test_assigning_none_or_deleting_unregisters(device):
    net = Net()
    net.act = None
    del net.second
    assert names(net.named_modules()) == ["", "first"]
    net.first.bias = None
    assert names(net.named_parameters()) == ["first.weight"]


def test_a_parameter_is_replaced_by_a_parameter_only(device):
    layer = nn.Linear(2, 3, device=device)
    for value in (layer.weight.detach(), layer.weight * 2, np.zeros((3, 2), np.float32), 1.0):
        with pytest.raises(TypeError, match=r"\[setattr\] 'weight' of Linear is a parameter and must be set to a parameter or None"):
            layer.weight = value
    layer.weight = nn.Parameter(layer.weight * 2)
    layer.bias = nn.Parameter(layer.bias, requires_grad=False)
    assert names(layer.named_parameters()) == ["weight", "bias"] and not layer.bias.requires_grad
    layer.bias = None
    assert names(layer.named_parameters()) == ["weight"]


def test_buffers_move_and_are_saved_unless_they_are_scratch(device):
    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("scale", np.float32([2.0]))
            self.register_buffer("cache", np.zeros(3, np.int64), persistent=False)

    module = Scaled()
    assert names(module.named_buffers()) == ["scale", "cache"]
    assert list(module.state_dict()) == ["scale"]
    assert module.parameters() == []
    module.half()
    assert (module.scale.dtype, module.cache.dtype) == ("float16", "int64")


def test_a_buffer_may_be_none_for_a_while(device):
    module = nn.Module()
    module.register_buffer("mask", None)
    assert names(module.named_buffers()) == [] and list(module.state_dict()) == []
    module.mask = Tensor.from_host([1.0, 2.0])
    module.register_buffer("mask", module.mask, persistent=True)
    assert list(module.state_dict()) == ["mask"] and module.to(device.queue).mask.queue is device.queue
    module.mask = None
    module.mask = Tensor.from_host([3.0])
    assert module.state_dict()["mask"].tolist() == [3.0]
    for wrong in (1.0, np.ones(2, np.float32)):
        with pytest.raises(TypeError, match=r"\[setattr\] 'mask' of Module is a buffer and must be set to a tensor or None; given="):
            module.mask = wrong


def test_state_dicts_of_old_files_have_no_count_of_batches():
    model = nn.Sequential(nn.Conv2d(1, 2, 1), nn.BatchNorm2d(2))
    model[1].num_batches_tracked = Tensor.from_host(np.array(7))
    state = {name: value for name, value in model.state_dict().items() if name != "1.num_batches_tracked"}
    assert model.load_state_dict(state) == ([], []) and model[1].num_batches_tracked.item() == 7
    with pytest.raises(ValueError, match=r"missing=\[1.running_mean\]"):
        model.load_state_dict({name: value for name, value in state.items() if name != "1.running_mean"})


@pytest.mark.parametrize("name", ["", "a.b", "forward", 3])
def test_names_that_cannot_be_used_are_refused(name):
    with pytest.raises(ValueError, match=r"\[register_buffer\]"):
        Net().register_buffer(name, np.zeros(1, np.float32))


def test_constructors_take_a_place(device):
    for layer in (nn.Linear(device.queue, 2, 3), nn.Linear(device, 2, 3), nn.Linear(2, 3, queue=device), nn.Linear(2, 3, device=device)):
        assert layer.weight.queue is device.queue
        assert (layer.in_features, layer.out_features) == (2, 3)
    assert Net(device.queue, 5).first.weight.queue is device.queue
    assert nn.Linear(2, 3, dtype="float16").bias.dtype == "float16"
    with pytest.raises(DtypeError, match=r"\[parameter\] parameters must be floats"):
        nn.Linear(2, 3, dtype="int64")


def test_a_container_moves_its_modules_to_its_place(cl_device):
    cpu = manager.default("cpu")
    model = nn.Sequential(cpu, nn.Linear(2, 2))
    assert model[0].weight.queue is cpu.queue


def test_a_class_may_take_the_queue_itself(device):
    class Own(nn.Module):
        def __init__(self, queue, width):
            super().__init__()
            self.layer = nn.Linear(queue, width, width)

    assert Own(device.queue, 4).layer.weight.shape == (4, 4)


# ---- state dicts


def test_a_state_dict_goes_round(device):
    a, b = Net(), Net()
    assert b.load_state_dict(a.state_dict()) == ([], [])
    x = np.float32([[1, -2]])
    np.testing.assert_array_equal(a(x).to_host(), b(x).to_host())
    b.load_state_dict({name: value.to_host() for name, value in a.state_dict().items()})


def test_a_state_dict_shares_memory(device):
    net = Net()
    net.state_dict()["first.bias"].fill_(7.0)
    assert net.first.bias.tolist() == [7.0] * 3
    assert [*net.state_dict(prefix="net.")][:2] == ["net.first.weight", "net.first.bias"]


def test_what_does_not_fit_is_told_before_anything_changes(device):
    net = Net()
    before = {name: value.to_host() for name, value in net.state_dict().items()}
    state = {name: value + 1 for name, value in before.items()}
    with pytest.raises(ValueError, match=r"missing=\[second\.bias\], unexpected=\[extra\]; pass strict=False to load the matching ones"):
        net.load_state_dict({"extra": np.zeros(1), **{k: v for k, v in state.items() if k != "second.bias"}})
    with pytest.raises(ShapeError, match=r"second\.bias is \(2,\), expected \(1,\)"):
        net.load_state_dict({**state, "second.bias": np.zeros(2)})
    with pytest.raises(DtypeError, match=r"second\.bias is <U1"):
        net.load_state_dict({**state, "second.bias": np.array(["a"])})
    for name, value in net.state_dict().items():
        np.testing.assert_array_equal(value.to_host(), before[name])
    keys = net.load_state_dict({"first.bias": np.ones(3), "extra": np.zeros(1)}, strict=False)
    assert keys.missing_keys == ["first.weight", "second.weight", "second.bias"]
    assert keys.unexpected_keys == ["extra"]
    assert net.first.bias.tolist() == [1.0] * 3


# ---- modes and conversions


def test_modes_and_gradients(device):
    net = Net()
    assert net.training and not net.eval().second.training and net.train().first.training
    net.freeze()
    assert not any(p.requires_grad for p in net.parameters()) and len(net.parameters()) == 4
    net.unfreeze()
    net(np.float32([[1, 2]])).sum().backward()
    assert net.first.weight.grad is not None
    net.zero_grad()
    assert all(p.grad is None for p in net.parameters())


def test_conversion_keeps_the_objects(device):
    net = Net()
    held = net.parameters()
    net(np.float32([[1, 2]])).sum().backward()
    net.half()
    assert all(a is b for a, b in zip(held, net.parameters(), strict=True))
    assert {p.dtype for p in held} == {"float16"} == {p.grad.dtype for p in held}
    assert net.float().first.weight.dtype == "float32"
    cpu = manager.default("cpu")
    assert {p.queue for p in net.to(cpu).parameters()} == {cpu.queue}
    net.to(device.queue, "bfloat16")
    assert net.first.bias.queue is device.queue and net.first.bias.dtype == "bfloat16"
    with pytest.raises(DtypeError, match=r"\[to\]"):
        net.to("int64")


def test_apply_goes_inside_first():
    seen = []
    Net().apply(lambda m: seen.append(type(m).__name__))
    assert seen == ["Linear", "ReLU", "Linear", "Net"]


def test_the_seed_decides_the_start_values(device):
    random.manual_seed(3)
    first = [p.to_host() for p in Net().parameters()]
    random.manual_seed(3)
    for a, b in zip(first, Net().parameters(), strict=True):
        np.testing.assert_array_equal(a, b.to_host())


# ---- hooks


def test_forward_hooks_see_and_replace(device):
    net, seen = Net(), []
    pre = net.act.register_forward_pre_hook(lambda module, args: seen.append(args[0].shape))
    post = net.register_forward_hook(lambda module, args, out: out * 0.0)
    assert net(np.ones((4, 2), np.float32)).tolist() == [[0.0]] * 4
    assert seen == [(4, 3)]
    pre.remove()
    pre.remove()
    post.remove()
    net(np.ones((1, 2), np.float32))
    assert len(seen) == 1 and net._module_hooks == {}


def test_hooks_with_keywords_run_in_the_order_asked(device):
    class Scale(nn.Module):
        def forward(self, x, by=1.0):
            return x * by

    layer, x = Scale(), ag.tensor([1.0, 2.0], requires_grad=True)
    layer.register_forward_pre_hook(lambda module, args, kwargs: (args, {"by": kwargs["by"] + 1}), with_kwargs=True)
    layer.register_forward_hook(lambda module, args, kwargs, out: out + kwargs["by"], with_kwargs=True)
    layer.register_forward_hook(lambda module, args, out: out * 10, prepend=True)
    layer.register_full_backward_pre_hook(lambda module, grads: (grads[0] * 3,))
    y = layer(x, by=2.0)
    y.sum().backward()
    assert y.tolist() == [33.0, 63.0] and x.grad.tolist() == [90.0, 90.0]


def test_backward_hooks_see_and_replace(device):
    layer, seen = nn.Linear(2, 1), []

    def hook(module, grad_input, grad_output):
        seen.append((module is layer, grad_input[0].tolist(), grad_output[0].tolist()))
        return (grad_input[0] * 10.0,)

    x = ag.tensor([[1.0, 2.0]], requires_grad=True)
    with layer.register_full_backward_hook(hook):
        layer(x).sum().backward()
    weight = layer.weight.to_host()
    assert seen == [(True, weight.tolist(), [[1.0]])]
    np.testing.assert_allclose(x.grad.to_host(), 10 * weight, rtol=1e-6)
    assert layer.weight.grad.tolist() == [[1.0, 2.0]]


def test_backward_hooks_run_when_no_input_wants_a_gradient(device):
    layer, seen = nn.Linear(2, 1), []
    layer.register_full_backward_hook(lambda module, gi, go: seen.append((gi, go[0].shape)))
    layer(np.ones((3, 2), np.float32)).sum().backward()
    assert seen == [((None,), (3, 1))]


# ---- descriptions


def test_summary_counts(device):
    table = Net(3).summary((5, 2))
    assert table.parameters == table.learned == 3 * 2 + 3 + 3 + 1
    assert table.flops == 5 * (3 * 5 + 3 + 7)
    assert [row.output_shape for row in table.rows] == [(5, 1), (5, 3), (5, 3), (5, 1)]
    assert "second Linear" in str(table) and Net().training
    net = Net()
    net.first.freeze()
    assert net.summary((1, 2)).learned == 4


def test_configurations_go_round(device):
    model = nn.Sequential(nn.Residual(nn.Linear(4, 4), activation=nn.GELU("tanh")), nn.Concat(nn.Identity(), nn.Linear(4, 2), dim=-1))
    again = nn.build(json.loads(json.dumps(model.config)))
    assert repr(again) == repr(model)
    again.load_state_dict(model.state_dict())
    x = np.float32([[1, 2, 3, 4]])
    np.testing.assert_array_equal(model(x).to_host(), again(x).to_host())


def test_a_configuration_knows_what_was_changed_later():
    nn.register_layer("test_Net", Net)
    try:
        net = Net(4)
        net.second = nn.Linear(4, 7)
        net.act = nn.Sequential(nn.Tanh())
        net.act.append(nn.ReLU())
        again = nn.build(json.loads(json.dumps(net.config)))
        assert repr(again) == repr(net)
        net.act = None
        assert nn.build(net.config).act is None
    finally:
        nn.unregister_layer("test_Net")


def test_what_cannot_be_described_is_told():
    with pytest.raises(ValueError, match=r"\[config\] the class Net is not registered"):
        nn.config_of(nn.Sequential(Net()))
    with pytest.raises(ValueError, match=r"\[factory\] the type must be a registered layer; type='Linaer'; did you mean Linear"):
        nn.build({"type": "Linaer"})
    with pytest.raises(ValueError, match=r"\[factory\] wrong arguments for Linear: missing a required argument: 'out_features'"):
        nn.build({"type": "Linear", "args": [3]})
    for row in ({"type": "ReLU", "code": 1}, 3, {}, {"type": "ReLU", "args": "x"}, {"type": ["ReLU"]}):
        with pytest.raises(ValueError, match=r"\[factory\]"):
            nn.build(row)
    deep = {"type": "ReLU"}
    for _ in range(100):
        deep = {"type": "Sequential", "args": [deep]}
    with pytest.raises(ValueError, match="must not be nested deeper"):
        nn.build(deep)
    with pytest.raises(ValueError, match="cannot be registered twice"):
        nn.register_layer("Linear", nn.ReLU)


def test_forward_must_be_defined():
    with pytest.raises(NotImplementedError, match=r"\[Module\] forward must be defined by the subclass"):
        nn.Module()(1)


def test_a_module_may_have_attributes_of_its_own_by_any_name(device):
    class Own(nn.Module):
        def __init__(self, queue, config):
            super().__init__()
            self.queue, self.config, self.state, self.layer = queue, config, {}, nn.Linear(2, 2)

    own = Own(device.queue, {"width": 3})
    assert own.config == {"width": 3} and own.queue is device.queue
    assert own.half().layer.weight.dtype == "float16"


def test_arrays_go_where_the_tensors_are(cl_device):
    cpu = manager.default("cpu")
    model = nn.LeNet(device=cpu)
    logits = model(np.zeros((2, 1, 28, 28), np.float32))
    loss = nn.CrossEntropyLoss()(logits, np.array([1, 2]))
    assert loss.queue is cpu.queue
    loss.backward()


@pytest.mark.parametrize("dtype", ["float16", pytest.param("bfloat16", marks=pytest.mark.matrix)])
def test_models_run_in_half(device, dtype):
    x = np.random.default_rng(0).standard_normal((2, 1, 28, 28)).astype(np.float32)
    model = nn.LeNet().eval()
    wide = model(x).to_host()
    out = model.to(dtype)(Tensor.from_host(device.queue, x, dtype))
    assert out.dtype == dtype
    np.testing.assert_allclose(out.to_host(), wide, atol=0.05)
    gpt = nn.GPT(vocab_size=11, block_size=8, n_layer=1, n_head=2, n_embd=16, dtype=dtype, position="rotary", mlp="swiglu", norm="rms")
    loss = gpt.loss(np.array([[1, 2, 3]]), np.array([[2, 3, 4]]))
    loss.backward()
    assert {p.grad.dtype for p in gpt.parameters()} == {dtype}
    assert np.isfinite(loss.item())


class Received(nn.Module):
    """Keeps what it is called with."""

    def forward(self, *args):
        self.last = args
        return args[0]


def test_a_forward_of_the_user_gets_lists_and_floats_unchanged():
    x, images = Tensor.ones(2, 3), [[Tensor.ones(3), Tensor.ones(2)], [Tensor.ones(1)]]
    module = Received()
    for value in (0.5, [4, 4], [], ["a"], images, [[x, x], [x, x]]):
        module(x, value)
        assert module.last[1] is value
        nn.Sequential(module)(value)
        assert module.last[0] is value
    module(np.ones(3, np.float32))
    assert isinstance(module.last[0], Tensor)
    assert nn.Sequential(nn.Linear(2, 1))([[1.0, 2], (3.0, 4.0)]).shape == (2, 1)


def test_attributes_by_the_name_that_torch_has_for_the_look_up():
    module = nn.Sequential(nn.Linear(2, 3))
    module.add_module("named", nn.ReLU())
    assert module.__getattr__("named") is module.named and module.__getattr__("training") is True
    with pytest.raises(AttributeError, match="'Sequential' object has no attribute 'absent'"):
        module.__getattr__("absent")
    assert not hasattr(module, "absent")


def test_tensors_by_dotted_names():
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    assert model.get_parameter("0.weight") is model[0].weight and model.get_buffer("1.running_mean") is model[1].running_mean
    for call, name in ((model.get_parameter, "1.running_mean"), (model.get_buffer, "0.weight"), (model.get_parameter, "2.weight")):
        with pytest.raises(AttributeError, match=r"must name a (parameter|buffer|module), got "):
            call(name)


def test_entries_without_a_module_keep_their_places():
    layers = nn.ModuleList([nn.Linear(2, 2), None, nn.ReLU()])
    layers.append(None)
    assert [type(layer) for layer in layers] == [nn.Linear, type(None), nn.ReLU, type(None)] and len(layers) == 4
    assert list(layers.state_dict()) == ["0.weight", "0.bias"] and [name for name, _ in layers.named_children()] == ["0", "2"]
    layers[0], layers[1] = None, nn.Linear(2, 1)
    assert layers[0] is None and list(copy.deepcopy(layers).state_dict()) == ["1.weight", "1.bias"]
    layers.insert(0, None)
    assert [layer is None for layer in layers] == [True, True, False, False, True] and layers.pop(0) is None
    assert list(nn.ModuleDict({"a": None, "b": nn.ReLU()})) == ["a", "b"]


# ---- pruning


def test_pruning_keeps_the_original_and_a_mask(device):
    with netcl.device(device):
        layer = nn.Linear(4, 2)
        layer.weight.data.copy_(ag.tensor([[1.0, -4.0, 2.0, 3.0], [-0.5, 6.0, 0.1, -5.0]]))
        prune.l1_unstructured(layer, "weight", amount=3)
        assert layer.weight.tolist() == [[0.0, -4.0, 2.0, 3.0], [0.0, 6.0, 0.0, -5.0]] and prune.is_pruned(layer)
        layer(netcl.ones(1, 4)).sum().backward()
        assert layer.weight_orig.grad.tolist() == layer.weight_mask.tolist() and sorted(layer.state_dict()) == [
            "bias",
            "weight_mask",
            "weight_orig",
        ]
        prune.ln_structured(layer, "weight", amount=1, n=2, dim=0)
        assert layer.weight.tolist() == [[0.0] * 4, [0.0, 6.0, 0.0, -5.0]]
        prune.remove(layer, "weight")
        assert isinstance(layer.weight, nn.Parameter) and not prune.is_pruned(layer) and layer.weight.abs().sum().item() == 11
        pair = nn.Sequential(nn.Linear(2, 1, bias=False), nn.Linear(2, 1, bias=False))
        pair[0].weight.data.copy_(ag.tensor([[1.0, 2.0]]))
        pair[1].weight.data.copy_(ag.tensor([[0.5, 3.0]]))
        prune.global_unstructured([(m, "weight") for m in pair], prune.L1Unstructured, amount=0.5)
        assert [m.weight.tolist() for m in pair] == [[[0.0, 2.0]], [[0.0, 3.0]]]
        scores = ag.tensor([[-3.0, 2.0]])
        assert prune.l1_unstructured(nn.Linear(2, 1), "weight", 1, importance_scores=scores).weight_mask.tolist() == [[1.0, 0.0]]
        given = {(pair[1], "weight"): scores}
        prune.global_unstructured([(m, "weight") for m in pair], prune.L1Unstructured, importance_scores=given, amount=1)
        assert [m.weight.tolist() for m in pair] == [[[0.0, 0.0]], [[0.0, 3.0]]]
        with pytest.raises(ValueError, match=r"\[prune\] mask must have the shape of the parameter"):
            prune.custom_from_mask(pair[0], "weight", netcl.ones(2))
        with pytest.raises(ValueError, match=r"\[prune\] dim must be from -2 to 1, got 5"):
            prune.ln_structured(nn.Linear(2, 1), "weight", 1, 2, dim=5)
        with pytest.raises(ValueError, match="amount must be an integer from 0 to 2, or a float from 0 to 1"):
            prune.random_unstructured(nn.Linear(2, 1), "weight", amount=1.5)


def test_hooks_change_a_state_dict_before_it_is_loaded():
    class Renamed(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(2, 1)
            self._register_load_state_dict_pre_hook(self.rename)

        def rename(self, state, prefix, *rest):
            state[f"{prefix}layer.bias"] = state.pop(f"{prefix}old.bias")

    model = nn.Sequential(Renamed())
    given = {"0.layer.weight": netcl.ones(1, 2), "0.old.bias": netcl.tensor([3.0])}
    seen = []
    model[0].register_load_state_dict_post_hook(lambda module, keys: seen.append((module, keys)))
    keys = model.load_state_dict(given)
    assert model[0].layer.bias.tolist() == [3.0] and list(given) == ["0.layer.weight", "0.old.bias"]
    assert seen == [(model[0], keys)]
    assert copy.deepcopy(model).load_state_dict(given) == keys

    layer = nn.Linear(2, 1)
    handle = layer.register_load_state_dict_pre_hook(lambda module, state, prefix, *rest: rest[-1].append(f"{prefix}weight is old"))
    with pytest.raises(StateDictError, match=r"\[load_state_dict\] a hook reports: weight is old"):
        layer.load_state_dict(layer.state_dict())
    handle.remove()
    layer.load_state_dict(layer.state_dict())


def test_a_module_with_computed_parameters_is_not_pickled():
    layer = nn.utils.parametrizations.weight_norm(nn.Linear(2, 2))
    with pytest.raises(TypeError, match=r"a Linear with computed parameters cannot be pickled; computed=\['weight'\]; save its state_dict"):
        pickle.dumps(layer)
    assert copy.deepcopy(layer).weight.tolist() == layer.weight.tolist()


class Overriding(nn.Module):
    """A module that overrides what torch calls on submodules; ``calls`` are the calls."""

    def __init__(self):
        super().__init__()
        self.norm, self.grid, self.calls = nn.BatchNorm1d(2), netcl.ones(2), []

    def train(self, mode=True):
        super().train(mode)
        self.norm.eval()
        return self

    def _apply(self, fn, recurse=True):
        super()._apply(fn)
        self.grid = fn(self.grid)
        return self

    def get_extra_state(self):
        return {"version": 3}

    def set_extra_state(self, state):
        self.calls.append(state)

    def _save_to_state_dict(self, destination, prefix, keep_vars):
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[f"{prefix}note"] = netcl.ones(1)

    def _load_from_state_dict(self, state_dict, prefix, *rest):
        self.calls.append(state_dict.pop(f"{prefix}note").tolist())
        super()._load_from_state_dict(state_dict, prefix, *rest)


def test_methods_that_submodules_override_are_called():
    model = nn.Sequential(Overriding(), nn.Linear(2, 2))
    assert not model.train()[0].norm.training and model[1].training and not model.eval().train()[0].norm.training
    state = model.half().state_dict(prefix="p.")
    assert model[0].grid.dtype == model[0].norm.weight.dtype == "float16"
    assert list(state)[:2] == ["p.0._extra_state", "p.0.note"] and state["p.0._extra_state"] == {"version": 3}
    state = model.state_dict()
    assert model.load_state_dict(state) == ([], []) and model[0].calls == [[1.0], {"version": 3}]
    state["0.other"] = state.pop("0._extra_state")
    with pytest.raises(StateDictError, match=r"missing=\[0._extra_state\], unexpected=\[0.other\]"):
        model.load_state_dict(state)

    class NoBias(nn.Linear):
        def state_dict(self, *args, prefix="", **options):
            found = super().state_dict(*args, prefix=prefix, **options)
            del found[f"{prefix}bias"]
            return found

    assert list(nn.Sequential(NoBias(1, 1)).state_dict()) == ["0.weight"]


def test_names_keep_their_order_and_their_kind():
    module = nn.Module()
    module.register_buffer("mean", netcl.ones(1))
    module.register_parameter("scale", None)
    module.shift = nn.Parameter([1.0])
    module.scale = nn.Parameter([1.0])
    module.a, module.b = nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False)
    module.a = None
    module.a = nn.Linear(1, 1, bias=False)
    found = {}
    assert module.state_dict(destination=found, keep_vars=True) is found and found["scale"] is module.scale
    assert list(found) == ["scale", "shift", "mean", "a.weight", "b.weight"]
    for register, value in ((module.register_buffer, None), (module.add_module, nn.ReLU()), (module.register_parameter, netcl.ones(1))):
        with pytest.raises((TypeError, ValueError), match="'scale'"):
            register("scale", value)
    other = copy.copy(module)
    other.c = nn.Linear(1, 1, bias=False)
    assert list(module.state_dict()) == list(found) == list(other.state_dict())[:-1]
    module.shift.grad = netcl.ones(1)
    assert copy.deepcopy(module).shift.grad is None
    norm = nn.BatchNorm1d(2)
    norm.track_running_stats = False
    assert "num_batches_tracked" in norm.state_dict()
