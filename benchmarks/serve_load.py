"""Many clients of ``netcl serve`` at once: answers lost or mixed, memory, and throughput against a single stream.

    python benchmarks/serve_load.py [PATH] [--device gpu] [--clients 32] [--minutes 10] [--streams 8] [--out FILE.json]

PATH is a Hugging Face folder or a GGUF file; without one a small model with random weights is made. Each client has a prompt of its own,
whose greedy answer is asked for alone first: a different answer later is a lost or mixed one. Beside the steady clients there are some
that leave in the middle of a stream, some that read slowly and some that send malformed requests. The status is 1 if an answer is lost,
mixed or stuck, if a malformed request gets anything but a 4xx, or if memory grows by more than a tenth in the second half.
"""

from __future__ import annotations

import argparse
import http.client
import json
import random
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))
MALFORMED = (
    b"{",
    b"[]",
    b'{"prompt": 3, "max_tokens": "x"}',
    b'{"prompt": "a", "max_tokens": -1}',
    b"\xff\xfe",
    b'{"prompt": "a", "stream": 7}',
)


def small_model(folder: Path) -> Path:
    """A LLaMA of 6 million random weights with a token per printable character."""
    import tokenizers

    from netcl import models

    config = {"model_type": "llama", "vocab_size": 96, "hidden_size": 256, "intermediate_size": 704, "num_hidden_layers": 8,
              "num_attention_heads": 8, "num_key_value_heads": 4, "max_position_embeddings": 512}  # fmt: skip
    model, draw = models.CausalLM(models.read_config(config)), np.random.default_rng(5)
    for parameter in model.parameters():
        parameter.write(draw.normal(0, 0.15, parameter.shape).astype(np.float32))
    models.save(model, folder)
    backend = tokenizers.Tokenizer(tokenizers.models.BPE({chr(32 + i): i for i in range(95)}, []))
    backend.decoder = tokenizers.decoders.Fuse()
    backend.save(str(folder / "tokenizer.json"))
    return folder


class Server:
    """``netcl serve`` in a process of its own, at a free port."""

    def __init__(self, path: Path, device: str, batch: int):
        command = [sys.executable, "-m", "netcl", "serve", str(path), "--port", "0", "--device", device, "--max-batch", str(batch)]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT)
        assert self.process.stdout is not None
        line = next((line for line in self.process.stdout if "http://" in line), "")
        if not line:
            raise SystemExit(f"the server ended with status {self.process.wait()}")
        self.port = int(line.strip().rsplit(":", 1)[1])

    def post(self, body: bytes, timeout: float = 120.0) -> tuple[int, bytes]:
        """The status and the whole answer of a request."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=timeout)
        try:
            connection.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
            answer = connection.getresponse()
            return answer.status, answer.read()
        finally:
            connection.close()

    def text(self, prompt: str, tokens: int) -> str:
        """The greedy continuation of a prompt."""
        status, answer = self.post(json.dumps({"prompt": prompt, "max_tokens": tokens, "temperature": 0}).encode())
        if status != 200:
            raise RuntimeError(f"status {status}: {answer[:200]!r}")
        return json.loads(answer)["choices"][0]["text"]

    def stream(self, prompt: str, tokens: int, pause: float, leave_after: int | None) -> str | None:
        """The same, read event by event with a pause after each; ``None`` for a client that leaves."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=120)
        body = json.dumps({"prompt": prompt, "max_tokens": tokens, "temperature": 0, "stream": True}).encode()
        connection.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
        answer, text, events = connection.getresponse(), "", 0
        try:
            for raw in answer:
                if not raw.startswith(b"data: ") or raw.strip() == b"data: [DONE]":
                    continue
                text += json.loads(raw[6:])["choices"][0].get("text") or ""
                events += 1
                if events == leave_after:
                    return None
                time.sleep(pause)
            return text
        finally:
            connection.close()

    def memory(self) -> float:
        """Resident megabytes."""
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        return int(status.split("VmRSS:")[1].split()[0]) / 1024

    def close(self) -> int:
        """End the server; its status."""
        self.process.terminate()
        return self.process.wait(60)


