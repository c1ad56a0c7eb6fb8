"""Recurrent layers: every algorithm against the same text in float64, and torch's results for lengths, states and projections."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import numpy as np
import pytest

import netcl
import netcl.autograd as ag
from netcl import nn, ops, optim, selftest
from netcl.core.errors import DeviceError, ShapeError
from netcl.core.kernel_selector import get_kernel_selector
from netcl.core.kernels import program
from netcl.core.tensor import Tensor
from netcl.engine import waiting
from netcl.engine.algorithms import ALGORITHMS, answering
from netcl.engine.registry import REGISTRY
from netcl.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence, pad_sequence
from netcl.ops.recurrent import plans, steps

GOLDEN = Path(__file__).parent.parent / "golden"
spec = importlib.util.spec_from_file_location("recurrent_cases", GOLDEN / "recurrent_cases.py")
cases = importlib.util.module_from_spec(spec)
spec.loader.exec_module(cases)


@pytest.fixture(scope="module")
def golden():
    with np.load(GOLDEN / "recurrent.npz") as file:
        return dict(file)


@pytest.fixture
def forced(request, monkeypatch):
    """``forced(name)`` makes the selector name an algorithm until the test ends."""
    selector = get_kernel_selector()
    monkeypatch.setattr(selector, "_registered", dict(selector._registered))

    def force(name):
        algorithm = next(a for a in ALGORITHMS["recurrent"] if a.name == name)
        if algorithm.device == "gpu":
            request.getfixturevalue("unoptimized")
        (config,) = algorithm.samples
        selector._registered.pop("recurrent", None)
        selector.register("recurrent", lambda shapes, profile: True, config)

    yield force
    selector.clear_cache()


#: An algorithm and the numbers of the samples that it runs here; each builds a kernel or two. With --full all.
SAMPLES = {"units": (1,), "steps": (3,), "persistent": (1, 4)}


@pytest.mark.parametrize("name", SAMPLES)
@pytest.mark.parametrize("op", ["recurrent", "recurrent_grad"])
def test_every_algorithm_gives_the_reference(name, op, cl_device, forced, full, monkeypatch):
    forced(name)
    ran = []
    for algorithm in ALGORITHMS["recurrent"]:
        body = algorithm.run
        monkeypatch.setitem(algorithm.__dict__, "run", lambda *args, body=body, own=algorithm.name: (ran.append(own), body(*args)))
    for i, case in enumerate(selftest.cases(REGISTRY[op], "float32", (257,))):
        if full or i in SAMPLES[name]:
            selftest.check_forward(REGISTRY[op], case, cl_device, "float32")
            assert full or ran.pop() == name


def test_the_choice_depends_on_the_size_of_the_weights():
    from types import SimpleNamespace

    cpu = SimpleNamespace(max_compute_units=2, device_type="cpu", compute_capability=None)
    gpu = SimpleNamespace(max_compute_units=132, device_type="gpu", compute_capability=(9, 0), max_work_group_size=1024)

    def first(profile, hidden, rows, width=0, backward=False, dtype="float32"):
        layer = plans.Layer("lstm", 35, rows, hidden, width or hidden, dtype, 0, backward)
        config = plans._DEFAULT
        return next(a.name for a in answering("recurrent", config, profile) if a.when(layer, config, profile))

    assert [first(cpu, 256, 20), first(cpu, 650, 20), first(cpu, 256, 20, 64)] == ["rows", "units", "units"]
    assert [first(cpu, 650, 20, backward=True), first(cpu, 1024, 20, backward=True)] == ["rows", "units"]
    assert [first(gpu, 256, 64), first(gpu, 1024, 64), first(gpu, 2048, 64)] == ["persistent", "persistent", "steps"]
    assert [first(gpu, 256, 64, 128), first(gpu, 256, 64, dtype="float64"), first(gpu, 1024, 4096)] == ["steps", "steps", "persistent"]
    turing = SimpleNamespace(**{**vars(gpu), "compute_capability": None})
    assert first(turing, 256, 64) == "steps", "only where groups are certain to run side by side"


def test_a_wait_in_vain_ends_and_is_reported(cl_device, unoptimized):
    """A group that waits for h of a group that is not there: the kernel ends, sets the flag, and gives NaN."""
    queue, hidden = cl_device.queue, 16
    layer = plans.Layer("tanh", 2, 1, hidden, hidden, "float32")

    def tensor(*shape):
        return Tensor.from_host(queue, np.full(shape, 0.1, np.float32))

    x, w, y, saved, h = tensor(2, 1, hidden), tensor(hidden, hidden), tensor(2, 1, hidden), tensor(2, 1, 1, hidden), tensor(1, hidden)
    queue.netcl.backend.fill(y.buffer, y.nbytes, plans.DTYPES["int32"], -1)
    flag = Tensor.zeros((1,), "int32", queue=queue)
    block = plans._block(layer, plans.FORWARD_PART, cl_device.profile, {"ITEMS": 16, "BLOCK": 8, "RT": 1}, 1)
    alone = block._replace(groups=(1, 1))  # of two
    operands = plans.LayerOperands({plans.FORWARD_PART: w}, (x, x, x, x, x, y, saved, h, h, y, flag), y)
    plans._launch(queue, layer, plans.FORWARD_PART, alone, operands, 0, 2, HOLDS=1, POLLS=1, LIMIT=100)
    assert flag.item() == 1
    assert np.isfinite(y.to_host()[0, 0, :8]).all() and np.isnan(y.to_host()[1]).all()


def test_a_wait_in_vain_raises_and_ends_the_use_of_the_kernel(cl_device, forced):
    forced("persistent")
    state = program.state(cl_device.queue)
    gx, weight = (Tensor.from_host(cl_device.queue, np.ones(shape, np.float32)) for shape in ((4, 3, 24), (24, 6)))
    compiled = netcl.compile(lambda x: ops.recurrent(x, weight, kind="lstm")[0])
    try:
        exact = compiled(gx).to_host()
        waiting.late_flag(cl_device.queue).fill_(1)
        with pytest.raises(DeviceError, match=r"\[launch\] work-groups of one launch must run concurrently"):
            for _ in range(3 * waiting.WATCHED):
                np.testing.assert_array_equal(compiled(gx).to_host(), exact)
        assert not waiting.may_wait(cl_device.queue) and len(compiled.graphs) == 1 and not compiled.refused
        np.testing.assert_allclose(ops.recurrent(gx, weight, kind="lstm")[0].to_host(), exact, rtol=1e-6)
    finally:
        state.pop(("waiting", "failed"), None)
        waiting.late_flag(cl_device.queue).fill_(0)


@pytest.mark.parametrize("name", cases.CASES)
def test_torch_gives_the_same(name, device, golden):
    kind, options, packed = cases.CASES[name]
    with netcl.device(device):
        layer = getattr(nn, kind)(4, 6, **options)
    layer.load_state_dict({key: cases.values(f"{name}.{key}", p.shape) for key, p in layer.named_parameters()})
    x, *states = (
        Tensor.from_host(device.queue, cases.values(f"{name}.{i}", shape), requires_grad=True)
        for i, shape in enumerate([(4, 3, 4), *cases.state_shapes(kind, options)])
    )
    given = pack_padded_sequence(x, cases.LENGTHS, enforce_sorted=False) if packed else x
    y, ends = layer(given, tuple(states) if len(states) > 1 else states[0])
    outputs = [pad_packed_sequence(y)[0] if packed else y, *(ends if isinstance(ends, tuple) else (ends,))]
    total = sum(ag.sum(out * cases.values(f"{name}.g{i}", out.shape)) for i, out in enumerate(outputs))
    total.backward()
    found = {f"out{i}": out for i, out in enumerate(outputs)} | {f"dx{i}": part.grad for i, part in enumerate([x, *states])}
    found |= {key: p.grad for key, p in layer.named_parameters()}
    for key, value in found.items():
        np.testing.assert_allclose(value.to_host(), golden[f"{name}/{key}"], rtol=1e-4, atol=2e-6, err_msg=key)


@pytest.mark.parametrize("kind", steps.GATES)
def test_gradients_of_gradients_go_through_the_formulas(kind):
    rng, gates = np.random.default_rng(0), steps.GATES[kind]
    queue = netcl.core.device.manager.default("cpu").queue

    def draw(*shape):
        return Tensor.from_host(queue, rng.uniform(0.1, 1, shape), "float64", requires_grad=True)

    shapes = [(3, 2, gates * 2), (gates * 2, 2), (2, 2), *([(2, 2)] if kind == "lstm" else [])]
    lengths = Tensor.from_host(queue, np.array([3, 2], np.int32))

    def function(gx, weight, h0, c0=None):
        y, h, *_ = ag.recurrent(gx, weight, None, h0, c0, None, lengths, kind=kind, reverse=True)
        return ag.square(y) + ag.square(h)

    assert ag.gradgradcheck(function, [draw(*shape) for shape in shapes], rtol=1e-4, atol=1e-6)


def test_a_compiled_step_replays_the_layer(cl_device):
    with netcl.device(cl_device):
        models = [nn.LSTM(4, 6, num_layers=2) for _ in range(2)]
        models[1].load_state_dict(models[0].state_dict())
        optimizers = [optim.SGD(model.parameters(), lr=0.1) for model in models]

        def step(model, optimizer, x):
            loss = ag.mean(ag.square(model(x)[0]))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            return loss

        compiled = netcl.compile(lambda x: step(models[0], optimizers[0], x))
        for seed in range(4):
            x = Tensor.from_host(cl_device.queue, np.random.default_rng(seed).standard_normal((4, 3, 4), np.float32))
            assert compiled(x).item() == step(models[1], optimizers[1], x).item()
        assert len(compiled.graphs) == 1 and not compiled.refused


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_autocast_keeps_the_state_in_float32(dtype, cl_device):
    with netcl.device(cl_device):
        layer = nn.GRU(4, 6)
        x = Tensor.from_host(cl_device.queue, np.random.default_rng(0).standard_normal((4, 3, 4), np.float32))
        exact = layer(x)[0].to_host()
        with netcl.amp.autocast(dtype=dtype):
            y, h = layer(x)
        assert y.dtype == h.dtype == dtype
        ag.sum(y).backward()
        assert {p.grad.dtype for p in layer.parameters()} == {"float32"}
        np.testing.assert_allclose(y.to_host().astype(np.float32), exact, atol=2e-3 if dtype == "float16" else 1e-2)


def test_packed_sequences_hold_what_they_were_given(device):
    x = Tensor.from_host(device.queue, np.arange(24, dtype=np.float32).reshape(4, 3, 2))
    packed = pack_padded_sequence(x, [2, 4, 1], enforce_sorted=False)
    assert packed.batch_sizes.tolist() == [3, 2, 1, 1]
    assert packed.data.tolist()[:4] == [[2.0, 3.0], [0.0, 1.0], [4.0, 5.0], [8.0, 9.0]]
    back, lengths = pad_packed_sequence(packed, batch_first=True, padding_value=-1.0, total_length=5)
    inside = np.arange(5)[None, :] < np.array([2, 4, 1])[:, None]
    padded = np.concatenate([x.to_host().transpose(1, 0, 2), np.zeros((3, 1, 2), np.float32)], 1)
    np.testing.assert_array_equal(back.to_host(), np.where(inside[..., None], padded, -1))
    assert lengths.tolist() == [2, 4, 1]
    with pytest.raises(ShapeError, match=r"\[pack_padded_sequence\] lengths must be in descending order; lengths=\[2, 4, 1\]"):
        pack_padded_sequence(x, [2, 4, 1])
    with pytest.raises(
        ShapeError,
        match=r"\[pack_padded_sequence\] lengths must have a number from 1 to 4 for each sequence; lengths=\[5, 2, 1\]",
    ):
        pack_padded_sequence(x, [5, 2, 1])
    with pytest.raises(ShapeError, match=r"\[pad_packed_sequence\] total_length must be at least 4; total_length=3"):
        pad_packed_sequence(packed, total_length=3)
    assert pad_sequence([x[:2, 0], x[:, 1]], batch_first=True).tolist()[0] == [[0.0, 1.0], [6.0, 7.0], [0.0, 0.0], [0.0, 0.0]]


def test_an_empty_batch_has_no_gradients_but_zeros(device):
    gx, weight = (Tensor.zeros(shape, queue=device.queue).requires_grad_() for shape in ((2, 0, 24), (24, 6)))
    y, h, c, _ = ag.recurrent(gx, weight, kind="lstm")
    assert (y.shape, h.shape, c.shape) == ((2, 0, 6), (0, 6), (0, 6))
    ag.sum(y).backward()
    assert not weight.grad.to_host().any() and ops.recurrent(gx, weight, kind="lstm")[0].shape == (2, 0, 6)
