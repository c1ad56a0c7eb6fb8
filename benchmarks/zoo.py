"""Fifteen models against torch: a training step eager and compiled, inference with one sample and with a batch.

    python benchmarks/zoo.py [--device gpu] [--models REGEX] [--modes REGEX] [--amp bfloat16] [--threads 2] [--repeats 5] [--out FILE]

Both frameworks run the same text (``zoo_models.py``) from the same weights; losses must agree before anything is timed. ``--torch-compile``
adds ``torch.compile`` as a yardstick. Results have the form that ``benchmarks/compare.py`` reads.
"""

from __future__ import annotations

import argparse
import gc
import json
import re
import sys
import traceback
from contextlib import nullcontext
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).parent.parent), str(Path(__file__).parent)]
from run import facts, hold_to, kind_of  # noqa: E402

TARGETS = {"MobileNetV2": 0.6, "ConvNeXt-T": 0.6, "LSTM language model": 0.4}  # of compiled steps on GPUs; 1.0 elsewhere


def _around(framework: Any, where: Any, amp: str) -> Any:
    if not amp:
        return nullcontext
    if framework is where.torch:
        return lambda: framework.autocast(where.torch_device, getattr(framework, amp))
    return lambda: framework.amp.autocast(dtype=amp)


def _trainer(model: Any, framework: Any, around: Any) -> Any:
    update = framework.optim.SGD(model.parameters(), lr=1e-3)

    def step(x: Any, y: Any) -> Any:
        update.zero_grad()
        with around():
            loss = model.loss(x, y)
        loss.backward()
        update.step()
        return loss

    return step


def _reader(model: Any, framework: Any, around: Any) -> Any:
    model.eval()

    def read(x: Any) -> Any:
        with framework.no_grad(), around():
            return model(x)

    return read


def _twins(name: str, where: Any) -> tuple[Any, Any, Any]:
    """The model three times: ours, ours again, torch's (or None)."""
    from zoo_models import build

    import netcl

    ours, again, theirs = build(name, netcl), build(name, netcl), None
    again.load_state_dict(ours.state_dict())
    if where.torch is not None:
        theirs = build(name, where.torch)
        values = {key: where.torch.from_numpy(value.to_host().copy()) for key, value in ours.state_dict().items()}
        theirs.load_state_dict(values, strict=False)
        theirs.to(where.torch_device)
    return ours, again, theirs


def step_case(name: str, amp: str, with_compile: bool) -> Any:
    """A training step."""
    from comparison import Case, Comparison
    from zoo_models import ZOO

    import netcl
    from netcl.bench import Compiled, Way, last_loss

    entry = ZOO[name]

    def make(where: Any) -> dict[str, Any]:
        x, y = entry.batch(entry.gpu if where.is_gpu else entry.cpu)
        ours, again, theirs = _twins(name, where)
        data = where.tensor(x), where.tensor(y)
        around = _around(netcl, where, amp)
        eager = _trainer(ours, netcl, around)
        ways = {"ours": Way(where.ours(lambda: eager(*data)).run, where.sync, lambda: last_loss(lambda: eager(*data)))}
        ways["compiled"] = Compiled(_trainer(again, netcl, around), *data).losses(where)
        if theirs is None:
            return ways | {"torch": where.theirs(lambda: None)}
        tx, ty = where.torch_tensor(x), where.torch_tensor(y)
        step = _trainer(theirs, where.torch, _around(where.torch, where, amp))
        ways["torch"] = Way(lambda: step(tx, ty), where.torch_sync, lambda: last_loss(lambda: step(tx, ty)))
        if with_compile:
            twin = _twins(name, where)[2]
            twin.loss = where.torch.compile(twin.loss)
            fast = _trainer(twin, where.torch, _around(where.torch, where, amp))
            ways["torch.compile"] = Way(lambda: fast(tx, ty), where.torch_sync)
        return ways

    limits = {"gpu": TARGETS.get(name, 1.0), "cpu": 1.0}
    pairs = [Comparison("ours", "torch"), Comparison("compiled", "torch", limits)]
    pairs += [Comparison("compiled", "torch.compile")] if with_compile else []
    return Case(f"{name}, step{', ' + amp if amp else ''}", make, pairs, tolerance=0.05)


