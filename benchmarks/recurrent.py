"""Recurrent layers and a two-layer LSTM language model against torch, interleaved.

    python benchmarks/recurrent.py [--device gpu] [--cases PATTERN] [--algorithm steps] [--threads 2] [--repeats 7] [--out FILE] [--quick]

``--algorithm`` names a row of the family's table (rows, units, persistent, steps) in place of the choice by size. Results have the form
that ``benchmarks/compare.py`` reads.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).parent.parent), str(Path(__file__).parent)]
from run import facts, hold_to, kind_of  # noqa: E402

STEPS, WORDS = 35, 10_000
SIZES = ((256, 64), (256, 20), (650, 64), (650, 20), (1024, 64), (1024, 20))


def layer_case(kind: str, hidden: int, batch: int, backward: bool, targets: dict[str, float]) -> Any:
    """One layer, as wide as its input: y, or the gradients of the input and the weights."""
    from comparison import Case, Comparison

    import netcl
    import netcl.autograd as ag
    from netcl import nn
    from netcl.bench import values

    def make(where: Any) -> dict[str, Any]:
        x, g = values(STEPS, batch, hidden), values(STEPS, batch, hidden, seed=1)
        layer = getattr(nn, kind)(hidden, hidden)
        ours = where.tensor(x, requires_grad=backward), where.tensor(g)

        def run(x: Any, g: Any) -> Any:
            if not backward:
                with ag.no_grad():
                    return layer(x)[0]
            return list(ag.grad(layer(x)[0], [x, *layer.parameters()], g))

        compiled = netcl.compile(run)
        ways = {"ours": where.ours(lambda: run(*ours)), "compiled": where.ours(lambda: compiled(*ours))}
        return ways | {"torch": where.theirs(_torch_layer(where, kind, layer, x, g, backward))}

    name = f"{kind} {hidden}, batch {batch}, {STEPS} steps, {'forward and backward' if backward else 'forward'}"
    pairs = [Comparison("ours", "torch"), Comparison("compiled", "torch", targets)]
    return Case(name, make, pairs, tolerance=5e-3)


def _torch_layer(where: Any, kind: str, layer: Any, x: Any, g: Any, backward: bool) -> Callable[[], Any]:
    if where.torch is None:
        return lambda: None
    torch, hidden = where.torch, x.shape[-1]
    theirs = getattr(torch.nn, kind)(hidden, hidden)
    theirs.load_state_dict({name: torch.from_numpy(value.to_host().copy()) for name, value in layer.state_dict().items()})
    theirs = theirs.to(where.torch_device)
    data, upstream = where.torch_tensor(x).requires_grad_(backward), where.torch_tensor(g)

    def run() -> Any:
        if not backward:
            with torch.no_grad():
                return theirs(data)[0]
        return list(torch.autograd.grad(theirs(data)[0], [data, *theirs.parameters()], upstream))

    return run


def model_case(hidden: int, batch: int, targets: dict[str, float]) -> Any:
    """A training step of the language model: embedding, two LSTM layers, a linear layer over 10,000 words, SGD."""
    import numpy as np
    from comparison import Comparison
    from steps import train_step

    import netcl.autograd as ag
    from netcl import nn

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding, self.lstm, self.linear = nn.Embedding(WORDS, hidden), nn.LSTM(hidden, hidden, 2), nn.Linear(hidden, WORDS)

        def forward(self, x: Any) -> Any:
            return ag.reshape(self.linear(self.lstm(self.embedding(x))[0]), (-1, WORDS))

    def theirs(torch: Any) -> Any:
        class Theirs(torch.nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.embedding, self.linear = torch.nn.Embedding(WORDS, hidden), torch.nn.Linear(hidden, WORDS)
                self.lstm = torch.nn.LSTM(hidden, hidden, 2)

            def forward(self, x: Any) -> Any:
                return self.linear(self.lstm(self.embedding(x))[0]).flatten(0, 1)

        return Theirs()

    def data() -> tuple[Any, Any]:
        words = np.random.default_rng(0).integers(0, WORDS, (2, STEPS, batch))
        return words[0], words[1].reshape(-1)

    pairs = [Comparison("ours", "torch"), Comparison("compiled", "torch", targets)]
    return train_step(f"LSTM language model {hidden}, batch {batch}, step", Model, theirs, data, "SGD", {"lr": 0.1}, pairs)


def all_cases(quick: bool) -> list[Any]:
    """Layers of every size, then the model. The targets are those of the compiled step."""
    limits = {"gpu": 0.4, "cpu": 1.0}
    sizes = ((32, 4),) if quick else SIZES
    made = [layer_case("LSTM", *size, backward, limits) for size in sizes for backward in (False, True)]
    made += [layer_case(kind, *sizes[0], backward, limits) for kind in ("GRU", "RNN") for backward in (False, True)]
    return made + ([] if quick else [model_case(*size, limits) for size in ((256, 64), (650, 20), (1024, 64))])


def force(algorithm: str) -> None:
    """Make the selector name an algorithm for every layer."""
    from netcl.core.kernel_selector import KernelConfig, KernelVariant, get_kernel_selector

    config = KernelConfig(KernelVariant.MATMUL_REGISTER_TILED, extra={"tier": algorithm})
    get_kernel_selector().register("recurrent", lambda shapes, profile: True, config)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--device", default="auto")
    parser.add_argument("--cases", default="", help="only cases whose name matches this regular expression")
    parser.add_argument("--algorithm", default="")
    parser.add_argument("--threads", type=int, default=2, help="cores for both sides where our device is a CPU; 0: all")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--commit", default="", help="what to record as the commit where there is no git")
    options = parser.parse_args()
    options.sweep = False
    if kind_of(options.device) == "cpu":
        hold_to(options.threads)
    from comparison import measure

    from netcl.bench import setting

    where = setting(options.device, options.threads or None, options.repeats, options.quick)
    if options.algorithm:
        force(options.algorithm)
    made_by = f"python benchmarks/recurrent.py --device {options.device}" + (
        f" --algorithm {options.algorithm}" if options.algorithm else ""
    )
    results: dict[str, Any] = {"facts": {**facts(where, options), "made by": made_by}, "rows": []}
    for case in all_cases(options.quick):
        if re.search(options.cases, case.name):
            rows = measure(case, where)
            results["rows"] += rows
            for row in rows:
                shown = ", ".join(f"{name} {1e6 * seconds:.0f} us" for name, seconds in row["all_s"].items())
                print(f"{row['case']}: ratio {row['ratio'] and round(row['ratio'], 2)} ({shown}) {row.get('skipped', '')}", flush=True)
            if options.out:
                options.out.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
