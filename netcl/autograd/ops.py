"""Functions that run an op and record it if gradients need it. Most are generated from the table of ops; typed in ``op_functions.pyi``."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial, wraps
from typing import Any

from netcl import ops
from netcl.amp.autocast import autocast, autocast_block, cast_arguments, get_autocast_dtype
from netcl.autograd.backward_pass import run_backward
from netcl.autograd.tape import (
    LASTING,
    Edge,
    Node,
    anomaly_mode,
    differentiable_ops,
    edges_to,
    enable_grad,
    grad_mode,
    intact,
    like,
    make_like,
    make_saved,
    modes,
    recording,
    set_detect_anomaly,
)
from netcl.core.dtype import DTYPES, HALVES
from netcl.core.errors import AutogradError, DtypeError, message
from netcl.core.tensor import Tensor
from netcl.core.writes import clock
from netcl.engine import pointwise, registry
from netcl.engine.expression import compose
from netcl.engine.map_kernel import factor_of
from netcl.engine.operands import Like, common_dtype, operands
from netcl.engine.registry import Choice, Composite, Op, Pointwise, Reduction
from netcl.ops import update, views
from netcl.ops.movement import LAYOUTS

_twins: dict[str, tuple[Any, Callable[..., Any]]] = {}
#: torch's names of parameters and the names here. ``input`` and ``other`` stand for the first two inputs.
TORCHS_WORDS = (
    ("dim", "axis"), ("dims", "axis"), ("dims", "axes"), ("keepdim", "keepdims"), ("start_dim", "start_axis"), ("end_dim", "end_axis"),
    ("dim0", "axis0"), ("dim1", "axis1"), ("unbiased", "correction"), ("tensors", "xs"), ("size", "shape"), ("weight", "w"),
    ("source", "src"), ("value", "src"), ("split_size_or_sections", "sizes"), ("split_size", "sizes"), ("split_sizes", "sizes"),
    ("dims", "repeats"),
    ("exponent", "b"), ("mat2", "b"), ("vec2", "b"), ("tensor1", "b"), ("tensor2", "c"), ("end", "b"), ("values", "b"), ("self", "a"),
    ("query", "q"), ("key", "k"), ("value", "v"), ("elements", "x"), ("test_elements", "values"), ("tensor", "a"),
    ("upscale_factor", "factor"), ("downscale_factor", "factor"),
)  # fmt: skip


def twin(name: str) -> Callable[..., Any]:
    """Return the function of the op ``name`` in this module, made at first use."""
    row = registry.REGISTRY[registry.ALIASES.get(name, name)]
    known = _twins.get(name)
    if known is None or known[0] is not row:
        function = ops.function_of(row)
        known = _twins[name] = (row, _make(row, function, _torchs_words(row, inspect.signature(function).parameters)))
    return known[1]


def apply_op(name: str, *args: Any, **kwargs: Any) -> Any:
    """Call the function ``netcl.autograd.<name>`` and return its result."""
    return twin(name)(*args, **kwargs)


def _torchs_words(row: Any, parameters: Mapping[str, Any]) -> dict[str, str]:
    """Map torch's parameter names to netcl's. ``max`` and ``min`` map only names of inputs, because ``dim`` is not ``axis`` there."""
    words = {} if row.name in ("max", "min") else {theirs: ours for theirs, ours in TORCHS_WORDS if ours in parameters}
    words |= dict(zip(("input", "other"), row.inputs[row.name in ("where", "searchsorted") :], strict=False))  # their input is the second
    words |= {name: name for name, (rows, _) in EXTRAS.items() if row.name in rows}
    if isinstance(row, Composite) and "reduction" in parameters:
        words |= {"size_average": "size_average", "reduce": "reduce"}
    return {theirs: ours for theirs, ours in words.items() if theirs not in parameters}


#: Parameters that signatures show under torch's name; the second input is ``other`` where it has no better one.
_SHOWN = {"axis": "dim", "axes": "dims", "keepdims": "keepdim", "start_axis": "start_dim", "end_axis": "end_dim", "axis0": "dim0",
          "axis1": "dim1", "a": "input", "xs": "tensors", "w": "weight", "q": "query", "k": "key", "v": "value", "b": "other"}  # fmt: skip
_SECOND = {"pow": "exponent", "mm": "mat2", "bmm": "mat2", "outer": "vec2", "lerp": "end", "addcmul": "tensor1", "addcdiv": "tensor1"}


def signature(name: str) -> tuple[inspect.Signature, dict[str, str]]:
    """Return the signature of an op with torch's names, and the aliases of its parameters, ``{alias: name}``; inputs have none."""
    row = registry.lookup_op(name)
    own = inspect.signature(ops.function(row.name))
    taken = own.parameters
    words = _torchs_words(row, taken)
    shown = {ours: theirs for ours, theirs in _SHOWN.items() if words.get(theirs) == ours and (len(ours) > 1 or ours in row.inputs)}
    shown |= {"b": _SECOND[name]} if name in _SECOND else {"axis": "dims"} if name in ("flip", "roll") and "axis" in taken else {}
    if row.inputs and row.inputs[0] in ("x", "a", "p", "index") and "input" not in taken:
        shown[row.inputs[0]] = "input"
    own_only = {"widen"} if row.amp == "wide" else set()  # set by autocast
    visible = [p for p in taken.values() if p.kind is not p.VAR_KEYWORD and p.name not in own_only]
    parameters = [p.replace(name=shown.get(p.name, p.name)) for p in visible]
    more = [extra for extra in EXTRAS if words.get(extra) == extra]
    parameters += [inspect.Parameter(extra, inspect.Parameter.KEYWORD_ONLY, default=None) for extra in more]
    others = {theirs: ours for theirs, ours in words.items() if ours not in (theirs, *row.inputs)} | {ours: ours for ours in shown}
    return own.replace(parameters=parameters), {
        other: shown.get(ours, ours) for other, ours in others.items() if ours not in row.inputs and other != shown.get(ours, ours)
    }


