"""Counters and latencies in the text format of Prometheus."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Mapping

DESCRIBED = {
    "netcl_requests_total": ("counter", "HTTP requests by path and status."),
    "netcl_prompt_tokens_total": ("counter", "Tokens of prompts that were computed."),
    "netcl_generated_tokens_total": ("counter", "Tokens that were generated."),
    "netcl_answers_total": ("counter", "Requests to the model by outcome."),
    "netcl_first_token_seconds": ("summary", "Time from a request to its first token."),
    "netcl_answer_seconds": ("summary", "Time from a request to the end of its answer."),
    "netcl_queue_length": ("gauge", "Requests that wait for a slot."),
    "netcl_running_sequences": ("gauge", "Sequences in the batch."),
}


class Metrics:
    """Values by name and labels; any thread may change them."""

    def __init__(self) -> None:
        self._lock, self._values = threading.Lock(), defaultdict[str, dict[str, float]](dict)

    def add(self, name: str, amount: float = 1, **labels: object) -> None:
        """Add to a counter, or a duration to a summary."""
        told = ",".join(f'{key}="{value}"' for key, value in labels.items())
        parts = {f"{name}_sum": amount, f"{name}_count": 1} if DESCRIBED[name][0] == "summary" else {name: amount}
        with self._lock:
            for part, more in parts.items():
                key = f"{part}{{{told}}}" if told else part
                self._values[name][key] = self._values[name].get(key, 0) + more

    def text(self, gauges: Mapping[str, int]) -> str:
        """Everything, with the values of ``gauges`` as they are now."""
        lines = []
        with self._lock:
            for name, (kind, meaning) in DESCRIBED.items():
                found = {name: gauges[name]} if kind == "gauge" else self._values[name]
                lines += [f"# HELP {name} {meaning}", f"# TYPE {name} {kind}", *(f"{key} {value}" for key, value in found.items())]
        return "\n".join(lines) + "\n"
