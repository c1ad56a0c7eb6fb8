"""Tokenizers of folders (``tokenizer.json``) and GGUF files, both based on the package ``tokenizers``, and chat templates."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np

from netcl.core.errors import message
from netcl.io.archive import refusal, refusing
from netcl.io.packages import optional_module
from netcl.models.folder import read_object, write_json

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_SLASH_REST = _REST.replace(r"[\r\n]*", r"[\r\n/]*")
_UPPER_CASE, _LOWER_CASE = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_GPT2_WORDS = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)"
_LEADING = r"[^\r\n\p{L}\p{N}]?"
_DEEPSEEK_LETTERS = (
    "A-Za-zµÀ-ÖØ-öø-ƺƼ-ƿǄ-ʓʕ-ʯͰ-ͳͶͷͻ-ͽͿΆΈ-ΊΌΎ-ΡΣ-ϵϷ-ҁҊ-ԯԱ-ՖႠ-ჅᎠ-Ᏽᏸ-ᏽᲐ-ᲺᲽ-Ჿᴀ-ᴫᵫ-ᵷᵹ-ᶚḀ-ἕἘ-Ἕἠ-ὅὈ-Ὅὐ-ὗὙὛὝὟ-\u1f7dᾀ-ᾴᾶ-ᾼ\u1fbeῂ-ῄῆ-ῌῐ-\u1fd3ῖ-\u1fdbῠ-Ῥῲ-ῴῶ-ῼℂℇℊ-ℓℕ"
    "ℙ-ℝℤ\u2126ℨ\u212a-ℭℯ-ℴℹℼ-ℿⅅ-ⅉⅎↃↄⰀ-ⱻⱾ-ⳤⳫ-ⳮⳲⳳꙀ-ꙭꚀ-ꚛꜢ-ꝯꝱ-ꞇꞋ-ꞎꭰ-ꮿﬀ-ﬆﬓ-ﬗＡ-Ｚａ-ｚ𐐀-𐑏𐒰-𐓓𐓘-𐓻𐲀-𐲲𐳀-𐳲𑢠-𑣟𞤀-𞥃"
)
#: How byte-level vocabularies split a text first, by the name of the expression; of several, each splits what the one before left.
#: "" is GPT-2's and "digits" single digits and GPT-2's, which the package has built in.
SPLITS: dict[str, str | tuple[str, ...]] = {
    "gpt-2": "",
    "llama-bpe": _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}" + _REST,
    "qwen2": _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}" + _REST,
    "smollm": "digits",
    "tekken": rf"{_LEADING}{_UPPER_CASE}*{_LOWER_CASE}+|{_LEADING}{_UPPER_CASE}+{_LOWER_CASE}*|\p{{N}}" + _SLASH_REST,
    "gpt-4o": rf"{_LEADING}{_UPPER_CASE}*{_LOWER_CASE}+{_CONTRACTIONS}?|"
    rf"{_LEADING}{_UPPER_CASE}+{_LOWER_CASE}*{_CONTRACTIONS}?|\p{{N}}{{1,3}}" + _SLASH_REST,
    "qwen35": _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}" + _REST.replace(r"\p{L}", r"\p{L}\p{M}"),
    "falcon": (r"[\p{P}\$\+<=>\^~\|`]+", _GPT2_WORDS, "[0-9][0-9][0-9]"),
    "default": (r"[\p{P}\$\+<=>\^~\|]+", _GPT2_WORDS, r"\p{N}+", "[0-9][0-9][0-9]"),
    "deepseek-llm": (
        r"[\r\n]",
        rf"\s?[{_DEEPSEEK_LETTERS}]+",
        r"\s?[!-/:-~！-／：-～‘-‟　-。]+",
        r"\s+$",
        "[一-龥ࠀ-一가-\ud7ff]+",
        r"\p{N}+",
    ),
    "deepseek-coder": (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[一-龥ࠀ-一가-\ud7ff]+", r"\p{N}"),
    "deepseek-v3": (
        r"\p{N}{1,3}",
        "[一-龥぀-ゟ゠-ヿ]+",
        r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
        r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    ),
}
#: Names of GGUF's ``tokenizer.ggml.pre`` that mean one of the above.
SAME_SPLITS = {
    "gpt2": "gpt-2", "mpt": "gpt-2", "olmo": "gpt-2", "phi-2": "gpt-2", "jais": "gpt-2", "llama3": "llama-bpe",
    "llama-v3": "llama-bpe", "falcon3": "llama-bpe", "dbrx": "llama-bpe", "smaug-bpe": "llama-bpe", "deepseek-r1-qwen": "qwen2",
    "stablelm2": "qwen2", "megrez": "qwen2", "starcoder": "smollm", "refact": "smollm", "command-r": "smollm", "codeshell": "smollm",
    "llama4": "gpt-4o", "falcon-h1": "llama-bpe", "pixtral": "llama-bpe", "lfm2": "llama-bpe", "exaone4": "gpt-2",
}  # fmt: skip
#: Splits of vocabularies in which a word that is a token is not merged from its parts, and which begin texts with a token unless told.
_WHOLE_WORDS = ("llama-bpe", "llama3", "llama-v3", "falcon3", "falcon-h1", "pixtral", "lfm2", "tekken")
NORMAL, UNKNOWN_TOKEN, CONTROL_TOKENS, USER_DEFINED, UNUSED, BYTE = range(1, 7)  # types of tokens in GGUF files
_GENERATION = re.compile(r"(\{%[-+]?\s*)(end)?generation(\s*[-+]?%\})")  # a tag that marks answers and renders its content
_SPACE = "\N{LOWER ONE EIGHTH BLOCK}"  # what SentencePiece writes for a space
#: Tokens of Phi-3 that keep white space behind them; the other special tokens of its SentencePiece vocabulary remove it, without a key.
_PHI3_PLAIN = ("<unk>", "<s>", "<|endoftext|>")
_PROBE = "It's a PROBE:  x=12345; naïve ＷＩＤＥ ﬁt\n\n\t你好 🙂."  # what normalizers change, and splits divide
#: Parameters of transformers' ``apply_chat_template`` that would otherwise be taken for values of the template, and ignored.
_NOT_VALUES = ("continue_final_message", "chat_template", "padding", "truncation", "max_length", "return_tensors", "return_dict",
               "return_assistant_tokens_mask", "tokenizer_kwargs")  # fmt: skip
_SPECIAL_NAMES = {"bos": "bos", "eos": "eos", "pad": "padding", "unk": "unknown"}  # and their names in GGUF files


def tokenizers_library() -> Any:
    """Import and return the package ``tokenizers``; if it is missing, raises an error with the install command."""
    return optional_module("tokenizers", "tokenizer")


class Tokenizer:
    """Converts texts to token ids and back.

    - **backend**: a ``tokenizers.Tokenizer``.
    - **special**: texts of special tokens: ``bos_token``, ``eos_token``, ``pad_token``, ``unk_token``.
    - **chat_template**: a Jinja template of conversations. **metadata**: ``tokenizer.*`` of the GGUF file it was read from.
    """

    def __init__(self, backend: Any, special: Mapping[str, str] | None = None, chat_template: str = "",
                 metadata: Mapping[str, Any] | None = None):  # fmt: skip
        self.backend, self.special, self.chat_template, self.metadata = backend, dict(special or {}), chat_template, dict(metadata or {})
        ends = [self.special.get("eos_token"), *(self.metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("eot", "eom"))]
        found = [backend.token_to_id(end) if isinstance(end, str) else end for end in ends]
        self.end_tokens = tuple(dict.fromkeys(end for end in found if isinstance(end, int)))

    @property
    def vocab_size(self) -> int:
        """The number of tokens, added ones included."""
        return self.backend.get_vocab_size()

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Return the ids of a text; ``add_special_tokens`` includes the special tokens that the model expects around it."""
        return self.backend.encode(text, add_special_tokens=add_special_tokens).ids

    def decode(self, ids: Iterable[int], skip_special_tokens: bool = True) -> str:
        """Return the text of ids, by default without special tokens."""
        return self.backend.decode([int(i) for i in ids], skip_special_tokens=skip_special_tokens)

    def apply_chat_template(self, messages: Sequence[Mapping[str, Any]], tokenize: bool = True, add_generation_prompt: bool = True,
                            **values: Any) -> Any:  # fmt: skip
        """Return a conversation as ids, or with ``tokenize=False`` as text, in the form the model was trained on.

        Messages are ``{"role": "user", "content": "..."}``. The template runs in Jinja's sandbox; other ``values`` are passed to it.
        """
        if not self.chat_template:
            raise ValueError(message("apply_chat_template", "the model has no chat template", "write the prompt as a text"))
        if wrong := [name for name in _NOT_VALUES if values.get(name)]:
            raise ValueError(message("apply_chat_template", f"{', '.join(wrong)} must be left out", "other values are the template's"))
        given: dict[str, object] = {"tools": None, "documents": None, **dict.fromkeys([f"{name}_token" for name in _SPECIAL_NAMES], "")}
        text = render_template(self.chat_template, messages=[dict(m) for m in messages], add_generation_prompt=add_generation_prompt,
                               **{**given, **self.special, **values})  # fmt: skip
        return self.encode(text, add_special_tokens=False) if tokenize else text

    def save(self, folder: Path) -> None:
        """Write ``tokenizer.json`` and ``tokenizer_config.json``; files of another tokenizer that would override them are removed."""
        for name in ("special_tokens_map.json", "chat_template.jinja"):
            (folder / name).unlink(missing_ok=True)
        write_json(folder / "tokenizer.json", json.loads(self.backend.to_str()))
        template = {"chat_template": self.chat_template} if self.chat_template else {}
        write_json(folder / "tokenizer_config.json", {"tokenizer_class": "PreTrainedTokenizerFast", **self.special, **template})


