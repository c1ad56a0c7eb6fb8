"""``netcl tune``: measure kernel configurations for the shapes of a model or of one product or convolution."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from netcl.cli.command import CommandError, command, facts, number, pick_device, whole
from netcl.core.errors import DtypeError, ShapeError, message

PROBLEM_SIZES = {"matmul": "M N K", "conv2d": "N C H W F KH KW [STRIDE [PAD]]"}


def _images(batch: int, channels: int, side: int) -> np.ndarray:
    return np.random.default_rng(0).standard_normal((batch, channels, side, side), np.float32)


def _models() -> dict[str, tuple[Callable[[], Any], Callable[[int], np.ndarray]]]:
    """Return, by name, a function that builds a model and one that makes a batch of inputs for it."""
    from netcl import nn

    gpt = {"vocab_size": 65, "block_size": 256, "n_layer": 6, "n_head": 6, "n_embd": 384}
    return {
        "mlp": (lambda: nn.MLP(784, [128], 10), lambda n: _images(n, 1, 28)),
        "lenet": (nn.LeNet, lambda n: _images(n, 1, 28)),
        "resnet18": (nn.ResNet18, lambda n: _images(n, 3, 32)),
        "resnet50": (nn.resnet50, lambda n: _images(n, 3, 224)),
        "gpt": (lambda: nn.GPT(**gpt), lambda n: np.random.default_rng(0).integers(0, 65, (n, 256))),  # type: ignore[arg-type]
    }


def _tune_arguments(parser: argparse.ArgumentParser) -> None:
    problems = " or ".join(f"{name} {sizes}" for name, sizes in PROBLEM_SIZES.items())
    parser.add_argument("what", nargs="?", help=f"a model ({', '.join(_models())}), {problems}")
    parser.add_argument("sizes", nargs="*", type=int, help="the sizes of a matmul or conv2d")
    parser.add_argument("--batch", type=whole(1), help="samples in a batch of the model; default: 8")
    parser.add_argument("--budget", type=number(0), default=45.0, help="seconds to search, after the model has run once")
    parser.add_argument("--dtype", help="dtype of a matmul or conv2d; default: float32")
    parser.add_argument("--device", help="as NETCL_DEVICE")
    parser.add_argument("--forget", action="store_true", help="remove everything that was measured on this machine")
    parser.add_argument("--again", action="store_true", help="measure again what is already known")


@command("tune", _tune_arguments)
def tune(args: argparse.Namespace) -> int:
    """Find the fastest kernels for a model, a matrix product or a convolution on this machine, and store them."""
    from netcl.core.device import device
    from netcl.runtime.tuning import store

    if args.forget:
        print(f"removed the measurements of {store.clear()} devices")
    if args.what is None:
        print(facts(store.info()))
        return 0
    handle = pick_device(args.device)
    start, results = time.perf_counter(), list[Any]()

    def on_result(result: Any) -> None:
        results.append(result)
        print(_line(result), flush=True)

    with device(handle):
        _tune_sizes(args, handle, on_result) if args.what in PROBLEM_SIZES else _tune_model(args, handle, on_result)
    faster = [result for result in results if result.speedup > 1]
    wrong = sum(len(result.rejected) for result in results)
    summary = f"{len(faster)} faster than untuned, {wrong} candidates rejected"
    count, seconds = f"{len(results)} problem{'' if len(results) == 1 else 's'}", time.perf_counter() - start
    print(f"{count} in {seconds:.0f} s: {summary}; {store.path(handle.profile)}")
    if lost := sum(not result.stored for result in results):
        remedy = "name a writable folder in NETCL_CACHE_DIR"
        raise CommandError(message("tune", "a problem must have a kernel that runs, and a file to store it in", remedy, not_stored=lost))
    return 0


def _tune_sizes(args: argparse.Namespace, handle: Any, on_result: Callable[[Any], None]) -> None:
    from netcl.profiling.autotuner import Autotuner

    product = args.what == "matmul"
    if len(args.sizes) not in ((3,) if product else (7, 8, 9)):
        remedy = f"netcl tune {args.what} {PROBLEM_SIZES[args.what]}"
        raise CommandError(message("tune", f"{args.what} requires {'3' if product else '7 to 9'} sizes", remedy, sizes=args.sizes))
    if args.batch is not None:
        raise CommandError(message("tune", "--batch is for models", "the sizes hold the batch", batch=args.batch))
    flags = dict(zip(("stride", "pad"), args.sizes[7:], strict=False))
    ops = ["matmul"] if product else ["conv2d", "conv2d_input_grad", "conv2d_weight_grad"]
    try:
        for op in ops:
            on_result(Autotuner(handle, args.budget / len(ops)).tune(op, *args.sizes[:7], dtype=args.dtype or "float32", **flags))
    except (ShapeError, DtypeError) as fault:
        raise CommandError(str(fault)) from fault


def _tune_model(args: argparse.Namespace, handle: Any, on_result: Callable[[Any], None]) -> None:
    import netcl.autograd as ag
    from netcl.profiling.autotuner import autotune

    known = _models()
    if args.what not in known:
        remedy = f"known: {', '.join(known)}, and {', '.join(PROBLEM_SIZES)} with sizes"
        raise CommandError(message("tune", "unknown model", remedy, name=repr(args.what)))
    if args.sizes or args.dtype:
        given = {"model": args.what, "sizes": args.sizes, "dtype": args.dtype}
        raise CommandError(message("tune", "sizes and dtype must not be given for models", "pass --batch N", **given))
    make, data = known[args.what]
    model, x = make(), ag.tensor(data(args.batch or 8))

    def step() -> None:
        ag.mean(model(x)).backward()

    autotune(step, args.budget, handle.queue, on_result, args.again)


def _line(result: Any) -> str:
    problem = result.problem
    sizes = "x".join(map(str, problem.shape))
    flags = " ".join(f"{name}={value}" for name, value in problem.flags.items() if value not in (False, 1, (0, 0), (1, 1)))
    gain = f"{result.speedup:5.2f}x" if result.speedup > 1 else " as it was"
    tried = f"{len(result.trials)} tried" + ("" if result.complete else ", out of time")
    return f"{problem.op:<18} {sizes:<26} {1e3 * result.seconds:9.3f} ms {gain}  ({tried})  {flags}"
