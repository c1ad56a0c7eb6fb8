"""Callbacks: hooks that a trainer calls during a run, with Keras's names."""

from __future__ import annotations

import math
import os
import re
import weakref
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from netcl.core.errors import message
from netcl.io import FileError, checkpoints, run_of
from netcl.io.archive import hold_folder, replacing

if TYPE_CHECKING:
    from netcl.trainer.trainer import Trainer

Logs = Mapping[str, Any]


class Callback:
    """Base class of the hooks that a trainer calls during a run; override the methods you need. ``self.trainer`` is the trainer.

    ``logs`` maps names to numbers. After a training batch, these are the loss of the batch and the metrics of the epoch so far; after an
    epoch, they cover the whole epoch. Reading a number of a batch waits for the device: read them only if
    ``self.trainer.log_due`` is true. At the end of an epoch ``logs`` is a dictionary that callbacks may add to.

    Setting ``self.trainer.stop_training`` ends the run after the current optimizer step. If one of several ranks sets it, all of them end
    after a logged batch. Callbacks run in ascending ``order``: those that add numbers use -1, those that save the run use 1.
    """

    order = 0
    trainer: Trainer

    def set_trainer(self, trainer: Trainer) -> None:
        """Store the trainer; called once before a run."""
        self.trainer = trainer

    def state_dict(self) -> dict[str, Any]:
        """Return the state to save in a checkpoint."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a :meth:`state_dict`."""

    def on_train_begin(self, logs: Logs) -> None: ...
    def on_train_end(self, logs: Logs) -> None: ...
    def on_epoch_begin(self, epoch: int, logs: Logs) -> None: ...
    def on_epoch_end(self, epoch: int, logs: dict[str, Any]) -> None: ...
    def on_train_batch_begin(self, batch: int, logs: Logs) -> None: ...
    def on_train_batch_end(self, batch: int, logs: Logs) -> None: ...
    def on_test_begin(self, logs: Logs) -> None: ...
    def on_test_end(self, logs: Logs) -> None: ...
    def on_test_batch_begin(self, batch: int, logs: Logs) -> None: ...
    def on_test_batch_end(self, batch: int, logs: Logs) -> None: ...
    def on_predict_begin(self, logs: Logs) -> None: ...
    def on_predict_end(self, logs: Logs) -> None: ...
    def on_predict_batch_begin(self, batch: int, logs: Logs) -> None: ...
    def on_predict_batch_end(self, batch: int, logs: Logs) -> None: ...

    def on_interrupt(self, logs: Logs) -> None:
        """Called after Ctrl-C or SIGTERM, when the step is finished and before the run ends."""

    def close(self) -> None:
        """Called at the end of training, also after an error."""


class CallbackList:
    """Calls several callbacks in ascending ``order``."""

    def __init__(self, callbacks: Iterable[Callback]):
        given: list[Any] = list(callbacks)
        for callback in given:
            if not isinstance(callback, Callback):
                remedy = f"call it: {callback.__name__}(...)" if isinstance(callback, type) else "derive from netcl.trainer.Callback"
                raise TypeError(message("callbacks", "a callback must be an instance of Callback", remedy, given=repr(callback)))
        self.callbacks = sorted(given, key=lambda callback: callback.order)

    def __call__(self, moment: str, *arguments: Any) -> None:
        """Call one hook of every callback: ``callbacks("on_epoch_end", epoch, logs)``."""
        for callback in self.callbacks:
            getattr(callback, moment)(*arguments)


_RISING = {"acc", "accuracy", "auc", "bleu", "dice", "f1", "iou", "map", "miou", "precision", "psnr", "r2", "recall", "score", "ssim"}
_FALLING = {"error", "loss", "lr", "mae", "mape", "mse", "nll", "perplexity", "ppl", "rmse", "seconds", "wer"}


class Improvement:
    """Tracks the best value of ``monitor``. The mode ``auto`` decides by the words of the name: ``max`` for accuracy, ``min`` for loss."""

    def __init__(self, op: str, monitor: str, mode: str = "auto", min_delta: float = 0.0):
        if mode not in ("auto", "min", "max"):
            raise ValueError(message(op, "mode must be auto, min or max", mode=repr(mode)))
        words = set(re.split(r"[\W_]+", monitor.lower()))
        rises = mode == "max" or (mode == "auto" and bool(words & _RISING or any(re.fullmatch(r"top\d+", word) for word in words)))
        if mode == "auto" and rises == bool(words & _FALLING):
            raise ValueError(
                message(op, "mode must be min or max for a number whose name does not tell", 'pass mode="max"', monitor=monitor)
            )
        self.op, self.monitor, self.min_delta = op, monitor, abs(min_delta)
        self.sign = -1.0 if rises else 1.0
        self.best = math.inf

    def better(self, logs: Logs) -> bool:
        """Return whether the number is better than the best by more than ``min_delta``, and if so store it. Raises if ``logs`` lacks it."""
        if self.monitor not in logs:
            remedy = f"{'pass val= to fit; ' if self.monitor.startswith('val_') else ''}available: {', '.join(logs)}"
            raise ValueError(message(self.op, f"the logs must have the monitored number {self.monitor!r}", remedy))
        number = self.sign * float(logs[self.monitor])
        if not number < self.best - self.min_delta:
            return False
        self.best = number
        return True


