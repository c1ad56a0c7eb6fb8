"""Tokenizers: equal to their references on text of every Unicode block, through both formats; chat templates."""

from __future__ import annotations

import io
import json
import sys
import unicodedata
from contextlib import nullcontext
from functools import cache

import numpy as np
import pytest

from netcl.io import FileError
from netcl.models.tokenizer import SPLITS, Tokenizer, folder_tokenizer, gguf_tokenizer, gguf_vocabulary, render_template

tokenizers = pytest.importorskip("tokenizers")

TEXT = """It's the best of times, it was the worst of times: 1859, 3.14 and 1,000,000. Don't they'LL say "we've" twice?
    def f(x):\n\treturn x ** 2  # naïve façade, Straße, Привет мир, 你好世界, こんにちは, 안녕하세요, שלום, مرحبا 🙂👍🏽\r\n\r\n
The quick brown fox jumps over the lazy dog; the dogs, the foxes and the timing of it all. """


@cache
def strings() -> list[str]:
    """Text in which every Unicode block of 128 code points occurs, alone and between words, with spaces, digits and line ends."""
    rng = np.random.default_rng(5)
    found = ["", " ", "  ", "\n", " a", "a ", "  a  b\n\n c", "12345 67,890", "don't DON'T I'll", TEXT]
    words = TEXT.split()
    for start in range(0, sys.maxunicode, 128):
        block = [c for c in map(chr, range(start, start + 128)) if unicodedata.category(c) not in ("Cn", "Cs", "Co")]
        if block:
            some = rng.choice(block, 8)
            found += [
                "".join(some),
                f"{words[rng.integers(len(words))]} {''.join(some[:4])}{words[rng.integers(len(words))]}  {some[4]}1\n{some[5]}",
            ]
    letters = "".join(found)
    for at in rng.integers(0, len(letters), (10_000 - len(found), 4)):  # characters of unlike blocks side by side
        found.append(letters[at[0] : at[0] + 6] + "".join(letters[i] for i in at[1:]) + letters[at[0] % 400 :][:4])
    return found


@pytest.fixture(scope="module")
def trained():
    """Byte-level BPE with each of the splits, trained on a little text; on one thread, which leaves later forks alone."""
    found = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TOKENIZERS_PARALLELISM", "false")
        for name, split in SPLITS.items():
            found[name] = train(split)
    return found


def train(split: str | tuple[str, ...]):
    before = tokenizers.pre_tokenizers
    backend = tokenizers.Tokenizer(tokenizers.models.BPE())
    level = before.ByteLevel(add_prefix_space=False, use_regex=split in ("", "digits"))
    parts = () if split in ("", "digits") else (split,) if isinstance(split, str) else split
    own = [before.Digits(individual_digits=True)] if split == "digits" else [before.Split(tokenizers.Regex(s), "isolated") for s in parts]
    backend.pre_tokenizer = before.Sequence([*own, level])
    backend.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=420, initial_alphabet=before.ByteLevel.alphabet(), show_progress=False,
                                             special_tokens=["<|end|>", "<|user|>"])  # fmt: skip
    backend.train_from_iterator([TEXT] * 3, trainer)
    return backend


@pytest.mark.parametrize("name", SPLITS)
def test_byte_level_vocabularies_survive_gguf(name, trained):
    backend = trained[name]
    metadata = gguf_vocabulary(Tokenizer(backend, {"eos_token": "<|end|>"}, "{{ messages }}"))
    assert metadata["tokenizer.ggml.pre"] == name
    made = gguf_tokenizer(metadata)
    assert made.special == {"eos_token": "<|end|>"} and made.end_tokens == (0,) and made.chat_template == "{{ messages }}"
    texts = strings()[: None if name in ("gpt-2", "llama-bpe") else 2500]
    expected = [backend.encode(text).ids for text in texts]
    assert [made.encode(text) for text in texts] == expected
    assert [made.decode(ids) for ids in expected] == texts
    assert made.encode("a<|user|>b")[1] == 1 and made.decode(made.encode("a<|user|>b")) == "ab"