def render_template(source: str, **values: Any) -> str:
    """Render a chat template with ``values`` in Jinja's sandbox."""
    jinja2, sandbox = (optional_module(name, "apply_chat_template") for name in ("jinja2", "jinja2.sandbox"))

    def raise_exception(text: str) -> None:
        raise jinja2.TemplateError(text)

    room = sandbox.ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"])
    room.filters["tojson"] = _as_json
    room.globals |= {"raise_exception": raise_exception, "strftime_now": lambda form: datetime.now().strftime(form)}
    try:
        source = _GENERATION.sub(lambda tag: f"{tag[1]}{'endif' if tag[2] else 'if true'}{tag[3]}", source)
        return room.from_string(source).render(**values)
    except (jinja2.TemplateError, TypeError, ValueError, ArithmeticError, LookupError, AttributeError, RecursionError) as fault:
        what = "the chat template cannot be applied to these messages"
        raise ValueError(message("apply_chat_template", what, reason=f"{type(fault).__name__}: {fault}")) from fault


def _as_json(
    value: object, ensure_ascii: bool = False, indent: int | str | None = None, separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:  # fmt: skip
    """Return a value as JSON: the filter ``tojson`` of templates, with the parameters of transformers."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


# ---- folders


def folder_tokenizer(folder: Path) -> Tokenizer:
    """Return the tokenizer of a Hugging Face folder."""
    library, path = tokenizers_library(), folder / "tokenizer.json"
    data = read_object(path, "tokenizer")
    data |= {"truncation": None, "padding": None}
    with refusing("tokenizer", path, (Exception,)):  # the package raises no class of its own
        backend = library.Tokenizer.from_str(json.dumps(data))
    settings = read_object(folder / "tokenizer_config.json", "tokenizer") if (folder / "tokenizer_config.json").is_file() else {}
    if "added_tokens_decoder" not in settings and (folder / "special_tokens_map.json").is_file():  # of older versions of transformers
        settings |= read_object(folder / "special_tokens_map.json", "tokenizer")
    # Classes of byte-level vocabularies and that of LLaMA build what precedes the first word from the settings, and not from the file.
    class_name, byte_level = str(settings.get("tokenizer_class") or "PreTrained"), '"ByteLevel"' in json.dumps(data.get("pre_tokenizer"))
    used = not class_name.startswith(("PreTrained", "Tokenizers")) and byte_level != class_name.startswith("Llama")
    begins = "".join(backend.encode("a", add_special_tokens=False).tokens).startswith(("\u0120", _SPACE))
    if used and settings.get("add_prefix_space") not in (None, begins):
        what, remedy = "add_prefix_space in tokenizer_config.json must agree with tokenizer.json", "save the tokenizer with transformers"
        raise refusal("tokenizer", what, remedy, file=path, add_prefix_space=settings["add_prefix_space"], tokenizer_class=class_name)
    template = settings.get("chat_template")
    if (folder / "chat_template.jinja").is_file():
        template = (folder / "chat_template.jinja").read_text(encoding="utf-8")
    if isinstance(template, list):  # several, by name
        named = {part.get("name"): part.get("template") for part in template if isinstance(part, dict)}
        template = named.get("default")
    given = {key: settings.get(key) for key in (f"{name}_token" for name in _SPECIAL_NAMES)}
    texts = {key: value.get("content") if isinstance(value, dict) else value for key, value in given.items()}
    special = {key: text for key, text in texts.items() if text and isinstance(text, str)}
    return Tokenizer(backend, special, template if isinstance(template, str) else "")


# ---- GGUF


def gguf_tokenizer(metadata: Mapping[str, Any]) -> Tokenizer:
    """Return the tokenizer of a GGUF file: ``gpt2`` (byte-level BPE), ``llama`` (SentencePiece BPE) or ``t5`` (SentencePiece unigram)."""
    own = {key: value for key, value in metadata.items() if key.startswith("tokenizer.")}
    kind, tokens = own.get("tokenizer.ggml.model"), own.get("tokenizer.ggml.tokens")
    makers = {"gpt2": _byte_level, "llama": _sentencepiece, "t5": _unigram}
    if kind not in makers:
        raise refusal("tokenizer", f"tokenizer.ggml.model must be one of {', '.join(makers)}", given=repr(kind))
    if not isinstance(tokens, list) or not tokens or not all(isinstance(token, str) for token in tokens) or len(set(tokens)) != len(tokens):
        raise refusal("tokenizer", "tokenizer.ggml.tokens must be a non-empty list of different strings", given=f"{tokens!r:.80}")
    types = own.get("tokenizer.ggml.token_type", np.full(len(tokens), NORMAL))
    if not isinstance(types, np.ndarray) or len(types) != len(tokens):
        raise refusal("tokenizer", "tokenizer.ggml.token_type must have a number per token", tokens=len(tokens), given=f"{types!r:.80}")
    backend = makers[kind](tokens, types, own)
    library, arch = tokenizers_library(), metadata.get("general.architecture")
    for wanted, add in ((USER_DEFINED, backend.add_tokens), (CONTROL_TOKENS, backend.add_special_tokens)):
        added = [(tokens[i], _strips_space(arch, kind, tokens[i])) for i in np.flatnonzero(types == wanted) if tokens[i]]
        add([library.AddedToken(token, normalized=False, special=wanted == CONTROL_TOKENS, rstrip=strips) for token, strips in added])
    ids = {name: own.get(f"tokenizer.ggml.{key}_token_id") for name, key in _SPECIAL_NAMES.items()}
    if any(i is not None and not (isinstance(i, int) and 0 <= i < len(tokens)) for i in ids.values()):
        raise refusal("tokenizer", f"ids of special tokens must be from 0 to {len(tokens) - 1}", ids=ids)
    special = {f"{name}_token": tokens[i] for name, i in ids.items() if i is not None}
    begins = kind == "llama" or (kind == "gpt2" and own.get("tokenizer.ggml.pre") in _WHOLE_WORDS)  # unless the metadata has a key
    surrounds = {"bos": own.get("tokenizer.ggml.add_bos_token", begins), "eos": own.get("tokenizer.ggml.add_eos_token", kind == "t5")}
    begin, end = ([special[f"{name}_token"]] if added and f"{name}_token" in special else [] for name, added in surrounds.items())
    if begin or end:
        used = [(token, backend.token_to_id(token)) for token in dict.fromkeys([*begin, *end])]
        backend.post_processor = library.processors.TemplateProcessing(single=[*begin, "$A", *end], special_tokens=used)
    template = own.get("tokenizer.chat_template", "")
    return Tokenizer(backend, special, template if isinstance(template, str) else "", own)


def _strips_space(arch: object, kind: object, token: str) -> bool:
    """Whether a special token removes the white space behind it."""
    return arch == "phi3" and kind == "llama" and token not in _PHI3_PLAIN


def _byte_level(tokens: list[str], types: np.ndarray, own: Mapping[str, Any]) -> Any:
    library = tokenizers_library()
    merges = own.get("tokenizer.ggml.merges")
    vocabulary = {token: i for i, token in enumerate(tokens)}
    pairs = [tuple(merge.split(" ")) for merge in merges] if isinstance(merges, list) and all(isinstance(m, str) for m in merges) else None
    wrong = [pair for pair in pairs or () if len(pair) != 2 or not {*pair, "".join(pair)} <= vocabulary.keys()][:3]
    if pairs is None or wrong:
        raise refusal("tokenizer", "tokenizer.ggml.merges must be pairs of tokens that join to a token", given=wrong or type(merges))
    name = own.get("tokenizer.ggml.pre", "default")
    split = SPLITS.get(SAME_SPLITS.get(name, name))
    if split is None:
        known = ", ".join([*SPLITS, *SAME_SPLITS])
        raise refusal("tokenizer", "unknown tokenizer.ggml.pre", f"known are {known}", given=repr(name))
    backend = library.Tokenizer(library.models.BPE(vocabulary, pairs, ignore_merges=name in _WHOLE_WORDS))
    before = library.pre_tokenizers
    level = before.ByteLevel(add_prefix_space=False, use_regex=split in ("", "digits"))
    parts = (split,) if isinstance(split, str) else split
    steps = [] if split == "" else [before.Digits(individual_digits=True)] if split == "digits" else [
        before.Split(library.Regex(part), "isolated") for part in parts]  # fmt: skip
    backend.pre_tokenizer = before.Sequence([*steps, level])
    backend.decoder = library.decoders.ByteLevel()
    return backend


def _piece_scores(own: Mapping[str, Any], count: int) -> np.ndarray:
    scores = own.get("tokenizer.ggml.scores")
    if not isinstance(scores, np.ndarray) or len(scores) != count or not np.isfinite(scores.astype(np.float64)).all():
        raise refusal("tokenizer", "tokenizer.ggml.scores must have a finite number for every token", tokens=count, given=f"{scores!r:.80}")
    return scores.astype(np.float64)


def _surround(backend: Any, own: Mapping[str, Any], normalizers: Sequence[Any] = ()) -> Any:
    """Add SentencePiece's marks for spaces before encoding, and remove marks and byte tokens when decoding; returns ``backend``."""
    library = tokenizers_library()
    prefix = bool(own.get("tokenizer.ggml.add_space_prefix", True))
    norms, decoders = library.normalizers, library.decoders
    first = [norms.Prepend(_SPACE)] if prefix else []
    backend.normalizer = norms.Sequence([*normalizers, *first, norms.Replace(" ", _SPACE)])
    strip = [decoders.Strip(" ", 1, 0)] if prefix else []
    backend.decoder = decoders.Sequence([decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), *strip])
    return backend


