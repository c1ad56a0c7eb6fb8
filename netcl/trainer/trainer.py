"""The trainer: the loop over epochs and batches."""

from __future__ import annotations

import os
import secrets
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

import netcl.autograd as ag
from netcl import amp, distributed
from netcl.core.backend.lifecycle import Stop, finishing_first
from netcl.core.errors import message
from netcl.core.tensor import Tensor
from netcl.data import DataLoader, TensorDataset, WorkerError, random_split
from netcl.distributed import DistributedDataParallel, World
from netcl.distributed.checkpoint import unwrapped
from netcl.io import FileError, latest_whole, save_checkpoint
from netcl.nn.summary import evaluating
from netcl.ops import update
from netcl.optim import ReduceLROnPlateau
from netcl.optim.optimizer import check_counts
from netcl.replay.compiled import compile as compiled
from netcl.runtime import perf
from netcl.trainer.callbacks import Callback, CallbackList, ModelCheckpoint
from netcl.trainer.history import History
from netcl.trainer.metrics import Mean, Metric, make_metric
from netcl.trainer.progress import Progress

_UNCLIPPED = float(np.finfo(np.float32).max)  # a limit of the norm that no gradient is clipped to
_OWN_SIGNAL_SECONDS = 5.0  # the launcher signals every rank; how long a rank waits for its own signal before it exits


class BatchLogs(Mapping[str, Any]):
    """The numbers in ``known`` and the metrics of the epoch so far, after a batch. Each is read from the device at first access."""

    def __init__(self, known: Mapping[str, Any], metrics: Sequence[Metric]):
        self._known, self._metrics = known, {metric.name: metric for metric in metrics}
        self._read: dict[str, Any] = {}

    def __getitem__(self, name: str) -> Any:
        if name not in self._read:
            value = self._known[name] if name in self._known else self._metrics[name].compute()
            self._read[name] = value.item() if isinstance(value, Tensor) else value
        return self._read[name]

    def __iter__(self) -> Iterator[str]:
        return iter([*self._known, *self._metrics])

    def __len__(self) -> int:
        return len(self._known) + len(self._metrics)


