"""Deferred equals eager: random programs give the same values and gradients however their ops are scheduled.

A program is the source of a function of a few tensors. It is drawn op by op and evaluated on the NumPy backend as it grows, so that every
line is valid, well scaled and away from jumps. It then runs on a device in every mode and is compared with NumPy. A failure prints the
program as a script.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

import netcl
import netcl.autograd as ag
from netcl.core import env
from netcl.core.device import manager
from netcl.core.tensor import Tensor
from netcl.engine import lazy_graph, reduction, schedule
from tests.conftest import eager_fusion

PROGRAMS = int(os.environ.get("RANDOM_PROGRAMS", "20"))  # per device; --full runs five times as many
SMALL_LEAST = 48  # elements from which plain eager code defers in programs of small tensors
MARGIN = 1e-3  # distance from a jump, relative to the scale of the values
TOLERANCE = 1e-3  # relative to the largest magnitude of a tensor; wrong values differ by their own magnitude
LIMIT = 4.0  # magnitude from which a value is scaled down


@dataclass
class Value:
    """A variable of a program: ``memory`` is shared by views; ``kept`` says that backward may read the memory."""

    name: str
    shape: tuple[int, ...]
    grad: bool
    memory: list[bool] = field(default_factory=lambda: [False])

    @property
    def kept(self) -> bool:
        return self.memory[0]


class Program:
    """The source of ``program(...)``, its arguments, and its variables on the NumPy backend while it grows."""

    def __init__(self, seed: int):
        self.rng = np.random.default_rng(seed)
        self.seed = seed
        self.large = seed % 16 == 5  # around the threshold that users have
        self.arguments: dict[str, np.ndarray] = {}
        self.buffers: set[str] = set()  # arguments without a gradient
        self.lines: list[str] = []
        self.values: list[Value] = []
        self.scope: dict[str, Any] = {"ag": ag}
        self.queue = manager.default("cpu").queue
        self.limits = _draw_limits(self.rng) if seed % 3 == 2 else {}

    # ---- drawing

    def pick(self, *choices: Any) -> Any:
        return choices[int(self.rng.integers(len(choices)))]

    def host(self, value: Value) -> np.ndarray:
        return self.scope[value.name].to_host()

    def argument(self, shape: tuple[int, ...], grad: bool = True, scale: float = 1.0) -> Value:
        name = f"{'w' if grad else 'b'}{len(self.arguments)}"
        # Odd multiples of 1/16: few distinct values, so that even large tensors keep away from jumps, and none is 0.
        drawn = (2 * self.rng.integers(-10, 10, shape) + 1) / 16 if self.large else self.rng.uniform(-1.2, 1.2, shape)
        self.arguments[name] = (drawn * scale).astype(np.float32)
        if not grad:
            self.buffers.add(name)
        self.scope[name] = _tensor(self.arguments[name], grad, self.queue)
        self.values.append(Value(name, shape, grad))
        return self.values[-1]

    def any(self, ndim: int = 0, least: int = 1) -> Value | None:
        """A value with so many axes (0: any), mostly a recent one."""
        found = [v for v in self.values if (not ndim or len(v.shape) == ndim) and len(v.shape) >= least]
        if not found:
            return None
        return found[-1] if self.rng.random() < 0.5 else self.pick(*found)

    def partner(self, shape: tuple[int, ...]) -> Value:
        """A value that broadcasts to ``shape`` without enlarging it."""
        found = [v for v in self.values if v.shape == shape or (v.shape and v.shape in (shape[-1:], (*shape[:-1], 1)))]
        if found and (self.rng.random() < 0.7 or len(self.arguments) > 9):
            return self.pick(*found)
        return self.argument(self.pick(shape, shape, shape[-1:]), grad=self.rng.random() < 0.6)

    # ---- growing

    def run(self, line: str) -> None:
        exec(line, self.scope)
        self.lines.append(line)

    def add(self, text: str, *operands: Value, view: bool = False, keeps: bool = True) -> Value:
        """One more variable. ``keeps``: a recorded op reads its operands in backward."""
        name = f"v{len(self.lines)}"
        self.run(f"{name} = {text}")
        made = self.scope[name]
        grad = any(v.grad for v in operands)
        value = Value(name, made.shape, grad, operands[0].memory if view else [False])
        for v in operands:
            v.memory[0] |= keeps and grad
        self.values.append(value)
        if np.abs(made.to_host()).max(initial=0) > LIMIT:
            self.values.pop()
            return self.add(f"{name} * {self.pick(0.25, 0.5) / np.abs(made.to_host()).max():.3f}", value)
        return value

    def source(self) -> str:
        body = "\n".join(f"    {line}" for line in self.lines)
        return f"def program({', '.join(self.arguments)}):\n{body}\n"

    def script(self, mode: str, handle: Any) -> str:
        """The program as a script for the root of the repository, to be shortened by hand: it prints how far a mode is from NumPy."""
        selector = "cpu" if handle.backend == "cpu" else handle.device_name
        return f"""import sys; sys.path.insert(0, "tests")
