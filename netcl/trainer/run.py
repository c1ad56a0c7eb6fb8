"""A run in a folder: recipe, logs, checkpoints, model, results on the test data, and a report.

The folder holds ``config.json`` (the recipe), ``log.jsonl``, ``log.csv``, ``checkpoints/``, ``model.netcl``, ``results.json``,
``profile.json`` and, except for text, ``samples.npz``; :func:`netcl.trainer.report_html.write_report` adds ``report.html``.
"""

from __future__ import annotations

import json
import os
import platform as machine
import time
from collections.abc import Mapping, Sequence
from contextlib import closing, nullcontext
from itertools import chain, islice, repeat
from pathlib import Path
from typing import Any

import numpy as np

from netcl import distributed
from netcl.core import platforms
from netcl.core.device import DeviceHandle, device, handle_of
from netcl.core.errors import message
from netcl.core.memory import memory_stats
from netcl.core.tensor import Tensor
from netcl.data import DataLoader
from netcl.data.files import read_inputs
from netcl.io import FileError, load_model, save_model
from netcl.io.archive import replacing
from netcl.ops.random import manual_seed
from netcl.profiling import profile
from netcl.trainer.callbacks import Callback, EarlyStopping, Logs, LRMonitor, ModelCheckpoint, NaNGuard
from netcl.trainer.find_lr import RateTest, find_lr
from netcl.trainer.logs import CSVLogger, JSONLLogger, write_run_json
from netcl.trainer.pictures import picture
from netcl.trainer.progress import Progress
from netcl.trainer.recipe import Data, Recipe, RecipeError, load_data, make_loaders, make_model, make_trainer, read_recipe
from netcl.trainer.trainer import Trainer
from netcl.vision.datasets import IMG_EXTENSIONS

SAMPLES = 24
RESULTS = ("model.netcl", "results.json", "samples.npz", "profile.json", "report.html")
PROFILED_STEPS = 5


def train_run(recipe: Recipe, folder: str | os.PathLike[str], handle: DeviceHandle, resume: bool = False,
              callbacks: Sequence[Callback] = (), overwrite: bool = False) -> dict[str, Any]:  # fmt: skip
    """Train a recipe on a device and write everything but the report into a folder; returns the content of ``results.json``.

    The model that is kept and tested has the weights of the epoch with the lowest validation loss (training loss without validation).
    A folder with checkpoints raises unless ``resume`` continues the run or ``overwrite`` removes the checkpoints.
    In an MPI job, each rank trains on its part of every batch, and rank 0 writes.
    """
    place, ours, recipe = Path(folder), distributed.world(), recipe.resolved()
    ours.deterministic = True  # a resumed run ends with the bits of a straight one
    keeper = ModelCheckpoint(place / "checkpoints", overwrite=overwrite)
    with ours.together(), device(handle), closing(keeper):
        place.mkdir(parents=True, exist_ok=True)
        if ours.rank == 0 and not (resume or overwrite):
            keeper.claim(None)  # before data is loaded, which may take minutes
        manual_seed(recipe.seed)
        data = load_data(recipe)
        model = make_model(recipe, data, handle)
        if ours.size > 1:  # weights are those of the seed, whatever the number of ranks; what ranks drop out is not the same
            distributed.manual_seed(recipe.seed, ours)
        train, val, test = make_loaders(recipe, data, handle.queue, ours)
        writers = [_Config(place, recipe, data.classes), JSONLLogger(place / "log.jsonl"), CSVLogger(place / "log.csv")]
        own = [*writers, *callbacks] if ours.rank == 0 else [Progress("off")]
        always: list[Callback] = [_Rates(), keeper, LRMonitor(), NaNGuard()]
        if recipe.patience:
            always.append(EarlyStopping("loss" if val is None else "val_loss", recipe.patience))
        shared = model
        if ours.size > 1:
            shared = distributed.DistributedDataParallel(distributed.convert_sync_batchnorm(model, ours), ours)
        trainer = make_trainer(recipe, shared, len(train), data, [*own, *always])
        with train, val or nullcontext(), test:
            trainer.fit(train, val=val, epochs=recipe.epochs, resume="auto" if resume else None, log_every=recipe.log_every)
            best = restore_best(trainer, keeper, ours)
            seconds = trainer.seconds
            results = {**run_results(trainer, trainer.evaluate(test), seconds, data.classes), "best": best}
            if ours.rank == 0:
                _write_run(place, trainer, model, test, data, results)
            profiled = profile_steps(trainer, train).to_dict()
            if ours.rank == 0:
                write_run_json(place / "profile.json", profiled)
    return results