def _sentencepiece(tokens: list[str], types: np.ndarray, own: Mapping[str, Any]) -> Any:
    library, scores = tokenizers_library(), _piece_scores(own, len(tokens))
    vocabulary = {token: i for i, token in enumerate(tokens)}
    normal = {tokens[i] for i in np.flatnonzero((types == NORMAL) | (types == USER_DEFINED))}
    parts = ((i, tokens[i][:at], tokens[i][at:]) for i in np.flatnonzero(types == NORMAL) for at in range(1, len(tokens[i])))
    found = ((-scores[i], vocabulary[a], vocabulary[b], (a, b)) for i, a, b in parts if a in normal and b in normal)
    merges = [pair for *_, pair in sorted(found)]
    unknown = next((tokens[i] for i in np.flatnonzero(types == UNKNOWN_TOKEN)), None)
    model = library.models.BPE(vocabulary, merges, unk_token=unknown, fuse_unk=True, byte_fallback=True)
    return _surround(library.Tokenizer(model), own)


def _unigram(tokens: list[str], types: np.ndarray, own: Mapping[str, Any]) -> Any:
    library, scores = tokenizers_library(), _piece_scores(own, len(tokens))
    unknown = next((int(i) for i in np.flatnonzero(types == UNKNOWN_TOKEN)), None)
    fallback = bool((types == BYTE).any())
    pieces = list(zip(tokens, scores.tolist(), strict=True))
    backend = library.Tokenizer(library.models.Unigram(pieces, unknown, fallback))
    norms, charsmap = library.normalizers, own.get("tokenizer.ggml.precompiled_charsmap")
    first = [norms.Precompiled(charsmap.tobytes())] if isinstance(charsmap, np.ndarray) and charsmap.size else []
    if own.get("tokenizer.ggml.remove_extra_whitespaces", False):
        first += [norms.Strip(), norms.Replace(library.Regex(" {2,}"), " ")]
    return _surround(backend, own, first)