from test_random_programs import *

{self.source()}
drawn = draw({self.seed})  # for its arguments and limits: { ({name: low for (_, name), low in self.limits.items()}) }
want = run(drawn, "off", manager.default("cpu").queue, program)
with netcl.device({selector!r}) as device:
    print(difference(run(drawn, {mode!r}, device.queue, program), want))
"""


LIMITS = {(schedule, "MOST_NODES"): (3, 6), (schedule, "MOST_LEAVES"): (2, 4), (lazy_graph, "MOST_FOLDS"): (1, 2),
          (lazy_graph, "MOST_WAITING"): (2, 5), (reduction, "LONG_ROW"): (4, 16)}  # fmt: skip


def _draw_limits(rng: np.random.Generator) -> dict[tuple[Any, str], int]:
    """Some of the limits of deferral, so low that programs of this size exceed them."""
    return {key: int(rng.choice(low)) for key, low in LIMITS.items() if rng.random() < 0.4}


def _tensor(array: np.ndarray, grad: bool, queue: Any) -> Tensor:
    return Tensor.from_host(queue, array, requires_grad=grad)


# ---- ops: each draws operands and adds a line, or returns None where nothing fits

OPS: dict[str, tuple[float, Callable[[Program], Value | None]]] = {}


def op(weight: float) -> Callable[[Any], Any]:
    def register(draw: Any) -> Any:
        OPS[draw.__name__] = (weight, draw)
        return draw

    return register


def _away(x: np.ndarray, jump: float = 0.0) -> bool:
    return np.abs(x - jump).min(initial=1) > MARGIN


def _untied(windows: np.ndarray) -> bool:
    """Whether the largest value along the last axis is far from the second largest."""
    if windows.shape[-1] < 2:
        return True
    top = np.sort(windows, -1)[..., -2:]
    return bool((top[..., 1] - top[..., 0]).min(initial=1) > MARGIN)


@op(3)
def smooth(p: Program) -> Value | None:
    x = p.any()
    return p.add(p.pick("ag.tanh({0})", "{0} * 0.5", "{0} + 0.25", "ag.tanh({0}) * 0.5 + {0}").format(x.name), x)


@op(3)
def kinked(p: Program) -> Value | None:
    x = p.any()
    return p.add(f"ag.relu({x.name})", x) if _away(p.host(x)) else None


@op(5)
def added(p: Program) -> Value | None:
    x = p.any(least=1)
    y = p.partner(x.shape)
    return p.add(p.pick("{0} + {1}", "{1} + {0}").format(x.name, y.name), x, y, keeps=False)


@op(2)
def multiplied(p: Program) -> Value | None:
    x = p.any(least=1)
    y = p.partner(x.shape)
    return p.add(f"{x.name} * {y.name}", x, y)


@op(1)
def chosen(p: Program) -> Value | None:
    x = p.any(least=1)
    y = p.partner(x.shape)
    return p.add(f"ag.where({x.name} > 0.03, {x.name}, {y.name})", x, y) if _away(p.host(x), 0.03) else None


def _factors(size: int, rng: np.random.Generator) -> tuple[int, ...]:
    """A shape of one to four axes with so many elements."""
    shape = []
    for _ in range(int(rng.integers(0, 4))):
        divisors = [n for n in range(1, min(size, 64) + 1) if size % n == 0]
        shape.append(int(rng.choice(divisors)))
        size //= shape[-1]
    return (*shape, size)


@op(5)
def viewed(p: Program, x: Value | None = None) -> Value | None:
    x = x or p.any(least=1)
    axis = int(p.rng.integers(len(x.shape)))
    texts = [f"{{0}}.reshape({_factors(math.prod(x.shape), p.rng)})", f"{{0}}.flatten({axis})", f"{{0}}.unsqueeze({axis})", "{0}.squeeze()",
             f"{{0}}.reshape({_factors(math.prod(x.shape), p.rng)})"]  # fmt: skip
    return p.add(p.pick(*texts).format(x.name), x, view=True, keeps=False)


@op(2)
def moved(p: Program) -> Value | None:
    x = p.any(least=2)
    if x is None:
        return None
    order = tuple(int(i) for i in p.rng.permutation(len(x.shape)))
    return p.add(p.pick(f"{x.name}.transpose()", f"{x.name}.permute({order})"), x, view=True, keeps=False)


@op(2)
def sliced(p: Program) -> Value | None:
    x = p.any(least=1)
    parts = [p.pick(":", ":", "1:", "::2", "::-1", ":-1") if n > 2 else ":" for n in x.shape]
    return p.add(f"{x.name}[{', '.join(parts)}]", x, view=True, keeps=False)


@op(1)
def expanded(p: Program) -> Value | None:
    x = p.any(least=1)
    if math.prod(x.shape) > (1 << 15 if p.large else 256):
        return None
    made = p.add(f"{x.name}.unsqueeze(0).expand({(p.pick(2, 3), *x.shape)})", x, keeps=False)
    made.memory = [True]  # elements may share memory: nothing is written there
    return made


@op(2)
def reduced(p: Program) -> Value | None:
    x = p.any(least=1)
    axis, kept = p.pick(-1, -1, 0, tuple(range(len(x.shape)))), p.pick(True, False)
    return p.add(f"ag.{p.pick('mean', 'sum')}({x.name}, axis={axis}, keepdims={kept})", x)


@op(1)
def largest(p: Program) -> Value | None:
    x = p.any(least=1)
    return p.add(f"ag.amax({x.name}, axis=-1, keepdims=True)", x) if _untied(p.host(x)) else None


@op(2)
def by_rows(p: Program) -> Value | None:
    x = p.any(least=2)
    if x is None or p.host(x).std(-1).min(initial=1) < 0.1:
        return None
    texts = ["ag.softmax({0})", f"ag.layer_norm({{0}}, ({x.shape[-1]},))"]
    return p.add(p.pick(*texts).format(x.name), x)


def _features(p: Program) -> int:
    return 64 if p.large else 4


@op(3)
def product(p: Program) -> Value | None:
    x = p.any(least=2)
    if x is None or not 2 <= x.shape[-1] <= 1100 or math.prod(x.shape[:-1]) * 96 > 400_000:
        return None
    k, n = x.shape[-1], _features(p)
    w = p.argument(p.pick((k, n), (n, k)), scale=1 / math.sqrt(k))
    if w.shape == (k, n) and p.rng.random() < 0.7:
        return p.add(f"{x.name} @ {w.name}", x, w)
    if w.shape != (n, k):
        return p.add(f"ag.matmul({x.name}, {w.name})", x, w)
    if p.rng.random() < 0.3:
        return p.add(f"ag.linear({x.name}, {w.name})", x, w)
    b = p.argument((n,))
    made = p.add(f"ag.linear({x.name}, {w.name}, {b.name})", x, w, b)
    return p.add(f"ag.linear({x.name}, {w.name}, {b.name}, activation='relu')", x, w, b) if _away(p.host(made)) else made


@op(1)
def batched(p: Program) -> Value | None:
    x = p.any(3)
    if x is None or x.shape[-1] > 600 or x.shape[-2] > 300:
        return None
    return p.add(f"ag.matmul({x.name}, {x.name}.transpose()) * {1 / x.shape[-1]:.4f}", x)


#: Convolutions: the input, the weight, whether there is a bias, and options. Few, since each geometry has kernels of its own.
CONVOLUTIONS = [
    ((4, 6, 8), (6, 6, 1), False, ""),
    ((2, 4, 5, 6), (4, 2, 3, 3), True, ", stride=2, padding=1, groups=2"),
]
LARGE_CONVOLUTIONS = [((16, 32, 130), (32, 32, 1), False, "")]


@op(3)
def convolved(p: Program) -> Value | None:
    shape, weight, biased, options = p.pick(*(LARGE_CONVOLUTIONS if p.large else CONVOLUTIONS))
    found = [v for v in p.values if v.shape == shape]
    x = p.pick(*found) if found else p.argument(shape)
    w = p.argument(weight, scale=1 / math.sqrt(math.prod(weight[1:])))
    bias = [p.argument(weight[:1])] if biased else []
    return p.add(f"ag.conv{len(shape) - 2}d({', '.join(v.name for v in (x, w, *bias))}{options})", x, w, *bias)


@op(1)
def pooled(p: Program) -> Value | None:
    x = p.any(4)
    if x is None or min(x.shape[2:]) < 2:
        return None
    array = p.host(x)[:, :, : x.shape[2] // 2 * 2, : x.shape[3] // 2 * 2]
    n, c, h, w = array.shape
    windows = array.reshape(n, c, h // 2, 2, w // 2, 2).transpose(0, 1, 2, 4, 3, 5).reshape(n, c, h // 2, w // 2, 4)
    return p.add(f"ag.{'max' if _untied(windows) else 'avg'}_pool2d({x.name}, 2)", x)


@op(1)
def joined(p: Program) -> Value | None:
    x = p.any(least=1)
    if math.prod(x.shape) > (90_000 if p.large else 400):
        return None
    y = p.partner(x.shape)
    y = y if y.shape == x.shape else x
    return p.add(p.pick("ag.cat([{0}, {1}], axis=-1)", "ag.stack([{0}, {1}])").format(x.name, y.name), x, y, keeps=False)


#: Writes in place: a template over the tensor, a value that broadcasts to it and an index. Methods that are not there are left out.
IN_PLACE = {"fill_": "{x}.fill_({c})", "setitem": "{x}[...] = {y}", "part": "{x}[{i}] = {c}", "iadd": "{x} += {y}", "imul": "{x} *= {c}",
            "add_": "{x}.add_({y})", "mul_": "{x}.mul_({c})"}  # fmt: skip
WRITES = [text for name, text in IN_PLACE.items() if not name.endswith("_") or hasattr(Tensor, name)]


@op(4)
def written(p: Program) -> Value | None:
    """Values that were read before the write keep what they read; backward never reads the written memory."""
    found = [v for v in p.values if not v.grad and not v.kept and v.shape]
    if not found:
        x = p.argument(p.pick(*[v.shape for v in p.values if v.shape]), grad=False)
        return p.add(p.pick("{0} * 0.5", "ag.tanh({0})").format(x.name), x)
    x = p.pick(*found)
    plain = [v for v in p.values if not v.grad and v.shape in (x.shape, x.shape[-1:]) and v is not x]
    y = p.pick(*plain).name if plain else f"{p.pick(0.5, -0.25)}"
    p.run(p.pick(*WRITES).format(x=x.name, y=y, c=p.pick(0.75, -0.5), i=p.pick("0", "::2", "..., 0", "1:")))
    if np.abs(p.host(x)).max() > LIMIT:
        p.run(f"{x.name}.fill_(0.125)")
    return x


@op(1.5)
def dropped(p: Program) -> Value | None:
    """A variable that nothing names any more; its value may still be part of what waits."""
    found = [v for v in p.values[:-1] if v.name not in p.arguments]
    if len(found) < 2:
        return None
    v = p.pick(*found)
    _drop(p, v)
    return v


@op(0.3)
def read(p: Program) -> Value | None:
    v = p.any()
    p.run(f"{v.name}.to_host()")
    return v


# ---- whole programs


def _seen_and_joined(p: Program, x: Value) -> int:
    """A pending product under another shape, of which one, both or none are held, plus a value of that shape: the number of ops."""
    view = viewed(p, x)
    y = p.argument(view.shape, grad=p.rng.random() < 0.5)
    if p.rng.random() < 0.7:
        _drop(p, x)
    p.add(p.pick("{0} + {1}", "{1} + {0}", "ag.tanh({0}) + {1}").format(view.name, y.name), view, y)
    if p.rng.random() < 0.3:
        _drop(p, view)
    return 2


def _drop(p: Program, v: Value) -> None:
    p.values.remove(v)
    p.run(f"del {v.name}")


def draw(seed: int) -> Program:
    """A program of 5 to 25 ops over a few arguments. It ends in gradients of all arguments and of what it returns."""
    p = Program(seed)
    shapes = [(64, 1024), (65, 1008), (16, 32, 130)] if p.large else [(6, 8), (4, 6, 8), (2, 4, 5, 6), (16,)]
    for i in p.rng.permutation(len(shapes))[: 2 if p.large else 3]:
        p.argument(shapes[i])
    names = list(OPS)
    weights = np.array([OPS[name][0] for name in names])
    count = 5 + int((8 if p.large else 21) * p.rng.random() ** 2.5)  # mostly short: long programs have more kernels to compile
    with eager_fusion(0):
        done = 0
        while done < count:
            name = names[int(p.rng.choice(len(names), p=weights / weights.sum()))]
            made = OPS[name][1](p)
            done += made is not None
            if made is not None and name in ("product", "convolved") and p.rng.random() < 0.6:
                done += _seen_and_joined(p, made)
        _end(p)
    return p


def _end(p: Program) -> None:
    """The last lines: the gradients of the values that are returned, for arguments and for those values."""
    made = [v for v in p.values if v.name not in p.arguments]
    recorded = [v for v in made if v.grad][-4:]
    if not recorded:
        x = next(v for v in p.values if v.grad)
        recorded = [p.add(f"ag.tanh({x.name})", x)]
    plain = [v for v in made if not v.grad][-3:] + [v for v in p.values if v.name in p.buffers]
    wanted = [v.name for v in p.values if v.name in p.arguments and v.name not in p.buffers] + [v.name for v in recorded[:-1]]
    outputs = [v.name for v in recorded]
    upstream = f"[{', '.join(f'{name}.detach()' for name in outputs)}]"  # as of a sum of squares, without its kernels
    p.lines.append(f"grads = ag.grad([{', '.join(outputs)}], [{', '.join(wanted)}], {upstream}, allow_unused=True)")
    p.lines.append(f"return [{', '.join(v.name for v in (*recorded, *plain))}], grads")


@contextmanager
def limited(p: Program) -> Iterator[None]:
    """Inside, the limits of deferral are those of the program."""
    with pytest.MonkeyPatch.context() as patch:
        for (module, name), low in p.limits.items():
            patch.setattr(module, name, low)
        yield


def compiled(function: Any) -> Any:
    """``netcl.compile``, called until it replays: over the same parameters and over new buffers."""
    step = netcl.compile(function)

    def last(make: Callable[[], list[Tensor]]) -> Any:
        parameters = make()
        for _ in range(4):
            step(*[w if w.requires_grad else b for w, b in zip(parameters, make(), strict=True)])
        return step(*[w if w.requires_grad else b for w, b in zip(parameters, make(), strict=True)])

    return last


def called(function: Any) -> Any:
    return lambda make: function(*make())


MODES: dict[str, tuple[bool, Callable[[Any], Any]]] = {  # whether eager code defers, and what is made of the function
    "off": (False, called),
    "default": (True, called),
    "jit_compile": (True, lambda function: called(ag.jit_compile(function))),
    "compile": (True, compiled),
}


def run(p: Program, mode: str, queue: Any, function: Any = None, shift: float = 0.0) -> list[np.ndarray]:
    """Values and gradients of a program, or of another function of its arguments; ``shift`` disturbs the arguments."""
    defers, wrap = MODES[mode]
    scope: dict[str, Any] = {"ag": ag, "program": function}
    if function is None:
        exec(p.source(), scope)

    def make() -> list[Tensor]:
        return [_tensor(a * np.float32(1 + shift), name not in p.buffers, queue) for name, a in p.arguments.items()]

    with ExitStack() as stack:
        stack.enter_context(eager_fusion((env.FUSE_FROM if p.large else SMALL_LEAST) if defers else 0))
        stack.enter_context(limited(p))
        values, grads = wrap(scope["program"])(make)
        return [np.zeros(()) if t is None else t.to_host() for t in (*values, *grads)]


def difference(got: list[np.ndarray], want: list[np.ndarray]) -> tuple[float, str]:
    """The largest difference, relative to the magnitude of the tensor it is in, and where it is."""
    worst = (0.0, "")
    for i, (g, w) in enumerate(zip(got, want, strict=True)):
        if g.shape != w.shape or not np.isfinite(g).all():
            return math.inf, f"result {i}: shape {g.shape} instead of {w.shape}, or not finite"
        scale = max(float(np.abs(w).max(initial=0)), 1e-2)
        worst = max(worst, (float(np.abs(g - w).max(initial=0)) / scale, f"result {i} of shape {w.shape}"))
    return worst


def check(p: Program, handle: Any, full: bool) -> bool:
    """Whether a program was fit to be compared; fails the test where a mode differs."""
    host = manager.default("cpu").queue
    want = run(p, "off", host)
    if difference(run(p, "off", host, shift=1e-5), want)[0] > TOLERANCE:
        return False  # ill-conditioned: rounding alone would show
    for mode in MODES:
        if (mode == "off" and handle.queue is host) or (mode == "jit_compile" and not full and p.seed % 4 != 1):
            continue  # every program that is compiled has kernels of its own, which take most of the time
        found, where = math.inf, "an error"
        try:
            found, where = difference(run(p, mode, handle.queue), want)
        finally:
            if found > TOLERANCE:
                print(f"{mode} differs by {found:.2g} in {where}\n\n{p.script(mode, handle)}")
        assert found <= TOLERANCE, f"{mode} differs by {found:.2g} in {where}; the script is printed"
    return True


PARTS = 8


@pytest.mark.parametrize("part", range(PARTS))
def test_deferred_equals_eager(device, full, part):
    programs = range(part, PROGRAMS * (5 if full else 1), PARTS)
    fit = sum(check(draw(seed), device, full) for seed in programs)
    assert fit >= 0.5 * len(programs)
