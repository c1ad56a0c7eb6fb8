"""Rewrites of a graph for inference: constant folding, and fusion of the chains that exporters write for one op.

A fusion is a formula over operators: ``x * Sigmoid(x)``. Equal names stand for the same value, numbers for scalar weights, names in
capitals for any scalar weight. Sums, products, maxima and minima match in both orders. A chain is fused only if nothing else reads the
values inside of it.
"""

from __future__ import annotations

import ast
import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

import netcl.autograd as ag
from netcl import nn
from netcl.core.tensor import Tensor, wrap_array
from netcl.io import tree
from netcl.io.onnx.bodies import GraphBody
from netcl.io.onnx.importer import OnnxModel
from netcl.io.onnx.imports import CONTROL, HOST, ON_DEVICE, operators
from netcl.io.onnx.quantized import prefers_integer_conv, read_q_conv, read_q_matmul
from netcl.io.onnx.table import OnnxNode
from netcl.ops.attention.geometry import LARGEST
from netcl.ops.integer import prefers_integers

#: Words in the names of operators that are not folded: random ones, those of sequences, those that keep weights small, and those whose
#: results and temporaries :func:`_most_elements` does not bound.
_NOT_FOLDED = ("Bernoulli", "Dropout", "Multinomial", "Optional", "Random", "Sequence", "quantizeLinear", "QuantizeLinear", "Attention",
               "Col2Im", "Conv", "Crop", "DFT", "Einsum", "Grid", "GRU", "LSTM", "Mel", "Pool", "Resize", "RNN", "Roi", "STFT", "TfIdf",
               "Upsample", "Window")  # fmt: skip
_SIZED_BY_VALUES = {"ConstantOfShape": 0, "Expand": 1, "OneHot": 1, "Pad": 1, "Tile": 1}  # the input whose numbers are sizes
_FOLDED_DEQUANTIZED = 1 << 26  # results of folding may take this much, and twice the weights
_BINARY = {ast.Add: "Add", ast.Sub: "Sub", ast.Mult: "Mul", ast.Div: "Div", ast.Pow: "Pow"}


class ChainMatch(NamedTuple):
    """The values that the names of a formula stand for, and the nodes that compute the formula, last node first."""

    values: dict[str, str]
    nodes: tuple[OnnxNode, ...]


def rewritten(body: GraphBody) -> tuple[GraphBody, Counter[str]]:
    """Return the graph with constants folded and chains fused, and how often each rewrite was applied."""
    done: Counter[str] = Counter()
    for node in body.nodes:
        for name, inner in node.attributes.items():
            if isinstance(inner, GraphBody):
                node.attributes[name], made = rewritten(inner)
                done += made
    nodes, weights = _fold_constants(body, done)
    chains = _Chains(nodes, weights, {*body.outputs, *(name for node in nodes for name in node.captured())})
    nodes, count = chains.fuse(done), -1
    while count < (count := done.total()):  # a convolution takes one neighbor at a time
        nodes = chains.fuse(done)
    read = {*body.outputs, *(name for node in nodes for name in (*node.inputs, *node.captured()))}
    weights = {name: x for name, x in chains.weights.items() if name in read}
    result = GraphBody(nodes, weights, body.inputs, body.outputs, body.forms)
    # Sizes and limits are read on the host, which a recording does not allow for values on the device.
    pairs = [pair for node in nodes if node.kind not in ON_DEVICE for pair in zip(node.inputs, node.formals, strict=False)]
    result.constants = (body.constants | {name for name, formal in pairs if formal in HOST}) & weights.keys()
    return result, done