def _cast_first(call: Callable[..., Any], x: Any, *args: Any, dtype: Any, **kwargs: Any) -> Any:
    if dtype is None:
        return call(x, *args, **kwargs)
    x = twin("cast")(x, dtype)
    made = call(x, *args, **kwargs)
    if DTYPES[made.dtype].is_float and not DTYPES[x.dtype].is_float:
        raise DtypeError(message("dtype", "dtype must be a float dtype for this reduction", "cast the result instead", dtype=x.dtype))
    return made if made.dtype == x.dtype or kwargs.get("out") is not None else twin("cast")(made, x.dtype)  # sums of integers are int64


def scaled(x: Any, other: Any, alpha: Any) -> Any:
    """Return ``other * alpha`` in the dtype of ``x + other``; ``alpha`` does not promote a tensor of the same kind of numbers."""
    if alpha == 1:
        return other
    alpha = factor_of("add", alpha, x, other)
    if not (isinstance(x, Tensor) and isinstance(other, Tensor)):
        return other * alpha
    return twin("cast")(other, common_dtype((x, other)).name) * alpha


def _scale_last(call: Callable[..., Any], *args: Any, alpha: Any, **kwargs: Any) -> Any:
    last = next((name for name in ("b", "src") if name in kwargs), None)
    if last is not None:
        return call(*args, **{**kwargs, last: scaled(args[0] if args else kwargs["a"], kwargs[last], alpha)})
    return call(*args[:-1], scaled(args[0], args[-1], alpha), **kwargs)


def _rounded_quotient(call: Callable[..., Any], a: Any, b: Any, *, rounding_mode: str | None, **kwargs: Any) -> Any:
    if rounding_mode not in (None, "floor", "trunc"):
        raise ValueError(message("div", 'rounding_mode must be None, "floor" or "trunc"', rounding_mode=repr(rounding_mode)))
    if rounding_mode == "trunc":
        if any(isinstance(x, float) or getattr(x, "dtype", "int64").startswith(("float", "bfloat")) for x in (a, b)):
            return twin("trunc")(call(a, b), **kwargs)
        a = twin("sub")(a, twin("fmod")(a, b))  # exact in integers
    return call(a, b, **kwargs) if rounding_mode is None else twin("floor_divide")(a, b, **kwargs)