def test_a_folder_gives_its_tokenizer(trained, tmp_path):
    backend = trained["llama-bpe"]
    backend.save(str(tmp_path / "tokenizer.json"))
    settings = {"bos_token": {"content": "<|user|>"}, "eos_token": "<|end|>", "chat_template": [{"name": "default", "template": "hello"}]}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    made = folder_tokenizer(tmp_path)
    assert made.special == {"bos_token": "<|user|>", "eos_token": "<|end|>"} and made.chat_template == "hello"
    assert made.vocab_size == backend.get_vocab_size() and made.encode(TEXT) == backend.encode(TEXT).ids
    (tmp_path / "chat_template.jinja").write_text("{{ bos_token }}!")
    again = folder_tokenizer(tmp_path)
    assert again.apply_chat_template([], tokenize=False) == "<|user|>!" and again.apply_chat_template([])[0] == 1
    (tmp_path / "special_tokens_map.json").write_text('{"bos_token": "<|end|>", "eos_token": {"content": "<|user|>"}}')
    assert folder_tokenizer(tmp_path).special == {"bos_token": "<|end|>", "eos_token": "<|user|>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({**settings, "added_tokens_decoder": {}}))
    assert folder_tokenizer(tmp_path).special == made.special
    (tmp_path / "other").mkdir()
    for name, text in (("special_tokens_map.json", '{"bos_token": "<|end|>"}'), ("chat_template.jinja", "another")):
        (tmp_path / "other" / name).write_text(text)
    again.save(tmp_path / "other")
    other = folder_tokenizer(tmp_path / "other")
    assert other.encode(TEXT) == made.encode(TEXT) and (other.special, other.chat_template) == (again.special, again.chat_template)
    (tmp_path / "tokenizer.json").write_text('{"model": {"type": "nonsense"}}')
    with pytest.raises(FileError, match=r"\[tokenizer\] the file must be undamaged and of the right format"):
        folder_tokenizer(tmp_path)


def pieces_of(model_type: str, **options):
    """A SentencePiece model trained on a little text, and the metadata llama.cpp's converter makes of it."""
    library = pytest.importorskip("sentencepiece")
    file = io.BytesIO()
    library.SentencePieceTrainer.train(
        sentence_iterator=iter(TEXT.splitlines() * 3), model_writer=file, model_type=model_type, vocab_size=420, byte_fallback=True,
        normalization_rule_name="identity", remove_extra_whitespaces=False, character_coverage=1.0, hard_vocab_limit=False,
        minloglevel=2, **options,
    )  # fmt: skip
    model = library.SentencePieceProcessor(model_proto=file.getvalue())
    tokens = [model.id_to_piece(i) for i in range(len(model))]
    kinds = [2 if model.is_unknown(i) else 3 if model.is_control(i) else 6 if model.is_byte(i) else 1 for i in range(len(model))]
    own = {"model": "llama" if model_type == "bpe" else "t5", "tokens": tokens, "token_type": np.array(kinds, np.int32),
           "scores": np.array([model.get_score(i) for i in range(len(model))], np.float32), "bos_token_id": model.bos_id(),
           "eos_token_id": model.eos_id(), "unknown_token_id": model.unk_id(), "add_eos_token": False}  # fmt: skip
    return model, {f"tokenizer.ggml.{key}": value for key, value in own.items()}


@pytest.mark.parametrize("kind", ["bpe", "unigram"])
@pytest.mark.parametrize("prefix", [True, False])
def test_sentencepiece_vocabularies_are_those_of_sentencepiece(kind, prefix):
    model, metadata = pieces_of(kind, add_dummy_prefix=prefix)
    made = gguf_tokenizer({**metadata, "tokenizer.ggml.add_space_prefix": prefix})
    texts = [text for text in strings() if "\0" not in text]  # which ends a text for sentencepiece
    expected = model.encode(texts)
    assert [made.encode(text, add_special_tokens=False) for text in texts] == expected
    assert [made.decode(ids) for ids in expected] == model.decode(expected)
    begins = [model.bos_id()] if kind == "bpe" else []
    assert made.encode("the") == [*begins, *model.encode("the")]
    again = gguf_tokenizer(gguf_vocabulary(Tokenizer(made.backend, made.special)))
    assert [again.encode(text) for text in strings()[:200]] == [made.encode(text) for text in strings()[:200]]


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"model": "nonsense"}, "tokenizer.ggml.model must be one of gpt2, llama, t5"),
        ({"tokens": ["a", "a"]}, "must be a non-empty list of different strings"),
        ({"token_type": np.ones(3, np.int32)}, "must have a number per token"),
        ({"eos_token_id": 10**6}, "ids of special tokens must be from 0 to "),
        ({"merges": ["a b c"]}, "must be pairs of tokens that join to a token"),
        ({"pre": "nonsense"}, "unknown tokenizer.ggml.pre"),
    ],
)
@pytest.mark.fault("vocabulary that makes no sense", "ids, kinds and merges that do not fit", "`FileError`")
def test_vocabularies_that_make_no_sense_are_refused(change, expected, trained):
    metadata = gguf_vocabulary(Tokenizer(trained["gpt-2"]))
    with pytest.raises(FileError, match=expected):
        gguf_tokenizer({**metadata, **{f"tokenizer.ggml.{key}": value for key, value in change.items()}})


