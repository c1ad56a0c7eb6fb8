"""What changes between two calls of a compiled function, in models, tensors, optimizers and around it, is followed by the next."""

from __future__ import annotations

import copy
import gc
import threading
from collections import OrderedDict, deque
from contextlib import nullcontext
from types import SimpleNamespace

import numpy as np
import pytest

import netcl
import netcl.autograd as ag
from netcl import distributions, nn, ops, optim, vision
from netcl.amp import GradScaler, autocast
from netcl.core import tensor, writes
from netcl.core.kernel_selector import KernelConfig, KernelVariant, get_kernel_selector
from netcl.core.tensor import Tensor
from netcl.engine import plan
from netcl.replay.compiled import CompiledFunction
from netcl.runtime.capture import capture_graph
from netcl.trainer import Trainer, metrics
from tests.conftest import eager_fusion
from tests.runtime.test_capture import RECORDED, both_ways


def test_hooks_and_learning_of_tensors_without_a_module_are_followed(cl_device):
    """A hook that comes after the recording; tensors that were frozen when it was made, or are by now."""

    def run(way):
        first, second = (Tensor.full((3,), start, requires_grad=start > 1) for start in (1.0, 2.0))

        def step(x):
            first.grad = second.grad = None
            (first * second * x).sum().backward()

        step, told = way(step), []
        for i in range(5 * (RECORDED + 1)):
            first.requires_grad, second.requires_grad = 4 <= i < 16, i < 8 or i >= 16
            if i == 12:
                hook = first.register_hook(lambda g: g * 10.0)
            step(Tensor.full((3,), float(i)))
            told += [np.zeros(3) if p.grad is None else p.grad.to_host() for p in (first, second)]
        hook.remove()
        return told

    both_ways(run)


@pytest.mark.parametrize("scaled", [False, True], ids=["counted by the host", "counted by the device"])
def test_a_parameter_that_was_left_out_of_a_step_has_an_age_of_its_own(cl_device, scaled):
    """Frozen for a step, its bias correction is another one from then on: what was recorded before is not replayed."""

    def run(way):
        first, second = (Tensor.full((3,), start, requires_grad=True) for start in (1.0, 2.0))
        optimizer, scaler = optim.Adam([first, second], lr=0.1), GradScaler(init_scale=2.0, enabled=scaled)

        def step(x):
            optimizer.zero_grad()
            scaler.scale_loss(((first * second - x) ** 2.0).sum()).backward()
            scaler.step(optimizer)
            scaler.update()

        step = way(step)
        for i in range(10):
            second.requires_grad = i != 5
            step(Tensor.full((3,), float(i)))
        return [first, second]

    both_ways(run)


class Adjustable(nn.Module):
    """A layer of the user's, with settings of every kind."""

    def __init__(self):
        super().__init__()
        self.scale, self.curve, self.table, self._shift = None, ag.relu, {"factor": 1.0}, 1.0

    def forward(self, x):
        y = self.curve(x) * self.table["factor"] + self._shift
        return y if self.scale is None else y * self.scale


def test_whatever_changes_in_a_model_is_noticed(cl_device):
    """Layers and hooks that are added, settings that are no numbers, a bias where there was none, containers that are not called."""
    image = Tensor.from_host(np.random.default_rng(0).standard_normal((1, 2, 6, 6), np.float32))
    doubled = lambda module, args, out: out * 2  # noqa: E731
    cases = {
        "a layer more": (nn.Sequential(nn.ReLU()), lambda m: m.append(nn.Tanh())),
        "a hook": (nn.Sequential(nn.ReLU()), lambda m: m[0].register_forward_hook(doubled)),
        "a tuple": (nn.Conv2d(2, 2, 3, stride=2), lambda m: setattr(m, "stride", (1, 1))),
        "a bias": (nn.Conv2d(2, 2, 3, bias=False), lambda m: setattr(m, "bias", Tensor.ones((2,)))),
        "another forward": (nn.Sequential(nn.ReLU()), lambda m: setattr(m[0], "forward", lambda x: x * 3)),
        "none before": (nn.Sequential(Adjustable()), lambda m: setattr(m[0], "scale", 3.0)),
        "a function": (nn.Sequential(Adjustable()), lambda m: setattr(m[0], "curve", ag.tanh)),
        "a dict": (nn.Sequential(Adjustable()), lambda m: m[0].table.update(factor=3.0)),
        "private": (nn.Sequential(Adjustable()), lambda m: setattr(m[0], "_shift", 3.0)),
    }
    for name, (model, change) in cases.items():
        predict = netcl.compile(model.eval())
        for _ in range(RECORDED + 1):
            before = predict(image).to_host()
        change(model)
        want = model(image).to_host()
        assert predict.graphs and not np.array_equal(before, want), name
        for _ in range(RECORDED + 1):
            np.testing.assert_array_equal(predict(image).to_host(), want, err_msg=name)

    layers, shift = nn.ModuleList([nn.ReLU()]), nn.Identity()
    shift.by = old = Tensor.ones((6,))

    @netcl.compile
    def in_turn(x):
        for layer in layers:
            x = layer(x)
        return x + shift.by

    told = [in_turn(image).to_host() for _ in range(RECORDED + 1)]
    layers.append(nn.Tanh())
    shift.by = Tensor.full((6,), 3.0)
    assert in_turn.graphs and old is not shift.by
    np.testing.assert_allclose(in_turn(image).to_host(), np.tanh(told[-1] - 1.0) + 3.0, rtol=1e-5)


