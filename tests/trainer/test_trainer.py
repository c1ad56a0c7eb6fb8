"""The trainer: what it learns, counts, keeps and resumes."""

from __future__ import annotations

import importlib.util
import re
import signal
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext

import numpy as np
import pytest

import netcl
from netcl import nn, optim
from netcl.core.backend.lifecycle import Stop
from netcl.core.device import manager
from netcl.core.errors import DeviceError
from netcl.core.tensor import Tensor
from netcl.data import DataLoader, TensorDataset
from netcl.distributed import DistributedDataParallel, LostRankError, thread_worlds
from netcl.io import FileError
from netcl.trainer import Callback, History, LRMonitor, ModelCheckpoint, Progress, Trainer
from netcl.trainer import trainer as trainer_module
from netcl.trainer.find_lr import find_lr

SILENT = Progress("off")
CPU = manager.default("cpu")


def batches(count=4, size=8, seed=0):
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(count * size, 4)).astype(np.float32)
    y = (x[:, 0] > x[:, 1]).astype(np.int64)
    return [(x[i : i + size], y[i : i + size]) for i in range(0, len(x), size)]


def make(queue=None, callbacks=(), lr=0.1, dropout=0.1, **options):
    netcl.manual_seed(3)
    model = nn.Sequential(queue, nn.Linear(4, 16), nn.ReLU(), nn.Dropout(dropout), nn.Linear(16, 2))
    optimizer = optim.SGD(model.parameters(), lr=lr, momentum=0.9)
    return Trainer(model, optimizer, metrics=["accuracy"], callbacks=[SILENT, *callbacks], **options)


def weights(trainer):
    return {name: tensor.to_host().copy() for name, tensor in trainer.model.state_dict().items()}


class StopAt(Callback):
    """Ends a run the hard way, in the middle of an epoch."""

    def __init__(self, step):
        self.at = step

    def on_train_batch_end(self, batch, logs):
        if self.trainer.step == self.at and self.trainer.at_boundary:
            raise RuntimeError("power cut")


def test_a_device_is_where_the_model_goes():
    model = nn.Linear(2, 2, device="cpu")
    Trainer(model, optim.SGD(model.parameters(), lr=0.1), device="cpu")
    assert model.weight.backend == "cpu"
    with pytest.raises(DeviceError, match="nowhere"):
        Trainer(model, optim.SGD(model.parameters(), lr=0.1), device="nowhere")


def test_a_run_learns_and_tells(device):
    trainer = make(device.queue, dropout=0.0)
    history = trainer.fit(batches(), val=batches(seed=1), epochs=6)
    assert history.epoch == list(range(6)) and trainer.step == 24
    assert history["loss"][-1] < 0.5 * history["loss"][0] and history["val_accuracy"][-1] > 0.8
    scores = trainer.predict(batches(seed=1))
    targets = np.concatenate([y for _, y in batches(seed=1)])
    assert trainer.evaluate(batches(seed=1))["accuracy"] == pytest.approx((scores.argmax(1) == targets).mean())
    assert history["val_accuracy"][-1] == pytest.approx((scores.argmax(1) == targets).mean())


def test_nothing_is_read_between_logs(cl_device, monkeypatch):
    read = []
    to_host = Tensor.to_host

    class Count(Callback):
        def on_train_batch_end(self, batch, logs):
            read.append(0)

    trainer = make(cl_device.queue, [Count()])
    monkeypatch.setattr(Tensor, "to_host", lambda self: read.append(1) or to_host(self))
    trainer.fit(iter_again(batches(8)), epochs=1, log_every=100)
    assert read[:8] == [0] * 8 and 1 in read


def iter_again(data):
    """Data without a length."""

    class Again:
        def __iter__(self):
            return iter(data)

    return Again()


