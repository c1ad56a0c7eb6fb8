"""``netcl.models.load`` and ``save``: models from and to Hugging Face folders and GGUF files."""

from __future__ import annotations

import math
import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

from netcl.core.device import queue_of
from netcl.core.dtype import lookup
from netcl.core.errors import OutOfMemoryError, message
from netcl.io.archive import FileError, refusal
from netcl.models.architectures import ARCHITECTURES, architecture_of, hub_names, read_config
from netcl.models.config import ModelConfig
from netcl.models.decoder import CausalLM
from netcl.models.encoder import DualEncoder, Encoder
from netcl.models.folder import HubFolder, write_json, write_tensors
from netcl.models.gguf import GGUFFile, NewTensor, storage_kind, write_gguf
from netcl.models.gguf_config import END_KEYS, check_described, config_from_gguf, metadata_of
from netcl.models.seq2seq import Seq2SeqLM
from netcl.models.tokenizer import Tokenizer, folder_tokenizer, gguf_tokenizer, gguf_vocabulary
from netcl.models.weights import fill, push
from netcl.nn.parameter import OBJECT_BYTES, placed
from netcl.nn.quantized import quantize_model
from netcl.ops.quantized.formats import kind_of

_ROPE_TENSORS = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")
Model = CausalLM | Encoder | DualEncoder | Seq2SeqLM


class _GGUFModel(GGUFFile):
    """A GGUF file with the configuration that its metadata describes; ``shapes`` has no tensors of that configuration."""

    def __init__(self, path: Path):
        super().__init__(path)
        self.config, self.generation = config_from_gguf(self.metadata, self.shapes, self.read), dict[str, Any]()
        self.shapes = {name: shape for name, shape in self.shapes.items() if name not in _ROPE_TENSORS}


def _opened(path: str | os.PathLike[str]) -> HubFolder | _GGUFModel:
    place = Path(path)
    if not place.exists():
        raise FileNotFoundError(f"[models] there is no such file or folder; path={place}")
    return HubFolder(place) if place.is_dir() else _GGUFModel(place)


@contextmanager
def _naming(path: str | os.PathLike[str]) -> Iterator[None]:
    """Name the file in errors that a configuration read from it raises."""
    try:
        yield
    except (ValueError, OutOfMemoryError) as fault:
        if os.fspath(path) in str(fault):
            raise
        kind = FileError if isinstance(fault, ValueError) else OutOfMemoryError
        raise kind(f"{fault}; file={os.fspath(path)}") from fault


def load(path: str | os.PathLike[str], device: Any = "auto", dtype: str | None = None, bits: int | None = None,
         context: int | None = None, device_map: Sequence[Any] | None = None, cache_dtype: str | None = None) -> Any:  # fmt: skip
    """Load a model from a Hugging Face folder or a GGUF file.

    Returns a :class:`CausalLM`, an :class:`Encoder`, a :class:`DualEncoder` for CLIP, or a :class:`Seq2SeqLM` for T5.

    - **path**: a folder with ``config.json`` and safetensors, or a ``.gguf`` file.
    - **device**: where the weights go. **dtype**: their dtype there, by default float32. Quantized matrices of GGUF files stay packed
      in memory if their shapes allow it and no dtype is given.
    - **bits**: 4 or 8 quantize the linear layers, as :func:`netcl.quantize` does.
    - **context**: the most positions that ``generate`` of a decoder uses; by default, and at most, the model's own context.
    - **device_map**: a device for each layer of a decoder too large for one device; the rest goes to ``device``. A layer on ``cpu`` stays
      in the host's memory and is computed there by NumPy; an OpenCL CPU device is usually faster.
    - **cache_dtype**: ``int8`` keeps the keys and values of decoded positions in int8.
    """
    with _naming(path):
        source = _opened(path)
        _, row = architecture_of(source.config)
        config = _config_of(source)
    names = row.gguf_names if isinstance(source, _GGUFModel) else hub_names(row, config)
    itemsize = lookup(dtype or "float32", "load").itemsize
    # A configuration may not ask for more memory than its tensors need; norms and heads leave some room.
    weights = sum(map(math.prod, source.shapes.values()))
    pack, queue = isinstance(source, _GGUFModel) and dtype is None, queue_of(device)
    if (device_map is not None or cache_dtype is not None) and row.kind != "decoder":
        raise ValueError(message("load", "device_map and cache_dtype require a decoder", architecture=config.architecture))
    # Layers that will be packed must not take the room of their values on the device; the host's is only reserved.
    place = queue_of("cpu") if pack or device_map is not None else queue
    room = 2 * itemsize * weights + (len(source.shapes) + 100) * 8 * OBJECT_BYTES
    with _naming(path), placed(place, dtype or "float32", room, blank=True):
        parts = [_clip_config(config.source, name) for name in ("text", "vision")] if row.kind == "pair" else []
        model: Any = {"decoder": CausalLM, "seq2seq": Seq2SeqLM, "pair": DualEncoder}.get(row.kind, Encoder)(config, *parts)
    fill(model, source, names, (*row.ignored, "rotary_emb.inv_freq"), pack)  # frequencies, which older files have
    if bits is not None:
        quantize_model(model, bits)
    if isinstance(model, CausalLM):
        model.cache_dtype = cache_dtype
    if isinstance(model, CausalLM) and device_map is not None:
        model.split(device_map, device)
    elif pack:
        model.to(queue)
    model.make_tokenizer = _tokenizer_maker(source)
    if isinstance(model, CausalLM | Seq2SeqLM):
        model.generation = source.generation
    if isinstance(model, CausalLM):
        model.context = config.context if context is None else min(context, config.context)
    return model.eval()


