"""Timing: several ways to compute the same result, compared with each other, then timed in interleaved rounds.

``netcl bench`` and the repository's ``benchmarks/`` use this package. The speed of a shared machine drifts, so only ratios of interleaved
measurements are meaningful; the best round of each way counts. Uncounted calls precede every sample, since idle cores start slowly. The
order changes from round to round, because each way starts with the caches that the previous way has filled.
"""

from __future__ import annotations

import importlib
import importlib.util
import math
import random
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from netcl.core.device import DeviceHandle, require, synchronize
from netcl.core.tensor import Tensor
from netcl.replay import compiled

SAMPLE_SECONDS = 0.05  # the least time of one sample: short calls are repeated until they fill it
MOST_CALLS = 2000
SETTLE = 0.01  # seconds before a sample: the threads of the one before go to sleep
AWAKE = 3  # a sample is preceded by this part of its calls, uncounted: after a pause two cores did the work of one for milliseconds
PATIENCE = 20.0  # seconds after which no further round is started: some ways are slow beyond reason on some machines
CHECKED = 1 << 21  # how many values of a large result are compared, evenly spread
CHECKED_STEPS = 3  # training steps whose last loss is compared
WARM_CALLS = 6  # calls after which a compiled function is replayed, at most
_DISTINCT = 1 << 22  # values of a large array that differ; the rest repeats them


@dataclass
class Way:
    """One way to compute something: ``run`` starts it, ``sync`` waits for it, ``result`` returns the arrays to compare.

    ``missing`` is the reason why a way is not available. ``host_only`` excludes the final wait from the time.
    ``units`` is the number of items that one call processes; times are per item. ``apart`` ways are timed after the others, because the
    threads of NumPy's library spin for a tenth of a second after a call and slow down the next call. ``amount`` returns a quantity
    other than a time, such as bytes.
    """

    run: Callable[[], Any] = lambda: None
    sync: Callable[[], None] = lambda: None
    result: Callable[[], Sequence[np.ndarray]] | None = None
    missing: str = ""
    host_only: bool = False
    units: int = 1
    apart: bool = False
    amount: Callable[[], float] | None = None


@dataclass(frozen=True)
class Setting:
    """The settings of a benchmark: netcl's device, torch and its device, and the number of repeats. ``torch`` is ``None`` without torch."""

    handle: DeviceHandle
    torch: Any = None
    torch_device: str = "cpu"
    repeats: int = 7
    quick: bool = False

    @property
    def is_gpu(self) -> bool:
        return self.handle.device_type == "gpu"

    def sync(self) -> None:
        """Compute deferred values and wait for netcl's device."""
        synchronize(self.handle)

    def torch_sync(self) -> None:
        """Wait for torch's device."""
        if self.torch_device == "cuda":
            self.torch.cuda.synchronize()

    def tensor(self, array: np.ndarray, **options: Any) -> Any:
        """Return an array as a tensor on netcl's device."""
        return Tensor.from_host(self.handle.queue, array, **options)

    def torch_tensor(self, array: np.ndarray) -> Any:
        """Return an array as a tensor on torch's device."""
        return self.torch.from_numpy(array).to(self.torch_device)

    def ours(self, run: Callable[[], Any]) -> Way:
        """Return the way that calls ``run`` and realizes the netcl tensors that it returns, so that deferred work is timed."""
        return Way(lambda: enqueued(run()), self.sync, lambda: [t.to_host() for t in _as_sequence(run())])

    def theirs(self, run: Callable[[], Any]) -> Way:
        """Return the way that calls ``run``, a function that returns torch tensors; without torch, return a missing way."""
        if self.torch is None:
            return Way(missing="torch is not installed")
        return Way(run, self.torch_sync, lambda: [t.detach().float().cpu().numpy() for t in _as_sequence(run())])


def enqueued(values: Any) -> Any:
    """Realize tensors and return them. Without this, an op whose deferred result is never read would not run and would seem fast."""
    for tensor in _as_sequence(values):
        tensor.realize()
    return values


def _as_sequence(values: Any) -> Sequence[Any]:
    return values if isinstance(values, list | tuple) else [values]


def setting(selector: Any = "auto", threads: int | None = None, repeats: int = 7, quick: bool = False, with_torch: bool = True) -> Setting:
    """Return the settings for a device selector. Torch, if installed, runs on CUDA for an NVIDIA GPU, else on the CPU."""
    handle = require(selector, op="bench")
    torch = importlib.import_module("torch") if with_torch and importlib.util.find_spec("torch") else None
    where = "cpu"
    if torch is not None:
        if threads:
            torch.set_num_threads(threads)
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False  # float32 against float32
        torch.backends.cudnn.benchmark = True
        if handle.device_type == "gpu" and torch.cuda.is_available() and "nvidia" in handle.platform_name.lower():
            where = "cuda"
    return Setting(handle, torch, where, repeats, quick)


def wrong_results(ways: Mapping[str, Way], tolerance: float) -> dict[str, str]:
    """Return an error text for each way with a wrong result. The reference is the last way that has a result."""
    results = {name: [np.asarray(a) for a in way.result()] for name, way in ways.items() if way.result is not None}
    if len(results) < 2:
        return {}
    *ours, yardstick = results
    wrong = {}
    for name in ours:
        error = max(relative_difference(a, b) for a, b in zip(results[name], results[yardstick], strict=True))
        if not error <= tolerance:
            wrong[name] = f"its result differs from {yardstick}'s by {error:.2g} (relative), allowed is {tolerance:g}"
    return wrong