def test_a_layer_replaced_in_a_model_whose_methods_are_called_is_followed(cl_device):
    """A function that calls methods of netcl's models, but not the models."""
    model = nn.GPT(16, 8, 1, 2, 16, tie_weights=False).eval()
    step = capture_graph(lambda ids: model.head(model.states(ids)))
    ids = Tensor.from_host(cl_device.queue, np.array([[1, 2, 3]], np.int64))
    with ag.no_grad():
        for _ in range(3):
            for _ in range(RECORDED + 1):
                step(ids)
            model.lm_head = nn.Linear(16, 16, bias=False)
            np.testing.assert_allclose(step(ids).to_host(), model(ids).to_host(), atol=1e-5)


def test_zeros_of_either_sign_around_a_function_are_told_apart(cl_device):
    below = 0.0
    divided = netcl.compile(lambda x: x / below)
    assert [divided(Tensor.ones((1,))).item() for _ in range(RECORDED + 1)] == [np.inf] * (RECORDED + 1) and divided.graphs
    below = -0.0
    assert divided(Tensor.ones((1,))).item() == -np.inf


def test_what_a_thread_left_uncomputed_is_computed_before_a_replay_changes_its_input(cl_device):
    total, one = Tensor.ones((1 << 12,)), Tensor.ones((1 << 12,))
    left = []
    with eager_fusion(1):
        add = netcl.compile(lambda x: ops.add(total, x, out=total))
        for _ in range(RECORDED + 1):
            add(one)
        other = threading.Thread(target=lambda: left.append(total * 2.0))
        other.start()
        other.join()
        assert add.graphs and left[0].memory is None
        add(one)
    assert left[0].tolist()[0] == 2.0 * (RECORDED + 2) and total.tolist()[0] == RECORDED + 3.0


def test_a_value_that_is_filled_and_left_behind_is_filled_by_every_replay(cl_device):
    """It may be changed in between, and its memory serves other values of the step until it is written."""
    left, weight = SimpleNamespace(), Tensor.ones((), requires_grad=True)

    @netcl.compile
    def step(x):
        weight.grad = None
        (weight + x.mean()).backward()  # whose gradient is a one
        left.twos = Tensor.full((3,), 2.0)
        return x * left.twos, weight.grad

    told = []
    for _ in range(RECORDED + 2):
        product, gradient = step(Tensor.ones((3,)))
        told.append((product.tolist(), gradient.item(), weight.grad.item()))
        left.twos.fill_(7.0)
        weight.grad.fill_(7.0)
    assert step.graphs and told == [([2.0, 2.0, 2.0], 1.0, 1.0)] * (RECORDED + 2)


def test_a_kernel_that_is_registered_reaches_a_replayed_step(cl_device, monkeypatch):
    product = netcl.compile(lambda a: ops.matmul(a, a))
    for _ in range(RECORDED + 1):
        product(Tensor.ones((40, 40)))
    assert "gemm_naive" not in product.graphs[0].table()
    naive = KernelConfig(KernelVariant.MATMUL_NAIVE)
    monkeypatch.setattr(get_kernel_selector(), "measured", lambda op, key: naive)
    for _ in range(RECORDED + 1):
        assert product(Tensor.ones((40, 40))).tolist()[0][0] == 40.0
    assert "gemm_naive" in product.graphs[-1].table()