def inference_case(name: str, single: bool, amp: str) -> Any:
    """A forward pass without gradients."""
    from comparison import Case, Comparison
    from zoo_models import ZOO

    import netcl

    entry = ZOO[name]

    def make(where: Any) -> dict[str, Any]:
        x, _ = entry.batch(1 if single else entry.gpu if where.is_gpu else 2 * entry.cpu)
        ours, again, theirs = _twins(name, where)
        data, around = where.tensor(x), _around(netcl, where, amp)
        eager, compiled = _reader(ours, netcl, around), _reader(netcl.compile(again), netcl, around)
        ways = {"ours": where.ours(lambda: eager(data)), "compiled": where.ours(lambda: compiled(data))}
        read = None if theirs is None else _reader(theirs, where.torch, _around(where.torch, where, amp))
        tx = None if theirs is None else where.torch_tensor(x)
        return ways | {"torch": where.theirs(lambda: read(tx))}

    label = f"{name}, inference of {'one' if single else 'a batch'}{', ' + amp if amp else ''}"
    return Case(
        label,
        make,
        [Comparison("ours", "torch"), Comparison("compiled", "torch", {"gpu": 1.0, "cpu": 1.0})],
        tolerance=0.1 if amp else 1e-2,
    )


def all_cases(models: str, modes: str, amp: str, with_compile: bool) -> list[Any]:
    """Every mode of every model."""
    from zoo_models import ZOO

    made = []
    for name in ZOO:
        if re.search(models, name):
            ways = {"step": lambda name=name: step_case(name, amp, with_compile)}
            ways |= {f"inference {n}": lambda name=name, n=n: inference_case(name, n == "one", amp) for n in ("one", "batch")}
            made += [make() for mode, make in ways.items() if re.search(modes, mode)]
    return made


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--device", default="auto")
    parser.add_argument("--models", default="", help="only models whose name matches this regular expression")
    parser.add_argument("--modes", default="", help='of "step", "inference one", "inference batch"')
    parser.add_argument("--amp", default="", help="a dtype for automatic casts on both sides")
    parser.add_argument("--torch-compile", action="store_true")
    parser.add_argument("--threads", type=int, default=2, help="cores for both sides where our device is a CPU; 0: all")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--commit", default="", help="what to record as the commit where there is no git")
    options = parser.parse_args()
    options.sweep, options.quick, options.cases = False, False, options.models
    if kind_of(options.device) == "cpu":
        hold_to(options.threads)
    from comparison import measure

    from netcl.bench import setting
    from netcl.core.device import device

    where = setting(options.device, options.threads or None, options.repeats, False)
    results: dict[str, Any] = {"facts": {**facts(where, options), "made by": "python " + " ".join(sys.argv)}, "rows": []}
    for case in all_cases(options.models, options.modes, options.amp, options.torch_compile):
        try:
            with device(where.handle):
                rows = measure(case, where)
        except (ArithmeticError, AttributeError, LookupError, MemoryError, RuntimeError, TypeError, ValueError) as error:
            traceback.print_exc()  # one model that fails does not cost the others
            rows = [{"case": case.name, "ratio": None, "skipped": f"{type(error).__name__}: {error}", "all_s": {}}]
        results["rows"] += rows
        for row in rows:
            shown = ", ".join(f"{way} {1e3 * seconds:.2f} ms" for way, seconds in row["all_s"].items())
            print(f"{row['case']}: {row['ratio'] and round(row['ratio'], 2)} ({shown}) {row.get('skipped', '')}", flush=True)
        if options.out:
            options.out.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
        gc.collect()
        if where.torch_device == "cuda":
            where.torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
