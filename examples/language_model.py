"""A language model from text to server: train, quantize, serve, fine-tune, merge, export. Nothing is downloaded.

    python examples/language_model.py [folder] [--device gpu] [--steps 300]

Every step checks its result. Where transformers or llama_cpp are installed, they load the exported files and must give the same tokens.
"""

import argparse
import json
import subprocess
import sys
import urllib.request
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers

from netcl import device, manual_seed, models, optim
from netcl.nn import functional as F
from netcl.trainer.finetune import TuningSettings, finetune

TEMPLATE = "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"


def tokenizer_of(texts: list[str]) -> models.Tokenizer:
    backend = tokenizers.Tokenizer(tokenizers.models.BPE())
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    signs = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    special = ["<|end|>", "<|user|>", "<|assistant|>"]
    backend.train_from_iterator(texts, tokenizers.trainers.BpeTrainer(vocab_size=512, special_tokens=special, initial_alphabet=signs))
    return models.Tokenizer(backend, {"eos_token": "<|end|>"}, TEMPLATE)


def pretrain(model: models.CausalLM, ids: np.ndarray, steps: int, length: int) -> tuple[float, float]:
    optimizer = optim.AdamW(model.parameters(), lr=3e-3)
    draw, losses = np.random.default_rng(0), []
    for _ in range(steps):
        starts = draw.integers(0, len(ids) - length - 1, 8)
        block = np.stack([ids[start : start + length + 1] for start in starts])
        loss = F.cross_entropy(model(block[:, :-1]).reshape(-1, model.config.vocab_size), block[:, 1:].reshape(-1))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step(max_norm=1.0)
        losses.append(loss.item())
    return losses[0], float(np.mean(losses[-5:]))


def served(path: Path, target: str, prompt: str) -> str:
    """What a server says that is started for the question and ended after it."""
    command = [sys.executable, "-m", "netcl", "serve", str(path), "--port", "0", "--device", target]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as server:
        assert server.stdout is not None
        address = next(word for line in server.stdout for word in line.split() if word.startswith("http://")).rstrip("/,;.")
        body = json.dumps({"prompt": prompt, "max_tokens": 8, "temperature": 0}).encode()
        request = urllib.request.Request(f"{address}/v1/completions", body, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=120) as answer:
            text = json.load(answer)["choices"][0]["text"]
        server.terminate()
    return text


def read_by_others(folder: Path, gguf: Path, ids: list[int], expected: list[int]) -> None:
    if find_spec("transformers") and find_spec("torch"):
        torch, transformers = import_module("torch"), import_module("transformers")
        theirs = transformers.AutoModelForCausalLM.from_pretrained(folder).generate(torch.tensor([ids]), max_new_tokens=8, do_sample=False)
        assert theirs[0].tolist()[: len(expected)] == expected, "transformers gives other tokens"
        print("transformers writes the same tokens")
    if find_spec("llama_cpp"):
        llama = import_module("llama_cpp").Llama(str(gguf), n_ctx=64, verbose=False)
        made = [token for token, _ in zip(llama.generate(ids, temp=0.0, repeat_penalty=1.0), range(8), strict=False)]
        assert ids + made[: len(expected) - len(ids)] == expected, "llama.cpp gives other tokens"
        print("llama.cpp writes the same tokens")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", nargs="?", type=Path, default=Path("language-model"))
    parser.add_argument("--device", default="auto")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--smoke", action="store_true", help="a tiny model, few steps")
    arguments = parser.parse_args()
    place, smoke = arguments.folder, arguments.smoke
    size = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    size = size if smoke else {**size, "hidden_size": 128, "intermediate_size": 352, "num_hidden_layers": 4}
    texts = [path.read_text(encoding="utf-8") for path in sorted(Path(__file__).resolve().parent.glob("*.py"))]
    tokenizer = tokenizer_of(texts)
    manual_seed(0)
    with device(arguments.device):
        config: dict[str, Any] = {"model_type": "llama", "vocab_size": 512, "max_position_embeddings": 128, **size}
        model = models.CausalLM(models.read_config(config))
        model.make_tokenizer = lambda: tokenizer
        ids = np.concatenate([tokenizer.encode(text) for text in texts])
        first, last = pretrain(model, ids, 20 if smoke else arguments.steps, 32 if smoke else 96)
        assert last < first, "training must lower the loss"
        print(f"trained: loss {first:.2f} -> {last:.2f}")
        models.save(model.eval(), place / "base")  # a Hugging Face folder
        models.save(model, place / "base-q8.gguf", "gguf", kind="Q8_0")

        packed = models.load(place / "base-q8.gguf", arguments.device)
        answer = packed.generate("import ", 8)
        assert served(place / "base-q8.gguf", arguments.device, "import ") == answer, "the server must say what the model says"
        print(f"quantized and served: {answer!r}")

    rows = [{"messages": [{"role": "user", "content": str(n)}, {"role": "assistant", "content": str(n + 1)}]} for n in range(40)]
    (place / "chat.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    tuned = finetune(place / "base", place / "chat.jsonl", place / "tuned", TuningSettings("qlora", epochs=2, length=32, lr=1e-2),
                     device_name=arguments.device, overwrite=True, merged="gguf")  # fmt: skip
    print(f"fine-tuned: loss {tuned['loss']:.2f}")

    merged = models.load(place / "tuned" / "merged.gguf", "cpu", dtype="float32")
    models.save(merged, place / "exported")  # and a folder for transformers
    prompt = tokenizer.apply_chat_template([{"role": "user", "content": "7"}])
    expected = merged.generate(prompt, 8)
    assert models.load(place / "exported", "cpu").generate(prompt, 8) == expected
    print(f"merged and exported: 7 -> {tokenizer.decode(expected)!r}")
    read_by_others(place / "exported", place / "tuned" / "merged.gguf", prompt, prompt + expected)


if __name__ == "__main__":
    main()
