"""What test_driver.py runs in a process of its own: training on a driver of which any call can be made to fail."""

import gc
import sys
import tempfile
from pathlib import Path

import numpy as np
from failing_driver import install

import netcl as nc
from netcl import io, nn, optim
from netcl.core import errors, memory
from netcl.core.device import require, set_active_device
from netcl.runtime.scheduler import Stream

OWN = (errors.DeviceError, errors.OutOfMemoryError, errors.KernelBuildError)


driver = install()
gc.freeze()  # `in_use` collects after every call: only what the runs make need be searched


class Run:
    """A small network with everything a step changes, and the step, eager or compiled."""

    def __init__(self, compiled, hidden=12):
        nc.manual_seed(3)
        rng = np.random.default_rng(5)
        self.model = nn.Sequential(nn.Linear(6, hidden), nn.BatchNorm1d(hidden), nn.ReLU(), nn.Linear(hidden, 3))
        self.optimizer = optim.AdamW(self.model.parameters(), lr=0.05)
        self.x, self.labels = rng.standard_normal((9, 6), np.float32), rng.integers(0, 3, 9)
        model, optimizer = self.model, self.optimizer

        def step(x, labels):
            loss = nn.functional.cross_entropy(model(x), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step(max_norm=1.0)
            return loss

        self._plain = self.step = step
        if compiled:
            self.compile()

    def compile(self):
        self.step = nc.compile(self._plain)

    def replays(self):
        """Whether the step is replayed."""
        return self.step is not self._plain and bool(self.step.graphs) and not self.step.refused

    def train(self):
        return float(self.step(nc.tensor(self.x), nc.tensor(self.labels)).item())

    def state(self):
        """Values of everything that a step changes, by name, except the statistics of the forward pass."""
        kept = {name: value.numpy() for name, value in self.model.named_parameters()}
        for i, of in self.optimizer.state_dict()["state"].items():
            kept |= {f"{i}.{name}": np.asarray(value.numpy() if isinstance(value, nc.Tensor) else value) for name, value in of.items()}
        return kept


def equal(a, b):
    return a.keys() == b.keys() and all(np.array_equal(a[name], b[name]) for name in a)


def in_use():
    gc.collect()
    nc.synchronize()
    memory.empty_cache()
    return memory.memory_stats()["bytes_in_use"]


def check_after(run, folder):
    """The model can be saved, loaded and trained on."""
    io.save_model(run.model, folder / "model.netcl")
    loaded = io.load_model(folder / "model.netcl")
    assert all(np.array_equal(a.numpy(), b.numpy()) for a, b in zip(run.model.parameters(), loaded.parameters(), strict=True))
    del loaded
    assert np.isfinite(run.train())


def sweep(mode, status, times):
    """Every driver call of a step fails in its turn, until a step makes fewer calls.

    ``recorded`` compiles the step anew each time, so that its recording fails; tensors of ``wide`` are pieces of segments.
    """
    run, folder = Run(mode in ("compiled", "recorded"), 12 if mode != "wide" else 9000), Path(tempfile.mkdtemp())
    for _ in range(5):
        run.train()
    check_after(run, folder)
    held, told, number, kinds = in_use(), 0, 1, []
    while number <= len(kinds) + 1:
        if mode == "recorded":
            run.compile()
            run.train()
        before, failed = run.state(), None
        with driver.failing_at(number, status, times == "once"):
            try:
                run.train()
            except OWN as error:
                failed, told = str(error), told + 1
            kinds = list(driver.calls)
        assert failed is None or (failed.startswith("[") and "; " in failed and status in failed), failed
        after = run.state()
        changed = [name for name in before if not np.array_equal(before[name], after[name])]
        assert len(changed) in ((0, len(before)) if failed else (len(before),)), (number, failed, changed)
        if number % 4 == 1:
            check_after(run, folder)
        else:
            run.train()
        assert in_use() == held or mode == "recorded", (number, failed, in_use(), held)
        number += 1
    if mode == "recorded":
        for _ in range(5):
            run.train()
        assert in_use() == held, (in_use(), held)
    assert told and run.replays() == (mode in ("compiled", "recorded"))
    say(f"{mode} {status} {times}: {number - 2} calls, {told} told")


def _pieces():
    whole = nc.zeros((1 << 19,))
    del whole
    return [nc.zeros((1 << 17,)), nc.zeros((1 << 16,))]


def _streams(stream):
    x = nc.ones((4, 4))
    with stream:
        return (stream.use(x) @ nc.ones((4, 4))).numpy()


DOORS = {
    "pieces": _pieces,
    "pinned": lambda: nc.Tensor.from_host(np.ones(5000, np.float32), use_pinned=True).numpy(),
    "shared": lambda: nc.Tensor.from_host(np.ones(5000, np.float32), share=True).numpy(),
    "asynchronous": lambda: (nc.ones((5000,)) * 2).to_host_async().wait(),
    "clone": lambda: nc.ones((5000,)).clone().numpy(),
    "indices": lambda: nc.ones((50, 3))[nc.tensor(np.array([3, 4]))].numpy(),
    "random": lambda: nn.functional.dropout(nc.ones((50,))).numpy(),
    "streams": lambda: _streams(Stream()),
    "synchronize": lambda: (nc.ones((50,)) * 2, nc.synchronize()),
}


def doors():
    """Every driver call of every way to make or read a tensor fails in its turn."""
    for name, function in DOORS.items():
        function()
        held, number, failed = in_use(), 0, True
        while failed:
            number, failed = number + 1, False
            with driver.failing_at(number, "INVALID_OPERATION", True):
                try:
                    function()
                except OWN as error:
                    failed = True
                    assert "INVALID_OPERATION" in str(error), error
                calls = list(driver.calls)
            function()
            assert in_use() == held, (name, number, calls, in_use(), held)
        say(f"{name}: {' '.join(calls)}")


def cold():
    """Every program and every kernel object fails once, in the first steps; the step that meets no new one succeeds."""
    failed, told = set(), 0

    def fails(kind, what):
        new = kind == "build" and what not in failed
        failed.add(what if kind == "build" else "")
        return "OUT_OF_RESOURCES" if new else ""

    run, done = None, False
    with driver.failing(fails):
        while not done:
            try:
                run = run or Run(False)
                run.train()
                done = True
            except OWN as error:
                told += 1
                assert str(error).startswith("[") and "OUT_OF_RESOURCES" in str(error), error
    run = run.state()
    wanted = Run(False)
    wanted.train()
    assert equal(run, wanted.state())
    say(f"{told} told")


def say(text):
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    set_active_device(require(sys.argv[1]))
    for command in sys.argv[2:]:
        name, *words = command.split(":")
        globals()[name](*words)
