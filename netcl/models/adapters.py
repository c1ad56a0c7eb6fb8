"""LoRA and DoRA: small trainable matrices beside frozen linear layers, saved and loaded in PEFT's layout."""

from __future__ import annotations

import math
import os
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

import netcl.autograd as ag
from netcl import nn
from netcl.core.errors import ShapeError, message
from netcl.core.tensor import Tensor
from netcl.io.archive import refusal, refusing
from netcl.io.state import load_safetensors, save_safetensors
from netcl.models.architectures import ARCHITECTURES
from netcl.models.folder import read_object, write_json
from netcl.models.weights import host_array, origin_of
from netcl.nn.parameter import empty, placed
from netcl.nn.quantized import ModelT

#: The layers that get adapters unless others are named.
TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
_CONFIG, _TENSORS, _PREFIX = "adapter_config.json", "adapter_model.safetensors", "base_model.model."
#: Settings of PEFT that change what an adapter computes and are not supported.
_UNSUPPORTED = ("modules_to_save", "lora_bias", "layer_replication", "alora_invocation_tokens", "target_parameters", "use_qalora",
                "trainable_token_indices", "use_bdlora", "arrow_config", "kasa_config", "monteclora_config", "velora_config")  # fmt: skip

_SAFE_STARTS = (None, True, False, "gaussian", "eva", "orthogonal")  # of init_lora_weights; others change the base model, too


class LoRALinear(nn.Module):
    """A ``Linear`` or ``QuantizedLinear`` with an adapter: ``y = base(x) + alpha / rank * x A^T B^T``; ``B`` starts as zeros.

    ``dora`` scales the rows of ``W + alpha / rank * B A`` to learned norms, ``lora_magnitude_vector``. ``W`` is the weight of ``base``; the
    norms start as the row norms of ``W``. Parameters: ``lora_A`` ``(rank, in_features)``, ``lora_B`` ``(out_features, rank)``.
    """

    def __init__(self, base: Any, rank: int = 8, alpha: float = 16, dropout: float = 0.0, dora: bool = False):
        super().__init__()
        self.in_features, self.out_features = base.in_features, base.out_features
        self.base, self.rank, self.scale, self.dropout = base, rank, alpha / rank, dropout
        with placed(base.queue, "float32"):
            self.lora_A, self.lora_B = empty((rank, self.in_features)), empty((self.out_features, rank))
            nn.init.layer_(self.lora_A, None)
            nn.init.zeros_(self.lora_B)
            self.lora_magnitude_vector = nn.Parameter(np.linalg.norm(base_matrix(base), axis=1)) if dora else None

    def forward(self, x: Tensor) -> Tensor:
        out, low = self.base(x), ag.dropout(ag.cast(x, "float32"), self.dropout, self.training)
        added = ag.linear(ag.mul(ag.linear(low, self.lora_A), self.scale), self.lora_B)
        if self.lora_magnitude_vector is None:
            return ag.add(out, ag.cast(added, out.dtype))
        with ag.no_grad():  # DoRA takes the lengths as constants: section 4.3 of its paper
            base = self.base.dequantized() if hasattr(self.base, "dequantized") else self.base.weight
            whole = ag.add(ag.cast(base, "float32"), ag.mul(ag.matmul(self.lora_B, self.lora_A), self.scale))
            lengths = ag.sqrt(ag.sum(ag.mul(whole, whole), axis=1))
        bias = self.base.bias
        plain = ag.cast(out if bias is None else ag.sub(out, bias), "float32")
        made = ag.cast(ag.mul(ag.add(plain, ag.cast(added, "float32")), ag.div(self.lora_magnitude_vector, lengths)), out.dtype)
        return made if bias is None else ag.add(made, bias)


def base_matrix(layer: Any) -> np.ndarray:
    """Return the weights of a linear layer, packed or not, as a float32 array."""
    return (layer.dequantized().to_host() if hasattr(layer, "dequantized") else host_array(layer.weight)).astype(np.float32)


def adapters_of(model: nn.Module) -> dict[str, LoRALinear]:
    """Return the layers of a model that have an adapter, by path."""
    return {path: layer for path, layer in model.named_modules() if isinstance(layer, LoRALinear)}


