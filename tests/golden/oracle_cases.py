"""Calls of the ops whose reference is their own NumPy form: each row by its name, and the same written in torch.

``make_oracle.py`` runs the torch side in float64; ``tests/test_oracle.py`` calls the rows and asserts that no such row is missing. An
input is an array, ``U(*shape)`` (values from -1 to 1), or anything else that both sides take as it is. Keyword arguments are the row's.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import numpy as np


class U(tuple):
    """A shape to be filled with values from -1 to 1, which float32 holds exactly."""

    def __new__(cls, *shape: int) -> U:
        return super().__new__(cls, shape)


class Case(NamedTuple):
    """A call: the row, the torch side ``torch(t, *inputs)``, the inputs and the row's keyword arguments."""

    op: str
    torch: Callable[..., Any]
    inputs: list[Any]
    options: dict[str, Any]


def values(name: str, *shape: int) -> np.ndarray:
    made = np.random.default_rng(zlib.crc32(name.encode())).uniform(-1, 1, shape)
    return made.astype(np.float32).astype(np.float64)


CASES: dict[str, Case] = {}
#: Cases in which torch itself is less exact than float64, and how near it is: the 1e-12 of its gradient of ``bce`` is a float32.
ROUNDED = {"bce/ends": 1e-8}


def case(name: str, torch: Callable[..., Any], *inputs: Any, **options: Any) -> None:
    """Add a case; its name is the row's, and after a slash what it varies."""
    assert name not in CASES, name
    made = [values(f"{name} {i}", *x) if isinstance(x, U) else x for i, x in enumerate(inputs)]
    CASES[name] = Case(name.partition("/")[0], torch, made, options)


def gradients(call: Callable[..., Any], *wanted: int) -> Callable[..., Any]:
    """The torch side of a row that is a gradient of ``call``: its first input is the gradient of the result. The other inputs are
    constants, as the statistics that such a row takes are computed from them."""

    def found(t, upstream, *inputs):
        inputs = [x.detach().requires_grad_() if isinstance(x, t.Tensor) and x.is_floating_point() else x for x in inputs]
        return t.autograd.grad(call(t, *inputs), [inputs[i] for i in wanted], upstream, create_graph=True)

    return found


def tensors(values: Any, convert: Callable[[np.ndarray], Any]) -> Any:
    """``values`` with its arrays converted, those in lists as well."""
    if isinstance(values, list):
        return [tensors(value, convert) for value in values]
    return convert(values) if isinstance(values, np.ndarray) else values


def several(out: Any) -> list[Any]:
    return list(out) if isinstance(out, tuple | list) else [out]


# ---- convolutions

SIZES = {"stride": (2, 1), "padding": (1, 0), "dilation": (1, 2), "groups": 2}
case("conv2d/uneven", lambda t, x, w: t.conv2d(t.nn.functional.pad(x, (0, 1, 1, 2)), w), U(1, 2, 5, 4), U(3, 2, 3, 2),
     padding=((1, 2), (0, 1)))  # fmt: skip
case("conv2d/pad", lambda t, x, w: t.conv2d(x, w, padding=2), U(1, 2, 4, 4), U(3, 2, 3, 3), pad=2)
case("conv2d_relu", lambda t, x, w, b: t.relu(t.conv2d(x, w, b, **SIZES)), U(2, 4, 6, 7), U(6, 2, 3, 2), U(6), **SIZES)
case("conv2d_relu/depthwise", lambda t, x, w: t.relu(t.conv2d(x, w, groups=3)), U(1, 3, 5, 4), U(3, 1, 2, 2), groups=3)
case("conv2d_input_grad", lambda t, g, w: t.nn.grad.conv2d_input((2, 4, 6, 7), w, g, **SIZES), U(2, 6, 3, 5), U(6, 2, 3, 2), size=(6, 7),
     **SIZES)  # fmt: skip
case("conv2d_weight_grad", lambda t, g, x: t.nn.grad.conv2d_weight(x, (6, 2, 3, 2), g, **SIZES), U(2, 6, 3, 5), U(2, 4, 6, 7),
     kernel=(3, 2), **SIZES)  # fmt: skip
BACK = {"stride": 3, "padding": 1, "output_padding": 2, "groups": 2, "dilation": 2}
case("conv_transpose1d", lambda t, x, w, b: t.conv_transpose1d(x, w, b, **BACK), U(2, 4, 5), U(4, 3, 3), U(6), **BACK)
case("conv_transpose2d", lambda t, x, w, b: t.conv_transpose2d(x, w, b, **BACK), U(1, 4, 3, 2), U(4, 1, 2, 3), U(2), **BACK)

# ---- attention


def rotated(t, x, where, frequencies, interleaved=False, inverse=False):
    """Pairs as complex numbers, times ``exp(i angle)``."""
    angle = where[..., None] * frequencies * (-1 if inverse else 1)
    angle = angle[:, None] if angle.ndim == 3 else angle
    pairs = x.unflatten(-1, (-1, 2)) if interleaved else x.unflatten(-1, (2, -1)).mT
    turned = t.view_as_real(t.complex(pairs[..., 0], pairs[..., 1]) * t.polar(t.ones_like(angle), angle))
    return turned.flatten(-2) if interleaved else turned.mT.flatten(-2)


def standard(t, depth, base=10000.0):
    return base ** (-t.arange(0, depth, 2, dtype=t.float64) / depth)


PLACES = np.array([[0, 3, 4], [9, 2, 7]])
case("rope", lambda t, x: rotated(t, x, t.arange(4.0).double(), standard(t, 6)), U(2, 4, 6))
case("rope/interleaved", lambda t, x: rotated(t, x, 3 + t.arange(4.0).double(), standard(t, 6, 500.0), True), U(2, 3, 4, 6),
     interleaved=True, offset=3, base=500.0)  # fmt: skip
case("rope/positions", lambda t, x, p: rotated(t, x, p, standard(t, 4), inverse=True), U(2, 5, 3, 4), PLACES, inverse=True)
case("rope/frequencies", lambda t, x, p, f: rotated(t, x, p, f.detach()), U(2, 5, 3, 4), PLACES[1], np.array([0.5, 0.25]))
case("rope/heads", lambda t, x, p: t.cat([rotated(t, x[:, :2], p, standard(t, 4)), x[:, 2:]], 1), U(2, 5, 3, 4), PLACES, heads=2)


