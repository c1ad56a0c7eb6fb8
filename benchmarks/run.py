"""Times netcl against torch (and NumPy), interleaved, and writes what came out.

    python benchmarks/run.py [--device SELECTOR] [--cases PATTERN] [--threads 2] [--repeats 7] [--out FILE] [--quick]

Cases run one after the other in a worker process; one that fails, crashes or takes too long is recorded with its error, and the
run goes on in a new worker. On CPU devices this process and both runtimes are held to ``--threads`` cores.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import queue
import re
import shlex
import subprocess
import sys
import threading
import time
from importlib import metadata
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT), str(Path(__file__).parent)]
ROW = "@row "


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--device", default="auto", help="as NETCL_DEVICE: gpu, cl:cpu, pocl, intel, nvidia, cpu (NumPy)")
    parser.add_argument("--cases", default="", help="only cases whose name matches this regular expression")
    parser.add_argument("--threads", type=int, default=2, help="cores for both sides where our device is a CPU; 0: all")
    parser.add_argument("--repeats", type=int, default=7, help="interleaved rounds; the best counts")
    parser.add_argument("--out", type=Path, help="where to write the results as JSON")
    parser.add_argument("--quick", action="store_true", help="a few small cases")
    parser.add_argument("--sweep", action="store_true", help="how cost grows with size, instead of the cases")
    parser.add_argument("--limit", type=float, default=180, help="seconds a case may take")
    parser.add_argument("--commit", default="", help="what to record as the commit where there is no git")
    parser.add_argument("--list", action="store_true", help="name the cases and stop")
    parser.add_argument("--worker", type=int, help=argparse.SUPPRESS)
    return parser.parse_args()


def hold_to(threads: int) -> None:
    """Cores and threads of every runtime, before any of them is loaded. A runtime that ignores its variable still has two cores."""
    if not threads:
        return
    for name in ("POCL_MAX_PTHREAD_COUNT", "POCL_CPU_MAX_CU_COUNT", "CL_CONFIG_CPU_TBB_NUM_WORKERS", "OMP_NUM_THREADS",
                 "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):  # fmt: skip
        os.environ[name] = str(threads)
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:threads])


def kind_of(selector: str) -> str:
    """The type of a device, found out in another process: this one must not load a runtime before its threads are set."""
    code = f"from netcl.core.device import manager; h = manager.default({selector!r}); print(h and h.device_type)"
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, cwd=ROOT)
    return said.stdout.strip()


def chosen(options: argparse.Namespace, gpu: bool) -> list[Any]:
    """The cases the options ask for."""
    from cases import cases
    from sweeps import sweeps

    made = sweeps(gpu, options.quick) if options.sweep else cases(gpu, options.quick)
    return [case for case in made if re.search(options.cases, case.name)]


def work(options: argparse.Namespace) -> None:
    """The worker: cases from number ``options.worker`` on, one line each on standard output."""
    from comparison import measure

    from netcl.bench import setting

    where = setting(options.device, options.threads or None, options.repeats, options.quick)
    made = chosen(options, where.is_gpu)
    say({"facts": facts(where, options), "cases": [case.name for case in made]})
    for case in [] if options.list else made[options.worker :]:
        start = time.perf_counter()
        rows = measure(case, where)
        say({"rows": rows, "seconds": round(time.perf_counter() - start, 1)})


def say(thing: dict[str, Any]) -> None:
    print(ROW + json.dumps(thing), flush=True)


def facts(where: Any, options: argparse.Namespace) -> dict[str, Any]:
    """What a ratio depends on: devices, drivers, versions, commit."""
    versions = {name: metadata.version(name) for name in ("numpy", "pyopencl", "torch") if _installed(name)}
    git = subprocess.run(["git", "describe", "--always", "--dirty"], capture_output=True, text=True, check=False, cwd=ROOT)
    handle = where.handle
    found = {"platform": handle.platform_name, "device": handle.device_name, "type": handle.device_type}
    if handle.backend == "cl":
        found |= {"driver": handle.device.driver_version, "compute_units": handle.device.max_compute_units}
    theirs = where.torch_device if where.torch else "none"
    if theirs == "cuda":
        theirs = f"cuda {where.torch.version.cuda}, {where.torch.cuda.get_device_name()}"
    return {
        "made by": command(options),
        "commit": options.commit or git.stdout.strip() or "unknown", "machine": platform.machine(), "cpu": _cpu_name(),
        "threads": options.threads,
        "python": platform.python_version(), "versions": versions, **found, "torch_device": theirs,
        "torch_threads": where.torch.get_num_threads() if where.torch else None,
    }  # fmt: skip


def command(options: argparse.Namespace) -> str:
    """What to type for the same run; where the results went is nobody's business."""
    given = {"device": options.device, "cases": options.cases, "threads": options.threads, "repeats": options.repeats}
    words = [f"--{name} {shlex.quote(str(value))}" for name, value in given.items() if value != ""]
    return " ".join(["python benchmarks/run.py", *words, *(f"--{n}" for n in ("quick", "sweep") if getattr(options, n))])


def _installed(name: str) -> bool:
    with contextlib.suppress(metadata.PackageNotFoundError):
        return bool(metadata.version(name))
    return False