CHAT = """{{ bos_token }}{% for message in messages %}{% if message['role'] == 'bad' %}{{ raise_exception('no such role') }}{% endif %}
<|{{ message.role }}|>{{ message.content | trim }}{{ eos_token }}
{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}{{ tools | tojson }}"""


@pytest.mark.fault("chat template that attacks", "attributes of classes, changes of values, 10^9 turns", "`ValueError`; nothing runs")
def test_chat_templates_run_in_a_sandbox(trained):
    pytest.importorskip("jinja2")
    made = Tokenizer(trained["gpt-2"], {"bos_token": "<s>", "eos_token": "</s>"}, CHAT)
    messages = [{"role": "user", "content": " hi "}]
    text = made.apply_chat_template(messages, tokenize=False, tools=["ä<"])
    assert text == '<s><|user|>hi</s>\n<|assistant|>["ä<"]'
    assert made.apply_chat_template(messages, add_generation_prompt=False, tools=[]) == made.encode("<s><|user|>hi</s>\n[]")
    with pytest.raises(ValueError, match="TemplateError: no such role"):
        made.apply_chat_template([{"role": "bad", "content": ""}], tools=[])
    for attack in (
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
        "{{ cycler.__init__.__globals__.os }}",
        "{% for x in range(10**9) %}{% endfor %}",
    ):
        with pytest.raises(ValueError, match="cannot be applied"):
            render_template(attack, messages=[])
    with pytest.raises(ValueError, match="continue_final_message must be left out"):  # and would not be one of the template's values
        made.apply_chat_template(messages, continue_final_message=True, return_dict=False)
    with pytest.raises(ValueError, match="the model has no chat template"):
        Tokenizer(trained["gpt-2"]).apply_chat_template(messages)


def test_chat_templates_have_the_values_and_filters_of_transformers(trained):
    pytest.importorskip("jinja2")
    source = "{{ 'plain' if tools is none and documents is none else 'tools' }}{{ m | tojson(separators=(',', ':'), sort_keys=True) }}"
    made = Tokenizer(trained["gpt-2"], {}, source.replace("m |", "messages[0] |"))
    text = made.apply_chat_template([{"role": "user", "content": "é"}], tokenize=False)
    assert text == 'plain{"content":"é","role":"user"}'
    made.chat_template = "a {%- generation -%} {{ messages[0].content }} {% endgeneration %} b"
    assert made.apply_chat_template([{"role": "user", "content": "x"}], tokenize=False) == "ax  b"


