"""``@netcl.kernel``: a kernel with a gradient from a few lines of OpenCL C.

The decorated function is the signature; its docstring or ``body=`` is the OpenCL C body for element ``i`` of the result.
"""

from __future__ import annotations

import inspect
import math
import operator
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from netcl import ops
from netcl.autograd import sanitizer
from netcl.autograd.tape import Node, edges_to, grad_mode, intact, recording
from netcl.core import dtype as dtypes
from netcl.core.errors import DeviceError, DtypeError, KernelBuildError, ShapeError, message
from netcl.core.kernels.primitives import PRIMITIVE_PREAMBLE, KernelSpec
from netcl.core.tensor import Tensor
from netcl.engine.operands import operands

_SCALAR_TYPES = {"int": "int", "float": "float", "bool": "int"}
_STORED = ("float32", "float64", "int32", "int64", "uint8")
_DIM = r"\b{name}_dim(\d+)\b"


def kernel(
    function: Callable[..., Any] | None = None,
    *,
    body: str = "",
    vjp: str | Mapping[str, str] | Callable[..., Any] | None = None,
    shape: Callable[..., Sequence[int]] | None = None,
    cpu: Callable[..., Any] | None = None,
    check: bool = False,
    options: Sequence[str] = (),
) -> Any:
    """Make a kernel with a gradient from a signature and a body.

    Tensors are annotated with a dtype (``"float32"``), numbers with ``float`` or ``int``; the annotation of the result is its dtype.
    In the body, ``i`` is the index of an element of the result ``out``, ``n`` the number of elements, ``x_size`` and ``x_dim0`` .. sizes of
    the input ``x``; the macros of :data:`PRIMITIVE_PREAMBLE` may be used.

    Args:
        body: the body, if it is not the docstring.
        vjp: a body that writes ``d<input>[i]`` from ``g`` (the gradient of ``out``), the inputs and ``out``; ``i`` runs over the elements
            of the inputs. Or one body per input, or a function ``(g, *inputs, **numbers)`` of tensors that returns one gradient per tensor.
        shape: a function that returns the result's shape from the tensors. Without it, all tensors and the result have the same shape.
        cpu: the same function over NumPy arrays, for the NumPy backend.
        check: run the first call under the sanitizer (Oclgrind), if that is installed, and raise if it reports a fault.
        options: build options.

    >>> import netcl
    >>> @netcl.kernel(vjp="dx[i] = 2.0f * x[i] * g[i];", cpu=lambda x: x * x)
    ... def squared(x: "float32") -> "float32":
    ...     "out[i] = x[i] * x[i];"
    >>> squared(netcl.tensor([3.0])).tolist()
    [9.0]
    """
    if function is None:
        return lambda f: Kernel(f, body, vjp, shape, cpu, check, options)
    return Kernel(function, body, vjp, shape, cpu, check, options)