def lora(model: ModelT, rank: int = 8, alpha: float = 16, targets: Sequence[str] | None = None, dropout: float = 0.0,
         dora: bool = False) -> ModelT:  # fmt: skip
    """Add adapters to linear layers of a model, in place, and freeze everything else; return the model.

    - **rank**, **alpha**: an adapter adds ``alpha / rank`` times the product of two matrices of this rank.
    - **targets**: names of layers; by default all in attention and feed-forward networks. Experts and tied heads are never adapted.
    - **dropout**: the probability for the inputs of adapters. **dora**: whether to learn the row norms of the weights, too.
    """
    if rank < 1 or not 0 <= dropout < 1:
        raise ValueError(message("lora", "rank must be at least 1, and dropout at least 0 and below 1", rank=rank, dropout=dropout))
    layers = _linear_layers(model)
    known = {path.rpartition(".")[2] for path in layers}
    wanted = set(TARGETS) & known if targets is None else {targets} if isinstance(targets, str) else set(targets)
    if not wanted or wanted - known:
        raise ValueError(message("lora", f"targets must be one or more of {', '.join(sorted(known))}", targets=sorted(wanted)))
    chosen = {path: layer for path, layer in layers.items() if path.rpartition(".")[2] in wanted}
    return _put_adapters(model, {path: LoRALinear(layer, rank, alpha, dropout, dora) for path, layer in chosen.items()})


def _linear_layers(model: nn.Module) -> dict[str, Any]:
    """Return the linear layers that can have an adapter, by path: no experts, no tied heads, and no layers inside an adapter."""
    tied = "lm_head" if getattr(model.config, "tied", False) else None
    found = {path: layer for path, layer in model.named_modules() if hasattr(layer, "in_features") and path != tied}
    inside = {path for path in found if isinstance(found.get(path.rpartition(".")[0]), LoRALinear)}
    return {path: layer for path, layer in found.items() if path not in inside and ".experts." not in path}


def _put_adapters(model: ModelT, adapters: Mapping[str, LoRALinear]) -> ModelT:
    if getattr(model, "merged", False):
        raise ValueError(message("lora", "the model's projections must not be merged", "load it again, without merge_projections()"))
    if adapters_of(model):
        raise ValueError(message("lora", "the model must not have adapters", "merge them with netcl.models.merge(model), or load it anew"))
    model.requires_grad_(False)
    for path, adapter in adapters.items():
        _replace(model, path, adapter)
    return model


def _replace(model: nn.Module, path: str, layer: nn.Module) -> None:
    parent, _, name = path.rpartition(".")
    (model.get_submodule(parent) if parent else model).add_module(name, layer.train(model.training))


def merge_adapters(model: ModelT) -> ModelT:
    """Add the adapters of a model to its weights in place and unfreeze the model; return it. Adapted packed layers become ``Linear``."""
    for path, adapter in adapters_of(model).items():
        base, added = adapter.base, adapter.lora_B.to_host() @ adapter.lora_A.to_host()
        matrix = base_matrix(base) + np.float32(adapter.scale) * added
        if adapter.lora_magnitude_vector is not None:
            matrix *= (adapter.lora_magnitude_vector.to_host() / np.linalg.norm(matrix, axis=1))[:, None]
        if not isinstance(base, nn.Linear):
            with placed(base.queue, "float32", blank=True):
                base = nn.Linear(adapter.in_features, adapter.out_features, bias=False)
            base.bias = adapter.base.bias
        base.weight.write(matrix.astype(host_array(base.weight).dtype))
        _replace(model, path, base)
    return model.requires_grad_(True)


# ---- PEFT's layout


def _hub_layers(model: Any) -> dict[str, tuple[str, slice]]:
    """Map the path of each linear layer to the Hugging Face layer that holds its weights, and to its rows in that layer."""
    names, found, filled = ARCHITECTURES[model.config.architecture].names, {}, Counter[str]()
    for path, layer in _linear_layers(model).items():
        origin = origin_of(f"{path}.weight", names)
        if origin is not None:
            name = origin.name.removesuffix(".weight")
            found[path] = (name, slice(filled[name], filled[name] + layer.out_features))  # parts of fused layers follow each other
            filled[name] += layer.out_features
    return found


