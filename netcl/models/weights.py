"""Copies weights from files to modules with the names and ops of :mod:`netcl.models.architectures`, and back with inverted ops."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any, NamedTuple, cast

import numpy as np

from netcl.core.errors import message, some
from netcl.io import tree
from netcl.io.archive import refusal
from netcl.models.config import Experts, ModelConfig
from netcl.models.folder import HubFolder
from netcl.models.gguf import GGUFFile
from netcl.nn.embedding import Embedding
from netcl.nn.linear import Linear
from netcl.nn.quantized import QuantizedEmbedding, QuantizedLinear
from netcl.ops.quantized.formats import kind_of
from netcl.ops.quantized.layout import record_size

WeightSource = HubFolder | GGUFFile
_NO_WEIGHTS = re.compile(r"F[468](_|$)|[IUC]\d|u?int|BOOL")  # types of tensors
_NUMBERED = re.compile(r"\b(layers|experts)\.(\d+)\b")


class Origin(NamedTuple):
    """Where a file holds a parameter: the tensor's name, the ops that convert the tensor to the parameter, and the expert's index."""

    name: str
    ops: tuple[str, ...]
    expert: int


def origin_of(parameter: str, names: Mapping[str, str]) -> Origin | None:
    """Return the origin of a parameter by a table of names; ``None`` if the table has no such parameter."""
    numbers = dict(_NUMBERED.findall(parameter))
    key = _NUMBERED.sub(lambda found: f"{found[1]}.{{{'i' if found[1] == 'layers' else 'e'}}}", parameter)
    stem, _, suffix = key.rpartition(".")
    if key in names:
        name, *ops = names[key].split()
    elif stem in names:
        name, *ops = names[stem].split()
        name += f".{suffix}"
    else:
        return None
    return Origin(name.format(i=numbers.get("layers"), e=numbers.get("experts")), tuple(ops), int(numbers.get("experts", 0)))


def _fused_rows(config: ModelConfig, part: str) -> tuple[slice, int]:
    """Return the rows of one part of a fused tensor, as a slice, and the number of all rows."""
    if part in ("gate", "up"):
        return slice(0, config.inner) if part == "gate" else slice(config.inner, 2 * config.inner), 2 * config.inner
    queries, keys = config.heads * config.head_size, config.kv_heads * config.head_size
    begin, end = {"q": (0, queries), "k": (queries, queries + keys), "v": (queries + keys, queries + 2 * keys)}[part]
    return slice(begin, end), queries + 2 * keys


def _rotary_order(array: np.ndarray, op: str, config: ModelConfig, inverse: bool = False) -> np.ndarray:
    """Permute rows of queries or keys from llama.cpp's order (pairs side by side) to Hugging Face's (halves); ``inverse`` permutes back."""
    heads = config.heads if op == "rq" else config.kv_heads
    if array.shape[:1] != (heads * config.head_size,):  # which the check of the shape reports
        return array
    shape = (heads, 2, -1) if inverse else (heads, -1, 2)
    return array.reshape(*shape, *array.shape[1:]).swapaxes(1, 2).reshape(array.shape)


def _rows_taken(array: np.ndarray, op: str, origin: Origin, config: ModelConfig, source: WeightSource) -> np.ndarray:
    """Apply an op that selects or permutes rows; the array may hold the bytes of packed rows. Raises if there are more or fewer."""
    if op in ("rq", "rk"):
        return _rotary_order(array, op, config)
    experts = op == "e"
    rows, count = (slice(origin.expert, origin.expert + 1), cast(Experts, config.experts).count) if experts else _fused_rows(config, op)
    if experts and count == 1 and array.ndim < 3:
        array = array[None]  # GGUF drops axes of length 1
    if not array.shape or array.shape[0] != count:
        what = f"a tensor must have the {'experts' if experts else 'rows'} that the configuration gives it"
        raise refusal("models", what, file=source.path, tensor=origin.name, given=array.shape[:1], expected=count)
    return array[rows][0] if experts else array[rows]


def pull(source: WeightSource, origin: Origin, config: ModelConfig, shape: tuple[int, ...]) -> np.ndarray:
    """Read a parameter from a file, with the ops of its origin applied; raises unless it has ``shape``."""
    array = source.read(origin.name)
    for op in origin.ops:
        if op == "T":
            array = array.T
        elif op == "+1":
            array = array.astype(np.float32) + np.float32(1)
        else:
            array = _rows_taken(array, op, origin, config, source)
    if [n for n in array.shape if n != 1] != [n for n in shape if n != 1]:  # GGUF drops axes of length 1
        what = "a tensor must have the shape that the configuration gives it"
        raise refusal("models", what, file=source.path, tensor=origin.name, shape=array.shape, expected=shape)
    return np.ascontiguousarray(array).reshape(shape)


#: What a file may leave out of our names, and what it may put in front of them: heads and base models are saved under either.
_SPELLINGS = (("", ""), ("transformer.", ""), ("", "bert."), ("", "roberta."), ("", "vit."))


def fill(model: Any, source: WeightSource, names: Mapping[str, str], ignored: Iterable[str], pack: bool = False) -> None:
    """Load every parameter of a model. Missing tensors raise, as do unexpected tensors not ``ignored``. ``pack`` keeps matrices packed."""
    shapes, parameters = source.shapes, dict(model.named_parameters())
    trials = [{name: _located(name, names, *spelling) for name in parameters} for spelling in _SPELLINGS]
    origins = min(trials, key=lambda trial: len({origin.name for origin in trial.values()} - set(shapes)))
    used = {origin.name for origin in origins.values()}
    missing, tied = used - set(shapes), ("lm_head.weight", "output.weight") if model.config.tied else ()
    left = {name for name in set(shapes) - used - set(tied) if not any(word in name for word in ignored)}
    if wrong := {name: kind for name, kind in source.kinds.items() if name in used | left and _NO_WEIGHTS.match(kind)}:
        what, remedy = "weights must be floating-point numbers of 16 bits or more", "load a model that is not quantized, or a GGUF file"
        raise refusal("models", what, remedy, file=source.path, tensors=dict(sorted(wrong.items())[:3]))
    if missing or left:
        parts = {key: f"[{some(sorted(found))}]" for key, found in (("missing", missing), ("unexpected", left)) if found}
        raise refusal("models", "the file must have exactly the tensors of its configuration", file=source.path, **parts)
    for head in set(tied) & set(shapes):
        table = origins["embed_tokens.weight"].name
        if shapes[head] != shapes[table] or not np.array_equal(source.read(head), source.read(table)):
            what, remedy = "a head tied to the embedding must equal it", "set tie_word_embeddings to false in config.json"
            raise refusal("models", what, remedy, file=source.path, head=head, embedding=table)
    for name, parameter in parameters.items():
        if not (pack and _put_packed(model, name, source, origins[name])):
            parameter.write(pull(source, origins[name], model.part_config(name), parameter.shape))


_ROW_OPS = frozenset("rq rk q k v gate up e".split())  # those that take or reorder rows, which packed rows can follow


def _put_packed(model: Any, name: str, source: Any, origin: Origin) -> bool:
    """Replace the layer of a parameter by a packed layer with the file's blocks. Returns False if the weights cannot stay packed."""
    path, _, last = name.rpartition(".")
    layer, kind = model.get_submodule(path), source.kinds[origin.name]
    if last != "weight" or type(layer) not in (Linear, Embedding) or kind in ("F32", "F16") or not _ROW_OPS.issuperset(origin.ops):
        return False
    (rows, columns), config = layer.weight.shape, model.part_config(name)
    if columns % record_size(kind_of(kind))[0]:
        return False
    blocks = source.packed(origin.name).reshape(*source.shapes[origin.name][:-1], -1)
    for op in origin.ops:
        blocks = _rows_taken(blocks, op, origin, config, source)
    if blocks.shape[0] != rows:
        what = "a tensor must have the shape that the configuration gives it"
        raise refusal("models", what, file=source.path, tensor=origin.name, rows=blocks.shape[0], expected=rows)
    packed: Any
    if isinstance(layer, Linear):
        packed = QuantizedLinear(columns, rows, False, kind)
        packed.bias = layer.bias
    else:
        packed = QuantizedEmbedding(rows, columns, kind)
    packed.load_blocks(np.ascontiguousarray(blocks))
    tied = [(owner, key) for owner in model.modules() for key, child in owner.named_children()
            if child is not layer and getattr(child, "weight", None) is layer.weight]  # fmt: skip
    for owner, key in tied:
        head = QuantizedLinear(columns, rows, False, kind)
        head.weight = packed.weight
        setattr(owner, key, head)
    parent, _, key = path.rpartition(".")
    setattr(model.get_submodule(parent), key, packed)
    return True