def token_cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the mean cross-entropy of language models: logits ``(batch, positions, vocabulary)``, targets ``(batch, positions)``."""
    return ag.cross_entropy(ag.reshape(logits, (-1, logits.shape[-1])), ag.reshape(targets, (-1,)))


class Trainer:
    """Trains, evaluates and applies a model.

    - **model**, **optimizer**: the model to train, and the optimizer of its parameters.
    - **device_queue**, or **device**: where to train (a queue, handle or selector); by default where the model is.
    - **loss_fn**: ``loss_fn(outputs, targets)``, by default cross-entropy.
    - **metrics**: names (``"accuracy"``, ``"top5"``) or :class:`~netcl.trainer.metrics.Metric` objects.
    - **mixed_precision**: ``True`` or a dtype (``"float16"``, ``"bfloat16"``): run forward under autocast; for float16, scale the loss.
    - **grad_clip**: the largest norm of all gradients together. **accumulation_steps**: batches per optimizer step.
    - **scheduler**: steps after every step of the optimizer, or, with ``schedule_by="epoch"``, after every epoch.
      ``ReduceLROnPlateau`` always steps after an epoch, with the validation loss if there is one, else the loss.
    - **ema**: a ``ModelEMA``, updated at each step; evaluation and prediction use its averages.
    - **compile**: run the training step through ``netcl.compile``.
    - **callbacks**: see :mod:`netcl.trainer.callbacks`.
    - **batch_weight**: the weight of a batch in the mean loss and in an optimizer step of several, a function of the targets that returns a
      tensor; by default the number of samples in the mean, and all batches of a step count the same.

    Data is an iterable of batches ``(x, y)`` of arrays or tensors, such as a ``DataLoader`` or a list. It is iterated once per epoch.

    >>> from netcl import nn, optim
    >>> x = np.array([[0.0, 1.0], [1.0, 0.0]] * 8, np.float32)
    >>> y = np.array([0, 1] * 8)
    >>> model = nn.Linear(2, 2)
    >>> trainer = Trainer(model, optim.SGD(model.parameters(), lr=1.0), metrics=["accuracy"], callbacks=[Progress("off")])
    >>> history = trainer.fit([(x, y)], epochs=20)
    >>> history["accuracy"][-1], trainer.evaluate([(x, y)])["accuracy"]
    (1.0, 1.0)
    """

    def __init__(self, model: Any, optimizer: Any, device_queue: Any = None, loss_fn: Callable[[Any, Any], Tensor] | None = None,
                 metrics: Sequence[str | Metric] = (), mixed_precision: bool | str = False, grad_clip: float | None = None,
                 accumulation_steps: int = 1, scheduler: Any = None, ema: Any = None, compile: bool = False,
                 callbacks: Sequence[Callback] = (), *, schedule_by: str = "step", device: Any = None,
                 batch_weight: Callable[[Tensor], Tensor] | None = None):  # fmt: skip
        check_counts("Trainer", accumulation_steps=accumulation_steps)
        if schedule_by not in ("step", "epoch"):
            raise ValueError(message("Trainer", "schedule_by must be step or epoch", schedule_by=repr(schedule_by)))
        self.model, self.optimizer = model, optimizer
        if device_queue is not None or device is not None:
            model.to(device if device_queue is None else device_queue)
        own = {id(p) for p in model.parameters()}
        given = getattr(optimizer, "params", None) or [p for group in optimizer.param_groups for p in group["params"]]
        if own and not any(id(p) in own for p in given):
            what = "the optimizer must have at least one parameter of the model"
            raise ValueError(message("Trainer", what, "create it with model.parameters()", parameters=len(own), optimizer=len(given)))
        if getattr(scheduler, "optimizer", optimizer) is not optimizer:
            raise ValueError(message("Trainer", "the scheduler must be one of the optimizer", "create it with this optimizer"))
        if ema is not None and own and not any(id(p) in own for p in ema.parameters.values()):
            raise ValueError(message("Trainer", "ema must average the weights of the model", "create it with this model, not with a copy"))
        self.loss_fn = ag.cross_entropy if loss_fn is None else loss_fn
        self.metrics = [make_metric(metric) for metric in metrics]
        if len({"loss", *(metric.name for metric in self.metrics)}) <= len(self.metrics):
            names = [metric.name for metric in self.metrics]
            raise ValueError(message("Trainer", "metrics must have different names, and none is loss", "set metric.name", names=names))
        self.grad_clip, self.accumulation_steps = grad_clip, accumulation_steps
        self.batch_weight = batch_weight
        self.scheduler, self.schedule_by, self.ema = scheduler, schedule_by, ema
        self._autocast, self.scaler = _precision_of(mixed_precision)
        train_step = self._whole_step if accumulation_steps == 1 else self._gradients
        self._train_step: Callable[[Any, Any, bool], tuple[Any, Tensor, Tensor | None]] = compiled(train_step) if compile else train_step
        shown = [] if any(isinstance(callback, Progress) for callback in callbacks) else [Progress()]
        self.callbacks = CallbackList([*shown, *callbacks])
        self._loss = Mean()
        self.measures_norm = False  # set by callbacks that show the norm of the gradients
        self._reset()

    def _reset(self) -> None:
        self.epoch, self.batch, self.step = 0, 0, 0
        self.epochs = 0
        self.run_id = secrets.token_hex(8)  # checkpoints carry it, and a resumed run keeps it
        self.batches: int | None = None
        self.history = History()
        self.phase, self.phase_seconds = "training", defaultdict[str, float](float)
        self._timed, self._counted, self._began = False, 0.0, time.perf_counter()
        self._earlier_seconds = 0.0  # of a resumed run
        self.stop_training = self.log_due = self._trained = False
        self.batch_loss: Tensor | None = None
        self.grad_norm: Tensor | None = None
        self._accumulated = 0
        self._weights: Tensor | None = None  # of the accumulated batches, together
        self._train_data: Any = None
        for metric in self._counting:
            metric.reset()

    @property
    def _counting(self) -> list[Metric]:
        return [self._loss, *self.metrics]

    @property
    def queue(self) -> Any:
        return self.model.queue

    @property
    def at_boundary(self) -> bool:
        """Whether no gradients are accumulated, as right after a step of the optimizer."""
        return self._accumulated == 0

    @property
    def samples(self) -> int:
        """The number of samples of the epoch so far."""
        return self._loss.samples

    @contextmanager
    def _phase(self, name: str) -> Iterator[None]:
        """Count the time of a block for the phase ``name`` and not for the enclosing phase."""
        outer, timed, began = self.phase, self._timed, self._count_phase()
        self.phase, self._timed = name, True
        try:
            yield
        finally:
            ended = self._count_phase()
            self.phase, self._timed = outer, timed
            for listener in perf.listeners:
                listener(name, began, ended)

    def _count_phase(self) -> float:
        """Add the time since the last call to the current phase; returns the time."""
        before, self._counted = self._counted, time.perf_counter()
        if self._timed:
            self.phase_seconds[self.phase] += self._counted - before
        return self._counted

    @property
    def seconds(self) -> float:
        """The seconds of the run until now; of a resumed run, with those until its checkpoint."""
        return self._earlier_seconds + time.perf_counter() - self._began

    @property
    def running_loss(self) -> float:
        """The mean loss of the epoch so far. Waits for the device."""
        return float(self._loss.compute())

    def learning_rates(self) -> list[float]:
        """Return the current learning rate of every parameter group."""
        return [float(group["lr"]) for group in self.optimizer.param_groups]

    def __repr__(self) -> str:
        parts = [type(self.model).__name__, type(self.optimizer).__name__, f"metrics={[metric.name for metric in self.metrics]}"]
        parts += [type(self.scheduler).__name__] if self.scheduler is not None else []
        return f"Trainer({', '.join(parts)}, epoch={self.epoch}, step={self.step})"

    def fit(self, train: Any, val: Any = None, epochs: int = 1, resume: str | os.PathLike[str] | None = None, log_every: int = 20, *,
            batch_size: int = 32, validation_split: float = 0.0, validation_data: Any = None, seed: int = 0) -> History:  # fmt: skip
        """Train until ``epochs`` epochs are done, including those of a resumed run; returns the history. ``fit(batches)`` or ``fit(x, y)``.

        - **val**: data to evaluate after each epoch; its numbers are called ``val_loss``, .... In ``fit(x, y)`` it is the targets ``y``.
        - **batch_size**, **validation_split**, **validation_data**, **seed**: for arrays only: the size of a batch, the share of samples
          drawn for validation (or the arrays ``(x, y)`` to use), and the seed of the drawing and the order. Each epoch is shuffled.
        - **resume**: a checkpoint, a folder of checkpoints, or ``"auto"``: the folder of the ``ModelCheckpoint`` callback, which may be
          empty. The newest readable checkpoint of a folder is loaded; damaged newer ones are renamed, with a warning. The run continues
          to the bit if the data restores its position (``DataLoader``) or has the same order each time.
          Without ``resume``, a ``ModelCheckpoint`` folder that already holds checkpoints raises, unless ``overwrite`` is set.
        - **log_every**: the number of batches between two readings of the loss and the metrics; each reading waits for the device.

        The first Ctrl-C or SIGTERM lets the step finish and ``ModelCheckpoint`` save, then exits with status 130 or 143; a second one
        exits at once. Ranks of a ``DistributedDataParallel`` model exit together, after the next logged batch; an error of one rank
        ends the run on all.
        """
        check_counts("fit", epochs=epochs, log_every=log_every)
        if isinstance(train, np.ndarray | Tensor):
            train, val = self._loaders_of(train, val, batch_size, validation_split, validation_data, seed)
        elif validation_split or validation_data is not None:
            remedy = "pass the batches to evaluate as val="
            raise ValueError(message("fit", "validation_split and validation_data require arrays, fit(x, y)", remedy))
        self._reset()
        self._train_data, self.epochs = train, epochs
        self.batches = len(train) if isinstance(train, Sized) else None
        for callback in self.callbacks.callbacks:
            callback.set_trainer(self)
        ranks = self._ranks or World()
        with ranks.together(), finishing_first() as interrupt, ExitStack() as ending:
            # A rank with fewer steps would leave the others waiting behind its last one.
            what = "batches, epochs, log_every and accumulation_steps"
            ranks.agree("fit", what, [self.batches, epochs, log_every, self.accumulation_steps])
            found = self._to_resume(resume)
            for callback in reversed(self.callbacks.callbacks):
                ending.callback(callback.close)  # each, also if another raises
            for callback in self.callbacks.callbacks if self.writes else ():
                if isinstance(callback, ModelCheckpoint):
                    callback.claim(found)  # before anything is loaded or written
            if found is not None:
                self.load(found)
            self.callbacks("on_train_begin", {})
            while self.epoch < epochs and not self.stop_training:
                self._run_epoch(train, val, log_every, interrupt)
            self.callbacks("on_train_end", self.history.last)
        return self.history

    def _run_epoch(self, train: Iterable[Any], val: Iterable[Any] | None, log_every: int, interrupt: Stop) -> None:
        began, seen = time.perf_counter(), self.samples
        self.callbacks("on_epoch_begin", self.epoch, {})
        if not self._trained:
            with self._phase("training"):
                self._train_batches(train, log_every, interrupt)
        values = {metric.name: metric.compute() for metric in self._counting}
        logs: dict[str, Any] = {"epoch": self.epoch, **{name: value for name, value in values.items() if isinstance(value, int | float)}}
        seconds = time.perf_counter() - began
        logs |= {"seconds": seconds, "samples_per_second": (self.samples - seen) / seconds}
        self._trained = True
        if val is not None:
            with self._phase("validating"):
                values = self._evaluate(val, interrupt)
            logs |= {f"val_{name}": value for name, value in values.items() if isinstance(value, int | float)}
        self._step_scheduler("epoch", logs)
        self.history.rows.append(logs)
        self.epoch, self.batch, self._trained = self.epoch + 1, 0, False
        for metric in self._counting:
            metric.reset()
        self.callbacks("on_epoch_end", self.epoch - 1, logs)
        self._leave_if(interrupt)

    def _train_batches(self, train: Iterable[Any], log_every: int, interrupt: Stop) -> None:
        self.model.train()
        self.optimizer.zero_grad()
        skipped = 0 if hasattr(train, "load_state_dict") else self.batch
        try:
            for x, y in map(_inputs_and_targets, islice(iter(train), skipped, None)):
                self.callbacks("on_train_batch_begin", self.batch, {})
                self.log_due = (self.batch + 1) % log_every == 0 or self.batch + 1 == self.batches
                self.batch_loss = self.train_on_batch(x, y)
                logs = BatchLogs({"epoch": self.epoch, "batch": self.batch, "loss": self.batch_loss}, self.metrics)
                self.batch += 1
                self.callbacks("on_train_batch_end", self.batch - 1, logs)
                if self.at_boundary and (self.log_due or self._ranks is None):
                    self._leave_if(interrupt)
                    if self.stop_training:
                        break
        except WorkerError:
            if not interrupt.is_set() or self._ranks is not None:
                raise
            if self.at_boundary:  # the signal also ended the workers, as that of a scheduler to all processes of a job
                self._leave_if(interrupt)
            raise SystemExit(interrupt.status) from None
        if self._accumulated:
            self._update()
        _check_batches("fit", self.batch)

    def train_on_batch(self, x: Any, y: Any) -> Tensor:
        """Train on one batch; returns its loss without waiting for the device."""
        inputs, targets = self._tensor(x), self._tensor(y)
        outputs, loss, norm = self._train_step(inputs, targets, self._measures)
        self.grad_norm = self.grad_norm if norm is None else norm
        self._accumulated += 1
        if self.batch_weight is not None and self.accumulation_steps > 1:
            weight = self.batch_weight(targets)
            self._weights = weight if self._weights is None else ag.add(self._weights, weight)
        if self._accumulated == self.accumulation_steps:
            self._update()
        self._count(outputs, loss, targets)
        return loss

    @property
    def _measures(self) -> bool:
        """Whether this step computes the norm of its gradients although they are not clipped."""
        return self.measures_norm and self.grad_clip is None and (self.log_due or self.accumulation_steps > 1)

    def _gradients(self, inputs: Any, targets: Any, measures: bool) -> tuple[Any, Tensor, None]:
        with self._autocast():
            outputs = self.model(inputs)
            loss = self.loss_fn(outputs, targets)
        if not isinstance(loss, Tensor):
            raise TypeError(message("fit", "loss_fn must return a Tensor", given=type(loss).__name__))
        alone = self.batch_weight is None or self.accumulation_steps == 1
        weighted = loss if alone else ag.mul(loss, self.batch_weight(targets))  # type: ignore[misc]
        (weighted if self.scaler is None else self.scaler.scale_loss(weighted)).backward()
        return outputs.detach(), loss.detach(), None

    def _whole_step(self, inputs: Any, targets: Any, measures: bool) -> tuple[Any, Tensor, Tensor | None]:
        outputs, loss, _ = self._gradients(inputs, targets, measures)
        return outputs, loss, self._optimize(measures)

    def _optimize(self, measures: bool) -> Tensor | None:
        limit = _UNCLIPPED if measures else self.grad_clip
        if self.scaler is None:
            norm = self.optimizer.step(max_norm=limit)
        else:
            norm = self.scaler.step(self.optimizer, max_norm=limit)
            self.scaler.update()
        self.optimizer.zero_grad()
        return norm

    def _update(self) -> None:
        """Count an optimizer step, step the scheduler and update ``ema``. With accumulation, the optimizer itself steps here."""
        if self.accumulation_steps > 1:
            if self._accumulated > 1 or self._weights is not None:
                share = 1 / self._accumulated if self._weights is None else ag.div(1.0, self._weights)
                params = getattr(self.optimizer, "params", None) or self.model.parameters()  # of replicas, those of all
                for gradients in update.by_context([p.grad for p in params if p.grad is not None]).values():
                    update.scale(gradients, share)
            self.grad_norm = self._optimize(self._measures)
        self._accumulated, self._weights = 0, None
        self.step += 1
        self._step_scheduler("step", {})
        if self.ema is not None:
            self.ema.update()

    def _step_scheduler(self, moment: str, logs: Mapping[str, Any]) -> None:
        if isinstance(self.scheduler, ReduceLROnPlateau):
            if moment == "epoch":
                self.scheduler.step(logs.get("val_loss", logs["loss"]))
        elif self.scheduler is not None and moment == self.schedule_by:
            self.scheduler.step()

    def _count(self, outputs: Any, loss: Tensor, targets: Any) -> None:
        with ag.no_grad():
            self._loss.include(loss, len(targets), None if self.batch_weight is None else self.batch_weight(targets))
            for metric in self.metrics:
                metric.update(outputs, targets)

    @property
    def _ranks(self) -> World | None:
        """The world of the ranks that train the model together; ``None`` if this process trains alone."""
        return self.model.world if isinstance(self.model, DistributedDataParallel) and self.model.world.size > 1 else None

    def _leave_if(self, interrupt: Stop) -> None:
        """Raise ``SystemExit`` after a signal. All ranks exit or stop training together: a rank that ended alone would block the others."""
        leave = interrupt.is_set()
        if self._ranks is not None:
            gathered = self._ranks.all_gather_object([leave, self.stop_training], "fit")
            leave, self.stop_training = (any(column) for column in zip(*gathered, strict=True))
        if leave:
            self.callbacks("on_interrupt", {})
            if self._ranks is not None:
                interrupt.wait(_OWN_SIGNAL_SECONDS)  # a signal that arrives during interpreter shutdown would print a traceback
            raise SystemExit(interrupt.status)

    def evaluate(self, data: Any, targets: Any = None, *, batch_size: int = 32) -> dict[str, Any]:
        """Return the loss and the metrics over batches or arrays (``evaluate(x, y)``), in evaluation mode; uses the averages of ``ema``."""
        if isinstance(data, np.ndarray | Tensor):
            data = DataLoader(self._pair("evaluate", data, targets), batch_size, shuffle=False)
        return self._evaluate(data, Stop())

    def _evaluate(self, data: Iterable[Any], interrupt: Stop) -> dict[str, Any]:
        kept, batches = [metric.state_dict() for metric in self._counting], 0
        for metric in self._counting:
            metric.reset()
        self.callbacks("on_test_begin", {})
        with ag.no_grad(), evaluating(self.model), self.averaged():
            for i, (x, y) in enumerate(map(_inputs_and_targets, data)):
                batches += 1
                self.callbacks("on_test_batch_begin", i, {})
                targets = self._tensor(y)
                with self._autocast():
                    outputs = self.model(self._tensor(x))
                    loss = self.loss_fn(outputs, targets)
                self._count(outputs, loss, targets)
                self.callbacks("on_test_batch_end", i, BatchLogs({}, self._counting))
                if interrupt.is_set() and self._ranks is None:
                    break
        values = {metric.name: metric.compute() for metric in self._counting}
        for metric, state in zip(self._counting, kept, strict=True):
            metric.load_state_dict(state)
        _check_batches("evaluate", batches)
        if self._ranks is None:  # not all ranks need be here
            self._leave_if(interrupt)
        self.callbacks("on_test_end", values)
        return values

    def predict(self, data: Any) -> np.ndarray:
        """Return the model's outputs as one array, for one batch (an array or tensor) or for batches with or without targets."""
        batches = [data] if isinstance(data, np.ndarray | Tensor) else data
        self.callbacks("on_predict_begin", {})
        found = []
        with ag.no_grad(), evaluating(self.model), self.averaged():
            for i, batch in enumerate(batches):
                self.callbacks("on_predict_batch_begin", i, {})
                with self._autocast():
                    outputs = self.model(self._tensor(batch[0] if isinstance(batch, tuple | list) else batch))
                found.append(outputs.to_host())
                self.callbacks("on_predict_batch_end", i, {})
        self.callbacks("on_predict_end", {})
        _check_batches("predict", len(found))
        return np.concatenate(found)

    def averaged(self) -> AbstractContextManager[None]:
        """Return a context in which the model has the averaged weights of ``ema``, if there is one."""
        return nullcontext() if self.ema is None else self.ema.applied()

    def _tensor(self, value: Any) -> Tensor:
        return value if isinstance(value, Tensor) else Tensor.from_host(self.queue, np.asarray(value))

    def _pair(self, op: str, x: Any, y: Any) -> TensorDataset:
        """Return arrays of inputs and targets as a dataset; float64 becomes float32 unless the model has float64 parameters."""
        if y is None:
            raise ValueError(message(op, "targets must be given with an array of inputs", f"{op}(x, y), or {op}(batches) of (x, y)"))
        host = [value.to_host() if isinstance(value, Tensor) else np.asarray(value) for value in (x, y)]
        if len(host[0]) != len(host[1]):
            raise ValueError(message(op, "x and y must have the same number of samples", x=host[0].shape, y=host[1].shape))
        if not any(parameter.dtype == "float64" for parameter in self.model.parameters()):
            host = [array.astype(np.float32) if array.dtype == np.float64 else array for array in host]
        return TensorDataset(*host)

    def _loaders_of(self, x: Any, y: Any, batch_size: int, split: float, given: Any, seed: int) -> tuple[DataLoader, DataLoader | None]:
        """Return loaders of the arrays of ``fit(x, y)``: one to train on, and one to evaluate, or ``None``."""
        data: Any = self._pair("fit", x, y)
        if not 0.0 <= split < 1.0 or (split and given is not None):
            what = "validation_split must be at least 0 and below 1, and cannot be given with validation_data"
            raise ValueError(message("fit", what, validation_split=split, validation_data=type(given).__name__))
        val: Any = None if given is None else self._pair("fit", *given)
        if split:
            samples = len(data)
            data, val = random_split(data, [1.0 - split, split], seed=seed)
            if not len(data) or not len(val):
                what, remedy = "validation_split must leave samples for both parts", "change it, or pass validation_data"
                raise ValueError(message("fit", what, remedy, validation_split=split, samples=samples))
        made = None if val is None else DataLoader(val, batch_size, shuffle=False)
        return DataLoader(data, batch_size, shuffle=True, seed=seed), made

    # ---- checkpoints

    def save(self, path: str | os.PathLike[str], keep_last: int | None = None) -> Path | None:
        """Write a checkpoint and return its path: weights, optimizer, schedule, scaler, averages, position in the data, numbers so far.

        Ranks of a ``DistributedDataParallel`` model all call this; rank 0 writes, and the others get ``None``.
        """
        if not self.at_boundary:
            what, remedy = "a checkpoint has no gradients, so a step must not be under way", "save where trainer.at_boundary is true"
            raise RuntimeError(message("Trainer.save", what, remedy, accumulated=self._accumulated, of=self.accumulation_steps))
        whole = {**self._parts(), "step": self.step, "extra": self.state_dict(), "keep_last": keep_last, "run": self.run_id}
        ranks = self._ranks
        with self._phase("saving"):
            return save_checkpoint(path, **whole) if ranks is None else distributed.save_checkpoint(path, world=ranks, **whole)

    @property
    def writes(self) -> bool:
        """Whether this process writes the files of the run; of several ranks only rank 0 does."""
        return self._ranks is None or self._ranks.rank == 0

    def by_rank_0(self, value: Any) -> Any:
        """Return rank 0's JSON value on all ranks, for decisions that must be equal on every rank."""
        return value if self._ranks is None else self._ranks.all_gather_object(value, "fit")[0]

    def load(self, path: str | os.PathLike[str]) -> None:
        """Restore a checkpoint of :meth:`save`; ``fit(resume=path)`` also restores the position in the data.

        Ranks of a ``DistributedDataParallel`` model all call this; only rank 0 needs to have the file.
        """
        world = self.model.world if isinstance(self.model, DistributedDataParallel) else World()
        try:
            loaded = distributed.load_checkpoint(path, world=world, **self._parts())
            self.load_state_dict(loaded.extra)
        except ValueError as fault:
            if isinstance(fault, FileError):
                raise
            raise FileError(message("fit", f"the checkpoint must fit this trainer: {fault}", file=path)) from fault
        self.run_id = loaded.run or self.run_id

    def _parts(self) -> dict[str, Any]:
        loader = self._train_data if hasattr(self._train_data, "load_state_dict") else None
        parts = {"scheduler": self.scheduler, "scaler": self.scaler, "ema": self.ema, "loader": loader}
        return {"model": unwrapped(self.model), "optimizer": self.optimizer, **parts}

    def _to_resume(self, resume: str | os.PathLike[str] | None) -> str | None:
        """Return the checkpoint to resume from, or ``None``. Rank 0 chooses it, because machines need not share a disk."""
        if resume is None:
            return None
        folders = [callback.folder for callback in self.callbacks.callbacks if isinstance(callback, ModelCheckpoint)]
        if resume == "auto" and not folders:
            remedy = "add one to the callbacks, or name a checkpoint"
            raise ValueError(message("fit", 'resume="auto" requires a ModelCheckpoint', remedy))
        place, found = folders[0] if resume == "auto" else Path(resume), None
        if self.writes:
            found = latest_whole(place) or (None if resume == "auto" else place)
        return self.by_rank_0(None if found is None else str(found))

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the run: counters, times, sums of the current epoch, history and callback states."""
        self._count_phase()
        return {
            "epoch": self.epoch, "batch": self.batch, "step": self.step, "trained": self._trained, "stop": self.stop_training,
            "seconds": self.seconds, "phases": dict(self.phase_seconds),
            "history": self.history.rows, "metrics": {metric.name: metric.state_dict() for metric in self._counting},
            "callbacks": [[type(callback).__name__, callback.state_dict()] for callback in self.callbacks.callbacks],
        }  # fmt: skip

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a :meth:`state_dict`. Metrics and callbacks that the saved run did not have start anew."""
        self.epoch, self.batch, self.step = (int(state[name]) for name in ("epoch", "batch", "step"))
        self._trained, self.stop_training = bool(state["trained"]), bool(state["stop"])
        self._earlier_seconds = float(state.get("seconds", 0.0))
        self.phase_seconds.update(state.get("phases", {}))
        self.history = History([dict(row) for row in state["history"]])
        for metric in self._counting:
            if metric.name in state["metrics"]:
                metric.load_state_dict(state["metrics"][metric.name])
                metric.sums = [total.to(self.queue) for total in metric.sums]
        saved = [(name, own) for name, own in state["callbacks"]]
        for callback in self.callbacks.callbacks:
            match = next((pair for pair in saved if pair[0] == type(callback).__name__), None)
            if match is not None:
                saved.remove(match)
                callback.load_state_dict(match[1])