def relative_difference(a: np.ndarray, b: np.ndarray) -> float:
    """Return the largest difference of ``a`` and ``b`` over the RMS of ``b``; infinite if shapes differ. Large arrays are sampled.

    >>> relative_difference(np.array([1.0, 2.0]), np.array([1.0, 2.0]))
    0.0
    """
    if a.shape != b.shape:
        return float("inf")
    step = max(1, a.size // CHECKED)
    x, y = (np.asarray(v.reshape(-1)[::step], np.float64) for v in (a, b))
    scale = float(np.sqrt(np.mean(y * y))) if y.size else 0.0
    return float(np.max(np.abs(x - y), initial=0.0)) / (scale or 1.0)


def interleave(ways: Mapping[str, Way], repeats: int) -> dict[str, float]:
    """Return each way's ``amount``, or its least time per item in seconds. Ways are sampled in turns, up to ``repeats`` times each."""
    together = {name: way for name, way in ways.items() if not way.apart and way.amount is None}
    best = _in_turns(together, repeats) | {name: way.amount() for name, way in ways.items() if way.amount is not None}
    for name, way in ways.items():
        if way.apart:
            best |= _in_turns({name: way}, repeats)
    return {name: best[name] for name in ways}


def _in_turns(ways: Mapping[str, Way], repeats: int) -> dict[str, float]:
    start = time.perf_counter()
    calls = {name: _calls(way) for name, way in ways.items()}
    best = dict.fromkeys(ways, float("inf"))
    for round_ in range(repeats):
        if round_ and time.perf_counter() - start > PATIENCE:
            break
        for name, way in random.Random(round_).sample(list(ways.items()), len(ways)):
            time.sleep(SETTLE)
            _seconds_per_call(way, max(1, calls[name] // AWAKE))
            best[name] = min(best[name], _seconds_per_call(way, calls[name]) / way.units)
    return best


def _calls(way: Way) -> int:
    """Warm up a way and return the number of calls, at most :data:`MOST_CALLS`, that take about :data:`SAMPLE_SECONDS`."""
    once = _seconds_per_call(way, 1)
    if once > PATIENCE / 10:
        return 1
    once = _seconds_per_call(way, 1)
    few = max(1, min(5, int(SAMPLE_SECONDS / max(once, 1e-9))))
    once = _seconds_per_call(way, few)
    return max(1, min(MOST_CALLS, int(SAMPLE_SECONDS / max(once, 1e-9)) + 1))


def _seconds_per_call(way: Way, calls: int) -> float:
    run = way.run
    way.sync()
    start = time.perf_counter()
    for _ in range(calls):
        run()
    spent = time.perf_counter() - start
    way.sync()
    return (spent if way.host_only else time.perf_counter() - start) / calls


def values(*shape: int, seed: int = 0) -> np.ndarray:
    """Return normally distributed float32 values; a large array repeats a shorter random sequence, which saves time."""
    size = math.prod(shape)
    drawn = np.random.default_rng(seed).standard_normal(min(size, _DISTINCT), dtype=np.float32)
    return np.resize(drawn, size).reshape(shape)


class Compiled:
    """A compiled function after its first calls. ``first`` holds their results, ``refused`` the reason if the function is not replayed."""

    def __init__(self, function: Callable[..., Any], *arguments: Any):
        self.first: list[Any] = []
        self.refused = ""
        made = compiled.compile(function, fuse=True)
        try:
            self.first = [made(*arguments) for _ in range(WARM_CALLS)]
        except (RuntimeError, TypeError, ValueError, AttributeError, LookupError) as error:
            self.refused = f"it cannot be compiled: {type(error).__name__}: {error}"
        else:
            self.refused = "" if made.graphs else f"it is not replayed: {'; '.join(made.refused) or 'there is nothing to record'}"
        self.run = lambda: made(*arguments)

    def way(self, where: Setting) -> Way:
        """Return the way that calls the compiled function, or a missing way with the reason."""
        return Way(missing=self.refused) if self.refused else where.ours(self.run)

    def losses(self, where: Setting) -> Way:
        """Return the way that calls a training step; its result is the loss of the third call. The way is missing if ``refused``."""
        if self.refused:
            return Way(missing=self.refused)
        return replace(where.ours(self.run), result=lambda: [self.first[CHECKED_STEPS - 1].to_host()])


def training_step(model: Any, optimizer: Any, loss: Callable[..., Any], context: Callable[[], Any] = nullcontext) -> Callable[..., Any]:
    """Return a function ``step(x, y) -> loss`` that runs one training step of a classifier, in netcl or torch."""

    def step(x: Any, y: Any) -> Any:
        optimizer.zero_grad()
        with context():
            logits = model(x)
            value = loss(logits.reshape(-1, logits.shape[-1]), y.reshape(-1))
        value.backward()
        optimizer.step()
        return value

    return step


def last_loss(run: Callable[[], Any]) -> list[np.ndarray]:
    """Run a few training steps and return the loss of the last one, by which ways are compared."""
    return [np.array([run() for _ in range(CHECKED_STEPS)][-1].item())]
