"""Rewrites of a graph for inference: constant folding, and fusion of the chains that exporters write for one op.

A fusion is a formula over the operators of ONNX: ``x * Sigmoid(x)``. Names stand for any value, equal names for the same value. Numbers
match scalar weights. Sums and products match in both orders. A chain is fused if nothing else reads the values inside of it.
"""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any, NamedTuple

import numpy as np

import netcl.autograd as ag
from netcl import nn
from netcl.core.tensor import Tensor
from netcl.io import tree
from netcl.io.onnx.bodies import GraphBody
from netcl.io.onnx.importer import OnnxModel
from netcl.io.onnx.imports import CONTROL, HOST, ON_DEVICE, operators
from netcl.io.onnx.table import Node

#: Operators that are not folded: random ones, and those that keep weights small.
_NOT_FOLDED = {
    "Bernoulli", "DequantizeLinear", "Dropout", "Multinomial", "QuantizeLinear", "RandomNormal", "RandomNormalLike", "RandomUniform",
    "RandomUniformLike",
}  # fmt: skip
_FOLDED_BYTES = 1 << 26  # results of folding may take this much, and twice the weights
_BINARY = {ast.Add: "Add", ast.Sub: "Sub", ast.Mult: "Mul", ast.Div: "Div", ast.Pow: "Pow"}


class ChainMatch(NamedTuple):
    """The values that the names of a formula stand for, and the nodes that compute it."""

    values: Mapping[str, str]
    nodes: tuple[Node, ...]


def rewritten(body: GraphBody) -> tuple[GraphBody, Counter[str]]:
    """A graph that computes the same with fewer nodes, and how often each rewrite applied."""
    done: Counter[str] = Counter()
    nodes, weights = _fold_constants(body, done)
    chains = _Chains(nodes, weights, {*body.outputs, *(name for node in nodes for name in node.captured())})
    nodes = chains.fuse(done)
    read = {*body.outputs, *(name for node in nodes for name in (*node.inputs, *node.captured()))}
    weights = {name: x for name, x in chains.weights.items() if name in read}
    made = GraphBody(nodes, weights, body.inputs, body.outputs, body.forms)
    # Sizes and limits are read on the host, which a recording does not allow for values on the device.
    sizes = {
        name
        for node in nodes
        if node.kind not in ON_DEVICE
        for name, formal in zip(node.inputs, node.formals, strict=False)
        if formal in HOST
    }
    made.constants = (body.constants | sizes) & weights.keys()
    return made, done


def _fold_constants(body: GraphBody, done: Counter[str]) -> tuple[list[Node], dict[str, np.ndarray]]:
    """The nodes that depend on inputs, and the weights with the results of the others, computed on the host."""
    known, folded, supported = {*body.weights, ""}, list[Node](), operators() - _NOT_FOLDED - CONTROL.keys()
    for node in body.nodes:
        plain = node.kind in supported and not any(word in node.kind for word in ("Sequence", "Optional"))
        if plain and node.inputs and known.issuperset(node.inputs):
            folded.append(node)
            known.update(node.outputs)
    rest = [node for node in body.nodes if not any(node is other for other in folded)]
    read = {*body.outputs, *(name for node in rest for name in (*node.inputs, *node.captured()))}
    names = [name for node in folded for name in node.outputs if name in read and name]
    if not names:
        return list(body.nodes), dict(body.weights)
    used = {name: body.weights[name] for node in folded for name in node.inputs if name in body.weights}
    with nn.parameter.placed("cpu"), ag.no_grad():
        results = OnnxModel(GraphBody(folded, used, [], names), {})()
    results = results if isinstance(results, tuple) else (results,)
    if sum(x.nbytes for x in results) > _FOLDED_BYTES + 2 * sum(x.nbytes for x in body.weights.values()):
        return list(body.nodes), dict(body.weights)
    done["constants"] += len(folded)
    arrays = {name: tree.from_bits(tree.host_bits(x), x.dtype) for name, x in zip(names, results, strict=True)}
    return rest, {**body.weights, **arrays}


