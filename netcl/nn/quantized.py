"""Layers whose weights stay packed in the block types of GGUF, and :func:`quantize_model`, which replaces plain layers by packed ones."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Iterator, MutableMapping
from typing import Any, TypeVar, cast

import numpy as np

import netcl.autograd as ag
from netcl.autograd import packed
from netcl.core.errors import message, some
from netcl.core.tensor import Tensor
from netcl.nn.embedding import Embedding
from netcl.nn.linear import Linear
from netcl.nn.module import Module, may_join
from netcl.nn.norm import EPSILON, LayerNorm, RMSNorm
from netcl.nn.parameter import Parameter, here

__all__ = ["QuantizedEmbedding", "QuantizedLinear", "quantize_model"]

PackedT = TypeVar("PackedT", bound="_PackedLayer")
ModelT = TypeVar("ModelT", bound=Module)


class _PackedLayer(Module):
    """A layer whose matrix is packed in the buffer ``weight``: bytes in the same order on every device.

    With 4 bits, each row of ``weight`` holds ``STRIP_ROWS`` rows of the matrix. The state dict of an earlier version is refused.
    State dicts have an entry ``kind``, GGUF's number of the block type: types with blocks of one size would be misread as each other.
    """

    weight: Tensor

    def __init__(self, rows: int, columns: int, kind: str):
        super().__init__()
        row = packed.kind_of(kind, type(self).__name__)
        self.kind, self.matrix = row.name, (rows, columns)
        size = packed.device_bytes(row, self.matrix, type(self).__name__)
        strips = max(1, -(-rows // packed.STRIP_ROWS))
        self.register_buffer("weight", Tensor.zeros((strips, size // strips) if row.bits == 4 else (size,), "uint8", queue=here()))

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *rest: Any) -> None:
        given, number = state_dict.get(f"{prefix}weight"), state_dict.pop(f"{prefix}kind", None)
        if given is not None and self.weight.ndim == 2 and np.ndim(given) == 1:
            what = f"{prefix}weight must have the current layout of {self.kind}, but has that of an earlier version"
            raise ValueError(message("load_state_dict", what, "quantize the unpacked model again", shape=tuple(given.shape)))
        own = packed.kind_of(self.kind).number
        if number is not None and int(np.asarray(getattr(number, "to_host", lambda: number)())) != own:
            what = f"{prefix}kind must be that of the layer's block type"
            raise ValueError(message("load_state_dict", what, f"make the layer with the kind of the state; it is {self.kind}", kind=own))
        super()._load_from_state_dict(state_dict, prefix, *rest)
        if number is None:
            rest[2].append(f"{prefix}kind")  # missing

    def _save_to_state_dict(self, destination: MutableMapping[str, Tensor], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[f"{prefix}kind"] = Tensor.from_host(self.weight.queue, np.array(packed.kind_of(self.kind).number, np.uint8))

    def load_blocks(self: PackedT, blocks: Any) -> PackedT:
        """Load the weights from GGUF blocks: bytes, or a uint8 array ``(rows, bytes per row)``. Returns the layer."""
        blocks = np.frombuffer(blocks, np.uint8) if isinstance(blocks, bytes) else blocks
        self.weight.write(packed.pack_strips(blocks, self.kind, self.matrix).reshape(self.weight.shape))
        return self

    def blocks(self) -> np.ndarray:
        """Return the weights as GGUF blocks: a uint8 array ``(rows, bytes per row)``."""
        return packed.unpack_strips(self.weight.to_host(), self.kind, self.matrix)

    def dequantized(self, dtype: str = "float32") -> Tensor:
        """Return the weights unpacked, as a tensor of ``dtype``."""
        return ag.quantized_rows(self.weight, kind=self.kind, shape=self.matrix, dtype=dtype)


class QuantizedLinear(_PackedLayer):
    """An affine map of the last axis with packed weights: ``y = x W^T + b``.

    - **in_features**, **out_features**: sizes of the last axis of ``x`` and ``y``; ``in_features`` is a multiple of the block size and 32.
    - **bias**: whether there is a parameter ``b``. The weights are a buffer: they have no gradient and start as zeros.
    - **kind**: a block type of GGUF other than F32, for instance ``Q4_0``, ``Q8_0``, ``Q4_K``, ``F16``.
    - **activations**: ``float``, ``int8`` or ``auto``, as in :func:`netcl.ops.quantized_linear`.

    Shapes: ``x`` ``(..., in_features)``, ``y`` ``(..., out_features)``.

    >>> from netcl import nn
    >>> nn.QuantizedLinear.from_linear(nn.Linear(64, 3), "Q8_0")([[1.0] * 64]).shape
    (1, 3)
    """

    def __init__(self, in_features: int, out_features: int, bias: bool = True, kind: str = "Q4_0", activations: str = "auto"):
        super().__init__(out_features, in_features, kind)
        self.in_features, self.out_features, self.activations = in_features, out_features, activations
        self.bias = Parameter(Tensor.zeros((out_features,), queue=here())) if bias else None

    @classmethod
    def from_linear(cls, linear: Linear, kind: str = "Q4_0", activations: str = "auto") -> QuantizedLinear:
        """Return a layer with the quantized weights of ``linear``. Both layers share the bias of ``linear``."""
        made = cls(linear.in_features, linear.out_features, linear.bias is not None, kind, activations).to(linear.weight.queue)
        made.bias = linear.bias
        return made.load_blocks(packed.quantize(linear.weight.to_host().astype(np.float32), kind))

    def forward(self, x: Tensor) -> Tensor:
        return ag.quantized_linear(x, self.weight, self.bias, kind=self.kind, rows=self.out_features, activations=self.activations)

    flops = Linear.flops


def decoded_linear(x: Tensor, linear: Any, norm: Any = None, gate: Any = None, activation: str = "", residual: Any = None) -> Tensor:
    """Compute ``linear`` of a few rows by one op, with an optional norm before and gate, activation or residual after ``linear``."""
    packs: Any = {"kind": linear.kind, "rows": linear.out_features, "activations": linear.activations} if hasattr(linear, "kind") else {}
    kind = "" if norm is None else "rms" if type(norm) is RMSNorm else "layer"
    eps = EPSILON[x.dtype] if norm is None or norm.eps is None else norm.eps
    gates, norms = ([getattr(layer, name, None) for name in ("weight", "bias")] for layer in (gate, norm))
    return ag.decode_linear(x, linear.weight, linear.bias, gates[0], gates[1], residual, norms[0], norms[1], norm=kind, eps=eps,
                            activation=activation, **packs)  # fmt: skip


def decodable(owner: Module, *layers: Any) -> bool:
    """Whether :func:`decoded_linear` can compute ``layers``: linear layers of one class, block type and arithmetic, and norms.

    Neither the layers nor the module ``owner`` that contains them may have hooks. The recorder treats all of them as called.
    """
    norms = [layer for layer in layers if type(layer) in (RMSNorm, LayerNorm) and layer.weight is not None and layer.weight.ndim == 1]
    kinds = {(type(layer), getattr(layer, "kind", ""), getattr(layer, "activations", "")) for layer in layers if layer not in norms}
    return len(kinds) == 1 and kinds.pop()[0] in (Linear, QuantizedLinear) and may_join(owner, *layers)


class QuantizedEmbedding(_PackedLayer):
    """A table of packed vectors: ``y = weight[index]``, without a gradient.

    - **num_embeddings**, **embedding_dim**: how many vectors there are, and their length, a multiple of the block size and of 32.
    - **kind**: a block type of GGUF other than F32. **result**: the dtype of ``y``.

    Shapes: ``index`` of any shape, ``y`` ``(*index.shape, embedding_dim)``.

    >>> from netcl import nn
    >>> nn.QuantizedEmbedding(10, 32)([[1, 2, 3]]).shape
    (1, 3, 32)
    """

    def __init__(self, num_embeddings: int, embedding_dim: int, kind: str = "Q8_0", result: str = "float32"):
        super().__init__(num_embeddings, embedding_dim, kind)
        self.num_embeddings, self.embedding_dim, self.result = num_embeddings, embedding_dim, result

    def forward(self, index: Tensor) -> Tensor:
        return ag.quantized_rows(self.weight, index, kind=self.kind, shape=self.matrix, dtype=self.result)


def quantize_model(
    model: ModelT, bits: int = 4, group: int = 32, *, kind: str = "", embeddings: bool = False, activations: str = "auto"
) -> ModelT:
    """Replace the ``Linear`` layers of a model by packed layers in place, with ``embeddings`` also ``Embedding``; returns the model.

    4 bits are Q4_0 and 8 bits Q8_0, both with a scale for each ``group`` of 32; ``kind`` names another block type of GGUF. A layer is not
    changed if it shares its weights, or if its row length is no multiple of the block size and 32. A warning lists such layers.

    >>> import netcl
    >>> from netcl import nn
    >>> netcl.quantize(nn.Sequential(nn.Linear(32, 8), nn.ReLU()), bits=8)[0]
    QuantizedLinear(in_features=32, out_features=8, bias=True, kind='Q8_0', activations='auto')
    """
    chosen = kind or {(4, 32): "Q4_0", (8, 32): "Q8_0"}.get((bits, group), "")
    if not chosen:
        remedy = 'or name a block type: kind="Q4_K"'
        raise ValueError(message("quantize", "bits must be 4 or 8 and group 32", remedy, bits=bits, group=group))
    row, kept, made = packed.kind_of(chosen), [], dict[int, Any]()
    for path, parent, layer, shared in _matrices(model, (Linear, Embedding) if embeddings else (Linear,)):
        if layer.weight.shape[1] % max(32, row.block) or shared:
            kept.append(path)
            continue
        if id(layer) not in made and type(layer) is Linear:
            made[id(layer)] = QuantizedLinear.from_linear(layer, chosen, activations)
        elif id(layer) not in made:
            table = QuantizedEmbedding(layer.num_embeddings, layer.embedding_dim, chosen, layer.weight.dtype).to(layer.weight.queue)
            made[id(layer)] = table.load_blocks(packed.quantize(layer.weight.to_host().astype(np.float32), chosen))
        parent.add_module(path.rpartition(".")[2], made[id(layer)])
    if kept:
        what = f"layers with shared weights or partial blocks stay unpacked: {some(kept)}"
        warnings.warn(message("quantize", what, kind=chosen), stacklevel=2)
    return model


def _matrices(model: Module, classes: tuple[type, ...]) -> Iterator[tuple[str, Module, Any, bool]]:
    """Yield the path, the parent and the layer of each matrix of a model, and whether several layers share its weights."""
    owners = Counter(id(tensor) for module in model.modules() for tensor in module.parameters(recurse=False))
    for path, parent in list(model.named_modules()):
        for name, layer in list(parent.named_children()):
            if type(layer) in classes:
                yield f"{path}.{name}".lstrip("."), parent, layer, owners[id(cast(Any, layer).weight)] > 1


def pack_halves(model: Module) -> bool:
    """Replace layers whose float32 weights are all float16 numbers by F16 layers, where CPUs gain by it; returns whether there were any.

    On ARM, products with one token then round it to float16, as :func:`netcl.ops.quantized_linear` does.
    """
    made = False
    for path, parent, layer, shared in _matrices(model, (Linear,)):
        if layer.weight.dtype == "float32" and not layer.in_features % 32 and not shared and packed.multiplies_halves(layer.weight):
            values = layer.weight.to_host()
            if (values == values.astype(np.float16)).all():
                parent.add_module(path.rpartition(".")[2], QuantizedLinear.from_linear(layer, "F16"))
                made = True
    return made
