"""Counters and latencies in the text format of Prometheus."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Mapping

BOUNDS = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)  # seconds
_ALL = 'le="+Inf"'
DESCRIBED = {
    "netcl_requests_total": ("counter", "HTTP requests by path and status."),
    "netcl_prompt_tokens_total": ("counter", "Tokens of prompts that were computed."),
    "netcl_generated_tokens_total": ("counter", "Tokens that were generated."),
    "netcl_answers_total": ("counter", "Requests to the model by outcome."),
    "netcl_first_token_seconds": ("histogram", "Time from the request to its first token."),
    "netcl_answer_seconds": ("histogram", "Time from the request to the end of its answer."),
    "netcl_queue_length": ("gauge", "Requests that wait for a slot."),
    "netcl_running_sequences": ("gauge", "Sequences in the batch."),
}


class Metrics:
    """Values by name and labels; any thread may change them."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: Counter[tuple[str, str]] = Counter()
        self._sums: Counter[str] = Counter()

    def count(self, name: str, amount: int = 1, **labels: object) -> None:
        """Add to a counter."""
        told = ",".join(f'{key}="{value}"' for key, value in labels.items())
        with self._lock:
            self._counts[name, told] += amount

    def observe(self, name: str, seconds: float) -> None:
        """Add a duration to a histogram."""
        with self._lock:
            self._sums[name] += seconds  # type: ignore[assignment]
            for bound in (*BOUNDS, "+Inf"):
                self._counts[f"{name}_bucket", f'le="{bound}"'] += bound == "+Inf" or seconds <= float(bound)

    def text(self, gauges: Mapping[str, int]) -> str:
        """Everything, with the values of ``gauges`` as they are now."""
        lines = []
        with self._lock:
            for name, (kind, meaning) in DESCRIBED.items():
                lines += [f"# HELP {name} {meaning}", f"# TYPE {name} {kind}"]
                wanted = f"{name}_bucket" if kind == "histogram" else name
                found = {labels: value for (key, labels), value in self._counts.items() if key == wanted}
                if kind == "gauge":
                    found = {"": gauges[name]}
                lines += [f"{wanted}{{{labels}}} {value}" if labels else f"{wanted} {value}" for labels, value in found.items()]
                if kind == "histogram":
                    lines += [f"{name}_sum {self._sums[name]}", f"{name}_count {found.get(_ALL, 0)}"]
        return "\n".join(lines) + "\n"