def _cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    found = re.search(r"model name\s*:\s*(.+)", info.read_text()) if info.exists() else None
    return found[1] if found else platform.processor()


class Worker:
    """A process that measures cases from a number on; its lines arrive with a time-out."""

    def __init__(self, start: int):
        command = [sys.executable, __file__, *sys.argv[1:], f"--worker={start}"]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        self.lines: queue.Queue[str | None] = queue.Queue()
        self.errors: list[str] = []
        self._threads = [threading.Thread(target=listen, daemon=True) for listen in (self._read, self._listen)]
        for thread in self._threads:
            thread.start()

    def _read(self) -> None:
        for line in self.process.stdout or ():
            self.lines.put(line)
        self.lines.put(None)

    def _listen(self) -> None:
        for line in self.process.stderr or ():
            self.errors.append(line)
            if len(self.errors) > 400:
                del self.errors[0]

    def next(self, seconds: float) -> dict[str, Any] | None:
        """What the worker says next; ``None`` when it has ended."""
        until = time.monotonic() + seconds
        while True:
            line = self.lines.get(timeout=max(0.01, until - time.monotonic()))
            if line is None:
                return None
            if line.startswith(ROW):
                return json.loads(line[len(ROW) :])

    def last_words(self) -> str:
        """Why it ended: the last line of its traceback, or its exit code."""
        code = self.process.wait()
        self._threads[1].join(5)
        told = [line.strip() for line in self.errors if re.match(r"\w[\w.]*(Error|Exception|Interrupt|Warning|Exit)\b", line)]
        return told[-1] if told else f"the worker ended with code {code}: {''.join(self.errors)[-300:]}"

    def stop(self) -> None:
        self.process.kill()
        self.process.wait()
        for thread, pipe in zip(self._threads, (self.process.stdout, self.process.stderr), strict=True):
            thread.join(5)
            if pipe is not None:
                pipe.close()


def run(options: argparse.Namespace) -> dict[str, Any]:
    """Every case, over as many workers as it takes."""
    results: dict[str, Any] = {"facts": {}, "rows": []}
    names, done = [""], 0
    while done < len(names):
        worker = Worker(done)
        try:
            first = worker.next(600)
            if first is None:
                raise SystemExit(f"nothing was measured: {worker.last_words()}")
            results["facts"], names = results["facts"] or first["facts"], first["cases"]
            if options.list:
                print("\n".join(names))
                break
            while done < len(names):
                said = worker.next(options.limit)
                if said is None:
                    failed(results, names[done], worker.last_words())
                    done += 1
                    break
                for row in said["rows"]:
                    results["rows"].append(row)
                    print(table_line(row), flush=True)
                done += 1
                write(results, options.out)
        except queue.Empty:
            failed(results, names[done], f"it took longer than {options.limit:g} s")
            done += 1
        finally:
            worker.stop()
    write(results, options.out)
    return results


def failed(results: dict[str, Any], name: str, why: str) -> None:
    row = {"case": name, "error": why}
    results["rows"].append(row)
    print(table_line(row), flush=True)


def write(results: dict[str, Any], path: Path | None) -> None:
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(results, indent=1) + "\n")


def table_line(row: dict[str, Any]) -> str:
    """One row of the table that is printed."""
    if "error" in row:
        return f"{row['case']:<62} ERROR {row['error'][:160]}"
    if "skipped" in row:
        ours = shown(row, "ours_s")
        return f"{row['case']:<62}{ours} skipped: {row['skipped'][:160]}"
    verdict = {True: "met", False: "MISSED", None: ""}[row["met"]]
    verdict += " (portable: met)" if row.get("portable_met") and not row["met"] else ""
    ratio = f"{row['ratio']:8.3f}" if row["ratio"] is not None else " " * 8
    target = f"{row['target']:8.3g}" if row["target"] is not None else " " * 8
    return f"{row['case']:<62}{shown(row, 'ours_s')}{shown(row, 'theirs_s')} {ratio} {target}  {verdict}  {row['yardstick'] or ''}"


def shown(row: dict[str, Any], name: str) -> str:
    """A time, or bytes, in ten places."""
    if row[name] is None:
        return " " * 10
    return f"{row[name] / 2**20:8.1f}MB" if row.get("unit") == "bytes" else clock(row[name])


def clock(seconds: float) -> str:
    unit, factor = next((u, f) for u, f in (("s ", 1.0), ("ms", 1e3), ("us", 1e6)) if seconds * f >= 1 or u == "us")
    return f"{seconds * factor:8.2f}{unit}"


def main() -> None:
    options = arguments()
    if options.worker is None:
        if kind_of(options.device) == "gpu":
            sys.argv.append("--threads=0")
        print(f"{'case':<62}{'ours':>10}{'theirs':>10} {'ratio':>8} {'target':>8}")
        results = run(options)
        judged = [row for row in results["rows"] if row.get("met") is not None]
        print(f"{sum(row['met'] for row in judged)} of {len(judged)} targets met; commit {results['facts']['commit']}")
        return
    hold_to(options.threads)
    work(options)


if __name__ == "__main__":
    main()
