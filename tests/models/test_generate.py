"""Writing text: sampling, stop strings, streaming, ends of texts, and the commands over it."""

from __future__ import annotations

import json
import shutil

import numpy as np
import pytest

import netcl
from netcl import models
from netcl.cli import main
from netcl.models.decoder import TextStream, _held_back
from netcl.models.tokenizer import Tokenizer

tokenizers = pytest.importorskip("tokenizers")


@pytest.fixture(scope="module")
def folder(folder_of, tmp_path_factory):
    """The tiny LLaMA with a tokenizer of one token per printable character."""
    place = tmp_path_factory.mktemp("written") / "model"
    shutil.copytree(folder_of("llama"), place)
    vocabulary = {chr(32 + i): i for i in range(95)}
    backend = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, []))
    backend.decoder = tokenizers.decoders.Fuse()
    backend.add_special_tokens(["<|end|>"])
    backend.save(str(place / "tokenizer.json"))
    return place


@pytest.fixture(scope="module")
def model(folder):
    return models.load(folder, "cpu")


def test_a_text_gives_a_text_and_ids_give_ids(model):
    ids = model.generate(model.tokenizer.encode("Hello"), 24)
    text = model.generate("Hello", 24)
    assert len(ids) == 24 and text == model.tokenizer.decode(ids)
    assert model.generate(["Hello", "Hi"], 5) == [text[:5], model.generate("Hi", 5)]
    assert model.generate(np.array([[1, 2], [3, 4]]), 3) == [model.generate([1, 2], 3), model.generate([3, 4], 3)]
    assert list(model.generate([1, 2], 3, stream=True)) == model.generate([1, 2], 3)
    prompts = [[1] * model.context, [2, 3], [4] * (model.context - 5), [5]]  # a full context ends one text, not those beside it
    alone = [model.generate(prompt, 9) for prompt in prompts]
    assert model.generate(prompts, 9) == alone and list(map(len, alone)) == [1, 9, 6, 9]
    assert model.generate([1], 0) == []


def test_streams_are_the_text_in_pieces_and_stop_strings_end_it(model):
    text = model.generate("Hello", 24)
    assert "".join(model.generate("Hello", 24, stream=True)) == text
    stop = text[10:13]
    cut = text[: text.index(stop)]
    assert model.generate("Hello", 24, stop=stop) == cut
    assert "".join(model.generate("Hello", 24, stop=["not there", stop], stream=True)) == cut
    ids = model.generate(model.tokenizer.encode("Hello"), 24, stop=stop)
    assert model.tokenizer.decode(ids) == text[: text.index(stop) + len(stop)]
    assert _held_back("abc", ("cd", "bcx")) == 2 and _held_back("abc", ()) == 0 and _held_back("a\ufffd\ufffd", ()) == 2


class _Bytes:
    """A tokenizer with one token per byte."""

    def decode(self, ids):
        return bytes(ids).decode(errors="replace")


@pytest.mark.parametrize("stop", ["b\u00e9", "ab\U0001f642c", "b\ufffd"])
def test_stop_strings_with_characters_of_several_tokens_are_not_streamed(stop):
    stream, pieces = models.TextStream(_Bytes(), [], [stop]), []
    for token in f"xa{stop}y".encode():
        if not stream.stopped:
            pieces.append(stream.add(token))
    assert stream.stopped and "".join(pieces) + stream.rest() == "xa"


def fallback_tokenizer():
    """SentencePiece's tokens for bytes: a byte of an incomplete character spoils the whole characters beside it."""
    vocabulary = {"<unk>": 0, **{f"<0x{i:02X}>": 1 + i for i in range(256)}, "a": 257, "b": 258, "\u2581": 259}
    backend = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, [], unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    backend.normalizer = tokenizers.normalizers.Replace(" ", "\u2581")
    steps = tokenizers.decoders
    backend.decoder = steps.Sequence([steps.Replace("\u2581", " "), steps.ByteFallback(), steps.Fuse()])
    return Tokenizer(backend)


