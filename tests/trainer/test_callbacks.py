"""Callbacks: when they stop a run, what they keep and what they write."""

from __future__ import annotations

import csv
import errno
import io
import json
import math
import subprocess
import sys

import numpy as np
import pytest

import netcl.autograd as ag
from netcl import manual_seed, nn, optim
from netcl.core.device import manager
from netcl.core.hooks import hooks
from netcl.distributed import World
from netcl.io import FileError, checkpoints, run_of
from netcl.trainer import (
    Callback,
    CSVLogger,
    EarlyStopping,
    JSONLLogger,
    LRMonitor,
    ModelCheckpoint,
    NaNGuard,
    Progress,
    Report,
    Trainer,
    read_jsonl,
)
from netcl.trainer.report_html import write_report
from netcl.trainer.run import restore_best

DATA = [(np.eye(4, dtype=np.float32), np.arange(4) % 2)]


def make(*callbacks, lr=0.5, **options):
    model = nn.Linear(manager.default("cpu"), 4, 2)
    return Trainer(model, optim.SGD(model.parameters(), lr=lr), callbacks=[Progress("off"), *callbacks], **options)


class Numbers(Callback):
    """Gives the epochs a number of the test's choice."""

    order = -1

    def __init__(self, *values, name="val_loss"):
        self.values, self.name = values, name

    def on_epoch_end(self, epoch, logs):
        logs[self.name] = self.values[epoch]


def test_keras_names_every_moment():
    seen = []

    class Note(Callback):
        def __getattribute__(self, name):
            if name.startswith("on_"):
                seen.append(name)
            return super().__getattribute__(name)

    trainer = make(Note())
    trainer.fit(DATA, val=DATA)
    trainer.predict(DATA)
    moments = [name for name in dir(Callback) if name.startswith("on_") and name != "on_interrupt"]
    assert sorted(set(seen)) == moments
    order = ["train_begin", "epoch_begin", "train_batch_begin", "train_batch_end", "test_begin", "test_batch_begin", "test_batch_end"]
    assert seen[:10] == [f"on_{name}" for name in [*order, "test_end", "epoch_end", "train_end"]]


def test_early_stopping_waits_and_brings_the_best_back():
    stop = EarlyStopping(patience=2, restore_best=True)
    trainer = make(Numbers(3.0, 1.0, 2.0, float("nan"), 0.0), stop)
    kept = {}

    class Keep(Callback):
        def on_epoch_end(self, epoch, logs):
            kept[epoch] = self.trainer.model.weight.to_host().copy()

    trainer.callbacks.callbacks.append(Keep())
    trainer.fit(DATA, epochs=5)
    assert len(trainer.history.rows) == 4 and stop.best_epoch == 1
    np.testing.assert_array_equal(trainer.model.weight.to_host(), kept[1])


def test_restored_averages_are_those_of_the_best_epoch(tmp_path):
    found = []

    class Each(Callback):
        def on_test_end(self, logs):
            found.append(logs["loss"])

    def run(epochs, resume=None):
        torn = make(EarlyStopping(patience=9, restore_best=True), Numbers(2.0, 1.0, 3.0, 4.0), Each(), ModelCheckpoint(tmp_path), lr=0.1)
        torn.ema = optim.ModelEMA(torn.model, 0.5)
        torn.fit(DATA, val=DATA, epochs=epochs, resume=resume)
        return torn

    run(2)
    trainer = run(4, "auto")
    assert trainer.evaluate(DATA)["loss"] == found[1] != found[3]


def test_a_checkpoint_between_accumulated_batches_is_refused(tmp_path):
    class Each(Callback):
        def on_train_batch_end(self, batch, logs):
            self.trainer.save(tmp_path / "each.netcl")

    with pytest.raises(RuntimeError, match=r"\[Trainer.save\] .*; accumulated=1, of=2; save where trainer.at_boundary is true"):
        make(Each(), accumulation_steps=2).fit(DATA * 2)