@pytest.mark.parametrize("at", [3, 4, 7], ids=["within an epoch", "at its end", "in the second"])
def test_a_resumed_run_equals_one_that_was_never_stopped(device, tmp_path, at):
    def new(folder, *others):
        trainer = make(device.queue, [ModelCheckpoint(folder, every_steps=1), *others], accumulation_steps=2, grad_clip=1.0)
        trainer.scheduler = optim.WarmupCosine(trainer.optimizer, 2, 12)
        trainer.ema = optim.ModelEMA(trainer.model, decay=0.9)
        return trainer

    data = batches(8)
    straight = new(tmp_path / "straight")
    straight.fit(data, val=batches(2, seed=1), epochs=3, resume="auto")
    with pytest.raises(RuntimeError, match="power cut"):
        new(tmp_path / "cut", StopAt(at)).fit(data, val=batches(2, seed=1), epochs=3)
    resumed = new(tmp_path / "cut")
    netcl.manual_seed(99)
    resumed.fit(data, val=batches(2, seed=1), epochs=3, resume="auto")
    assert resumed.step == straight.step == 12
    for name, value in weights(straight).items():
        np.testing.assert_array_equal(weights(resumed)[name], value, err_msg=name)
    for column in ("loss", "accuracy", "val_loss"):
        assert resumed.history[column] == straight.history[column]
    assert resumed.learning_rates() == straight.learning_rates()


def noise(x, rng):
    return (x + rng.normal(size=x.shape)).astype(np.float32)


@pytest.mark.parametrize("at", [5, 8], ids=["within an epoch", "at its end"])
def test_a_loader_goes_on_where_it_was(tmp_path, at):
    """Order, augmentation and position come from the loader's state, with workers too."""

    def run(folder, *others, workers=0, resume=None):
        x, y = (np.concatenate(part) for part in zip(*batches(8), strict=True))
        trainer = make(CPU, [ModelCheckpoint(folder, every_steps=1), *others])
        with DataLoader(TensorDataset(x, y), 8, shuffle=True, seed=5, augment=noise, num_workers=workers, use_shared_mem=False) as loader:
            trainer.fit(loader, epochs=3, resume=resume)
        return trainer

    straight = run(tmp_path / "straight")
    with pytest.raises(RuntimeError, match="power cut"):
        run(tmp_path / "cut", StopAt(at), workers=2)
    resumed = run(tmp_path / "cut", workers=2, resume="auto")
    for name, value in weights(straight).items():
        np.testing.assert_array_equal(weights(resumed)[name], value, err_msg=name)
    assert resumed.history["loss"] == straight.history["loss"]


def test_a_damaged_checkpoint_is_passed_over_and_kept(tmp_path, caplog):
    """The run goes on from the newest that is whole; what was damaged stays under another name, and is told of once."""

    def run(epochs, resume=None):
        trainer = make(CPU, [ModelCheckpoint(tmp_path)])
        trainer.fit(batches(), epochs=epochs, resume=resume)
        return trainer

    straight = weights(run(3))
    whole, cut = tmp_path / "step-000008.netcl", tmp_path / "step-000012.netcl"
    damaged = cut.read_bytes()[:-100]
    cut.write_bytes(damaged)
    resumed = run(3, "auto")
    (line,) = [record.getMessage() for record in caplog.records]
    words = rf"\[load_checkpoint\] .*damaged.*{cut}; pass a complete .*; set aside as {cut.name}.unreadable; going on from {whole.name}"
    assert re.fullmatch(words, line)
    assert (tmp_path / f"{cut.name}.unreadable").read_bytes() == damaged
    for name, value in straight.items():
        np.testing.assert_array_equal(weights(resumed)[name], value)
    for path in (whole, cut):
        path.write_bytes(damaged)
    with pytest.raises(FileError, match=f"damaged.*{cut}"):
        run(3, "auto")
    assert sorted(path.name for path in tmp_path.glob("step*")) == [whole.name, cut.name, f"{cut.name}.unreadable"]


