"""Two-dimensional convolutions, their gradients (also ops, so that they can be differentiated), and ops built on them."""

from __future__ import annotations

from typing import Any

from netcl.core.dtype import sum_dtype
from netcl.core.errors import DtypeError, ShapeError, message
from netcl.core.tensor import Tensor, with_shape
from netcl.engine import launch
from netcl.engine.registry import S, composite, op
from netcl.ops.conv import arrays, columns, plans
from netcl.ops.conv.geometry import Geometry, Padding, Pair, frozen, geometry, pair, transposed_size
from netcl.ops.epilogue import Epilogue, activation_vjp
from netcl.ops.images import for_image, from_signal
from netcl.ops.matmul.gemm import Extras


def _conv_tensors(name: str, **tensors: Tensor | None) -> list[Any]:
    """Return the arguments of a call as tensors; raises unless all have one device and one floating-point dtype.

    A bias may have the dtype of the sums instead: float32 for 16-bit tensors.
    """
    given = launch.as_tensors(name, *tensors.values())
    (first, x), *others = ((label, t) for label, t in zip(tensors, given, strict=True) if t is not None)
    launch.check_dtype(name, x, name=first)
    for label, t in others:
        if t.dtype != x.dtype and not (label == "bias" and t.dtype == sum_dtype(x.dtype)):
            remedy = "cast one to the dtype of the other"
            raise DtypeError(message(name, f"{label} must be {x.dtype} like {first}, got {t.dtype}", remedy, **{f"{label}.shape": t.shape}))
    return given


def _check_bias(name: str, bias: Tensor | None, channels: int) -> None:
    if bias is not None and bias.shape != (channels,):
        raise ShapeError(message(name, f"bias must have one value for each of {channels} filters", **{"bias.shape": bias.shape}))


def _convolve(name: str, x: Any, w: Any, bias: Any, options: tuple[Any, ...], relu: bool) -> Tensor:
    x, w, bias = _conv_tensors(name, x=x, w=w, bias=bias)
    if x.ndim == 3:
        y = _convolve(name, with_shape(x, (1, *x.shape)), w, bias, options, relu)
        return with_shape(y, y.shape[1:])
    g = geometry(name, x.shape, w.shape, *options)
    _check_bias(name, bias, g.f)
    if x.backend == "cpu":
        return launch.run_cpu(arrays.conv_forward, x, w, bias, g=g, relu=relu)
    return conv2d_with(x, w, Extras(Epilogue(x.dtype, activation="relu" if relu else ""), bias), g)


def conv2d_with(x: Tensor, w: Tensor, extras: Extras, g: Geometry) -> Tensor:
    """Return :func:`conv2d` with the ops of ``extras`` as its epilogue; OpenCL only."""
    epilogue, bias, residual, scale, kept = extras
    y = Tensor.empty(g.y_shape, epilogue.stored, queue=x.queue)
    if not y.size:
        return y
    relu = epilogue == Epilogue(x.dtype, activation="relu")
    late = None if scale == 1 and (relu or epilogue.plain) else epilogue
    conv = plans.Convolution(plans.FORWARD, g, x.dtype, "" if bias is None else bias.dtype, relu and late is None, late, kept)
    plans.run(conv, x.queue, x, w, y, bias=bias, residual=residual, scale=scale)
    return y


def _backward(dy: Tensor, w: Tensor, bias: Tensor | None, g: Geometry) -> Tensor:
    if dy.backend == "cpu":
        return launch.run_cpu(arrays.input_grad, dy, w, bias, g=g)
    dx = Tensor.empty(g.x_shape, dy.dtype, queue=dy.queue)
    if dx.size:
        plans.run(plans.Convolution(plans.INPUT_GRAD, g, dy.dtype, "" if bias is None else bias.dtype), dy.queue, dy, w, dx, bias=bias)
    return dx


def _conv_options(stride: Any, padding: Any, dilation: Any, groups: Any, pad: Any = None) -> tuple[Any, ...]:
    return frozen(stride), frozen(padding if pad is None else pad), frozen(dilation), frozen(groups)


# ---- the convolution


