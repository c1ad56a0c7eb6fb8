"""Language models of real sizes with random packed weights: time of a token, rate of a prompt, memory of a QLoRA step.

    python benchmarks/large_models.py [--device gpu] [--size 1B] [--kinds Q4_0 Q8_0] [--tokens 64] [--qlora] [--out FILE.json]

A token reads all linear layers once, so its time is also shown as bytes of packed weights a second. ``--qlora`` takes two training steps of
rank 8 on 512 tokens over a base in Q4_0 and shows the most memory the device held.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))
import netcl  # noqa: E402
from netcl import autograd, models, nn, optim  # noqa: E402
from netcl.autograd import packed  # noqa: E402
from netcl.core.device import device, manager, queue_of  # noqa: E402
from netcl.core.memory import memory_stats  # noqa: E402
from netcl.nn.parameter import placed  # noqa: E402

SHAPES = {
    "tiny": (256, 704, 2, 8, 4, 1000), "309M": (1024, 4096, 16, 16, 16, 32000), "1B": (2048, 8192, 16, 32, 8, 32000),
    "8B": (4096, 14336, 32, 32, 8, 128256),
}  # fmt: skip
NAMES = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "vocab_size")


def random_model(size: str, kind: str, queue: Any) -> models.CausalLM:
    """A LLaMA with random blocks in every linear layer; the first 64 rows are repeated, which no kernel can notice."""
    shape = dict(zip(NAMES, SHAPES[size], strict=True))
    config = models.read_config({"model_type": "llama", "max_position_embeddings": 2048, "tie_word_embeddings": False, **shape})
    with placed(queue_of("cpu"), "float32", 1 << 42, blank=True):
        model = models.CausalLM(config)
    draw = np.random.default_rng(0)
    for parameter in model.parameters():
        if parameter.ndim == 1 or parameter is model.embed_tokens.weight:
            parameter.write(np.resize(draw.normal(1.0 if parameter.ndim == 1 else 0.0, 0.02, 4096).astype(np.float32), parameter.shape))
    for parent in list(model.modules()):
        for name, layer in list(parent.named_children()):
            if type(layer) is nn.Linear:
                few = packed.quantize(draw.normal(0, layer.in_features**-0.5, (64, layer.in_features)).astype(np.float32), kind)
                blocks = np.resize(few.reshape(64, -1), (layer.out_features, few.size // 64))
                parent.add_module(name, nn.QuantizedLinear(layer.in_features, layer.out_features, False, kind).load_blocks(blocks))
    return model.to(queue).eval()


def packed_bytes(model: models.CausalLM) -> int:
    """What a token reads of the linear layers."""
    return sum(layer.weight.nbytes for layer in model.modules() if isinstance(layer, nn.QuantizedLinear))


def decode(model: models.CausalLM, tokens: int) -> dict[str, float]:
    """Milliseconds of a token, by two lengths; tokens a second of a prompt of 512."""
    ids = list(range(1, 17))

    def seconds(n: int, prompt: list[int]) -> float:
        begun = time.perf_counter()
        assert len(model.generate(prompt, n)) == n
        return time.perf_counter() - begun

    long = [int(i) for i in np.random.default_rng(1).integers(0, model.config.vocab_size, 512)]
    for prompt, n in ((ids, tokens), (ids, 2 * tokens), (long, 1)):
        seconds(n, prompt)
    taken = [(seconds(tokens, ids), seconds(2 * tokens, ids), seconds(1, long)) for _ in range(5)]
    short, twice, prompt_seconds = map(min, zip(*taken, strict=True))
    token = (twice - short) / tokens
    return {"ms a token": 1e3 * token, "packed GB/s": packed_bytes(model) / token / 1e9, "prompt tokens/s": 512 / prompt_seconds}


def qlora(size: str, queue: Any) -> dict[str, float]:
    """The most gigabytes of a device that two steps of QLoRA take."""
    model = models.lora(random_model(size, "Q4_0", queue), rank=8, alpha=16)
    model.checkpointing = True
    optimizer = optim.AdamW([p for p in model.train().parameters() if p.requires_grad], lr=1e-4)
    ids = np.random.default_rng(2).integers(0, model.config.vocab_size, (1, 513))
    losses = []
    for _ in range(2):
        optimizer.zero_grad()
        loss = autograd.cross_entropy(model(ids[:, :-1])[0], ids[0, 1:])
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return {"first loss": losses[0], "second loss": losses[1], "most GB": memory_stats()["bytes_allocated"] / 1e9}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--size", choices=SHAPES, default="1B")
    parser.add_argument("--kinds", nargs="*", default=["Q4_0", "Q8_0"])
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--qlora", action="store_true")
    parser.add_argument("--out", type=Path)
    chosen = parser.parse_args()
    handle = manager.default(chosen.device)
    found: dict[str, Any] = {"size": chosen.size, "device": handle.device_name, "version": netcl.__version__}
    with device(handle):
        for kind in chosen.kinds:
            model = random_model(chosen.size, kind, handle.queue)
            model.merge_projections()
            found[kind] = {"packed GB": packed_bytes(model) / 1e9, **decode(model, chosen.tokens)}
            print(kind, found[kind], flush=True)
            del model
        if chosen.qlora:
            found["qlora"] = qlora(chosen.size, handle.queue)
            print("qlora", found["qlora"], flush=True)
    if chosen.out:
        chosen.out.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