def test_ranks_without_the_file_go_on_from_that_of_rank_0(tmp_path):
    """Machines need not share a disk; a rank that began anew would train another run than the others."""
    saved = make(CPU, dropout=0.0)
    saved.fit(batches(), epochs=2)
    folders = [tmp_path / "first", tmp_path / "second"]
    saved.save(folders[0])

    def resumed(world):
        model = nn.Sequential(CPU, nn.Linear(4, 16), nn.ReLU(), nn.Dropout(0.0), nn.Linear(16, 2))
        trainer = Trainer(DistributedDataParallel(model, world), optim.SGD(model.parameters(), lr=0.1, momentum=0.9), callbacks=[SILENT])
        trainer.load(folders[world.rank])
        return trainer.step, [p.to_host() for p in model.parameters()]

    with ThreadPoolExecutor(2) as pool:
        ranks = list(pool.map(resumed, thread_worlds(2, timeout=100)))
    for step, found in ranks:
        assert step == saved.step == 8
        for ours, theirs in zip(found, saved.model.parameters(), strict=True):
            np.testing.assert_array_equal(ours, theirs.to_host())


def test_ranks_with_unlike_data_are_named_before_they_begin():
    def fitted(world):
        model = nn.Sequential(CPU, nn.Linear(4, 2))
        trainer = Trainer(DistributedDataParallel(model, world), optim.SGD(model.parameters(), lr=0.1), callbacks=[SILENT])
        with pytest.raises(
            LostRankError, match=r"\[fit\] all ranks must agree on batches, epochs, .*: rank 2 has \[3, 1, 20, 1\]; most=\[4"
        ):
            trainer.fit(batches(3 if world.rank == 2 else 4))

    with ThreadPoolExecutor(3) as pool:
        list(pool.map(fitted, thread_worlds(3, timeout=100)))


@pytest.mark.parametrize("moment", ["on_train_batch_end", "on_epoch_end"])
def test_a_rank_that_stops_stops_all(moment):
    """Ranks see other losses, and one that stopped alone would keep the others waiting."""

    def fitted(world):
        model = nn.Sequential(CPU, nn.Linear(4, 2))
        stop = Callback()
        setattr(stop, moment, lambda number, logs: setattr(stop.trainer, "stop_training", world.rank == 1))
        parallel = DistributedDataParallel(model, world)
        trainer = Trainer(parallel, optim.SGD(model.parameters(), lr=0.1), callbacks=[SILENT, stop])
        trainer.fit(batches(6), epochs=4, log_every=2)
        return trainer.step

    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(fitted, thread_worlds(2, timeout=100))) == [2 if moment == "on_train_batch_end" else 6] * 2


def test_a_rank_exits_only_after_its_own_signal(monkeypatch):
    """Rank 0 is interrupted first. The signal of rank 1 arrives later, and must not hit it while Python shuts down."""
    stops, of_thread = [Stop(), Stop()], threading.local()
    monkeypatch.setattr(trainer_module, "finishing_first", lambda: nullcontext(of_thread.stop))

    def fitted(world):
        of_thread.stop = stop = stops[world.rank]
        model = nn.Sequential(CPU, nn.Linear(4, 2))
        trainer = Trainer(DistributedDataParallel(model, world), optim.SGD(model.parameters(), lr=0.1), callbacks=[SILENT])
        with pytest.raises(SystemExit):
            trainer.fit(batches(6), log_every=1)
        return stop.is_set()

    stops[0].set()
    late = threading.Timer(0.5, stops[1].set)
    late.start()
    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(fitted, thread_worlds(2, timeout=100))) == [True, True]
    late.join()


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_mixed_precision_learns_and_resumes(device, tmp_path, dtype):
    def new():
        return make(device.queue, [ModelCheckpoint(tmp_path)], dropout=0.0, mixed_precision=dtype, grad_clip=1.0)

    history = new().fit(batches(), epochs=4)
    assert history["loss"][-1] < 0.8 * history["loss"][0]
    trainer = new()
    trainer.fit(batches(), epochs=5, resume="auto")
    assert trainer.step == 20 and trainer.history["loss"][:4] == history["loss"]
    assert all(parameter.dtype == "float32" for parameter in trainer.model.parameters())
    assert (trainer.scaler is not None) == (dtype == "float16")