def _fold_constants(body: GraphBody, done: Counter[str]) -> tuple[list[OnnxNode], dict[str, np.ndarray]]:
    """Evaluate nodes with constant inputs. Return the other nodes, and weights plus results. Fold nothing if results are too large."""
    known, folded = {*body.weights, ""}, list[OnnxNode]()
    supported = {kind for kind in operators() - CONTROL.keys() if not any(word in kind for word in _NOT_FOLDED)}
    for node in body.nodes:
        if node.kind in supported and node.inputs and known.issuperset(node.inputs):
            folded.append(node)
            known.update(node.outputs)
    rest = [node for node in body.nodes if id(node) not in {*map(id, folded)}]
    read = {*body.outputs, *(name for node in rest for name in (*node.inputs, *node.captured()))}
    names = [name for node in folded for name in node.outputs if name in read and name]
    used = {name: body.weights[name] for node in folded for name in node.inputs if name in body.weights}
    held = sum(x.nbytes for x in body.weights.values())
    try:
        with nn.parameter.placed("cpu"), ag.no_grad():
            model = _Folding(GraphBody(folded, used, [], names), {})
            model.room = _FOLDED_DEQUANTIZED + 8 * held
            made = model() if names else ()
    except _FoldingTooLarge:
        names, made = [], ()
    results = made if isinstance(made, tuple) else (made,)
    if not names or sum(x.nbytes for x in results) > _FOLDED_DEQUANTIZED + 2 * held:
        return list(body.nodes), dict(body.weights)
    done["constants"] += len(folded)
    arrays = {name: tree.from_bits(tree.host_bits(x), x.dtype) for name, x in zip(names, results, strict=True)}
    return rest, {**body.weights, **arrays}


class _FoldingTooLarge(Exception):
    """Raised when the results of folding would take too much memory."""


class _Folding(OnnxModel):
    """Computes constants, at most ``room`` bytes in total: a small file can describe results of any size."""

    room: int

    def _kept(self, body: GraphBody, name: str, array: np.ndarray, learned: bool) -> Tensor:
        """Return a weight over the memory of its array, which may be a mapped file."""
        return wrap_array(*tree.bits(array), nn.parameter.here())

    def _run(self, node: OnnxNode, values: Mapping[str, Any]) -> list[Any]:
        if 8 * _most_elements(node, [values[name] for name in node.inputs if name]) > self.room:
            raise _FoldingTooLarge
        made = super()._run(node, values)
        self.room -= sum(x.nbytes for x in made if x is not None)
        return made


def _most_elements(node: OnnxNode, given: list[Tensor]) -> float:
    """Return an upper bound on the elements of a node's results. Inputs of up to eight integers (axes, shapes) do not count."""
    if node.kind == "Range" and all(x.size == 1 for x in given):
        start, limit, step = (float(x.to_host().item()) for x in given)
        return abs(limit - start) / abs(step) if step else math.inf
    at = _SIZED_BY_VALUES.get(node.kind, len(given))
    counts = [max(abs(float(n)), 1.0) for x in given[at : at + 1] for n in x.to_host().reshape(-1)]
    shapes = [x.shape for x in given[:at] if x.size > 8 or "int" not in x.dtype]
    if node.kind == "Concat":
        return sum(map(math.prod, shapes))
    try:
        sizes: Iterable[int] = map(math.prod, shapes) if node.kind.startswith("Gather") else np.broadcast_shapes(*shapes)
    except ValueError:  # no broadcasting
        sizes = map(math.prod, shapes)
    return math.prod(counts) * math.prod(sizes)