def save_adapter(model: Any, folder: str | os.PathLike[str], base: str = "") -> None:
    """Write the adapters of a model as PEFT does: ``adapter_config.json`` and ``adapter_model.safetensors``.

    Adapters of layers that the Hugging Face model fuses become one adapter of a higher rank, with the same result. ``base`` is stored as
    the name of the base model.
    """
    adapters, layers = adapters_of(model), _hub_layers(model)
    if not adapters:
        raise ValueError(message("save_adapter", "the model must have adapters", "call netcl.models.lora first"))
    if other := sorted(adapters.keys() - layers.keys()):
        raise ValueError(message("save_adapter", "all adapters must be on layers of the Hugging Face model", others=other[:3]))
    tensors: dict[str, np.ndarray] = {}
    ranks: dict[str, tuple[int, float]] = {}
    for name in dict.fromkeys(layers[path][0] for path in adapters):
        factors, ranks[name] = _joined_factors(model, {path: rows for path, (other, rows) in layers.items() if other == name})
        tensors |= {f"{_PREFIX}{name}.lora_{key}": array for key, array in factors.items()}
    rank, alpha = max(ranks.values(), key=list(ranks.values()).count)
    words = {name.rpartition(".")[2] for name in ranks}  # whole names where a word would select others, too
    alone = {name for name, _ in layers.values() if name.rpartition(".")[2] in words} == ranks.keys()
    first, place = next(iter(adapters.values())), Path(folder)
    config = {
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": base, "r": rank, "lora_alpha": alpha,
        "lora_dropout": first.dropout, "use_dora": first.lora_magnitude_vector is not None, "use_rslora": False, "bias": "none",
        "target_modules": sorted(words if alone else ranks), "modules_to_save": None, "init_lora_weights": True,
        "fan_in_fan_out": model.config.architecture == "gpt2", "inference_mode": True,
        "rank_pattern": {name: own[0] for name, own in ranks.items() if own[0] != rank},
        "alpha_pattern": {name: own[1] for name, own in ranks.items() if own[1] != alpha},
    }  # fmt: skip
    place.mkdir(parents=True, exist_ok=True)
    save_safetensors(tensors, place / _TENSORS, {"format": "pt"})
    write_json(place / _CONFIG, config)


def _joined_factors(model: nn.Module, rows: Mapping[str, slice]) -> tuple[dict[str, np.ndarray], tuple[int, float]]:
    """Combine the adapters of the parts of a fused layer; returns tensors by name (``A`` stacked, ``B`` in blocks), rank and alpha."""
    layers: dict[str, Any] = {path: model.get_submodule(path) for path in rows}
    own: dict[str, Any] = {path: layer for path, layer in layers.items() if isinstance(layer, LoRALinear)}
    scale, rank, at = next(iter(own.values())).scale, sum(layer.rank for layer in own.values()), 0
    joined = np.zeros((max(part.stop for part in rows.values()), rank), np.float32)
    for path, layer in own.items():
        joined[rows[path], at : at + layer.rank] = layer.lora_B.to_host() * np.float32(layer.scale / scale)
        at += layer.rank
    made = {"A.weight": np.concatenate([layer.lora_A.to_host() for layer in own.values()]), "B.weight": joined}
    if all(layer.lora_magnitude_vector is not None for layer in own.values()):
        lengths = [own[path].lora_magnitude_vector.to_host() if path in own else np.linalg.norm(base_matrix(layer), axis=1)
                   for path, layer in layers.items()]  # fmt: skip
        made["magnitude_vector"] = np.concatenate(lengths)
    return made, (rank, int(scale * rank) if scale * rank == int(scale * rank) else scale * rank)


