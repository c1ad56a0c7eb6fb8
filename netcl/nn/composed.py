"""Functions under torch's names that call one or several ops, and layers made from such functions."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Sequence
from functools import partial, wraps
from typing import Any

import numpy as np

import netcl.autograd as ag
from netcl.autograd.creation import gumbel_noise
from netcl.autograd.in_place import overwrite
from netcl.autograd.ops import older_reduction
from netcl.core.errors import ShapeError, message
from netcl.core.tensor import Tensor
from netcl.nn.ctc import ctc_loss
from netcl.nn.layer_class import function_layer, layer_class
from netcl.nn.loss import Loss, refuse_bools
from netcl.nn.module import Module
from netcl.nn.norm import EPSILON


def _reduced(values: Tensor, reduction: str) -> Tensor:
    if reduction not in ("mean", "sum", "none"):
        raise ValueError(message("loss", "reduction must be mean, sum or none", reduction=repr(reduction)))
    return values if reduction == "none" else ag.mean(values) if reduction == "mean" else ag.sum(values)


# ---- ops with torch's words and defaults


def normalize(input: Tensor, p: float = 2.0, dim: int = 1, eps: float = 1e-12) -> Tensor:
    """Scale vectors along ``dim`` to length one: ``x / max(norm(x), eps)``.

    >>> import netcl.nn.functional as F
    >>> [round(v, 4) for v in F.normalize([[3.0, 4.0]]).tolist()[0]]
    [0.6, 0.8]
    """
    return ag.div(input, ag.clamp(ag.norm(input, p, axis=dim, keepdims=True), min=eps))


def cosine_similarity(x1: Tensor, x2: Tensor, dim: int = 1, eps: float = 1e-8) -> Tensor:
    """The cosine of the angle between vectors: ``x1 x2 / (max(|x1|, eps) max(|x2|, eps))`` along ``dim``."""
    return ag.cosine_similarity(x1, x2, axis=dim, eps=eps)


def rms_norm(input: Tensor, normalized_shape: int | Sequence[int], weight: Tensor | None = None, eps: float | None = None) -> Tensor:
    """Return ``x / sqrt(mean(x^2) + eps) * weight`` over the last axes; by default ``eps`` is the machine epsilon of the compute dtype."""
    return ag.rms_norm(input, normalized_shape, weight, eps=EPSILON[input.dtype] if eps is None else eps)


def dropout(input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
    """Zero elements with probability ``p`` and scale the others by ``1 / (1 - p)``; the identity unless ``training``."""
    return overwrite(ag.dropout, input, p) if inplace and training else ag.dropout(input, p, training)


def pad(input: Tensor, pad: Sequence[int], mode: str = "constant", value: float | None = None) -> Tensor:
    """Pad the ends of axes; ``pad`` has two sizes per axis, the last axis first."""
    return ag.pad(input, pad, mode, 0.0 if value is None else value)


def instance_norm(
    input: Tensor, running_mean: Tensor | None = None, running_var: Tensor | None = None, weight: Tensor | None = None,
    bias: Tensor | None = None, use_input_stats: bool = True, momentum: float = 0.1, eps: float = 1e-5,
) -> Tensor:  # fmt: skip
    """Normalize ``(N, C, ...)`` per image and channel. ``use_input_stats=False`` uses the running statistics and does not update them."""
    if not use_input_stats:
        return ag.batch_norm(input, running_mean, running_var, weight, bias, eps=eps)
    if running_mean is not None or running_var is not None:
        raise ShapeError(message("instance_norm", "running_mean and running_var must be None if use_input_stats", "use nn.InstanceNorm2d"))
    return ag.instance_norm(input, weight, bias, eps=eps)


def batch_norm(input: Tensor, running_mean: Tensor | None, running_var: Tensor | None, weight: Tensor | None = None,
               bias: Tensor | None = None, training: bool = False, momentum: float = 0.1, eps: float = 1e-5) -> Tensor:  # fmt: skip
    """Normalize ``(N, C, ...)`` per channel; training uses the statistics of the batch and updates the running statistics in place."""
    if not training and (running_mean is None or running_var is None):
        raise ShapeError(message("batch_norm", "running_mean and running_var must be given unless training", "pass training=True"))
    return ag.batch_norm(input, running_mean, running_var, weight, bias, training=training, momentum=momentum, eps=eps)


def scaled_dot_product_attention(query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0,
                                 is_causal: bool = False, scale: float | None = None, enable_gqa: bool = False) -> Tensor:  # fmt: skip
    """Return ``softmax(q k^T / sqrt(d) + mask) v``; a bool mask is True where attention is allowed. ``enable_gqa`` is always on."""
    del enable_gqa
    return ag.scaled_dot_product_attention(query, key, value, attn_mask, dropout_p=dropout_p, is_causal=is_causal, scale=scale)


# ---- activations


def _threshold(input: Tensor, threshold: float, value: float) -> Tensor:
    return ag.where(ag.le(input, threshold), value, input)


def threshold(input: Tensor, threshold: float, value: float, inplace: bool = False) -> Tensor:
    """``x`` where above ``threshold``, else ``value``; NaN stays."""
    return overwrite(_threshold, input, threshold, value) if inplace else _threshold(input, threshold, value)


def hardshrink(input: Tensor, lambd: float = 0.5) -> Tensor:
    """``x`` where ``|x| > lambd``, else 0."""
    return ag.where(ag.le(ag.abs(input), lambd), 0.0, input)


def softshrink(input: Tensor, lambd: float = 0.5) -> Tensor:
    """Shrink ``x`` toward 0 by ``lambd``; values with ``|x| <= lambd`` become 0."""
    return ag.sub(input, ag.clamp(input, min=-lambd, max=lambd))


def tanhshrink(input: Tensor) -> Tensor:
    """``x - tanh(x)``."""
    return ag.sub(input, ag.tanh(input))


def softmin(input: Tensor, dim: int = -1) -> Tensor:
    """The softmax of ``-x`` along ``dim``."""
    return ag.softmax(ag.neg(input), axis=dim)


def rrelu(input: Tensor, lower: float = 1.0 / 8, upper: float = 1.0 / 3, training: bool = False, inplace: bool = False) -> Tensor:
    """``x`` where positive, else ``a * x``. In training ``a`` is random in ``lower .. upper``, otherwise ``(lower + upper) / 2``."""
    if inplace:
        return overwrite(rrelu, input, lower, upper, training)
    if not training:
        return ag.leaky_relu(input, negative_slope=(lower + upper) / 2)
    slope = ag.add(ag.mul(ag.rand(*input.shape, queue=input.queue), upper - lower), lower)
    return ag.where(ag.gt(input, 0.0), input, ag.mul(input, slope.to(input.dtype)))


def gumbel_softmax(logits: Tensor, tau: float = 1.0, hard: bool = False, eps: float = 1e-10, dim: int = -1) -> Tensor:
    """Return the softmax of ``(logits + Gumbel noise) / tau``. ``hard`` makes values one-hot and keeps the gradient. ``eps`` is ignored."""
    noise = gumbel_noise(logits.shape, logits).to(logits.dtype)
    soft = ag.softmax(ag.div(ag.add(logits, noise), tau), axis=dim)
    if not hard:
        return soft
    chosen = ag.moveaxis(ag.one_hot(ag.argmax(soft, axis=dim), logits.shape[dim], soft.dtype), -1, dim)
    return ag.add(chosen, ag.sub(soft, soft.detach()))


Softmax2d = layer_class(
    globals(), "Softmax2d()", "ag.softmax(input, axis=-3)", "The softmax over the channels of images ``(N, C, H, W)`` or ``(C, H, W)``.",
    "nn.Softmax2d()([[[0.0]], [[0.0]]]).tolist()", "[[[0.5]], [[0.5]]]",
)  # fmt: skip


# ---- shapes, windows, distances


def channel_shuffle(input: Tensor, groups: int) -> Tensor:
    """Interleave ``groups`` groups of ``n`` channels each: channel ``g * n + i`` becomes ``i * groups + g``."""
    batch, channels, *sizes = input.shape
    parts = ag.reshape(ag.clone(input) if groups in (1, channels) else input, (batch, groups, channels // groups, *sizes))
    return ag.reshape(ag.transpose(parts, 1, 2), (batch, channels, *sizes))


def unfold(input: Tensor, kernel_size: Any, dilation: Any = 1, padding: Any = 0, stride: Any = 1) -> Tensor:
    """Copy the windows of images to columns: ``(N, C, H, W)`` becomes ``(N, C * kH * kW, windows)``."""
    return ag.im2col(input, kernel=kernel_size, dilation=dilation, padding=padding, stride=stride)


def fold(input: Tensor, output_size: Any, kernel_size: Any, dilation: Any = 1, padding: Any = 0, stride: Any = 1) -> Tensor:
    """Fold columns back to images of ``output_size``; overlapping windows add up."""
    return ag.col2im(input, size=output_size, kernel=kernel_size, dilation=dilation, padding=padding, stride=stride)


def local_response_norm(input: Tensor, size: int, alpha: float = 1e-4, beta: float = 0.75, k: float = 1.0) -> Tensor:
    """``x / (k + alpha * mean of x^2 over size neighboring channels) ** beta``."""
    rows = ag.reshape(ag.square(input), (input.shape[0], 1, input.shape[1], -1))
    means = ag.avg_pool2d(ag.pad(rows, (0, 0, size // 2, (size - 1) // 2)), (size, 1), 1)
    return ag.div(input, ag.pow(ag.add(ag.mul(ag.reshape(means, input.shape), alpha), k), beta))


def conv_tbc(input: Tensor, weight: Tensor, bias: Tensor, pad: int = 0) -> Tensor:
    """Convolve signals ``(L, N, C)`` with weights ``(K, C, F)``."""
    y = ag.conv1d(ag.permute(input, (1, 2, 0)), ag.permute(weight, (2, 1, 0)), bias, padding=pad)
    return ag.permute(y, (2, 0, 1))


def upsample(input: Tensor, size: Any = None, scale_factor: Any = None, mode: str = "nearest", align_corners: bool = False) -> Tensor:
    """Call ``interpolate``; ``upsample`` is its older name in torch."""
    return ag.interpolate(input, size=size, scale_factor=scale_factor, mode=mode, align_corners=align_corners)


def upsample_nearest(input: Tensor, size: Any = None, scale_factor: Any = None) -> Tensor:
    """Resize images by repeating pixels."""
    return upsample(input, size, scale_factor)


def upsample_bilinear(input: Tensor, size: Any = None, scale_factor: Any = None) -> Tensor:
    """Resize images by linear interpolation; the corners keep their values."""
    return upsample(input, size, scale_factor, "bilinear", True)


def pdist(input: Tensor, p: float = 2.0) -> Tensor:
    """Return the p-norm distances of all pairs of rows, in the order (0, 1), (0, 2), ..., (1, 2), ..."""
    first, second = (Tensor.from_host(input.queue, index) for index in np.triu_indices(input.shape[0], 1))
    return ag.norm(ag.sub(ag.index_select(input, 0, first), ag.index_select(input, 0, second)), p, axis=-1)


def pairwise_distance(x1: Tensor, x2: Tensor, p: float = 2.0, eps: float = 1e-6, keepdim: bool = False) -> Tensor:
    """The p-norm of ``x1 - x2 + eps`` along the last axis."""
    return ag.norm(ag.add(ag.sub(x1, x2), eps), p, axis=-1, keepdims=keepdim)


def _padded(input: Tensor, padding: int | Sequence[int], axes: int, mode: str, value: float = 0.0) -> Tensor:
    return ag.pad(input, (padding,) * (2 * axes) if isinstance(padding, int) else tuple(padding), mode, value)


def _pads(kind: str, mode: str) -> Sequence[Any]:
    """Return the layers ``{kind}Pad1d``, ``2d`` and ``3d``, which pad the last one, two or three axes; ``mode`` as in ``pad``."""
    value, given, length = (", value: float = 0.0", "1, 5.0", 1) if kind == "Constant" else ("", "0", 0)
    made = []
    for axes in (1, 2, 3):
        doc = f"Pads both ends of the last {('axis', '2 axes', '3 axes')[axes - 1]}; ``padding`` is one size, or two per axis, last first."
        x, gives = "[" * (axes + 1) + "1.0, 2.0" + "]" * (axes + 1), (1, *(1 + 2 * length,) * (axes - 1), 2 + 2 * length)
        head = f"{kind}Pad{axes}d(padding: int | Sequence[int]{value})"
        call = f"_padded(input, padding, {axes}, {mode!r}{', value' if value else ''})"
        made.append(layer_class(globals(), head, call, doc, f"nn.{kind}Pad{axes}d({given})({x}).shape", str(gives)))
    return made


ConstantPad1d, ConstantPad2d, ConstantPad3d = _pads("Constant", "constant")
ZeroPad1d, ZeroPad2d, ZeroPad3d = _pads("Zero", "constant")
ReflectionPad1d, ReflectionPad2d, ReflectionPad3d = _pads("Reflection", "reflect")
ReplicationPad1d, ReplicationPad2d, ReplicationPad3d = _pads("Replication", "replicate")
CircularPad1d, CircularPad2d, CircularPad3d = _pads("Circular", "circular")


# ---- losses


def margin_ranking_loss(input1: Tensor, input2: Tensor, target: Tensor, margin: float = 0.0, reduction: str = "mean") -> Tensor:
    """``max(0, -y (x1 - x2) + margin)``: ``x1`` should rank higher where ``y`` is 1, lower where it is -1."""
    if not input1.ndim == input2.ndim == target.ndim:
        shapes = {"input1": input1.shape, "input2": input2.shape, "target": target.shape}
        raise ShapeError(message("margin_ranking_loss", "inputs and target must have the same number of dimensions", **shapes))
    return _reduced(ag.clamp(ag.sub(margin, ag.mul(target, ag.sub(input1, input2))), min=0.0), reduction)


def hinge_embedding_loss(input: Tensor, target: Tensor, margin: float = 1.0, reduction: str = "mean") -> Tensor:
    """``x`` where the target is 1, ``max(0, margin - x)`` where it is -1; their sum for other targets, as in torch."""
    apart = ag.where(ag.ne(target, 1.0), ag.clamp(ag.sub(margin, input), min=0.0), 0.0)
    return _reduced(ag.add(ag.where(ag.ne(target, -1.0), input, 0.0), apart), reduction)


def soft_margin_loss(input: Tensor, target: Tensor, reduction: str = "mean") -> Tensor:
    """``log(1 + exp(-y x))`` for targets of 1 and -1."""
    return _reduced(ag.neg(ag.log_sigmoid(ag.mul(target, input))), reduction)


def multilabel_soft_margin_loss(input: Tensor, target: Tensor, weight: Tensor | None = None, reduction: str = "mean") -> Tensor:
    """The binary cross-entropy of each class, from logits, averaged over the classes."""
    loss = ag.bce_with_logits(input, target, reduction="none")
    return _reduced(ag.mean(loss if weight is None else ag.mul(loss, weight), axis=-1), reduction)


def multi_margin_loss(
    input: Tensor, target: Tensor, p: int = 1, margin: float = 1.0, weight: Tensor | None = None, reduction: str = "mean"
) -> Tensor:
    """The sum over the wrong classes ``i`` of ``max(0, margin - x[y] + x[i]) ** p``, divided by the number of classes."""
    classes = input.shape[-1]
    rows, right = ag.reshape(input, (-1, classes)), ag.reshape(target, (-1, 1))
    short = ag.relu(ag.add(ag.sub(margin, ag.gather(rows, 1, right)), rows))
    loss = short if p == 1 else ag.pow(short, float(p))
    loss = ag.masked_fill(loss, ag.one_hot(ag.squeeze(right, 1), classes, "bool"), 0.0)
    total = ag.reshape(ag.div(ag.sum(loss, axis=1), float(classes)), target.shape)
    return _reduced(total if weight is None else ag.mul(total, ag.take(weight, target)), reduction)


def multilabel_margin_loss(input: Tensor, target: Tensor, reduction: str = "mean") -> Tensor:
    """Sum ``max(0, 1 - x[y] + x[i])`` over targets ``y`` (up to the first -1) and other classes ``i``; divide by the class count."""
    rows, goals = (ag.reshape(part, (-1, input.shape[-1])) for part in (input, target))
    given = ag.eq(ag.cumsum(ag.cast(ag.lt(goals, 0), "int64"), 1), 0)
    goals = ag.clamp(goals, min=0)
    is_goal = ag.any(ag.logical_and(ag.one_hot(goals, input.shape[-1], "bool"), ag.unsqueeze(given, 2)), axis=1)
    short = ag.relu(ag.add(ag.sub(1.0, ag.unsqueeze(ag.gather(rows, 1, goals), 2)), ag.unsqueeze(rows, 1)))
    counted = ag.logical_and(ag.unsqueeze(given, 2), ag.unsqueeze(ag.logical_not(is_goal), 1))
    loss = ag.div(ag.sum(ag.where(counted, short, 0.0), axis=(1, 2)), float(input.shape[-1]))
    return _reduced(ag.reshape(loss, input.shape[:-1]), reduction)


def linear_cross_entropy(
    input: Tensor, linear_weight: Tensor, target: Tensor, *, linear_bias: Tensor | None = None, weight: Tensor | None = None,
    reduction: str = "mean", ignore_index: int | None = None, label_smoothing: float = 0.0, options: Any = None,
) -> Tensor:  # fmt: skip
    """Return the cross-entropy of ``linear(input)``. Weights ``(C, ..., features)`` give logits ``(N, C, ...)``. ``options`` is ignored."""
    *shape, features = linear_weight.shape
    bias = None if linear_bias is None else ag.reshape(linear_bias, (-1,))
    logits = ag.linear(input, ag.reshape(linear_weight, (-1, features)), bias)
    logits, ignored = ag.reshape(logits, (*input.shape[:-1], *shape)), -100 if ignore_index is None else ignore_index
    return ag.cross_entropy(logits, target, weight=weight, ignore_index=ignored, reduction=reduction, label_smoothing=label_smoothing)


def cosine_embedding_loss(input1: Tensor, input2: Tensor, target: Tensor, margin: float = 0.0, reduction: str = "mean") -> Tensor:
    """``1 - cos(x1, x2)`` where the target is 1, ``max(0, cos(x1, x2) - margin)`` where it is -1."""
    cosine = ag.cosine_similarity(input1, input2, axis=-1)
    apart = ag.where(ag.eq(target, -1.0), ag.clamp(ag.sub(cosine, margin), min=0.0), 0.0)
    return _reduced(ag.where(ag.eq(target, 1.0), ag.sub(1.0, cosine), apart), reduction)


def poisson_nll_loss(
    input: Tensor, target: Tensor, log_input: bool = True, full: bool = False, eps: float = 1e-8, reduction: str = "mean"
) -> Tensor:
    """The Poisson loss of counts: ``exp(x) - y x``, or ``x - y log(x + eps)`` if not ``log_input``; ``full`` adds Stirling's term."""
    rate, logarithm = (ag.exp(input), input) if log_input else (input, ag.log(ag.add(input, eps)))
    loss = ag.sub(rate, ag.mul(target, logarithm))
    if full:
        y = ag.clamp(target, min=1.0)
        stirling = ag.add(ag.sub(ag.mul(y, ag.log(y)), y), ag.mul(ag.log(ag.mul(y, 2 * math.pi)), 0.5))
        loss = ag.add(loss, ag.where(ag.gt(target, 1.0), stirling, 0.0))
    return _reduced(loss, reduction)


