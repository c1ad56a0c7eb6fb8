"""Whole models against llama.cpp: seconds of a token of text, of a given token and of a prompt, on the same GGUF file and the same cores.

    python benchmarks/llama_cpp.py [--device auto] [--threads 2] [--kinds Q4_0,Q8_0,F16] [--prompt 512] [--tokens 24] [--repeats 5]
    [--small] [--out FILE] [--commit ID]

The model has 309 million random weights in LLaMA's shape. Both sides take turns, and the best of the repeats counts. ``text`` is what users
call: the most likely token becomes the next one, with ``generate`` and with llama.cpp's greedy sampler. ``decode`` feeds given tokens and
reads all logits of each. Before anything is timed, the logits behind the prompt are compared. Needs llama-cpp-python;
``LLAMA_CPP_LIB_PATH`` names the folder of a library that was built apart from it. ``--out`` is for instance
``benchmarks/results/llama_cpp_pocl_aarch64.json``.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

sys.path[:0] = [str(Path(__file__).parent.parent), str(Path(__file__).parent)]
from run import facts, hold_to, kind_of  # noqa: E402

# This file has the name of the package that it imports.
sys.path[:] = [place for place in sys.path if Path(place).resolve() != Path(__file__).resolve().parent]

SIZES = {"hidden_size": 1024, "num_hidden_layers": 16, "intermediate_size": 4096, "num_attention_heads": 16, "num_key_value_heads": 4,
         "vocab_size": 32000}  # fmt: skip
SMALL = {"hidden_size": 256, "num_hidden_layers": 2, "intermediate_size": 512, "num_attention_heads": 4, "num_key_value_heads": 2,
         "vocab_size": 1000}  # fmt: skip


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--kinds", default="Q4_0,Q8_0,F16")
    parser.add_argument("--prompt", type=int, default=512)
    parser.add_argument("--tokens", type=int, default=24)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--small", action="store_true", help="a tiny model, to see that the script runs")
    parser.add_argument("--commit", default="", help="of a copy without a repository")
    parser.add_argument("--out", default="")
    parser.set_defaults(cases="", sweep=False, quick=False)  # which facts() reads
    return parser.parse_args()


def write_model(path: Path, kind: str, sizes: dict[str, int], context: int) -> None:
    """A GGUF file with seeded weights; a few rows of each matrix are drawn and repeated, since quantizing all takes long."""
    from netcl.models.gguf import NewTensor, storage_kind, write_gguf

    rng = np.random.default_rng(0)
    width, inner = sizes["hidden_size"], sizes["intermediate_size"]
    keys = width * sizes["num_key_value_heads"] // sizes["num_attention_heads"]
    matrices = {"attn_q": (width, width), "attn_k": (keys, width), "attn_v": (keys, width), "attn_output": (width, width),
                "ffn_gate": (inner, width), "ffn_up": (inner, width), "ffn_down": (width, inner)}  # fmt: skip
    shapes: dict[str, tuple[int, ...]] = dict.fromkeys(("token_embd", "output"), (sizes["vocab_size"], width))
    shapes["output_norm"] = (width,)
    for layer in range(sizes["num_hidden_layers"]):
        shapes |= {f"blk.{layer}.{name}": shape for name, shape in matrices.items()}
        shapes |= {f"blk.{layer}.{name}": (width,) for name in ("attn_norm", "ffn_norm")}

    def values(shape: tuple[int, ...]) -> np.ndarray:
        if len(shape) == 1:
            return np.ones(shape, np.float32)
        few = rng.standard_normal((min(shape[0], 64), shape[1]), np.float32) * np.float32(shape[1] ** -0.5)
        return np.resize(few, shape)

    metadata = {
        "general.architecture": "llama", "llama.context_length": context, "llama.embedding_length": width,
        "llama.block_count": sizes["num_hidden_layers"], "llama.feed_forward_length": inner, "llama.vocab_size": sizes["vocab_size"],
        "llama.attention.head_count": sizes["num_attention_heads"], "llama.attention.head_count_kv": sizes["num_key_value_heads"],
        "llama.attention.layer_norm_rms_epsilon": 1e-5, "llama.rope.dimension_count": width // sizes["num_attention_heads"],
        "tokenizer.ggml.model": "no_vocab",
    }  # fmt: skip
    write_gguf(path, metadata, {
        f"{name}.weight": NewTensor(shape, storage_kind(name, shape, kind), lambda shape=shape: values(shape))  # type: ignore[misc]
        for name, shape in shapes.items()
    })  # fmt: skip


class LlamaCpp:
    """A model of llama.cpp: ``clear()``, and ``feed(ids)`` for the logits behind the last of some more tokens."""

    def __init__(self, path: Path, threads: int, room: int):
        import llama_cpp.llama_cpp as low

        self.low = low
        low.llama_backend_init()
        settings, context = low.llama_model_default_params(), low.llama_context_default_params()
        settings.n_gpu_layers = 0
        context.n_ctx, context.n_batch, context.n_ubatch = room, room, room
        context.n_threads = context.n_threads_batch = threads
        self.model = low.llama_model_load_from_file(str(path).encode(), settings)
        self.context = low.llama_init_from_model(self.model, context)
        self.sampler = low.llama_sampler_init_greedy()
        self.size = low.llama_vocab_n_tokens(low.llama_model_get_vocab(self.model))

    def clear(self) -> None:
        self.low.llama_memory_clear(self.low.llama_get_memory(self.context), True)

    def feed(self, ids: list[int]) -> np.ndarray:
        tokens = (self.low.llama_token * len(ids))(*ids)
        if self.low.llama_decode(self.context, self.low.llama_batch_get_one(tokens, len(ids))):
            raise SystemExit("llama.cpp did not decode")
        return np.ctypeslib.as_array(self.low.llama_get_logits(self.context), (self.size,))

    def text(self, ids: list[int], most: int) -> Iterator[int]:
        """The most likely tokens behind some others, one by one."""
        self.clear()
        for _ in range(most):
            self.feed(ids)
            ids = [self.low.llama_sampler_sample(self.sampler, self.context, -1)]
            yield ids[0]


class Netcl:
    """The same on netcl. The step of a token is compiled, as it is in ``generate``."""

    def __init__(self, path: Path, queue: Any, room: int):
        from netcl import models
        from netcl.core.tensor import Tensor
        from netcl.nn.decoding import prompt_logits
        from netcl.replay import compiled

        self.model = models.load(path, queue).merge_projections()
        self.cache, self.prompt_logits = self.model.new_cache(room), prompt_logits
        self.token = Tensor.zeros((1, 1), "int64", queue=queue)
        self.step = compiled.compile(lambda tokens: self.model.head(self.model.states(tokens, self.cache)), fuse=True)

    def clear(self) -> None:
        self.cache.reset()

    def feed(self, ids: list[int]) -> np.ndarray:
        from netcl.autograd import no_grad

        with no_grad():
            if len(ids) > 1:
                return self.prompt_logits(self.model, np.array([ids], np.int64), [len(ids)], self.cache).to_host()[0]
            self.cache.reserves_ahead(1)
            self.cache.reserve(1)
            try:
                self.token.write(np.array([ids], np.int64))
                return self.step(self.token).to_host()[0, 0]
            finally:
                self.cache.reserves_ahead(0)

    def text(self, ids: list[int], most: int) -> Iterator[int]:
        return self.model.generate(ids, most, stream=True)


def seconds(work: Callable[[], Any]) -> float:
    begin = time.perf_counter()
    work()
    return time.perf_counter() - begin


def mean_interval(made: Iterator[int], skipped: int = 3) -> float:
    """The mean time between two tokens, after the first few. Not the median: Intel's runtime delivers two tokens at a time."""
    at = [time.perf_counter() for _ in made][skipped:]
    return (at[-1] - at[0]) / (len(at) - 1)


