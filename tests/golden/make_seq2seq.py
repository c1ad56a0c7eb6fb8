"""Makes seq2seq.json and seq2seq.npz: what transformers gives for tiny T5 models, with weights of model_cases.py.

Run with an interpreter that has transformers 5.22 and torch 2.13: ``python tests/golden/make_seq2seq.py``. No test needs transformers.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

import numpy as np
import torch
import transformers
from safetensors.numpy import load_file, save_file

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))
import model_cases  # noqa: E402

SMALL = {"vocab_size": 96, "d_model": 32, "d_kv": 12, "d_ff": 48, "num_layers": 2, "num_heads": 4, "relative_attention_num_buckets": 8,
         "relative_attention_max_distance": 20, "eos_token_id": None, "pad_token_id": 0, "decoder_start_token_id": 3}  # fmt: skip
CASES = {
    "t5": {**SMALL, "feed_forward_proj": "relu", "num_decoder_layers": 3},
    "flan-t5": {**SMALL, "feed_forward_proj": "gated-gelu", "tie_word_embeddings": False},
}
NEW = 32


def make(case, options, seed):
    rng = np.random.default_rng(seed)
    ids, mask, answer = rng.integers(4, 96, (2, 29)), np.ones((2, 29), np.int64), rng.integers(4, 96, (2, 26))
    mask[1, 17:] = 0
    with tempfile.TemporaryDirectory() as place:
        transformers.T5ForConditionalGeneration(transformers.T5Config(**options)).save_pretrained(place)
        path = Path(place, "model.safetensors")
        shapes = {name: list(value.shape) for name, value in load_file(path).items()}
        if case == "flan-t5":
            shapes["lm_head.weight"] = shapes["shared.weight"]
        save_file(model_cases.weights(shapes, seed), path, metadata={"format": "pt"})
        config = {"model_type": "t5", "architectures": ["T5ForConditionalGeneration"], **options}  # as published models have it
        Path(place, "config.json").write_text(json.dumps(config), encoding="utf-8")
        kind = transformers.T5ForConditionalGeneration
        model = kind.from_pretrained(place, dtype=torch.float32, attn_implementation="eager").eval()
    assert (model.lm_head.weight is model.shared.weight or torch.equal(model.lm_head.weight, model.shared.weight)) == (case == "t5")
    with torch.no_grad():
        logits = model(input_ids=torch.tensor(ids), attention_mask=torch.tensor(mask), decoder_input_ids=torch.tensor(answer)).logits
        tokens, lead = [], np.inf
        for row in range(2):
            made = [SMALL["decoder_start_token_id"]]
            for _ in range(NEW):
                out = model(input_ids=torch.tensor(ids[row : row + 1, mask[row] > 0]), decoder_input_ids=torch.tensor([made])).logits[0, -1]
                best = out.topk(2).values
                lead = min(lead, float(best[0] - best[1]))
                made.append(int(out.argmax()))
            tokens.append(made[1:])
    row = {"seed": seed, "config": config, "shapes": shapes, "ids": ids.tolist(), "mask": mask.tolist(), "answer": answer.tolist(),
           "tokens": tokens}  # fmt: skip
    return lead * min(1, min(len(set(row)) for row in tokens) / 8), row, logits.numpy()


def main():
    described, arrays = {}, {}
    for case, options in CASES.items():
        lead, described[case], arrays[case] = max((make(case, options, seed) for seed in range(6)), key=lambda found: found[0])
        print(case, "lead", lead, "std", arrays[case].std(), [len(set(row)) for row in described[case]["tokens"]])
    lines = [f"{json.dumps(case)}: {json.dumps(value, sort_keys=True)}" for case, value in described.items()]
    (HERE / "seq2seq.json").write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")
    np.savez_compressed(HERE / "seq2seq.npz", **arrays)


if __name__ == "__main__":
    main()