def test_a_gradient_that_a_frozen_parameter_keeps_is_used_until_it_is_gone(cl_device):
    def run(way):
        first, second = (Tensor.full((3,), start, requires_grad=start < 2) for start in (1.0, 2.0))
        second.grad = kept = Tensor.full((3,), 0.25)  # still there when it is no gradient any more
        optimizer = optim.SGD([first, second], lr=0.1)

        def step(x):
            first.grad = None
            (first * second * x).sum().backward()
            optimizer.step()

        step = way(step)
        for i in range(2 * (RECORDED + 1)):
            if i == RECORDED + 1:
                second.grad = None
            step(Tensor.full((3,), 0.5))
        return [first, second, kept]

    both_ways(run)


def test_arguments_are_not_what_has_their_names_outside(cl_device):
    """As in a script: ``for x, y in batches: step(x, y)``."""
    script: dict = {"ag": ag}
    exec("def step(x, y):\n    return ag.sum(x * (lambda: y + 1)()) + ag.sum((lambda x: x * 2)(y))", script)
    run = netcl.compile(script["step"])
    for i in range(5):
        script["x"], script["y"] = (Tensor.full((3,), float(i + k), queue=cl_device.queue) for k in range(2))
        assert run(script["x"], script["y"]).item() == 3 * i * (i + 2) + 6 * (i + 1)
    assert len(run._cases) == len(run.graphs) == 1


class Scaled:
    def __init__(self):
        self.scale = 1.0

    def __call__(self, x):
        return self.apply(x)

    def apply(self, x):
        return x * self.scale

    def __getitem__(self, name):
        return self.scale

    def change(self):
        self.scale = 5.0


class Listed(nn.Module):
    def __init__(self):
        super().__init__()
        self.scales = [1.0]

    def forward(self, x):
        return x * self.scales[0] if self.training else x * 5.0

    def change(self):
        self.scales[0] = 5.0


class Below(Listed):
    def forward(self, x):
        return super().forward(x)


def without_a_name(x):
    """Functions, their arguments, and what changes their answer from 1 to 5."""
    scaled, layers, tables = [Scaled() for _ in range(3)], [Listed(), Listed(), Below()], [OrderedDict(scale=1.0) for _ in range(3)]
    nested, late = SimpleNamespace(inner=scaled[2]), SimpleNamespace(clip=None)
    tensors, optimizer = [Tensor.ones((2,)), Tensor.full((2,), 5.0)], optim.SGD([Tensor.ones(1)], 1.0)
    named, deep = Scaled(), {"a": {"b": {"c": {"d": {"e": 1.0}}}}}
    named.other = 1.0
    lined, functions = deque(tensors), {"f": lambda x: x * tables[0]["scale"]}
    return {
        "a callable in a list": (lambda x: next(f(x) for f in scaled[:1]), (x,), scaled[0].change),
        "a function in a dict": (lambda x: functions["f"](x), (x,), lambda: tables[0].update(scale=5.0)),
        "a function that is given": (lambda x, f: f(x), (x, lambda x: x * tables[1]["scale"]), lambda: tables[1].update(scale=5.0)),
        "a method of an argument": (lambda x, of: of.apply(x), (x, scaled[1]), scaled[1].change),
        "a dict of another class": (lambda x, of: x * of["scale"], (x, tables[2]), lambda: tables[2].update(scale=5.0)),
        "in the first argument": (lambda of, x: x * of.inner.scale, (nested, x), scaled[2].change),
        "a deque": (lambda x: x * lined[0], (x,), lambda: lined.rotate(1)),
        "a layer in a list": (lambda x: next(layer(x) for layer in layers[:1]), (x,), layers[0].change),
        "forward without a call": (lambda x: layers[1].forward(x), (x,), layers[1].eval),
        "forward of the class above": (layers[2], (x,), layers[2].change),
        "what was nothing": (lambda x: x * (late.clip or 1.0), (x,), lambda: setattr(late, "clip", 5.0)),
        "attributes by their names": (lambda x: x * getattr(named, "scale") * vars(named)["other"], (x,), named.change),  # noqa: B009
        "deep in dicts": (lambda x: x * deep["a"]["b"]["c"]["d"]["e"], (x,), lambda: deep["a"]["b"]["c"]["d"].update(e=5.0)),
        "a rate": (lambda x: x * optimizer.param_groups[0]["lr"], (x,), lambda: optimizer.param_groups[0].update(lr=5.0)),
    }