def _check_batches(op: str, count: int) -> None:
    if not count:
        raise ValueError(message(op, "the data must have at least one batch", "an iterator can be used only once: pass a list"))


def _inputs_and_targets(batch: Any) -> tuple[Any, Any]:
    """Return the inputs and the targets of a batch; raises unless it is a pair, of at least one sample."""
    if not isinstance(batch, tuple | list) or len(batch) != 2:
        parts = len(batch) if isinstance(batch, tuple | list) else "none"
        what, remedy = "a batch must be a pair (x, y)", "pass batches of inputs and targets"
        raise ValueError(message("Trainer", what, remedy, type=type(batch).__name__, parts=parts))
    if getattr(batch[1], "shape", ())[:1] == (0,):  # its mean loss is NaN, and so would be the weights
        raise ValueError(message("Trainer", "a batch must have at least one sample", "leave out empty batches", shape=batch[1].shape))
    return batch[0], batch[1]


def _precision_of(mixed: bool | str) -> tuple[Callable[[], AbstractContextManager[Any]], Any]:
    """Return a function that makes the autocast context of forward passes, and the loss scaler (``None`` except for float16)."""
    if not mixed:
        return nullcontext, None
    dtype = "float16" if mixed is True else mixed
    amp.autocast(dtype=dtype)  # a dtype that it does not take is refused now
    return lambda: amp.autocast(dtype=dtype), amp.GradScaler() if dtype == "float16" else None
