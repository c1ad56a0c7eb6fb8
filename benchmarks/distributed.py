"""Ranks on one machine: how the time of a step grows with them, what goes over the wire, what overlaps with backward.

    python benchmarks/distributed.py [--device SELECTOR] [--ranks 1 2] [--out FILE] [--trace FILE]     weak scaling, one core per rank
    sudo python benchmarks/distributed.py --wire [--ranks 2 4]                                         bytes, counted on the cables
    python benchmarks/distributed.py --cost                                                            the cost model, fitted and checked

Weak scaling: every rank has a batch of the same size and a core of its own, so that the time of a step should stay; what it grows by is
the cost of being several. Bytes: ranks in network namespaces (``tools/namespaces.py``); two runs of different length, so that what a job
costs once drops out.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))
MODELS = ("mlp", "gpt")
SHORT, LONG = 4, 12  # steps of the two runs whose difference is taken


def model_of(kind: str) -> tuple[Any, Any, Any]:
    import netcl
    from netcl import nn

    netcl.manual_seed(0)
    rng = np.random.default_rng(0)
    if kind == "mlp":
        return nn.MLP(784, [1024, 1024], 10), rng.standard_normal((64, 784)).astype(np.float32), rng.integers(0, 10, 64)
    tokens = rng.integers(0, 256, (4, 65))
    return nn.GPT(256, block_size=64, n_layer=4, n_head=4, n_embd=128), tokens[:, :-1], tokens[:, 1:]


def train(kind: str, steps: int, bucket_mb: float, overlap: bool) -> dict[str, Any]:
    """What every rank does."""
    import netcl.autograd as ag
    from netcl import optim
    from netcl.core.tensor import Tensor
    from netcl.distributed import DistributedDataParallel, world

    ours = world()
    model, x, y = model_of(kind)
    wrapped = DistributedDataParallel(model, bucket_mb=bucket_mb, overlap=overlap)
    opt = optim.SGD(wrapped.parameters(), lr=0.01)
    given, wanted = Tensor.from_host(model.queue, x), Tensor.from_host(model.queue, y.reshape(-1))
    times = []
    for _ in range(steps):
        ours.barrier()
        start = time.perf_counter()
        out = wrapped(given)
        loss = ag.cross_entropy(out.reshape(-1, out.shape[-1]), wanted)
        loss.backward()
        opt.step()
        opt.zero_grad()
        model.parameters()[0].to_host()
        times.append(time.perf_counter() - start)
    gradients = sum(p.nbytes for p in model.parameters())
    return {"step ms": 1e3 * statistics.median(times[2:]), "best ms": 1e3 * min(times[2:]), "gradient bytes": gradients,
            "sent bytes": wrapped.bytes_sent, "spans": [list(span) for span in wrapped.spans]}  # fmt: skip


def hidden(spans: list[list[Any]]) -> float:
    """The share of the time buckets were with other ranks that lies within backward."""
    walks = [(start, end) for name, start, end in spans if name == "backward"]
    buckets = [(start, end) for name, start, end in spans if name != "backward"]
    inside = sum(max(0.0, min(end, b) - max(start, a)) for start, end in buckets for a, b in walks)
    return inside / max(1e-12, sum(end - start for start, end in buckets))


def trace(spans: list[list[Any]], path: Path) -> None:
    """The last two steps for chrome://tracing or Perfetto: backward above, buckets below."""
    begin = [start for name, start, _ in spans if name == "backward"][-2]
    rows = [{"name": name, "ph": "X", "pid": 0, "tid": int(name != "backward"), "ts": 1e6 * (start - begin), "dur": 1e6 * (end - start)}
            for name, start, end in spans if end > begin]  # fmt: skip
    path.write_text(json.dumps({"traceEvents": rows}))


def measured(kind: str, ranks: int, options: argparse.Namespace, overlap: bool = True) -> dict[str, Any]:
    """One job in processes of its own, a core per rank."""
    from netcl.distributed.launch import mpiexec

    one_core = {"POCL_MAX_PTHREAD_COUNT": "1", "CL_CONFIG_CPU_TBB_NUM_WORKERS": "1", "OMP_NUM_THREADS": "1", "NETCL_DEVICE": options.device}
    child = [sys.executable, __file__, "--as-rank", kind, "--steps", str(options.steps), "--bucket-mb", str(options.bucket_mb)]
    child += [] if overlap else ["--no-overlap"]
    command = child if ranks == 1 else [mpiexec(), "-n", str(ranks), *child]
    said = subprocess.run(command, capture_output=True, text=True, check=True, env={**os.environ, **one_core})
    return json.loads(said.stdout.strip().splitlines()[-1])


