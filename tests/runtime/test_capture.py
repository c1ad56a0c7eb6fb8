"""Recording and replaying: the same numbers as without, and never silently others."""

from __future__ import annotations

import gc
import logging
from functools import partial
from itertools import combinations, count, pairwise
from types import SimpleNamespace

import numpy as np
import pytest

import netcl
import netcl.autograd as ag
from netcl import nn, optim
from netcl.core import memory
from netcl.core.errors import DtypeError, OutOfMemoryError, ShapeError
from netcl.core.kernels import program
from netcl.core.tensor import Tensor
from netcl.ops import random
from netcl.replay.contract import tensors_of
from netcl.replay.memory_plan import MemoryBlock, share
from netcl.replay.values import MADE, Value
from netcl.runtime.capture import CaptureError, capture_graph

RECORDED = 3  # calls until a function is replayed


def small_net() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.25), nn.Linear(8, 3))


def batches(count: int, rows: int = 5, seed: int = 0) -> list[tuple[Tensor, Tensor]]:
    rng = np.random.default_rng(seed)
    pairs = [(rng.standard_normal((rows, 6), np.float32), rng.integers(0, 3, rows)) for _ in range(count)]
    return [(Tensor.from_host(x), Tensor.from_host(y)) for x, y in pairs]


def training(model: nn.Module, optimizer, schedule=None, clip=optim.clip_grad_norm_device):
    def step(x, y):
        optimizer.zero_grad()
        loss = ag.cross_entropy(model(x), y)
        loss.backward()
        clip(model.parameters(), 1.0)
        optimizer.step()
        if schedule is not None:
            schedule.step()
        return loss

    return step


def both_ways(run) -> None:
    """``run(compile)`` from the same seed, plain and compiled, gives the same arrays, bit for bit."""
    told = []
    for way in (lambda function: function, netcl.compile):
        netcl.manual_seed(11)
        told.append([np.asarray(part.to_host() if isinstance(part, Tensor) else part) for part in run(way)])
    for plain, compiled in zip(*told, strict=True):
        np.testing.assert_array_equal(plain, compiled)


def no_launch_from_python(monkeypatch):
    """From here on, only prepared launches work."""

    def refuse(*args, **kwargs):
        raise AssertionError("a kernel was launched from Python")

    monkeypatch.setattr(program.Kernel, "__call__", refuse)


def test_a_training_step_goes_on_as_without(device):
    """Dropout, running statistics, clipping, Adam's counters and a schedule inside the step; what is left behind is the same too."""

    def run(way):
        model = small_net()
        optimizer = optim.Adam(model.parameters(), lr=0.05)
        schedule = optim.StepLR(optimizer, 2, gamma=0.5)
        step = way(training(model, optimizer, schedule))
        losses = [step(x, y) for x, y in batches(8)]
        if way is netcl.compile and device.backend == "cl":
            assert len(step.graphs) == 1 and step.refused == []
        state = [*model.state_dict().values(), *(p.grad for p in model.parameters())]
        return [*losses, *state, optimizer.param_groups[0]["lr"], optimizer.state_dict()["state"][0]["step"], schedule.last_epoch,
                ag.rand(4)]  # fmt: skip

    both_ways(run)


def test_a_replay_runs_no_op(cl_device, monkeypatch):
    model = small_net()
    step = netcl.compile(training(model, optim.SGD(model.parameters(), lr=0.1, momentum=0.9)))
    pairs = batches(RECORDED + 2)
    for x, y in pairs[:RECORDED]:
        step(x, y)
    no_launch_from_python(monkeypatch)
    first, second = (step(x, y) for x, y in pairs[RECORDED:])
    assert first.item() != second.item()  # results are fresh: the second did not overwrite the first