class CtrlC(Callback):
    """Presses Ctrl-C while the second epoch is validated."""

    def on_test_batch_end(self, batch, logs):
        if self.trainer.epoch == 1 and batch == 0:
            signal.raise_signal(signal.SIGINT)


def test_ctrl_c_while_validating_loses_nothing(device, tmp_path):
    def run(folder, *others, resume=None):
        trainer = make(device.queue, [ModelCheckpoint(folder), *others])
        trainer.fit(batches(), val=batches(2, seed=1), epochs=3, resume=resume)
        return trainer

    before = signal.getsignal(signal.SIGINT)
    straight = run(tmp_path / "straight")
    with pytest.raises(SystemExit) as left:
        run(tmp_path / "cut", CtrlC())
    assert left.value.code == 130 and signal.getsignal(signal.SIGINT) is before
    resumed = run(tmp_path / "cut", resume="auto")
    assert resumed.step == straight.step and resumed.history["val_loss"] == straight.history["val_loss"]
    for name, value in weights(straight).items():
        np.testing.assert_array_equal(weights(resumed)[name], value, err_msg=name)


@pytest.mark.parametrize("accumulation", [1, 2])
def test_a_compiled_step_is_the_same_step(device, accumulation):
    def run(compile):
        trainer = make(device.queue, dropout=0.0, accumulation_steps=accumulation, compile=compile, grad_clip=1.0)
        trainer.scheduler = optim.WarmupCosine(trainer.optimizer, 2, 12)
        trainer.fit(batches(8), val=batches(2, seed=1), epochs=2)
        return trainer

    plain, compiled = run(False), run(True)
    for name, value in weights(plain).items():
        np.testing.assert_array_equal(weights(compiled)[name], value, err_msg=name)
    assert compiled.history["loss"] == plain.history["loss"]
    assert device.backend == "cpu" or (compiled._train_step.graphs and not compiled._train_step.refused)  # and it is replayed


def test_batches_together_make_the_step_of_one_large_batch(device):
    data = batches(4, 8)
    whole = [tuple(np.concatenate(part) for part in zip(*data, strict=True))]
    parts, one = make(device.queue, dropout=0.0, accumulation_steps=4), make(device.queue, dropout=0.0)
    parts.fit(data, epochs=2)
    one.fit(whole, epochs=2)
    assert parts.step == one.step == 2
    for name, value in weights(one).items():
        np.testing.assert_allclose(weights(parts)[name], value, rtol=1e-5, atol=1e-6, err_msg=name)


def test_a_last_group_that_is_not_full_is_a_mean_too():
    netcl.manual_seed(0)
    trainer = make(CPU, dropout=0.0, accumulation_steps=4)
    trainer.fit(batches(5), epochs=1)
    assert trainer.step == 2 and trainer.at_boundary


def test_the_schedule_may_count_epochs():
    trainer = make(CPU, [LRMonitor()], schedule_by="epoch")
    trainer.scheduler = optim.StepLR(trainer.optimizer, 1, 0.1)
    shown = trainer.fit(batches(), epochs=2)["lr"]
    assert shown == pytest.approx([0.1, 0.01])  # of the steps that were taken
    assert trainer.learning_rates() == [pytest.approx(0.001)]
    trainer.scheduler = optim.ReduceLROnPlateau(trainer.optimizer, patience=0, threshold=10.0, threshold_mode="abs")
    trainer.fit(batches(), epochs=2)
    assert trainer.learning_rates() == [pytest.approx(0.0001)]


def test_evaluation_uses_the_averages():
    trainer = make(CPU, dropout=0.0)
    trainer.ema = optim.ModelEMA(trainer.model, decay=1.0)  # the start weights for ever
    start = trainer.predict(batches()[0][0])
    trainer.fit(batches(), epochs=1)
    np.testing.assert_array_equal(trainer.predict(batches()[0][0]), start)
    trainer.ema = None
    assert np.abs(trainer.predict(batches()[0][0]) - start).max() > 1e-3


