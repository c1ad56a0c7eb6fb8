"""Exports launches and regions as a trace for Perfetto (https://ui.perfetto.dev) and chrome://tracing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from netcl.profiling.events import Launch

_KERNELS, _HOST, _TRANSFERS = 1, 2, 3  # the processes of the trace
_CATEGORIES = {_KERNELS: "kernel", _HOST: "host", _TRANSFERS: "transfer"}


class Span(NamedTuple):
    """A named interval on the host, in seconds since the observation began."""

    name: str
    start: float
    end: float
    lane: str = "regions"  # or "compile", "loader", "launches"


def events(launches: Sequence[Launch], spans: Sequence[Span] = (), transfers: Sequence[Launch] = ()) -> list[dict[str, Any]]:
    """Return the trace events. Each device has a track for kernels and a track for transfers; the host has a track per lane."""
    rows: list[dict[str, Any]] = []
    for process, title, commands in ((_KERNELS, "kernels", launches), (_TRANSFERS, "transfers", transfers)):
        queues = list(dict.fromkeys(command.queue for command in commands))
        rows += [_name("process_name", process, 0, title)] if commands else []
        rows += [_name("thread_name", process, track, queue) for track, queue in enumerate(queues)]
        for command in commands:
            facts: dict[str, Any] = {"bytes": command.bytes}
            facts |= {"global": command.global_size, "local": command.local_size} if command.global_size else {}
            facts |= {"flops": command.flops} if command.flops else {}
            rows.append(_event(command.name, process, queues.index(command.queue), command.start, command.end, facts))
    if spans:
        lanes = list(dict.fromkeys(span.lane for span in spans))
        rows += [_name("process_name", _HOST, 0, "host"), *(_name("thread_name", _HOST, i, lane) for i, lane in enumerate(lanes))]
        rows += [_event(span.name, _HOST, lanes.index(span.lane), span.start, span.end, {}) for span in spans]
    return rows


def _name(kind: str, process: int, thread: int, name: str) -> dict[str, Any]:
    return {"name": kind, "ph": "M", "pid": process, "tid": thread, "args": {"name": name}}


def _event(name: str, process: int, thread: int, start: float, end: float, facts: dict[str, Any]) -> dict[str, Any]:
    times = {"ts": round(1e6 * start, 3), "dur": round(1e6 * (end - start), 3)}  # the format counts microseconds
    return {"name": name, "ph": "X", "cat": _CATEGORIES[process], "pid": process, "tid": thread, **times, "args": facts}