@pytest.mark.slow
@pytest.mark.parametrize("name", ["resnet", "gpt"])
def test_a_hundred_steps_of_a_model_are_the_same(cl_device, name):
    rng = np.random.default_rng(0)

    def run(way):
        if name == "resnet":
            model = nn.ResNet18(width=4)
            data = [(rng.standard_normal((2, 3, 8, 8), np.float32), rng.integers(0, 10, 2)) for _ in range(4)]
        else:
            model = nn.GPT(vocab_size=17, block_size=8, n_layer=1, n_head=2, n_embd=16, dropout=0.1)
            data = [(rng.integers(0, 17, (2, 8)), rng.integers(0, 17, (2, 8))) for _ in range(4)]
        optimizer = optim.AdamW(model.parameters(), lr=1e-3)

        def step(x, y):
            optimizer.zero_grad()
            logits = model(x)
            loss = ag.cross_entropy(ag.reshape(logits, (-1, logits.shape[-1])), ag.reshape(y, (-1,)))
            loss.backward()
            optimizer.step(max_norm=1.0)
            return loss

        rng.bit_generator.state = state
        made = way(step)
        losses = [made(*(Tensor.from_host(part) for part in data[i % 4])) for i in range(100)]
        if way is netcl.compile:
            assert len(made.graphs) == 1, made.refused
        return losses

    state = rng.bit_generator.state
    both_ways(run)


def test_small_ops_may_be_fused(cl_device):
    def chain(x):
        return ag.softmax(ag.relu(x * 2 + 1) * 0.5 - x)

    plain, fused = netcl.compile(chain), netcl.compile(chain, fuse=True)
    for x, _ in batches(RECORDED + 1):
        np.testing.assert_allclose(fused(x).to_host(), plain(x).to_host(), rtol=1e-6)
    assert len(fused.graphs[0].nodes) < len(plain.graphs[0].nodes)


def test_other_shapes_are_recorded_apart(cl_device):
    def run(way):
        model = small_net()
        step = way(training(model, optim.Adam(model.parameters(), lr=0.01)))
        losses = [step(x, y) for rows in (5, 4, 5) for x, y in batches(5, rows)]
        if way is netcl.compile:
            assert len(step.graphs) == 2
        return [*losses, *model.parameters()]

    both_ways(run)


def test_a_rate_set_by_hand_and_loaded_states_are_followed(cl_device, tmp_path):
    def run(way):
        model = small_net()
        optimizer = optim.Adam(model.parameters(), lr=0.01)
        step = way(training(model, optimizer))
        pairs = batches(12)
        losses = [step(x, y) for x, y in pairs[:5]]
        saved = optimizer.state_dict()  # holds the optimizer's own tensors, which are replaced by copies when it is loaded
        weights = {name: t.to_host() for name, t in model.state_dict().items()}
        optimizer.param_groups[0]["lr"] = 0.5
        losses += [step(x, y) for x, y in pairs[5:7]]
        model.load_state_dict(weights)
        optimizer.load_state_dict(saved)
        return [*losses, *(step(x, y) for x, y in pairs[7:]), *model.parameters()]

    both_ways(run)


def test_gradients_are_where_they_would_be(cl_device):
    """A step that only makes gradients, cleared outside, sometimes not cleared (then they add up), sometimes frozen."""

    def run(way):
        model = nn.Linear(6, 3)
        step = way(lambda x, y: ag.cross_entropy(model(x), y).backward())
        seen = []
        for i, (x, y) in enumerate(batches(10)):
            if i % 5 < 4:
                model.zero_grad()
            if i == 8:
                model.bias.requires_grad = False
            step(x, y)
            seen += [p.grad.to_host() for p in model.parameters() if p.grad is not None]
        return seen

    both_ways(run)


@pytest.mark.parametrize("forget", ["by the optimizer", "by hand"])
def test_gradients_are_forgotten_by_a_step_of_its_own(cl_device, forget):
    """A compiled function that only updates, beside one that only adds up: nothing but Python forgets the gradients there."""

    def run(way):
        weight, told = Tensor.ones((3,), requires_grad=True), []
        optimizer = optim.Adam([weight], lr=0.1)

        @way
        def add_up(x):
            loss = (weight * weight * x).sum()
            loss.backward()
            return loss

        @way
        def update():
            optimizer.step(max_norm=1.0)
            if forget == "by hand":
                for p in optimizer.param_groups[0]["params"]:
                    p.grad = None
            else:
                optimizer.zero_grad()

        for i in range(2 * RECORDED + 6):
            told.append(add_up(Tensor.full((3,), i + 1.0)))
            if i % 2:
                update()
                told += [weight.detach().clone(), weight.grad is None]
        return told

    both_ways(run)


