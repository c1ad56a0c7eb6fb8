"""Makes adapters.json and adapters.npz: what peft gives for the tiny models of models.json with LoRA and DoRA adapters.

Run with an interpreter that has peft 0.21, transformers 5.22 and torch 2.13: ``python tests/golden/make_adapters.py``. Weights of models
and adapters come from model_cases.py. No test needs peft. ``python tests/golden/make_adapters.py CASE FOLDER LOGITS.npy`` loads the
adapter of a folder, which netcl wrote, into the model of a case and prints its largest difference from given logits.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

import numpy as np
import peft
import torch
import transformers
from safetensors.numpy import load_file

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))
import model_cases as cases  # noqa: E402

ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
ADAPTERS = {
    "llama-lora": ("llama", {"r": 3, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj"]}),
    "llama-dora": ("llama-linear", {"r": 4, "lora_alpha": 4, "use_dora": True, "target_modules": [*ATTENTION, "down_proj"]}),
    "qwen2-rslora": ("qwen2", {"r": 4, "lora_alpha": 4, "use_rslora": True, "target_modules": ["up_proj", "k_proj"],
                               "rank_pattern": {"k_proj": 2}, "alpha_pattern": {"k_proj": 6}}),
    "gpt2-lora": ("gpt2", {"r": 2, "lora_alpha": 4, "target_modules": ["c_attn", "mlp.c_proj"], "fan_in_fan_out": True}),
    "phi3-lora": ("phi3", {"r": 2, "lora_alpha": 4, "target_modules": ["qkv_proj", "gate_up_proj", "o_proj"]}),
    "phi3-dora": ("phi3", {"r": 2, "lora_alpha": 4, "use_dora": True, "target_modules": ["qkv_proj"]}),
}  # fmt: skip
IDS = np.random.default_rng(3).integers(0, 96, (2, 9))


def model_of(name: str) -> torch.nn.Module:
    row = json.loads((HERE / "models.json").read_text(encoding="utf-8"))[name]
    config = transformers.AutoConfig.for_model(**row["config"])
    config._attn_implementation = "eager"
    model = transformers.AutoModelForCausalLM.from_config(config).eval().float()
    arrays = cases.weights(row["shapes"], row["seed"])
    missing, unexpected = model.load_state_dict({key: torch.from_numpy(a) for key, a in arrays.items()}, strict=False)
    assert not unexpected and set(missing) <= {"lm_head.weight"}, (missing, unexpected)
    model.tie_weights()
    return model


def logits_of(model: torch.nn.Module) -> np.ndarray:
    with torch.no_grad():
        return model(torch.from_numpy(IDS)).logits.numpy()


def made(case: str) -> tuple[dict, np.ndarray]:
    name, settings = ADAPTERS[case]
    model = peft.get_peft_model(model_of(name), peft.LoraConfig(task_type="CAUSAL_LM", **settings)).eval()
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        tensors = load_file(f"{folder}/adapter_model.safetensors")
        config = json.loads(Path(folder, "adapter_config.json").read_text(encoding="utf-8"))
        shapes = {key: list(array.shape) for key, array in tensors.items()}
        arrays = cases.adapter_weights(tensors, 7)
        peft.set_peft_model_state_dict(model, {key: torch.from_numpy(array) for key, array in arrays.items()})
    lengths = {key: tensors[key].tolist() for key in tensors if "magnitude" in key}
    return {"model": name, "config": config, "shapes": shapes, "lengths": lengths}, logits_of(model)


def main() -> None:
    rows, results = {}, {"ids": IDS}
    for case in ADAPTERS:
        rows[case], results[case] = made(case)
    (HERE / "adapters.json").write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    np.savez_compressed(HERE / "adapters.npz", **results)


if __name__ == "__main__":
    if len(sys.argv) > 1:
        case, folder, expected = sys.argv[1:]
        loaded = peft.PeftModel.from_pretrained(model_of(ADAPTERS[case][0]), folder).eval()
        print(np.abs(logits_of(loaded) - np.load(expected)).max())
    else:
        main()
