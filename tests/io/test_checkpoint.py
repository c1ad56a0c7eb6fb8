"""Checkpoints: a run that goes on from one is, bit for bit, the run that never stopped."""

from __future__ import annotations

import os

import numpy as np
import pytest

from netcl import nn, optim
from netcl.core.device import device as activate
from netcl.core.tensor import Tensor
from netcl.data import RandomSampler
from netcl.io import FileError, checkpoints, latest, load_checkpoint, save_checkpoint
from netcl.ops import random


@pytest.fixture(autouse=True)
def on_numpy():
    with activate("cpu"):
        random.manual_seed(1)
        yield


class Loader:
    """Stands for a data loader: an order, and a place in it."""

    def __init__(self, seed: int):
        self.rng, self.at = np.random.default_rng(seed), 0

    def batch(self) -> np.ndarray:
        self.at += 1
        return self.rng.standard_normal((6, 5)).astype(np.float32)

    def state_dict(self) -> dict:
        return {"at": self.at, "rng": self.rng.bit_generator.state}

    def load_state_dict(self, state: dict) -> None:
        self.at, self.rng.bit_generator.state = state["at"], state["rng"]


class Run:
    """A training with every kind of state."""

    def __init__(self, kind: str, queue=None):
        where = {} if queue is None else {"queue": queue}
        layers = [nn.Linear(5, 7, **where), nn.BatchNorm1d(7, **where), nn.ReLU(), nn.Dropout(0.3), nn.Linear(7, 1, **where)]
        self.model = nn.Sequential(*layers)
        groups = [
            {"params": self.model[0].parameters(), "lr": 0.02},
            {"params": [*self.model[1].parameters(), *self.model[4].parameters()]},
        ]
        self.optimizer = {
            "sgd": lambda: optim.SGD(groups, lr=0.05, momentum=0.9, nesterov=True),
            "adam": lambda: optim.Adam(groups, lr=0.01, amsgrad=True),
            "adamw": lambda: optim.AdamW(groups, lr=0.01),
            "rmsprop": lambda: optim.RMSprop(groups, lr=0.01, momentum=0.5),
            "lion": lambda: optim.Lion(groups, lr=0.01),
        }[kind]()
        self.scheduler = optim.WarmupCosine(self.optimizer, 3, 20)
        self.ema = optim.ModelEMA(self.model, decay=0.9)
        self.loader, self.rng, self.losses = Loader(4), np.random.default_rng(9), []

    def parts(self) -> dict:
        names = ("model", "optimizer", "scheduler", "ema", "loader", "rng")
        return {name: getattr(self, name) for name in names}

    def steps(self, count: int) -> None:
        for _ in range(count):
            x = self.loader.batch() + self.rng.normal(0, 0.1)
            self.optimizer.zero_grad()
            loss = ((self.model(x.astype(np.float32)) - x.sum(axis=1, keepdims=True).astype(np.float32)) ** 2).mean()
            loss.backward()
            self.optimizer.step(max_norm=1.0)
            self.scheduler.step()
            self.ema.update()
            self.losses.append(loss.item())

    def bits(self) -> dict:
        state = {name: t.to_host().tobytes() for name, t in self.model.state_dict().items()}
        shadow = {name: np.asarray(t).tobytes() for name, t in self.ema.state_dict().get("shadow", {}).items()}
        return {**state, "ema": shadow, "lr": [group["lr"] for group in self.optimizer.param_groups], "place": self.loader.at}


@pytest.mark.parametrize("kind", ["sgd", "adam", "adamw", "rmsprop", "lion"])
@pytest.mark.fault("run is cut and resumed", "in the middle, five optimizers", "equal to the bit")
def test_a_resumed_run_is_the_straight_run_bit_for_bit(tmp_path, kind):
    straight = Run(kind)
    straight.steps(4)
    path = save_checkpoint(tmp_path / "a.netcl", **straight.parts(), step=4, extra={"losses": straight.losses, "best": float("inf")})
    straight.steps(6)
    random.manual_seed(77)
    resumed = Run(kind)
    resumed.steps(1)  # leaves every kind of state somewhere else
    done = load_checkpoint(path, **resumed.parts())
    assert (done.step, done.extra["best"], done.extra["losses"]) == (4, float("inf"), straight.losses[:4])
    resumed.losses.clear()
    resumed.steps(6)
    assert resumed.losses == straight.losses[4:] and resumed.bits() == straight.bits()