class _Chains:
    """Searches a list of nodes for formulas and replaces them. ``lasting`` are names that are read from outside of the list."""

    def __init__(self, nodes: Sequence[OnnxNode], weights: dict[str, np.ndarray], lasting: set[str]):
        self.weights, self.lasting = weights, lasting
        self._index(nodes)

    def _index(self, nodes: Sequence[OnnxNode]) -> None:
        self.nodes = list(nodes)
        self.makers = {name: node for node in nodes for name in node.outputs}
        self.uses = Counter(name for node in nodes for name in node.inputs)

    def fuse(self, done: Counter[str]) -> list[OnnxNode]:
        """Fuse all chains and return the nodes that are left. Roots are tried from the end, so that the longest chains are found first."""
        for root in reversed(list(self.nodes)):
            for name, forms, build in FUSIONS if self.makers.get(root.outputs[0]) is root else ():
                matches = (self.matched(form, root.outputs[0], ChainMatch({}, ())) for form in forms)
                built = ((match, build(self, match, root)) for match in matches if match and self._closed(match))
                found, made = next(((match, node) for match, node in built if node), (None, None))
                if found and made:
                    gone = {*map(id, found.nodes)} - {id(root)}
                    self._index([made if node is root else node for node in self.nodes if id(node) not in gone])
                    done[name] += 1
                    break
        return self.nodes

    def matched(self, form: ast.expr, name: str, found: ChainMatch) -> ChainMatch | None:
        """Return ``found`` extended by the value ``name`` if that value matches ``form``, else ``None``."""
        if isinstance(form, ast.Name):
            if form.id.isupper() and self.scalar(name) is None:
                return None
            return found._replace(values={**found.values, form.id: name}) if found.values.get(form.id, name) == name else None
        if isinstance(form, ast.Constant):
            number, rounding = self.scalar(name), 1e-3 if name in self.weights and self.weights[name].itemsize < 4 else 1e-6
            return found if number is not None and math.isclose(number, float(form.value), rel_tol=rounding) else None  # type: ignore[arg-type]
        if isinstance(form, ast.BinOp):
            kind, parts = _BINARY[type(form.op)], [form.left, form.right]
        else:
            kind, parts = form.func.id, form.args  # type: ignore[attr-defined]
        node = self.makers.get(name)
        extra = 0 if node is None else len(node.inputs) - len(parts)  # the axes of a mean may be an input
        if node is None or node.kind != kind or any(node.outputs[1:]) or (extra and kind != "ReduceMean"):
            return None
        for order in (parts, parts[::-1]) if kind in ("Add", "Max", "Min", "Mul") else (parts,):
            made: ChainMatch | None = found._replace(nodes=(*found.nodes, node))
            for part, given in zip(order, node.inputs, strict=False):
                made = made and self.matched(part, given, made)
            if made:
                return made
        return None

    def scalar(self, name: str) -> float | None:
        """Return the number in a weight of shape () or (1,), else ``None``. Shape (1,) can add an axis to the result of the chain."""
        x = self.weights.get(name)
        return None if x is None or x.ndim > 1 or x.size != 1 or x.dtype.kind not in "fiu" else float(x.reshape(()))

    def in_order(self, found: ChainMatch) -> list[OnnxNode]:
        """Return the nodes of a chain, each once, in the order in which they run."""
        return [node for node in self.nodes if any(node is other for other in found.nodes)]

    def _closed(self, found: ChainMatch) -> bool:
        """Whether only the chain reads the values inside of it."""
        uses = Counter(name for node in {id(node): node for node in found.nodes}.values() for name in node.inputs)
        names = {node.outputs[0] for node in found.nodes} - {found.nodes[0].outputs[0]}
        return names.isdisjoint(self.lasting) and all(uses[name] == self.uses[name] for name in names)


def _op_node(kind: str, inputs: list[str], root: OnnxNode, attributes: Mapping[str, Any], read: Callable[..., Any]) -> OnnxNode:
    made = OnnxNode(f"netcl::{kind}", inputs, root.outputs[:1], attributes, root.opset)
    made.read = read
    return made


def _activation(kind: str, op: Callable[[Tensor], Tensor]) -> Callable[..., OnnxNode | None]:
    def build(chains: _Chains, found: ChainMatch, root: OnnxNode) -> OnnxNode | None:
        weights = [chains.weights[name] for node in found.nodes if node.kind != "Pow" for name in node.inputs if name in chains.weights]
        if any(x.dtype.kind in "iu" for x in weights):  # quotients of integers are truncated
            return None
        axes = max((x.ndim for x in weights), default=0)
        return _op_node(kind, [found.values["x"]], root, {}, lambda node, x: op(x) if x.ndim >= axes else ag.unsqueeze(op(x), 0))

    return build


