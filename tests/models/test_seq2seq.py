"""T5 against transformers: logits, greedy tokens, one token at a time, files, gradients."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from netcl import models
from netcl.autograd import no_grad
from netcl.core.errors import ShapeError
from netcl.core.tensor import Tensor
from netcl.io.archive import FileError

safetensors = pytest.importorskip("safetensors.numpy")
GOLDEN = Path(__file__).parent.parent / "golden"
ROWS = json.loads((GOLDEN / "seq2seq.json").read_text(encoding="utf-8"))
spec = importlib.util.spec_from_file_location("model_cases", GOLDEN / "model_cases.py")
cases = importlib.util.module_from_spec(spec)
spec.loader.exec_module(cases)


def folder_of(case, folder, **changes):
    row = ROWS[case]
    (folder / "config.json").write_text(json.dumps({**row["config"], **changes}), encoding="utf-8")
    safetensors.save_file(cases.weights(row["shapes"], row["seed"]), folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def ids_of(values, model):
    return Tensor.from_host(model.shared.weight.queue, np.asarray(values, np.int64))


@pytest.mark.parametrize("case", ROWS)
def test_logits_and_greedy_tokens_are_those_of_transformers(case, device, tmp_path):
    row, model = ROWS[case], models.load(folder_of(case, tmp_path), device.queue)
    assert isinstance(model, models.Seq2SeqLM) and model.config.tied is (case == "t5") and model.config.gated is (case != "t5")
    with np.load(GOLDEN / "seq2seq.npz") as file:
        wanted = file[case]
    with no_grad():
        found = model(ids_of(row["ids"], model), ids_of(row["answer"], model), row["mask"]).to_host()
        np.testing.assert_allclose(found, wanted, atol=1e-4)
        cache = model.encode(ids_of(row["ids"], model), row["mask"])
        parts = [model.decode(ids_of([a[i:j] for a in row["answer"]], model), cache).to_host() for i, j in ((0, 5), (5, 6), (6, 26))]
        np.testing.assert_allclose(np.concatenate(parts, axis=1), wanted, atol=1e-4)
    prompts = [[i for i, there in zip(*pair, strict=True) if there] for pair in zip(row["ids"], row["mask"], strict=True)]
    assert model.generate(prompts, 32) == row["tokens"]
    assert model.generate(prompts[1], 32) == row["tokens"][1]


def test_answers_end_and_follow_options(tmp_path):
    row = ROWS["t5"]
    end = row["tokens"][0][9]
    model = models.load(folder_of("t5", tmp_path, eos_token_id=end), "cpu")
    whole = row["tokens"][0]
    assert model.generate(row["ids"][0], 32) == whole[: whole.index(end)]
    drawn = [model.generate(row["ids"][0], 12, seed=seed, temperature=1.5, top_k=20) for seed in (1, 1, 2)]
    assert drawn[0] == drawn[1] != drawn[2]
    unlike = model.generate(row["ids"][0], 12, presence_penalty=100.0)
    assert len(set(unlike)) == len(unlike) > 1
    letters = SimpleNamespace(encode=lambda text: [ord(sign) - 32 for sign in text], decode=lambda ids: "".join(chr(i + 32) for i in ids))
    model.make_tokenizer = lambda: letters
    assert model.generate(["Hello", letters.encode("Hi")], 6) == [model.generate("Hello", 6), model.generate(letters.encode("Hi"), 6)]
    with pytest.raises(ShapeError, match="token ids must be from 0 to 95; lowest=96, highest=96"):
        model.generate([96], 2)
    with pytest.raises(ShapeError, match=r"ids and mask must have shape \(batch, length\)"):
        model.encode(ids_of([[1, 2]], model), [[1]])


@pytest.mark.parametrize("case", ROWS)
def test_a_saved_model_has_the_same_names_and_values(case, tmp_path):
    (tmp_path / "in").mkdir()
    model = models.load(folder_of(case, tmp_path / "in"), "cpu")
    models.save(model, tmp_path / "out")
    one, two = (safetensors.load_file(tmp_path / name / "model.safetensors") for name in ("in", "out"))
    assert one.keys() == two.keys() and all((one[name] == two[name]).all() for name in one)
    again = models.load(tmp_path / "out", "cpu")
    assert again.generate(ROWS[case]["ids"][0], 8) == ROWS[case]["tokens"][0][:8]


def test_every_parameter_learns(device, tmp_path):
    row, model = ROWS["flan-t5"], models.load(folder_of("flan-t5", tmp_path), device.queue).train()
    model(ids_of(row["ids"], model), ids_of(row["answer"], model), row["mask"]).sum().backward()
    assert all(p.grad is not None and np.isfinite(p.grad.to_host()).all() and p.grad.to_host().any() for p in model.parameters())


@pytest.mark.parametrize("changes", [{"relative_attention_num_buckets": 6}, {"relative_attention_max_distance": 4}])
def test_impossible_buckets_are_refused(changes, tmp_path):
    with pytest.raises(FileError, match="relative_attention_num_buckets must be a multiple of 4"):
        models.load(folder_of("t5", tmp_path, **changes), "cpu")