def test_what_no_name_leads_to_is_never_frozen(cl_device):
    """Functions out of containers, from arguments and classes above; attributes that were nothing at first; numbers of netcl's objects."""
    for name, (function, args, change) in without_a_name(Tensor.ones((2,))).items():
        compiled = netcl.compile(function)
        assert [compiled(*args).tolist()[0] for _ in range(RECORDED + 1)] == [1.0] * (RECORDED + 1) and compiled.graphs, name
        change()
        assert compiled(*args).tolist() == [5.0, 5.0], name


@pytest.mark.parametrize("change", ["loss", "what the loss reads", "clipping", "what the model reads"])
def test_a_compiled_trainer_follows_its_functions_and_settings(cl_device, change):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer, self.scales = nn.Linear(3, 2), [1.0]

        def forward(self, x):
            return self.layer(x) * self.scales[0]

    def losses(compiled):
        netcl.manual_seed(5)
        net, weight = Net(), [1.0]
        trainer = Trainer(net, optim.SGD(net.parameters(), 0.5), loss_fn=lambda o, y: ag.cross_entropy(o, y) * weight[0], compile=compiled)
        for i in range(RECORDED + 3):
            if i == RECORDED + 1:
                if change == "loss":
                    trainer.loss_fn = lambda o, y: ag.cross_entropy(o, y) * 0.1
                elif change == "clipping":
                    trainer.grad_clip = 1e-3
                else:
                    (weight if change == "what the loss reads" else net.scales)[0] = 3.0
            yield trainer.train_on_batch(np.ones((2, 3), np.float32), np.array([0, 1])).item()

    assert list(losses(False)) == list(losses(True))


class Keeping(nn.Module):
    def __init__(self):
        super().__init__()
        self.kept = None

    def forward(self, x):
        self.kept = x * 3.0
        return x + 1.0


def test_what_a_step_sets_is_there_after_every_call(cl_device):
    """Also if it was another thing in between, which a replay does not see; or if it is an argument, which is another one each time."""

    def run(way):
        box, given, last, told = SimpleNamespace(), SimpleNamespace(), None, []
        weight, layer = Tensor.ones((3,), requires_grad=True), Keeping().eval()

        def step(x, of):
            nonlocal last
            box.twice = last = of.more = x * 2.0
            return x + 1.0

        def keep(x):
            box.argument = weight.grad = x
            return x + 1.0

        step, keep, model = way(step), way(keep), way(layer)
        for i in range(RECORDED + 3):
            box.twice, given.more, last, layer.kept = None, None, None, None
            model(Tensor.full((3,), float(i)))
            step(Tensor.full((3,), float(i)), given)
            keep(Tensor.full((3,), float(i)))
            told += [t.to_host() for t in (box.twice, given.more, last, box.argument, weight.grad, layer.kept)]
        return told

    both_ways(run)


def test_an_argument_may_be_what_the_step_left_behind_or_changes(cl_device):
    """Its memory is written by every replay, before the last command that reads the argument."""

    def run(way):
        start = np.random.default_rng(0).random((48, 48), np.float32)
        weight, box, told = Tensor.ones((48, 48), requires_grad=True), SimpleNamespace(), []

        def step(x):
            box.mixed = (x @ x) * 0.01 + x
            weight.grad = None
            (weight @ x).sum().backward()
            return (x + box.mixed).sum()

        step = way(step)
        for i in range(RECORDED + 1):
            told.append(step(Tensor.from_host(start + i)))
        for _ in range(2):
            told += [step(box.mixed), box.mixed.clone(), step(weight.grad), weight.grad.clone()]
        return told

    both_ways(run)
    a, total = Tensor.ones((3,)), Tensor.zeros((3,))
    with capture_graph(inputs=[a]):
        total += a * 1.0
    with capture_graph(inputs=[a]) as graph:
        total += a * 1.0
    with pytest.raises(ValueError, match=r"\[replay\] input 0 must not share memory with another value of the step, .*; .*clone"):
        graph.replay([total])


def test_arrays_go_where_the_function_works(cl_device):
    """They went to the queue of the last recording, wherever the weights or the chosen device were."""
    model = nn.Linear(3, 2).eval()
    compiled, relu, x = netcl.compile(model), netcl.compile(lambda x: ag.relu(x)), np.ones((1, 3), np.float32)
    for place in (cl_device, "cpu", cl_device):
        model.to(place)
        with netcl.device(place) as there:
            for _ in range(RECORDED + 1):
                assert relu(x).queue is there.queue
        for _ in range(RECORDED + 1):
            assert compiled(x).queue is model.weight.queue
    assert len(relu.graphs) == len(compiled.graphs) == 1