def _located(parameter: str, names: Mapping[str, str], without: str = "", before: str = "") -> Origin:
    origin = origin_of(parameter, names)
    if origin is None:
        raise ValueError(message("models", "the table of names has no entry for a parameter", name=parameter))
    return origin._replace(name=before + origin.name.removeprefix(without))


def host_array(tensor: Any) -> np.ndarray:
    """Return the values of a parameter, or the dequantized weight of a packed layer; bfloat16 arrays have the dtype of ``ml_dtypes``."""
    if isinstance(tensor, QuantizedLinear | QuantizedEmbedding):
        return tensor.dequantized().to_host()
    return tree.from_bits(tree.host_bits(tensor), tensor.dtype)


class Pushed(NamedTuple):
    """A tensor of a model's file: its shape, a function that returns its array, and the type of its blocks if it is packed.

    ``blocks()`` then returns the blocks as a uint8 array.
    """

    shape: tuple[int, ...]
    array: Callable[[], np.ndarray]
    kind: str
    blocks: Callable[[], np.ndarray]


def push(model: Any, names: Mapping[str, str]) -> dict[str, Pushed]:
    """Map the name of each tensor in a model's file to what the model has for it."""
    groups: dict[str, list[tuple[Origin, str, Any]]] = {}
    packed = {f"{path}.weight": layer for path, layer in model.named_modules() if isinstance(layer, QuantizedLinear | QuantizedEmbedding)}
    if model.config.tied:
        packed.pop("lm_head.weight", None)
    for name, parameter in {**dict(model.named_parameters()), **packed}.items():
        origin = _located(name, names)
        groups.setdefault(origin.name, []).append((origin, name, parameter))
    arrays, blocks = partial(_assembled, model, host_array), partial(_assembled, model, lambda layer: layer.blocks())
    made = {}
    for name, parts in groups.items():
        kinds = {getattr(layer, "kind", "") for _, _, layer in parts}
        packs = len(kinds) == 1 and not {"T", "+1"}.intersection(*[origin.ops for origin, _, _ in parts])
        made[name] = Pushed(_whole_shape(parts), partial(arrays, parts), kinds.pop() if packs else "", partial(blocks, parts))
    return made


