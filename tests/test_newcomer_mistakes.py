"""Typical mistakes of the first hour. Each message names the fix, which is the second text of a row."""

from __future__ import annotations

import re
import sys
from functools import partial

import numpy as np
import pytest

import netcl
import netcl.autograd as ag
from netcl import cli, io, nn, optim
from netcl.data import DataLoader, TensorDataset, datasets
from netcl.trainer import EarlyStopping, ModelCheckpoint, Progress, Trainer

X, Y = np.ones((4, 2), np.float32), np.array([0, 1, 0, 1])


def trainer(**options):
    model = nn.Linear(2, 2)
    return Trainer(model, optim.SGD(model.parameters(), lr=0.1), **{"callbacks": [Progress("off")], **options})


def leaf():
    return netcl.ones((3,)).requires_grad_()


def twice():
    y = (leaf() * 2).sum()
    y.backward()
    y.backward()


class NoForward(nn.Module):
    pass


MISTAKES = {
    # shapes
    "a product of matrices that do not fit": (lambda: netcl.ones((2, 3)) @ netcl.ones((4, 3)), "transpose b: a @ b.mT"),
    "another number of features": (lambda: nn.Linear(10, 2)(netcl.ones((4, 8))), "x must have in_features along its last axis"),
    "flatten forgotten": (lambda: nn.Linear(64, 10)(netcl.ones((2, 1, 8, 8))), "flatten the input first: nn.Flatten()"),
    "an image without a batch": (lambda: nn.Conv2d(3, 8, 3)(netcl.ones((3, 8))), "x is (batch, channels, height, width)"),
    "channels last": (lambda: nn.Conv2d(3, 8, 3)(netcl.ones((1, 8, 8, 3))), "x.permute(0, 3, 1, 2)"),
    "gray images for a layer of colors": (lambda: nn.Conv2d(3, 8, 3)(netcl.ones((1, 1, 8, 8))), "set in_channels of the layer"),
    "an axis that is not there": (lambda: netcl.ones((2, 3)).sum(dim=2), "it must be an integer in -2..1"),
    "softmax over an axis that is not there": (lambda: netcl.softmax(netcl.ones((2, 3)), dim=5), "it must be an integer in -2..1"),
    "outputs (N, 1), targets (N,)": (lambda: ag.mse_loss(netcl.ones((4, 1)), netcl.ones((4,))), "pass target.reshape((4, 1))"),
    "batch norm of one sample": (lambda: nn.BatchNorm1d(4)(netcl.ones((1, 4))), "model.eval()"),
    "one-hot labels of another width": (
        lambda: ag.cross_entropy(netcl.ones((2, 3)), netcl.ones((2, 4))), "class numbers of shape (2,) or probabilities of shape (2, 3)",
    ),
    # lists
    **{f"a list of tensors in {name}": (partial(call, leaf()), "join the tensors with stack()") for name, call in {
        "add": lambda x: ag.add([x, x], 1.0), "x * list": lambda x: x * [x, x, x], "matmul": lambda x: ag.matmul([x, x], x),
        "sum": lambda x: ag.sum([x, x]), "a layer": lambda x: nn.Linear(3, 1)([[x, x]]), "where": lambda x: ag.where(x > 0, [x, x, x], x),
        "a loss": lambda x: nn.MSELoss()([x, x], np.ones((2, 3))), "x[i] =": lambda x: (x * 1).__setitem__(slice(2), [x[0], x[1]]),
    }.items()},
    # dtypes
    "a label that is no class": (lambda: ag.cross_entropy(netcl.ones((2, 3)), netcl.tensor([0, 3])), "classes are 0..2; -100 is ignored"),
    "a mask of uint8": (lambda: netcl.ones((3,))[netcl.tensor([0, 1, 1], dtype="uint8")], 'cast a mask to "bool"'),
    "an index of floats": (lambda: nn.Embedding(10, 4)(netcl.ones((2,))), 'index.to("int64")'),
    "the mean of integers": (lambda: netcl.tensor([1, 2]).mean(), "x.float().mean()"),
    "texts in a tensor": (lambda: netcl.tensor(["a", "b"]), "convert it to one of bool, uint8, int8"),
    "a dtype that does not exist": (lambda: netcl.ones((2,), dtype="flaot32"), "known: bool, uint8, int8"),
    # devices
    "a device that does not exist": (lambda: netcl.ones((2,), device="9:9"), "there are: "),
    # gradients
    "backward of many numbers": (lambda: (leaf() * 2).backward(), "reduce the tensor to a scalar first"),
    "backward without requires_grad": (lambda: netcl.ones((3,)).sum().backward(), "set requires_grad=True on the leaves"),
    "backward twice": (twice, "pass retain_graph=True to the first backward"),
    "a parameter changed in place": (lambda: leaf().add_(1), "do it inside no_grad()"),
    # models
    "no forward": (lambda: NoForward()(netcl.ones((1, 2))), "define forward(self, ...)"),
    "a function as a layer": (lambda: nn.Sequential(nn.Linear(2, 2), netcl.relu), "use a layer (nn.ReLU() for relu)"),
    "a misspelt layer": (lambda: nn.Lineer, "the nearest names are Linear"),
    "a misspelt function": (lambda: netcl.matmull, "the nearest names are matmul"),
    "weights of another model": (
        lambda: nn.Sequential(nn.Linear(2, 2)).load_state_dict(nn.Linear(2, 2).state_dict()), "pass strict=False to load the matching ones",
    ),
    # optimizers
    "a model instead of its parameters": (lambda: optim.Adam(nn.Linear(2, 2), lr=0.1), "pass model.parameters()"),
    "no parameters": (lambda: optim.SGD([], lr=0.1), "pass model.parameters()"),
    "a negative learning rate": (lambda: optim.SGD(nn.Linear(2, 2).parameters(), lr=-1), "lr must be a number, at least 0"),
    "the optimizer of another model": (
        lambda: Trainer(nn.Linear(2, 2), optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1)), "create it with model.parameters()",
    ),
    # training
    "a metric by another name": (lambda: trainer(metrics=["acc"]), "known are accuracy, f1, auc"),
    "batches without targets": (lambda: trainer().fit([X]), "a batch must be a pair (x, y)"),
    "x without y": (lambda: trainer().fit(X), "fit(x, y)"),
    "x and y of unequal lengths": (lambda: trainer().fit(X, Y[:2]), "the same number of samples; x=(4, 2), y=(2,)"),
    "an iterator that is used up": (lambda: trainer().fit(iter([])), "pass a list"),
    "a callback that is not called": (lambda: trainer(callbacks=[EarlyStopping]), "call it: EarlyStopping(...)"),
    "validation forgotten": (lambda: trainer(callbacks=[Progress("off"), EarlyStopping()]).fit([(X, Y)]), "pass val= to fit"),
    "a loss that is no tensor": (lambda: trainer(loss_fn=lambda out, y: 1.0).fit([(X, Y)]), "loss_fn must return a Tensor"),
    "resume without checkpoints": (lambda: trainer().fit([(X, Y)], resume="auto"), "add one to the callbacks, or name a checkpoint"),
    # data and files
    "a batch size of zero": (lambda: DataLoader(TensorDataset(X), batch_size=0), "batch_size must be a whole number of at least 1"),
    "a dataset without samples by number": (lambda: DataLoader(5), "write __len__ and __getitem__"),
    "arrays of unequal lengths": (lambda: TensorDataset(X, Y[:3]), "and the same length; lengths=[4, 3]"),
    "MNIST that is not there": (lambda: datasets.mnist("nowhere"), "download the four files"),
}  # fmt: skip


