"""Progress stays readable: on a terminal, in a file, without colour, in ASCII, in 60 columns."""

from __future__ import annotations

import io
import json
import math
import re
import threading
import time
from types import SimpleNamespace

import numpy as np
import pytest

from netcl import nn, optim
from netcl.core.device import manager
from netcl.io import latest, load_checkpoint
from netcl.runtime.cache import program_cache
from netcl.trainer import ModelCheckpoint, Progress, Trainer, progress

DATA = [(np.eye(4, dtype=np.float32), np.arange(4) % 2)] * 3


class Terminal(io.StringIO):
    """A stream that says it is a terminal."""

    encoding = "ascii"

    def isatty(self):
        return True


def shown(stream, style="auto", **options):
    model = nn.Linear(manager.default("cpu"), 4, 2)
    trainer = Trainer(model, optim.SGD(model.parameters(), lr=0.1), metrics=["accuracy", "top2"], callbacks=[Progress(style, stream)])
    trainer.fit(DATA, val=DATA, epochs=2, **options)
    return stream.getvalue()


def test_plain_lines_where_there_is_no_terminal(monkeypatch):
    monkeypatch.setattr(progress, "_PLAIN_SECONDS", math.inf)
    lines = shown(io.StringIO()).splitlines()
    assert len(lines) == 2 and lines[0].startswith("epoch 1/2  loss ") and "val_accuracy" in lines[1] and "\x1b" not in lines[0]


def test_a_long_epoch_is_told_in_between(monkeypatch):
    monkeypatch.setattr(progress, "_PLAIN_SECONDS", -1.0)
    monkeypatch.setattr(progress, "_FIRST_SECONDS", -1.0)
    assert re.search(
        r"epoch 1/2 2/3  training  (ETA \d+:\d\d  [\d.e+]+ samples/s|\d+:\d\d so far)  loss ", shown(io.StringIO(), log_every=2)
    )


@pytest.mark.parametrize("style", ["auto", "bar", "plain"])
def test_a_narrow_terminal(style, monkeypatch):
    for name, value in {"COLUMNS": "60", "LINES": "24", "NO_COLOR": "1", "TERM": "xterm", "LANG": "C"}.items():
        monkeypatch.setenv(name, value)
    text = shown(Terminal(), style, log_every=1)
    lines = text.replace("\r", "\n").splitlines()
    assert text.isascii() and max(map(len, lines)) <= 60 and "\x1b" not in text
    assert any(line.startswith("epoch 2/2  loss ") for line in lines)
    assert any(re.match(r"epoch 1/2 \d/3  training", line) for line in lines) == (style != "plain")


def test_off_says_nothing_and_nonsense_is_refused(monkeypatch):
    assert shown(io.StringIO(), "off") == ""
    with pytest.raises(ValueError, match=r"\[Progress\] style must be auto, bar, plain or off; style='loud'"):
        Progress("loud")
    monkeypatch.setenv("NETCL_PROGRESS", "plain")
    assert Progress().style == "plain"


def halfway(**changes):
    """A progress in the middle of a run of 10 epochs of 100 batches, without a trainer's thread."""
    shown = Progress("bar", Terminal())
    values = {"epoch": 1, "epochs": 10, "batch": 0, "batches": 100, "samples": 0, "phase": "training", "step": 0}
    shown.trainer = SimpleNamespace(**{**values, **changes})
    return shown