def _fused_norm(chains: _Chains, found: ChainMatch, root: OnnxNode) -> OnnxNode | None:
    eps, means = chains.scalar(found.values["eps"]), [node for node in found.nodes if node.kind == "ReduceMean"]
    given = [node["axes"] if len(node.inputs) < 2 else chains.weights.get(node.inputs[1]) for node in means]
    axes = [() if each is None else tuple(np.ravel(each).tolist()) for each in given]
    if eps is None or not axes[0] or len({*axes}) > 1 or not all(node["keepdims"] for node in means):
        return None
    kind = "LayerNormalization" if any(node.kind == "Sub" for node in found.nodes) else "RMSNormalization"
    inputs = [found.values[name] for name in ("x", "weight", "bias") if name in found.values]
    return _op_node(kind, inputs, root, {"axes": axes[0], "eps": eps, "centered": kind[0] == "L"}, _run_norm)


def _run_norm(node: OnnxNode, x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None) -> Tensor:
    """Run a norm with one op if it is over the last axes and ``weight`` and ``bias`` have the shape of these axes, else by its formula."""
    axes = sorted(axis % x.ndim for axis in node["axes"])
    shape = x.shape[axes[0] :]
    if len(axes) == len(shape) and all(t is None or t.shape == shape for t in (weight, bias)):
        norm = ag.layer_norm(x, shape, weight, bias, eps=node["eps"]) if node["centered"] else None
        return ag.rms_norm(x, shape, weight, eps=node["eps"]) if norm is None else norm
    x = ag.sub(x, ag.mean(x, axis=tuple(axes), keepdims=True)) if node["centered"] else x
    out = ag.div(x, ag.sqrt(ag.add(ag.mean(ag.square(x), axis=tuple(axes), keepdims=True), node["eps"])))
    return ag.add(ag.mul(out, 1.0 if weight is None else weight), 0.0 if bias is None else bias)


def _fused_attention(chains: _Chains, found: ChainMatch, root: OnnxNode) -> OnnxNode | None:
    """Return a node that runs the op ``attention`` if the shapes at run time allow it, else the nodes of the chain."""
    values, scale = found.values, 1.0
    numbers = {name: chains.scalar(values[name]) for name in ("factor", "POST", "PRE", "OVER", "UNDER") if name in values}
    for name, number in numbers.items():
        scale = scale if number is None else scale * number if name in ("factor", "POST", "PRE") else scale / number
    inside = chains.in_order(found)
    turn = next((node for node in inside if node.kind == "Transpose"), None)
    axis = next(node["axis"] for node in inside if node.kind == "Softmax")
    made = {node.outputs[0] for node in inside}
    late = values["factor"] if numbers.get("factor", 1.0) is None else ""  # computed at run time
    inputs = [values["q"], values["k"], values["v"], values.get("mask", ""), late]
    inputs += [name for node in inside for name in node.inputs if name not in made and name not in inputs]
    names = list(inputs)
    if inputs[3] and not any(node.kind == "IsNaN" for node in inside):
        inputs[3] = _nan_rows(chains, inputs[3], root.opset)

    def read(node: OnnxNode, q: Tensor, k: Tensor, v: Tensor, mask: Any = None, factor: Any = None, *rest: Any) -> Any:
        order = list(range(k.ndim)) if turn is None else list(turn["perm"] or range(k.ndim)[::-1])
        order[-2:] = order[:-3:-1]  # the axes of k as keys: the chain multiplies by their transpose
        shape = tuple(k.shape[i] for i in order)
        scores = (*q.shape[:-1], *shape[-2:-1])
        if (
            q.ndim == k.ndim == v.ndim > 1 and q.shape[:-2] == shape[:-2] == v.shape[:-2] and max(q.shape[-1], v.shape[-1]) <= LARGEST
            and axis in (-1, q.ndim - 1) and (factor is None or (factor.size == 1 and factor.ndim <= k.ndim))
            and (mask is None or (mask.ndim <= q.ndim and all(n in (1, m) for n, m in zip(mask.shape[::-1], scores[::-1], strict=False))))
        ):  # fmt: skip
            keys = k if order == sorted(order) else ag.permute(k, order)
            keys = keys if factor is None else ag.mul(keys, factor)
            return ag.scaled_dot_product_attention(q, keys, v, mask, scale=scale)
        return _run_chain(inside, dict(zip(names, (q, k, v, mask, factor, *rest), strict=False)))

    return _op_node("Attention", inputs, root, {}, read)


