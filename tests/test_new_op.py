"""A pointwise op is a row and, as an activation, a line: everything else that users see follows from the two."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import netcl
import netcl.nn.functional as F
from netcl import nn
from netcl.engine.registry import REGISTRY, Pointwise, register, unregister
from netcl.nn import activation
from netcl.ops.pointwise import unary

ROOT = Path(__file__).parent.parent
ROW = """unary("softshrink_test", "v0 - MIN(MAX(v0, -lambd), lambd)", "WHERE(ABS(v0) > lambd, g, 0)",
      lambda x, lambd: x - np.clip(x, -lambd, lambd), params={"lambd": 0.5}, kinks=(-0.5, 0.5), method=True, doc="x moved towards 0.")
"""
EXAMPLE = ("nn.SoftshrinkTest(1.0)([-3.0, 0.25]).tolist()", "[-2.0, 0.0]")
LAYER = f'SoftshrinkTest = activation_class("SoftshrinkTest", "softshrink_test", "{EXAMPLE[0]}", "{EXAMPLE[1]}", inplace=True)\n'
PROGRAM = """
import doctest, inspect, sys
sys.path.insert(0, "tools")
import docs_tables, netcl, netcl.nn.functional as F
from netcl import nn, ops
x = netcl.tensor([-3.0, 0.25, 2.0])
wanted = [-2.5, 0.0, 1.5]
assert ops.softshrink_test(x).tolist() == netcl.softshrink_test(x).tolist() == F.softshrink_test(x.clone(), inplace=True).tolist() == wanted
assert x.softshrink_test().tolist() == x.clone().softshrink_test_().tolist() == nn.SoftshrinkTest()(x).tolist() == wanted
assert str(inspect.signature(nn.SoftshrinkTest)) == "(lambd: 'float' = 0.5, inplace: 'bool' = False)"
layer = nn.build(nn.SoftshrinkTest(1.0).config)
assert repr(layer) == "SoftshrinkTest(lambd=1.0)" and layer(x).tolist() == [-2.0, 0.0, 1.0]
assert nn.MLP(2, [3], 1, activation="softshrink_test")([[1.0, 2.0]]).shape == (1, 1)
assert ">>> nn.SoftshrinkTest(1.0)" in nn.SoftshrinkTest.__doc__
doctest.run_docstring_examples(nn.SoftshrinkTest, {})  # prints what fails
assert "| `SoftshrinkTest(lambd=0.5, inplace=False)` | x moved towards 0. |" in docs_tables.reference()
assert "`softshrink_test`" in docs_tables.amp_policy()
"""


def added(path, marker, text):
    """Write ``text`` before a line of a file."""
    before, line, after = path.read_text(encoding="utf-8").partition(marker)
    assert line
    path.write_text(before + text + line + after, encoding="utf-8")


def test_two_edits_make_an_op_that_users_see_everywhere(tmp_path):
    shutil.copytree(ROOT / "netcl", tmp_path / "netcl", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copytree(ROOT / "tools", tmp_path / "tools", ignore=shutil.ignore_patterns("__pycache__"))
    (tmp_path / "tests/golden").mkdir(parents=True)
    shutil.copy(ROOT / "tests/golden/torch_names.json", tmp_path / "tests/golden")
    added(tmp_path / "netcl/ops/pointwise.py", 'unary("softsign"', ROW)
    added(tmp_path / "netcl/nn/activation.py", "Softsign = ", LAYER)
    environment = {**os.environ, "PYTHONPATH": str(tmp_path), "NETCL_DEVICE": "cpu"}
    for command in (["tools/op_stubs.py"], ["-c", PROGRAM]):
        done = subprocess.run([sys.executable, *command], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0 and not done.stdout, done.stdout + done.stderr
    stub = (tmp_path / "netcl/autograd/op_functions.pyi").read_text(encoding="utf-8")
    assert "def softshrink_test(input: _Operand, lambd: float = 0.5" in stub
    assert (tmp_path / "netcl/core/method_names.py").read_text(encoding="utf-8").count(" softshrink_test_ ") == 1


@pytest.fixture
def trial(monkeypatch):
    """The same two, made by a program that runs."""
    for table in ("ACTIVATIONS", "IN_PLACE_LAYERS"):
        monkeypatch.setattr(activation, table, getattr(activation, table).copy())
    exec(ROW, {"unary": unary, "np": np})
    yield activation.activation_class("SoftshrinkTest", "softshrink_test", *EXAMPLE, inplace=True)
    unregister("softshrink_test")
    F._in_place.cache_clear()


def test_every_form_of_a_new_op_has_values_and_gradient(device, trial):
    with netcl.device(device):
        forms = (F.softshrink_test, trial(), lambda x: x.softshrink_test(), lambda x: (x * 1.0).softshrink_test_())
        for form in forms:
            x = netcl.tensor([-3.0, 0.25, 2.0], requires_grad=True)
            y = form(x)
            (y * netcl.tensor([1.0, 2.0, 3.0])).sum().backward()
            assert (y.tolist(), x.grad.tolist()) == ([-2.5, 0.0, 1.5], [1.0, 0.0, 3.0])
        x = netcl.tensor([-3.0, 0.25])
        assert x.softshrink_test_(1.0) is x and x.tolist() == [-2.0, 0.0]


def test_a_row_that_goes_takes_its_methods_along():
    row = Pointwise("softshrink_gone", "v0 * 2", ("2 * g",), lambda x: 2 * x, method=True)
    for _ in range(2):
        register(row)
        assert netcl.ones(2, device="cpu").softshrink_gone().tolist() == [2.0, 2.0]
        unregister("softshrink_gone")
        assert not hasattr(netcl.Tensor, "softshrink_gone") and not hasattr(netcl.Tensor, "softshrink_gone_")


def test_a_method_never_replaces_an_attribute_of_tensors():
    with pytest.raises(
        ValueError, match=r"\[detach\] Tensor must not have an attribute 'detach' already; choose another name, or method=False"
    ):
        register(Pointwise("detach", "v0", ("g",), lambda x: x, method=True))
    assert "detach" not in REGISTRY


def test_a_layer_of_an_expression_keeps_its_weights_and_ignores_what_it_does_not_use():
    loss = nn.BCEWithLogitsLoss(pos_weight=[2.0], device="cpu")
    assert dict(loss.named_buffers()).keys() == {"pos_weight"} and loss.state_dict().keys() == {"pos_weight"}
    assert nn.ReLU(inplace=True).inplace and repr(nn.LeakyReLU(0.1, True)) == "LeakyReLU(negative_slope=0.1)"