def older_reduction(size_average: bool | None, reduce: bool | None) -> dict[str, str]:
    """Return ``{"reduction": ...}`` for torch's older parameters ``size_average`` and ``reduce``; empty if neither is given."""
    if size_average is None and reduce is None:
        return {}
    return {"reduction": "none" if reduce is False else "sum" if size_average is False else "mean"}


def _with_older_reduction(call: Callable[..., Any], *args: Any, size_average: Any = None, reduce: Any = None, **kwargs: Any) -> Any:
    return call(*args, **kwargs | older_reduction(size_average, reduce))


#: torch's parameters that no row has: the ops that take them, and the function that implements them. The last two are those of losses.
EXTRAS: dict[str, tuple[Sequence[str], Callable[..., Any]]] = {
    "dtype": (("sum", "mean", "prod", "cumsum", "cumprod", "nansum", "nanmean", "softmax", "log_softmax", "norm"), _cast_first),
    "alpha": (("add", "sub", "index_add"), _scale_last),
    "rounding_mode": (("div",), _rounded_quotient),
    "stable": (("sort", "argsort"), lambda call, *args, stable, **kwargs: call(*args, **kwargs)),
    "size_average": ((), _with_older_reduction),
    "reduce": ((), _with_older_reduction),
}


def _round_decimals(call: Callable[..., Any], x: Any, *, decimals: int | None, **kwargs: Any) -> Any:
    if not decimals or not DTYPES[x.dtype].is_float:
        return call(x, **kwargs)
    scale, wide = 10.0 ** abs(decimals), twin("cast")(x, "float32") if x.dtype in HALVES else x
    made = call(wide * scale if decimals > 0 else wide / scale)
    made = twin("div" if decimals > 0 else "mul")(made, scale, **kwargs if wide is x else {})
    return made if wide is x else twin("cast")(made, x.dtype, **kwargs)


def _nonzero_tuple(call: Callable[..., Any], x: Any, *, as_tuple: bool | None, **kwargs: Any) -> Any:
    places = call(x, **kwargs)
    return tuple(places.unbind(1)) if as_tuple else places


EXTRAS["decimals"] = (("round",), _round_decimals)
EXTRAS["as_tuple"] = (("nonzero",), _nonzero_tuple)


def put(name: str, function: Callable[..., Any]) -> None:
    """Make ``function`` the differentiable function of an op, instead of the generated one."""
    _twins[name] = (registry.lookup_op(name), function)


@cache
def _note_of(name: str) -> Callable[..., None]:
    return _structured(registry.lookup_op(name))  # type: ignore[arg-type]


def record(name: str, out: Tensor, *args: Any) -> None:
    """Record ``out`` as the result of the op ``name`` on ``args``, without running the op."""
    anomaly = anomaly_mode.set(False)  # the stand-in tensors have no values to check
    try:
        _note_of(name)(out, args, {})
    finally:
        anomaly_mode.reset(anomaly)


def cast_together(tensors: Sequence[Tensor], dtype: str) -> list[Tensor]:
    """Cast tensors to another float dtype, in one launch per 64, and record the casts. Returns nothing while a tracer observes all ops."""
    if modes.observer is not None or not tensors:
        return []
    made = [Tensor.empty(x.shape, dtype, queue=x.queue) for x in tensors]
    update.apply(update.COPY, [made, tensors])
    for x, result in zip(tensors, made, strict=True):
        record("cast", result, x, dtype)
    return made


def keeps_first(name: str) -> bool:
    """Whether backward of an op may read its first input."""
    row = registry.lookup_op(name)
    if isinstance(row, Pointwise | Choice):
        return any(_kept_inputs(form)[0][0] for form in (row.rows if isinstance(row, Choice) else (row,)))
    return isinstance(row, Composite) or row.inputs[0] in row.saved()