def gaussian_nll_loss(input: Tensor, target: Tensor, var: Tensor, full: bool = False, eps: float = 1e-6, reduction: str = "mean") -> Tensor:
    """Negative log-likelihood: ``(log(var) + (x - y)^2 / var) / 2``; ``full`` adds ``log(2 pi) / 2``, ``eps`` clamps ``var``.

    ``var`` is a number, or has the shape of ``input``, perhaps without the last axis or with one axis of size 1. A negative element gives
    NaN: torch reads the values to raise an error.
    """
    if not isinstance(var, Tensor) or var.ndim == 0:
        var = ag.mul(Tensor.ones(input.shape, input.dtype, queue=input.queue), var)
    unlike = [n for n, size in zip(var.shape, input.shape, strict=False) if n != size]
    if var.shape != input.shape and var.shape == input.shape[:-1]:
        var = ag.unsqueeze(var, -1)
    elif var.ndim != input.ndim or unlike not in ([], [1]):
        what = "var must have the shape of input, perhaps without the last axis or with one axis of size 1"
        raise ShapeError(message("gaussian_nll_loss", what, var=var.shape, input=input.shape))
    held = var.detach()
    spread = ag.where(ag.lt(held, eps), ag.add(ag.sub(var, held), eps), var)  # clamped, with the gradient of ``var`` itself
    spread = ag.where(ag.lt(held, 0.0), math.nan, spread)
    loss = ag.mul(ag.add(ag.log(spread), ag.div(ag.square(ag.sub(input, target)), spread)), 0.5)
    return _reduced(ag.add(loss, 0.5 * math.log(2 * math.pi)) if full else loss, reduction)