class Kernel:
    """The kernel that ``@netcl.kernel`` makes: call it with tensors and numbers; ``source()`` returns its OpenCL C."""

    def __init__(self, function: Callable[..., Any], body: str, vjp: Any, shape: Any, cpu: Any, check: bool, options: Sequence[str]):
        self.name = function.__name__
        self.body = body or inspect.getdoc(function) or ""
        if not self.body:
            raise KernelBuildError(message(self.name, "a kernel needs a body", "write it as the docstring, or pass body="))
        self.tensors, self.numbers, self.dtype = _kernel_signature(self.name, function)
        self.vjp, self.shape, self.cpu, self.check, self.options = vjp, shape, cpu, check, tuple(options)
        self.forward = self._spec(self.name, self.body, self.tensors, {"out": self.dtype})
        self.backward = self._backward_specs()
        self.__doc__ = function.__doc__

    def source(self) -> str:
        """Return the OpenCL C of the kernel and of its gradients, without the preamble."""
        sources = (spec.to_source().removeprefix(PRIMITIVE_PREAMBLE).strip() for spec in (self.forward, *self.backward.values()))
        return "\n".join(f"{source}\n" for source in sources)

    def _spec(self, name: str, body: str, inputs: Mapping[str, str], outputs: Mapping[str, str]) -> KernelSpec:
        params = [f"__global const {dtypes.DTYPES[d].c_storage}* {n}" for n, d in inputs.items()]
        params += [f"__global {dtypes.DTYPES[d].c_storage}* {n}" for n, d in outputs.items()]
        params += [f"const {c} {n}" for n, c in self.numbers.items()]
        params += [f"const int {n}" for n in _size_names(body, inputs)]
        text = f"const int i = get_global_id(0);\n  if (i >= n) return;\n  {body.strip()}"
        return KernelSpec(name, [*params, "const int n"], PRIMITIVE_PREAMBLE, text, options=self.options, guarded=True)

    def _backward_specs(self) -> dict[tuple[str, ...], KernelSpec]:
        """Return the gradient kernels by the inputs whose gradients they write; empty if ``vjp`` is a function or ``None``."""
        if self.vjp is None or callable(self.vjp):
            return {}
        bodies = {tuple(n for n in self.tensors if re.search(rf"\bd{n}\b", self.vjp)): self.vjp} if isinstance(self.vjp, str) else {
            (name,): text for name, text in self.vjp.items()}  # fmt: skip
        known = {*self.tensors, "out", "g"}
        for wrote, text in bodies.items():
            if not wrote or not set(wrote) <= set(self.tensors):
                what = "vjp must write d<input>[i] of an input"
                raise KernelBuildError(message(self.name, what, inputs=[*self.tensors], writes=[*wrote], vjp=repr(text)))
        inputs = {**self.tensors, "out": self.dtype, "g": self.dtype}
        return {wrote: self._spec(f"{self.name}_vjp_{'_'.join(wrote)}", text, {n: d for n, d in inputs.items() if n in known},
                                  {f"d{n}": self.tensors[n] for n in wrote}) for wrote, text in bodies.items()}  # fmt: skip

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
        given = dict(zip(names := (*self.tensors, *self.numbers), args, strict=False)) | kwargs
        missing, unexpected = [n for n in names if n not in given], [n for n in given if n not in names]
        if missing or unexpected or len(args) + len(kwargs) > len(names):
            what = f"the arguments must be {', '.join(names)}, each given once"
            raise TypeError(message(self.name, what, missing=missing, unexpected=unexpected, given=len(args) + len(kwargs)))
        sent = operands(self.name, [given[n] for n in self.tensors])
        inputs = {n: ops.cast(x, d) for (n, d), x in zip(self.tensors.items(), sent, strict=True)}
        numbers = {n: given[n] for n in self.numbers}
        if recording(numbers.values()):
            what = "a number has no gradient, so it must not be a tensor that requires one"
            raise DtypeError(message(self.name, what, 'annotate it as a tensor, x: "float32", or detach it', numbers=[*numbers]))
        numbers = {n: self._number(n, value) for n, value in numbers.items()}
        out = self._run(inputs, numbers)
        if recording(sent):
            Node(self.name, _kernel_rule, *edges_to(sent), (self, inputs, numbers, out.detach())).attach((out,))
        return out

    def _number(self, name: str, value: Any) -> float:
        kind = "a number" if self.numbers[name] == "float" else "an integer"
        try:
            return operator.index(value) if kind == "an integer" else value.__float__()
        except (AttributeError, TypeError, ValueError):
            raise TypeError(message(self.name, f"{name} must be {kind}", given=repr(value))) from None

    def _run(self, inputs: dict[str, Tensor], numbers: dict[str, Any]) -> Tensor:
        first = next(iter(inputs.values()))
        if first.backend == "cpu":
            if self.cpu is None:
                what = "a kernel in OpenCL C requires an OpenCL device, got the NumPy backend"
                raise DeviceError(message(self.name, what, "pass cpu= with a NumPy function, or move the tensors with .to('cl')"))
            return Tensor.from_host(first.queue, self.cpu(*(x.to_host() for x in inputs.values()), **numbers), self.dtype)
        shape = tuple(self.shape(*inputs.values())) if self.shape else first.shape
        if not self.shape and any(x.shape != shape for x in inputs.values()):
            shapes = {n: x.shape for n, x in inputs.items()}
            raise ShapeError(message(self.name, "all tensors must have the same shape", "pass shape=, a function of the tensors", **shapes))
        out = Tensor.empty(shape, self.dtype, queue=first.queue)
        self._launch(self.forward, self.body, inputs, {"out": out}, numbers, out.size)
        return out

    def _launch(
        self, spec: KernelSpec, body: str, inputs: Mapping[str, Tensor], outputs: Mapping[str, Tensor], numbers: Any, n: int
    ) -> None:
        sizes = [_size_value(name, inputs) for name in _size_names(body, inputs)]
        args = [*inputs.values(), *outputs.values(), *numbers.values(), *sizes, n]
        if self.check and sanitizer.oclgrind_available():
            self.check = False
            hosts = [a.to_host() if isinstance(a, Tensor) else a for a in args]
            report = sanitizer.check_launch(spec.to_source(), spec.name, (n,), (min(n, 64),) if n else None, hosts)
            if report:
                what = "the kernel must run without faults, but the sanitizer found some"
                raise KernelBuildError(f"{message(self.name, what)}\n\n{report}")
        spec.run(next(iter(outputs.values())).queue, (n,), None, *args)