@pytest.mark.parametrize(("name", "values", "value"), [("val_loss", (math.nan, 1.0, 3.0), 1.0), ("val_accuracy", (0.1, 0.9, 0.5), 0.9)])
def test_the_restored_epoch_is_reported(tmp_path, name, values, value):
    keep = ModelCheckpoint(tmp_path, monitor=name)
    trainer = make(Numbers(*values, name=name), keep)
    trainer.fit(DATA, epochs=3)
    assert restore_best(trainer, keep, World()) == {"epoch": 2, "of": 3, "by": name, "value": value}


@pytest.mark.parametrize(("name", "rises"), [("val_mean_score", True), ("val_top5", True), ("lr_1", False), ("accident_loss", False)])
def test_the_direction_follows_from_the_words_of_a_name(name, rises):
    assert EarlyStopping(name).watch.sign == (-1.0 if rises else 1.0)
    with pytest.raises(ValueError, match=r"\[EarlyStopping\] mode must be min or max for a number whose name does not tell"):
        EarlyStopping("val_stop")


def test_a_resumed_run_may_watch_another_number_and_have_more_patience(tmp_path):
    def run(epochs, monitor, patience, resume=None):
        numbers = Numbers(1.0, 2.0, 3.0, 4.0), Numbers(0.5, 0.6, 0.7, 0.6, name="val_accuracy")
        stop, keep = EarlyStopping("val_loss", patience), ModelCheckpoint(tmp_path, monitor)
        trainer = make(*numbers, stop, keep)
        trainer.fit(DATA, epochs=epochs, resume=resume)
        return trainer.epoch, keep.watch.best

    assert run(4, "val_loss", 1) == (2, 1.0)
    assert run(4, "val_loss", 1, "auto") == (2, 1.0)  # it has ended
    assert run(4, "val_accuracy", 9, "auto") == (4, -0.7)


@pytest.mark.parametrize(("name", "values", "best"), [("val_loss", (2.0, 1.0, 3.0), 1), ("val_accuracy", (0.1, 0.9, 0.5), 1)])
def test_checkpoints_keep_the_last_and_the_best(tmp_path, name, values, best):
    keep = ModelCheckpoint(tmp_path, monitor=name, keep_last=2)
    make(Numbers(*values, name=name), keep).fit(DATA, epochs=3)
    assert [path.name for path in checkpoints(tmp_path)] == ["step-000002.netcl", "step-000003.netcl"]
    again = make()
    again.load(tmp_path / "best.netcl")
    assert again.epoch == best + 1 and len(again.history.rows) == best + 1


def test_a_new_run_refuses_the_checkpoints_of_another(tmp_path):
    log = tmp_path / "log.jsonl"
    make(JSONLLogger(log), ModelCheckpoint(tmp_path)).fit(DATA, epochs=3)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    with pytest.raises(FileError, match=r'newest=step-000003.netcl; continue that run \(resume="auto", --resume\), remove it'):
        make(JSONLLogger(log), ModelCheckpoint(tmp_path)).fit(DATA)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before  # nothing was written
    resumed = make(ModelCheckpoint(tmp_path))
    resumed.fit(DATA, epochs=4, resume="auto")
    assert {run_of(path) for path in tmp_path.glob("*.netcl")} == {resumed.run_id}
    new = make(ModelCheckpoint(tmp_path, overwrite=True))
    new.fit(DATA)
    assert [path.name for path in checkpoints(tmp_path)] == ["step-000001.netcl"] and new.run_id != resumed.run_id