class EarlyStopping(Callback):
    """Ends the run after ``patience`` epochs in a row in which a number did not improve by more than ``min_delta``.

    - **monitor**: the name of the number. **mode**: ``min``, ``max``, or ``auto``, which decides by the name.
    - **restore_best**: load the weights of the best epoch, and the averages of ``ema``, when training ends.
    """

    def __init__(
        self, monitor: str = "val_loss", patience: int = 5, min_delta: float = 0.0, mode: str = "auto", restore_best: bool = False
    ):
        self.watch = Improvement("EarlyStopping", monitor, mode, min_delta)
        self.patience, self.restore_best = patience, restore_best
        self.waited = 0
        self.best_epoch: int | None = None
        self._weights: dict[str, np.ndarray] | None = None
        self._averages: dict[str, Any] | None = None  # the state of the trainer's ``ema`` after the best epoch

    def on_epoch_end(self, epoch: int, logs: dict[str, Any]) -> None:
        if self.watch.better(logs):
            self.waited, self.best_epoch = 0, epoch
            if self.restore_best:
                self._weights = _copied_to_host(self.trainer.model.state_dict())
                state = None if self.trainer.ema is None else self.trainer.ema.state_dict()
                self._averages = state and {**state, "shadow": _copied_to_host(state["shadow"])}
            return
        self.waited += 1
        if self.waited >= self.patience:
            self.trainer.stop_training = True

    def on_train_end(self, logs: Logs) -> None:
        if self._weights is not None:
            self.trainer.model.load_state_dict(self._weights)
        if self._averages is not None and self.trainer.ema is not None:
            self.trainer.ema.load_state_dict(self._averages)

    def state_dict(self) -> dict[str, Any]:
        kept = {"weights": self._weights, "averages": self._averages, "monitor": self.watch.monitor, "patience": self.patience}
        return {"best": self.watch.best, "waited": self.waited, "best_epoch": self.best_epoch, **kept}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if state["waited"] >= state.get("patience", math.inf):
            self.trainer.stop_training = state["waited"] >= self.patience  # it has ended the run, and may have more patience now
        if state.get("monitor", self.watch.monitor) != self.watch.monitor:
            return  # another number starts anew
        self.watch.best, self.waited, self.best_epoch = float(state["best"]), int(state["waited"]), state["best_epoch"]
        self._weights, self._averages = state["weights"], state.get("averages")


def _copied_to_host(state: Mapping[str, Any]) -> dict[str, np.ndarray]:
    return {name: np.array(tensor.to_host()) for name, tensor in state.items()}


