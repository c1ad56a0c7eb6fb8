"""Ctrl-C in a run: the step is finished, a checkpoint is written, and the process leaves with 130."""

from __future__ import annotations

import signal
import subprocess
import sys
import time

import numpy as np
import pytest

from netcl import nn, optim
from netcl.core.device import manager
from netcl.data import WorkerError
from netcl.io import latest, load_checkpoint
from netcl.trainer import ModelCheckpoint, Progress, Trainer

SCRIPT = """
import sys, time
import numpy as np
from netcl import nn, optim
from netcl.core.backend import lifecycle
from netcl.core.device import manager
from netcl.trainer import Callback, ModelCheckpoint, Progress, Trainer

lifecycle.GRACE_SECONDS = 0.5

class Slow(Callback):
    def on_train_batch_begin(self, batch, logs):
        if batch == 1:
            print("in the step", flush=True)
            time.sleep(float(sys.argv[3]))

model = nn.Linear(manager.default(sys.argv[1]), 4, 2)
data = [(np.eye(4, dtype=np.float32), np.arange(4) % 2)] * 1000
callbacks = [Slow(), Progress("plain"), ModelCheckpoint(sys.argv[2])]
trainer = Trainer(model, optim.SGD(model.parameters(), lr=0.1), accumulation_steps=2, callbacks=callbacks)
trainer.fit(data)
print("never")
"""


def start(device, folder, seconds, sent=signal.SIGINT):
    arguments = [sys.executable, "-c", SCRIPT, device.platform_name if device.backend == "cl" else "cpu", str(folder), str(seconds)]
    process = subprocess.Popen(arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stdout.readline() == "in the step\n"
    time.sleep(0.2)
    process.send_signal(sent)
    return process


@pytest.mark.fault("Ctrl-C to a training", "SIGINT in the middle of a step", "the step ends, a checkpoint is saved, status 130")
def test_the_first_ctrl_c_finishes_the_step_and_saves(device, tmp_path):
    """The step takes longer than the grace time that a driver has: it is finished nevertheless."""
    with start(device, tmp_path, 1.5) as process:
        out, err = process.communicate(timeout=200)
    assert (process.returncode, out) == (130, "") and "interrupted after step 1" in err and "Traceback" not in err
    found = load_checkpoint(latest(tmp_path))
    assert found.step == 1 and found.extra["batch"] == 2


@pytest.mark.fault("SIGTERM to a training", "sent in the middle of a step", "the step ends, a checkpoint is saved, status 143")
def test_sigterm_saves_as_ctrl_c_does(tmp_path):
    with start(manager.default("cpu"), tmp_path, 0.5, signal.SIGTERM) as process:
        out, err = process.communicate(timeout=200)
    assert (process.returncode, out) == (143, "") and "interrupted after step 1" in err and "Traceback" not in err
    assert load_checkpoint(latest(tmp_path)).step == 1


@pytest.mark.fault("SIGTERM to all processes of a job", "the workers of the loader end too", "a checkpoint is saved, status 143")
@pytest.mark.parametrize("accumulated", [1, 2])
def test_a_signal_that_also_ends_the_workers_of_a_loader(tmp_path, accumulated):
    def batches():
        yield np.eye(4, dtype=np.float32), np.arange(4) % 2
        signal.raise_signal(signal.SIGTERM)
        raise WorkerError("worker 0 was killed by SIGTERM")

    model = nn.Linear(manager.default("cpu"), 4, 2)
    callbacks = [Progress("off"), ModelCheckpoint(tmp_path)]
    trainer = Trainer(model, optim.SGD(model.parameters(), lr=0.1), accumulation_steps=accumulated, callbacks=callbacks)
    with pytest.raises(SystemExit) as left:
        trainer.fit(batches())
    assert left.value.code == 143 and (latest(tmp_path) is None) == (accumulated == 2)  # in the middle of a step, none


def test_the_second_leaves_at_once(device, tmp_path):
    with start(device, tmp_path, 1000) as process:
        time.sleep(0.3)
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=100) == 130
    assert latest(tmp_path) is None