def _whole_shape(parts: list[tuple[Origin, str, Any]]) -> tuple[int, ...]:
    origin, ops = parts[0][0], parts[0][0].ops
    shapes = [p.matrix if isinstance(p, QuantizedLinear | QuantizedEmbedding) else tuple(p.shape) for _, _, p in parts]
    if "e" in ops:
        return (len(parts), *shapes[0])
    shape = (sum(n for n, *_ in shapes), *shapes[0][1:]) if len(parts) > 1 else shapes[0]
    return shape[::-1] if "T" in origin.ops else shape


def _assembled(model: Any, read: Callable[[Any], np.ndarray], parts: list[tuple[Origin, str, Any]]) -> np.ndarray:
    made = []
    for origin, name, parameter in parts:
        config, array = model.part_config(name), read(parameter)
        begin = 0
        for op in reversed(origin.ops):
            if op in ("rq", "rk"):
                array = _rotary_order(array, op, config, inverse=True)
            elif op == "+1":
                array = (array.astype(np.float32) - np.float32(1)).astype(array.dtype)
            elif op == "e":
                begin, array = origin.expert, array[None]
            elif op != "T":
                begin = _fused_rows(config, op)[0].start
        made.append((begin, array))
    whole = np.concatenate([array for _, array in sorted(made, key=lambda part: part[0])]) if len(made) > 1 else made[0][1]
    return np.asarray(whole.T if "T" in parts[0][0].ops else whole, order="C")  # ascontiguousarray would give a scalar an axis
