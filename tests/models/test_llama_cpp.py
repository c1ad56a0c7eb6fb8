"""GGUF files and vocabularies against llama.cpp, through the package llama-cpp-python; without it, against perplexities it once gave.

The vocabularies are those of llama.cpp's own tests: they are found if the package runs from its source distribution.
``python tests/models/test_llama_cpp.py`` writes the perplexities, tests/golden/llama_cpp.json.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import tempfile
from pathlib import Path

import numpy as np
import pytest

from netcl import models
from netcl.autograd import no_grad
from netcl.core.device import queue_of
from netcl.core.tensor import Tensor
from netcl.models.gguf import GGUFFile
from netcl.models.tokenizer import gguf_tokenizer

installed = importlib.util.find_spec("llama_cpp") is not None
low = importlib.import_module("llama_cpp.llama_cpp") if installed else None
needs_llama_cpp = pytest.mark.skipif(not installed, reason="llama-cpp-python is not installed")
GOLDEN = Path(__file__).parent.parent / "golden" / "llama_cpp.json"

KINDS = ("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL")
CONFIG = {
    "model_type": "llama", "vocab_size": 320, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256, "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
}  # fmt: skip
VOCABULARIES = Path(low.__file__ if installed else "").parent.parent / "vendor" / "llama.cpp" / "models"
TEXT = np.random.default_rng(3).integers(0, CONFIG["vocab_size"], 250)


class Reference:
    """llama.cpp on two threads, with the logits of every position."""

    def __init__(self, path: Path):
        low.llama_backend_init()
        settings = low.llama_model_default_params()
        settings.n_gpu_layers = 0
        self.model = low.llama_model_load_from_file(str(path).encode(), settings)
        assert self.model, "llama.cpp refuses the file"
        self.size = low.llama_vocab_n_tokens(low.llama_model_get_vocab(self.model))

    def logits(self, ids: list[int]) -> np.ndarray:
        """Logits ``(length, vocabulary)`` of a text."""
        options = low.llama_context_default_params()
        options.n_ctx = options.n_batch = options.n_ubatch = 256
        options.n_threads = options.n_threads_batch = 2
        options.type_k = options.type_v = low.GGML_TYPE_F32  # as ours; float16 is llama.cpp's own choice
        context = low.llama_init_from_model(self.model, options)
        batch = low.llama_batch_init(len(ids), 0, 1)
        batch.n_tokens = len(ids)
        for i, token in enumerate(ids):
            batch.token[i], batch.pos[i], batch.n_seq_id[i], batch.logits[i] = token, i, 1, 1
            batch.seq_id[i][0] = 0
        assert low.llama_decode(context, batch) == 0
        found = np.ctypeslib.as_array(low.llama_get_logits(context), (len(ids), self.size)).copy()
        low.llama_batch_free(batch)
        low.llama_free(context)
        return found


def write_file(kind: str, folder: Path, **config) -> Path:
    """A small model with seeded weights as a GGUF file of a kind; a LLaMA by default."""
    rng, path = np.random.default_rng(7), folder / f"{kind}.gguf"
    model = models.CausalLM(models.read_config({**CONFIG, **config})).to("cpu")
    for name, parameter in model.named_parameters():
        size = 1.0 if parameter.ndim == 1 or "embed" in name else parameter.shape[1] ** -0.5
        drawn = rng.standard_normal(parameter.shape) * size
        parameter.write((1 + 0.1 * drawn if parameter.ndim == 1 else drawn).astype(np.float32))
    models.save(model, path, "gguf", kind=kind)
    return path


def logits_of(path: Path, queue, ids: np.ndarray) -> np.ndarray:
    with no_grad():
        return models.load(path, queue)(Tensor.from_host(queue_of(queue), ids[None])).to_host()[0]


def perplexity(logits: np.ndarray, ids: np.ndarray) -> float:
    wide = logits[:-1].astype(np.float64)
    wide = wide - wide.max(axis=1, keepdims=True)
    losses = np.log(np.exp(wide).sum(axis=1)) - wide[np.arange(len(ids) - 1), ids[1:]]
    return float(np.exp(losses.mean()))


@pytest.mark.parametrize("kind", KINDS)
def test_files_of_each_kind_have_the_perplexity_that_llama_cpp_gave(kind, tmp_path):
    got = perplexity(logits_of(write_file(kind, tmp_path), "cpu", TEXT), TEXT)
    assert abs(got / json.loads(GOLDEN.read_text())[kind] - 1) <= 0.005


@needs_llama_cpp
@pytest.mark.parametrize("kind", KINDS)
def test_files_of_each_kind_have_llama_cpps_logits(kind, tmp_path, device):
    path = write_file(kind, tmp_path)
    want, got = Reference(path).logits(TEXT.tolist()), logits_of(path, device.queue, TEXT)
    assert abs(perplexity(got, TEXT) / perplexity(want, TEXT) - 1) <= 0.005
    error = np.abs(got - want).max() / want.std()
    assert error <= (1e-3 if kind == "F32" else 0.25)
    ranked = np.sort(want, axis=1)
    clear = ranked[:, -1] - ranked[:, -2] > 2 * error * want.std()
    assert clear.sum() >= (100 if kind == "F32" else 10)
    np.testing.assert_array_equal(got.argmax(1)[clear], want.argmax(1)[clear])


_GEMMA = {"head_dim": 64, "query_pre_attn_scalar": 64, "tie_word_embeddings": True, "sliding_window": 32}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "shared_expert_intermediate_size": 64}
_YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
_LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}
_LONG = {"rope_type": "longrope", "short_factor": [1.0] * 32, "long_factor": [1 + i / 9 for i in range(32)]}


@needs_llama_cpp
@pytest.mark.parametrize(
    "config",
    [
        {"model_type": "gpt2", "n_embd": 256, "n_layer": 2, "n_head": 4, "n_positions": 256},
        {"attention_bias": True, "mlp_bias": True, "rope_scaling": _LLAMA3}, {"rope_scaling": {**_YARN, "attention_factor": 1.3}},
        {"rope_scaling": _LONG, "original_max_position_embeddings": 64},
        {"model_type": "mistral", "sliding_window": None, "head_dim": 32},
        {"model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None},
        {"model_type": "qwen2", "tie_word_embeddings": True, "rope_scaling": _YARN}, {"model_type": "qwen3", "head_dim": 32},
        {"model_type": "qwen2_moe", **_EXPERTS}, {"model_type": "qwen3_moe", "head_dim": 32, "norm_topk_prob": True, **_EXPERTS},
        {"model_type": "gemma2", **_GEMMA}, {"model_type": "gemma3_text", "num_hidden_layers": 7, **_GEMMA},
        {"model_type": "phi3"}, {"model_type": "phi3", "rope_scaling": _LONG, "original_max_position_embeddings": 64},
    ],
    ids=lambda config: config.get("model_type", "llama"),
)  # fmt: skip
def test_files_of_each_architecture_have_llama_cpps_logits(config, tmp_path):
    path = write_file("F32", tmp_path, **config)
    want, got = Reference(path).logits(TEXT.tolist()), logits_of(path, "cpu", TEXT)
    assert abs(perplexity(got, TEXT) / perplexity(want, TEXT) - 1) <= 0.005
    assert np.abs(got - want).mean() <= 0.02 * want.std()  # a token between two experts may get the other


@needs_llama_cpp
@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0", "F16"])
def test_written_tokens_are_those_of_llama_cpp(kind, tmp_path, device):
    """Every token that is written is the likeliest of llama.cpp's, or within rounding of it."""
    path, prompt = write_file(kind, tmp_path), [3, 14, 159, 26, 53, 58, 97]
    made = models.load(path, device.queue).generate(prompt, 32)
    logits = Reference(path).logits(prompt + made)[len(prompt) - 1 : -1]
    assert (logits.max(1) - logits[np.arange(32), made] <= 0.1 * logits.std()).all()
    assert (logits.argmax(1) == made).sum() >= 28