def test_a_checkpoint_of_another_run_is_not_resumed(tmp_path):
    for name, epochs in (("a", 2), ("b", 1)):
        make(ModelCheckpoint(tmp_path / name)).fit(DATA, epochs=epochs)
    (tmp_path / "a" / "step-000002.netcl").rename(tmp_path / "b" / "step-000002.netcl")
    trainer = make(ModelCheckpoint(tmp_path / "b"))
    weight = trainer.model.weight.to_host().copy()
    with pytest.raises(FileError, match=r"the checkpoint must belong to the run of the folder.*resume it with a ModelCheckpoint"):
        trainer.fit(DATA, epochs=3, resume="auto")
    np.testing.assert_array_equal(trainer.model.weight.to_host(), weight)
    elsewhere = make(ModelCheckpoint(tmp_path / "c"))
    elsewhere.fit(DATA, epochs=3, resume=tmp_path / "b" / "step-000002.netcl")
    assert elsewhere.run_id == run_of(tmp_path / "a" / "step-000001.netcl") == run_of(tmp_path / "c" / "step-000003.netcl")


def test_a_number_that_is_not_there_is_named():
    with pytest.raises(
        ValueError, match=r"\[EarlyStopping\] the logs must have the monitored number 'val_f1'; pass val= to fit; available: "
    ):
        make(EarlyStopping("val_f1")).fit(DATA)


@pytest.mark.parametrize("action", ["raise", "stop"])
def test_a_loss_that_is_not_finite_ends_the_run(action):
    trainer = make(NaNGuard(action), loss_fn=lambda outputs, targets: (outputs * float("nan")).sum())
    if action == "raise":
        with pytest.raises(FloatingPointError, match=r"\[NaNGuard\] the loss must be finite; loss=nan"):
            trainer.fit(DATA * 5, epochs=3, log_every=1)
    else:
        trainer.fit(DATA * 5, epochs=3, log_every=1)
    assert trainer.step == 1


def test_logs_hold_every_epoch_and_go_on_after_a_resume(tmp_path):
    def run(epochs, resume):
        keep = ModelCheckpoint(tmp_path / "keep", overwrite=True)
        files = [JSONLLogger(tmp_path / "log.jsonl"), CSVLogger(tmp_path / "log.csv"), LRMonitor(), keep]
        make(*files, metrics=["accuracy"]).fit(DATA * 4, epochs=epochs, resume=resume, log_every=2)

    run(2, None)
    with (tmp_path / "log.jsonl").open("a") as file:  # what a killed process may leave
        file.write('{"kind": "step", "step": 9, "loss": 1.0, "time": 9.0}\n{"kind": "st')
    run(3, "auto")
    rows = read_jsonl(tmp_path / "log.jsonl")
    assert [row["step"] for row in rows] == [2, 4, 4, 6, 8, 8, 10, 12, 12]
    assert [row["kind"] for row in rows] == ["step", "step", "epoch"] * 3
    assert {"loss", "accuracy", "epoch", "lr", "time"} <= set(rows[-1])
    with (tmp_path / "log.csv").open(newline="") as file:
        table = list(csv.DictReader(file))
    assert [row["epoch"] for row in table] == ["0", "1", "2"] and float(table[-1]["loss"]) == pytest.approx(rows[-1]["loss"])
    with (tmp_path / "log.jsonl").open("a") as file:  # of an epoch that ended, but after which no checkpoint was written
        file.write('{"kind": "step", "step": 12, "epoch": 3, "batch": 0, "loss": 1.0, "time": 9.0}\n')  # of a step of several batches
        file.write('{"kind": "epoch", "step": 12, "epoch": 3, "loss": 1.0, "time": 9.0}\n')
    run(3, "auto")
    assert read_jsonl(tmp_path / "log.jsonl") == rows
    run(1, None)
    assert len(read_jsonl(tmp_path / "log.jsonl")) == 3 and len((tmp_path / "log.csv").read_text().splitlines()) == 2