def test_the_time_left_and_the_pace(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    shown = halfway()
    shown.trainer.batch, shown.trainer.samples = 10, 320  # the first reading comes after compiling
    shown._pace.note(shown.trainer)
    now[0] = 101.0
    assert shown.state() == "epoch 2/10 10/100  training  0:01 so far"
    now[0], shown.trainer.batch, shown.trainer.samples = 102.0, 20, 640
    shown._pace.note(shown.trainer)
    shown._numbers = "loss 0.5"
    assert shown.state() == "epoch 2/10 20/100  training  ETA 2:56  160 samples/s  loss 0.5"
    assert shown.state(120).startswith("epoch 2/10 20/100  [####................]  training  ")
    assert shown.state(40) == "epoch 2/10 20/100  training  ETA 2:56"
    now[0] = 105.0  # nothing was reported since: the time that is left still falls
    assert shown.state(40) == "epoch 2/10 20/100  training  ETA 2:53"
    shown.trainer.batches = None
    assert shown.state() == "epoch 2/10 batch 20  training  0:05 so far  160 samples/s  loss 0.5"


def test_the_pace_is_that_of_the_epoch(monkeypatch):
    """The samples of an epoch are not divided by the seconds of several, whose first one compiled."""
    now = [0.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    shown = halfway(batches=20)
    for epoch, batch, seconds in ((0, 10, 50), (0, 20, 90), (1, 10, 100), (1, 20, 102)):
        now[0], shown.trainer.epoch, shown.trainer.batch, shown.trainer.samples = seconds, epoch, batch, 64 * batch
        shown._pace.note(shown.trainer)
    assert shown._pace.speed == "320 samples/s" and shown._pace.left(shown.trainer) == "ETA 4:37"


def test_the_kernel_that_is_compiled_is_named(monkeypatch):
    compiled = [(54, "conv2d_tiled, other")]
    monkeypatch.setattr(progress.program, "compiling", lambda: compiled[-1])
    monkeypatch.setattr(progress.time, "monotonic", lambda: 7.0)
    shown = halfway()
    shown._programs = 40
    assert shown.state() == "epoch 2/10 0/100  compiling 14: conv2d tiled  0:00 so far"
    shown._needed = 30
    assert shown.state() == "epoch 2/10 0/100  compiling 14 of about 30: conv2d tiled  0:00 so far"
    shown._needed = 13
    assert shown.state() == "epoch 2/10 0/100  compiling 14: conv2d tiled  0:00 so far"
    compiled.append((47, "reduce_rows"))  # its first launch, after the builds: the number does not fall
    assert shown.phase() == "compiling 14: reduce rows"


def test_the_second_run_of_a_kind_knows_how_many_programs_it_needs(monkeypatch, tmp_path):
    monkeypatch.setenv("NETCL_CACHE_DIR", str(tmp_path))
    counts = iter([5, 17, 17, 20, 20, 20])  # before and after each run
    monkeypatch.setattr(progress.program, "program_count", lambda: next(counts))
    needed = []
    for inputs in (4, 4, 5):
        model, bar = nn.Linear(manager.default("cpu"), inputs, 2), Progress("bar", Terminal())
        data = [(np.eye(4, inputs, dtype=np.float32), np.arange(4) % 2)]
        Trainer(model, optim.SGD(model.parameters(), lr=0.1), callbacks=[bar]).fit(data)
        needed.append(bar._needed)
    assert needed == [0, 12, 0]
    assert list(json.loads((tmp_path / "programs.json").read_text()).values()) == [12]
    for damaged in ("no JSON", "[]", '{"kind": "many"}'):
        (tmp_path / "programs.json").write_text(damaged)
        assert program_cache.needed("kind") == 0


def test_the_line_moves_while_nothing_is_reported():
    """As while a compiler runs: the thread moves it, within two seconds."""
    stream = Terminal()

    class Slow:
        def __len__(self):
            return 1

        def __iter__(self):
            deadline = time.monotonic() + 30
            while "epoch 1/1 0/1  training" not in stream.getvalue() and time.monotonic() < deadline:
                time.sleep(0.01)
            yield DATA[0]

    model = nn.Linear(manager.default("cpu"), 4, 2)
    before = threading.enumerate()
    Trainer(model, optim.SGD(model.parameters(), lr=0.1), callbacks=[Progress("bar", stream)]).fit(Slow())
    assert stream.getvalue().startswith("\repoch 1/1 0/1  training")
    assert not [thread for thread in threading.enumerate() if thread.name == "netcl-progress" and thread not in before]


def test_an_error_ends_the_line():
    stream = Terminal()
    model = nn.Linear(manager.default("cpu"), 4, 2)
    trainer = Trainer(model, optim.SGD(model.parameters(), lr=0.1), callbacks=[Progress("bar", stream)])
    before = threading.enumerate()
    with pytest.raises(ValueError, match="must have at least one batch"):
        trainer.fit([])
    assert not [thread for thread in threading.enumerate() if thread.name == "netcl-progress" and thread not in before]
    assert stream.getvalue() == "" or stream.getvalue().endswith("\r")


def test_phases_are_timed(tmp_path):
    model = nn.Linear(manager.default("cpu"), 4, 2)
    trainer = Trainer(model, optim.SGD(model.parameters(), lr=0.1), callbacks=[Progress("off"), ModelCheckpoint(tmp_path)])
    trainer.fit(DATA, val=DATA)
    assert set(trainer.phase_seconds) == {"training", "validating", "saving"} and min(trainer.phase_seconds.values()) >= 0
    before, earlier = trainer.seconds, latest(tmp_path)
    assert before > sum(trainer.phase_seconds.values())
    trainer.load(earlier)
    spent = load_checkpoint(earlier).extra
    trainer.fit(DATA, val=DATA, epochs=2, resume=tmp_path)
    assert trainer.seconds > spent["seconds"] and trainer.phase_seconds["training"] > spent["phases"]["training"] > 0