def restore_best(trainer: Trainer, keeper: ModelCheckpoint, world: distributed.World) -> dict[str, Any]:
    """Load the best checkpoint into the model; returns its epoch (from 1) and monitored number, or ``{}`` if there is no checkpoint."""
    watch = keeper.watch
    if watch is None or not trainer.by_rank_0((keeper.folder / "best.netcl").is_file()):
        return {}
    distributed.load_checkpoint(keeper.folder / "best.netcl", world=world, model=trainer.model, ema=trainer.ema)
    epoch = trainer.history.best(watch.monitor, "max" if watch.sign < 0 else "min")
    return {"epoch": epoch + 1, "of": len(trainer.history.rows), "by": watch.monitor, "value": watch.sign * watch.best}


class _Config(Callback):
    """Writes the recipe when a run begins, after checking a resumed checkpoint. A new run removes the results of an earlier run.

    A resumed run must have the classes and the parts of the data that it began with: else it would be tested on what it has learned.
    """

    def __init__(self, place: Path, recipe: Recipe, classes: Sequence[str]):
        self.place, self.recipe = place, recipe
        parts = {name: getattr(recipe, name) for name in ("seed", "val_split", "test_split")}
        self.data: dict[str, object] = {"classes": [*map(str, classes)], **parts}

    def state_dict(self) -> dict[str, object]:
        return {"data": self.data}

    def load_state_dict(self, state: Mapping[str, dict[str, object]]) -> None:
        before = state.get("data", self.data)
        if changed := {name: value for name, value in self.data.items() if before.get(name) != value}:
            what = "a resumed run must have the classes and the parts of the data that it began with"
            remedy = "restore them, or begin anew with --overwrite"
            raise ValueError(message("train", what, remedy, given=changed, before={name: before.get(name) for name in changed}))

    def on_train_begin(self, logs: Logs) -> None:
        for name in RESULTS if self.trainer.step == 0 else ():
            (self.place / name).unlink(missing_ok=True)
        write_run_json(self.place / "config.json", self.recipe.to_dict())


class _Rates(Callback):
    """Replaces learning rates, schedule and decays of a resumed checkpoint by the values of the recipe, which may have changed."""

    def set_trainer(self, trainer: Trainer) -> None:
        super().set_trainer(trainer)  # which has not been resumed yet
        self.rates, self.decays = trainer.learning_rates(), [group["weight_decay"] for group in trainer.optimizer.param_groups]
        self.schedule = {} if trainer.scheduler is None else trainer.scheduler.state_dict()
        self.ema_decay = None if trainer.ema is None else trainer.ema.decay

    def on_train_begin(self, logs: Logs) -> None:
        schedule, rates = self.trainer.scheduler, self.rates
        if schedule is not None:
            schedule.load_state_dict({**self.schedule, "last_epoch": schedule.last_epoch})
            rates = schedule.rates(False)
        for group, rate, decay in zip(self.trainer.optimizer.param_groups, rates, self.decays, strict=True):
            group.update(lr=rate, weight_decay=decay)
        if self.ema_decay is not None:
            self.trainer.ema.decay = self.ema_decay