def attended(t, q, k, v, mask=None, causal=False, scale=None):
    """The result, and the logarithms of the sums of exponentials."""
    k, v = (x.repeat_interleave(q.shape[-3] // x.shape[-3], -3) for x in (k, v))
    scores = q @ k.mT * (scale or q.shape[-1] ** -0.5)
    if mask is not None:
        scores = scores.masked_fill(~mask, -np.inf) if mask.dtype == t.bool else scores + mask
    if causal:
        scores = scores.masked_fill(t.ones(scores.shape[-2:]).triu(1).bool(), -np.inf)
    return scores.softmax(-1) @ v, scores.logsumexp(-1)


QKV = (U(2, 4, 5, 6), U(2, 4, 7, 6), U(2, 4, 7, 3))
GROUPED = (U(2, 4, 5, 6), U(2, 2, 7, 6), U(2, 2, 7, 3))
SEEN = values("seen", 5, 7) > -0.2
SEEN[:, 0] = True
case("attention", attended, *QKV)
case("attention/grouped causal", lambda t, *x: attended(t, *x, causal=True), *GROUPED, causal=True)
case("attention/grouped added", lambda t, *x: attended(t, *x, scale=0.7), *GROUPED, U(2, 1, 5, 7), scale=0.7)
case("attention/seen causal", lambda t, *x: attended(t, *x, causal=True), *QKV, SEEN, causal=True)
case("attention/added causal", lambda t, *x: attended(t, *x, causal=True), *QKV, U(5, 7), causal=True)
Q, K, V, ADDED = values("q", 2, 4, 5, 6), values("k", 2, 2, 7, 6), values("v", 2, 2, 7, 3), values("added", 4, 5, 7)
for kind, mask, through in (("", ADDED, None), ("/seen", SEEN, None), ("/through", None, values("through", 2, 4, 5))):
    scores = Q @ K.repeat(2, 1).swapaxes(-1, -2) * 0.3 + (0 if mask is None else np.where(mask, 0, -np.inf) if mask is SEEN else mask)
    scores = np.where(np.triu(np.ones((5, 7)), 1), -np.inf, scores)
    sums = np.exp(scores).sum(-1)

    def of_both(t, g, q, k, v, mask, result, logarithms, through):
        known = [x.detach().requires_grad_() for x in (q, k, v)]
        mask = None if mask is None else mask.detach()
        y, logs = attended(t, *known, mask, causal=True, scale=0.3)
        return t.autograd.grad([y, logs], known, [g, t.zeros_like(logs) if through is None else through], create_graph=True)

    case(f"attention_grad{kind}", of_both, U(2, 4, 5, 3), Q, K, V, mask, np.exp(scores) / sums[..., None] @ V.repeat(2, 1), np.log(sums),
         through, causal=True, scale=0.3)  # fmt: skip
for kind, mask, options in (("", None, {}), ("/seen", SEEN, {}), ("/causal", None, {"is_causal": True, "scale": 0.4})):
    theirs = {"enable_gqa": True, **options}
    case(f"scaled_dot_product_attention{kind}", lambda t, q, k, v, mask, theirs=theirs: t.nn.functional.scaled_dot_product_attention(
        q, k, v, mask, **theirs), *GROUPED, mask, **options)  # fmt: skip
NOTHING = SEEN.copy()
NOTHING[2] = False
case("scaled_dot_product_attention/nothing seen", lambda t, q, k, v, m: t.nn.functional.scaled_dot_product_attention(q, k, v, m), *QKV,
     NOTHING)  # fmt: skip

# ---- normalization


def statistics(x: np.ndarray, axes: tuple[int, ...], eps: float) -> tuple[np.ndarray, np.ndarray]:
    return x.mean(axes), (x.var(axes) + eps) ** -0.5


def with_statistics(call, axes, eps):
    """The result, the means and one over the standard deviations."""
    return lambda t, x, *rest: (call(t, x, *rest), x.mean(axes), (x.var(axes, correction=0) + eps) ** -0.5)


def layers(eps, shape=(4, 3)):
    return lambda t, x, w=None, b=None: t.nn.functional.layer_norm(x, shape, w, b, eps)


def groups(eps, count=2):
    return lambda t, x, w=None, b=None: t.nn.functional.group_norm(x, count, w, b, eps)


def squares(eps, shape=(4, 3)):
    return lambda t, x, w=None, *_: t.nn.functional.rms_norm(x, shape, w, eps)


IMAGES, ROWS = values("images", 2, 6, 4, 3), values("rows", 5, 4, 3)
OF_ROWS, OF_GROUPS = statistics(ROWS, (1, 2), 0.1), statistics(IMAGES.reshape(2, 2, -1), (2,), 0.1)
NOT_CENTERED = (np.zeros(5), ((ROWS**2).mean((1, 2)) + 0.1) ** -0.5)
case("row_norm", with_statistics(layers(0.1), (1, 2), 0.1), ROWS, U(4, 3), U(4, 3), axes=2, eps=0.1)
case("row_norm/no weight", with_statistics(layers(1e-5, (3,)), -1, 1e-5), ROWS)
case("row_norm/groups", groups(0.1), IMAGES, U(6), U(6), groups=2, eps=0.1)
case("row_norm/squares", squares(0.1), ROWS, U(4, 3), axes=2, centered=False, eps=0.1)
for op, wanted in (("row_norm_grad", (0,)), ("row_norm_grads", (0, 1, 2))):

    def of(call, wanted=wanted):  # the row takes no bias, but its gradient is wanted
        return gradients(lambda t, x, w, b, *_: call(t, x, w, b), *wanted)

    def without(call, wanted=wanted):
        def found(t, g, x, w, mean, rstd):
            return of(call, wanted)(t, g, x, t.ones_like(x[0]) if w is None else w, t.zeros_like(x[0] if w is None else w))

        return found

    case(op, without(layers(0.1)), U(5, 4, 3), ROWS, U(4, 3), *OF_ROWS, axes=2)
    case(f"{op}/no weight", without(layers(0.1)), U(5, 4, 3), ROWS, None, *OF_ROWS, axes=2)
    case(f"{op}/groups", without(groups(0.1)), U(2, 6, 4, 3), IMAGES, U(6), *OF_GROUPS, groups=2)
    if op == "row_norm_grad":
        case(f"{op}/squares", without(squares(0.1)), U(5, 4, 3), ROWS, U(4, 3), *NOT_CENTERED, axes=2, centered=False)
for kind, call, x, weight, found, options in (
    ("", layers(0.1), ROWS, (4, 3), OF_ROWS, {"axes": 2}), ("/groups", groups(0.1), IMAGES, (6,), OF_GROUPS, {"groups": 2}),
):  # fmt: skip

    def of_weight(t, g, x, mean, rstd, call=call, weight=weight):
        ones, zeros = t.ones(weight, dtype=t.float64, requires_grad=True), t.zeros(weight, dtype=t.float64, requires_grad=True)
        return t.autograd.grad(call(t, x.detach(), ones, zeros), (ones, zeros), g, create_graph=True)

    case(f"row_norm_weight_grad{kind}", of_weight, U(*x.shape), x, *found, **options)


def decoded(t, x, w, b, gate, gate_bias, residual, *norm):
    """A layer norm, a gated product and a residual; the row has no gradient."""
    x = t.nn.functional.layer_norm(x, (6,), *norm, 0.1)
    return (t.nn.functional.silu(t.nn.functional.linear(x, gate, gate_bias)) * t.nn.functional.linear(x, w, b) + residual).detach()


case("decode_linear", decoded, U(2, 6), U(4, 6), U(4), U(4, 6), U(4), U(2, 4), U(6), U(6), norm="layer", eps=0.1, activation="silu")
case("decode_linear/squares", lambda t, x, w, b, _, __, added, norm: (t.nn.functional.linear(t.nn.functional.rms_norm(x, (6,), norm, 0.1),
     w, b) + added).detach(), U(3, 6), U(4, 6), U(4), None, None, U(3, 4), U(6), norm="rms", eps=0.1)  # fmt: skip
case("decode_linear/plain", lambda t, x, w, b: t.nn.functional.gelu(t.nn.functional.linear(x, w, b), approximate="tanh").detach(),
     U(2, 3, 6), U(4, 6), U(4), activation="gelu_tanh")  # fmt: skip
case("layer_norm", lambda t, x, shape, w, b: t.nn.functional.layer_norm(x, shape, w, b, 0.01), ROWS, (4, 3), U(4, 3), U(4, 3), eps=0.01)
case("layer_norm/no weight", lambda t, x, shape: t.nn.functional.layer_norm(x, (3,)), ROWS, 3)
case("rms_norm", lambda t, x, shape, w: t.nn.functional.rms_norm(x, shape, w, 0.01), ROWS, (4, 3), U(4, 3), eps=0.01)
case("rms_norm/no weight", lambda t, x, shape: t.nn.functional.rms_norm(x, (3,), None, 1e-6), ROWS, 3)
case("group_norm", lambda t, x, n, w, b: t.nn.functional.group_norm(x, n, w, b, 0.01), IMAGES, 3, U(6), U(6), eps=0.01)
case("group_norm/no weight", lambda t, x, n: t.nn.functional.group_norm(x, n), IMAGES, 2)
case("instance_norm", lambda t, x, w, b: t.nn.functional.instance_norm(x, weight=w, bias=b, eps=0.01), IMAGES, U(6), U(6), eps=0.01)
case("layer_norm/constant", lambda t, x, shape: t.nn.functional.layer_norm(x, (3,)), np.array([[0.5, 0.5, 0.5], [0.1, 0.2, 0.9]]), 3)


def batch(t, x, w=None, b=None):
    return t.nn.functional.batch_norm(x, None, None, w, b, training=True, eps=0.01)


def evaluated(t, x, mean, var, w=None, b=None, eps=1e-5):
    return t.nn.functional.batch_norm(x, mean.detach(), var.detach(), w, b, eps=eps)


OF_BATCH = statistics(IMAGES, (0, 2, 3), 0.01)
VARIANCES = np.abs(values("variances", 6)) + 0.5
case("batch_norm_train", with_statistics(batch, (0, 2, 3), 0.01), IMAGES, U(6), U(6), eps=0.01)
case("batch_norm_train/no weight", with_statistics(batch, (0,), 0.01), U(7, 6), eps=0.01)
case("batch_norm_grad", lambda t, g, x, w, *_: gradients(batch, 0, 1, 2)(t, g, x, w, t.zeros_like(w)), U(2, 6, 4, 3), IMAGES, U(6),
     *OF_BATCH)  # fmt: skip
case("batch_norm_inference", lambda t, x, m, v, w, b: evaluated(t, x, m, v, w, b, 0.01), IMAGES, U(6), VARIANCES, U(6),
     U(6), eps=0.01)  # fmt: skip
case("batch_norm_inference/relu", lambda t, x, m, v: t.relu(evaluated(t, x, m, v)), U(5, 6), U(6), VARIANCES, fuse_relu=True)
case("batch_norm", evaluated, IMAGES, U(6), VARIANCES, U(6), U(6))
case("batch_norm/training relu", lambda t, x, m, v, w, b: t.relu(batch(t, x, w, b)), IMAGES, None, None, U(6), U(6), training=True,
     fuse_relu=True, eps=0.01)  # fmt: skip

# ---- softmax and losses

case("softmax", lambda t, x, axis: t.softmax(x, axis), U(4, 5, 3), 0)
case("log_softmax", lambda t, x, axis: t.log_softmax(x, axis), U(4, 5, 3), 1)
INFINITE = np.array([[0.5, -np.inf, 1.0, -2.0], [-np.inf, 3.0, -np.inf, -np.inf]])
case("softmax/infinite", lambda t, x: t.softmax(x, -1), INFINITE)
case("log_softmax/infinite", lambda t, x: t.log_softmax(x, -1), INFINITE)
SOFT = np.exp(ROWS) / np.exp(ROWS).sum(1, keepdims=True)
case("softmax_grad", lambda t, g, y, axis: gradients(lambda t, x: t.softmax(x, 1), 0)(t, g, y.log()), U(5, 4, 3), SOFT, 1)
case("log_softmax_grad", lambda t, g, y, axis: gradients(lambda t, x: t.log_softmax(x, 1), 0)(t, g, y), U(5, 4, 3), np.log(SOFT), 1)

LOGITS, DENSE = values("logits", 6, 5), values("dense", 2, 5, 3)
LABELS, DENSE_LABELS = np.array([4, 0, 2, -1, 1, 2]), np.array([[0, 4, 2], [3, 3, 1]])
WEIGHT, CHANCES = np.abs(values("weight", 5)) + 0.5, np.abs(values("chances", 6, 5)) * 0.8 + 0.1
LOGS = np.log(np.exp(LOGITS).sum(1))


def entropy(**options):  # torch has no gradient of the weights
    return lambda t, x, y, w=None: t.nn.functional.cross_entropy(x, y, None if w is None else w.detach(), **options)


for kind in ("mean", "sum", "none"):
    options = {"ignore_index": -1, "label_smoothing": 0.2, "reduction": kind}
    case(f"cross_entropy/{kind}", entropy(**options), LOGITS, LABELS, WEIGHT, **options)
    case(f"cross_entropy/soft {kind}", entropy(label_smoothing=0.3, reduction=kind), LOGITS, CHANCES, WEIGHT, label_smoothing=0.3,
         reduction=kind)  # fmt: skip
    case(f"nll/{kind}", lambda t, x, y, w, kind=kind: t.nn.functional.nll_loss(x, y, w.detach(), ignore_index=3, reduction=kind), DENSE,
         DENSE_LABELS, WEIGHT, ignore_index=3, reduction=kind)  # fmt: skip
    counted = WEIGHT[LABELS[LABELS >= 0]].sum() if kind == "mean" else 1.0
    case(f"cross_entropy_grad/{kind}", lambda t, g, x, y, w, *_, options=options: gradients(entropy(**options), 0)(t, g, x, y, w),
         values("upstream", *((6,) if kind == "none" else ())), LOGITS, LABELS, WEIGHT, LOGS, np.array(1 / counted), **options)  # fmt: skip
case("cross_entropy/one row", entropy(), U(5), np.array(3))
case("cross_entropy/all ignored", entropy(ignore_index=1), U(3, 5), np.ones(3, int), ignore_index=1)
case("cross_entropy/dense", entropy(reduction="none", ignore_index=3), DENSE, DENSE_LABELS, reduction="none", ignore_index=3)


def divided(t, x, y, w):
    """The mean by its formula, which has a gradient of the weights; the logarithms, and one over the divisor."""
    seen, own = y >= 0, w[y[y >= 0]]
    losses = -own * t.log_softmax(x, 1)[seen].gather(1, y[seen][:, None])[:, 0]
    return losses.sum() / own.sum(), x.logsumexp(1), 1 / own.sum()


case("cross_entropy_forward", divided, LOGITS, LABELS, WEIGHT, ignore_index=-1)
case("cross_entropy_grad/soft", lambda t, g, x, y, w, *_: gradients(entropy(label_smoothing=0.1), 0)(t, g, x, y, w),
     np.array(0.7), LOGITS, CHANCES, WEIGHT, LOGS, np.array(1 / 6), label_smoothing=0.1)  # fmt: skip


def named(name):
    """A loss of torch.nn.functional, which takes the same keyword arguments."""
    return lambda **options: lambda t, *given: getattr(t.nn.functional, name)(*given, **options)


def weighted(name):
    def loss(t, x, y, *more, **options):
        weights = dict(zip(("weight", "pos_weight"), (w.detach() for w in more), strict=False))
        return getattr(t.nn.functional, name)(x, y, **weights, **options)

    return lambda **options: partial(loss, **options)


def hinge(margin=1.0, reduction="mean"):
    return lambda t, x, y: folded(t, t.clamp(margin - x * y, min=0), reduction)


def contrastive(margin=1.0, reduction="mean"):
    def loss(t, a, b, y):
        d = t.linalg.vector_norm(a - b, dim=-1)
        return folded(t, y * d**2 + (1 - y) * t.clamp(margin - d, min=0) ** 2, reduction)

    return loss


def folded(t, x, how):
    return x if how == "none" else x.sum() if how == "sum" else x.mean()


SIGNS = np.where(values("signs", 6, 5) > 0, 1.0, -1.0)
OTHER = values("other", 6, 5)
for op, call, inputs, options in (
    ("mse", named("mse_loss"), (LOGITS, OTHER), {}),
    ("l1", named("l1_loss"), (LOGITS, OTHER), {}),
    ("smooth_l1", named("smooth_l1_loss"), (LOGITS, OTHER), {"beta": 0.4}),
    ("huber", named("huber_loss"), (LOGITS, OTHER), {"delta": 0.4}),
    ("bce", weighted("binary_cross_entropy"), (CHANCES, CHANCES[::-1].copy(), WEIGHT), {}),
    ("bce_with_logits", weighted("binary_cross_entropy_with_logits"), (9 * LOGITS, CHANCES, WEIGHT, WEIGHT[::-1].copy()), {}),
    ("kl_div", named("kl_div"), (np.log(CHANCES), LOGITS), {"log_target": True}),
    ("hinge", hinge, (LOGITS, SIGNS), {"margin": 0.6}),
    ("triplet", named("triplet_margin_loss"), (LOGITS, OTHER, SIGNS), {"margin": 2.0, "p": 3.0, "eps": 0.01}),
    ("contrastive", contrastive, (LOGITS, OTHER, values("together", 6) > 0), {"margin": 2.0}),
):
    inputs = tuple(x.astype(np.float64) for x in inputs)
    for kind in ("mean", "sum", "none", *(("batchmean",) if op == "kl_div" else ())):
        case(f"{op}/{kind}", call(**options, reduction=kind), *inputs, **options, reduction=kind)
ZEROS = np.where(CHANCES < 0.3, 0, CHANCES)
case("kl_div/zeros", lambda t, x, y: t.nn.functional.kl_div(x, y.detach(), reduction="sum"), LOGITS, ZEROS, reduction="sum")
case("bce/ends", lambda t, x, y: t.nn.functional.binary_cross_entropy(x, y.detach(), reduction="none"), np.array([0.0, 1.0, 0.0, 1.0]),
     np.array([0.0, 0.0, 1.0, 1.0]), reduction="none")  # fmt: skip
case("smooth_l1/no beta", lambda t, x, y: t.nn.functional.smooth_l1_loss(x, y, beta=0.0), LOGITS, OTHER, beta=0.0)
for op in ("l1", "smooth_l1", "huber"):  # where the differences are 0 and at the bend
    case(f"{op}/bends", named(f"{op}_loss")(), np.array([0.5, 1.25, -0.75, 3.0]), np.array([0.5, 0.25, 0.25, 0.0]))
case("cosine_similarity", lambda t, a, b: t.cosine_similarity(a, b, 0), LOGITS, OTHER, axis=0)
# By its formula: the gradient of torch's function differentiates lengths below eps as if they were not replaced.
case("cosine_similarity/eps", lambda t, a, b: (a * b).sum(1) / (a.norm(dim=1).clamp(min=0.5) * b.norm(dim=1).clamp(min=0.5)),
     0.1 * LOGITS, OTHER, eps=0.5)  # fmt: skip

# ---- order and indices

TIES = np.array([[1.0, 3.0, 3.0, 2.0, 3.0], [0.0, -1.0, -1.0, 5.0, 5.0], [2.0, 3.0, -1.0, 2.0, 0.0]])
HOLES = np.array([[1.0, np.nan, 3.0, 2.0], [0.0, -np.inf, np.nan, 5.0]])
case("argsort", lambda t, x, axis, down: t.argsort(x, dim=axis, descending=down, stable=True), TIES, 0, True)
case("sort", lambda t, x, axis, down: t.sort(x, dim=axis, descending=down, stable=True), TIES, 0, False)
case("top_indices", lambda t, x, k, axis, largest: t.topk(x, k, axis, largest).indices, U(5, 4), 3, 0, False)
case("topk", lambda t, x, k, axis, largest: t.topk(x, k, axis, largest), U(5, 4), 2, 0, True)
case("topk/smallest", lambda t, x, k, axis, largest: t.topk(x, k, axis, largest), U(2, 3, 6), 2, -1, False)
case("topk/nan", lambda t, x, k: t.topk(x.detach(), k), HOLES, 3)
case("argsort/nan", lambda t, x: t.argsort(x.detach(), stable=True), HOLES)
for op in ("max", "min"):
    case(op, lambda t, x, op=op: getattr(t, op)(x), TIES)
    case(f"{op}/dim", lambda t, x, dim, keep, op=op: getattr(t, op)(x, dim, keep), U(4, 5, 3), 1, True)
    case(f"{op}/ties", lambda t, x, dim, op=op: getattr(t, op)(x, dim), TIES, -1)
    case(f"{op}/two", lambda t, a, b, op=op: getattr(t, op)(a, b), LOGITS, OTHER)
    case(f"{op}/nan", lambda t, x, dim, op=op: getattr(t, op)(x.detach(), dim), HOLES, 1)
    case(f"{op}/axes", lambda t, x, op=op: getattr(t, f"a{op}")(x, (0, 1)), TIES[..., None].repeat(2, 2), axis=(0, 1))
    case(f"cum{op}", lambda t, x, axis, op=op: getattr(t, f"cum{op}")(x, axis), TIES, 0)
    case(f"cum{op}/nan", lambda t, x, axis, op=op: getattr(t, f"cum{op}")(x.detach(), axis), HOLES, 1)
case("mode", lambda t, x, axis, keep: t.mode(x, axis, keep), np.array([[3, 1, 4], [3, 2, 0], [1, 1, 0], [3, 1, 0]]), 0, True)
case("mode/of three", lambda t, x: t.mode(x), TIES)
WHERE = np.array([[0, 2, 0, 3], [1, 1, 2, 0], [4, 0, 0, 0]])
case("gather", lambda t, x, axis, index: t.gather(x, axis, index), U(5, 4), 0, WHERE)
case("gather/part", lambda t, x, axis, index: t.gather(x, axis, index), U(5, 7), 1, WHERE)
case("scatter_add", lambda t, x, axis, index, src: t.scatter_add(x, axis, index, src), U(5, 4), 0, WHERE, U(3, 4))
case("scatter_add/part", lambda t, x, axis, index, src: t.scatter_add(x, axis, index, src[:, :4]), U(4, 6), 1, WHERE, U(3, 5))
case("index_add", lambda t, x, axis, index, src: t.index_add(x, axis, index, src), U(3, 4, 5), -1, np.array([4, 0, 0]), U(3, 4, 3))
case("embedding", lambda t, index, w, pad: t.nn.functional.embedding(index, w, 1), np.array([[1, 4, 1], [0, 4, 4]]), U(5, 3), 1)
case("embedding/from the end", lambda t, index, w, pad: t.nn.functional.embedding(index, w, -1), np.array([1, 4, 0, 4]), U(5, 3), -1)
case("embedding_grad", lambda t, g, index, n, pad: gradients(lambda t, w: t.nn.functional.embedding(index, w, 1), 0)(
    t, g, t.zeros(5, 3, dtype=t.float64)), U(2, 3, 3), np.array([[1, 4, 1], [0, 4, 4]]), 5, 1)  # fmt: skip
case("one_hot", lambda t, index: t.nn.functional.one_hot(index), np.array([[1, 0], [3, 1]]))
case("one_hot/classes", lambda t, index, n: t.nn.functional.one_hot(index, n), np.array([1, 0, 3]), 6)
PAIRS = [np.array([2, 0, 3]), np.array([1, 1, -1])]
case("index_put", lambda t, x, at, v: x.index_put(at, v), U(4, 3), PAIRS, U(3))
case("index_put/accumulate", lambda t, x, at, v, add: x.index_put(at, v, add), U(4, 3), [np.array([2, 0, 2])], U(3, 3), True)
case("index_put/mask", lambda t, x, at, v: x.index_put(at, v), U(4, 3), [values("mask", 4, 3) > 0], np.array(0.5))
for kind in ("sum", "prod", "mean", "amax", "amin"):
    case(f"scatter_reduce/{kind}", lambda t, x, axis, index, src, how: t.scatter_reduce(x, axis, index, src, how, include_self=False),
         U(5, 4), 0, WHERE, U(3, 4), kind, include_self=False)  # fmt: skip
case("scatter_reduce/with itself", lambda t, x, axis, index, src, how: t.scatter_reduce(x, axis, index, src, how), U(5, 4), 0, WHERE,
     U(3, 4), "mean")  # fmt: skip
for kind in ("prod", "mean", "amax", "amin"):  # equal values share a gradient, and products have zeros
    case(f"scatter_reduce/{kind} of equals", lambda t, x, axis, index, src, how: t.scatter_reduce(x, axis, index, src, how),
         np.array([[0.0, 1.0, 2.0]]), 1, np.array([[0, 0, 1, 1, 2]]), np.array([[2.0, 3.0, 1.0, 1.0, 0.0]]), kind)  # fmt: skip
case("masked_scatter", lambda t, x, mask, src: x.masked_scatter(mask, src), U(2, 3, 4), values("mask", 3, 4) > 0, U(24))
case("matrix_exp", lambda t, a: t.matrix_exp(a), np.stack([0.01 * values("small", 3, 3), 9 * values("large", 3, 3), np.zeros((3, 3))]))

# ---- images

PLANES = {"kernel_size": 3, "stride": 2, "padding": 1, "ceil_mode": True}
for count in (True, False):
    options = {**PLANES, "count_include_pad": count}
    case(f"avg_pool1d/{count}", lambda t, x, o=options: t.nn.functional.avg_pool1d(x, **o), U(2, 3, 8), **options)
    case(f"pool_average_grad/{count}", lambda t, g, o=options: gradients(lambda t, x: t.nn.functional.avg_pool2d(x, **o), 0)(
        t, g, t.zeros(2, 3, 6, 7, dtype=t.float64)), U(2, 3, 4, 4), windows=((6, 7), (4, 4), (3, 3), (2, 2), (1, 1)),
        count_pad=count)  # fmt: skip
case("pool_average_grad/adaptive", lambda t, g: gradients(lambda t, x: t.nn.functional.adaptive_avg_pool2d(x, (3, 4)), 0)(
    t, g, t.zeros(2, 3, 7, 10, dtype=t.float64)), U(2, 3, 3, 4),
    windows=((7, 10), (3, 4), (1, 1), (1, 1), (0, 0), (1, 1), True))  # fmt: skip
case("max_pool1d", lambda t, x: t.nn.functional.max_pool1d(x, **PLANES, dilation=2), U(2, 3, 9), **PLANES, dilation=2)
LARGEST = np.array([[[[5, 5, 6], [5, 5, 6], [9, 14, 15]], [[0, 1, 3], [9, 9, 7], [9, 9, 11]]]], "int32")
case("pool_max_grad", lambda t, g, places: t.zeros(1, 2, 16, dtype=t.float64).scatter_add(2, places.flatten(2).long(), g.flatten(2))
     .unflatten(2, (4, 4)), U(1, 2, 3, 3), LARGEST,
     windows=((4, 4), (3, 3), (2, 2), (1, 1)))  # fmt: skip
case("adaptive_max_pool2d", lambda t, x, size: t.nn.functional.adaptive_max_pool2d(x, size, return_indices=True), U(1, 2, 7, 5), (3, 7),
     return_indices=True)  # fmt: skip


def resized(size, **how):
    return lambda t, x: t.nn.functional.interpolate(x, size, **how)


for kind, align in (("nearest", False), ("bilinear", False), ("bilinear", True)):
    steps = (4 / 6, 3 / 8) if align else (5 / 7, 4 / 9)
    how = resized((7, 9), mode=kind, align_corners=align if kind == "bilinear" else None)
    options = {"steps": steps, "mode": kind, "align_corners": align}
    case(f"resample2d/{kind} {align}", how, U(1, 2, 5, 4), size=(7, 9), **options)
    case(f"resample2d/back {kind} {align}", lambda t, g, how=how: gradients(how, 0)(t, g, t.zeros(1, 2, 5, 4, dtype=t.float64)),
         U(1, 2, 7, 9), size=(5, 4), **options, back=True)  # fmt: skip
for kind, shape, how in (
    ("recomputed", (1, 2, 5, 7), {"scale_factor": 1.7, "mode": "bilinear", "recompute_scale_factor": True}),
    ("area 1d", (1, 2, 7), {"size": 3, "mode": "area"}),
    ("linear", (1, 2, 7), {"scale_factor": 1.3, "mode": "linear"}),
    ("exact", (1, 1, 5, 4), {"size": (7, 3), "mode": "nearest-exact"}),
    ("bicubic", (1, 1, 5, 4), {"scale_factor": (1.7, 0.6), "mode": "bicubic"}),
    ("bicubic aligned", (1, 1, 5, 4), {"size": (7, 3), "mode": "bicubic", "align_corners": True}),
    ("bilinear antialias", (1, 1, 9, 4), {"size": (4, 6), "mode": "bilinear", "antialias": True}),
    ("exact 3d", (1, 1, 3, 4, 2), {"size": (4, 3, 5), "mode": "nearest-exact"}),
    ("trilinear", (1, 1, 3, 4, 2), {"scale_factor": 1.5, "mode": "trilinear", "align_corners": True}),
    ("bicubic antialias", (1, 1, 9, 4), {"size": (4, 6), "mode": "bicubic", "antialias": True, "align_corners": True}),
):
    case(f"interpolate/{kind}", lambda t, x, how=how: t.nn.functional.interpolate(x, **how), U(*shape), **how)
GRID = 1.4 * values("grid", 2, 3, 4, 2)
for linear in (True, False):
    for border in (True, False):
        for align in (True, False):
            options = {"linear": linear, "border": border, "align": align}

            def sampled(t, x, grid, linear=linear, border=border, align=align):
                mode, pad = "bilinear" if linear else "nearest", "border" if border else "zeros"
                return t.nn.functional.grid_sample(x, grid, mode, pad, align)

            kind = f"{linear} {border} {align}"
            case(f"sample_images/{kind}", sampled, U(2, 2, 5, 3), GRID, **options)
            case(f"sample_images_input_grad/{kind}", lambda t, g, grid, sampled=sampled: gradients(sampled, 0)(
                t, g, t.zeros(2, 2, 5, 3, dtype=t.float64), grid), U(2, 2, 3, 4), GRID, size=(5, 3), **options)  # fmt: skip
            case(f"sample_images_grid_grad/{kind}", lambda t, g, x, grid, sampled=sampled: [
                x.detach() for x in gradients(sampled, 1)(t, g, x, grid)], U(2, 2, 3, 4), U(2, 2, 5, 3), GRID, **options)  # fmt: skip
VOLUME = 1.4 * values("volume", 1, 2, 3, 2, 3)
for mode, pad in (*(("bicubic", pad) for pad in ("zeros", "border", "reflection")), ("bilinear", "reflection"), ("nearest", "reflection")):
    for align in (True, False):
        how = {"mode": mode, "padding_mode": pad, "align_corners": align}
        case(f"grid_sample/{mode} {pad} {align}", lambda t, x, grid, how=how: t.nn.functional.grid_sample(x, grid, **how), U(2, 1, 5, 3),
             GRID, **how)  # fmt: skip
        if mode != "bicubic":
            case(f"grid_sample/volume {mode} {align}", lambda t, x, grid, how=how: t.nn.functional.grid_sample(x, grid, **how),
                 U(1, 1, 3, 4, 2), VOLUME, **how)  # fmt: skip
for align in (True, False):
    case(f"affine_grid/{align}", lambda t, theta, size, align=align: t.nn.functional.affine_grid(theta, size, align), U(2, 2, 3),
         (2, 1, 4, 5), align_corners=align)  # fmt: skip
    case(f"affine_grid/volume {align}", lambda t, theta, size, align=align: t.nn.functional.affine_grid(theta, size, align), U(1, 3, 4),
         (1, 1, 3, 1, 2), align_corners=align)  # fmt: skip
case("pixel_shuffle", lambda t, x, factor: t.pixel_shuffle(x, factor), U(1, 18, 2, 3), 3)

# ---- recurrent layers: torch's own, whose input weights are the identity


def recurred(kind, reverse=False):
    def run(t, gx, weight, bias=None, h0=None, c0=None, projection=None, lengths=None):
        eye, hidden = t.eye(gx.shape[2], dtype=gx.dtype), gx.shape[2] // {"lstm": 4, "gru": 3}.get(kind, 1)
        flat = [eye, weight] + ([] if bias is None else [t.zeros_like(bias), bias]) + ([] if projection is None else [projection])
        zeros = [t.zeros(gx.shape[1], n, dtype=gx.dtype) for n in (weight.shape[1], hidden)]
        h, c = (given if there is None else there for there, given in zip((h0, c0), zeros, strict=True))
        state = (h[None], c[None]) if kind == "lstm" else h[None]
        call = getattr(t, kind if kind in ("lstm", "gru") else f"rnn_{kind}")
        y, *last = call(gx.flip(0) if reverse else gx, state, flat, bias is not None, 1, 0.0, False, False, False)
        return y.flip(0) if reverse else y, *(x[0] for x in last)

    return run


case("recurrent/lstm", recurred("lstm"), U(4, 3, 20), U(20, 5), kind="lstm")
case("recurrent/lstm projected", recurred("lstm", True), U(4, 3, 20), U(20, 2), None, U(3, 2), U(3, 5), U(2, 5), kind="lstm", reverse=True)
case("recurrent/gru", recurred("gru"), U(4, 3, 15), U(15, 5), U(15), U(3, 5), kind="gru")
case("recurrent/gru reverse", recurred("gru", True), U(4, 3, 15), U(15, 5), kind="gru", reverse=True)
case("recurrent/tanh", recurred("tanh"), U(4, 3, 5), U(5, 5), None, U(3, 5), kind="tanh")
case("recurrent/relu", recurred("relu", True), U(4, 3, 5), U(5, 5), None, U(3, 5), kind="relu", reverse=True)
GX, RECURRENT, H0 = values("gx", 4, 3, 5), values("recurrent", 5, 5), values("h0", 3, 5)
STATES = [H0]
for x in GX:
    STATES.append(np.tanh(x + STATES[-1] @ RECURRENT.T))


def of_steps(t, g_y, g_h, g_c, weight, h0, *_):
    known = [t.from_numpy(GX).requires_grad_(), weight.detach().requires_grad_(), None, h0.detach().requires_grad_()]
    wanted = [x for x in known if x is not None]
    return [x.detach() for x in t.autograd.grad(recurred("tanh")(t, *known), wanted, (g_y, g_h))]


case("recurrent_grad", of_steps, U(4, 3, 5), U(3, 5), None, RECURRENT, H0, None, None, None, np.stack(STATES[1:]),
     np.stack(STATES[1:])[:, :, None], kind="tanh")  # fmt: skip


# ---- movement

ROWS_TAKEN, COLUMNS_TAKEN = [[1], [3]], [6, 4, 2]
STRIDED = {"starts": (1, 6), "steps": (2, -2)}
BLOCK = {"size": (4, 3), "stride": (1, 4)}
case("flatten", lambda t, x: t.flatten(x), U(2, 3))
case("flatten/axes", lambda t, x: t.flatten(x, 1, 2), U(2, 3, 4, 2), start_axis=1, end_axis=2)
case("strided_slice", lambda t, x: x[t.tensor(ROWS_TAKEN), t.tensor(COLUMNS_TAKEN)], U(5, 7), sizes=(2, 3), **STRIDED)
case("strided_unslice", lambda t, x: t.zeros(5, 7, dtype=x.dtype).index_put((t.tensor(ROWS_TAKEN), t.tensor(COLUMNS_TAKEN)), x), U(2, 3),
     shape=(5, 7), **STRIDED)  # fmt: skip
case("split", lambda t, x: t.split(x, 3), U(7, 3), sizes=3)
case("split/sizes", lambda t, x: t.split(x, [2, 0, 5], 1), U(3, 7), sizes=(2, 0, 5), axis=1)
case("chunk", lambda t, x: t.chunk(x, 3), U(7, 3), chunks=3)
case("as_strided", lambda t, x: t.as_strided(x, **BLOCK), U(3, 4), **BLOCK)
case("as_strided/back", lambda t, x: x.reshape(-1)[t.tensor([[3, 1], [11, 9]])], U(5, 4), size=(2, 2), stride=(8, -2), storage_offset=3)
case(
    "strided_block",
    lambda t, x: t.as_strided(x, (2, 3, 3), (7, 2, 1)),
    U(2, 7),
    starts=(0, 0),
    sizes=(2, 3, 3),
    moves=((1, 0), (0, 2), (0, 1)),
)
case("strided_block/diagonal", lambda t, x: t.diagonal(x, 1), U(3, 5), starts=(0, 1), sizes=(3,), moves=((1, 1),))
case("as_strided_scatter", lambda t, x, src: x.reshape(-1).index_put((t.tensor([[1, 5, 9], [2, 6, 10]]),), src).reshape(3, 4), U(3, 4),
     U(2, 3), size=(2, 3), stride=(1, 4), storage_offset=1)  # fmt: skip
for kind, shape, padding, options in (
    ("constant", (2, 3, 4), (1, 0, 2, 1), {"value": 2.5}), ("cut", (4, 5), (-1, 1, 0, -2), {}),
    ("reflect", (2, 3, 5), (2, 1, 1, 2), {"mode": "reflect"}), ("replicate", (2, 3, 4), (2, 1, 0, 3), {"mode": "replicate"}),
    ("circular", (2, 4, 4), (3, 1, 0, 2), {"mode": "circular"}),
):  # fmt: skip
    case(f"pad/{kind}", lambda t, x, p=padding, o=options: t.nn.functional.pad(x, p, **o), U(*shape), padding=padding, **options)
case("diag_embed", lambda t, x: t.diag_embed(x, -1), U(2, 3), offset=-1)
case("diag_embed/axes", lambda t, x: t.diag_embed(x, 2, 0, 2), U(2, 3), offset=2, dim1=0, dim2=2)

# ---- folds, order and products

case("kthvalue", lambda t, x, k: t.kthvalue(x, k), U(4, 3), 2)
case("kthvalue/axis", lambda t, x, k: t.kthvalue(x, k, 0, True), U(4, 3), 4, axis=0, keepdims=True)
case("median", lambda t, x: t.median(x), U(4, 3))
case("median/axis", lambda t, x: t.median(x, -1, True), U(2, 4), axis=-1, keepdims=True)
case("cumsum", lambda t, x: t.cumsum(x, 1), U(3, 5, 2), axis=1)
case("cumsum/reverse", lambda t, x: t.cumsum(x.flip(-1), -1).flip(-1), U(3, 5), axis=-1, reverse=True)
for p in (0, 1, 2, 3.5, np.inf, -np.inf):
    case(f"norm/{p}", lambda t, x, p=p: t.linalg.vector_norm(x, p, (0, 2)), U(3, 4, 2), p=p, axis=(0, 2))
case("norm/kept", lambda t, x: t.linalg.vector_norm(x, 2, 1, True), U(3, 4), axis=1, keepdims=True)
for kind, left, right, options in (
    ("vectors", (5,), (5,), {}), ("row", (5,), (2, 5, 3), {}), ("column", (2, 4, 5), (5,), {}), ("batches", (3, 1, 4, 5), (2, 5, 3), {}),
    ("left", (2, 5, 4), (2, 5, 3), {"transpose_a": True}), ("right", (4, 5), (3, 5), {"transpose_b": True}),
    ("both", (5, 4), (3, 5), {"transpose_a": True, "transpose_b": True}),
):  # fmt: skip
    case(f"matmul/{kind}", lambda t, a, b, o=options: (a.mT if "transpose_a" in o else a) @ (b.mT if "transpose_b" in o else b), U(*left),
         U(*right), **options)  # fmt: skip
case("affine", lambda t, x, w, b: t.nn.functional.linear(x, w, b), U(2, 3, 5), U(4, 5), U(4))
for op in ("relu", "tanh", "sigmoid", "silu", "gelu"):
    for name in ("linear", "affine_activated"):
        case(f"{name}/{op}", lambda t, x, w, b, op=op: getattr(t.nn.functional, op)(t.nn.functional.linear(x, w, b)), U(3, 5), U(4, 5),
             U(4), activation=op)  # fmt: skip
case("linear", lambda t, x, w: t.nn.functional.linear(x, w), U(3, 5), U(4, 5))
for how in ("prod", "amax", "amin"):
    for own in (True, False):
        case(f"scatter_reduced/{how} {own}", lambda t, *given: t.scatter_reduce(*given[:-1], include_self=given[-1]), U(5, 4), 0, WHERE,
             U(3, 4), how, own)  # fmt: skip
case("info_nce", lambda t, a, b: t.nn.functional.cross_entropy(t.nn.functional.normalize(a) @ t.nn.functional.normalize(b).T / 0.5,
                                                               t.arange(4)), U(4, 5), U(4, 5), temperature=0.5)  # fmt: skip

# ---- Fourier transforms


def complex_of(t, x):
    return t.view_as_complex(x.contiguous())


case("fft_pairs", lambda t, x: t.view_as_real(t.fft.fftn(complex_of(t, x), dim=(0,))), U(5, 2), axes=(0,))
case("fft_pairs/back", lambda t, x: t.view_as_real(t.fft.ifftn(complex_of(t, x), dim=(0, 1), norm="forward")) * 0.25, U(3, 4, 2),
     axes=(0, 1), forward=False, scale=0.25)  # fmt: skip
case("fft_from_real", lambda t, x: t.view_as_real(t.fft.rfft(x, dim=0)) * 0.5, U(5, 3), axis=0, scale=0.5)
case("fft_from_real/even", lambda t, x: t.view_as_real(t.fft.rfft(x)), U(6))
case("fft_to_real", lambda t, x: t.fft.irfft(complex_of(t, x), 6, norm="forward"), U(4, 2), n=6)
case("fft_to_real/axis", lambda t, x: t.fft.irfft(complex_of(t, x), 5, 0, norm="forward") * 0.2, U(3, 2, 2), n=5, axis=0, scale=0.2)
case("stft_pairs", lambda t, x: t.view_as_real(t.stft(x, 8, return_complex=True)), U(20), n_fft=8)
case("stft_pairs/whole", lambda t, x: t.view_as_real(t.stft(x, 6, 3, center=False, onesided=False, return_complex=True)), U(2, 17), n_fft=6,
     hop_length=3, center=False, onesided=False)  # fmt: skip