def _make(row: Any, function: Callable[..., Any], words: Mapping[str, str]) -> Callable[..., Any]:
    forward, policy = function, row.amp
    bias = row.inputs.index("bias") if isinstance(row, Op | Composite) and row.bias_stays else -1
    if row.name in LAYOUTS:
        forward = _linked(row, forward)
    if isinstance(row, Composite):
        forward, note = _composite(row), None
        policy = "keep" if policy == "wide" else policy  # its parts are wide
    elif not row.differentiable:
        note = None
    else:
        note = _pointwise(row) if isinstance(row, Pointwise | Choice) else _structured(row)

    def recorded(*args: Any, **kwargs: Any) -> Any:
        out = forward(*args, **kwargs)
        if note is not None and needs_recording(args, kwargs):
            note(out, args, kwargs)
        return out

    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if kwargs and not words.keys().isdisjoint(kwargs):
            given, kwargs = kwargs, {words.get(name, name): value for name, value in kwargs.items()}
            if len(kwargs) < len(given) or (args and row.inputs and row.inputs[0] in kwargs):
                raise TypeError(message(row.name, "an argument must not be given twice", positional=len(args), named=", ".join(given)))
            if extra := EXTRAS.keys() & kwargs.keys() & words.keys():
                return EXTRAS[extra.pop()][1](call, *args, **kwargs)
            if row.inputs and row.inputs[0] in kwargs:  # input=: the code below expects the first tensor as args[0]
                args = (kwargs.pop(row.inputs[0]), *args)
        if policy != "keep" and autocast_block.get() is not None:
            traced = modes.observer is not None  # a tracer records casts: operators of other runtimes have inputs of one dtype
            args, kwargs = cast_arguments("float" if traced and policy == "wide" else policy, args, kwargs, -1 if traced else bias)
        if kwargs and note is not None and kwargs.get("out") is not None and needs_recording(args, kwargs):
            what = "out= cannot be used with an input that requires a gradient, because the call is not recorded"
            raise AutogradError(message(row.name, what, "drop out=, or call it inside no_grad()", out=kwargs["out"].shape))
        observer = modes.observer
        if observer is not None:
            return observer(row, recorded, *args, **kwargs)
        out = forward(*args, **kwargs)  # inlines recorded(): one Python call less per op
        if note is not None and needs_recording(args, kwargs):
            note(out, args, kwargs)
        return out

    call.__module__ = "netcl.autograd"
    return call