def _write_run(place: Path, trainer: Trainer, model: Any, test: DataLoader, data: Data, results: dict[str, Any]) -> None:
    """Write the model, the results on the test data and samples of the model's predictions."""
    model.eval()
    with trainer.averaged():
        save_model(distributed.without_sync(model), place / "model.netcl", notes=dict(data.reading))
    if data.is_text:
        results["text"] = _generated_text(model, "\n", 400, {"temperature": 0.8})
    write_run_json(place / "results.json", results)
    save_samples(place / "samples.npz", trainer, test, data)


def run_results(trainer: Trainer, test: Mapping[str, Any], seconds: float, classes: Sequence[str]) -> dict[str, Any]:
    """Return the content of ``results.json``: numbers on the test data, statistics of the run, class names, device and software."""
    parameters = sum(p.size for p in trainer.model.parameters())
    phases = {name: round(spent, 3) for name, spent in trainer.phase_seconds.items()}
    facts = {"steps": trainer.step, "parameters": parameters, "phases": phases, "memory": memory_stats()["bytes_allocated"]}
    return {"test": test, "seconds": seconds, **facts, "classes": list(classes), "environment": environment(handle_of(trainer.queue))}


def environment(handle: DeviceHandle) -> dict[str, str]:
    """Return a description of the device and software of a run."""
    opencl = platforms.opencl().VERSION_TEXT if handle.backend == "cl" else "not used"
    return {
        "device": handle.profile.title, "platform": handle.platform_name, "system": f"{machine.system()} {machine.machine()}",
        "python": machine.python_version(), "numpy": np.__version__, "pyopencl": opencl,
        "processors": str(os.cpu_count()), "finished": time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime()),
    }  # fmt: skip