class _Chains:
    """Searches a list of nodes for formulas and replaces them. ``lasting`` are names that are read from outside of the list."""

    def __init__(self, nodes: Sequence[Node], weights: dict[str, np.ndarray], lasting: set[str]):
        self.nodes, self.weights, self.lasting = list(nodes), weights, lasting
        self.makers = {name: node for node in nodes for name in node.outputs}
        self.uses = Counter(name for node in nodes for name in node.inputs)

    def fuse(self, done: Counter[str]) -> list[Node]:
        """The nodes after all fusions; the longest chains are found first, since roots are tried from the end."""
        for root in reversed(list(self.nodes)):
            if root.outputs[0] not in self.makers or self.makers[root.outputs[0]] is not root:
                continue  # part of a chain that is fused already
            for fusion in FUSIONS:
                found = next(filter(None, (self.matched(form, root.outputs[0], ChainMatch({}, ())) for form in fusion.forms())), None)
                made = fusion.build(self, found, root) if found and self._closed(found, root) else None
                if found and made:
                    self._replace(found, root, made)
                    done[fusion.name] += 1
                    break
        return self.nodes

    def matched(self, form: ast.expr, name: str, found: ChainMatch) -> ChainMatch | None:
        """The match, extended by a value that has this form; ``None`` if it does not."""
        if isinstance(form, ast.Name):
            return found._replace(values={**found.values, form.id: name}) if found.values.get(form.id, name) == name else None
        if isinstance(form, ast.Constant):
            return found if self.equals(name, float(form.value)) else None  # type: ignore[arg-type]
        if isinstance(form, ast.BinOp):
            kind, parts = _BINARY[type(form.op)], [form.left, form.right]
        else:
            kind, parts = form.func.id, form.args  # type: ignore[attr-defined]
        node = self.makers.get(name)
        if node is None or node.kind != kind or node.outputs[0] != name or any(node.outputs[1:]):
            return None
        if len(node.inputs) != len(parts) and kind != "ReduceMean":  # whose axes may be an input
            return None
        for order in (parts, parts[::-1]) if kind in ("Add", "Mul") else (parts,):
            made: ChainMatch | None = found._replace(nodes=(*found.nodes, node))
            for part, given in zip(order, node.inputs, strict=False):
                made = made and self.matched(part, given, made)
            if made:
                return made
        return None

    def scalar(self, name: str) -> float | None:
        """The number in a weight of one element."""
        x = self.weights.get(name)
        return None if x is None or x.size != 1 or x.dtype.kind not in "fiu" else float(x.reshape(()))

    def equals(self, name: str, value: float) -> bool:
        """Whether a weight is this number, as its dtype rounds it."""
        found = self.scalar(name)
        return found is not None and abs(found - value) <= (1e-6 if self.weights[name].itemsize > 2 else 1e-3) * abs(value)

    def _closed(self, found: ChainMatch, root: Node) -> bool:
        """Whether only the chain reads the values inside of it."""
        inside = {id(node): node for node in found.nodes}.values()
        uses = Counter(name for node in inside for name in node.inputs)
        names = [node.outputs[0] for node in inside if node is not root]
        return all(uses[name] == self.uses[name] and name not in self.lasting for name in names)

    def _replace(self, found: ChainMatch, root: Node, made: Node) -> None:
        gone = {id(node) for node in found.nodes}
        self.nodes = [made if node is root else node for node in self.nodes if node is root or id(node) not in gone]
        for node in found.nodes:
            self.uses.subtract(node.inputs)
            self.makers.pop(node.outputs[0], None)
        self.uses.update(made.inputs)
        self.makers[made.outputs[0]] = made


# ---- what chains become


def _with_read(kind: str, inputs: list[str], root: Node, attributes: Mapping[str, Any], read: Callable[..., Any]) -> Node:
    made = Node(f"netcl::{kind}", inputs, root.outputs[:1], attributes, root.opset)
    made.read = read
    return made


def _activation(kind: str, op: Callable[[Tensor], Tensor]) -> Callable[..., Node]:
    return lambda chains, found, root: _with_read(kind, [found.values["x"]], root, {}, lambda node, x: op(x))


def _fused_norm(chains: _Chains, found: ChainMatch, root: Node) -> Node | None:
    eps, means = chains.scalar(found.values["eps"]), [node for node in found.nodes if node.kind == "ReduceMean"]
    axes = [_reduced_axes(chains, node) for node in means]
    if eps is None or axes[0] is None or any(other != axes[0] for other in axes) or not all(node["keepdims"] for node in means):
        return None
    kind = "LayerNormalization" if any(node.kind == "Sub" for node in found.nodes) else "RMSNormalization"
    inputs = [found.values[name] for name in ("x", "weight", "bias") if name in found.values]
    return _with_read(kind, inputs, root, {"axes": axes[0], "eps": eps, "centered": kind[0] == "L"}, _run_norm)


def _reduced_axes(chains: _Chains, node: Node) -> tuple[int, ...] | None:
    given = node["axes"] if len(node.inputs) < 2 else chains.weights.get(node.inputs[1])
    return None if given is None or not np.size(given) else tuple(np.ravel(given).tolist())


