"""Ways to decode: with a draft model, with a prompt on disk, with layers on several devices, with a cache of int8."""

from __future__ import annotations

import copy
import pickle

import numpy as np
import pytest

import netcl
from netcl import models, nn
from netcl.autograd import is_grad_enabled, no_grad
from netcl.core.tensor import Tensor
from netcl.io import FileError, archive
from netcl.models.layers import joined_linear
from netcl.models.prompt_cache import PromptFile, model_hash
from netcl.nn.decoding import Sampling, Speculator

PROMPT = [5, 17, 3, 42, 8, 30, 11, 60, 2, 9, 71]


@pytest.fixture(scope="module")
def model(folder_of):
    return models.load(folder_of("llama"), "cpu")


@pytest.fixture(scope="module")
def draft(folder_of):
    """Another model with the same vocabulary, of which one layer is left."""
    found = models.load(folder_of("qwen3"), "cpu")
    assert found.config.vocab_size == 96
    return found


def test_greedy_text_with_a_draft_is_the_models_own(model, draft):
    plain = model.generate(PROMPT, 40)
    for other, ahead in ((draft, 4), (draft, 1), (model, 4), (model, 7)):
        assert model.generate(PROMPT, 40, draft=other, draft_tokens=ahead) == plain
    assert list(model.generate(PROMPT, 40, draft=draft, stream=True)) == plain
    whole = Speculator(model, model, Sampling(0.0), lambda n: np.zeros(n), 4)
    assert [int(t[0]) for t in whole.tokens(PROMPT, 21)] == plain[:21]
    assert whole.accepted == whole.judged == 16  # 1 + 4 * (4 + 1)
    for wrong in ({"draft_tokens": 0}, {"max_new_tokens": 10**6}):
        if "max_new_tokens" in wrong:
            draft.context, before = 20, draft.context
        with pytest.raises(ValueError, match=r"\[generate\] draft must have the model's vocabulary size and a context of at least"):
            model.generate(PROMPT, **{"max_new_tokens": 40, "draft": draft, **wrong})
    draft.context = before
    with pytest.raises(ValueError, match=r"\[generate\] draft and prompt_cache require one prompt"):
        model.generate([PROMPT, PROMPT], draft=draft)


def test_a_draft_on_a_device(folder_of, device):
    model, other = (models.load(folder_of(case), device.queue) for case in ("llama", "qwen3"))
    assert model.generate(PROMPT, 12, draft=other, draft_tokens=3) == model.generate(PROMPT, 12)


DYNAMIC = {"max_position_embeddings": 16, "rope_scaling": {"rope_type": "dynamic", "factor": 4.0}}
_FACTORS = {"short_factor": [1.0] * 4, "long_factor": [1.0, 2.0, 4.0, 8.0], "factor": 4.0}
LONGROPE = {"max_position_embeddings": 64, "original_max_position_embeddings": 16, "rope_scaling": {"rope_type": "longrope", **_FACTORS}}