def _nan_rows(chains: _Chains, mask: str, opset: int) -> str:
    """Return the name of a mask whose rows of ``-inf`` alone are NaN: there, a softmax gives NaN, but the op ``attention`` gives 0."""
    known, name = chains.weights.get(mask), f"{mask} with NaN"
    if known is not None and not (known.size and known.ndim and (known.max(-1) == -np.inf).any()):
        return mask
    if name not in chains.makers:
        made = OnnxNode("netcl::NanRows", [mask], [name], {}, opset)
        made.read = lambda node, x: ag.where(ag.eq(ag.amax(x, -1, keepdims=True), -math.inf), math.nan, x) if x.size and x.ndim else x
        chains.nodes.insert(chains.nodes.index(chains.makers[mask]) + 1 if mask in chains.makers else 0, made)
    return name


def _run_chain(nodes: Sequence[OnnxNode], known: dict[str, Any]) -> Any:
    """Run the nodes of a chain on its inputs ``known``; returns the result of the last."""
    for node in nodes:
        known[node.outputs[0]] = node.read(node, *(known[name] for name in node.inputs))
    return known[nodes[-1].outputs[0]]


def _quantized_product(chains: _Chains, found: ChainMatch, root: OnnxNode) -> OnnxNode | None:
    """Return a node that runs ``QLinearMatMul`` or ``QLinearConv``, or the chain where floats are faster; ``None`` if it cannot be made."""
    inside, values = chains.in_order(found), found.values
    names = [values[name] for name in ("a", "A", "za", "b", "sb", "zb", "Y", "zy", "c", "sc", "zc") if name in values]
    left, right = (next(node for node in inside if node.inputs[0] == values[name]) for name in "ab")
    product = next(node for node in inside if node.kind in ("Conv", "MatMul"))
    run: Callable[..., Tensor] = read_q_conv if (conv := product.kind == "Conv") else read_q_matmul
    weight, scales, zeros = (chains.weights.get(name) for name in names[3:6])
    other = any(node["block_size"] or node["output_dtype"] or node["precision"] for node in (left, right, root))
    if other or weight is None or scales is None or (weight.ndim != 2 and not conv):
        return None
    if scales.size > 1 and (scales.ndim > 1 or right["axis"] not in ((0, -weight.ndim) if conv else (1, -1))):
        return None
    if "c" in values:  # the bias of QLinearConv has the scale of the sums and no zero point
        bias, scale, zero = (chains.weights.get(values.get(name, ""), np.zeros(1)) for name in ("c", "sc", "zc"))
        if bias.dtype != np.int32 or zero.any() or not np.allclose(scale, chains.weights[names[1]] * scales, rtol=1e-5, atol=0):
            return None

    def read(node: OnnxNode, a: Tensor, *rest: Any) -> Any:
        b = rest[2]
        if prefers_integer_conv(product, a, b, "qdq") if conv else a.ndim > 1 and prefers_integers(a, b, a.size * b.shape[1], "qdq"):
            return run(node, a, *rest[:4], None if zeros is not None and not zeros.any() else rest[4], *rest[5:8])
        return _run_chain(inside, dict(zip(node.inputs, (a, *rest), strict=True)))

    made = OnnxNode(f"QLinear{product.kind}", names, root.outputs[:1], product.given, root.opset)
    made.read, made.codes = read, [*[0] * 7, *root.codes[2:3]]
    return made


def _norm_in_conv(chains: _Chains, found: ChainMatch, root: OnnxNode) -> OnnxNode | None:
    """Return a convolution whose weights include the batch norm after it; ``None`` if that is impossible."""
    names = [found.values[name] for name in ("scale", "shift", "mean", "var")]
    if root["training_mode"] or root["spatial"] == 0 or not chains.weights.keys() >= {*names}:
        return None
    scale, shift, mean, var = (chains.weights[name].astype(np.float64) for name in names)
    scale = scale / np.sqrt(var + root["epsilon"])
    return _scaled_conv(chains, found.nodes[1], root, scale, shift - mean * scale)