@needs_llama_cpp
@pytest.mark.parametrize("path", sorted(VOCABULARIES.glob("*.gguf")), ids=lambda path: path.stem)
def test_vocabularies_of_llama_cpps_tests(path):
    metadata, texts = GGUFFile(path).metadata, Path(f"{path}.inp")
    if metadata["tokenizer.ggml.model"] not in ("gpt2", "llama", "t5"):
        pytest.skip(f"vocabularies of kind {metadata['tokenizer.ggml.model']} are not read")
    made = gguf_tokenizer(metadata)
    settings = low.llama_model_default_params()
    settings.vocab_only = True
    model = low.llama_model_load_from_file(str(path).encode(), settings)
    vocabulary = low.llama_model_get_vocab(model)

    def reference(text: str) -> list[int]:
        raw = text.encode()
        room = (low.llama_token * (len(raw) + 16))()
        return list(room[: low.llama_tokenize(vocabulary, raw, len(raw), room, len(room), False, False)])

    given = texts.read_bytes().decode() if texts.exists() else (VOCABULARIES / "ggml-vocab-gpt-2.gguf.inp").read_bytes().decode()
    strings = given.split("\n__ggml_vocab_test__\n")
    got = [made.encode(text, add_special_tokens=False) for text in strings]
    if texts.exists():
        expected = [[int(i) for i in line.split()] for line in Path(f"{path}.out").read_text().split("\n")]
        assert got == expected[: len(strings)]
    assert got == [reference(text) for text in strings]
    low.llama_model_free(model)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as place:
        found = {kind: round(perplexity(Reference(write_file(kind, Path(place))).logits(TEXT.tolist()), TEXT), 4) for kind in KINDS}
    GOLDEN.write_text(json.dumps(found, indent=1) + "\n")