def _without_batch(F, vjp, g, x, *args):
    """Compute the gradients of a convolution of one image that was given without a batch axis."""
    dx, *others = vjp(F, F.unsqueeze(g, 0), F.unsqueeze(x, 0), *args)
    return dx if dx is None else F.squeeze(dx, 0), *others


def _conv2d_vjp(F, g, x, w, bias_dtype, needs, stride, padding, dilation, groups, pad):
    if len(x.shape) == 3:
        return _without_batch(F, _conv2d_vjp, g, x, w, bias_dtype, needs, stride, padding, dilation, groups, pad)
    options = {"stride": stride, "padding": padding if pad is None else pad, "dilation": dilation, "groups": groups}
    dx = F.conv2d_input_grad(g, w, size=x.shape[2:], **options) if needs[0] else None
    dw = F.conv2d_weight_grad(g, x, kernel=w.shape[2:], **options) if needs[1] else None
    return dx, dw, F.sum(g, axis=(0, 2, 3), widen=bias_dtype != g.dtype) if bias_dtype and needs[2] else None


_CONV_SAMPLES = [
    S((3, 5, 4, 2), (6, 5, 4, 2), (6,)),
    S((2, 3, 7, 6), (4, 3, 3, 3), (4,), padding=1),
    S((1, 4, 9, 17), (5, 4, 3, 2), stride=2, padding=(1, 0)),
    S((2, 6, 8, 11), (8, 3, 3, 3), (8,), groups=2, padding=(2, 1), dilation=2),
    S((2, 5, 7, 9), (10, 1, 3, 3), groups=5, stride=(2, 1), padding=1),
    S((1, 6, 10, 33), (6, 1, 5, 4), (6,), groups=6, padding="same"),
    S((3, 17, 5, 5), (19, 17, 1, 1), (19,)),
    S((1, 3, 16, 21), (7, 3, 7, 7), stride=(3, 2), padding=((3, 2), (1, 4))),
    S((2, 65, 4, 4), (13, 65, 3, 3), padding=1),
    S((2, 33, 5, 6), (34, 33, 3, 3), (34,), padding=1),
    S((1, 2, 1, 41), (3, 2, 1, 5), padding="valid", dilation=(1, 3)),
]
_CONV_ERRORS: list[Any] = [
    (S((8, 4, 32, 32), (16, 3, 3, 3)),
     r"\[conv2d\] x must have 3 channels \(w.shape\[1\] \* groups\), got 4; x.shape=\(8, 4, 32, 32\), w.shape=\(16, 3, 3, 3\)"),
    (S((3, 8), (4, 3, 3, 3)), r"\[conv2d\] x must have 4 dimensions \(or 3, .* and w 4; x.shape=\(3, 8\), w.shape=\(4, 3, 3, 3\)"),
    (S((1, 4, 8, 8), (6, 1, 3, 3), groups=4), r"\[conv2d\] the number of filters must be a multiple of groups, got 6 and 4"),
    (S((1, 1, 2, 5), (1, 1, 3, 3)), r"\[conv2d\] the kernel must fit the padded input, got 3 x 3 pixels for an input of 2 x 5"),
    (S((1, 1, 5, 5), (1, 1, 3, 3), stride=0), r"\[conv2d\] stride must be at least 1; stride=0"),
    (S((1, 1, 5, 5), (1, 1, 3, 3), padding="full"), r"\[conv2d\] padding must be a number, .*, 'same' or 'valid'; padding='full'"),
    (S((1, 1, 5, 5), (1, 1, 3, 3), padding="same", stride=2), r"\[conv2d\] padding='same' requires stride 1; stride=\(2, 2\)"),
    (S((1, 1, 5, 5), (2, 1, 3, 3), (3,)), r"\[conv2d\] bias must have one value for each of 2 filters; bias.shape=\(3,\)"),
    (S((1, 1, 5, 5), (2, 1, 3, 3), dtypes=("float32", "float16")), r"\[conv2d\] w must be float32 like x, got float16"),
    (S((1, 1, 5, 5), (2, 1, 3, 3), dtypes="int32", low=0, high=9), r"\[conv2d\] x must have a dtype that this op accepts; dtype=int32"),
]  # fmt: skip