def load_adapter(model: ModelT, folder: str | os.PathLike[str]) -> ModelT:
    """Add the adapters of a folder in PEFT's layout (LoRA or DoRA) to a model, in place; return the model.

    Everything but the adapters is frozen. Settings of PEFT that are known to change the result but are not supported raise.
    """
    place = Path(folder)
    config, tensors = read_object(place / _CONFIG, "load_adapter"), load_safetensors(place / _TENSORS)
    for name, plain in {"peft_type": "LORA", "bias": "none", **dict.fromkeys(_UNSUPPORTED)}.items():
        if (config.get(name) or plain) != plain:
            raise refusal("load_adapter", f"{name} must be {plain!r}", file=place / _CONFIG, given=repr(config[name]))
    if (start := config.get("init_lora_weights")) not in _SAFE_STARTS:
        remedy = "if the base model has the residual weights, write true there; else convert the adapter with PEFT"
        raise refusal("load_adapter", "init_lora_weights must not change the base model", remedy, file=place / _CONFIG, given=repr(start))
    try:
        alphas = [(re.compile(rf"(.*\.)?({key})$"), value) for key, value in (config.get("alpha_pattern") or {}).items()]
        if slow := [key for key in config.get("alpha_pattern") or () if len(re.findall(r"[*+{]", key)) > 3 or re.search(r"\)[*+{]", key)]:
            raise re.error(f"a pattern may repeat at most 3 times, and no group: {slow[0][:80]!r}")  # others may take hours to match
    except (re.error, AttributeError) as fault:
        what = "alpha_pattern must be an object of regular expressions and numbers"
        raise refusal("load_adapter", what, file=place / _CONFIG, given=repr(config["alpha_pattern"]), reason=fault) from fault
    if (copied := tensors.pop(f"{_PREFIX}lm_head.base_layer.weight", None)) is not None:  # PEFT adds the weights of an adapted head
        head = model.get_submodule("lm_head")
        weight = host_array(head.weight if isinstance(head, nn.Linear) else head)
        if not np.array_equal(weight, copied.astype(weight.dtype)):
            what, remedy = "base_layer.weight must be the weight of the model's head", "load the model that was adapted, without bits"
            raise refusal("load_adapter", what, remedy, file=place / _TENSORS, shape=copied.shape)
    files: dict[str, dict[str, np.ndarray]] = {}
    for key, array in tensors.items():
        name, _, kind = key.removeprefix(_PREFIX).rpartition(".lora_")
        files.setdefault(name, {})[kind.removesuffix(".weight")] = array.astype(np.float32)
    dora, layers, made = bool(config.get("use_dora")), _hub_layers(model), {}
    kinds, sizes = {"A", "B", "magnitude_vector"} if dora else {"A", "B"}, {name: rows.stop for name, rows in layers.values()}
    strange = [name for name, parts in files.items() if parts.keys() != kinds or len(parts["B"]) != sizes.get(name) or not parts["A"].size]
    if not files:
        raise refusal("load_adapter", "the adapter must have at least one tensor", file=place / _TENSORS)
    targets = config.get("target_modules") if not any(config.get(key) for key in ("layers_to_transform", "exclude_modules")) else None
    wanted = {name for name in sizes if isinstance(targets, list) and any(f".{name}".endswith(f".{target}") for target in targets)}
    if other := sorted(files.keys() - sizes.keys()) or sorted(wanted - files.keys()):
        what = "the file must have an adapter for each target, and only for linear layers of the model that are no experts and no tied head"
        raise refusal("load_adapter", what, "load the model that was adapted; train no embeddings", file=place / _TENSORS, layers=other[:3])
    if strange:
        what = f"each adapter must have {', '.join(sorted(kinds))}, a rank above 0, and a row of B for each output of its layer"
        shapes = {name: {kind: array.shape for kind, array in files[name].items()} for name in strange[:3]}
        raise refusal("load_adapter", what, file=place / _TENSORS, layers=shapes)
    for path, (name, rows) in layers.items():
        if name in files:  # parts of a fused layer share A and have their own rows of everything else
            parts = {f"lora_{kind}": array if kind == "A" else array[rows] for kind, array in files[name].items()}
            own = [value for pattern, value in alphas if pattern.match(name)]
            rank, alpha = len(parts["lora_A"]), own[0] if own else config.get("lora_alpha")
            if isinstance(alpha, bool) or not isinstance(alpha, int | float):
                raise refusal("load_adapter", "alpha must be a number (lora_alpha, alpha_pattern)", file=place / _CONFIG, given=repr(alpha))
            alpha *= math.sqrt(rank) if config.get("use_rslora") else 1
            made[path] = LoRALinear(model.get_submodule(path), rank, alpha, float(config.get("lora_dropout") or 0.0), dora)
            with refusing("load_adapter", place / _TENSORS, (ShapeError,)):
                made[path].load_state_dict(parts, strict=False)
    return _put_adapters(model, made)