def scaling(options: argparse.Namespace) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for kind in MODELS:
        alone = None
        for ranks in options.ranks:
            row = measured(kind, ranks, options)
            alone = alone or row["step ms"]
            spans = row.pop("spans")
            row |= {"efficiency": round(alone / row["step ms"], 3)}
            if ranks > 1:
                row |= {
                    "hidden share": round(hidden(spans), 3),
                    "step ms without overlap": measured(kind, ranks, options, False)["step ms"],
                }
                if options.trace:
                    trace(spans, options.trace)
            found[f"{kind}, {ranks} ranks"] = {name: round(value, 3) for name, value in row.items()}
    return found


def wire(options: argparse.Namespace) -> dict[str, Any]:
    found = {}
    for ranks in options.ranks:
        counted = []
        for steps in (SHORT, LONG):
            child = [__file__, "--as-rank", "mlp", "--steps", str(steps), "--bucket-mb", str(options.bucket_mb)]
            command = [sys.executable, str(ROOT / "tools" / "namespaces.py"), "-n", str(ranks), *child]
            env = {**os.environ, "PYTHONPATH": str(ROOT), "NETCL_DEVICE": "cpu", "OMP_NUM_THREADS": "1"}
            said = subprocess.run(command, capture_output=True, text=True, check=True, env=env).stdout
            sent = json.loads(re.findall(r"\{.*\}", said)[-1])["bytes on the cable"]
            counted.append((sum(sent.values()) / ranks, json.loads(re.findall(r"\{.*gradient bytes.*\}", said)[0])))
        per_step = (counted[1][0] - counted[0][0]) / (LONG - SHORT)
        gradients = counted[0][1]["gradient bytes"]
        least = 2 * (ranks - 1) / ranks * gradients
        handed = (counted[1][1]["sent bytes"] - counted[0][1]["sent bytes"]) / (LONG - SHORT)
        found[f"{ranks} ranks"] = {"gradient bytes": gradients, "least": least, "handed to MPI": handed, "on the cable": per_step,
                                   "cable / least": round(per_step / least, 4)}  # fmt: skip
    return found


def reduce_times(repeats: int = 9) -> dict[int, float]:
    """Seconds of an all-reduce by bytes; every rank calls this."""
    from netcl.distributed import world

    ours, found = world(), {}
    for size in (1 << power for power in range(8, 25, 2)):
        values, times = np.ones(size // 4, np.float32), []
        for _ in range(repeats):
            ours.barrier()
            start = time.perf_counter()
            ours.all_reduce(values, check=False)
            times.append(time.perf_counter() - start)
        found[size] = min(times)
    return found


def cost(options: argparse.Namespace) -> dict[str, Any]:
    """``T(N) = latency + N / rate``: latency of small messages, rate of large ones, and what that says of all."""
    from netcl.distributed.launch import mpiexec

    command = [mpiexec(), "-n", str(options.ranks[-1]), sys.executable, __file__, "--as-rank", "all_reduce"]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip().splitlines()[-1]
    times = {int(size): seconds for size, seconds in json.loads(said).items()}
    latency = statistics.median(seconds for size, seconds in times.items() if size <= 1 << 12)
    large = {size: seconds for size, seconds in times.items() if size >= 1 << 20}
    rate = sum(large) / (sum(large.values()) - len(large) * latency)
    rows = {
        f"{size} bytes": {"us": round(1e6 * seconds, 1), "model us": round(1e6 * (latency + size / rate), 1)}
        for size, seconds in times.items()
    }
    return {"latency us": round(1e6 * latency, 1), "rate MB/s": round(rate / 1e6, 1), "ranks": options.ranks[-1], **rows}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--device", default="cl:cpu")
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--bucket-mb", type=float, default=1.0)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--trace", type=Path)
    parser.add_argument("--wire", action="store_true")
    parser.add_argument("--cost", action="store_true")
    parser.add_argument("--no-overlap", action="store_true")
    parser.add_argument("--as-rank", default="", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.as_rank:
        from netcl.distributed import world

        cores = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {cores[world().rank % len(cores)]})
        row: Any = (
            reduce_times()
            if options.as_rank == "all_reduce"
            else train(options.as_rank, options.steps, options.bucket_mb, not options.no_overlap)
        )
        if world().rank == 0:
            print(json.dumps(row), flush=True)
        return
    measure = wire if options.wire else cost if options.cost else scaling
    made_by = "python " + " ".join(["benchmarks/distributed.py", *sys.argv[1:]])
    result = {"made by": made_by, "machine": platform.machine(), "cores": len(os.sched_getaffinity(0)), "rows": measure(options)}
    text = json.dumps(result, indent=1)
    print(text)
    if options.out:
        options.out.write_text(text + "\n")


if __name__ == "__main__":
    main()