class Tally:
    """What the clients saw; any thread may add."""

    def __init__(self) -> None:
        self.lock, self.counts, self.faults = threading.Lock(), dict.fromkeys(("answers", "left", "slow", "refused"), 0), list[str]()

    def add(self, what: str) -> None:
        with self.lock:
            self.counts[what] += 1

    def fault(self, text: str) -> None:
        with self.lock:
            self.faults.append(text)


def client(server: Server, number: int, prompt: str, expected: str, tokens: int, end: float, tally: Tally) -> None:
    """Ask until the end: mostly plainly, now and then as a client that leaves, is slow, or sends nonsense."""
    draw = random.Random(number)
    while time.monotonic() < end:
        kind = draw.random()
        try:
            if kind < 0.1:
                server.stream(prompt, tokens, 0, draw.randrange(1, 4))
                tally.add("left")
            elif kind < 0.2:
                status, answer = server.post(draw.choice(MALFORMED))
                tally.add("refused")
                if not 400 <= status < 500:
                    tally.fault(f"a malformed request got {status}: {answer[:100]!r}")
            else:
                slow = kind < 0.3
                text = server.stream(prompt, tokens, 0.05, None) if slow else server.text(prompt, tokens)
                tally.add("slow" if slow else "answers")
                if text != expected:
                    tally.fault(f"client {number}: {text!r} is not {expected!r}")
        except (OSError, RuntimeError, ValueError, KeyError, http.client.HTTPException) as error:
            tally.fault(f"client {number}: {type(error).__name__}: {error}")


def throughput(server: Server, prompts: list[str], tokens: int, streams: int) -> float:
    """Tokens a second of so many clients at once."""
    threads = [threading.Thread(target=server.text, args=(prompt, tokens)) for prompt in prompts[:streams]]
    begun = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return streams * tokens / (time.perf_counter() - begun)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("path", nargs="?", type=Path)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--clients", type=int, default=32)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--streams", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--out", type=Path)
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        server = Server(chosen.path or small_model(Path(scratch) / "model"), chosen.device, chosen.streams)
        prompts = [f"number {n} of the clients says: " for n in range(chosen.clients)]
        expected = [server.text(prompt, chosen.tokens) for prompt in prompts]
        throughput(server, prompts, chosen.tokens, chosen.streams)
        rates = {n: max(throughput(server, prompts, chosen.tokens, n) for _ in range(3)) for n in (1, chosen.streams)}
        tally, end, memory = Tally(), time.monotonic() + 60 * chosen.minutes, list[float]()
        arguments = [(server, n, prompts[n], expected[n], chosen.tokens, end, tally) for n in range(chosen.clients)]
        threads = [threading.Thread(target=client, args=given, daemon=True) for given in arguments]
        for thread in threads:
            thread.start()
        while time.monotonic() < end:
            time.sleep(min(5.0, 6 * chosen.minutes))
            memory.append(server.memory())
        for thread in threads:
            thread.join(180)
        stuck = sum(thread.is_alive() for thread in threads)
        after = server.text(prompts[0], chosen.tokens) == expected[0]
        status = server.close()
    half = memory[len(memory) // 2 :]
    result: dict[str, Any] = {
        "clients": chosen.clients, "minutes": chosen.minutes, "tokens": chosen.tokens, **tally.counts, "faults": tally.faults[:20],
        "stuck": stuck, "answers afterwards": after, "status of the server": status,
        "megabytes": {"first": memory[0], "middle": half[0], "last": memory[-1]},
        "tokens a second": {str(n): round(rate, 1) for n, rate in rates.items()},
        "batch over single": round(rates[chosen.streams] / rates[1], 2),
    }  # fmt: skip
    print(json.dumps(result, indent=2))
    if chosen.out:
        chosen.out.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    return int(bool(tally.faults or stuck or not after or memory[-1] > 1.1 * half[0]))


if __name__ == "__main__":
    sys.exit(main())