def save_samples(path: Path, trainer: Trainer, test: DataLoader, data: Data) -> None:
    """Write the worst predictions on test data, and the confusion matrix or all regression outputs. For text, write nothing."""
    if data.is_text:
        return
    host = ([part.to_host() if isinstance(part, Tensor) else np.asarray(part) for part in batch] for batch in test)
    x, y = (np.concatenate(parts) for parts in zip(*host, strict=True))
    scores = trainer.predict(test).astype(np.float64)
    kept: dict[str, np.ndarray] = {}
    if data.is_regression:
        mean, scale = (np.asarray(data.reading[name]) for name in ("mean", "scale"))
        targets, outputs = (values.reshape(len(values), -1) * scale + mean for values in (y, scores))
        worst = np.argsort(-np.abs(outputs - targets), axis=None, kind="stable")[:SAMPLES]
        kept = {"targets": targets, "outputs": outputs, "rows": worst // targets.shape[1], "columns": worst % targets.shape[1]}
    else:
        likely = probabilities(scores)
        chosen = likely.argmax(axis=1)
        confusion = np.zeros((len(data.classes),) * 2, np.int64)
        np.add.at(confusion, (y, chosen), 1)
        shown = np.lexsort((-likely.max(axis=1), chosen == y))[:SAMPLES]  # mistakes first, the surest of them at the front
        kept = {"confusion": confusion, "labels": y[shown], "chosen": chosen[shown], "likely": likely.max(axis=1)[shown], "rows": shown}
        if x.ndim == 4:
            kept["images"] = np.clip(x[shown] * 255, 0, 255).astype(np.uint8)
    with replacing(path) as file:
        np.savez(file, **kept)  # type: ignore[arg-type]


def probabilities(scores: np.ndarray) -> np.ndarray:
    """Return the softmax of each row of scores."""
    likely = np.exp(scores - scores.max(axis=1, keepdims=True))
    return likely / likely.sum(axis=1, keepdims=True)


def predict_file(model: Any, notes: Mapping[str, Any], path: str | os.PathLike[str]) -> list[list[str]]:
    """Return a row of strings per input of a file: the input's number (from 1), then regression values, or a class and its probability."""
    pictures = notes["kind"] == "image" and Path(path).suffix.lower() in IMG_EXTENSIONS
    x = picture(path, notes["shape"])[None] / np.float32(255) if pictures else read_inputs(path, notes)
    outputs = np.concatenate([model(part).to_host() for part in np.array_split(x, max(1, len(x) // 256))]).astype(np.float64)
    if "scale" in notes:
        values = outputs * np.asarray(notes["scale"]) + np.asarray(notes["mean"])
        return [[str(i + 1), " ".join(f"{value:.6g}" for value in row)] for i, row in enumerate(values)]
    likely = probabilities(outputs)
    return [[str(i + 1), notes["classes"][int(row.argmax())], f"{row.max():.4f}"] for i, row in enumerate(likely)]


def find_rate(recipe: Recipe, handle: DeviceHandle) -> RateTest:
    """Run :func:`find_lr` for a recipe on a new model, with a progress line; returns its result."""
    with device(handle):
        trainer, train = _trainer_of(recipe, handle)
        line = _RateProgress()
        line.set_trainer(trainer)
        with train, closing(line):
            line.on_train_begin({})
            return find_lr(trainer, train)


class _RateProgress(Progress):
    def _title(self, epoch: int) -> str:
        return "learning rate"


def _trainer_of(recipe: Recipe, handle: DeviceHandle) -> tuple[Trainer, DataLoader]:
    """Return a trainer for a recipe that writes no files, and the loader of its training samples."""
    manual_seed(recipe.seed)
    data = load_data(recipe)
    model = make_model(recipe, data, handle)
    train, _, _ = make_loaders(recipe, data, handle.queue)
    return make_trainer(recipe, model, len(train), data, [Progress("off")]), train


def profile_steps(trainer: Trainer, data: Any, steps: int = PROFILED_STEPS) -> profile:
    """Run a training step, then return a profile of ``steps`` further training steps. All change the model: save it before."""
    batches = chain.from_iterable(repeat(data))
    trainer.model.train()
    trainer.train_on_batch(*next(batches))
    with profile() as found:
        for x, y in islice(batches, steps):
            trainer.train_on_batch(x, y)
    return found


def trace_run(recipe: Recipe, handle: DeviceHandle, steps: int) -> profile:
    """Return a profile of ``steps`` training steps of a new model of a recipe."""
    with device(handle):
        trainer, train = _trainer_of(recipe, handle)
        with train:
            return profile_steps(trainer, train, steps)


def read_json(folder: str | os.PathLike[str], name: str) -> dict[str, Any]:
    """Return the object in a JSON file of a run; raises if the file is missing or damaged."""
    path = Path(folder) / name
    if not path.exists():
        raise FileNotFoundError(message("run", f"the folder must have a file {name}", "pass the folder of a run", folder=folder))
    try:
        return dict(json.loads(path.read_text(encoding="utf-8")))
    except (ValueError, TypeError, RecursionError) as fault:
        raise FileError(message("run", f"{name} must be valid JSON: {fault}", folder=folder)) from fault


def generate(
    folder: str | os.PathLike[str], prompt: str, length: int, handle: DeviceHandle, seed: int | None = None, **options: Any
) -> str:
    """Return ``prompt`` followed by ``length`` bytes of text from the model of a run."""
    recipe = Recipe().changed(read_recipe(Path(folder) / "config.json"))
    if recipe.model != "gpt":
        remedy = "train one: netcl train --data text:FILE"
        raise RecipeError(message("generate", "the model of the run must generate text", remedy, model=recipe.model))
    with device(handle):
        model = load_model(Path(folder) / "model.netcl", handle)
        manual_seed(recipe.seed if seed is None else recipe.changed({"seed": seed}).seed)
        return _generated_text(model, prompt, length, options)


def _generated_text(model: Any, prompt: str, length: int, options: Mapping[str, Any]) -> str:
    # What a terminal without UTF-8 hands over are bytes in disguise.
    tokens = list(prompt.encode(errors="surrogateescape")) or [ord("\n")]
    written = model.generate([tokens], length, **options).to_host()[0]
    return bytes(written.astype(np.uint8)).decode(errors="replace")