def test_a_compiled_model_is_set_and_copied_as_the_model(cl_device):
    """An attribute that was set on it stayed there, and the model went on without; a copy was not to be had."""
    x, model = Tensor.ones((1, 2)), nn.Linear(2, 2, bias=False).eval()
    compiled = netcl.compile(model)
    for _ in range(RECORDED + 1):
        compiled(x)
    before = compiled(x).tolist()
    copied = copy.deepcopy(compiled)
    compiled.weight = nn.Parameter(np.eye(2, dtype=np.float32))
    assert compiled(x).tolist() == [[1.0, 1.0]] and model.weight.tolist() == [[1.0, 0.0], [0.0, 1.0]]
    assert copied.function is not model and copied(x).tolist() == before and copy.copy(compiled).function is model
    compiled.extra = 1.0
    del compiled.extra
    assert not hasattr(model, "extra")


@pytest.mark.parametrize("replaced", ["parameter", "group"])
def test_what_takes_the_place_of_a_parameter_or_a_group_of_an_optimizer_counts(cl_device, replaced):
    def run(way):
        first, second = (Tensor.ones((3,), requires_grad=True) for _ in range(2))
        optimizer, told = optim.SGD([first], lr=0.5), []

        @way
        def step(x):
            first.grad = second.grad = None
            ((first + second) * x).sum().backward()
            optimizer.step()

        for i in range(RECORDED + 3):
            if i == RECORDED + 1 and replaced == "parameter":
                optimizer.param_groups[0]["params"][0] = second
            if i == RECORDED + 1 and replaced == "group":
                optimizer.param_groups[0] = {**optimizer.param_groups[0], "lr": 2.0}
            step(Tensor.ones((3,)))
            told += [first.detach().clone(), second.detach().clone()]
        return told

    both_ways(run)


@pytest.mark.parametrize("name", ["zero_grad", "step"])
def test_a_method_that_is_set_in_an_optimizer_is_called(cl_device, name):
    def run(way):
        weight, told = Tensor.ones((3,), requires_grad=True), []
        optimizer = optim.SGD([weight], lr=0.5)
        optimizers = [optimizer]

        @way
        def step(x):
            for each in optimizers:
                each.zero_grad()
            (weight * x).sum().backward()
            optimizer.step()

        for i in range(RECORDED + 5):
            if i == RECORDED + 1:
                setattr(optimizer, name, lambda: None)
            step(Tensor.ones((3,)))
            told += [weight.detach().clone()]
        return told

    both_ways(run)


def test_a_plateau_is_counted_by_every_call(cl_device):
    def run(way):
        weight, told = Tensor.ones((3,), requires_grad=True), []
        optimizer = optim.SGD([weight], lr=0.5)
        schedule = optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=1)

        @way
        def step(x):
            (weight * x).sum().backward()
            optimizer.step()
            schedule.step(1.0)

        for _ in range(RECORDED + 4):
            step(Tensor.ones((3,)))
            told += [weight.detach().clone(), schedule.last_epoch, optimizer.param_groups[0]["lr"]]
        return told

    both_ways(run)


@pytest.mark.parametrize("forget", [lambda state: state.clear(), lambda state: next(iter(state.values())).clear()], ids=["all", "one"])
def test_state_that_two_recordings_create_is_not_created_by_replays(cl_device, forget):
    def run(way):
        weight, told = Tensor.ones((3,), requires_grad=True), []
        optimizer = optim.Adam([weight], lr=0.1)

        @way
        def step(x):
            optimizer.zero_grad()
            (weight * weight * x).sum().backward()
            optimizer.step()

        for i in range(2 * RECORDED + 4):
            if 0 < i <= RECORDED:
                forget(optimizer.state)
            step(Tensor.full((3,), 1.0 + i))
            told += [weight.detach().clone()]
        return told

    both_ways(run)


def test_a_metric_counts_every_call(cl_device):
    def run(way):
        score = metrics.R2()

        @way
        def step(x, y):
            score.update(x, y)
            return x - y

        for i in range(RECORDED + 3):
            step(Tensor.from_host([1.0, 2.0, 4.0 + i]), Tensor.from_host([1.0, 3.0, 2.0]))
        return [score.compute(), score.samples]

    both_ways(run)


