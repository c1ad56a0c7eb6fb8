"""Counters and latencies in the text format of Prometheus; docs/serve.md says what each means."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Mapping

_COUNTERS = ("netcl_requests_total", "netcl_prompt_tokens_total", "netcl_generated_tokens_total", "netcl_answers_total")
_SUMMARIES = ("netcl_first_token_seconds", "netcl_answer_seconds")


class Metrics:
    """Values by name and labels; any thread may change them."""

    def __init__(self) -> None:
        self._lock, self._values = threading.Lock(), defaultdict[str, dict[str, float]](lambda: defaultdict(int))

    def add(self, name: str, amount: float = 1, **labels: object) -> None:
        """Add to a counter, or a duration to a summary."""
        told = ",".join(f'{key}="{value}"' for key, value in labels.items())
        with self._lock:
            for part, more in {"_sum": amount, "_count": 1}.items() if name in _SUMMARIES else [("", amount)]:
                self._values[name][f"{name}{part}{{{told}}}" if told else name + part] += more

    def text(self, gauges: Mapping[str, int]) -> str:
        """Everything, with the values of ``gauges`` as they are now."""
        lines = []
        with self._lock:
            for name in (*_COUNTERS, *_SUMMARIES, *gauges):
                kind = "gauge" if name in gauges else "summary" if name in _SUMMARIES else "counter"
                found = {name: gauges[name]} if name in gauges else self._values[name]
                lines += [f"# TYPE {name} {kind}", *(f"{key} {value}" for key, value in found.items())]
        return "\n".join(lines) + "\n"