def _affine_after_conv(chains: _Chains, found: ChainMatch, root: OnnxNode) -> OnnxNode | None:
    """Return a convolution whose weights include the scalar or per-channel ``Mul`` or ``Add`` after it; ``None`` if that is impossible."""
    conv, other = found.nodes[1], chains.weights.get(found.values["c"])
    weight = chains.weights.get(conv.inputs[1])
    if weight is None or other is None or other.ndim > weight.ndim or other.dtype != weight.dtype:
        return None
    shape = (1,) * (weight.ndim - other.ndim) + other.shape
    if other.size > 1 and shape != (1, other.size, *(1,) * (weight.ndim - 2)):
        return None
    value = other.reshape(-1).astype(np.float64)
    return _scaled_conv(chains, conv, root, value, 0.0) if root.kind == "Mul" else _scaled_conv(chains, conv, root, 1.0, value)


def _affine_before_conv(chains: _Chains, found: ChainMatch, root: OnnxNode) -> OnnxNode | None:
    """Return a convolution whose weights include the scalar ``Mul`` before it, or an ``Add`` if nothing is padded; else ``None``."""
    x, other = sorted(found.nodes[1].inputs, key=chains.weights.__contains__)  # a weight may be the first operand
    weight, number = chains.weights.get(root.inputs[1]), chains.scalar(other)
    padded = any(root["pads"] or ()) or root["auto_pad"] not in ("NOTSET", "VALID")
    if number is None or weight is None or (found.nodes[1].kind == "Add" and padded):
        return None
    given = OnnxNode("Conv", [x, *root.inputs[1:]], root.outputs, root.given, root.opset)
    given.read, given.expand, given.codes = root.read, root.expand, root.codes
    if found.nodes[1].kind == "Mul":
        return _scaled_conv(chains, given, root, 1.0, 0.0, factor=number)
    return _scaled_conv(chains, given, root, 1.0, number * weight.astype(np.float64).sum(tuple(range(1, weight.ndim))))


def _scaled_conv(chains: _Chains, conv: OnnxNode, root: OnnxNode, scale: Any, shift: Any, factor: float = 1.0) -> OnnxNode | None:
    """Return a convolution that computes ``conv(factor * x) * scale + shift``; ``None`` if its weights cannot be changed."""
    if not chains.weights.keys() >= {*conv.inputs[1:]} or (conv.kind == "ConvTranspose" and conv["group"] != 1):
        return None
    first, out = chains.weights[conv.inputs[1]], 1 if conv.kind == "ConvTranspose" else 0
    before = chains.weights[conv.inputs[2]].astype(np.float64) if len(conv.inputs) > 2 else np.zeros(first.shape[out])
    prefix, taken = root.outputs[0], {*chains.weights, *chains.makers, *chains.uses, *chains.lasting}
    while not taken.isdisjoint(names := [f"{prefix}.weight", f"{prefix}.bias"]):
        prefix += "_"
    inputs = [conv.inputs[0], *names]
    made = OnnxNode(conv.kind, inputs, root.outputs[:1], conv.given, conv.opset)
    by_channel = np.reshape(scale, [-1 if axis == out and np.size(scale) > 1 else 1 for axis in range(first.ndim)])
    values = first.astype(np.float64) * by_channel * factor, before * scale + shift
    chains.weights.update({name: x.astype(first.dtype) for name, x in zip(made.inputs[1:], values, strict=True)})
    made.read, made.expand, made.codes = conv.read, conv.expand, [*conv.codes[:2], *conv.codes[1:2]]
    return made


def _gated(*gates: str) -> tuple[str, ...]:
    """Return formulas of ``x * (gate + 1) / 2`` in the orders that exporters write."""
    return tuple(text for gate in gates for text in (f"x * ({gate} + 1) * 0.5", f"x * (({gate} + 1) * 0.5)", f"(x * 0.5) * ({gate} + 1)"))