def test_one_hot_targets_count_as_samples():
    x, y = batches(1)[0]
    trainer = make(CPU, dropout=0.0)
    hard, soft = trainer.evaluate([(x, y)]), trainer.evaluate([(x, np.eye(2, dtype=np.float32)[y])])
    assert soft["accuracy"] == hard["accuracy"] and soft["loss"] == pytest.approx(hard["loss"], rel=1e-5)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        pytest.param({"train": [], "epochs": 1}, r"\[fit\] the data must have at least one batch", id="no-data"),
        pytest.param({"train": batches(1), "epochs": 0}, r"\[fit\] epochs must be a positive integer; epochs=0", id="no-epochs"),
        pytest.param({"train": batches(1), "epochs": 1.5}, r"\[fit\] epochs must be a positive integer; epochs=1.5", id="half-epochs"),
        pytest.param(
            {"train": batches(1), "val": iter(batches(1)), "epochs": 2},
            r"\[evaluate\] the data must have at least one batch",
            id="val-once",
        ),
        pytest.param({"train": [batches(1)[0][0]]}, r"\[Trainer\] a batch must be a pair \(x, y\); type=ndarray", id="no-targets"),
        pytest.param({"train": batches(1), "val": [(1, 2, 3)]}, r"must be a pair \(x, y\); type=tuple, parts=3", id="too-many-parts"),
        pytest.param({"train": batches(1), "resume": "auto"}, r'\[fit\] resume="auto" requires a Model', id="nowhere"),
    ],
)
def test_what_cannot_be_run_is_refused(arguments, words):
    with pytest.raises(ValueError, match=words):
        make(CPU).fit(**arguments)
    with pytest.raises(FileNotFoundError, match="the checkpoint must exist"):
        make(CPU).fit(batches(1), resume="nowhere.netcl")
    with pytest.raises(ValueError, match=r"\[predict\] the data must have at least one batch"):
        make(CPU).predict([])


def test_a_trainer_that_could_not_train_is_refused():
    with pytest.raises(ValueError, match=r"\[Trainer\] the optimizer must have at least one parameter of the model; parameters=2"):
        Trainer(nn.Linear(4, 2), optim.SGD(nn.Linear(4, 2).parameters(), lr=0.1))
    model, other = nn.Linear(CPU, 4, 2), nn.Linear(CPU, 4, 2)
    optimizers = [optim.SGD(made.parameters(), lr=0.1) for made in (model, other)]
    for words, options in (
        ("the scheduler must be one of the optimizer", {"scheduler": optim.StepLR(optimizers[1], 1)}),
        ("ema must average the weights of the model", {"ema": optim.ModelEMA(other)}),
        ("metrics must have different names, and none is loss", {"metrics": ["accuracy", "accuracy"]}),
    ):
        with pytest.raises(ValueError, match=rf"\[Trainer\] {words}"):
            Trainer(model, optimizers[0], **options)
    with pytest.raises(TypeError, match=r"\[callbacks\] a callback must be an instance of Callback; given=<class"):
        make(CPU, [ModelCheckpoint])
    with pytest.raises(TypeError, match=r"\[autocast\] dtype must be float16 or bfloat16; dtype=float64"):
        make(CPU, mixed_precision="float64")
    with pytest.raises(TypeError, match=r"\[fit\] loss_fn must return a Tensor; given=float"):
        make(CPU, loss_fn=lambda outputs, targets: 1.0).fit(batches(1))