def _kernel_rule(node: Node, F: Any, grads: Sequence[Any]) -> list[Tensor | None]:
    kernel, inputs, numbers, out = node.saved
    *kept, out = intact(node, *inputs.values(), out)
    inputs = dict(zip(inputs, kept, strict=True))
    if kernel.vjp is None:
        raise DtypeError(message(kernel.name, "this kernel has no gradient", "pass vjp= to @netcl.kernel"))
    if callable(kernel.vjp):
        back = kernel.vjp(grads[0], *inputs.values(), **numbers)
        return list(back) if isinstance(back, tuple | list) else [back]
    if grad_mode.get():
        what = "the gradient of a kernel in OpenCL C cannot be differentiated again"
        raise DtypeError(message(kernel.name, what, "give vjp as a function of tensors"))
    found: dict[str, Tensor] = {}
    given = {**inputs, "out": out, "g": ops.cast(grads[0], kernel.dtype)}
    bodies = [kernel.vjp] if isinstance(kernel.vjp, str) else list(kernel.vjp.values())
    for (wrote, spec), body in zip(kernel.backward.items(), bodies, strict=True):
        results = {f"d{n}": Tensor.zeros(inputs[n].shape, inputs[n].dtype, queue=out.queue) for n in wrote}
        kernel._launch(spec, body, given, results, numbers, max(math.prod(inputs[n].shape) for n in wrote))
        found |= {n: results[f"d{n}"] for n in wrote}
    lost = [n for n, edge in zip(inputs, node.edges, strict=True) if edge is not None and n not in found]
    if lost:
        raise DtypeError(message(kernel.name, "vjp must write the gradient of every input that requires one", "or detach it", missing=lost))
    return [found.get(n) for n in inputs]


def _kernel_signature(name: str, function: Callable[..., Any]) -> tuple[dict[str, str], dict[str, str], str]:
    """Return the tensors with their dtypes, the numbers with their C types, and the dtype of the result."""
    signature = inspect.signature(function)
    tensors, numbers = {}, {}
    for parameter in signature.parameters.values():
        kind = getattr(parameter.annotation, "__name__", str(parameter.annotation)).strip("'\"")
        if kind in _SCALAR_TYPES:
            numbers[parameter.name] = _SCALAR_TYPES[kind]
        else:
            tensors[parameter.name] = _stored_dtype(name, parameter.name, kind)
    if not tensors:
        raise DtypeError(message(name, "a kernel requires at least one tensor", 'annotate one: x: "float32"'))
    result = str(signature.return_annotation).strip("'\"")
    first = next(iter(tensors.values()))
    return tensors, numbers, first if signature.return_annotation is signature.empty else _stored_dtype(name, "the result", result)


def _stored_dtype(name: str, what: str, kind: str) -> str:
    dtype = "float32" if kind in ("_empty", "Tensor") else dtypes.lookup(kind, name).name
    if dtype not in _STORED:
        raise DtypeError(message(name, f"{what} cannot be {dtype} in a kernel", f"use one of {', '.join(_STORED)}; inputs are cast"))
    return dtype


def _size_names(body: str, inputs: Mapping[str, Any]) -> list[str]:
    """Return the size names a body uses: ``x_size``, ``x_dim0``.."""
    found = [f"{n}_size" for n in inputs if re.search(rf"\b{n}_size\b", body)]
    return found + [f"{n}_dim{d}" for n in inputs for d in sorted(set(re.findall(_DIM.format(name=n), body)))]


def _size_value(name: str, inputs: Mapping[str, Tensor]) -> int:
    tensor, _, what = name.rpartition("_")
    shape = inputs[tensor].shape
    if what == "size":
        return math.prod(shape)
    axis = int(what.removeprefix("dim"))
    if axis >= len(shape):
        raise ShapeError(message("kernel", f"{name} requires {tensor} to have dimension {axis}, got {len(shape)} dimensions", shape=shape))
    return shape[axis]
