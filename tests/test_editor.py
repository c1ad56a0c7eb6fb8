"""What editors, notebooks and tracebacks show: types, signatures, HTML, reprs, and the user's line."""

from __future__ import annotations

import importlib.util
import inspect
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import netcl
from netcl import nn, optim
from netcl.data import DataLoader, TensorDataset
from netcl.optim.schedule import ReduceLROnPlateau, StepLR
from netcl.trainer import History, Trainer

ROOT = Path(__file__).parent.parent
PLANTED = """
import netcl
from netcl import nn
from netcl.nn import functional as F

x = netcl.randn(4, 3, device="cpu", generator=netcl.Generator())
model = nn.Sequential(nn.Linear(3, 2, device="cpu", dtype="float32"), nn.ReLU(inplace=True))
total = x.sum(dim=1).add_(1.0, alpha=2) + x.sum(axis=1, keepdims=False)
x.sum(dimm=1)
nn.Linear("three", 2)
x.no_such_method()
text: str = x.mean()
netcl.softmx(x)
F.cross_entropy(x, total, lable_smoothing=0.1)
nn.MaxPool2d(kernel=2)
x.reshape("a")
"""


# ---- types


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("mypy") is None, reason="mypy is a development dependency")
def test_mypy_finds_planted_errors_and_none_in_the_examples(tmp_path):
    script = tmp_path / "planted.py"
    script.write_text(PLANTED, encoding="utf-8")
    command = [sys.executable, "-m", "mypy", "--no-error-summary"]  # with the cache of the run that checks netcl itself
    done = subprocess.run([*command, str(script), "examples"], capture_output=True, text=True, cwd=ROOT, timeout=280)
    found = sorted(int(line) for line in re.findall(r"^[^\n]*planted\.py:(\d+): error", done.stdout, re.M))
    assert found == [9, 10, 11, 12, 13, 14, 15, 16], done.stdout + done.stderr
    assert "examples" not in done.stdout, done.stdout


def test_the_package_says_that_it_is_typed():
    assert (ROOT / "netcl/py.typed").exists()


def test_signatures_of_methods_are_those_of_the_ops_in_torchs_words():
    x = netcl.ones(2)
    assert str(inspect.signature(x.sum)) == "(dim=None, keepdim=False, *, out=None, dtype=None)"
    assert list(inspect.signature(x.topk).parameters) == ["k", "dim", "largest", "sorted"]
    assert list(inspect.signature(x.add_).parameters) == ["other", "out", "alpha"]
    assert list(inspect.signature(netcl.Tensor.softmax).parameters) == ["self", "dim", "dtype"]
    names = [name for name in dir(netcl.Tensor) if name[0] != "_" and inspect.isfunction(getattr(netcl.Tensor, name))]
    assert all(inspect.signature(getattr(netcl.Tensor, name)) for name in names)


# ---- notebooks and reprs


def test_html_of_a_tensor(device):
    with netcl.device(device):
        html = netcl.arange(24).reshape(12, 2)._repr_html_()
        assert html.startswith("<table><caption>Tensor (12, 2) int64 on ") and html.count("<tr>") == 11 and "<td>23</td>" in html
        assert "..." in html and netcl.ones(1, 1, 1)._repr_html_().startswith("<pre>Tensor([[[1.]]]")
        html = netcl.tensor([0.123456], requires_grad=True)._repr_html_()
        assert html.endswith(", requires_grad</caption><tr><td>0.1235</td></tr></table>")


def test_html_of_a_module_and_a_history():
    html = nn.Sequential(nn.Linear(2, 3), nn.ReLU())._repr_html_()
    assert "Sequential, 9 parameters" in html and "<td>in_features=2, out_features=3, bias=True</td><td>9</td>" in html
    rows = [{"epoch": 0, "loss": 2.0}, {"epoch": 1, "loss": 1.5, "val_<loss>": 3.0}]
    assert History(rows)._repr_html_().endswith("<th>val_&lt;loss&gt;</th></tr><tr><td>1</td><td>2</td><td></td></tr>"
                                                "<tr><td>2</td><td>1.5</td><td>3</td></tr></table>")  # fmt: skip


def test_reprs():
    with netcl.device("cpu"):
        model = nn.Linear(2, 2)
        optimizer = optim.SGD(model.parameters(), lr=0.5)
        loader = DataLoader(TensorDataset(np.arange(5)), batch_size=2, shuffle=True)
        assert repr(loader) == (
            "DataLoader(TensorDataset of 5, 3 batches, batch_size=2, shuffle=True, drop_last=False, num_workers=0, epoch=0)"
        )
        assert repr(StepLR(optimizer, 3)) == "StepLR(step_size=3, gamma=0.1, last_epoch=0, lr=[0.5])"
        assert repr(ReduceLROnPlateau(optimizer)).startswith("ReduceLROnPlateau(mode=min, factor=0.1, patience=10, ")
        assert repr(Trainer(model, optimizer, metrics=["accuracy"])) == "Trainer(Linear, SGD, metrics=['accuracy'], epoch=0, step=0)"


# ---- tracebacks

FAULTY = """
import threading
import netcl
from netcl import nn
class Net(nn.Module):
    def forward(self, x):
        return x @ netcl.ones(3, 2)  # here
def work():
    Net()(netcl.ones(4, 5))
if {thread}:
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
else:
    work()
"""


def said(folder, **form):
    script = folder / "faulty.py"
    script.write_text(FAULTY.format(**{"thread": False, **form}), encoding="utf-8")
    environment = {**os.environ, "NETCL_DEVICE": "cpu", "NETCL_TRACEBACK": form.pop("shown", "short")}
    return subprocess.run([sys.executable, script], capture_output=True, text=True, env=environment, cwd=ROOT).stderr


@pytest.mark.parametrize("thread", [False, True])
def test_tracebacks_end_in_the_users_line(tmp_path, thread):
    text = said(tmp_path, thread=thread)
    files = re.findall(r'File "([^"]+)"', text)
    assert [name for name in files if "netcl" in Path(name).parts and "faulty" not in name] == [], text
    assert Path(files[-1]).name == "faulty.py" and "# here" in text and "ShapeError: [matmul]" in text


def test_a_variable_shows_every_frame(tmp_path):
    text = said(tmp_path, shown="full")
    assert "ShapeError: [matmul]" in text and re.search(r"netcl.core.methods\.py", text)


def test_other_errors_are_told_in_full():
    from netcl.core.tracebacks import without_own_frames

    for error in (KeyError("x"), ValueError("not of netcl's form")):
        try:
            netcl.core.hooks.hooks.call("no such op", error)
        except NotImplementedError as caught:
            caught.args = (str(error),)
            before = caught.__traceback__
            assert not without_own_frames(caught) and caught.__traceback__ is before and before.tb_next is not None