def test_a_schedule_that_ends_in_a_replay_leaves_counters_and_parameters_together(cl_device):
    def run(way):
        weight, told = Tensor.ones((3,), requires_grad=True), []
        optimizer = optim.Adam([weight], lr=0.1)
        schedule = optim.OneCycleLR(optimizer, 0.5, total_steps=RECORDED + 2)

        @way
        def step(x):
            optimizer.zero_grad()
            (weight * x).sum().backward()
            optimizer.step()
            schedule.step()
            return weight + 1.0

        for i in range(RECORDED + 4):
            ends = pytest.raises(ValueError, match="OneCycleLR") if i >= RECORDED + 2 else nullcontext()
            with ends:
                step(Tensor.full((3,), i + 1.0))
            told += [weight.detach().clone(), optimizer.state[weight]["step"]]
        return told

    both_ways(run)


def test_settings_that_a_step_changes_itself_are_changed_by_every_call(cl_device):
    """A learning rate by hand, in the step or in a function that is given the optimizer; training or evaluation."""

    def run(way):
        layer, told = nn.Sequential(nn.Linear(3, 3), nn.Dropout(0.5)), []
        optimizer = optim.SGD(layer.parameters(), 1.0)

        def set_rate(of, rate):
            for group in of.param_groups:
                group["lr"] = rate

        @way
        def step(x, rate):
            if rate > 0.1:
                optimizer.param_groups[0]["lr"] = rate
            else:
                set_rate(optimizer, rate)
            layer.train()
            optimizer.zero_grad()
            layer(x).sum().backward()
            optimizer.step()

        @way
        def evaluate(x):
            layer.eval()
            with ag.no_grad():
                return layer(x)

        for i in range(4 * RECORDED):
            step(Tensor.ones((2, 3)), (0.5, 0.1, 0.2)[i % 3])
            told += [layer[0].weight.detach().clone(), layer.training]
            told += [evaluate(Tensor.ones((2, 3))), layer.training]
        return told

    both_ways(run)


def test_a_state_that_lies_where_an_older_one_lay_is_another_one(cl_device):
    """In Python's memory, as happens when it is loaded twice."""

    def run(way):
        weight = Tensor.ones((3,), requires_grad=True)
        optimizer = optim.Adam([weight], lr=0.1)

        @way
        def step(x):
            optimizer.zero_grad()
            (weight * x).sum().backward()
            optimizer.step(found_inf=Tensor.zeros(()))  # as a GradScaler does, counted on the device

        for i in range(RECORDED + 3):
            if i == RECORDED + 1:
                before = id(optimizer.state)
                optimizer.load_state_dict(optimizer.state_dict())
                made = [{} for _ in range(1000)]
                same = next((other for other in made if id(other) == before), made[0])
                same.update(optimizer.state)
                optimizer.state = same
            step(Tensor.full((3,), i + 1.0))
        return [weight.detach(), *[t.to_host() for t in optimizer.state[weight].values()]]

    both_ways(run)


def test_the_layers_of_a_deep_model_are_all_followed(cl_device):
    layers = [Listed() for _ in range(220)]
    model = netcl.compile(nn.Sequential(*layers))
    x = Tensor.ones((2,))
    assert [model(x).tolist()[0] for _ in range(RECORDED + 1)] == [1.0] * (RECORDED + 1) and model.graphs
    for i in (0, 110, 219):
        layers[i].change()
    assert model(x).tolist() == [125.0, 125.0]


COLLECTIONS = [0]


def count_collections(phase, _):
    COLLECTIONS[0] += phase == "stop"


def test_what_runs_when_garbage_is_collected_is_no_part_of_a_step(cl_device):
    threshold, before = gc.get_threshold(), COLLECTIONS[0]
    gc.callbacks.append(count_collections)
    gc.set_threshold(1)
    try:
        step, x = netcl.compile(lambda x: ag.exp(x).sum()), Tensor.ones((3,))
        for _ in range(RECORDED + 2):
            step(x).item()
    finally:
        gc.set_threshold(*threshold)
        gc.callbacks.remove(count_collections)
    assert COLLECTIONS[0] > before and step.graphs and not step.refused and gc.isenabled()


