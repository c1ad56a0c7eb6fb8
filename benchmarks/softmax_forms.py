"""The kernels of softmax.cl against kernels generated from the formulas of netcl/ops/fused_rows.py.

    python benchmarks/softmax_forms.py [ROWSxN ...]

Both forms take turns in one process; the best of 80 launches counts. Results are compared before they are timed.
A hand-written kernel stays only if it is more than 5 % faster (docs/internals/kernels.md). ``results/softmax_forms_*.txt`` holds outputs.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parent.parent))
import netcl
from netcl import ops
from netcl.engine.modes import Mode, in_mode
from netcl.ops.fused_rows import FUSED
from netcl.profiling import profile

SHAPES = [(100000, 10), (16384, 64), (2048, 257), (1024, 1023), (4096, 1024), (512, 32000)]
TURNS, LAUNCHES = 40, 2


def by_hand(name: str, args: tuple) -> netcl.Tensor:
    return getattr(ops, name)(*args)


def generated(name: str, args: tuple) -> netcl.Tensor:
    with in_mode(Mode()):
        made = FUSED[name](*args)
        assert made is not None, f"{name} cannot be generated for {args[0].shape}"
        made.realize()
    return made


def best_times(name: str, args: tuple) -> list[float]:
    best = [float("inf")] * 2
    for _ in range(TURNS):
        for i, form in enumerate((by_hand, generated)):
            with profile() as seen:
                for _ in range(LAUNCHES):
                    form(name, args).realize()
            best[i] = min(best[i], *(event.seconds for event in seen.events))
    return best


def main() -> None:
    shapes = [tuple(map(int, text.split("x"))) for text in sys.argv[1:]] or SHAPES
    rng = np.random.default_rng(0)
    for dtype in ("float32", "float16"):
        for shape in shapes:
            x, g = (netcl.tensor(rng.standard_normal(shape).astype(np.float32)).to(dtype) for _ in range(2))
            for name in ("softmax", "log_softmax"):
                y = by_hand(name, (x,))
                for op, args in ((name, (x,)), (f"{name}_grad", (g, y))):
                    a, b = (form(op, args).to_host().astype(np.float32) for form in (by_hand, generated))
                    np.testing.assert_allclose(a, b, rtol=2e-3, atol=1e-5 if dtype == "float32" else 1e-3)
                    hand, made = best_times(op, args)
                    size = "x".join(map(str, shape))
                    print(f"{dtype} {op:16} {size:10} by hand {hand * 1e6:8.0f} us, generated {made * 1e6:8.0f} us ({made / hand:.2f})")


if __name__ == "__main__":
    main()