def gguf_vocabulary(tokenizer: Tokenizer, rows: int | None = None, arch: str = "") -> dict[str, Any]:
    """Return a tokenizer as metadata of a GGUF file for an architecture; raises if the format cannot describe it.

    The list of tokens is padded to the ``rows`` of the model's embedding.
    """
    if tokenizer.metadata:
        own = tokenizer.metadata
        return {**own, **_phi3_name(own["tokenizer.ggml.model"], own["tokenizer.ggml.tokens"], arch)}
    data = json.loads(tokenizer.backend.to_str())
    model, text = data["model"], json.dumps(data.get("pre_tokenizer"))
    kind = {"BPE": "gpt2" if '"ByteLevel"' in text else "llama", "Unigram": "t5"}.get(model["type"])
    if kind is None or (kind == "llama" and not model.get("byte_fallback")):
        raise refusal("save", "GGUF requires BPE (byte-level or with byte_fallback) or Unigram", "use format='hf'", model=model["type"])
    listed = dict(model["vocab"]) if model["type"] == "BPE" else {piece: i for i, (piece, _) in enumerate(model["vocab"])}
    added = {row["content"]: CONTROL_TOKENS if row["special"] else USER_DEFINED for row in data["added_tokens"]}
    unknown = model.get("unk_token") if model.get("unk_id") is None else model["vocab"][model["unk_id"]][0]
    listed |= {row["content"]: row["id"] for row in data["added_tokens"]}
    size = max(max(listed.values()) + 1, rows or 0)
    if rows is not None and size > rows:
        remedy = "use format='hf', or remove the added tokens"
        raise refusal("save", "GGUF requires an embedding for every token of the tokenizer", remedy, tokens=size, rows=rows)
    tokens, types = [f"[PAD{i}]" for i in range(size)], np.full(size, UNUSED, np.int32)
    for token, i in listed.items():
        byte = len(token) == 6 and token.startswith("<0x") and token.endswith(">") and kind != "gpt2"
        tokens[i], types[i] = token, added.get(token, BYTE if byte else UNKNOWN_TOKEN if token == unknown else NORMAL)
    found: dict[str, Any] = {"model": kind, "tokens": tokens, "token_type": types}
    if kind == "gpt2":
        used = re.findall(r'"Regex": "((?:[^"\\]|\\.)*)"', text)
        splits = {name: [split] if isinstance(split, str) else split for name, split in SPLITS.items()}
        names = [name for name, parts in splits.items() if used == [json.dumps(part)[1:-1] for part in parts]]
        found["pre"] = names[-1] if names else "smollm" if '"Digits"' in text else "gpt-2"
        if not names and '"Split"' in text:
            raise refusal("save", "GGUF does not support the split patterns of this tokenizer", "use format='hf'", patterns=used)
    pairs = [tuple(merge.split(" ", 1)) if isinstance(merge, str) else tuple(merge) for merge in model.get("merges", [])]
    if kind == "gpt2":
        found["merges"] = [" ".join(pair) for pair in pairs]
    else:
        ranks = {"".join(pair): -float(rank) for rank, pair in reversed(list(enumerate(pairs)))}
        scores = {piece: score for piece, score in model["vocab"]} if kind == "t5" else ranks
        found["scores"] = np.array([scores.get(token, -float(len(pairs) + 1)) for token in tokens], np.float32)
        first = "".join(tokenizer.backend.encode("a", add_special_tokens=False).tokens)
        found["add_space_prefix"] = first.startswith(_SPACE)
    for name, key in _SPECIAL_NAMES.items():
        if tokenizer.special.get(f"{name}_token") in listed:
            found[f"{key}_token_id"] = listed[tokenizer.special[f"{name}_token"]]
    ids, plain = (tokenizer.encode("a", add_special_tokens=added) for added in (True, False))
    found["add_bos_token"] = ids[:1] == [found.get("bos_token_id")]
    found["add_eos_token"] = ids[-1:] == [found.get("eos_token_id")] and ids != plain
    template = {"tokenizer.chat_template": tokenizer.chat_template} if tokenizer.chat_template else {}
    whole = {**{f"tokenizer.ggml.{key}": value for key, value in found.items()}, **template, **_phi3_name(kind, tokens, arch)}
    _check_split(tokenizer, data["added_tokens"], whole, arch)
    return whole


