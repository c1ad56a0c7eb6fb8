"""LoRA and DoRA: small trainable matrices beside frozen linear layers, saved and loaded in PEFT's layout."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np

import netcl.autograd as ag
from netcl.core.errors import message
from netcl.core.tensor import Tensor
from netcl.io.archive import refusal
from netcl.io.state import load_safetensors, save_safetensors
from netcl.models.architectures import ARCHITECTURES
from netcl.models.folder import read_object, write_json
from netcl.models.weights import fused_rows, host_array, origin_of
from netcl.nn import init
from netcl.nn.linear import Linear
from netcl.nn.module import Module
from netcl.nn.parameter import Parameter, empty, placed

#: The layers that get adapters unless others are named.
TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
_CONFIG, _TENSORS, _PREFIX = "adapter_config.json", "adapter_model.safetensors", "base_model.model."
#: Settings of PEFT that change what an adapter computes and are not supported.
_OFF = ("modules_to_save", "lora_bias", "layer_replication", "alora_invocation_tokens", "target_parameters", "trainable_token_indices",
        "use_qalora", "use_bdlora", "arrow_config", "kasa_config", "monteclora_config", "velora_config")  # fmt: skip
ModelT = TypeVar("ModelT", bound=Module)


class LoRALinear(Module):
    """A frozen linear layer and an adapter: ``y = base(x) + alpha / rank * x A^T B^T``; ``B`` starts as zeros.

    With ``dora`` the rows of the sum of both matrices are scaled to the learned lengths ``lora_magnitude_vector``, which start as those
    of the base's rows. Parameters: ``lora_A`` ``(rank, in_features)``, ``lora_B`` ``(out_features, rank)``, float32.

    - **base**: a layer with ``in_features`` and ``out_features``: ``Linear`` or ``QuantizedLinear``.
    - **rank**, **alpha**: of the adapter. **dropout**: the share of its inputs that is zero in training.
    """

    def __init__(self, base: Module, rank: int = 8, alpha: float = 16, dropout: float = 0.0, dora: bool = False):
        super().__init__()
        self.in_features, self.out_features = int(base.in_features), int(base.out_features)  # type: ignore[attr-defined]
        self.base, self.rank, self.alpha, self.dropout = base, rank, float(alpha), dropout
        with placed(base.queue, "float32"):
            self.lora_A, self.lora_B = empty((rank, self.in_features)), empty((self.out_features, rank))
            init.layer_(self.lora_A, None)
            init.zeros_(self.lora_B)
            self.lora_magnitude_vector = Parameter(Tensor.from_host(base.queue, row_lengths(base_matrix(base)))) if dora else None

    @property
    def scale(self) -> float:
        """The factor of the product of both matrices."""
        return self.alpha / self.rank

    def forward(self, x: Tensor) -> Tensor:
        out, low = self.base(x), ag.cast(x, "float32")
        if self.dropout and self.training:
            low = ag.dropout(low, self.dropout)
        added = ag.linear(ag.mul(ag.linear(low, self.lora_A), self.scale), self.lora_B)
        if self.lora_magnitude_vector is None:
            return ag.add(out, ag.cast(added, out.dtype))
        with ag.no_grad():  # DoRA takes the lengths as constants: section 4.3 of its paper
            base = self.base.dequantized() if hasattr(self.base, "dequantized") else self.base.weight  # type: ignore[attr-defined]
            whole = ag.add(ag.cast(base, "float32"), ag.mul(ag.matmul(self.lora_B, self.lora_A), self.scale))
            lengths = ag.sqrt(ag.sum(ag.mul(whole, whole), axis=1))
        bias: Tensor | None = self.base.bias  # type: ignore[attr-defined]
        plain = ag.cast(out if bias is None else ag.sub(out, bias), "float32")
        made = ag.cast(ag.mul(ag.add(plain, ag.cast(added, "float32")), ag.div(self.lora_magnitude_vector, lengths)), out.dtype)
        return made if bias is None else ag.add(made, bias)

    def merged_matrix(self) -> np.ndarray:
        """The matrix of one linear layer that computes the same, float32."""
        whole = base_matrix(self.base) + np.float32(self.scale) * (self.lora_B.to_host() @ self.lora_A.to_host())
        if self.lora_magnitude_vector is not None:
            whole *= (self.lora_magnitude_vector.to_host() / row_lengths(whole))[:, None]
        return whole


def base_matrix(layer: Any) -> np.ndarray:
    """The weights of a linear layer, packed or not, as float32."""
    return (layer.dequantized().to_host() if hasattr(layer, "dequantized") else host_array(layer.weight)).astype(np.float32)


def row_lengths(matrix: np.ndarray) -> np.ndarray:
    """The Euclidean length of every row."""
    return np.sqrt(np.square(matrix).sum(axis=1))


def adapters_of(model: Module) -> dict[str, LoRALinear]:
    """The adapted layers of a model by path."""
    return {path: layer for path, layer in model.named_modules() if isinstance(layer, LoRALinear)}


def lora(model: ModelT, rank: int = 8, alpha: float = 16, targets: Sequence[str] | None = None, dropout: float = 0.0,
         dora: bool = False) -> ModelT:  # fmt: skip
    """Give linear layers of a model adapters, in place, and freeze everything else; return the model.

    - **rank**, **alpha**: an adapter adds ``alpha / rank`` times the product of two matrices of this rank.
    - **targets**: names of layers; by default all of attention and feed-forward networks. Experts of mixtures get none.
    - **dropout**: of the adapters' inputs. **dora**: learn the lengths of the rows, too.

    >>> from netcl import models
    >>> config = {"model_type": "llama", "vocab_size": 96, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1,
    ...           "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128}
    >>> model = models.lora(models.CausalLM(models.read_config(config)), rank=2, targets=["q_proj"])
    >>> [name for name, p in model.named_parameters() if p.requires_grad]
    ['layers.0.self_attn.q_proj.lora_A', 'layers.0.self_attn.q_proj.lora_B']
    """
    if rank < 1 or not 0 <= dropout < 1:
        raise ValueError(message("lora", "rank must be at least 1 and dropout in [0, 1)", rank=rank, dropout=dropout))
    layers = {path: path.rpartition(".")[2] for path in _linear_layers(model) if ".experts." not in path}
    wanted = set(TARGETS) & set(layers.values()) if targets is None else {targets} if isinstance(targets, str) else set(targets)
    if not wanted or wanted - set(layers.values()):
        known = ", ".join(sorted(set(layers.values())))
        raise ValueError(message("lora", f"targets must be among the linear layers: {known}", targets=sorted(wanted)))
    _wrap(model, {path: (rank, float(alpha)) for path, name in layers.items() if name in wanted}, dropout, dora)
    return model


def _linear_layers(model: Module) -> dict[str, Any]:
    """All layers an adapter fits, by path; adapted ones once."""
    found = {path: layer for path, layer in model.named_modules() if hasattr(layer, "in_features") and hasattr(layer, "out_features")}
    inside = {f"{path}.base" for path, layer in found.items() if isinstance(layer, LoRALinear)}
    return {path: layer for path, layer in found.items() if path not in inside}


def _wrap(model: Module, ranks: Mapping[str, tuple[int, float]], dropout: float, dora: bool) -> None:
    if adapters_of(model):
        raise ValueError(message("lora", "the model has adapters already", "merge them with netcl.models.merge(model), or load it anew"))
    model.requires_grad_(False)
    for path, (rank, alpha) in ranks.items():
        _replace(model, path, LoRALinear(model.get_submodule(path), rank, alpha, dropout, dora).train(model.training))


def _replace(model: Module, path: str, layer: Module) -> None:
    parent, _, name = path.rpartition(".")
    (model.get_submodule(parent) if parent else model).add_module(name, layer)


def merge_adapters(model: ModelT) -> ModelT:
    """Add the adapters of a model to its weights, in place; return the model, all of it trainable.

    A packed layer that had an adapter becomes a ``Linear``: the sum is not packed again.
    """
    for path, adapter in adapters_of(model).items():
        base: Any = adapter.base
        matrix = adapter.merged_matrix()
        if not isinstance(base, Linear):
            with placed(base.queue, "float32", blank=True):
                base, bias = Linear(adapter.in_features, adapter.out_features, bias=False), base.bias
            base.bias = bias
        base.weight.write(matrix.astype(host_array(base.weight).dtype))
        _replace(model, path, base.train(model.training))
    return model.requires_grad_(True)


# ---- PEFT's layout


class _HubLayer(NamedTuple):
    """A layer under the name that PEFT knows it by. Fused tensors hold several: ``rows`` are the layer's own."""

    name: str
    rows: slice
    transposed: bool


def _hub_layers(model: Any) -> dict[str, _HubLayer]:
    """Where the linear layers of a model lie in a Hugging Face model, by path."""
    names, found = ARCHITECTURES[model.config.architecture].names, {}
    for path, layer in _linear_layers(model).items():
        origin = origin_of(f"{path}.weight", names)
        if origin is not None and ".experts." not in path:
            part = [op for op in origin.ops if op != "T"]
            rows = fused_rows(model.part_config(path), part[0]) if part else slice(0, layer.out_features)
            found[path] = _HubLayer(origin.name.removesuffix(".weight"), rows, "T" in origin.ops)
    return found


def save_adapter(model: Any, folder: str | os.PathLike[str], base: str = "") -> None:
    """Write the adapters of a model as PEFT does: ``adapter_config.json`` and ``adapter_model.safetensors``.

    Adapters of layers that the Hugging Face model fuses become one of a higher rank, with the same result. ``base`` is noted as the
    model the adapter belongs to.
    """
    adapters, layers = adapters_of(model), _hub_layers(model)
    if not adapters or not adapters.keys() <= layers.keys():
        raise ValueError(message("save_adapter", "the model has no adapters that PEFT has a layout for", "call netcl.models.lora first"))
    groups = {layers[path].name: [other for other in layers if layers[other].name == layers[path].name] for path in adapters}
    tensors: dict[str, np.ndarray] = {}
    ranks: dict[str, tuple[int, float]] = {}
    for name, paths in groups.items():
        own = [adapters[path] for path in paths if path in adapters]
        factors, ranks[name] = _joined_adapter(own, [layers[path].rows for path in paths if path in adapters],
                                               max(layers[path].rows.stop for path in paths))  # fmt: skip
        if own[0].lora_magnitude_vector is not None:
            factors["lora_magnitude_vector"] = np.concatenate([_magnitudes(model.get_submodule(path)) for path in
                                                               sorted(paths, key=lambda path: layers[path].rows.start)])  # fmt: skip
        tensors |= {f"{_PREFIX}{name}.{key}": array for key, array in factors.items()}
    first, own_ranks = next(iter(adapters.values())), list(ranks.values())
    rank, alpha = max(set(own_ranks), key=own_ranks.count)
    config = {
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": base, "r": rank, "lora_alpha": _short(alpha),
        "lora_dropout": first.dropout, "use_dora": first.lora_magnitude_vector is not None, "use_rslora": False, "bias": "none",
        "target_modules": _target_names(list(groups), [layer.name for layer in layers.values()]), "modules_to_save": None,
        "fan_in_fan_out": any(layers[path].transposed for path in adapters), "init_lora_weights": True, "inference_mode": True,
        "rank_pattern": {name: own[0] for name, own in ranks.items() if own[0] != rank},
        "alpha_pattern": {name: _short(own[1]) for name, own in ranks.items() if own[1] != alpha},
    }  # fmt: skip
    place = Path(folder)
    place.mkdir(parents=True, exist_ok=True)
    save_safetensors(tensors, place / _TENSORS, {"format": "pt"})
    write_json(place / _CONFIG, config)


def _joined_adapter(own: Sequence[LoRALinear], rows: Sequence[slice], total: int) -> tuple[dict[str, np.ndarray], tuple[int, float]]:
    """One adapter that does what those of parts of a fused layer do: ``A`` stacked, ``B`` in blocks; its rank and alpha."""
    rank, at = sum(adapter.rank for adapter in own), 0
    joined = np.zeros((total, rank), np.float32)
    for adapter, part in zip(own, rows, strict=True):
        joined[part, at : at + adapter.rank] = adapter.lora_B.to_host() * np.float32(adapter.scale / own[0].scale)
        at += adapter.rank
    stacked = np.concatenate([adapter.lora_A.to_host() for adapter in own])
    return {"lora_A.weight": stacked, "lora_B.weight": joined}, (rank, own[0].scale * rank)


def _magnitudes(layer: Any) -> np.ndarray:
    return layer.lora_magnitude_vector.to_host() if isinstance(layer, LoRALinear) else row_lengths(base_matrix(layer))


def _short(number: float) -> float:
    return int(number) if number == int(number) else number


def _target_names(adapted: Sequence[str], everywhere: Sequence[str]) -> list[str]:
    """The last words of the adapted layers' names, or whole names where a word would select others, too."""
    words = {name.rpartition(".")[2] for name in adapted}
    meant = {name for name in everywhere if name.rpartition(".")[2] in words}
    return sorted(words if meant == set(adapted) else adapted)


def load_adapter(model: ModelT, folder: str | os.PathLike[str]) -> ModelT:
    """Give a model the adapters of a folder in PEFT's layout (LoRA or DoRA), in place; return the model.

    Everything but the adapters is frozen. Settings that would change the result and are not supported raise.
    """
    place = Path(folder)
    config, tensors = read_object(place / _CONFIG, "load_adapter"), load_safetensors(place / _TENSORS)
    for name, plain in {"peft_type": "LORA", "bias": "none", **dict.fromkeys(_OFF)}.items():
        if (config.get(name) or plain) != plain:
            raise refusal("load_adapter", f"{name} must be {plain!r}", file=place / _CONFIG, given=repr(config[name]))
    dora, layers = bool(config.get("use_dora")), {path: layer.name for path, layer in _hub_layers(model).items()}
    files: dict[str, dict[str, np.ndarray]] = {}
    for key, array in tensors.items():
        name, _, kind = key.removeprefix(_PREFIX).rpartition(".lora_")
        files.setdefault(name, {})[kind.removesuffix(".weight")] = array.astype(np.float32)
    kinds = {"A", "B", "magnitude_vector"} if dora else {"A", "B"}
    strange = [name for name, parts in files.items() if name not in layers.values() or parts.keys() != kinds]
    if strange or not files:
        raise refusal("load_adapter", "the adapter does not fit the model", file=place / _TENSORS, layers=strange[:3])
    chosen = {path: name for path, name in layers.items() if name in files}
    ranks = {name: (len(parts["A"]), _alpha_of(config, name, len(parts["A"]), place)) for name, parts in files.items()}
    for path, parts in _layer_parts(model, chosen, files):
        if parts["A"].shape[1:] != (model.get_submodule(path).in_features,) or parts["B"].shape[0] != model.get_submodule(path).out_features:  # type: ignore[attr-defined]
            raise refusal("load_adapter", "the adapter has other sizes than the model", file=place / _TENSORS, layer=path)
    _wrap(model, {path: ranks[name] for path, name in chosen.items()}, float(config.get("lora_dropout") or 0.0), dora)
    for path, parts in _layer_parts(model, chosen, files):
        model.get_submodule(path).load_state_dict({f"lora_{kind}": array for kind, array in parts.items()}, strict=False)
    return model


def _layer_parts(
    model: Any, chosen: Mapping[str, str], files: Mapping[str, Mapping[str, np.ndarray]]
) -> Iterator[tuple[str, dict[str, np.ndarray]]]:
    """The factors of each layer: of fused layers the same ``A`` and their own rows of everything else."""
    rows = {path: layer.rows for path, layer in _hub_layers(model).items()}
    for path, name in chosen.items():
        yield path, {kind: array if kind == "A" else np.ascontiguousarray(array[rows[path]]) for kind, array in files[name].items()}


def _alpha_of(config: Mapping[str, Any], name: str, rank: int, place: Path) -> float:
    """The alpha that gives PEFT's scale at this rank."""
    own = (config.get("alpha_pattern") or {}).items()
    alpha = next((value for key, value in own if name == key or name.endswith(f".{key}")), config.get("lora_alpha"))
    if isinstance(alpha, bool) or not isinstance(alpha, int | float):
        raise refusal("load_adapter", "lora_alpha must be a number", file=place / _CONFIG, given=repr(alpha))
    return alpha * math.sqrt(rank) if config.get("use_rslora") else float(alpha)
