"""A tiny LLaMA with a tokenizer and a chat template, behind the application."""

from __future__ import annotations

import asyncio
import json

import numpy as np
import pytest

from netcl import models

tokenizers = pytest.importorskip("tokenizers")
pytest.importorskip("safetensors")
pytest.importorskip("jinja2")
pytest.importorskip("starlette")
pytest.importorskip("uvicorn")

TEMPLATE = "{% for m in messages %}{{ m['role'][0] }}:{{ m['content'] }};{% endfor %}a:"
CONFIG = {
    "model_type": "llama", "vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 128,
}  # fmt: skip


@pytest.fixture(scope="session")
def served_folder(tmp_path_factory):
    """A folder with random weights, one token per printable character, and a template."""
    place = tmp_path_factory.mktemp("served") / "tiny"
    model = models.CausalLM(models.read_config(CONFIG))
    draw = np.random.default_rng(5)
    for parameter in model.parameters():
        parameter.write(draw.normal(0, 0.35, parameter.shape).astype(np.float32))
    models.save(model, place)
    backend = tokenizers.Tokenizer(tokenizers.models.BPE({chr(32 + i): i for i in range(95)}, []))
    backend.decoder = tokenizers.decoders.Fuse()
    backend.add_special_tokens(["<|end|>"])
    backend.save(str(place / "tokenizer.json"))
    (place / "tokenizer_config.json").write_text(json.dumps({"chat_template": TEMPLATE, "eos_token": "<|end|>"}))
    return place


@pytest.fixture
def model(served_folder, device):
    return models.load(served_folder, device)


@pytest.fixture
def host_model(served_folder):
    """The model on NumPy, for tests of what does not depend on a device."""
    return models.load(served_folder, "cpu")


def run_rounds(batcher, most=1000):
    """All requests of a batcher without a thread."""
    for _ in range(most):
        if not (batcher.waiting or batcher.running):
            return
        batcher.turn()
    raise AssertionError("the batcher does not come to an end")


def talk(app, *calls):
    """Answers of an application to calls made at the same time: ``(method, path, keywords of httpx)``."""
    httpx = pytest.importorskip("httpx")

    async def all_calls():
        transport = httpx.ASGITransport(app=app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            return await asyncio.gather(*(client.request(method, path, **options) for method, path, options in calls))

    return asyncio.run(all_calls())