def _made_once(function, *args, write=None):
    """Replays of a function against the function itself, before and after a write."""
    compiled = netcl.compile(function)
    for i in range(RECORDED + 4):
        if write is not None and i == RECORDED + 2:
            write()
        x = Tensor.from_host(np.arange(8, dtype=np.float32).reshape(2, 4) + i)
        np.testing.assert_allclose(compiled(x, *args).to_host(), function(x, *args).to_host(), rtol=1e-5)
    assert not compiled.refused and compiled.graphs
    return compiled


def test_weights_that_are_changed_in_place_are_read_where_the_step_reads_them(cl_device):
    """Before and after the change; two equal results that are changed in turn; and the same commands in another order."""
    w = Tensor.from_host(np.linspace(-1, 1, 16, dtype=np.float32).reshape(4, 4))

    def before_and_after(x):
        a = w * 2
        y = x @ a
        a.mul_(3.0)
        return y + x @ a

    def twice(x):
        a, b = w * 2, w * 2
        a.add_(w)
        b.add_(w)
        return x @ a + x @ b

    def ordered(x, first):
        a = w * 2
        if first:
            u = a + 1
            a.mul_(3.0)
        else:
            a.mul_(3.0)
            u = a + 1
        return x @ a - 2 * (x @ u)

    for function in (before_and_after, twice):
        _made_once(function, write=lambda: w.add_(1.0))
    compiled = netcl.compile(ordered)
    x = Tensor.from_host(np.ones((2, 4), np.float32))
    for first in [True] * (RECORDED + 1) + [False] * (RECORDED + 1) + [True, False]:
        np.testing.assert_allclose(compiled(x, first).to_host(), ordered(x, first).to_host(), rtol=1e-5)


def test_a_long_chain_over_weights_is_recorded_quickly(cl_device):
    """Every value is read twice: names of results that repeat those of their operands would double at every step."""
    w = Tensor.full((4, 4), 0.1)

    def chain(x):
        a = w
        for _ in range(40):
            a = ag.matmul(a, a) + a * 0.5
        return x @ a

    assert _made_once(chain, write=lambda: w.add_(0.1)).graphs[0].commands == 1


def test_what_the_caller_writes_without_netcl_is_read_at_every_replay(cl_device):
    array = np.ones((4, 4), np.float32)
    w = Tensor.from_host(cl_device.queue, array, share=True)
    assert _made_once(lambda x: x @ (w * 2), write=lambda: array.fill(5.0)).graphs


def test_writes_to_the_last_view_of_a_tensor_are_followed(cl_device):
    """Its base is gone, so that the view becomes a tensor of its own."""
    w = Tensor.from_host(np.arange(16, dtype=np.float32).reshape(4, 4))[:, 1:3]
    compiled = netcl.compile(lambda x: x @ (w * 2))
    x = Tensor.full((2, 4), 1.0)
    for i in range(RECORDED + 4):
        if i > RECORDED:
            ag.add(w, 1.0, out=w)
        np.testing.assert_array_equal(compiled(x).to_host(), x.to_host() @ (w.to_host() * 2))
    assert compiled.graphs and not compiled.refused


@pytest.mark.parametrize(
    "write",
    [
        lambda w: w.from_host(np.full((4, 4), 3.0, np.float32)),
        lambda w: w.fill_(3.0),
        lambda w: w.add_(2.0),
        lambda w: ag.add(w, 2.0, out=w),
        lambda w: w.__setitem__(slice(None), 3.0),
        lambda w: w.__setitem__(np.arange(4), 3.0),
    ],
    ids=["from_host", "fill_", "add_", "out", "setitem", "rows"],
)
def test_a_replay_of_another_thread_during_a_write_leaves_nothing_stale(cl_device, monkeypatch, write):
    """A write is noted before it is enqueued; what a replay computes in between is from before the write."""
    w, x = Tensor.full((4, 4), 1.0), Tensor.full((2, 4), 1.0)
    compiled, noted, threads = netcl.compile(lambda x: x @ (w * 2)), writes.wrote, []
    for _ in range(RECORDED + 1):
        compiled(x)

    def note(tensors):
        noted(tensors)
        threads.append(threading.Thread(target=compiled, args=(x,)))
        threads[-1].start()
        threads[-1].join()

    with monkeypatch.context() as patch:
        for module in (writes, plan, tensor):
            patch.setattr(module, "wrote", note)
        write(w)
    assert compiled(x).tolist() == [[24.0] * 4] * 2


FACTOR = {"of": 1.0}


def times_factor(x):
    return x * FACTOR["of"]