def measure(kind: str, path: Path, args: argparse.Namespace, queue: Any, size: int) -> list[dict[str, Any]]:
    """The rows of a file: a prompt, a given token and a token of text."""
    room = args.prompt + args.tokens + 8
    sides = {"ours": Netcl(path, queue, room), "llama.cpp": LlamaCpp(path, args.threads, room)}
    ids = np.random.default_rng(1).integers(0, size, args.prompt + args.tokens).tolist()
    prompt, rest = ids[: args.prompt], ids[args.prompt :]
    found = {}
    for name, side in sides.items():  # also warms up
        side.clear()
        logits = [side.feed(prompt).copy(), *(side.feed([token]).copy() for token in rest[:4])]
        found[name] = np.array(logits)
    error = float(np.abs(found["ours"] - found["llama.cpp"]).max() / found["llama.cpp"].std())
    if not error < 0.25:
        raise SystemExit(f"{kind}: the logits differ by {error:.3f} of their deviation")
    best = {case: dict.fromkeys(sides, float("inf")) for case in ("prefill", "decode", "text")}
    for _ in range(args.repeats):
        for name, side in sides.items():
            side.clear()
            best["prefill"][name] = min(best["prefill"][name], seconds(lambda side=side: side.feed(prompt)))  # type: ignore[misc]
            side.clear()
            side.feed(prompt[:8])
            times = sorted(seconds(lambda side=side, token=token: side.feed([token])) for token in rest)  # type: ignore[misc]
            best["decode"][name] = min(best["decode"][name], times[len(times) // 2])
            best["text"][name] = min(best["text"][name], mean_interval(side.text(prompt[:8], args.tokens)))
    rows = []
    for case, times in best.items():
        label = f"{case}, {args.prompt} tokens" if case == "prefill" else f"{case}, one token"
        ratio = times["ours"] / times["llama.cpp"]
        rows.append({"case": f"{kind} {label}", "yardstick": "llama.cpp", "ours_s": times["ours"], "theirs_s": times["llama.cpp"],
                     "ratio": ratio, "target": 1.0, "met": ratio <= 1.0, "logits_error": error})  # fmt: skip
        print(rows[-1]["case"], {name: f"{1e3 * t:.2f} ms" for name, t in times.items()}, f"ratio {ratio:.2f}", flush=True)
    return rows


def main() -> None:
    args = options()
    if kind_of(args.device) == "cpu":
        hold_to(args.threads)
    from netcl.bench import setting

    where, sizes, rows = setting(args.device, args.threads or None, args.repeats, False), SMALL if args.small else SIZES, []
    with tempfile.TemporaryDirectory() as folder:
        for kind in args.kinds.split(","):
            path = Path(folder) / f"{kind}.gguf"
            write_model(path, kind, sizes, args.prompt + args.tokens + 8)
            rows += measure(kind, path, args, where.handle.queue, sizes["vocab_size"])
            path.unlink()
    described = {**facts(where, args), "made by": "python " + " ".join(sys.argv), "model": sizes}
    if args.out:
        Path(args.out).write_text(json.dumps({"facts": described, "rows": rows}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
