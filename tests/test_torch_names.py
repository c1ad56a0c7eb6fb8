"""torch's names at the root and on tensors: how many there are, what they take, and what a missing one says."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import numpy as np
import pytest

import netcl
from netcl import nn, ops

ROOT = Path(__file__).parent.parent
THERE = json.loads((ROOT / "tests/golden/torch_names.json").read_text(encoding="utf-8"))
FLOORS = {"functions": 420, "methods": 315, "in-place methods": 130, "optimizers": 14, "schedules": 15, "utils.data": 25, "layers": 156,
          "functionals": 124}  # fmt: skip


@pytest.mark.parametrize("kind", FLOORS)
def test_names_do_not_go_away(kind):
    owners = {"functions": netcl, "optimizers": netcl.optim, "schedules": netcl.optim.lr_scheduler, "utils.data": netcl.utils.data,
              "layers": nn, "functionals": nn.functional}  # fmt: skip
    owner = owners.get(kind, netcl.Tensor)
    assert sum(hasattr(owner, name) for name in THERE[kind]) >= FLOORS[kind]


def test_counts_of_the_page_are_those_of_the_list():
    spec = importlib.util.spec_from_file_location("docs_tables", ROOT / "tools/docs_tables.py")
    tables = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tables)
    assert {kind: count >= FLOORS[kind] for kind, count in tables.torch_names(counts=True).items()} == dict.fromkeys(FLOORS, True)


def test_every_op_that_torch_has_as_a_method_is_one():
    changes_shape = {"as_strided_", "squeeze_", "swapaxes_", "swapdims_", "transpose_", "unsqueeze_"}
    assert [name for name in ops.names() if name in THERE["methods"] and not hasattr(netcl.Tensor, name)] == []
    in_place = {f"{name}_" for name in ops.names()} & {*THERE["in-place methods"]} - changes_shape
    assert [name for name in in_place if not hasattr(netcl.Tensor, name)] == []


def test_a_missing_name_names_the_nearest():
    with pytest.raises(AttributeError, match=r"'netcl' has no attribute 'argmxa'; the nearest names are argmax"):
        netcl.argmxa  # noqa: B018


def test_every_listed_name_resolves():
    assert [name for name in dir(netcl) if not hasattr(netcl, name)] == []


# ---- words


def test_parameters_under_torchs_words(device):
    with netcl.device(device):
        x = netcl.tensor([[1.0, -2.0], [3.0, 5.0]])
        assert netcl.add(input=x, other=x, alpha=2).tolist() == (x * 3).tolist() == x.add(x, alpha=2).tolist()
        assert netcl.sum(input=x, dim=0, keepdim=True, dtype=netcl.int64).tolist() == [[4, 3]]
        assert netcl.cat(tensors=[x, x], dim=1).shape == (2, 4)
        assert netcl.div(x, 2, rounding_mode="floor").tolist() == [[0.0, -1.0], [1.0, 2.0]]
        assert netcl.div(x, 2, rounding_mode="trunc").tolist() == [[0.0, -1.0], [1.0, 2.0]]
        whole = netcl.tensor([-7, 7]).div(2, rounding_mode="trunc")
        assert (whole.tolist(), whole.dtype) == ([-3, 3], "int64")
        assert x.topk(1, sorted=True).values.tolist() == [[1.0], [5.0]]
        with pytest.raises(ValueError, match=r'\[div\] rounding_mode must be None, "floor" or "trunc"; rounding_mode=\'up\''):
            netcl.div(x, 2, rounding_mode="up")


@pytest.mark.parametrize("name", ["sum", "prod", "cumsum", "cumprod"])
@pytest.mark.parametrize("dtype", ["int32", "uint8", "int64", "float16"])
def test_dtype_is_that_of_the_result(device, name, dtype):
    with netcl.device(device):
        made = getattr(netcl, name)(netcl.tensor([1, 2, 3]), dim=0, dtype=dtype)
    assert (made.dtype, made.tolist()) == (dtype, getattr(np, name)([1, 2, 3]).tolist())


def test_alpha_is_differentiated():
    with netcl.device("cpu"):
        a, b = netcl.ones(2, requires_grad=True), netcl.ones(2, requires_grad=True)
        netcl.sub(a, b, alpha=3).sum().backward()
        assert a.grad.tolist() == [1.0, 1.0] and b.grad.tolist() == [-3.0, -3.0]


def test_clamp_takes_tensors(device):
    with netcl.device(device):
        x, low = (netcl.tensor(values, requires_grad=True) for values in ([-2.0, 0.0, 2.0], [-1.0, -1.0, -1.0]))
        y = x.clamp(min=low, max=1.0)
        y.sum().backward()
        assert (y.tolist(), x.grad.tolist(), low.grad.tolist()) == ([-1.0, 0.0, 1.0], [0.0, 1.0, 0.0], [1.0, 0.0, 0.0])
        assert netcl.clamp(x.detach(), max=netcl.tensor([0.0, -1.0, 3.0])).tolist() == [-2.0, -1.0, 2.0]


# ---- tensors


def test_size_is_a_number_and_a_shape(device):
    with netcl.device(device):
        x = netcl.ones(2, 3)
        assert (x.size, x.size(), x.size(0), x.size(-1)) == (6, (2, 3), 2, 3)
        assert (x.sum() / x.size).item() == 1.0 and (x * x.size).dtype == "float32" and netcl.zeros(x.size).shape == (6,)
        assert netcl.arange(3).clamp(max=netcl.ones(1).size).tolist() == [0, 1, 1]
        with pytest.raises(ValueError, match=r"\[size\] dim must be in range for 2 dimensions, got 2"):
            x.size(2)


def test_to_takes_device_and_dtype():
    x = netcl.ones(2, device="cpu")
    assert x.to("cpu") is x and x.to("cpu", netcl.float32) is x and x.to(copy=True) is not x
    y = x.to("cpu", netcl.float16, non_blocking=True)
    assert y.dtype == "float16" and x.to(y).dtype == "float16" and x.to(dtype="int64", device="cpu").dtype == "int64"


def test_small_methods():
    x = netcl.tensor([[1.0, 2.0], [3.0, 4.0]], device="cpu")
    assert f"{x.sum():.2f}" == "10.00" and f"{x}" == str(x)
    with pytest.raises(TypeError, match=r"\[format\] a format spec requires a tensor with one element"):
        f"{x:.2f}"
    assert x.t().tolist() == [[1.0, 3.0], [2.0, 4.0]] and x.mT.shape == (2, 2) and x.stride() == (2, 1) and x.type() == "netcl.FloatTensor"
    assert x.type(netcl.int32).dtype == "int32" and x.byte().dtype == "uint8" and x.element_size() == 4 and x.nelement() == x.numel() == 4
    assert x.new_zeros(2, 3).shape == (2, 3) and x.new_full((2,), 7).tolist() == [7.0, 7.0] and x.new_tensor([1, 2]).dtype == "float32"
    assert x.view_as(x.reshape(4)).shape == (4,) and netcl.ones(2, device="cpu").expand_as(x).shape == (2, 2)
    assert x.is_floating_point() and not x.long().is_floating_point() and x.equal(x.clone()) and x.allclose(x + 1e-9)
    assert netcl.abs_(x.neg_()) is x and x[0, 0] == 1.0
    assert netcl.nan_to_num(x / 0).tolist() == [[netcl.finfo(netcl.float32).max] * 2] * 2


def test_devices_are_values():
    cpu = netcl.device("cpu")
    assert cpu == netcl.device("cpu", 0) == netcl.ones(1, device=cpu).device and cpu.type == "cpu" and len({cpu, netcl.device("cpu")}) == 1


def test_module_arguments():
    with netcl.device("cpu"):
        layer = nn.Linear(2, 1)
        layer(netcl.ones(1, 2)).sum().backward()
        layer.zero_grad(set_to_none=False)
        assert layer.weight.grad.tolist() == [[0.0, 0.0]]
        layer.zero_grad()
        assert layer.weight.grad is None
        layer.load_state_dict({"weight": netcl.ones(1, 2, dtype="float64"), "bias": netcl.zeros(1)}, assign=True)
        assert layer.weight.dtype == "float64" and next(layer.parameters()) is layer.weight


# ---- functions that make tensors


def test_tensors_from_sizes(device):
    with netcl.device(device):
        made = {
            "eye": (netcl.eye(2, 3), np.eye(2, 3)),
            "linspace": (netcl.linspace(0, 1, 5), np.linspace(0, 1, 5)),
            "integers": (netcl.linspace(0.5, 9.7, 6, dtype="int64"), [0, 1, 3, 5, 7, 9]),
            "logspace": (netcl.logspace(start=0, end=2, steps=3), [1.0, 10.0, 100.0]),
            "arange": (netcl.arange(1, end=7, step=2), [1, 3, 5]),
            "full": (netcl.full((2,), 3), [3, 3]),
            "zeros": (netcl.zeros(size=(1, 2)), [[0.0, 0.0]]),
            "full_like": (netcl.full_like(netcl.ones(2), 2.5), [2.5, 2.5]),
            "tril_indices": (netcl.tril_indices(2, 2), [[0, 1, 1], [0, 0, 1]]),
            "hann_window": (netcl.hann_window(4), [0.0, 0.5, 1.0, 0.5]),
            "meshgrid": (netcl.meshgrid(netcl.arange(2), netcl.arange(3))[1], [[0, 1, 2]] * 2),
            "cartesian_prod of one": (netcl.cartesian_prod(netcl.arange(3)), [0, 1, 2]),
            "as_tensor": (netcl.as_tensor([1, 2], dtype=netcl.float32), [1.0, 2.0]),
            "from_numpy": (netcl.from_numpy(np.arange(2)), [0, 1]),
        }
        for name, (tensor, wanted) in made.items():
            assert np.allclose(tensor.to_host(), wanted) and tensor.device == device, name
        assert netcl.zeros_like(netcl.ones(2, dtype="int64")).dtype == "int64" and netcl.ones(1, requires_grad=True).requires_grad
        for make in (netcl.zeros, netcl.ones, netcl.empty):
            for dtype in (np.float16, "float16", netcl.float16, np.dtype("float16")):
                assert make((2, 3), dtype).dtype == "float16" and make((2, 3), dtype).shape == (2, 3)
            assert make(2, 3).shape == make(np.int64(2), np.int64(3)).shape == (2, 3)
        with pytest.raises(TypeError, match="unexpected keyword argument 'sise'"):
            netcl.rand(2, sise=3)


def test_random_numbers_of_torchs_kinds(device):
    with netcl.device(device):
        netcl.manual_seed(3)
        assert sorted(netcl.randperm(9).tolist()) == list(range(9))
        drawn = netcl.multinomial(netcl.tensor([0.0, 3.0, 0.0, 1.0]), 400, replacement=True).to_host()
        assert set(drawn) == {1, 3} and 240 < (drawn == 1).sum() < 360
        assert sorted(netcl.multinomial(netcl.tensor([[0.0, 3.0, 1.0]]), 2).tolist()[0]) == [1, 2]
        assert netcl.randint(5, (3, 2)).shape == netcl.normal(0.0, 1.0, (3, 2)).shape == (3, 2)
        x = netcl.empty(300)
        assert set(x.bernoulli_(0.5).tolist()) == {0.0, 1.0} and x.exponential_().min() >= 0 and x.random_(4).max() == 3