def apart(a, b):
    return ((a - b) * FACTOR["of"]).square().sum(-1)


@pytest.mark.parametrize("name", ["Lambda", "Permute", "TransformerEncoderLayer", "TripletMarginWithDistanceLoss"])
def test_functions_and_lists_in_layers_of_netcl_are_guarded(cl_device, name, monkeypatch):
    """A layer inside a model calls a function of the user's that reads a global, or holds a list that changes in place."""
    image = Tensor.from_host(np.arange(144, dtype=np.float32).reshape(2, 8, 3, 3)[:, :, :, :2])
    x = image if name == "Permute" else image.reshape(4, 3, 8)

    def run(way):
        monkeypatch.setitem(FACTOR, "of", 1.0)
        permute = vision.ops.Permute([0, 2, 3, 1])
        layer = {
            "Lambda": lambda: vision.transforms.Lambda(times_factor),
            "Permute": lambda: nn.Sequential(permute, nn.ReLU()),
            "TransformerEncoderLayer": lambda: nn.TransformerEncoderLayer(8, 2, 16, activation=times_factor),
            "TripletMarginWithDistanceLoss": lambda: nn.TripletMarginWithDistanceLoss(distance_function=apart, margin=1e7),
        }[name]()
        model = nn.ModuleList([layer]).eval()

        def step(x):
            with netcl.no_grad():
                return model[0](*[x, x * 2.0, x * 3.0][: 3 if "Triplet" in name else 1]) + 1.0

        step, results = way(step), []
        for i in range(3 * (RECORDED + 1)):
            if i == 6:
                FACTOR["of"] = 3.0
                permute.dims[1:] = [3, 1, 2]
            results.append(step(x))
        assert not isinstance(step, CompiledFunction) or step.graphs
        return results

    both_ways(run)


@pytest.mark.parametrize("name", ["Normal", "Independent", "TransformedDistribution"])
def test_parameters_of_distributions_are_guarded(cl_device, name):
    def run(way):
        normal = distributions.Normal(Tensor.full((3,), 1.0), Tensor.full((3,), 2.0))
        shift = distributions.AffineTransform(1.0, 2.0)
        made = {
            "Normal": lambda: normal,
            "Independent": lambda: distributions.Independent(normal, 1),
            "TransformedDistribution": lambda: distributions.TransformedDistribution(normal, [shift]),
        }[name]()
        step, results, before = way(lambda x: (made.log_prob(x), made.rsample((2,)))), [], normal.loc
        for i in range(3 * (RECORDED + 1)):
            if i == 6:
                normal.loc, shift.scale = before + 1.0, 4.0
            results += step(Tensor.full((3,), float(i)))
        assert not isinstance(step, CompiledFunction) or step.graphs
        return results

    both_ways(run)


def test_random_transforms_draw_at_every_call(cl_device):
    netcl.manual_seed(0)
    flip = netcl.compile(nn.Sequential(vision.transforms.RandomHorizontalFlip(), nn.ReLU()).eval())
    x = Tensor.from_host(np.arange(4, dtype=np.float32).reshape(1, 1, 1, 4))
    assert len({tuple(flip(x).to_host().ravel()) for _ in range(40)}) == 2
    assert "random numbers of a transform" in flip.refused[0]


def test_a_step_inside_autocast_is_replayed(cl_device):
    """The caller's block holds the casts of parameters, but not those of a recording."""

    def run(way):
        model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
        optimizer = optim.SGD(model.parameters(), lr=0.1)

        def step(x):
            optimizer.zero_grad()
            loss = model(x).float().square().mean()
            loss.backward()
            optimizer.step()
            return loss

        step, results = way(step), []
        for i in range(3 * (RECORDED + 1)):
            with autocast(dtype="bfloat16"):
                results.append(step(Tensor.full((3, 4), float(i))))
        assert not isinstance(step, CompiledFunction) or step.graphs
        return results

    both_ways(run)


def test_a_layer_of_a_transformer_is_replayed(cl_device):
    """A layer norm that was computed by its own kernel holds no inputs anymore."""
    layer = netcl.compile(nn.TransformerEncoderLayer(8, 2, 16).eval())
    x = netcl.randn(5, 2, 8)
    expected = layer.function(x).to_host()
    for _ in range(RECORDED + 2):
        np.testing.assert_allclose(layer(x).to_host(), expected, rtol=1e-5, atol=1e-5)
    assert layer.graphs and not layer.refused