def test_streams_keep_characters_of_several_tokens(rng):
    tokenizer = fallback_tokenizer()
    for length in (1, 5, 80, 200):
        for before in ("a b", "\u6f22", "a\U0001f600\xe9"):
            prompt, text = tokenizer.encode(before), "".join(rng.choice(list("ab \xe9\u6f22\U0001f600"), length))
            stream = TextStream(tokenizer, prompt)
            assert "".join(stream.add(token) for token in tokenizer.encode(text)) + stream.rest() == text
    euro = tokenizer.encode("\u20acab")  # the prompt ends inside a character, which belongs to the text
    stream = TextStream(tokenizer, [*tokenizer.encode("\u6f22"), *euro[:2]])
    assert "".join(map(stream.add, euro[2:])) + stream.rest() == "\u20acab"


def test_a_text_after_special_tokens_keeps_its_first_space():
    tokenizer = fallback_tokenizer()
    steps = tokenizers.decoders
    tokenizer.backend.decoder = steps.Sequence([steps.Replace("\u2581", " "), steps.ByteFallback(), steps.Fuse(), steps.Strip(" ", 1, 0)])
    tokenizer.backend.add_special_tokens(["<s>"])
    stream = TextStream(tokenizer, tokenizer.encode("a" + "<s>" * 5))
    assert "".join(map(stream.add, tokenizer.encode(" b"))) == " b"


def test_streams_after_prompts_whose_tokens_hold_parts_of_two_characters():
    class Parts:
        def decode(self, ids):
            return b"".join(parts[i] for i in ids).decode(errors="replace")

    word = "\uc548\ub155\ud558\uc138\uc694\ud558".encode()
    parts = [word[:2], *(word[i : i + 3] for i in range(2, 17, 3)), word[17:], b",", b"x", b"y"]
    stream = TextStream(Parts(), range(len(parts) - 2))
    assert stream.add(len(parts) - 2) + stream.add(len(parts) - 1) == "xy"


def test_beginnings_of_stop_strings_before_other_characters_are_streamed():
    stream, text = models.TextStream(_Bytes(), [], ["b\u00e9"]), "xb\u00e8b\U0001f642 b"
    pieces = [stream.add(token) for token in text.encode()]
    assert "".join(pieces) == text[:-1] and stream.rest() == "b" and not stream.stopped


def test_random_choices_follow_the_seed_and_the_options(model):
    options = {"temperature": 1.5, "seed": 3}
    assert (
        model.generate("Hello", 20, **options)
        == model.generate("Hello", 20, **options)
        != model.generate("Hello", 20, temperature=1.5, seed=4)
    )
    greedy = model.generate("Hello", 20)
    assert model.generate("Hello", 20, top_k=1, **options) == greedy == model.generate("Hello", 20, top_p=1e-6, **options)
    for wrong in ({"temperature": -1.0}, {"top_k": 0}, {"top_p": 0.0}):
        with pytest.raises(ValueError, match="temperature must be at least 0"):
            model.generate("Hello", 2, **wrong)
    with pytest.raises(ValueError, match=r"\[generate\] stream=True requires one prompt"):
        model.generate(["a", "b"], stream=True)


def test_random_choices_without_a_seed_follow_the_random_numbers_of_the_device(folder, device):
    model = models.load(folder, device.queue)
    texts = []
    for seed in (5, 5, 6):
        netcl.manual_seed(seed)
        texts.append([model.generate("Hello", 20, temperature=1.5) for _ in range(2)])
    assert texts[0] == texts[1] != texts[2] and texts[0][0] != texts[0][1]
    netcl.manual_seed(5)
    before = netcl.rand(3, queue=device.queue).tolist()
    netcl.manual_seed(5)
    model.generate("Hello", 4)
    assert netcl.rand(3, queue=device.queue).tolist() == before  # the most likely token is no random choice


