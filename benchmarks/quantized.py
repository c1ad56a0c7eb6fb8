"""Products with packed weights: bytes per second against a read-only stream of the same run, and prefill against unpacked products.

    python benchmarks/quantized.py [--device auto] [--threads 2] [--repeats 7] [--kinds Q4_0,Q8_0,Q4_K,F16] [--commit ID] [--quick]
    [--out FILE]

Weights rotate over copies, so that caches do not hold them. A step of all copies is compiled, so launches are replayed; stream and product
take turns, and the best of the repeats counts. Every product is checked before it is timed. Writes ``results/quantized_<device>.json``.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

sys.path[:0] = [str(Path(__file__).parent.parent), str(Path(__file__).parent)]
from run import facts, hold_to, kind_of  # noqa: E402

SHAPES = ((2048, 2048), (8192, 2048), (2048, 8192), (32000, 2048), (4096, 4096), (14336, 4096))
LARGE = (131072, 4096)
TOKENS = (1, 2, 4, 8)
PREFILL = ((64, 2048, 2048), (512, 2048, 2048), (64, 14336, 4096), (512, 14336, 4096))


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--kinds", default="Q4_0,Q8_0,Q4_K,F16")
    parser.add_argument("--dtype", default="", help="of the activations; float16 on GPUs, float32 on CPUs")
    parser.add_argument("--commit", default="", help="of a copy without a repository")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--out", default="")
    parser.set_defaults(cases="", sweep=False)  # which facts() reads
    return parser.parse_args()


def random_packed(kind: Any, rows: int, columns: int, seed: int) -> np.ndarray:
    """Packed random weights; a few rows are quantized and repeated, since quantizing all takes long."""
    from netcl.ops.quantized.formats import quantize
    from netcl.ops.quantized.layout import device_bytes, pack_strips

    few = min(rows, 256)
    values = np.random.default_rng(seed).standard_normal((few, columns), np.float32) * np.float32(0.02)
    packed = pack_strips(quantize(values, kind), kind, (few, columns))
    return np.resize(packed, device_bytes(kind, (rows, columns)))


def check(kind: Any, weight: np.ndarray, x: Any, y: Any, rows: int, bound: float) -> None:
    """Raise if the first rows of a product are not those of NumPy."""
    from netcl.ops.quantized.formats import dequantize
    from netcl.ops.quantized.layout import device_bytes, unpack_strips

    few, columns = min(rows, 64), x.shape[1]
    part = weight[: device_bytes(kind, (few, columns))]
    exact = np.asarray(x.to_host(), np.float64) @ dequantize(unpack_strips(part, kind, (few, columns)), kind, (few, columns)).T
    error = np.abs(np.asarray(y.to_host(), np.float64)[:, :few] - exact).max() / np.abs(exact).max()
    if not error < bound:
        raise SystemExit(f"wrong result: {kind.name} {rows}x{columns}, {x.shape[0]} tokens: relative error {error:.2e}")


def seconds(run: Callable[[], Any], wait: Callable[[], None], least: float) -> float:
    """Seconds of one call, of as many as take ``least`` seconds."""
    calls, taken = 1, 0.0
    while taken < least:
        calls = max(calls, int(calls * min(10.0, 1.2 * least / max(taken, 1e-6))))
        wait()
        begin = time.perf_counter()
        for _ in range(calls):
            run()
        wait()
        taken = time.perf_counter() - begin
    return taken / calls


class Bench:
    """A device, its stream, and the products to measure."""

    def __init__(self, where: Any, chosen: argparse.Namespace):
        from netcl.core.tensor import Tensor
        from netcl.engine import launch

        self.where, self.queue, self.chosen = where, where.handle.queue, chosen
        self.gpu = where.handle.device_type == "gpu"
        self.least, self.spread = (0.002, 1 << 22) if chosen.quick else (0.05, (256 if self.gpu else 96) << 20)
        self.dtype = chosen.dtype or ("float16" if self.gpu else "float32")
        items, groups = (256, 4096) if self.gpu else (1, 64)
        size = max(1 << 20, self.spread) // (groups * 64 * 4 * items) * (groups * 64 * 4 * items)
        memory = Tensor.from_host(self.queue, np.zeros(size, np.uint8))
        out = Tensor.empty((groups * items,), "uint32", queue=self.queue)
        kernel = launch.kernel(self.queue, __file__, "stream.cl", "stream", None, {"ITEMS": items})
        self.stream = lambda: kernel(self.queue, groups * items, items, memory, out, size // groups // 64)
        self.stream_bytes = size

    def wait(self) -> None:
        self.queue.finish()

    def gemv(self, kind: Any, rows: int, columns: int, tokens: int) -> dict[str, Any]:
        import netcl
        import netcl.autograd as ag
        from netcl import ops
        from netcl.core.tensor import Tensor

        weight = random_packed(kind, rows, columns, 0)
        copies = max(1, min(64, -(-self.spread // weight.nbytes)))
        held = [Tensor.from_host(self.queue, weight) for _ in range(copies)]
        x = Tensor.from_host(self.queue, np.random.default_rng(1).standard_normal((tokens, columns), np.float32), self.dtype)
        check(kind, weight, x, ops.quantized_linear(x, held[0], kind=kind.name, rows=rows), rows, 3e-2)

        def step(x: Any) -> list[Any]:
            with ag.no_grad():
                return [ops.quantized_linear(x, w, kind=kind.name, rows=rows) for w in held]

        compiled = netcl.compile(step)
        for _ in range(4):
            compiled(x)
        best, stream = float("inf"), float("inf")
        for _ in range(self.chosen.repeats):
            stream = min(stream, seconds(self.stream, self.wait, self.least))
            best = min(best, seconds(lambda: compiled(x), self.wait, self.least) / copies)
        file_bytes = rows * columns // kind.block * kind.nbytes
        rate, read = file_bytes / best / 1e9, self.stream_bytes / stream / 1e9
        return {
            "case": f"{kind.name} {rows}x{columns}, {tokens} tokens", "us": round(best * 1e6, 2), "gb_per_s": round(rate, 1),
            "stream_gb_per_s": round(read, 1), "of_stream": round(rate / read, 3),
        }  # fmt: skip

    def prefill(self, kind: Any, tokens: int, rows: int, columns: int) -> dict[str, Any]:
        import netcl
        import netcl.autograd as ag
        from netcl import ops
        from netcl.core.tensor import Tensor

        weight = random_packed(kind, rows, columns, 0)
        held = [Tensor.from_host(self.queue, weight) for _ in range(max(4, min(16, (1 << 26) // (rows * columns))))]  # as in a model's step
        x = Tensor.from_host(self.queue, np.random.default_rng(1).standard_normal((tokens, columns), np.float32), self.dtype)
        plain = ops.quantized_rows(held[0], kind=kind.name, shape=(rows, columns), dtype=self.dtype)

        def packed(x: Any) -> list[Any]:
            with ag.no_grad():
                return [ops.quantized_linear(x, w, kind=kind.name, rows=rows) for w in held]

        def unpacked(x: Any) -> list[Any]:
            with ag.no_grad():
                return [ops.affine(x, plain) for _ in held]

        check(kind, weight, x, packed(x)[0], rows, 3e-2)
        ways = {"packed": netcl.compile(packed), "unpacked": netcl.compile(unpacked)}
        for way in ways.values():
            for _ in range(4):
                way(x)
        calls: dict[str, Callable[[], Any]] = {name: lambda way=way: way(x) for name, way in ways.items()}  # type: ignore[misc]
        if self.where.torch is not None and self.where.torch_device == "cuda":
            calls["torch"] = self.torch_product(tokens, rows, columns, len(held))
        best, waits = dict.fromkeys(calls, float("inf")), {}
        if "torch" in calls:
            waits["torch"] = self.where.torch.cuda.synchronize
        for _ in range(self.chosen.repeats):
            for name, call in calls.items():
                best[name] = min(best[name], seconds(call, waits.get(name, self.wait), self.least) / len(held))
        flops = 2e-9 * tokens * rows * columns
        row = {
            "case": f"{kind.name} {rows}x{columns}, {tokens} tokens", "us": round(best["packed"] * 1e6, 1),
            "gflop_per_s": round(flops / best["packed"], 1), "of_unpacked_product": round(best["unpacked"] / best["packed"], 3),
        }  # fmt: skip
        return row | ({"of_torch_float16": round(best["torch"] / best["packed"], 3)} if "torch" in best else {})

    def torch_product(self, tokens: int, rows: int, columns: int, count: int) -> Callable[[], Any]:
        """torch's product of float16 matrices of these sizes, as often as ours, in a CUDA graph."""
        torch = self.where.torch
        w = [torch.randn(rows, columns, device="cuda", dtype=torch.float16) for _ in range(count)]
        x = torch.randn(tokens, columns, device="cuda", dtype=torch.float16)
        for each in w:
            torch.matmul(x, each.T)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for each in w:
                torch.matmul(x, each.T)
        return graph.replay