def test_a_folder_that_a_run_is_using_is_refused(tmp_path):
    pytest.importorskip("fcntl")

    class Another(Callback):
        def on_train_batch_end(self, batch, logs):
            with pytest.raises(FileError, match="the folder must not be in use by a run that has not ended"):
                make(ModelCheckpoint(tmp_path, overwrite=True)).fit(DATA)

    make(ModelCheckpoint(tmp_path), Another()).fit(DATA)
    assert len(checkpoints(tmp_path)) == 1
    make(ModelCheckpoint(tmp_path, overwrite=True)).fit(DATA)


def test_a_folder_without_locks_is_used_with_a_warning(tmp_path, monkeypatch):
    fcntl = pytest.importorskip("fcntl")

    def fail(descriptor, operation):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", fail)
    with pytest.warns(UserWarning, match=r"\[ModelCheckpoint\] the folder cannot be locked: .*No locks available; no other run may use it"):
        make(ModelCheckpoint(tmp_path)).fit(DATA)
    assert len(checkpoints(tmp_path)) == 1


@pytest.mark.parametrize("killed", [False, True])
def test_a_log_has_every_batch_of_a_run_that_failed_and_was_resumed(tmp_path, killed):
    log = tmp_path / "log.jsonl"

    class Fail(Callback):
        def on_train_batch_end(self, batch, logs):
            if batch == 6:
                at_failure.append(log.read_bytes())
                raise RuntimeError

    def losses():
        rows = [row for row in read_jsonl(log) if row["kind"] == "step"]
        return [loss for row in rows for loss in row["losses"]], [row["since"] for row in rows]

    data, at_failure = [(x * (1 + i), y) for i in range(8) for x, y in DATA], []
    manual_seed(0)
    make(JSONLLogger(log)).fit(data, log_every=5)
    whole = losses()[0]
    manual_seed(0)
    with pytest.raises(RuntimeError):
        make(JSONLLogger(log), ModelCheckpoint(tmp_path, every_steps=3), Fail()).fit(data, log_every=5)
    assert losses() == (whole[:7], [1, 6])
    if killed:
        log.write_bytes(at_failure[0])
    make(JSONLLogger(log), ModelCheckpoint(tmp_path)).fit(data, log_every=5, resume="auto")
    assert losses() == (whole, [1, 6])


FULL = """
import resource, sys
from pathlib import Path
from netcl import nn, optim
from netcl.core.device import manager
from netcl.trainer import CSVLogger, JSONLLogger, Progress, Trainer
from netcl.trainer.logs import write_run_json
from netcl.trainer.report_html import write_report
import numpy as np

place = Path(sys.argv[1])
files = [JSONLLogger(place / "log.jsonl"), CSVLogger(place / "log.csv")]
model = nn.Linear(manager.default("cpu"), 4, 2)
trainer = Trainer(model, optim.SGD(model.parameters(), lr=0.1), callbacks=[Progress("off"), *files])
trainer.fit([(np.eye(4, dtype=np.float32), np.arange(4) % 2)], epochs=2)
write_run_json(place / "run.json", {"written": 1})
write_run_json(place / "config.json", {"title": "of class \\udcff"})
write_report(place)
before = {path.name: path.read_bytes() for path in place.iterdir()}
resource.setrlimit(resource.RLIMIT_FSIZE, (10, 10))  # as a full disk does, it ends a write in the middle
writes = [lambda: files[0].on_train_begin({}), lambda: files[1].on_epoch_end(2, {"epoch": 2, "loss": 1.0}), lambda: write_report(place)]
for write in [*writes, lambda: write_run_json(place / "run.json", {"written": 2})]:
    try:
        write()
    except OSError as full:
        assert "there is no room for the file" in str(full)
    else:
        raise AssertionError("nothing was raised")
assert {path.name: path.read_bytes() for path in place.iterdir()} == before
"""