@pytest.mark.parametrize("options", [{}, {"temperature": 1.5, "seed": 3}], ids=["most likely", "drawn"])
def test_a_text_that_ends_early_leaves_no_trace_in_the_next(folder, device, options):
    model = models.load(folder, device.queue)
    whole = model.generate("Hello", 30, **options)
    for end in (1, 5, 29):
        stream = model.generate("Hello", 30, stream=True, **options)
        assert "".join(next(stream) for _ in range(end)) == whole[:end]
        stream.close()
        assert model.generate("Hello", 30, **options) == whole


def test_a_token_that_ends_texts_ends_this_one(folder, tmp_path):
    whole = models.load(folder, "cpu").generate([40, 41], 30)
    last = whole[12]
    place = tmp_path / "model"
    shutil.copytree(folder, place)
    (place / "generation_config.json").write_text(json.dumps({"eos_token_id": [last, 95]}))
    assert models.load(place, "cpu").generate([40, 41], 30) == whole[: whole.index(last)]


def test_positions_may_be_given(model):
    from netcl.autograd import no_grad
    from netcl.core.tensor import Tensor

    ids = Tensor.from_host(model.queue, np.array([[1, 2, 3], [4, 5, 6]], np.int64))
    with no_grad():
        plain = model(ids).to_host()
        for given in (np.arange(3), np.tile(np.arange(3), (2, 1)), np.arange(3) + 7):  # rotary positions are relative
            np.testing.assert_allclose(model(ids, positions=Tensor.from_host(model.queue, given)).to_host(), plain, atol=1e-5)
        far = model(ids, positions=Tensor.from_host(model.queue, np.array([0, 5, 9]))).to_host()
    assert np.abs(far - plain).max() > 1e-3


def test_gradients_reach_every_parameter(folder_of):
    from netcl import autograd as ag
    from netcl.core.tensor import Tensor

    for case in ("gemma3", "qwen2_moe"):
        model = models.load(folder_of(case), "cpu")
        ids = Tensor.from_host(model.queue, np.arange(24, dtype=np.int64).reshape(1, -1))
        ag.sum(ag.square(model(ids))).backward()
        assert [name for name, p in model.named_parameters() if p.grad is None and "experts" not in name] == []


def test_the_commands(folder, model, capsys):
    assert main(["models", "info", str(folder)]) == 0
    told = capsys.readouterr().out
    assert "llama (LlamaForCausalLM)" in told and "Hugging Face folder" in told and "llama3, base 500000" in told
    assert main(["generate", str(folder), "Hello", "--length", "12", "--device", "cpu"]) == 0
    assert capsys.readouterr().out == f"Hello{model.generate('Hello', 12)}\n"
    options = ["--min-p", "0.1", "--repetition-penalty", "1.3", "--presence-penalty", "0.5", "--frequency-penalty", "0.2"]
    assert main(["generate", str(folder), "Hello", "--length", "12", "--device", "cpu", *options]) == 0
    same = model.generate("Hello", 12, min_p=0.1, repetition_penalty=1.3, presence_penalty=0.5, frequency_penalty=0.2)
    assert capsys.readouterr().out == f"Hello{same}\n"
    assert main(["generate", str(folder), "--device", "cpu"]) == 1
    assert "[generate] a non-empty prompt must be given" in capsys.readouterr().err
    assert main(["models", "info", str(folder / "config.json")]) == 1
    assert "[gguf] the file must begin with GGUF" in capsys.readouterr().err
    assert main(["models", "info", str(folder / "nothing")]) == 1
    assert "nothing" in capsys.readouterr().err


def test_convert_writes_what_generates_the_same(folder_of, tmp_path, capsys):
    from netcl.cli import main

    target = tmp_path / "model.gguf"
    assert main(["convert", str(folder_of("llama")), str(target), "--bits", "8"]) == 0
    assert "Q8_0" in models.describe_model(target)["types"]
    assert main(["convert", str(target), str(target)]) == 1 and "[convert] the target must not exist" in capsys.readouterr().err
    assert main(["convert", str(target), str(tmp_path / "folder"), "--kind", "Q4_0"]) == 1
    prompt = [3, 1, 4]
    plain = models.load(target, "cpu", "float32")
    assert models.load(target, "cpu").generate(prompt, 3)[0] == plain.generate(prompt, 3)[0]