def _run_norm(node: Node, x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None) -> Tensor:
    """The norm over trailing axes as one op, over others by its formula."""
    axes = sorted(axis % x.ndim for axis in node["axes"])
    shape = x.shape[axes[0] :]
    if len(axes) == len(shape) and all(t is None or t.shape == shape for t in (weight, bias)):
        if node["centered"]:
            return ag.layer_norm(x, shape, weight, bias, eps=node["eps"])
        return ag.rms_norm(x, shape, weight, eps=node["eps"])
    x = ag.sub(x, ag.mean(x, axis=tuple(axes), keepdims=True)) if node["centered"] else x
    out = ag.div(x, ag.sqrt(ag.add(ag.mean(ag.square(x), axis=tuple(axes), keepdims=True), node["eps"])))
    out = out if weight is None else ag.mul(out, weight)
    return out if bias is None else ag.add(out, bias)


def _folded_norm(chains: _Chains, found: ChainMatch, root: Node) -> Node | None:
    """A convolution whose weights include the batch norm after it; computed in float64."""
    conv, names = found.nodes[1], [found.values[name] for name in ("weight", "scale", "shift", "mean", "var")]
    if root["training_mode"] or root["spatial"] == 0 or not chains.weights.keys() >= {*names, *conv.inputs[2:]}:
        return None
    weight, scale, shift, mean, var = (chains.weights[name].astype(np.float64) for name in names)
    before = chains.weights[conv.inputs[2]].astype(np.float64) if len(conv.inputs) > 2 else 0.0
    scale = scale / np.sqrt(var + root["epsilon"])
    made = Node("Conv", [conv.inputs[0], f"{root.outputs[0]}.weight", f"{root.outputs[0]}.bias"], root.outputs[:1], conv.given, conv.opset)
    values = weight * scale.reshape(-1, *(1,) * (weight.ndim - 1)), (before - mean) * scale + shift
    dtype = chains.weights[names[0]].dtype
    chains.weights.update({name: x.astype(dtype) for name, x in zip(made.inputs[1:], values, strict=True)})
    made.read, made.expand, made.codes = conv.read, conv.expand, [*conv.codes[:2], *conv.codes[1:2]]
    return made


class Fusion(NamedTuple):
    """One line of the table: its formulas, and a function that makes the node, or returns ``None`` if the chain does not allow it."""

    name: str
    texts: tuple[str, ...]
    build: Callable[[_Chains, ChainMatch, Node], Node | None]

    def forms(self) -> list[ast.expr]:
        """The formulas, parsed."""
        return [_formula(text) for text in self.texts]


@cache
def _formula(text: str) -> ast.expr:
    return ast.parse(text, mode="eval").body


def _gated(*gates: str) -> tuple[str, ...]:
    """``x`` times half of one plus a gate, in the orders that exporters write."""
    forms = ("x * ({0} + 1) * 0.5", "x * (({0} + 1) * 0.5)", "(x * 0.5) * ({0} + 1)")
    return tuple(form.format(gate) for gate in gates for form in forms)


_CENTERED = "(x - ReduceMean(x))"
_SQUARES = ("{0} ** 2", "{0} * {0}")
_DEVIATIONS = tuple(f"Sqrt(ReduceMean({square}) + eps)" for square in _SQUARES)
_LAYER = tuple(f"{_CENTERED} / {text.format(_CENTERED)}" for text in _DEVIATIONS)
_RMS = tuple(form.format(text.format("x")) for text in _DEVIATIONS for form in ("x / {0}", "x * (1 / {0})", "x * Reciprocal({0})"))
#: Tried in this order at each node.
FUSIONS = (
    Fusion("Gelu", _gated("Erf(x / 1.4142135623730951)", "Erf(x * 0.7071067811865476)"), _activation("Gelu", ag.gelu)),
    Fusion(
        "Gelu (tanh)",
        _gated(
            "Tanh(0.7978845608028654 * (x + 0.044715 * x ** 3))",
            "Tanh(0.7978845608028654 * (x + 0.044715 * (x * x * x)))",
            "Tanh(x * 0.7978845608028654 * (1 + 0.044715 * x * x))",
        ),
        _activation("Gelu", lambda x: ag.gelu(x, approximate="tanh")),
    ),
    Fusion("Silu", ("x * Sigmoid(x)",), _activation("Swish", ag.silu)),
    Fusion("LayerNormalization", (*(f"{form} * weight + bias" for form in _LAYER), *_LAYER), _fused_norm),
    Fusion("RMSNormalization", tuple(f"{form} * weight" for form in _RMS), _fused_norm),
    Fusion(
        "Conv + BatchNormalization",
        tuple(f"BatchNormalization(Conv({inputs}), scale, shift, mean, var)" for inputs in ("x, weight", "x, weight, bias")),
        _folded_norm,
    ),
)