def _check_split(tokenizer: Tokenizer, added: Iterable[Mapping[str, object]], whole: Mapping[str, object], arch: str) -> None:
    """Raise unless a GGUF file with the metadata ``whole`` splits texts as the tokenizer does, which has the tokens ``added``."""
    rules = {str(one["content"]): (one["lstrip"], one["rstrip"], one["single_word"]) for one in added}
    kind, backend = whole["tokenizer.ggml.model"], tokenizer.backend
    lost = [token for token, rule in rules.items() if rule != (False, _strips_space(arch, kind, token), False)]
    if lost or gguf_tokenizer(whole).encode(_PROBE, False) != tokenizer.encode(_PROBE, False):
        what = "GGUF must be able to describe how the tokenizer splits a text"
        given = {"normalizer": backend.normalizer, "pre_tokenizer": backend.pre_tokenizer, "tokens_with_own_rules": lost[:3]}
        raise refusal("save", what, "use format='hf'", **given)


def _phi3_name(kind: object, tokens: Iterable[str], arch: str) -> dict[str, str]:
    """Return the name in a file of Phi-3, by which llama.cpp decides that its special tokens remove white space."""
    return {"general.name": "Phi-3"} if _strips_space(arch, kind, "</s>") and {"</s>", *_PHI3_PLAIN} <= set(tokens) else {}