@op(vjp=_conv2d_vjp, ref="numpy", amp="half", bias_stays=True, samples=_CONV_SAMPLES, errors=_CONV_ERRORS)
def conv2d(
    x: Tensor, w: Tensor, bias: Tensor | None = None, stride: Pair = 1, padding: Padding = 0, dilation: Pair = 1, groups: int = 1,
    pad: Padding | None = None,
) -> Tensor:  # fmt: skip
    """Convolution of images ``(batch, channels, height, width)`` with weights ``(filters, channels / groups, height, width)``.

    ``y[n, f, i, j] = bias[f] + sum over c, r, s of w[f, c, r, s] * x[n, c, i * stride + r * dilation - padding, ...]``; ``c`` runs over the
    channels of the filter's group. ``padding`` is a number, a pair (height, width), ``((top, bottom), (left, right))``, ``"same"`` or
    ``"valid"``; ``pad`` is an alias of ``padding``. One image may be given without a batch axis.

    >>> import netcl.ops as F
    >>> from netcl.core.tensor import Tensor, with_shape
    >>> F.conv2d(Tensor.ones((1, 3, 8, 8)), Tensor.ones((4, 3, 3, 3)), padding=1).shape
    (1, 4, 8, 8)
    """
    return _convolve("conv2d", x, w, bias, _conv_options(stride, padding, dilation, groups, pad), relu=False)


def _conv2d_relu_vjp(F, g, out, x, w, bias_dtype, needs, recorded, stride, padding, dilation, groups, pad):
    g = activation_vjp(F, "relu", g, out, recorded)
    return _conv2d_vjp(F, g, x, w, bias_dtype, needs, stride, padding, dilation, groups, pad)


@op(vjp=_conv2d_relu_vjp, ref="numpy", amp="half", bias_stays=True, samples=_CONV_SAMPLES[1:5])
def conv2d_relu(
    x: Tensor, w: Tensor, bias: Tensor | None = None, *, stride: Pair = 1, padding: Padding = 0, dilation: Pair = 1, groups: int = 1,
    pad: Padding | None = None,
) -> Tensor:  # fmt: skip
    """``relu(conv2d(x, w, bias, ...))`` as one op."""
    return _convolve("conv2d_relu", x, w, bias, _conv_options(stride, padding, dilation, groups, pad), relu=True)


# ---- its gradients


def _input_grad_vjp(F, g, dy, w, needs, stride, padding, dilation, groups):
    options = {"stride": stride, "padding": padding, "dilation": dilation, "groups": groups}
    back = F.conv2d(g, w, **options) if needs[0] else None
    return back, F.conv2d_weight_grad(dy, g, kernel=w.shape[2:], **options) if needs[1] else None


@op(vjp=_input_grad_vjp, ref="numpy", amp="half",
    samples=[
        S((3, 6, 1, 1), (6, 5, 4, 2), size=(4, 2)),
        S((2, 4, 7, 6), (4, 3, 3, 3), size=(7, 6), padding=1),
        S((1, 5, 5, 8), (5, 4, 3, 2), size=(9, 17), stride=2, padding=(1, 0)),
        S((1, 5, 5, 9), (5, 7, 3, 2), size=(10, 18), stride=2, padding=(1, 0)),
        S((2, 8, 8, 9), (8, 3, 3, 3), size=(8, 11), groups=2, padding=(2, 1), dilation=2),
        S((2, 10, 4, 9), (10, 1, 3, 3), size=(7, 9), groups=5, stride=(2, 1), padding=1),
        S((1, 9, 4, 5), (9, 4, 2, 3), size=(12, 17), stride=3, dilation=(1, 2)),
        S((1, 70, 3, 3), (70, 8, 1, 1), size=(5, 6), stride=2),
        S((2, 65, 4, 4), (65, 13, 3, 3), size=(4, 4), padding=1),
        S((1, 34, 3, 4), (34, 33, 3, 3), size=(6, 7), stride=2, padding=1),
        S((1, 4, 4, 4), (4, 3, 6, 7), size=(9, 14), stride=(2, 3), padding=(2, 1)),
    ],
    errors=[
        (S((1, 4, 5, 5), (4, 3, 3, 3), size=(8, 8)),
         r"\[conv2d_input_grad\] dy must be the gradient of an output of shape \(1, 4, 6, 6\); dy.shape=\(1, 4, 5, 5\), w.shape="),
    ])  # fmt: skip
