"""A GPT that learns to write like a text file, byte by byte.

    python examples/gpt_text.py book.txt [--device gpu] [--steps 2000] [--prompt "It was"]

Without a file it learns from the documentation it came with.
"""

import argparse
import itertools
from pathlib import Path
from typing import Any

import numpy as np

from netcl import device, manual_seed, nn, optim
from netcl.data import DataLoader
from netcl.data.datasets import Bytes


def own_text() -> bytes:
    """This file and the pages beside it: enough to show that it learns."""
    here = Path(__file__).resolve().parent
    return b"".join(path.read_bytes() for path in [Path(__file__), *sorted(here.parent.glob("docs/*.md"))])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("text", nargs="?", type=Path)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--prompt", default="The ")
    parser.add_argument("--smoke", action="store_true", help="a few steps of a tiny model")
    arguments = parser.parse_args()
    small = {"block_size": 16, "n_layer": 1, "n_head": 2, "n_embd": 32}
    size: dict[str, Any] = small if arguments.smoke else {"block_size": 64, "n_layer": 4, "n_head": 4, "n_embd": 128}
    steps = 5 if arguments.smoke else arguments.steps

    manual_seed(0)
    content = arguments.text.read_bytes() if arguments.text else own_text()
    windows = Bytes(content, block=size["block_size"])
    with device(arguments.device) as handle:
        loader = DataLoader(windows, batch_size=16, shuffle=True, seed=0, device_queue=handle)
        model = nn.GPT(vocab_size=windows.vocabulary, **size)
        optimizer = optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.1)
        schedule = optim.WarmupCosine(optimizer, warmup_steps=steps // 20 + 1, total_steps=steps)
        batches = itertools.islice(itertools.chain.from_iterable(itertools.repeat(loader)), steps)
        for step, (x, y) in enumerate(batches):
            optimizer.zero_grad()
            loss = model.loss(x, y)
            loss.backward()
            optimizer.step(max_norm=1.0)
            schedule.step()
            if step % max(1, steps // 20) == 0 or step == steps - 1:
                print(f"step {step:5d}: {loss.item() / np.log(2):.2f} bits per byte")
        model.eval()
        prompt = np.frombuffer(arguments.prompt.encode(), np.uint8).astype(np.int64)[None]
        written = model.generate(prompt, 8 if arguments.smoke else 300, temperature=0.8, top_k=40)
    print(bytes(written.to_host()[0].astype(np.uint8)).decode("utf-8", "replace"))


if __name__ == "__main__":
    main()
