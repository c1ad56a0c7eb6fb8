"""Makes sampling.json: the distributions that transformers' logits processors give, and tokens of a model with a repetition penalty.

Run with an interpreter that has transformers 5.22 and torch 2.13: ``python tests/golden/make_sampling.py``. No test needs transformers.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

import numpy as np
import torch
import transformers
from safetensors.numpy import save_file
from transformers.generation import logits_process as steps

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))
import model_cases  # noqa: E402

OPTIONS = [
    {"temperature": 1.3, "min_p": 0.3},
    {"temperature": 0.7, "top_k": 8, "top_p": 0.9, "min_p": 0.1},
    {"repetition_penalty": 1.7},
    {"temperature": 0.8, "top_p": 0.95, "min_p": 0.05, "repetition_penalty": 0.6},
]
MAKERS = {
    "repetition_penalty": steps.RepetitionPenaltyLogitsProcessor, "temperature": steps.TemperatureLogitsWarper,
    "top_k": steps.TopKLogitsWarper, "top_p": steps.TopPLogitsWarper, "min_p": steps.MinPLogitsWarper,
}  # fmt: skip


def main() -> None:
    rng = np.random.default_rng(5)
    logits, ids = np.round(rng.standard_normal((3, 20)) * 2, 3), rng.integers(0, 20, (3, 6))
    made = {"logits": logits.tolist(), "ids": ids.tolist(), "cases": []}
    for options in OPTIONS:
        processors = steps.LogitsProcessorList(make(options[name]) for name, make in MAKERS.items() if name in options)
        scores = processors(torch.tensor(ids), torch.tensor(logits))
        made["cases"].append({"options": options, "probabilities": np.round(torch.softmax(scores, -1).numpy(), 9).tolist()})
    row = json.loads((HERE / "models.json").read_text(encoding="utf-8"))["llama"]
    with tempfile.TemporaryDirectory() as place:
        Path(place, "config.json").write_text(json.dumps(row["config"]), encoding="utf-8")
        save_file(model_cases.weights(row["shapes"], row["seed"]), Path(place, "model.safetensors"), metadata={"format": "pt"})
        model = transformers.AutoModelForCausalLM.from_pretrained(place, dtype=torch.float32)
        found = model.generate(torch.tensor(row["ids"][:1]), max_new_tokens=40, do_sample=False, repetition_penalty=1.4, pad_token_id=0)
    made["llama"] = {"repetition_penalty": 1.4, "tokens": found[0, len(row["ids"][0]) :].tolist()}
    (HERE / "sampling.json").write_text(json.dumps(made) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