def test_a_resumed_run_on_a_device(device, tmp_path):
    random.manual_seed(5)
    straight = Run("adam", device.queue)
    straight.steps(2)
    path = save_checkpoint(tmp_path / "a.netcl", **straight.parts(), step=2)
    straight.steps(3)
    resumed = Run("adam", device.queue)
    load_checkpoint(path, **resumed.parts())
    resumed.steps(3)
    assert resumed.losses == straight.losses[2:] and resumed.bits() == straight.bits()
    assert all(p.queue is device.queue for p in resumed.model.parameters())


def test_the_last_few_are_kept_and_the_newest_is_found(tmp_path):
    model = nn.Linear(2, 2)
    folder = tmp_path / "run"
    for step in (1, 5, 20, 1234567):
        assert save_checkpoint(folder, model=model, step=step, keep_last=3) == folder / f"step-{step:06d}.netcl"
    (folder / "step-notes.txt").write_text("")
    assert [path.name for path in checkpoints(folder)] == ["step-000005.netcl", "step-000020.netcl", "step-1234567.netcl"]
    assert latest(folder) == folder / "step-1234567.netcl" and load_checkpoint(folder, model=model).step == 1234567
    # Starting anew in an old folder must not remove what was just written.
    assert save_checkpoint(folder, model=model, step=1, keep_last=1).exists() and len(checkpoints(folder)) == 1
    assert latest(tmp_path) is None
    with pytest.raises(FileNotFoundError, match=r"\[load_checkpoint\] the folder must have a checkpoint"):
        load_checkpoint(tmp_path, model=model)


def test_parts_can_be_left_out_when_loading_but_not_made_up(tmp_path):
    run = Run("adam")
    run.steps(1)
    path = save_checkpoint(tmp_path / "a.netcl", model=run.model, optimizer=run.optimizer, extra={"t": Tensor.ones((2,))})
    assert load_checkpoint(path).extra["t"].tolist() == [1, 1]
    assert load_checkpoint(path, model=run.model).step == 0
    with pytest.raises(FileError, match=r"\[load_checkpoint\] the checkpoint must contain: ema; saved=\['model', 'optimizer'\]"):
        load_checkpoint(path, ema=run.ema)


def test_wrong_arguments_are_told(tmp_path):
    with pytest.raises(TypeError, match=r"\[save_checkpoint\] the scheduler must have a method state_dict\(\); given=int"):
        save_checkpoint(tmp_path / "a.netcl", scheduler=3)
    with pytest.raises(TypeError, match=r"\[save_checkpoint\] rng must be a NumPy generator or a dictionary of them"):
        save_checkpoint(tmp_path / "a.netcl", rng=np.random.RandomState(3))
    with pytest.raises(ValueError, match=r"\[save_checkpoint\] step must be a whole number of at least 0; step=-1"):
        save_checkpoint(tmp_path / "a.netcl", step=-1)
    with pytest.raises(ValueError, match=r"\[save_checkpoint\] keep_last must be a whole number of at least 1; keep_last=0"):
        save_checkpoint(tmp_path, keep_last=0)
    with pytest.raises(ValueError, match=r"\[save_checkpoint\] keep_last must be a whole number of at least 1; keep_last=1.5"):
        save_checkpoint(tmp_path, keep_last=1.5)
    with pytest.raises(FileError, match=r"\[save_checkpoint\] a builtins.set cannot be saved; at=extra.seen"):
        save_checkpoint(tmp_path / "a.netcl", extra={"seen": {1}})
    assert os.listdir(tmp_path) == []


def test_several_generators_and_random_streams_come_back(tmp_path):
    rngs = {"order": np.random.default_rng(1), "noise": np.random.Generator(np.random.MT19937(2))}
    random.manual_seed(11)
    Tensor.rand(5)
    path = save_checkpoint(tmp_path / "a.netcl", rng=rngs)
    expected = [Tensor.rand(3).tolist(), list(RandomSampler(range(20))), *[rng.random() for rng in rngs.values()]]
    random.manual_seed(0)
    load_checkpoint(path, rng=rngs)
    assert [Tensor.rand(3).tolist(), list(RandomSampler(range(20))), *[rng.random() for rng in rngs.values()]] == expected