@pytest.mark.parametrize("scaling", [DYNAMIC, LONGROPE], ids=["dynamic", "longrope"])
def test_frequencies_that_depend_on_the_length_are_those_of_each_text(scaling, rng, tmp_path):
    """In batches, with a draft and with a prompt on disk, texts are those of one prompt alone."""
    sizes = {"vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    model, draft = (models.CausalLM(models.read_config({"model_type": "llama", **sizes, **scaling})) for _ in range(2))
    for one in (model, draft):
        for parameter in one.parameters():
            parameter.write(rng.normal(0, 0.4, parameter.shape).astype(np.float32))
    prompts = [rng.integers(0, 96, length).tolist() for length in (30, 4, 12, 4, 62, 15)]
    alone = [model.generate(prompt, 10) for prompt in prompts]
    assert model.generate(prompts, 10) == alone and list(map(len, alone)) == [10, 10, 10, 10, 3, 10]
    for prompt, plain in zip(prompts, alone, strict=True):
        assert all(model.generate(prompt, 10, draft=other, draft_tokens=4) == plain for other in (draft, model))
    path = tmp_path / "prompt.netcl"
    model.generate(prompts[0][:10], 1, prompt_cache=path)
    before = path.stat().st_size
    assert model.generate(prompts[0], 10, prompt_cache=path) == alone[0] and path.stat().st_size > before
    assert model.generate(prompts[0][:10], 10, prompt_cache=path) == model.generate(prompts[0][:10], 10)


def test_phi3_computes_a_text_that_outgrows_the_original_context_again(rng, tmp_path):
    """As in transformers: its tokens are those of a model without a cache."""
    sizes = {"vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    model, draft = (models.CausalLM(models.read_config({"model_type": "phi3", **sizes, **LONGROPE})) for _ in range(2))
    for one in (model, draft):
        for parameter in one.parameters():
            parameter.write(rng.normal(0, 0.4, parameter.shape).astype(np.float32))
    prompt = rng.integers(0, 96, 11).tolist()
    text = list(prompt)
    with no_grad():
        for _ in range(12):
            text.append(int(model(Tensor.from_host(model.queue, np.array([text]))).to_host()[0, -1].argmax()))
    new = text[len(prompt) :]
    assert model.generate(prompt, 12) == new and model.generate([prompt, prompt], 12) == [new, new]
    assert all(model.generate(prompt, 12, draft=other, draft_tokens=4) == new for other in (draft, model))
    path = tmp_path / "prompt.netcl"
    model.generate(prompt[:9], 1, prompt_cache=path)
    assert model.generate(prompt, 12, prompt_cache=path) == new


def test_sampled_text_with_a_draft_follows_the_model(model, draft):
    """The first token and the second are distributed as the model's, whatever the draft proposes."""
    rng = np.random.default_rng(0)
    speculator = Speculator(None, None, Sampling(), lambda n: rng.random(n))
    wanted, drafted = rng.dirichlet(np.ones(5), 3), rng.dirichlet(np.ones(5) * 0.5, 2)
    wanted[0, 2] = 0  # never, though the draft may propose it
    wanted[0] /= wanted[0].sum()
    counts = np.zeros((2, 5))
    for _ in range(20000):
        made = speculator.judge([int(rng.choice(5, p=drafted[i])) for i in range(2)], wanted, drafted)
        for place, token in zip(range(2), made, strict=False):
            counts[place, token] += 1
    np.testing.assert_allclose(counts / counts.sum(1, keepdims=True), wanted[:2], atol=0.015)
    assert counts[0, 2] == 0
    options = {"temperature": 1.2, "top_k": 20, "top_p": 0.9, "seed": 4, "draft": draft}
    assert model.generate(PROMPT, 15, **options) == model.generate(PROMPT, 15, **options)
    assert model.generate(PROMPT, 15, **{**options, "top_k": 1}) == model.generate(PROMPT, 15)


@pytest.mark.parametrize("sampling", [Sampling(0.7), Sampling(1.3, 4), Sampling(1.0, None, 0.6), Sampling(0.9, 5, 0.8), Sampling(0.0)])
def test_the_distribution_on_the_host_is_that_of_choose(sampling):
    logits, steps = np.random.default_rng(1).standard_normal((1, 9)).astype(np.float32), 500
    uniform = (np.arange(steps, dtype=np.float32) + 0.5) / steps
    chosen = sampling.choose(Tensor.from_host(np.repeat(logits, steps, 0)), Tensor.from_host(uniform)).to_host()[:, 0]
    np.testing.assert_allclose(np.bincount(chosen, minlength=9) / steps, sampling.probabilities(logits)[0], atol=2 / steps)


@pytest.mark.parametrize("dtype", [None, "int8"])
def test_a_prompt_is_kept_on_disk(folder_of, tmp_path, dtype):
    path, model = tmp_path / "prompt.netcl", models.load(folder_of("llama"), "cpu", cache_dtype=dtype)
    plain = model.generate(PROMPT, 20)
    assert model.generate(PROMPT, 20, prompt_cache=path) == plain
    size = path.stat().st_size
    again = models.load(folder_of("llama"), "cpu", cache_dtype=dtype)
    file = PromptFile(path, again)
    assert file.restore(again.new_cache(64), PROMPT) == len(PROMPT) - 1
    assert file.restore(again.new_cache(64), [*PROMPT[:5], 1, 2]) == 5
    assert file.restore(again.new_cache(64), [1, 2]) == 0
    assert again.generate(PROMPT, 20, prompt_cache=path) == plain
    assert again.generate(PROMPT, 20, prompt_cache=path, draft=again) == plain
    assert again.generate([*PROMPT[:6], 1], 9, prompt_cache=path) == model.generate([*PROMPT[:6], 1], 9)
    assert path.stat().st_size == size  # a prompt that goes another way leaves the file
    longer = PROMPT + plain[:4] + [1]
    assert again.generate(longer, 9, prompt_cache=path) == model.generate(longer, 9) and path.stat().st_size > size


def test_prompts_of_other_models_and_damaged_files_are_refused(folder_of, model, draft, tmp_path):
    path = tmp_path / "prompt.netcl"
    model.generate(PROMPT, 2, prompt_cache=path)
    with pytest.raises(FileError, match=r"\[prompt_cache\] the file must belong to this model; .*remove it"):
        draft.generate(PROMPT, 2, prompt_cache=path)
    changed = models.load(folder_of("llama"), "cpu")
    before = model_hash(changed)
    assert before == model_hash(model)
    changed.norm.weight.write(changed.norm.weight.to_host() * 2)
    assert model_hash(changed) != before
    meta, arrays = archive.read(path, "test", "prompt cache")
    short = {name: array[:, :, :3] for name, array in arrays.items() if name != "tokens"}
    damaged = {
        "the entries must have the expected names": {"tokens": arrays["tokens"]},
        "tokens as a vector of int64 ids from 0 to 95": {**arrays, "tokens": arrays["tokens"] + 90},
        "an entry must have shape": {**short, "tokens": arrays["tokens"]},
        "dtype=None": {**arrays, "keys0": arrays["keys0"].astype(np.float64)},
    }
    for expected, found in damaged.items():
        dtypes = {**meta["dtypes"], **({"keys0": None} if expected == "dtype=None" else {})}
        archive.write(path, {**meta, "dtypes": dtypes}, found, "test")
        with pytest.raises(FileError, match=rf"\[prompt_cache\] .*{expected}"):
            model.generate(PROMPT, 2, prompt_cache=path)
    path.write_bytes(path.read_bytes()[:-200])
    with pytest.raises(FileError, match=r"\[prompt_cache\]"):
        model.generate(PROMPT, 2, prompt_cache=path)


def test_layers_on_several_devices(folder_of, model, device, tmp_path):
    plain = model.generate(PROMPT, 12)
    for case in (["cpu", device.queue], [device.queue, "cpu"]):
        split = models.load(folder_of("llama"), device.queue, device_map=case)
        assert split.generate(PROMPT, 12) == plain
        assert len({layer.queue for layer in split.layers}) == len({device.queue, model.queue})
        assert split.generate([PROMPT, PROMPT[:4]], 6)[0] == plain[:6]
    path = tmp_path / "prompt.netcl"
    assert [split.generate(PROMPT, 12, prompt_cache=path) for _ in range(2)] == [plain] * 2
    with pytest.raises(ValueError, match=r"\[load\] device_map must name a device for each of the 2 layers"):
        models.load(folder_of("llama"), "cpu", device_map=["cpu"])
    with pytest.raises(ValueError, match=r"\[load\] device_map and cache_dtype require a decoder"):
        models.load(folder_of("bert"), "cpu", cache_dtype="int8")


def test_a_split_model_moves_and_is_copied(folder_of, cl_device):
    split = models.load(folder_of("llama"), cl_device.queue, device_map=[cl_device.queue, "cpu"])
    plain = split.generate(PROMPT, 8)
    copied = copy.deepcopy(split)
    assert copied.layer_queues == split.layer_queues and copied.generate(PROMPT, 8) == plain
    assert pickle.loads(pickle.dumps(split)).generate(PROMPT, 8) == plain
    for place in (cl_device.queue, "cpu"):  # the first keeps the device of the embedding
        assert split.to(place).generate(PROMPT, 8) == plain
        assert split.layer_queues == () and split.replayable


def test_a_cache_of_int8_writes_almost_the_same(folder_of, device):
    plain, coded = (models.load(folder_of("llama"), device.queue, cache_dtype=dtype) for dtype in (None, "int8"))
    caches = [model.new_cache(32) for model in (plain, coded)]
    for begin, end in ((0, 9), (9, 10), (10, 11)):
        ids = np.array([PROMPT[begin:end]])
        want, got = (m(Tensor.from_host(device.queue, ids), cache).to_host() for m, cache in zip((plain, coded), caches, strict=True))
        np.testing.assert_allclose(got, want, atol=0.02 * np.abs(want).max())
    assert len(coded.generate(PROMPT, 8)) == 8 and {t.dtype for t in caches[1].buffers()} >= {"int8", "float32"}


@pytest.mark.parametrize("case", ["llama", "gemma2"])  # gemma2: windows and capped scores
@pytest.mark.parametrize("merged", [False, True])
def test_logits_with_a_cache_of_int8_do_not_depend_on_how_positions_are_grouped(case, merged, folder_of, device):
    model, ids = models.load(folder_of(case), device.queue, cache_dtype="int8"), np.array([[*PROMPT, *PROMPT[::-1]]])
    model = model.merge_projections() if merged else model
    with no_grad():
        found = []
        for size in (1, 5, 22):
            cache, parts = model.new_cache(40), []
            for begin in range(0, ids.shape[1], size):
                parts.append(model(Tensor.from_host(device.queue, ids[:, begin : begin + size]), cache).to_host())
            found.append(np.concatenate(parts, axis=1))
    for size, logits in zip((5, 22), found[1:], strict=True):
        np.testing.assert_allclose(logits, found[0], atol=2e-4, err_msg=str(size))


@pytest.mark.parametrize(("case", "kind"), [("llama", None), ("llama", "Q8_0"), ("gpt2", "Q8_0"), ("qwen2", None), ("qwen3", None)])
def test_merged_projections_change_nothing(case, kind, folder_of, device, tmp_path):
    path = folder_of(case)
    if kind is not None:
        models.save(models.load(path, "cpu"), tmp_path / "a.gguf", "gguf", kind=kind)
        path = tmp_path / "a.gguf"
    plain, merged = models.load(path, device.queue), models.load(path, device.queue).merge_projections()
    assert merged.merged
    assert merged.generate(PROMPT, 10) == plain.generate(PROMPT, 10)
    caches = [model.new_cache(32) for model in (plain, merged)]
    for begin, end in ((0, 9), (9, 10), (10, 11)):
        ids = Tensor.from_host(device.queue, np.array([PROMPT[begin:end]]))
        with no_grad():
            want, got = (model(ids, cache).to_host() for model, cache in zip((plain, merged), caches, strict=True))
        np.testing.assert_allclose(got, want, atol=2e-5 * np.abs(want).max())
    if merged.merged:
        with pytest.raises(ValueError, match=r"\[save\] the model's projections must not be merged"):
            models.save(merged, tmp_path / "b")
        with pytest.raises(ValueError, match=r"\[lora\] the model's projections must not be merged"):
            models.lora(merged)


def test_texts_that_are_written_at_the_same_time_are_independent(model):
    plain, other = model.generate(PROMPT, 12), model.generate(PROMPT[:5], 12)
    for options in ({}, {"draft": model}):
        streams = [model.generate(ids, 12, stream=True, **options) for ids in (PROMPT, PROMPT[:5])]
        begun = [[next(stream) for _ in range(count)] for stream, count in zip(streams, (4, 6), strict=True)]
        assert [[*first, *rest] for first, rest in zip(begun, streams, strict=True)] == [plain, other]


def test_a_stream_leaves_the_modes_of_its_caller(folder_of):
    model = models.load(folder_of("llama"), "cpu").train()
    stream = model.generate(PROMPT, 3, stream=True)
    next(stream)
    assert is_grad_enabled() and model.training


def test_copies_write_with_their_own_weights_and_settings(folder_of, model):
    plain = model.generate(PROMPT, 12)
    made, fresh = copy.deepcopy(model), models.load(folder_of("llama"), "cpu")
    for one in (made, fresh):
        one.norm.weight.write(one.norm.weight.to_host()[::-1].copy())
    assert made.generate(PROMPT, 12) == fresh.generate(PROMPT, 12) != plain
    assert model.generate(PROMPT, 12) == plain
    made.cache_dtype = "int8"
    made.generate(PROMPT, 2)
    assert {step.cache.dtype for step in made._decoding.values()} == {"int8"}
    half = models.load(folder_of("llama"), "cpu", "float16")
    assert fresh.to("float16").lm_head.weight.dtype == "float16"
    fresh.norm.weight.write(half.norm.weight.to_host())
    assert fresh.generate(PROMPT, 12) == half.generate(PROMPT, 12)


def test_text_follows_a_replaced_head(folder_of, device):
    model = models.load(folder_of("llama"), device.queue)
    model.generate(PROMPT, 6)
    model.lm_head = nn.Linear(model.config.width, model.config.vocab_size, bias=False).to(device.queue)
    text = model.generate(PROMPT, 12)
    assert text == copy.deepcopy(model).generate(PROMPT, 12)  # without recorded steps


def test_texts_inside_and_outside_of_autocast_have_their_own_caches(folder_of):
    model, made = models.load(folder_of("llama"), "cpu"), []
    for half in (False, True, False):
        with netcl.amp.autocast(half, "bfloat16"):
            made.append(model.generate([3, 1, 4], 6))
    assert made[0] == made[2] and len(made[1]) == 6


def test_the_hash_follows_replaced_weights(folder_of):
    model = models.load(folder_of("llama"), "cpu")
    found, weight = set(), model.norm.weight.to_host()
    for factor in (2, 3, 4):
        model.norm.weight = nn.Parameter(Tensor.from_host(model.queue, weight * factor))
        found.add(model_hash(model))
    assert len(found) == 3


def test_merged_projections_keep_their_settings(folder_of, model):
    merged = models.load(folder_of("llama"), "cpu").requires_grad_(False).merge_projections().merge_projections()
    assert merged.generate(PROMPT, 12) == model.generate(PROMPT, 12)
    assert merged.merged and not any(p.requires_grad for p in merged.parameters())
    layers = [nn.QuantizedLinear(32, 16, kind="Q8_0", activations="float") for _ in range(2)]
    assert joined_linear(layers).activations == "float"
    layers[1].activations = "auto"
    assert joined_linear(layers) is None


def test_tokens_follow_a_replaced_forward(device):
    """A layer whose ``forward`` was replaced takes no part in the launches that compute several layers."""
    sizes = {"vocab_size": 96, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    model, calls = models.CausalLM(models.read_config({"model_type": "llama", **sizes})).to(device.queue).merge_projections(), []
    layer = netcl.quantize(model, bits=8).layers[1].self_attn.o_proj
    layer.forward = lambda x: calls.append(x.shape[1]) or type(layer).forward(layer, x)
    cache = model.new_cache()
    with no_grad():
        for ids in (PROMPT, [7]):
            model(Tensor.from_host(model.queue, np.array([ids], "int32")), cache)
    assert calls == [len(PROMPT), 1]
