"""Decoding with a cache: milliseconds per token of a GPT with 124 million parameters, against torch.

    python benchmarks/decode.py [--device gpu] [--tokens 64] [--prompt 32] [--threads 2] [--out FILE] [--small]

Both sides write the same greedy tokens from the same weights. torch's side keeps its cache in memory that was allocated ahead, as ours
does, and runs eagerly. The time of a token is also taken at twice the length, to see whether it grows with what came before.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

sys.path[:0] = [str(Path(__file__).parent.parent), str(Path(__file__).parent)]
from run import facts, hold_to, kind_of  # noqa: E402

SIZES = {"vocab_size": 50257, "block_size": 1024, "n_layer": 12, "n_head": 12, "n_embd": 768}
SMALL = {"vocab_size": 500, "block_size": 256, "n_layer": 2, "n_head": 2, "n_embd": 64}


def torch_writer(where: Any, weights: dict[str, np.ndarray], sizes: dict[str, int]) -> Any:
    """``write(prompt, n)``: greedy tokens by torch."""
    torch, heads, layers = where.torch, sizes["n_head"], sizes["n_layer"]
    functions = torch.nn.functional
    w = {key: torch.from_numpy(value).to(where.torch_device) for key, value in weights.items()}
    width = sizes["n_embd"]

    def block(x: Any, i: int, cache: Any, seen: int) -> Any:
        at = f"transformer.h.{i}."
        b, t, _ = x.shape

        def linear(x: Any, name: str) -> Any:
            return functions.linear(x, w[at + name + ".weight"], w[at + name + ".bias"])

        def norm(x: Any, name: str) -> Any:
            return functions.layer_norm(x, (width,), w[at + name + ".weight"], w[at + name + ".bias"])

        q, k, v = (z.view(b, t, heads, width // heads).transpose(1, 2) for z in linear(norm(x, "ln_1"), "attn.c_attn").split(width, 2))
        cache[0][i][:, :, seen : seen + t], cache[1][i][:, :, seen : seen + t] = k, v
        k, v = (part[i][:, :, : seen + t] for part in cache)
        y = functions.scaled_dot_product_attention(q, k, v, is_causal=t > 1)
        x = x + linear(y.transpose(1, 2).reshape(b, t, width), "attn.c_proj")
        return x + linear(functions.gelu(linear(norm(x, "ln_2"), "mlp.c_fc")), "mlp.c_proj")

    def write(prompt: list[int], n: int) -> list[int]:
        with torch.inference_mode():
            shape = (layers, 1, heads, sizes["block_size"], width // heads)
            cache = [torch.zeros(shape, device=where.torch_device) for _ in range(2)]
            ids, made, seen = torch.tensor([prompt], device=where.torch_device), [], 0
            for _ in range(n):
                x = w["transformer.wte.weight"][ids] + w["transformer.wpe.weight"][seen : seen + ids.shape[1]]
                for i in range(layers):
                    x = block(x, i, cache, seen)
                seen += ids.shape[1]
                x = functions.layer_norm(x[:, -1:], (width,), w["transformer.ln_f.weight"], w["transformer.ln_f.bias"])
                ids = functions.linear(x, w["lm_head.weight"]).argmax(-1)
                made.append(int(ids[0, 0]))
            return made

    return write


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--device", default="auto")
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--prompt", type=int, default=32)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--commit", default="")
    options = parser.parse_args()
    options.sweep = options.quick = False
    options.cases = ""
    if kind_of(options.device) == "cpu":
        hold_to(options.threads)
    from netcl import nn
    from netcl.bench import setting
    from netcl.core.device import device

    where, sizes = setting(options.device, options.threads or None, options.repeats, False), SMALL if options.small else SIZES
    rows = []
    with device(where.handle):
        model = nn.GPT(**sizes)
        weights = {key: t.to_host().copy() for key, t in model.state_dict().items()}
        prompt = np.random.default_rng(0).integers(0, sizes["vocab_size"], options.prompt).tolist()

        def ours(n: int) -> list[int]:
            return model.generate([prompt], n, temperature=0).to_host()[0, len(prompt) :].tolist()

        theirs = None if where.torch is None else torch_writer(where, weights, sizes)
        most = 2 * options.tokens
        ways = {"ours": ours} | ({} if theirs is None else {"torch": lambda n: theirs(prompt, n)})
        made = {name: way(most) for name, way in ways.items()}
        if len(set(map(tuple, made.values()))) > 1:
            raise SystemExit(f"the tokens differ: {made}")
        for n in (options.tokens, most):  # the time of tokens after the first
            best = dict.fromkeys(ways, float("inf"))
            for _ in range(options.repeats):
                for name, way in ways.items():
                    begin = time.perf_counter()
                    way(1)
                    middle = time.perf_counter()
                    way(n)
                    best[name] = min(best[name], (time.perf_counter() - middle - (middle - begin)) / (n - 1))
            ratio = best["ours"] / best["torch"] if "torch" in best else None
            rows.append({"case": f"decode, {n} tokens", "yardstick": "torch", "ours_s": best["ours"], "theirs_s": best.get("torch"),
                         "ratio": ratio, "target": 1.0, "met": ratio is not None and ratio <= 1, "all_s": best})  # fmt: skip
            print(rows[-1]["case"], {name: f"{1e3 * seconds:.3f} ms" for name, seconds in best.items()}, "ratio", ratio, flush=True)
    if options.out:
        text = json.dumps({"facts": {**facts(where, options), "made by": "python " + " ".join(sys.argv)}, "rows": rows}, indent=1)
        options.out.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