def conv2d_input_grad(
    dy: Tensor, w: Tensor, *, size: Pair, stride: Pair = 1, padding: Padding = 0, dilation: Pair = 1, groups: int = 1
) -> Tensor:
    """Compute the gradient of :func:`conv2d` with respect to an input of height and width ``size``."""
    name = "conv2d_input_grad"
    dy, w = _conv_tensors(name, dy=dy, w=w)
    return _backward(dy, w, None, _geometry_of_input(name, dy, w, frozen(size), _conv_options(stride, padding, dilation, groups)))


def _geometry_of_input(name: str, dy: Tensor, w: Tensor, size: Any, options: tuple[Any, ...]) -> Geometry:
    if dy.ndim != 4 or w.ndim != 4:
        raise ShapeError(message(name, "dy and w must have four dimensions", **{"dy.shape": dy.shape, "w.shape": w.shape}))
    g = geometry(name, (dy.shape[0], w.shape[1] * options[3], *pair(name, "size", size, 0)), w.shape, *options)
    if g.y_shape != dy.shape:
        what = f"dy must be the gradient of an output of shape {g.y_shape}"
        raise ShapeError(message(name, what, **{"dy.shape": dy.shape, "w.shape": w.shape, "size": size}))
    return g


def _weight_grad_vjp(F, g, dy, x, needs, stride, padding, dilation, groups):
    options = {"stride": stride, "padding": padding, "dilation": dilation, "groups": groups}
    back = F.conv2d(x, g, **options) if needs[0] else None
    return back, F.conv2d_input_grad(dy, g, size=x.shape[2:], **options) if needs[1] else None


@op(vjp=_weight_grad_vjp, ref="numpy", amp="half", tol=4.0,
    samples=[
        S((3, 6, 1, 1), (3, 5, 4, 2), kernel=(4, 2)),
        S((2, 4, 7, 6), (2, 3, 7, 6), kernel=(3, 3), padding=1),
        S((1, 5, 5, 8), (1, 4, 9, 17), kernel=(3, 2), stride=2, padding=(1, 0)),
        S((2, 8, 8, 9), (2, 6, 8, 11), kernel=(3, 3), groups=2, padding=(2, 1), dilation=2),
        S((2, 10, 4, 9), (2, 5, 7, 9), kernel=(3, 3), groups=5, stride=(2, 1), padding=1),
        S((1, 7, 6, 7), (1, 3, 16, 21), kernel=(7, 7), stride=3, padding=(3, 2)),
        S((3, 7, 20, 20), (3, 2, 20, 20), kernel=(3, 3), padding=1),
        S((2, 13, 4, 4), (2, 65, 4, 4), kernel=(3, 3), padding=1),
        S((2, 34, 5, 6), (2, 33, 5, 6), kernel=(3, 3), padding=1),
    ],
    errors=[
        (S((1, 4, 5, 5), (1, 3, 8, 8), kernel=(3, 3)),
         r"\[conv2d_weight_grad\] dy must be the gradient of an output of shape \(1, 4, 6, 6\); dy.shape=\(1, 4, 5, 5\), x.shape="),
    ])  # fmt: skip