def test_there_are_forty():
    assert len(MISTAKES) + len(COMMANDS) >= 40


@pytest.mark.parametrize("name", MISTAKES)
def test_the_message_names_the_fix(name, monkeypatch):
    monkeypatch.setenv("NETCL_DEVICE", "cpu")
    mistake, fix = MISTAKES[name]
    with pytest.raises(Exception, match=re.escape(fix)) as caught:
        mistake()
    assert str(caught.value).startswith("[") or isinstance(caught.value, AttributeError)


COMMANDS = {
    "a misspelt data set": (["train", "--data", "mnst"], "known are digits, mnist"),
    "a misspelt model": (["train", "--model", "resnet19"], "did you mean resnet18"),
    "a misspelt setting of a recipe": (["train", "recipe.json"], "did you mean epochs?"),
    "a table without a target": (["train", "--data", "csv:table.csv"], "columns are a, b; --target"),
    "a file that is not there": (["train", "--data", "csv:nowhere.csv", "--target", "a"], "paths are relative to the current folder"),
    "a folder that is no run": (["report", "."], "pass the folder of a run"),
    "a model file that is none": (["predict", "table.csv", "table.csv"], "pass a complete file of the right format"),
    "a device that does not exist": (["train", "--device", "9:9"], "there are: "),
    "a misspelt op": (["selftest", "relo"], "did you mean relu?"),
}


@pytest.mark.parametrize("name", COMMANDS)
def test_the_command_names_the_fix_in_one_line(name, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "table.csv").write_text("a,b\n1,2\n")
    (tmp_path / "recipe.json").write_text('{"epoch": 3}')
    words, fix = COMMANDS[name]
    status = cli.main([*words, *([] if words[0] == "report" or "--device" in words else ["--device", "cpu"])])
    err = capsys.readouterr().err
    assert status == 1 and fix in err and len(err.splitlines()) == 1, err


def test_a_package_that_is_missing_is_named(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "tensorboardX", None)
    assert cli.main(["train", "--tensorboard", "--device", "cpu", "--run", str(tmp_path)]) == 1
    assert capsys.readouterr().err == "[TensorBoard] tensorboardX is required; pip install tensorboardX\n"


def test_a_used_folder_and_a_damaged_file(tmp_path, monkeypatch):
    monkeypatch.setenv("NETCL_DEVICE", "cpu")
    first = trainer(callbacks=[Progress("off"), ModelCheckpoint(tmp_path)])
    first.fit([(X, Y)])
    with pytest.raises(io.FileError, match="overwrite=True, --overwrite"):
        trainer(callbacks=[Progress("off"), ModelCheckpoint(tmp_path)]).fit([(X, Y)])
    (tmp_path / "m.netcl").write_text("x")
    with pytest.raises(io.FileError, match="pass a complete file of the right format"):
        io.load_model(tmp_path / "m.netcl")