def _tokenizer_maker(source: HubFolder | _GGUFModel) -> Callable[[], Tokenizer] | None:
    """Return a function that makes the tokenizer at its first call; ``None`` if there is no vocabulary."""
    if isinstance(source, HubFolder):
        return cache(partial(folder_tokenizer, source.path)) if (source.path / "tokenizer.json").is_file() else None
    known = source.metadata.get("tokenizer.ggml.model", "no_vocab") != "no_vocab"
    return cache(partial(gguf_tokenizer, source.metadata)) if known else None


def _config_of(source: HubFolder | _GGUFModel) -> ModelConfig:
    """Return the configuration of a file. If the file has no weights of a pooling layer or separate head, the model gets none."""
    if source.config.get("model_type") == "clip":
        return replace(_clip_config(source.config, "text"), architecture="clip", source=dict(source.config))
    found = read_config(source.config)
    if found.architecture == "t5":  # transformers writes tie_word_embeddings whether or not there is a head
        return replace(found, tied="lm_head.weight" not in source.shapes)
    if found.pooling == "tanh" and not any(name.endswith("pooler.dense.weight") for name in source.shapes):
        return replace(found, pooling="first")
    return found


def _clip_config(config: Mapping[str, Any], name: str) -> ModelConfig:
    given, older = config.get(f"{name}_config"), config.get(f"{name}_config_dict")
    if isinstance(given, dict) and isinstance(older, dict):  # of older files; its values count
        given = {**given, **older}
    if not isinstance(given, dict) or not isinstance(config.get("projection_dim"), int):
        what, size = f"config.json of CLIP must have an object {name}_config and an integer projection_dim", config.get("projection_dim")
        raise refusal("config", what, projection_dim=repr(size), keys=sorted(config))
    return read_config({"hidden_act": "quick_gelu", **given, "model_type": f"clip_{name}_model", "_projection": config["projection_dim"]})