def columns(samples=40, seed=0):
    x, y = (np.concatenate(part) for part in zip(*batches(samples // 8, seed=seed), strict=True))
    return x, y


def test_fit_takes_arrays(device):
    x, y = columns(64)
    trainer = make(device.queue, dropout=0.0)
    history = trainer.fit(x.astype(np.float64), y, epochs=8, batch_size=16, validation_split=0.25)
    assert trainer.step == 8 * 3 and len(history["val_loss"]) == 8 and history["loss"][-1] < history["loss"][0]
    assert trainer.evaluate(x, y)["accuracy"] == pytest.approx((trainer.predict(x).argmax(1) == y).mean())
    other = make(device.queue, dropout=0.0)
    assert other.fit(Tensor.from_host(device.queue, x), y, epochs=1, batch_size=16, validation_data=columns(16, seed=1))["val_loss"]


def test_the_parts_and_the_order_of_arrays_follow_the_seed():
    x, y = columns()
    losses = [
        make(CPU.queue, dropout=0.0).fit(x, y, epochs=2, batch_size=8, validation_split=0.2, seed=seed)["val_loss"] for seed in (1, 1, 2)
    ]
    assert losses[0] == losses[1] != losses[2]


@pytest.mark.parametrize(
    "options, text",
    [
        ({}, r"\[fit\] targets must be given with an array of inputs; fit\(x, y\)"),
        ({"val": np.zeros(3, np.int64)}, r"same number of samples; x=\(40, 4\), y=\(3,\)"),
        ({"val": np.zeros(40, np.int64), "validation_split": 1.5}, r"validation_split must be at least 0 and below 1"),
    ],
)
def test_arrays_that_do_not_fit_are_refused(options, text):
    with pytest.raises(ValueError, match=text):
        make(CPU.queue).fit(columns()[0], **options)
    with pytest.raises(ValueError, match=r"require arrays, fit\(x, y\); pass the batches to evaluate as val="):
        make(CPU.queue).fit(batches(), validation_split=0.1)


def test_a_history_is_drawn_or_names_what_is_missing(monkeypatch, tmp_path):
    history = make(CPU.queue).fit(batches(), val=batches(1), epochs=2)
    if importlib.util.find_spec("matplotlib") is not None:
        figure = history.plot(tmp_path / "curves.png")
        assert [axes.get_title() for axes in figure.axes] == ["loss", "accuracy"] and (tmp_path / "curves.png").stat().st_size
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match=r"\[History.plot\] matplotlib is required; pip install matplotlib"):
        history.plot()


def test_questions_without_an_answer_are_refused():
    with pytest.raises(ValueError, match=r"\[History.best\] name must be a column .*name=accuracy, mode=min, columns=\[\]"):
        History([]).best("accuracy")
    with pytest.raises(ValueError, match=r"\[thread_worlds\] size must be at least 1; size=0"):
        thread_worlds(0)


def test_a_range_test_needs_a_batch_and_ends_with_a_generator():
    model = nn.Linear(manager.default("cpu"), 4, 2)
    trainer = Trainer(model, optim.SGD(model.parameters(), lr=0.1), callbacks=[Progress("off")])
    with pytest.raises(ValueError, match=r"\[find_lr\] data must have at least one batch"):
        find_lr(trainer, [])
    batch = np.eye(4, dtype=np.float32), np.arange(4) % 2
    assert len(find_lr(trainer, (batch for _ in range(12))).losses) == 12 and trainer.step == 0


def test_empty_batches_are_refused():
    """The mean loss of no samples is NaN, and one step with it would make every weight NaN."""
    data = batches(2)
    empty = [*data, tuple(part[:0] for part in data[0])]
    trainer = make(CPU)
    for call in (trainer.fit, trainer.evaluate):
        with pytest.raises(ValueError, match=r"a batch must have at least one sample; shape=\(0,\); leave out empty batches"):
            call(empty)
    assert all(np.isfinite(p.to_host()).all() for p in trainer.model.parameters())


@pytest.mark.parametrize("split", [0.001, 0.1])
def test_both_parts_of_a_split_have_samples(split):
    (x, y), trainer = batches(1)[0], make(CPU)
    with pytest.raises(ValueError, match=f"validation_split must leave samples for both parts; validation_split={split}, samples=8"):
        trainer.fit(x, y, validation_split=split)
    assert trainer.step == 0