def triplet_margin_with_distance_loss(
    anchor: Tensor, positive: Tensor, negative: Tensor, *, distance_function: Callable[[Tensor, Tensor], Tensor] | None = None,
    margin: float = 1.0, swap: bool = False, reduction: str = "mean",
) -> Tensor:  # fmt: skip
    """``max(0, d(anchor, positive) - d(anchor, negative) + margin)``; ``swap`` uses ``d(positive, negative)`` where it is smaller."""
    distance = distance_function or pairwise_distance
    far = distance(anchor, negative)
    if swap:
        far = ag.minimum(far, distance(positive, negative))
    return _reduced(ag.clamp(ag.add(ag.sub(distance(anchor, positive), far), margin), min=0.0), reduction)


def triplet_margin_loss(
    anchor: Tensor, positive: Tensor, negative: Tensor, margin: float = 1.0, p: float = 2.0, eps: float = 1e-6, swap: bool = False,
    reduction: str = "mean",
) -> Tensor:  # fmt: skip
    """Triplet loss ``max(0, d(anchor, positive) - d(anchor, negative) + margin)`` with the p-norm as ``d``."""
    if not swap:
        return ag.triplet(anchor, positive, negative, margin=margin, p=p, eps=eps, reduction=reduction)
    norm = partial(pairwise_distance, p=p, eps=eps)
    return triplet_margin_with_distance_loss(
        anchor, positive, negative, distance_function=norm, margin=margin, swap=True, reduction=reduction
    )