def conv2d_weight_grad(
    dy: Tensor, x: Tensor, *, kernel: Pair, stride: Pair = 1, padding: Padding = 0, dilation: Pair = 1, groups: int = 1
) -> Tensor:
    """Compute the gradient of :func:`conv2d` with respect to weights of height and width ``kernel``.

    Sums have a fixed order: two runs with the same kernel agree bit for bit.
    """
    name = "conv2d_weight_grad"
    dy, x = _conv_tensors(name, dy=dy, x=x)
    options = _conv_options(stride, padding, dilation, groups)
    if dy.ndim != 4 or x.ndim != 4 or options[3] < 1 or x.shape[1] % options[3]:
        what = "dy and x must have four dimensions, and groups must be at least 1 and divide the channels of x"
        raise ShapeError(message(name, what, **{"dy.shape": dy.shape, "x.shape": x.shape, "groups": groups}))
    g = geometry(name, x.shape, (dy.shape[1], x.shape[1] // options[3], *pair(name, "kernel", frozen(kernel), 1)), *options)
    if g.y_shape != dy.shape:
        what = f"dy must be the gradient of an output of shape {g.y_shape}"
        raise ShapeError(message(name, what, **{"dy.shape": dy.shape, "x.shape": x.shape, "kernel": kernel}))
    if x.backend == "cpu":
        return launch.run_cpu(arrays.weight_grad, dy, x, g=g)
    dw = Tensor.empty(g.w_shape, x.dtype, queue=x.queue)
    if not dy.size:
        return dw.fill_(0)
    plans.run(plans.Convolution(plans.WEIGHT_GRAD, g, x.dtype), x.queue, x, dy, dw)
    return dw


# ---- transposed


def _transpose_vjp(F, g, x, w, bias_dtype, needs, stride, padding, groups, dilation):
    if len(x.shape) == 3:
        return _without_batch(F, _transpose_vjp, g, x, w, bias_dtype, needs, stride, padding, groups, dilation)
    options = {"stride": stride, "padding": padding, "dilation": dilation, "groups": groups}
    dx = F.conv2d(g, w, **options) if needs[0] else None
    dw = F.conv2d_weight_grad(x, g, kernel=w.shape[2:], **options) if needs[1] else None
    return dx, dw, F.sum(g, axis=(0, 2, 3), widen=bias_dtype != g.dtype) if bias_dtype and needs[2] else None


@op(vjp=_transpose_vjp, ref="numpy", amp="half", bias_stays=True,
    samples=[
        S((1, 1, 1, 1), (1, 1, 1, 1)),
        S((2, 4, 5, 6), (4, 3, 3, 3), (3,), stride=2, padding=1, output_padding=1),
        S((1, 6, 4, 7), (6, 2, 2, 3), (6,), stride=(3, 1), groups=3, padding=(0, 2), output_padding=(2, 0)),
        S((2, 5, 6, 5), (5, 7, 4, 4), stride=2, padding=1),
        S((1, 8, 5, 9), (8, 8, 3, 3), (8,), dilation=2, padding=2),
    ],
    errors=[
        (S((1, 4, 5, 5), (3, 4, 3, 3)), r"\[conv_transpose2d\] x must have 3 channels \(w.shape\[0\]\), got 4"),
        (S((1, 5, 4, 4), (5, 2, 3, 3), groups=2),
         r"\[conv_transpose2d\] the channels of x must be a multiple of groups, got 5 and 2; x.shape=\(1, 5, 4, 4\), w.shape=\(5, 2"),
        (S((1, 4, 5, 5), (4, 4, 3, 3), output_padding=1), r"\[conv_transpose2d\] output_padding must be smaller than the stride; "),
        (S((4, 5), (4, 4, 3, 3)), r"\[conv_transpose2d\] x must have 4 dimensions \(or 3, without a batch\) and w 4; "),
        (S((1, 4, 1, 1), (4, 4, 1, 1), padding=1), r"\[conv_transpose2d\] the result must not be empty, got -1 x -1 pixels"),
        (S((1, 4, 5, 5), (4, 2, 3, 3), (3,)), r"\[conv_transpose2d\] bias must have one value for each of 2 filters; bias.shape=\(3,\)"),
    ])  # fmt: skip
def conv_transpose2d(
    x: Tensor, w: Tensor, bias: Tensor | None = None, stride: Pair = 1, padding: Padding = 0, output_padding: Pair = 0, groups: int = 1,
    dilation: Pair = 1,
) -> Tensor:  # fmt: skip
    """Transposed convolution: maps the output shape of :func:`conv2d` back to its input shape.

    ``x`` is ``(batch, channels, height, width)``, ``w`` is ``(channels, filters / groups, height, width)``. The result's height is
    ``(height - 1) * stride - 2 * padding + dilation * (kernel - 1) + output_padding + 1``.

    >>> import netcl.ops as F
    >>> from netcl.core.tensor import Tensor, with_shape
    >>> F.conv_transpose2d(Tensor.ones((1, 4, 8, 8)), Tensor.ones((4, 3, 2, 2)), stride=2).shape
    (1, 3, 16, 16)
    """
    name = "conv_transpose2d"
    x, w, bias = _conv_tensors(name, x=x, w=w, bias=bias)
    options = _conv_options(stride, padding, dilation, groups)
    if x.ndim == 3:
        images = with_shape(x, (1, *x.shape))
        y = conv_transpose2d(
            images, w, bias, stride=stride, padding=padding, output_padding=output_padding, groups=groups, dilation=dilation
        )
        return with_shape(y, y.shape[1:])
    size = transposed_size(name, x.shape, w.shape, options[0], options[1], frozen(output_padding), options[2])
    if w.shape[0] != x.shape[1]:
        what = f"x must have {w.shape[0]} channels (w.shape[0]), got {x.shape[1]}"
        raise ShapeError(message(name, what, **{"x.shape": x.shape, "w.shape": w.shape}))
    if isinstance(options[3], int) and options[3] > 1 and x.shape[1] % options[3]:  # geometry checks the rest of groups
        what = f"the channels of x must be a multiple of groups, got {x.shape[1]} and {groups}"
        raise ShapeError(message(name, what, **{"x.shape": x.shape, "w.shape": w.shape}))
    g = _geometry_of_input(name, x, w, size, options)
    _check_bias(name, bias, g.c)
    return _backward(x, w, bias, g)


# ---- one dimension


def _signals(F: Any, name: str, x: Any, w: Any) -> Any:
    """Return signals as images of height 1; a single signal without a batch axis becomes one image."""
    if len(x.shape) not in (2, 3) or len(w.shape) != 3:
        axes = "(filters, channels / groups, kernel_size)" if name == "conv1d" else "(channels, filters / groups, kernel_size)"
        what, remedy = "x must have 3 dimensions (or 2, without a batch) and w 3", f"x is (batch, channels, length), w is {axes}"
        raise ShapeError(message(name, what, remedy, **{"x.shape": x.shape, "w.shape": w.shape}))
    return F.unsqueeze(x, -2)


def _for_images(stride: Any, padding: Any, dilation: Any) -> dict[str, Any]:
    return {"stride": for_image(stride, 1), "padding": for_image(padding, 0), "dilation": for_image(dilation, 1)}


@composite(ref="numpy", amp="half", bias_stays=True,
    samples=[
        S((2, 3, 11), (4, 3, 3), (4,), padding=1, stride=2),
        S((1, 4, 257), (6, 2, 5), groups=2, dilation=3),
        S((2, 4, 9), (4, 1, 4), groups=4, padding="same"),
    ],
    errors=[(S((2, 3, 4, 5), (4, 3, 3)), r"\[conv1d\] x must have 3 dimensions \(or 2, .*; x.shape=\(2, 3, 4, 5\)")])  # fmt: skip
def conv1d(
    F: Any, x: Tensor, w: Tensor, bias: Tensor | None = None, stride: int = 1, padding: int | str = 0, dilation: int = 1, groups: int = 1
) -> Tensor:
    """Convolve signals ``(batch, channels, length)`` with weights ``(filters, channels / groups, kernel_size)``."""
    images = _signals(F, "conv1d", x, w)
    return F.squeeze(F.conv2d(images, from_signal(F, w), bias, groups=groups, **_for_images(stride, padding, dilation)), -2)


@composite(ref="numpy", amp="half", bias_stays=True,
    samples=[S((2, 4, 7), (4, 3, 3), (3,), stride=2, padding=1, output_padding=1), S((1, 4, 9), (4, 2, 4), groups=2, dilation=2)],
    errors=[(S((3,), (4, 3, 3)), r"\[conv_transpose1d\] x must have 3 dimensions \(or 2, without a batch\)")])  # fmt: skip
def conv_transpose1d(
    F: Any, x: Tensor, w: Tensor, bias: Tensor | None = None, stride: int = 1, padding: int = 0, output_padding: int = 0,
    groups: int = 1, dilation: int = 1,
) -> Tensor:  # fmt: skip
    """The transpose of :func:`conv1d`; ``w`` is ``(channels, filters / groups, kernel_size)``."""
    images = _signals(F, "conv_transpose1d", x, w)
    options = {**_for_images(stride, padding, dilation), "output_padding": for_image(output_padding, 0), "groups": groups}
    return F.squeeze(F.conv_transpose2d(images, from_signal(F, w), bias, **options), -2)


# ---- columns


@op(vjp=lambda F, g, x_shape, kernel, stride, padding, dilation:
        F.col2im(g, size=x_shape[2:], kernel=kernel, stride=stride, padding=padding, dilation=dilation), ref="numpy",
    samples=[
        S((2, 3, 7, 6), kernel=(3, 2), padding=1),
        S((1, 2, 9, 8), kernel=(2, 3), stride=(2, 3), dilation=(3, 1)),
        S((2, 2, 5, 5), kernel=(3, 3), padding="same", dtypes="int32", low=-9, high=9),
    ],
    errors=[(S((3, 7, 6), kernel=(3, 3)), r"\[im2col\] x must have four dimensions; x.shape=\(3, 7, 6\)")])  # fmt: skip
def im2col(x: Tensor, *, kernel: Pair, stride: Pair = 1, padding: Padding = 0, dilation: Pair = 1) -> Tensor:
    """Unfold the windows of images of any dtype to columns: ``(batch, channels * kernel height * kernel width, windows)``."""
    (x,) = launch.as_tensors("im2col", x)
    if x.ndim != 4:
        raise ShapeError(message("im2col", "x must have four dimensions", **{"x.shape": x.shape}))
    window = pair("im2col", "kernel", frozen(kernel), 1)
    g = geometry("im2col", x.shape, (1, x.shape[1], *window), *_conv_options(stride, padding, dilation, 1))
    if x.backend == "cpu":
        return launch.run_cpu(lambda x, *, g: arrays.columns(x, g).reshape(g.n, g.c * g.taps, g.oh * g.ow), x, g=g)
    cols = Tensor.empty((g.n, g.c * g.taps, g.oh * g.ow), x.dtype, queue=x.queue)
    if cols.size:
        columns.write_columns(x, cols, g)
    return cols


@op(vjp=lambda F, g, kernel, stride, padding, dilation:
        F.im2col(g, kernel=kernel, stride=stride, padding=padding, dilation=dilation), ref="numpy",
    samples=[
        S((2, 18, 49), size=(7, 6), kernel=(3, 2), padding=1),
        S((1, 12, 6), size=(9, 8), kernel=(2, 3), stride=(2, 3), dilation=(3, 1)),
    ],
    errors=[
        (S((1, 10, 6), size=(4, 4), kernel=(3, 3)), r"\[col2im\] cols must have 3 dimensions, the second a multiple of the 9 values"),
        (S((1, 9, 6), size=(4, 4), kernel=(3, 3)), r"\[col2im\] cols must have 4 windows for an image of \(4, 4\), got 6"),
    ])  # fmt: skip
def col2im(cols: Tensor, *, size: Pair, kernel: Pair, stride: Pair = 1, padding: Padding = 0, dilation: Pair = 1) -> Tensor:
    """Fold columns back to images of height and width ``size``; overlapping windows add up."""
    (cols,) = launch.as_tensors("col2im", cols)
    launch.check_dtype("col2im", cols, (*launch.FLOATS, "int32", "int64"), "cols")
    window, size = pair("col2im", "kernel", frozen(kernel), 1), pair("col2im", "size", frozen(size), 1)
    if cols.ndim != 3 or cols.shape[1] % (window[0] * window[1]):
        values = f"{window[0] * window[1]} values of a {window[0]} x {window[1]} window"
        what = f"cols must have 3 dimensions, the second a multiple of the {values}"
        raise ShapeError(message("col2im", what, "cols is (batch, channels * window, windows)", **{"cols.shape": cols.shape}))
    channels = cols.shape[1] // (window[0] * window[1])
    g = geometry("col2im", (cols.shape[0], channels, *size), (1, channels, *window), *_conv_options(stride, padding, dilation, 1))
    if g.oh * g.ow != cols.shape[2]:
        what = f"cols must have {g.oh * g.ow} windows for an image of {size}, got {cols.shape[2]}"
        raise ShapeError(message("col2im", what, **{"cols.shape": cols.shape}))
    if cols.backend == "cpu":
        return launch.run_cpu(arrays.fold_windows, cols, g=g)
    x = Tensor.empty(g.x_shape, cols.dtype, queue=cols.queue)
    if x.size:
        columns.add_columns(cols, x, g)
    return x
