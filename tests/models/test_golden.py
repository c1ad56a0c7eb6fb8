"""Every architecture against transformers: logits with and without a cache, greedy tokens, states of encoders."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from netcl import models
from netcl.autograd import no_grad
from netcl.core.tensor import Tensor

ROWS = json.loads((Path(__file__).parent.parent / "golden" / "models.json").read_text(encoding="utf-8"))
ON_EVERY_DEVICE = ("llama", "mixtral")
DECODERS = [
    pytest.param(case, marks=[] if case in ON_EVERY_DEVICE else pytest.mark.matrix) for case, row in ROWS.items() if "tokens" in row
]


def ids_of(values, model) -> Tensor:
    return Tensor.from_host(model.queue, np.asarray(values, np.int64))


@pytest.mark.parametrize("case", DECODERS)
def test_logits_and_greedy_tokens_are_those_of_transformers(case, device, folder_of, golden):
    row, model = ROWS[case], models.load(folder_of(case), device.queue)
    ids, tokens = row["ids"], row["tokens"]
    with no_grad():
        np.testing.assert_allclose(model(ids_of(ids, model)).to_host(), golden[f"{case}/prompt"], atol=1e-4)
        whole = model(ids_of([[*ids[0], *tokens[:24]]], model)).to_host()
        np.testing.assert_allclose(whole, golden[f"{case}/whole"], atol=1e-4)
        cache, steps = model.new_cache(), []
        for part in (ids[0][:4], ids[0][4:]):  # a prompt in two parts
            steps.append(model(ids_of([part], model), cache).to_host())
        np.testing.assert_allclose(np.concatenate(steps, axis=1), golden[f"{case}/prompt"], atol=1e-4)
    assert model.generate(ids[0], len(tokens)) == tokens


@pytest.mark.parametrize("case", ["bert", "roberta"])
def test_states_of_text_encoders(case, device, folder_of, golden):
    row, model = ROWS[case], models.load(folder_of(case), device.queue)
    with no_grad():
        states = model(ids_of(row["ids"], model), np.array(row["mask"]))
        pooled = model.pooled(states).to_host()
    np.testing.assert_allclose(states.to_host(), golden[f"{case}/states"], atol=1e-4)
    np.testing.assert_allclose(pooled, golden[f"{case}/pooled"], atol=1e-4)


def images() -> np.ndarray:
    rng = np.random.default_rng(7)
    rng.integers(2, 95, (2, 9))  # as in make_models.py
    return rng.standard_normal((2, 3, 16, 16)).astype(np.float32)


def test_states_of_a_vision_transformer(device, folder_of, golden):
    model = models.load(folder_of("vit"), device.queue)
    with no_grad():
        states = model(Tensor.from_host(model.queue, images()))
        pooled = model.pooled(states).to_host()
    np.testing.assert_allclose(states.to_host(), golden["vit/states"], atol=1e-4)
    np.testing.assert_allclose(pooled, golden["vit/pooled"], atol=1e-4)


@pytest.mark.matrix
def test_both_sides_of_clip(device, folder_of, golden):
    row, model = ROWS["clip"], models.load(folder_of("clip"), device.queue)
    ids, mask, pictures = ids_of(row["ids"], model), np.array(row["mask"]), Tensor.from_host(model.queue, images())
    with no_grad():
        found = {"text": model.text(ids, mask), "text_pooled": model.text_vectors(ids, mask), "vision": model.vision(pictures),
                 "vision_pooled": model.image_vectors(pictures), "logits": model(ids, pictures, mask)}  # fmt: skip
    for name, value in found.items():
        np.testing.assert_allclose(value.to_host(), golden[f"clip/{name}"], atol=1e-4, err_msg=name)