def main() -> None:
    chosen = options()
    if chosen.threads and kind_of(chosen.device) == "cpu":
        hold_to(chosen.threads)
    from netcl.bench import setting
    from netcl.ops.quantized.formats import BLOCK_TYPES

    where = setting(chosen.device, repeats=chosen.repeats, quick=chosen.quick, with_torch=kind_of(chosen.device) != "cpu")
    bench, kinds = Bench(where, chosen), [BLOCK_TYPES[name] for name in chosen.kinds.split(",")]
    shapes = ((64, 256), (100, 512)) if chosen.quick else (*SHAPES, LARGE) if bench.gpu else SHAPES
    tokens, prefill = (TOKENS[::3], ((33, 64, 256),)) if chosen.quick else (TOKENS if bench.gpu else TOKENS[::3], PREFILL)
    rows: dict[str, list[dict[str, Any]]] = {"decode": [], "prefill": []}
    for kind in kinds:
        for part, cases in (("decode", [(*s, t) for s in shapes for t in tokens]), ("prefill", list(prefill))):
            for case in cases:
                rows[part].append(bench.gemv(kind, *case) if part == "decode" else bench.prefill(kind, *case))
                print(json.dumps(rows[part][-1]), flush=True)
    name = re.sub(r"\W+", "_", f"{where.handle.platform_name} {where.handle.device_name}".lower()).strip("_")
    path = Path(chosen.out or Path(__file__).parent / "results" / f"quantized_{name}.json")
    made_by = f"python benchmarks/quantized.py --device {chosen.device} --threads {chosen.threads} --repeats {chosen.repeats}"
    known = {**facts(where, chosen), "made by": made_by, "activations": bench.dtype}
    path.write_text(json.dumps({"facts": known, **rows}, indent=1) + "\n", encoding="utf-8")
    print(f"written: {path}")


if __name__ == "__main__":
    main()