CTCLoss = layer_class(
    globals(), "CTCLoss(blank: int = 0, reduction: str = 'mean', zero_infinity: bool = False)",
    "ctc_loss(log_probs, targets, input_lengths, target_lengths, blank, reduction, zero_infinity)", ctc_loss.__doc__ or "",
    "round(nn.CTCLoss()([[[-1.0, -2.0]]], np.array([[1]]), [1], [1]).item(), 4)", "2.0", Loss,
)  # fmt: skip
#: Layers made from functions above: the function, and an example with its result.
_FUNCTION_LAYERS: dict[str, Any] = {
    "Threshold": (threshold, "nn.Threshold(1.0, 9.0)([0.0, 2.0]).tolist()", "[9.0, 2.0]"),
    "Hardshrink": (hardshrink, "nn.Hardshrink()([-1.0, 0.25]).tolist()", "[-1.0, 0.0]"),
    "Softshrink": (softshrink, "nn.Softshrink()([-1.0, 0.25]).tolist()", "[-0.5, 0.0]"),
    "Tanhshrink": (tanhshrink, "nn.Tanhshrink()([0.0]).tolist()", "[0.0]"),
    "Softmin": (softmin, "nn.Softmin()([[1.0, 1.0]]).tolist()", "[[0.5, 0.5]]"),
    "RReLU": (rrelu, "nn.RReLU(0.25, 0.75).eval()([-1.0, 2.0]).tolist()", "[-0.5, 2.0]"),
    "ChannelShuffle": (channel_shuffle, "nn.ChannelShuffle(2)([[1, 2, 3, 4]]).tolist()", "[[1, 3, 2, 4]]"),
    "Unfold": (unfold, "nn.Unfold(2)([[[[1.0, 2.0], [3.0, 4.0]]]]).shape", "(1, 4, 1)"),
    "Fold": (fold, "nn.Fold(2, 2)([[[1.0], [2.0], [3.0], [4.0]]]).tolist()", "[[[[1.0, 2.0], [3.0, 4.0]]]]"),
    "LocalResponseNorm": (local_response_norm, "nn.LocalResponseNorm(1, 3.0, 0.5)([[[1.0]]]).item()", "0.5"),
    "UpsamplingNearest2d": (
        upsample_nearest, "nn.UpsamplingNearest2d(scale_factor=2)([[[[1.0]]]]).tolist()", "[[[[1.0, 1.0], [1.0, 1.0]]]]",
    ),
    "UpsamplingBilinear2d": (
        upsample_bilinear, "nn.UpsamplingBilinear2d(size=(1, 3))([[[[1.0, 2.0]]]]).tolist()", "[[[[1.0, 1.5, 2.0]]]]",
    ),
    "CosineSimilarity": (cosine_similarity, "nn.CosineSimilarity()([[3.0, 4.0]], [[6.0, 8.0]]).tolist()", "[1.0]"),
    "PairwiseDistance": (pairwise_distance, "nn.PairwiseDistance(1, 0.0)([[1.0]], [[3.0]]).tolist()", "[2.0]"),
    "MarginRankingLoss": (margin_ranking_loss, "nn.MarginRankingLoss()([1.0], [3.0], [1.0]).item()", "2.0"),
    "HingeEmbeddingLoss": (hinge_embedding_loss, "nn.HingeEmbeddingLoss()([0.5], [-1.0]).item()", "0.5"),
    "SoftMarginLoss": (soft_margin_loss, "round(nn.SoftMarginLoss()([0.0], [1.0]).item(), 4)", "0.6931"),
    "MultiLabelSoftMarginLoss": (multilabel_soft_margin_loss, "round(nn.MultiLabelSoftMarginLoss()([[0.0]], [[1.0]]).item(), 4)", "0.6931"),
    "MultiMarginLoss": (multi_margin_loss, "nn.MultiMarginLoss()([[1.0, 2.0]], [0]).item()", "1.0"),
    "MultiLabelMarginLoss": (multilabel_margin_loss, "nn.MultiLabelMarginLoss()([[1.0, 2.0]], [[0, -1]]).item()", "1.0"),
    "CosineEmbeddingLoss": (cosine_embedding_loss, "nn.CosineEmbeddingLoss()([[1.0, 0.0]], [[0.0, 1.0]], [1]).item()", "1.0"),
    "PoissonNLLLoss": (poisson_nll_loss, "nn.PoissonNLLLoss()([0.0], [3.0]).item()", "1.0"),
    "GaussianNLLLoss": (gaussian_nll_loss, "nn.GaussianNLLLoss()([0.0], [2.0], [1.0]).item()", "2.0"),
    "TripletMarginLoss": (triplet_margin_loss, "nn.TripletMarginLoss()([[0.0]], [[1.0]], [[3.0]]).item()", "0.0"),
    "TripletMarginWithDistanceLoss": (
        triplet_margin_with_distance_loss, "round(nn.TripletMarginWithDistanceLoss()([[0.0]], [[1.0]], [[1.5]]).item(), 3)", "0.5",
    ),
}  # fmt: skip
for _name, (_function, _example, _gives) in _FUNCTION_LAYERS.items():
    globals()[_name] = function_layer(globals(), _name, _function, _example, _gives, Loss if _name.endswith("Loss") else Module)


def _reducing(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    @wraps(function)
    def call(*args: Any, size_average: Any = None, reduce: Any = None, **kwargs: Any) -> Tensor:
        refuse_bools(function.__name__, function, args)
        return function(*args, **kwargs | older_reduction(size_average, reduce))

    return call


globals().update({name: _reducing(made) for name, made in [*globals().items()] if name.endswith("_loss")})
FUNCTIONS = [name for name, made in globals().items() if inspect.isfunction(made) and made.__module__ == __name__ and name[0] != "_"]