def test_gradients_of_several_batches_add_up(cl_device):
    def run(way):
        model = nn.Linear(6, 3)
        optimizer = optim.SGD(model.parameters(), lr=0.1)
        gradients = way(lambda x, y: ag.cross_entropy(model(x), y).backward())
        for i, (x, y) in enumerate(batches(24)):
            gradients(x, y)
            if i % 3 == 2:
                optimizer.step()
                optimizer.zero_grad()
        if way is netcl.compile:
            assert len(gradients.graphs) == 2, gradients.refused
        return model.parameters()

    both_ways(run)


def test_training_and_evaluation_and_settings_are_told_apart(cl_device):
    def run(way):
        model = small_net()

        def forward(x):
            with ag.no_grad():
                return model(x)

        predict = way(forward)
        told = []
        for i, (x, _) in enumerate(batches(14)):
            model.train(4 <= i < 10)
            if i == 12:
                model[3].p = 0.9
            told.append(predict(x))
        return told

    both_ways(run)


def test_a_model_is_compiled_for_evaluation(device, monkeypatch):
    model = small_net().eval()
    (x, _), (other, _) = batches(2)
    fast = netcl.compile(model)
    with ag.no_grad():
        want = [model(t).to_host() for t in (x, other)]
    for _ in range(RECORDED):
        fast(x), fast(other)
    assert fast(x).requires_grad is False and fast.training is False
    np.testing.assert_allclose(fast(x).to_host(), want[0], rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(fast(other).to_host(), want[1], rtol=1e-6, atol=1e-6)


def test_modes_of_a_compiled_model_are_set_on_the_compiled_model(device):
    model = small_net()
    fast = netcl.compile(model)
    assert fast.eval() is fast and not model.training
    assert fast.train() is fast and model.training


def conv_net() -> nn.Sequential:
    """Convolutions and a linear layer with batch norms whose statistics are not the initial ones."""
    convolutions = (nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.BatchNorm2d(8))
    model = nn.Sequential(*convolutions, nn.ReLU(), nn.Flatten(), nn.Linear(8 * 36, 16), nn.BatchNorm1d(16, affine=False))
    for _ in range(3):
        model(netcl.randn(4, 3, 8, 8) * 2 + 1)
    return model.eval()


def relative_difference(got: Tensor, want: Tensor) -> float:
    return float(np.abs(got.to_host() - want.to_host()).max() / np.abs(want.to_host()).max())


def test_batch_norms_and_activations_of_a_compiled_model_take_no_launch(cl_device):
    model, x = conv_net(), netcl.randn(4, 3, 8, 8)
    fast = netcl.compile(model)
    with ag.no_grad():
        want = model(x)
    assert all(relative_difference(fast(x), want) < 5e-6 for _ in range(RECORDED + 2))
    (graph,) = fast.graphs
    assert {node.op for node in graph.nodes} == {"conv2d_with", "affine_with"}


CHANGES = {
    "a weight is written": lambda model: model[0].weight.mul_(2.0),
    "a bias is written": lambda model: model[3].bias.add_(1.0),
    "a statistic is written": lambda model: model[1].running_var.mul_(1.5),
    "a view of a weight is written": lambda model: model[3].weight[0].fill_(0.5),
    "a state is loaded": lambda model: model.load_state_dict({name: t * 1.25 for name, t in model.state_dict().items()}),
    "a weight is another tensor": lambda model: setattr(model[3], "weight", nn.Parameter(netcl.randn(8, 8, 3, 3))),
    "the norm learns": lambda model: model.train()(netcl.randn(4, 3, 8, 8)) is model.eval(),
}


@pytest.mark.parametrize("change", list(CHANGES))
def test_kept_results_follow_the_weights(cl_device, change):
    model, x = conv_net(), netcl.randn(4, 3, 8, 8)
    fast, reader = netcl.compile(model), netcl.compile(ag.no_grad()(lambda x: model(x)))
    for _ in range(RECORDED + 1):
        before = fast(x)
        reader(x)
    with ag.no_grad():
        CHANGES[change](model)
        want = model(x)
    assert relative_difference(want, before) > 1e-3
    for _ in range(RECORDED + 1):
        assert relative_difference(fast(x), want) < 5e-6 and relative_difference(reader(x), want) < 5e-6


def test_a_training_step_packs_no_weights(cl_device):
    """Only what a recording keeps is worth a launch of its own, and an optimizer changes these weights in every step."""
    model, x = nn.Sequential(nn.Linear(64, 96), nn.ReLU(), nn.Linear(96, 64)), netcl.randn(300, 64)
    optimizer = optim.SGD(model.parameters(), lr=0.1)

    @netcl.compile(fuse=True)
    def step(x):
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    for _ in range(RECORDED):
        step(x)
    with netcl.profiling.profile(cl_device, roofline=False) as seen:
        step(x).item()
    assert step.graphs and seen.events and not [launch.name for launch in seen.events if launch.name == "pack_b"]


def test_gradients_of_weights_do_not_keep_their_operands(cl_device):
    """A product that waits for the end of backward keeps the gradient of its layer's result: one tensor for each layer."""
    model, x = nn.Sequential(*(layer for _ in range(8) for layer in (nn.Linear(64, 64), nn.Tanh()))), netcl.randn(512, 64)
    optimizer = optim.SGD(model.parameters(), lr=0.1)

    @netcl.compile(fuse=True)
    def step(x):
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        return loss

    for _ in range(RECORDED):
        step(x)
    (graph,) = step.graphs
    assert graph.planned_bytes < 12 * x.nbytes


def test_kept_results_are_right_after_a_failure_to_compute_them(cl_device, monkeypatch):
    model, x = conv_net(), netcl.randn(4, 3, 8, 8)
    fast = netcl.compile(model)
    for _ in range(RECORDED + 1):
        fast(x)
    (graph,) = fast.graphs
    with ag.no_grad():
        model[0].weight.mul_(2.0)
        model[3].weight.mul_(3.0)
        want = model(x)

    def fails(node, buffers):
        raise OutOfMemoryError("no room")

    with monkeypatch.context() as patch, pytest.raises(OutOfMemoryError):
        patch.setattr(graph._folded, "_call", fails)
        fast(x)
    assert relative_difference(fast(x), want) < 5e-6


def test_kept_results_follow_a_training_step_of_another_recording(cl_device):
    model = conv_net()
    x, y = netcl.randn(4, 3, 8, 8), netcl.tensor(np.arange(4))
    optimizer = optim.SGD(model.parameters(), lr=0.1)

    @netcl.compile
    def step(x, y):
        optimizer.zero_grad()
        loss = ag.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        return loss

    fast = netcl.compile(model)
    for _ in range(2 * RECORDED):
        step(x, y)
        got = fast(x)
        with ag.no_grad():
            assert relative_difference(got, model(x)) < 5e-6
    assert step.graphs and fast.graphs


@pytest.fixture
def warnings_of(caplog):
    caplog.set_level(logging.WARNING, logger="netcl")
    return lambda: [record.getMessage() for record in caplog.records if "is not replayed" in record.getMessage()]


def test_values_that_come_to_the_host_are_told_once(cl_device, warnings_of):
    @netcl.compile
    def step(x):
        return x * 2 if ag.sum(x).item() > 0 else x - 1

    signs = [1, 1, 1, -1, -1, 1]
    told = [step(Tensor.full((2,), float(s))).tolist() for s in signs]
    assert told == [[2.0, 2.0] if s > 0 else [-2.0, -2.0] for s in signs]
    assert len(warnings_of()) == 1 and "it reads values on the host (to_host at" in warnings_of()[0] and __file__ in warnings_of()[0]
    with pytest.raises(CaptureError, match="it reads values on the host"):
        strict = capture_graph(lambda x: x * ag.sum(x).item())
        for _ in range(RECORDED):
            strict(Tensor.ones((2,)))


def test_a_number_that_changes_by_itself_is_found(cl_device, warnings_of):
    steps = count(1)

    @netcl.compile
    def step(x):
        return x + float(next(steps))

    assert [step(Tensor.zeros((1,))).tolist() for _ in range(12)] == [[float(i)] for i in range(1, 13)]
    (told,) = warnings_of()
    assert "two runs differ: argument" in told and "op_add" in told


def test_a_setting_that_changes_by_itself_is_found(cl_device, warnings_of):
    class Counting(nn.Module):
        def __init__(self):
            super().__init__()
            self.calls = 0

        def forward(self, x):
            self.calls += 1
            return x + self.calls

    count = netcl.compile(Counting().eval())
    assert [count(Tensor.zeros((1,))).item() for _ in range(20)] == [float(i) for i in range(1, 21)]
    assert count.graphs == [] and "a setting of a module changes" in warnings_of()[0]


def test_a_mode_that_the_function_leaves_changed_is_found(cl_device, warnings_of):
    @netcl.compile
    def step(x):
        ag.set_grad_enabled(False)
        return x * 2

    for _ in range(RECORDED + 2):
        with ag.enable_grad():
            step(Tensor.ones((1,)))
            assert not ag.is_grad_enabled()
    assert "grad mode or anomaly mode changes" in warnings_of()[0]


def test_a_number_around_the_function_is_part_of_it(cl_device):
    factor = 2.0
    scaled = netcl.compile(lambda x: x * factor)
    told = []
    for new in (2.0, 3.0, 2.0):
        factor = new
        told += [scaled(Tensor.ones((1,))).item() for _ in range(RECORDED + 1)]
    assert told == [2.0] * 4 + [3.0] * 4 + [2.0] * 4 and len(scaled.graphs) == 2


def test_attributes_that_the_function_reads_are_part_of_it(cl_device, warnings_of):
    class Step:
        def __init__(self):
            self.weight, self.calls, self.unread = 2.0, 0, 0

        def scaled(self, x):
            return x * self.weight

        def run(self, x):
            return self.scaled(x) + 1

        def count(self, x):
            self.calls += 1
            return x + self.calls

    step, told = Step(), []
    run = netcl.compile(step.run)
    outside = netcl.compile(lambda x: x * step.weight + 1)
    for weight in (2.0, 3.0):
        step.weight = weight
        for _ in range(RECORDED + 1):
            step.unread += 1
            told += [run(Tensor.ones((1,))).item(), outside(Tensor.ones((1,))).item()]
    assert told == [3.0] * 8 + [4.0] * 8 and len(run.graphs) == len(outside.graphs) == 2
    count = netcl.compile(step.count)
    assert [count(Tensor.zeros((1,))).item() for _ in range(20)] == [float(i) for i in range(1, 21)]
    assert "it changes Step.calls, which it reads" in warnings_of()[0] and len(warnings_of()) == 1


SETTING = {"scale": 1.0}


def _by_the_setting(x):
    return x * SETTING["scale"]


class Slotted:
    __slots__ = ("scale",)
    shared = 1.0

    def __init__(self):
        self.scale = 1.0


class Computing:
    def __init__(self):
        self.inner = 1.0

    @property
    def scale(self):
        return self.inner

    def __call__(self, x):
        return x * self.scale


def test_what_stands_around_is_never_frozen(cl_device):
    """Settings in containers, of functions that are called, deep in objects; tensors and models under a name that gets another one."""
    old, new = Tensor.ones((2,)), Tensor.full((2,), 5.0)
    holder = SimpleNamespace(inner=SimpleNamespace(scale=1.0), tensor=old, layer=lambda x: x * 1.0, table=[1.0, {"scale": 1.0}])
    values = np.ones(2, np.float32)
    cases = {
        "dict, of a function that is called": (lambda x: _by_the_setting(x), lambda: SETTING.update(scale=5.0)),
        "in each other": (lambda x: x * holder.table[1]["scale"], lambda: holder.table[1].update(scale=5.0)),
        "objects in objects": (lambda x: x * holder.inner.scale, lambda: setattr(holder, "inner", SimpleNamespace(scale=5.0))),
        "another tensor": (lambda x: x * holder.tensor, lambda: setattr(holder, "tensor", new)),
        "another function": (lambda x: holder.layer(x), lambda: setattr(holder, "layer", lambda x: x * 5.0)),
        "an array": (lambda x: x * Tensor.from_host(x.queue, values), lambda: values.fill(5.0)),
    }
    slotted, counted, kept, chosen = Slotted(), Computing(), {"scale": 1.0}, {1}
    cases |= {
        "a slot": (lambda x: x * slotted.scale, lambda: setattr(slotted, "scale", 5.0)),
        "a class": (lambda x: x * Slotted.shared, lambda: setattr(Slotted, "shared", 5.0)),
        "a property, of an object that is called": (counted, lambda: setattr(counted, "inner", 5.0)),
        "an argument fixed before": (partial(lambda table, x: x * table["scale"], kept), lambda: kept.update(scale=5.0)),
        "a default": (lambda x, table=holder.table: x * table[0], lambda: holder.table.__setitem__(0, 5.0)),
        "a set": (lambda x: x * (1.0 if 1 in chosen else 5.0), chosen.clear),
    }
    x = Tensor.ones((2,))
    for name, (function, change) in cases.items():
        compiled = netcl.compile(function)
        assert [compiled(x).tolist()[0] for _ in range(RECORDED + 1)] == [1.0] * (RECORDED + 1) and compiled.graphs, name
        change()
        assert compiled(x).tolist() == [5.0, 5.0], name
    SETTING["scale"], Slotted.shared = 1.0, 1.0
    by_object = netcl.compile(lambda x, table: x * table.scale)
    told = [by_object(x, holder.inner).tolist()[0] for _ in range(RECORDED + 1)]
    holder.inner.scale = 7.0
    assert told == [5.0] * (RECORDED + 1) and by_object.graphs and by_object(x, holder.inner).tolist() == [7.0, 7.0]


@pytest.mark.parametrize("kind", ["module", "gradient", "result", "rate"])
def test_python_that_a_replay_would_leave_out_is_told(cl_device, kind, warnings_of):
    layer, calls = nn.Linear(6, 3), []
    schedule = optim.StepLR(optim.SGD(layer.parameters(), 1.0), 5)
    if kind == "module":
        layer.register_forward_hook(lambda module, inputs, output: calls.append(1))
    elif kind == "gradient":
        layer.weight.register_hook(lambda gradient: calls.append(1))

    @netcl.compile
    def step(x, y):
        layer.zero_grad()
        loss = ag.cross_entropy(layer(x), y)
        loss.backward()
        if kind == "rate":
            return loss * schedule.get_last_lr()[0]
        return (loss, 0.5) if kind == "result" else loss

    for x, y in batches(6):
        step(x, y)
    assert step.graphs == [] and len(warnings_of()) == 1
    named = {"result": "the result holds a float", "rate": "get_last_lr() of a scheduler"}
    assert named[kind] in warnings_of()[0] if kind in named else len(calls) == 6


def test_a_tensor_that_is_reached_on_two_ways(cl_device):
    """The argument of the first calls is the tensor the function also reaches by itself."""
    weights = Tensor.from_host([1.0, 2.0])
    mixed = netcl.compile(lambda x: x * 10 + weights)
    for _ in range(RECORDED + 1):
        assert mixed(weights).tolist() == [11.0, 22.0]
    for value in (3.0, 4.0, 5.0):
        assert mixed(Tensor.full((2,), value)).tolist() == [10 * value + 1, 10 * value + 2]


def test_one_tensor_may_be_several_arguments(cl_device):
    product = netcl.compile(lambda a, b: a * 10 + b)
    one, other = Tensor.ones((2,)), Tensor.full((2,), 2.0)
    for _ in range(RECORDED + 1):
        assert product(one, one).tolist() == [11.0, 11.0]
        assert product(one, other).tolist() == [12.0, 12.0]
        assert product(other, other).tolist() == [22.0, 22.0]
    assert len(product.graphs) == 2 and product.refused == []


def test_memory_goes_back_with_the_function(cl_device):
    def held() -> float:
        gc.collect()
        return memory.memory_stats()["bytes_in_use"]

    x = Tensor.ones((1 << 14,))
    before = held()
    chain = netcl.compile(lambda t: ag.exp(ag.sum(t * 2) + t))
    for _ in range(RECORDED + 1):
        chain(x)
    assert held() > before
    del chain
    assert held() == before


def test_tensors_around_the_function_may_be_replaced(cl_device):
    model = nn.Identity()
    model.shift, added = Tensor.ones((2,)), Tensor.ones((2,))
    kept = [model.shift, added]  # still alive when they are replaced
    mixed = netcl.compile(lambda x: model(x) * model.shift + added)
    told = []
    for i in range(3 * (RECORDED + 1)):
        if i == 4:
            added = Tensor.full((2,), 5.0)
        elif i == 8:
            model.shift = Tensor.full((2,), 3.0)
        told.append(mixed(Tensor.full((2,), float(i))).tolist()[0])
    assert told == [*(i + 1.0 for i in range(4)), *(i + 5.0 for i in range(4, 8)), *(3.0 * i + 5.0 for i in range(8, 12))] and kept


def test_what_the_device_would_not_like_is_told_before_and_after(cl_device):
    model = nn.Sequential(nn.Embedding(5, 4), nn.Linear(4, 3))
    step = netcl.compile(training(model, optim.SGD(model.parameters(), lr=0.1)))
    tokens, labels = np.array([0, 4, 2]), np.array([0, 1, 2])
    for _ in range(RECORDED + 1):
        step(tokens, labels).item()
    assert len(step.graphs) == 1, step.refused
    before = model[1].weight.to_host()
    with pytest.raises(ShapeError, match="labels must be classes, got 7"):
        step(tokens, np.array([0, 7, 2]))
    np.testing.assert_array_equal(model[1].weight.to_host(), before)
    with pytest.raises(IndexError, match=r"\[embedding\]|\[index_select\]"):
        step(np.array([0, 5, 2]), labels).item()


def test_labels_written_between_replays_are_checked(cl_device):
    model = nn.Linear(4, 3)
    step = netcl.compile(training(model, optim.SGD(model.parameters(), lr=0.1)))
    x, labels, shared = Tensor.ones((3, 4)), Tensor.from_host(np.array([0, 1, 2])), np.array([0, 1, 2])
    for _ in range(RECORDED + 3):
        step(x, labels).item()
    assert len(step.graphs) == 1, step.refused
    labels[1] = 7
    with pytest.raises(ShapeError, match="labels must be classes, got 7"):
        step(x, labels)
    labels[1] = 1
    step(x, labels).item()
    labels.view(3)[2:].fill_(8)
    with pytest.raises(ShapeError, match="labels must be classes, got 8"):
        step(x, labels)
    over = Tensor.from_host(shared, share=True)
    for _ in range(3 + RECORDED):
        step(x, over).item()
    shared[0] = 9
    if over.tolist()[0] == 9:  # the device uses the array itself
        with pytest.raises(ShapeError, match="labels must be classes, got 9"):
            step(x, over)


def test_a_seed_between_replays_is_followed(cl_device):
    draw = netcl.compile(lambda x: ag.dropout(x, 0.5))
    x = Tensor.ones((64,))
    for _ in range(RECORDED):
        draw(x)
    drawn = []
    for _ in range(2):
        netcl.manual_seed(5)
        drawn.append((draw(x).tolist(), draw(x).tolist()))
    assert drawn[0] == drawn[1] and drawn[0][0] != drawn[0][1]
    assert random.get_state().as_dict()["counter"] == 2 * 64 // 4


def test_a_block_is_recorded_and_checks_what_it_is_given(cl_device):
    x = Tensor.from_host([1.0, 2.0])
    kept = Tensor.zeros((2,))
    ag.add(x * x, kept, out=kept)
    with capture_graph(inputs=[x]) as graph:
        ag.add(x * x, kept, out=kept)
        graph.returns({"twice": x + x})
    assert graph.replay([Tensor.from_host([3.0, 0.0])])["twice"].tolist() == [6.0, 0.0]
    assert kept.tolist() == [11.0, 8.0]
    with pytest.raises(ShapeError, match=r"input 0 must have the recorded shape and dtype; recorded=\(2,\) float32, given=\(3,\) float32"):
        graph.replay([Tensor.zeros((3,))])
    with pytest.raises(DtypeError, match="input 0 must have the recorded shape and dtype"):
        graph.replay([Tensor.zeros((2,), "int32")])
    with pytest.raises(CaptureError, match="reads values on the host"), capture_graph(inputs=[x]):
        x.to_host()


def test_memory_is_planned_by_lifetimes():
    lives = [(100, 0, 2), (80, 1, 3), (100, 3, 4), (10, 4, 9), (90, 5, 6), (20, 6, 9)]
    values = [Value(MADE, None, nbytes, None, i, first, last) for i, (nbytes, first, last) in enumerate(lives)]
    blocks = share(values)
    assert sum(len(block.members) for block in blocks) == len(values)
    for block in blocks:
        assert block.nbytes == max(v.nbytes for v, _ in block.members)
        ordered = sorted((v for v, _ in block.members), key=lambda v: v.first)
        assert all(a.last < b.first for a, b in pairwise(ordered))
    assert sum(block.nbytes for block in blocks) == 190  # 180 live at once at the most; 400 are made

    left_behind = Value(MADE, None, 100, None, 6, 5, 5)  # written by node 5 and read after the step: free before
    (smaller,) = share(values[:3], there=[MemoryBlock(100).add(left_behind, 0, 100, 10)])
    assert smaller.nbytes == 80


def test_values_lie_side_by_side_where_memory_can_be_cut():
    rng = np.random.default_rng(0)
    lives = [(int(n), int(first), int(first + length)) for n, first, length in rng.integers(1, 50, (60, 3))]
    values = [Value(MADE, None, nbytes, None, i, first, last) for i, (nbytes, first, last) in enumerate(lives)]
    old = MemoryBlock(70, cuts=True)
    (new,) = share(values, there=[old], cuts=True)
    assert len(old.members) > 1 and len(old.members) + len(new.members) == len(values) and old.used <= 70
    for block in (old, new):
        for (a, begin), (b, other) in combinations(block.members, 2):
            assert a.last < b.first or b.last < a.first or begin + a.nbytes <= other or other + b.nbytes <= begin
    most = max(sum(v.nbytes for v in values if v.first <= node <= v.last) for node in range(100))
    assert old.used + new.nbytes <= 1.1 * most


def test_what_nobody_reads_is_not_replayed(cl_device):
    def wasteful(x):
        unused = ag.exp(x) * 3
        used = x + 1
        ag.sum(unused)
        return used

    compiled = netcl.compile(wasteful)
    for value in range(RECORDED + 2):
        assert compiled(Tensor.full((2,), float(value))).tolist() == [value + 1.0] * 2
    assert [node.name for node in compiled.graphs[0].nodes] == ["op_add"]


def test_replaying_takes_no_more_memory_than_running(cl_device):
    model = small_net()
    step = training(model, optim.Adam(model.parameters(), lr=0.01))
    x, y = batches(1, rows=16384)[0]
    step(x, y)  # which makes the optimizer's state

    def taken(run, calls: int) -> float:
        """What the pools hold more after some calls, whatever tests before this one left free."""
        gc.collect()
        memory.empty_cache()
        before = memory.memory_stats()["bytes_allocated"]
        for _ in range(calls):
            run(x, y)
        gc.collect()
        return memory.memory_stats()["bytes_allocated"] - before

    compiled = netcl.compile(step)
    running = taken(step, 3)
    assert taken(compiled, RECORDED + 3) <= running and len(compiled.graphs) == 1


def test_compiled_functions_may_be_parts_of_each_other(cl_device):
    inner = netcl.compile(lambda x: x * 2)
    outer = netcl.compile(lambda x: inner(x) + 1)
    for value in range(6):
        inner(Tensor.full((1,), float(value)))
        assert outer(Tensor.full((1,), float(value))).item() == 2 * value + 1
    assert len(outer.graphs) == len(inner.graphs) == 1


@pytest.mark.parametrize("layers", [3, 30])
def test_models_of_many_equal_layers_are_replayed(layers, cl_device):
    """Whether a product waits for the op after it is learned over calls; a recording does not depend on how many there were."""
    rng = np.random.default_rng(0)
    weights = [Tensor.from_host(rng.standard_normal((4, 500), np.float32)) for _ in range(layers)]
    x = Tensor.from_host(rng.standard_normal((300, 4), np.float32))

    @netcl.compile
    def step(x):
        return [ag.cumsum(made, 1) for made in [ag.matmul(x, w) for w in weights]]

    exact = [np.cumsum(x.to_host() @ w.to_host(), 1) for w in weights]
    for _ in range(RECORDED + 2):
        for made, wanted in zip(step(x), exact, strict=True):
            np.testing.assert_allclose(made.to_host(), wanted, rtol=1e-4, atol=1e-3)
    assert step.graphs, step.refused


GLOBAL = Tensor.ones((1,), device="cpu")


def test_a_walk_takes_closures_and_leaves_globals():
    """The globals of one function lead to most of a program."""
    inside, given = Tensor.ones((1,), device="cpu"), Tensor.zeros((1,), device="cpu")

    def function():
        return inside, GLOBAL

    found = tensors_of([partial(function, given)])
    assert [id(t) for t in found] == [id(given), id(inside)]
