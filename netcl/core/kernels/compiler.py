"""Calls the driver's compiler, in this process or, run as a script, in a builder process (:mod:`netcl.core.kernels.builders`).

A builder must start quickly, so this file imports nothing of netcl.
"""

from __future__ import annotations

import json
import os
import re
import select
import signal
import sys
import warnings
from collections.abc import Sequence
from typing import Any

PTX_MARK = re.compile(r"//@(sm_\w+) ")
_MOST_IDLE = 60  # seconds after which a builder ends by itself; usually its parent ends it earlier


def from_source(cl: Any, context: Any, forms: Sequence[tuple[str, Sequence[str]]]) -> Any:
    """Build the first of several equivalent forms (text and options) that the driver accepts; the error is that of the last."""
    for text, options in forms[:-1]:
        try:
            return cl.Program(context, text).build(options=list(options), cache_dir=False)
        except cl.Error:
            pass
    text, options = forms[-1]
    return cl.Program(context, text).build(options=list(options), cache_dir=False)


def from_binary(cl: Any, context: Any, binary: bytes) -> Any:
    """Load a binary as a program of a context's first device."""
    return cl.Program(context, context.devices[:1], [binary]).build()


def binary_of(cl: Any, built: Any) -> bytes:
    """Return the driver's binary of a program."""
    return bytes(built.get_info(cl.program_info.BINARIES)[0])


def edited_ptx(text: bytes) -> bytes:
    """Return PTX with its ``//@sm_90a`` lines uncommented and that processor as its target; raises ``ValueError`` for other binaries.

    NVIDIA's OpenCL compiler rejects instructions that only one processor of a generation has; its assembler accepts them. Such
    instructions are therefore commented out in inline assembly, and the resulting PTX is edited and loaded again.
    """
    plain = text.decode("latin1").rstrip("\0")
    marks = sorted(set(PTX_MARK.findall(plain)))
    if len(marks) != 1 or not re.search(r"^\.target\s+sm_", plain, re.M):
        raise ValueError(f"marks={', '.join(marks) or 'none'}, starts={plain[:20]!r}")
    return re.sub(r"^(\.target\s+)sm_\w+", rf"\g<1>{marks[0]}", PTX_MARK.sub("", plain), flags=re.M).encode("latin1")


def serve_builds() -> None:
    """Serve requests in a builder process: a line of JSON asks for a program, a line with a size and the binary answer it.

    The first line that is written means that the process is ready. A size of -1 means that the program does not build.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # a driver may print
    import pyopencl as cl

    platform, index, name = sys.argv[1], int(sys.argv[2]), sys.argv[3]
    (device,) = [d for p in cl.get_platforms() if p.name == platform for d in p.get_devices()[index : index + 1] if d.name == name]
    context = cl.Context([device])
    warnings.simplefilter("ignore")
    answers.write(b"0\n")
    answers.flush()
    while select.select([0], [], [], _MOST_IDLE)[0] and (line := sys.stdin.readline()):
        request = json.loads(line)
        try:
            built = from_source(cl, context, request["forms"])
            binary = binary_of(cl, built)
            if request["marked"]:
                binary = edited_ptx(binary)
                from_binary(cl, context, binary)
        except (cl.Error, ValueError):
            answers.write(b"-1\n")  # the parent builds it again and reports the error
        else:
            answers.write(b"%d\n" % len(binary) + binary)
        answers.flush()


if __name__ == "__main__":
    serve_builds()