def _linked(row: Op, forward: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``forward`` of an op that returns views. The wrapper links every result to its base, except inside backward."""
    layout = LAYOUTS[row.name]

    def call(x: Any, *args: Any, **kwargs: Any) -> Any:
        out = forward(x, *args, **kwargs)
        if modes.finishers is None and isinstance(x, Tensor):
            views.link(x, out, layout, args, kwargs)
        return out

    return call


def needs_recording(args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether a call must be recorded: gradients are enabled, and a tensor in the arguments (or in a list or tuple) requires one."""
    for x in (*args, *kwargs.values()) if kwargs else args:
        if isinstance(x, Tensor):
            if x._requires_grad:
                return grad_mode.get()
        elif isinstance(x, (list, tuple)) and recording(x):
            return True
    return False


def _composite(row: Composite) -> Callable[..., Any]:
    function = partial(row.call, differentiable_ops())
    if row.amp != "float":
        return function

    def call(*args: Any, **kwargs: Any) -> Any:
        if get_autocast_dtype() is None:
            return function(*args, **kwargs)
        with autocast(enabled=False):  # of its parts too, products among them
            return function(*args, **kwargs)

    return call


# ---- pointwise


def _pointwise(row: Pointwise | Choice) -> Callable[[Any, Sequence[Any], dict[str, Any]], None]:
    names = (*row.inputs, *row.params)

    def note(out: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        chosen: Any = row
        values: Sequence[Any] = args
        params: Mapping[str, Any] = row.params
        if params or kwargs:
            given = dict(zip(names, args, strict=False)) | kwargs
            chosen, params = row.resolve({name: given[name] for name in row.params if name in given})
            values = [given[name] for name in chosen.inputs]
            if chosen is not row:  # the bounds of clamp may be tensors
                params = {name: value for name, value in params.items() if name in chosen.params}
        keeps, keeps_out = _kept_inputs(chosen)
        if not all([isinstance(x, Tensor) for x in values]):
            values = operands(row.name, values)
        inputs: list[Any] = []
        edges: list[Edge] = []
        likes: list[Like | None] = []
        for kept, x in zip(keeps, values, strict=True):
            edge = kind = None
            if isinstance(x, Tensor):
                kind = make_like((x.shape, x.dtype))
                if x.requires_grad:
                    edge = (x, 0) if x.grad_fn is None else (x.grad_fn, x.output_nr)  # inlines edge_of()
            inputs.append(x if kept or kind is None else kind)
            edges.append(edge)
            likes.append(edge and kind)
        saved = make_saved((chosen, inputs, params, out.detach() if keeps_out else None))
        Node(row.name, _pointwise_rule, edges, likes, saved).attach((out,))

    return note


@cache
def _kept_inputs(row: Pointwise) -> tuple[tuple[bool, ...], bool]:
    """Return, per input, whether backward reads it, and whether backward reads the result."""
    kept = row.saved()
    return tuple([f"v{i}" in kept for i in range(row.arity)]), "out" in kept


def _pointwise_rule(node: Node, F: Any, grads: Sequence[Any]) -> list[Any]:
    row, inputs, params, out = node.saved
    if clock.last > node.order:
        inputs, out = intact(node, inputs, out)
    g = grads[0]
    wanted = [edge is not None for edge in node.edges]
    if not grad_mode.get():
        return pointwise.run_vjp(row, g, out, inputs, params, wanted)
    env = {f"v{i}": x for i, x in enumerate(inputs)} | dict(params) | {"g": g, "out": _as_output(node, out)}
    return [compose(text, env, F, row.let) if want and text else None for want, text in zip(wanted, row.vjp, strict=True)]


def _as_output(node: Node, out: Tensor | None, index: int = 0) -> Tensor | None:
    """Return a saved output (or ``None``) with ``node`` as its ``grad_fn``; it is saved without ``grad_fn`` to avoid a reference cycle."""
    if out is None:
        return None
    recorded = out.detach()
    recorded._requires_grad, recorded.grad_fn, recorded.output_nr = True, node, index
    return recorded


# ---- functions


def _structured(row: Op | Reduction) -> Callable[[Any, Sequence[Any], dict[str, Any]], None]:
    binder = row.bind if isinstance(row, Reduction) else _binder(row)
    kept = row.saved()
    keeps, reads_outputs = [name in kept for name in row.inputs], bool(kept & {"out", *registry.OUTPUTS})
    rule = _structured_rule if row.formula is None else _formula_rule

    def note(out: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        inputs, keywords = binder(*args, **kwargs)
        outputs = out if isinstance(out, tuple) else (out,)
        if not outputs or outputs[0] is inputs[0]:  # for instance, a cast to its own dtype returns its input
            return
        edges: list[Edge] = []
        likes: list[Like | None] = []
        saved: list[Any] = []
        learning = False
        for wanted, x in zip(keeps, inputs, strict=True):
            if isinstance(x, Tensor):
                kind = make_like((x.shape, x.dtype))
                saved.append(x if wanted else kind)
                if x._requires_grad:
                    learning = True
                    edges.append((x, 0) if x.grad_fn is None else (x.grad_fn, x.output_nr))
                    likes.append(kind)
                else:
                    edges.append(None)
                    likes.append(None)
            else:
                parts = x if isinstance(x, (list, tuple)) and any(isinstance(part, Tensor) for part in x) else (x,)
                if parts and parts[0] is outputs[0]:
                    return
                learning = learning or recording(parts)
                more_edges, more_likes = edges_to(parts)
                edges += more_edges
                likes += more_likes
                saved.append(None if x is None else _kept_input(x, wanted, outputs[0]))
        if learning:
            read = [o.detach() if "out" in kept or f"out{i}" in kept else None for i, o in enumerate(outputs)] if reads_outputs else None
            Node(row.name, rule, edges, likes, make_saved((row, saved, keywords, read))).attach(outputs)

    return note


def _binder(row: Op) -> Callable[..., tuple[tuple[Any, ...], dict[str, Any]]]:
    """Return a function that binds the arguments of a call; faster than ``inspect`` and unchecked, because the op has checked them."""
    names, defaults, star = [], {}, None
    for p in inspect.signature(row.call).parameters.values():
        if p.kind is p.VAR_KEYWORD:
            return row.bind
        if p.kind is p.VAR_POSITIONAL:
            star = p.name
        elif p.kind is not p.KEYWORD_ONLY:
            names.append(p.name)
        if p.default is not p.empty:
            defaults[p.name] = p.default

    count = len(row.inputs)
    rest = {name: value for name, value in defaults.items() if name not in row.inputs and name != "out"}
    plain = star is None and tuple(names[:count]) == tuple(row.inputs)

    def bind(*args: Any, **kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if plain and len(args) == count and not kwargs:
            return args, rest
        given = defaults | dict(zip(names, args, strict=False)) | kwargs
        if star is not None:
            given[star] = args[len(names) :]
        given.pop("out", None)
        return tuple(map(given.pop, row.inputs)), given

    return bind


def _kept_input(x: Any, kept: bool, out: Tensor) -> Any:
    if isinstance(x, Tensor):
        return x if kept else like(x)
    if isinstance(x, (list, tuple)) and any(isinstance(part, Tensor) for part in x):
        return [_kept_input(part, kept, out) for part in x]
    return x if x is None or not kept else Tensor.from_host(out.queue, x)


def _structured_rule(node: Node, F: Any, grads: Sequence[Any]) -> list[Any]:
    row, inputs, keywords, outs = node.saved
    if clock.last > node.order:
        inputs, outs = intact(node, inputs, outs)
    if outs is not None and grad_mode.get():
        outs = [_as_output(node, out, i) for i, out in enumerate(outs)]
    several = len(node.outputs) > 1
    out = None if outs is None else (tuple(outs) if several else outs[0])
    # A vjp may skip unwanted gradients, and needs kernels with a gradient only where it is recorded.
    keywords = {**keywords, "needs": tuple([edge is not None for edge in node.edges]), "recorded": grad_mode.get()}
    back = registry.call_vjp(row, F, tuple(grads) if several else grads[0], out, inputs, keywords)
    flat: list[Any] = []
    for x, gradient in zip(inputs, back, strict=True):
        if isinstance(x, list):
            flat.extend(gradient if gradient is not None else [None] * len(x))
        else:
            flat.append(gradient)
    return flat


def _formula_rule(node: Node, F: Any, grads: Sequence[Any]) -> list[Any]:
    """Return the gradients by the ``vjp`` of the row, or else by differentiating its ``formula``."""
    row, inputs, options, _ = node.saved
    if row.vjp is not None and (back := _structured_rule(node, F, grads))[0] is not NotImplemented:
        return back
    if clock.last > node.order:
        (inputs,) = intact(node, inputs)
    recorded, F = grad_mode.get(), differentiable_ops()
    with autocast(enabled=False), set_detect_anomaly(False), enable_grad():
        fresh = [
            x if edge is None else F.reshape(x, x.shape) if recorded else x.detach().requires_grad_()
            for x, edge in zip(inputs, node.edges, strict=True)
        ]
        made = row.formula(F, *fresh, **options)
    outputs = made if isinstance(made, tuple) else (made,)
    pairs = [(out, g) for out, g in zip(outputs, grads, strict=True) if g is not None and out.requires_grad]
    wanted = [x for x, edge in zip(fresh, node.edges, strict=True) if edge is not None]
    found = iter(run_backward([out for out, _ in pairs], [g for _, g in pairs], wanted=wanted, create_graph=recorded))
    return [None if edge is None else next(found) for edge in node.edges]


def find_twin(name: str) -> Callable[..., Any] | None:
    """Return the differentiable function of an op, or ``None`` if no op has this name."""
    return twin(name) if name in registry.REGISTRY or name in registry.ALIASES else None


def module_attribute(module: dict[str, Any], name: str) -> Callable[..., Any]:
    """Return the function of an op as an attribute of a module, and add it to ``module``, the module's own names."""
    if (found := find_twin(name)) is None:
        raise AttributeError(f"module {module['__name__']!r} has no attribute {name!r}")
    if name in LASTING:
        module[name] = found  # a look-up costs as much as the checks of a small op
    return found


__getattr__ = partial(module_attribute, globals())
