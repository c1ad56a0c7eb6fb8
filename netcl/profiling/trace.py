"""Launches and regions as a trace that Perfetto (https://ui.perfetto.dev) and chrome://tracing open."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from netcl.profiling.events import Launch

_DEVICE, _HOST = 1, 2


class Span(NamedTuple):
    """A part of the host's time, in seconds since the observation began."""

    name: str
    start: float
    end: float
    lane: str = "regions"  # or "compile"


def events(launches: Sequence[Launch], spans: Sequence[Span] = ()) -> list[dict[str, Any]]:
    """The trace events: one track per device, and tracks for the host's regions and for compiling, if there are any."""
    queues = list(dict.fromkeys(launch.queue for launch in launches))
    rows = [_name("process_name", _DEVICE, 0, "kernels")]
    rows += [_name("thread_name", _DEVICE, track, queue) for track, queue in enumerate(queues)]
    for launch in launches:
        facts: dict[str, Any] = {"global": launch.global_size, "local": launch.local_size, "bytes": launch.bytes}
        facts |= {"flops": launch.flops} if launch.flops else {}
        rows.append(_event(launch.name, _DEVICE, queues.index(launch.queue), launch.start, launch.end, facts))
    if spans:
        lanes = list(dict.fromkeys(span.lane for span in spans))
        rows += [_name("process_name", _HOST, 0, "host"), *(_name("thread_name", _HOST, i, lane) for i, lane in enumerate(lanes))]
        rows += [_event(span.name, _HOST, lanes.index(span.lane), span.start, span.end, {}) for span in spans]
    return rows


def save_trace(path: str | os.PathLike[str], launches: Sequence[Launch], spans: Sequence[Span] = ()) -> None:
    """Write a trace file (JSON)."""
    text = json.dumps({"traceEvents": events(launches, spans), "displayTimeUnit": "ms"})
    Path(path).write_text(text, encoding="utf-8")


def _name(kind: str, process: int, thread: int, name: str) -> dict[str, Any]:
    return {"name": kind, "ph": "M", "pid": process, "tid": thread, "args": {"name": name}}


def _event(name: str, process: int, thread: int, start: float, end: float, facts: dict[str, Any]) -> dict[str, Any]:
    times = {"ts": round(1e6 * start, 3), "dur": round(1e6 * (end - start), 3)}  # the format counts microseconds
    return {"name": name, "ph": "X", "cat": "host" if process == _HOST else "kernel", "pid": process, "tid": thread, **times, "args": facts}