def save(model: Model, path: str | os.PathLike[str], format: str = "hf", kind: str | None = None) -> None:
    """Save a model of this package to a Hugging Face folder or a GGUF file.

    - **format**: ``hf``, a folder that ``transformers`` loads, or ``gguf``, a file for llama.cpp.
    - **kind**: the type of matrices in a GGUF file, such as ``Q8_0`` or ``Q4_K``; by default each keeps its own. Packed weights that keep
      their type are written as they are, others are rounded.
    """
    if format not in ("hf", "gguf"):
        raise ValueError(f"[save] format must be 'hf' or 'gguf'; format={format!r}")
    if any(hasattr(layer, "lora_A") for layer in model.modules()):
        raise ValueError(message("save", "a model with adapters cannot be saved", "call netcl.models.merge(model), or save_adapter"))
    if getattr(model, "merged", False):
        raise ValueError(message("save", "the model's projections must not be merged", "load it again, without merge_projections()"))
    config, row = model.config, ARCHITECTURES[model.config.architecture]
    make = getattr(model, "make_tokenizer", None)
    tokenizer = None if make is None else make()
    if format == "gguf":
        dtype = next(iter(model.parameters())).dtype
        wanted = kind and kind_of(kind, "save").name
        unpacked = {"float16": "F16", "bfloat16": "BF16"}.get(dtype, "F32")
        metadata, extra = metadata_of(config)
        metadata |= {"tokenizer.ggml.model": "no_vocab"} if tokenizer is None else gguf_vocabulary(tokenizer, config.vocab_size, row.gguf)
        ends = model.end_tokens()  # type: ignore[union-attr]
        missing = sorted(ends - {metadata.get(key) for key in END_KEYS})
        free = [key for key in END_KEYS if metadata.get(key) is None]
        if len(missing) > len(free):
            what, remedy = f"a GGUF file must have at most {len(END_KEYS)} end tokens", "use format='hf', or set fewer in model.generation"
            raise refusal("save", what, remedy, end_tokens=sorted(ends))
        metadata |= dict(zip(free, missing, strict=False))
        pushed = push(model, row.gguf_names)
        check_described(config, metadata, {**{name: one.shape for name, one in pushed.items()}, **dict.fromkeys(extra, ())}, extra)
        tensors = {}
        for name, one in pushed.items():
            shape = tuple(n for n in one.shape if n != 1)
            stored = storage_kind(name, shape, wanted or one.kind or unpacked)
            tensors[name] = NewTensor(shape, stored, one.blocks if one.kind == stored.name else one.array)
        tensors |= {name: NewTensor(array.shape, kind_of("F32"), lambda array=array: array) for name, array in extra.items()}  # type: ignore[misc]
        write_gguf(path, metadata, tensors)
        return
    if kind is not None:
        raise ValueError(f"[save] kind= requires format='gguf'; kind={kind!r}")
    folder = Path(path)
    folder.mkdir(parents=True, exist_ok=True)
    dtype = next(iter(model.parameters())).dtype
    described = {key: value for key, value in config.source.items() if key != "torch_dtype"}
    write_tensors(folder, {name: one.array for name, one in push(model, hub_names(row, config)).items()})
    write_json(folder / "config.json", {**described, "architectures": [row.hf_class], "dtype": dtype})
    generation = getattr(model, "generation", {})
    if generation or (folder / "generation_config.json").exists():  # of a model that was here before
        write_json(folder / "generation_config.json", generation)
    if tokenizer is not None:
        tokenizer.save(folder)


def describe_model(path: str | os.PathLike[str]) -> dict[str, str]:
    """Return a description of a file or folder by topic: architecture, sizes, types of tensors."""
    with _naming(path):
        source = _opened(path)
        config, sizes = _config_of(source), {name: math.prod(shape) for name, shape in source.shapes.items()}
    kinds: Counter[str] = Counter()
    for name, size in sizes.items():
        kinds[source.kinds[name]] += size
    windows = sorted({window for window in config.windows if window})
    found = {
        "format": f"GGUF version {source.version}" if isinstance(source, _GGUFModel) else "Hugging Face folder",
        "architecture": f"{config.architecture} ({ARCHITECTURES[config.architecture].hf_class})",
        "parameters": f"{sum(sizes.values()):,} in {len(sizes)} tensors",
        "types": ", ".join(f"{kind} {count:,}" for kind, count in kinds.most_common()),
        "layers": f"{config.layers}, width {config.width}, {config.heads} heads of {config.head_size}, {config.kv_heads} for keys",
        "feed forward": f"width {config.inner}, {config.activation}{', gated' if config.gated else ''}",
        "context": f"{config.context} positions" + (f", windows of {', '.join(map(str, windows))}" if windows else ""),
        "vocabulary": f"{config.vocab_size} tokens",
    }
    if config.experts is not None:
        found["experts"] = f"{config.experts.chosen} of {config.experts.count} per token, width {config.experts.width}"
    ropes = dict.fromkeys(f"{rope.kind}, base {rope.base:g}" for rope in config.ropes if rope is not None)
    if ropes:
        found["rotary positions"] = "; ".join(ropes)
    return found