@pytest.mark.parametrize(("named", "prefix", "fits"), [("GPT2Tokenizer", True, False), ("GPT2Tokenizer", False, True), (None, True, True)])
def test_a_space_before_the_first_word_must_not_be_contradicted(named, prefix, fits, trained, tmp_path):
    trained["gpt-2"].save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": named, "add_prefix_space": prefix}))
    with nullcontext() if fits else pytest.raises(FileError, match=r"\[tokenizer\] add_prefix_space in tokenizer_config.json must agree"):
        folder_tokenizer(tmp_path)


def test_tokenizers_that_mark_the_first_word_keep_their_mark():
    """Llama's tokenizer.json has a Metaspace pre-tokenizer in place of the normalizer."""
    _, metadata = pieces_of("bpe", add_dummy_prefix=True)
    made = gguf_tokenizer(metadata)
    data = json.loads(made.backend.to_str())
    data |= {"normalizer": None, "pre_tokenizer": {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "first", "split": False}}
    other = Tokenizer(tokenizers.Tokenizer.from_str(json.dumps(data)), made.special)
    again = gguf_vocabulary(other)
    assert again["tokenizer.ggml.add_space_prefix"] and again["tokenizer.ggml.add_bos_token"]
    texts = [text for text in strings()[:300] if not text.startswith(" ")]
    assert [gguf_tokenizer(again).encode(text) for text in texts] == [other.encode(text) for text in texts]


def test_special_tokens_of_phi_3_remove_the_space_behind_them():
    """As its tokenizer.json says; a GGUF file has no key for it, and llama.cpp goes by the name of the model."""
    _, metadata = pieces_of("bpe", add_dummy_prefix=True)
    more = ["<|endoftext|>", "<|user|>", "<|end|>"]
    metadata["tokenizer.ggml.tokens"] = [*metadata["tokenizer.ggml.tokens"], *more]
    for key, fill in (("token_type", 3), ("scores", 0)):
        whole = metadata[f"tokenizer.ggml.{key}"]
        metadata[f"tokenizer.ggml.{key}"] = np.concatenate([whole, np.full(3, fill, whole.dtype)])
    plain, made = gguf_tokenizer(metadata), gguf_tokenizer({**metadata, "general.architecture": "phi3"})
    user, end, text = made.backend.token_to_id("<|user|>"), made.backend.token_to_id("<|end|>"), "<|user|>\n the<|end|>\n<s> a"
    expected = [user, *made.encode("the", False), end, made.backend.token_to_id("<s>"), *made.encode(" a", False)]
    assert made.encode(text, False) == expected != plain.encode(text, False)
    again = gguf_vocabulary(Tokenizer(made.backend, made.special), None, "phi3")
    assert again["general.name"] == "Phi-3" == gguf_vocabulary(made, None, "phi3")["general.name"]
    assert gguf_tokenizer({**again, "general.architecture": "phi3"}).encode(text, False) == expected
    with pytest.raises(FileError, match="GGUF must be able to describe how the tokenizer splits"):
        gguf_vocabulary(Tokenizer(made.backend, made.special), None, "llama")


@pytest.mark.parametrize("kind", ["byte level", "bpe", "unigram"])
def test_normalizers_that_gguf_cannot_describe_are_refused(kind, trained):
    backend = trained["qwen2"] if kind == "byte level" else gguf_tokenizer(pieces_of(kind)[1]).backend
    backend, norms = tokenizers.Tokenizer.from_str(backend.to_str()), tokenizers.normalizers
    first = [norms.NFC()] if backend.normalizer is None else [backend.normalizer]
    backend.normalizer = norms.Sequence(first)
    assert gguf_vocabulary(Tokenizer(backend))
    for other in (norms.Lowercase(), norms.NFKC(), norms.Replace(tokenizers.Regex(" {2,}"), " ")):
        backend.normalizer = norms.Sequence([other, *first])
        with pytest.raises(FileError, match="GGUF must be able to describe how the tokenizer splits"):
            gguf_vocabulary(Tokenizer(backend))
