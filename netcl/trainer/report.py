"""The report of any run: a callback that writes a page."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from netcl.core.device import handle_of
from netcl.profiling import profile
from netcl.trainer.callbacks import Logs
from netcl.trainer.logs import JSONLLogger, write_run_json

WARM_UP, PROFILED = 4, 5  # steps before the profile begins, which compile, and steps in it


class Report(JSONLLogger):
    """Writes ``report.html`` into a folder at the end of a run.

    The report shows curves, time by phase, memory, test results and the slowest kernels of :data:`PROFILED` steps.

    - **title**: the headline, by default the model's class.
    - **test**: batches ``(x, y)`` for the final numbers, with a confusion matrix or, for a regression, residuals. Without ``test``, the
      numbers are those of the last epoch, and the page shows no predictions.
    - **classes**: the names of the classes; by default their numbers.
    """

    order = 1
    _profile: profile | None = None

    def __init__(self, folder: str | os.PathLike[str], title: str = "", test: Any = None, classes: Sequence[str] = ()):
        super().__init__(Path(folder) / "log.jsonl")
        self.folder, self.title, self.test, self.classes = Path(folder), title, test, tuple(classes)

    def on_train_begin(self, logs: Logs) -> None:
        super().on_train_begin(logs)
        trainer = self.trainer
        self._profile, self._first = None, trainer.step + WARM_UP
        for name in ("results.json", "samples.npz", "profile.json", "report.html"):  # of an earlier run, or part of it
            (self.folder / name).unlink(missing_ok=True)
        settings: dict[str, Any] = {"epochs": trainer.epochs, "batches": trainer.batches, "optimizer": type(trainer.optimizer).__name__}
        settings |= {"lr": trainer.learning_rates()[0], "loss": getattr(trainer.loss_fn, "__name__", type(trainer.loss_fn).__name__)}
        write_run_json(self.folder / "config.json", {"title": self.title or type(trainer.model).__name__, **settings})

    def on_train_batch_begin(self, batch: int, logs: Logs) -> None:
        super().on_train_batch_begin(batch, logs)
        handle = handle_of(self.trainer.queue)
        if self._profile is None and self.trainer.step >= self._first and handle.backend == "cl":
            self._profile = profile(handle)
            self._profile.__enter__()

    def on_train_batch_end(self, batch: int, logs: Logs) -> None:
        if self.trainer.step >= self._first + PROFILED:
            self._end_profile()
        super().on_train_batch_end(batch, logs)

    def _end_profile(self) -> None:
        if self._profile is not None and self._profile.running:
            self._profile.__exit__()

    def close(self) -> None:
        self._end_profile()
        super().close()

    def on_test_begin(self, logs: Logs) -> None:
        self._end_profile()  # evaluation is not training

    def on_train_end(self, logs: Logs) -> None:
        from netcl.trainer.recipe import Data
        from netcl.trainer.report_html import write_report
        from netcl.trainer.run import run_results, save_samples

        trainer, seconds, values, classes = self.trainer, self.trainer.seconds, dict[str, Any](), self.classes
        hidden = r"epoch|seconds|samples_per_second|lr(_\d+)?"
        last = {name: value for name, value in logs.items() if isinstance(value, int | float) and not re.fullmatch(hidden, name)}
        if self.test is not None:
            values = {name: value for name, value in trainer.evaluate(self.test).items() if isinstance(value, int | float)}
            x, y = next(iter(self.test))
            outputs, targets = trainer.predict([x]).shape, tuple(y.shape)
            if not classes and len(outputs) == 2 and targets == outputs[:1] and "int" in str(y.dtype):
                classes = tuple(map(str, range(outputs[1])))
            if classes or math.prod(outputs) == math.prod(targets):  # not a score for each class and position
                reading = {} if classes else {"mean": [0.0], "scale": [1.0]}
                save_samples(self.folder / "samples.npz", trainer, self.test, Data(None, None, classes, None, reading))
        results = run_results(trainer, values, seconds, classes)
        write_run_json(self.folder / "results.json", results if values else {**results, "last_epoch": last})
        if self._profile is not None and self._profile.events:
            write_run_json(self.folder / "profile.json", self._profile.to_dict())
        write_report(self.folder)