_CENTERED = "(x - ReduceMean(x))"
_DEVIATIONS = ("Sqrt(ReduceMean({0} ** 2) + eps)", "Sqrt(ReduceMean({0} * {0}) + eps)")
_LAYER = tuple(f"{_CENTERED} / {text.format(_CENTERED)}" for text in _DEVIATIONS)
_RMS = tuple(form.format(text.format("x")) for text in _DEVIATIONS for form in ("x / {0}", "x * (1 / {0})", "x * Reciprocal({0})"))
_CONVS = tuple(f"{kind}({inputs})" for kind in ("Conv", "ConvTranspose") for inputs in ("x, weight", "x, weight, bias"))
_SCORES = tuple(
    text.format(f"MatMul({q}, {keys})")
    for text in ("{}", "{} * POST", "{} / OVER")
    for q in ("q * PRE", "q / UNDER", "q")
    for keys in ("Transpose(k) * factor", "Transpose(k)", "k")
)
_SOFTMAXES = tuple(f"Softmax({scores}{mask})" for mask in (" + mask", "") for scores in _SCORES)
_DEQUANTIZED = "DequantizeLinear(a, A, za), DequantizeLinear(b, sb, zb)"
_HARD = "Clip(x + 3, 0, 6)"
_TANHS = ("x + 0.044715 * x ** 3", "x + 0.044715 * (x * x * x)")
_FUSED_CHAINS: tuple[tuple[str, tuple[str, ...], Callable[[_Chains, ChainMatch, OnnxNode], OnnxNode | None]], ...] = (
    ("Gelu", _gated("Erf(x / 1.4142135623730951)", "Erf(x * 0.7071067811865476)"), _activation("Gelu", ag.gelu)),
    (
        "Gelu (tanh)",
        _gated(*(f"Tanh(0.7978845608028654 * ({text}))" for text in _TANHS), "Tanh(x * 0.7978845608028654 * (1 + 0.044715 * x * x))"),
        _activation("Gelu", lambda x: ag.gelu(x, approximate="tanh")),
    ),
    ("Silu", ("x * Sigmoid(x)",), _activation("Swish", ag.silu)),
    ("LayerNormalization", (*(f"{form} * weight + bias" for form in _LAYER), *_LAYER), _fused_norm),
    ("RMSNormalization", tuple(f"{form} * weight" for form in _RMS), _fused_norm),
    (
        "Attention",
        tuple(f"MatMul({text}, v)" for each in _SOFTMAXES for text in (each, f"Where(IsNaN({each}), 0, {each})")),
        _fused_attention,
    ),
    *(
        (f"QLinear{kind}", tuple(f"QuantizeLinear({kind}({_DEQUANTIZED}{bias}), Y, zy)" for bias in biases), _quantized_product)
        for kind, biases in (("MatMul", ("",)), ("Conv", ("", ", DequantizeLinear(c, sc, zc)", ", DequantizeLinear(c, sc)")))
    ),
    ("Relu6", ("Min(Max(x, 0), 6)", "Max(Min(x, 6), 0)"), _activation("Relu6", ag.relu6)),
    ("HardSigmoid", (f"{_HARD} / 6", "Min(Max(x / 6 + 0.5, 0), 1)"), _activation("HardSigmoid", ag.hard_sigmoid)),
    ("HardSwish", (f"x * {_HARD} / 6", f"x * ({_HARD} / 6)", f"x * {_HARD} * 0.16666667"), _activation("HardSwish", ag.hard_swish)),
    ("Conv + BatchNormalization", tuple(f"BatchNormalization({conv}, scale, shift, mean, var)" for conv in _CONVS), _norm_in_conv),
    ("Conv + affine", tuple(f"{conv} {sign} c" for conv in _CONVS for sign in "*+"), _affine_after_conv),
    ("affine + Conv", tuple(f"Conv(x {sign} c, weight{bias})" for bias in ("", ", bias") for sign in "*+"), _affine_before_conv),
)
#: The table of fusions, tried in this order at each node: a name, formulas, and a function that makes the node, or ``None``.
FUSIONS = [(name, [ast.parse(text, mode="eval").body for text in texts], build) for name, texts, build in _FUSED_CHAINS]