class ModelCheckpoint(Callback):
    """Writes checkpoints to resume a run from: the last ``keep_last`` files ``step-000123.netcl``, and ``best.netcl``.

    A checkpoint is written after every epoch and after Ctrl-C. Files are written atomically.

    - **every_steps**: also write one after every ``every_steps`` optimizer steps.
    - **monitor**, **mode**: the number by which ``best.netcl`` is chosen; ``None`` writes no ``best.netcl``. By default ``val_loss``, or
      ``loss`` in a run that is not validated.
    - **overwrite**: a new run deletes the checkpoints of an earlier one. Otherwise a new run in a folder with checkpoints raises, because a
      later ``resume`` would continue the earlier run. ``run.txt`` holds the id of the folder's run; resuming another run in it raises.

    All ranks of a ``DistributedDataParallel`` model must have this callback: rank 0 writes the file, with the random states of all ranks.
    """

    order = 1

    def __init__(self, folder: str | os.PathLike[str], monitor: str | None = "auto", mode: str = "auto", keep_last: int = 2,
                 every_steps: int | None = None, *, overwrite: bool = False):  # fmt: skip
        if keep_last < 1 or (every_steps is not None and every_steps < 1):
            what = "keep_last and every_steps must be at least 1"
            raise ValueError(message("ModelCheckpoint", what, keep_last=keep_last, every_steps=every_steps))
        self.folder = Path(folder)
        self.keep_last, self.every_steps, self.overwrite = keep_last, every_steps, overwrite
        self._choice = (monitor, mode)
        self.watch: Improvement | None = None
        self._held: weakref.finalize[Any, ModelCheckpoint] | None = None

    def claim(self, resumed: str | os.PathLike[str] | None) -> None:
        """Raise if the folder belongs to another run than the checkpoint ``resumed``; called before anything is written.

        For a new run (``resumed=None``) the folder must have no checkpoints; with ``overwrite``, existing ones are deleted. Until
        :meth:`close`, other processes cannot claim the folder.
        """
        if self._held is None or not self._held.alive:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._held = weakref.finalize(self, hold_folder(self.folder, "ModelCheckpoint"))
        if resumed is None:
            earlier = [path for path in (self.folder / "best.netcl", *checkpoints(self.folder)) if path.exists()]
            if earlier and not self.overwrite:
                remedy = 'continue that run (resume="auto", --resume), remove it (overwrite=True, --overwrite), or name another folder'
                what = "the folder of a new run must not hold the checkpoints of another run"
                raise FileError(message("ModelCheckpoint", what, remedy, folder=self.folder, newest=earlier[-1].name))
            for path in earlier:
                path.unlink()
            return
        owner, run = self.folder / "run.txt", run_of(resumed)
        own = owner.read_text(encoding="utf-8", errors="replace").strip() if owner.is_file() else ""
        if own and run and own != run:
            what, remedy = "the checkpoint must belong to the run of the folder", "resume it with a ModelCheckpoint of another folder"
            raise FileError(message("ModelCheckpoint", what, remedy, folder=self.folder, checkpoint=resumed, run=run, expected=own))

    def on_train_begin(self, logs: Logs) -> None:
        if self.trainer.writes:
            with replacing(self.folder / "run.txt") as file:
                file.write(f"{self.trainer.run_id}\n".encode())

    def on_train_batch_end(self, batch: int, logs: Logs) -> None:
        if self.every_steps and self.trainer.at_boundary and self.trainer.step % self.every_steps == 0:
            self.save()

    def on_epoch_end(self, epoch: int, logs: dict[str, Any]) -> None:
        monitor, mode = self._choice
        if self.watch is None and monitor is not None:
            monitor = ("val_loss" if "val_loss" in logs else "loss") if monitor == "auto" else monitor
            self.watch = Improvement("ModelCheckpoint", monitor, mode)
        if self.watch is not None and self.trainer.by_rank_0(self.watch.better(logs)):
            self.trainer.save(self.folder / "best.netcl")
        self.save()

    def on_interrupt(self, logs: Logs) -> None:
        self.save()

    def close(self) -> None:
        if self._held is not None:
            self._held()

    def save(self) -> Path | None:
        """Write a checkpoint now and return its path, or ``None`` on ranks other than 0."""
        return self.trainer.save(self.folder, keep_last=self.keep_last)

    def state_dict(self) -> dict[str, Any]:
        return {} if self.watch is None else {"monitor": self.watch.monitor, "best": self.watch.best}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if state and self._choice[0] in ("auto", state["monitor"]):  # another number starts anew
            self.watch = Improvement("ModelCheckpoint", state["monitor"], self._choice[1])
            self.watch.best = float(state["best"])


class LRMonitor(Callback):
    """Adds the learning rate of an epoch's last step to its numbers: ``lr``, and ``lr_1``, ... if there are more parameter groups."""

    order = -1
    _rates: list[float] | None = None

    def on_train_batch_begin(self, batch: int, logs: Logs) -> None:
        self._rates = self.trainer.learning_rates()  # at the end of an epoch, schedules have already stepped

    def on_epoch_end(self, epoch: int, logs: dict[str, Any]) -> None:
        for i, rate in enumerate(self._rates or self.trainer.learning_rates()):
            logs[f"lr_{i}" if i else "lr"] = rate

    def state_dict(self) -> dict[str, Any]:
        return {"rates": self._rates}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._rates = state.get("rates")


class NaNGuard(Callback):
    """Ends a run whose loss is NaN or infinite; checks whenever the trainer reads the loss and after every epoch.

    ``action`` is ``raise`` (``FloatingPointError``) or ``stop``.
    """

    order = -1

    def __init__(self, action: str = "raise"):
        if action not in ("raise", "stop"):
            raise ValueError(message("NaNGuard", "action must be raise or stop", action=repr(action)))
        self.action = action

    def on_train_batch_end(self, batch: int, logs: Logs) -> None:
        if self.trainer.log_due:
            self._look(self.trainer.running_loss)  # also not finite if an earlier batch's loss was not

    def on_epoch_end(self, epoch: int, logs: dict[str, Any]) -> None:
        self._look(float(logs["loss"]))

    def _look(self, loss: float) -> None:
        if math.isfinite(loss):
            return
        self.trainer.stop_training = True
        if self.action == "raise":
            remedy = "lower the learning rate, set grad_clip, or find the first bad op with netcl.autograd.detect_anomaly()"
            raise FloatingPointError(message("NaNGuard", "the loss must be finite", remedy, loss=loss, step=self.trainer.step))