@pytest.mark.skipif(sys.platform != "linux", reason="limits of Linux")
@pytest.mark.fault("disk is full while a log is written", "a limit that ends a write in the middle", "logs of earlier epochs are whole")
def test_a_full_disk_leaves_the_logs_of_earlier_epochs(tmp_path):
    done = subprocess.run([sys.executable, "-B", "-c", FULL, str(tmp_path)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_a_step_logs_its_own_loss_and_an_epoch_the_mean(tmp_path):
    """Losses 1, 2, 3, 4: whatever shows steps shows these, not their running mean."""
    shown = io.StringIO()
    seen = {}

    class Seen(Callback):
        def on_train_batch_end(self, batch, logs):
            seen[batch] = dict(logs)

    ones = np.ones((2, 4), np.float32)
    data = [(ones, np.full((2, 2), value, np.float32)) for value in (1, 2, 3, 4)]
    loss_fn = lambda outputs, targets: (outputs * 0 + targets).mean()  # noqa: E731
    model = nn.Linear(manager.default("cpu"), 4, 2)
    callbacks = [Progress("plain", shown), JSONLLogger(tmp_path / "log.jsonl"), Seen()]
    Trainer(model, optim.SGD(model.parameters(), lr=0.1), loss_fn=loss_fn, callbacks=callbacks).fit(data, log_every=1)
    rows = read_jsonl(tmp_path / "log.jsonl")
    assert [row["loss"] for row in rows] == [1.0, 2.0, 3.0, 4.0, 2.5]
    assert [seen[batch]["loss"] for batch in range(4)] == [1.0, 2.0, 3.0, 4.0] and "loss 2.5" in shown.getvalue()


@pytest.mark.parametrize("options", [{}, {"compile": True}, {"grad_clip": 0.1}, {"accumulation_steps": 2}, {"mixed_precision": "float16"}])
def test_a_log_holds_every_loss_and_rate_and_the_norm(device, options, tmp_path):
    """Whether or not the trainer looked at a step, and without changing one."""

    def fitted(*callbacks):
        model = nn.Linear(device, 4, 2)
        model.weight.data.fill_(0.1), model.bias.data.fill_(0.0)
        optimizer = optim.SGD(model.parameters(), lr=0.5)
        schedule = optim.LambdaLR(optimizer, lambda step: 1 / (1 + step))
        trainer = Trainer(model, optimizer, scheduler=schedule, callbacks=[Progress("off"), *callbacks], **options)
        trainer.fit([(x * (1 + i), y) for i in range(8) for x, y in DATA], epochs=2, log_every=3)
        return model.weight.to_host()

    class Each(Callback):
        def on_train_batch_end(self, batch, logs):
            losses.append(logs["loss"])

    losses = []
    weights = fitted(JSONLLogger(tmp_path / "log.jsonl"), Each())
    rows = [row for row in read_jsonl(tmp_path / "log.jsonl") if row["kind"] == "step"]
    np.testing.assert_allclose([loss for row in rows for loss in row["losses"]], losses, rtol=1e-6)
    steps = 16 // options.get("accumulation_steps", 1)
    rates = [0.5 / (1 + i * steps // 16) for i in range(16)]
    np.testing.assert_allclose([rate for row in rows for rate in row["lrs"]], rates, rtol=1e-6)
    assert [(row["since"], row["step"]) for row in rows][-1][1] == steps and rows[0]["since"] in (0, 1)
    assert all(row["grad_norm"] > 0 for row in rows)
    np.testing.assert_array_equal(fitted(), weights)


def test_a_loss_that_was_not_finite_between_two_looks_is_found():
    data = [(DATA[0][0], DATA[0][1].astype(np.float32) * value) for value in (float("nan"), 1.0)]
    loss_fn = lambda outputs, targets: (targets + 0).mean() + outputs.sum() * 0  # noqa: E731
    with pytest.raises(FloatingPointError, match="step=2"):
        make(NaNGuard(), loss_fn=loss_fn).fit(data * 2, log_every=2)


def test_a_nan_is_null_in_json(tmp_path):
    make(JSONLLogger(tmp_path / "log.jsonl"), Numbers(float("nan"))).fit(DATA)
    line = (tmp_path / "log.jsonl").read_text().splitlines()[-1]
    assert json.loads(line, parse_constant=lambda name: pytest.fail(name))["val_loss"] is None


def test_tensorboard_files_are_written(tmp_path):
    pytest.importorskip("tensorboardX")
    from netcl.trainer import TensorBoard

    make(TensorBoard(tmp_path)).fit(DATA, epochs=2)
    (file,) = tmp_path.glob("events.out.tfevents*")
    assert b"epoch/loss" in file.read_bytes()


def test_any_trainer_leaves_a_report(tmp_path):
    test = [(x, y) for x, y in DATA]
    make(Report(tmp_path, "My <run>", test=test, classes=["no", "yes"])).fit(DATA, val=DATA, epochs=3, log_every=1)
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert "<h1>My &lt;run&gt;</h1>" in page and "<script" not in page and "http" not in page.replace("http://www.w3.org", "")
    for part in ("Confusion matrix", "learning rate", "samples per second", "Time by phase", "validating", "loss of every step", "yes"):
        assert part in page, part
    assert "Slowest kernels" not in page and write_report(tmp_path, tmp_path / "again.html").read_text() == page
    assert "<div>test loss<b>" in page
    make(Report(tmp_path, test=test)).fit(DATA)
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert "Confusion matrix" in page and "<th>1</th>" in page and "Residuals" not in page
    make(Report(tmp_path), Numbers(math.nan)).fit(DATA)  # without a test, in the folder of a run that had one
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert "Confusion matrix" not in page and "test loss" not in page and "<div>loss<b>" in page and "<div>val_loss<b>nan" in page
    assert "NaN" not in (tmp_path / "results.json").read_text()  # which is no JSON


def test_a_report_has_the_slowest_kernels_of_a_few_steps(cl_device, tmp_path):
    if "Oclgrind" in cl_device.platform_name:
        pytest.skip("a simulator takes minutes to measure its limits")
    model = nn.Linear(cl_device, 4, 2)
    trainer = Trainer(model, optim.SGD(model.parameters(), lr=0.5), callbacks=[Progress("off"), Report(tmp_path)])
    trainer.fit(DATA * 6, epochs=2)
    (counted,) = {row["calls"] for row in json.loads((tmp_path / "profile.json").read_text())["rows"] if row["name"] == "cross_entropy"}
    assert counted == 5 and "Slowest kernels" in (tmp_path / "report.html").read_text(encoding="utf-8")
    assert hooks.launch_observers == [] and hooks.launch_queue is None
    trainer = Trainer(model, optim.SGD(model.parameters(), lr=0.5), callbacks=[Progress("off"), Report(tmp_path), _Fails(at=6)])
    with pytest.raises(RuntimeError, match="stop here"):
        trainer.fit(DATA * 6, epochs=2)
    assert hooks.launch_observers == [] and hooks.launch_queue is None and not (tmp_path / "profile.json").exists()


class _Fails(Callback):
    def __init__(self, at):
        self.at = at

    def on_train_batch_end(self, batch, logs):
        if self.trainer.step == self.at:
            raise RuntimeError("stop here")


def test_a_report_of_a_regression_shows_residuals(tmp_path):
    rng = np.random.default_rng(0)
    data = [(rng.standard_normal((8, 2)).astype(np.float32), rng.standard_normal((8, 2)).astype(np.float32))]
    data[0][1][5, 1] = 1e6
    model = nn.Linear(manager.default("cpu"), 2, 2)
    callbacks = [Progress("off"), Report(tmp_path, test=data)]
    Trainer(model, optim.SGD(model.parameters(), lr=0.1), loss_fn=ag.mse_loss, metrics=["mae"], callbacks=callbacks).fit(data)
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert "<h1>Linear</h1>" in page and "Residuals" in page and "test mae" in page
    assert "<tr><td>6</td><td>2</td><td>1e+06</td>" in page  # the worst, of the second output
