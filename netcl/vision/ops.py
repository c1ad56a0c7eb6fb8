"""Functions and layers of ``torchvision.ops``: boxes ``(x1, y1, x2, y2)``, non-maximum suppression, and layers of the models."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

import netcl.autograd as ag
from netcl import nn
from netcl.core.dtype import HALVES
from netcl.core.errors import ShapeError, check_probability, message
from netcl.core.tensor import Tensor
from netcl.nn.layer_class import layer_class


def _coordinates(op: str, boxes: Tensor) -> tuple[Tensor, ...]:
    """Return the four coordinates of boxes, each of shape ``(..., 1)``; raises unless the last dimension is 4."""
    if boxes.shape[-1:] != (4,):
        raise ShapeError(message(op, "boxes must have shape (..., 4)", **{"boxes.shape": boxes.shape}))
    return ag.split(boxes, 1, axis=-1)


def _widened(boxes: Tensor) -> Tensor:
    """Return boxes in the dtype in which their areas are computed: float32 for 16-bit floats, in which areas overflow."""
    return ag.cast(boxes, "float32") if boxes.dtype in HALVES else boxes


def box_convert(boxes: Tensor, in_fmt: str, out_fmt: str) -> Tensor:
    """Convert boxes between the formats ``xyxy`` (corners), ``xywh`` (corner and size) and ``cxcywh`` (center and size)."""
    forms = ("xyxy", "xywh", "cxcywh")
    if in_fmt not in forms or out_fmt not in forms:
        raise ValueError(message("box_convert", f"in_fmt and out_fmt must be one of {', '.join(forms)}", in_fmt=in_fmt, out_fmt=out_fmt))
    x, y, w, h = _coordinates("box_convert", boxes)
    if in_fmt == out_fmt:
        return boxes.clone()
    if in_fmt == "xyxy":
        w, h = w - x, h - y
    elif in_fmt == "cxcywh":
        x, y = x - w * 0.5, y - h * 0.5
    out = {"xyxy": (x, y, x + w, y + h), "xywh": (x, y, w, h), "cxcywh": (x + w * 0.5, y + h * 0.5, w, h)}
    return ag.cat(out[out_fmt], axis=-1)


def box_area(boxes: Tensor) -> Tensor:
    """Return the area of each box."""
    x1, y1, x2, y2 = _coordinates("box_area", _widened(boxes))
    return ag.reshape((x2 - x1) * (y2 - y1), boxes.shape[:-1])


def box_iou(boxes1: Tensor, boxes2: Tensor) -> Tensor:
    """Return the intersection over union of all pairs of boxes, ``(N, M)``."""
    boxes1, boxes2 = _widened(boxes1), _widened(boxes2)
    one, two = _coordinates("box_iou", boxes1), [ag.transpose(x, -2, -1) for x in _coordinates("box_iou", boxes2)]
    width, height = (ag.clamp(ag.minimum(one[i + 2], two[i + 2]) - ag.maximum(one[i], two[i]), min=0.0) for i in (0, 1))
    common = width * height
    return common / (ag.unsqueeze(box_area(boxes1), -1) + ag.unsqueeze(box_area(boxes2), -2) - common)


def clip_boxes_to_image(boxes: Tensor, size: Sequence[int]) -> Tensor:
    """Return the boxes, clipped to an image of ``size`` ``(height, width)``."""
    sides = (size[1], size[0]) * 2
    return ag.cat([ag.clamp(x, 0, side) for x, side in zip(_coordinates("clip_boxes", boxes), sides, strict=True)], axis=-1)


def nms(boxes: Tensor, scores: Tensor, iou_threshold: float) -> Tensor:
    """Return the indices of boxes to keep, by decreasing score. A kept box removes later boxes whose IoU with it exceeds the threshold.

    The number of results depends on the values, so the loop runs on the host.

    >>> from netcl import tensor
    >>> boxes = tensor([[0.0, 0.0, 2.0, 2.0], [0.0, 0.0, 2.0, 1.9], [5.0, 5.0, 6.0, 6.0]])
    >>> nms(boxes, tensor([0.5, 0.9, 0.1]), 0.5).tolist()
    [1, 2]
    """
    if boxes.ndim != 2 or boxes.shape[1] != 4 or scores.shape != boxes.shape[:1]:
        raise ShapeError(message("nms", "boxes must be (N, 4) and scores (N,)", boxes=boxes.shape, scores=scores.shape))
    return Tensor.from_host(boxes.queue, kept_boxes(boxes.to_host(), scores.to_host(), iou_threshold))


def kept_boxes(boxes: np.ndarray, scores: np.ndarray, iou_threshold: float) -> np.ndarray:
    """Return the indices of :func:`nms` for arrays, as an array."""
    left, kept = np.argsort(-scores, kind="stable"), []
    areas = (boxes[:, 2] - boxes[:, 0]) * (boxes[:, 3] - boxes[:, 1])
    while left.size:
        best, left = left[0], left[1:]
        kept.append(best)
        sides = np.minimum(boxes[left, 2:], boxes[best, 2:]) - np.maximum(boxes[left, :2], boxes[best, :2])
        common = np.prod(np.maximum(sides, 0), axis=1)
        with np.errstate(divide="ignore", invalid="ignore"):  # boxes without area suppress nothing
            left = left[~(common / (areas[left] + areas[best] - common) > iou_threshold)]
    return np.array(kept, np.int64)


def batched_nms(boxes: Tensor, scores: Tensor, idxs: Tensor, iou_threshold: float) -> Tensor:
    """Return the indices of :func:`nms` within each class of ``idxs``, by decreasing score over all classes."""
    host, values, classes = boxes.to_host(), scores.to_host(), idxs.to_host()
    groups = [np.flatnonzero(classes == c) for c in np.unique(classes)]
    kept = np.concatenate([group[kept_boxes(host[group], values[group], iou_threshold)] for group in groups] or [np.zeros(0, np.int64)])
    return Tensor.from_host(boxes.queue, kept[np.argsort(-values[kept], kind="stable")])


Permute = layer_class(globals(), "Permute(dims: Sequence[int])", "ag.permute(x, dims)", "Permutes the axes to the order ``dims``.",
                      "Permute((1, 0))(np.ones((2, 3), np.float32)).shape", "(3, 2)")  # fmt: skip


class StochasticDepth(nn.Module):
    """In training, zeros the whole input (``mode`` "batch") or samples of it ("row") with probability ``p``, and scales the rest."""

    def __init__(self, p: float, mode: str):
        super().__init__()
        check_probability("StochasticDepth", "p", p)
        if mode not in ("batch", "row"):
            raise ValueError(message("StochasticDepth", 'mode must be "batch" or "row"', mode=repr(mode)))
        self.p, self.mode = p, mode

    def forward(self, x: Tensor) -> Tensor:
        if not self.training or self.p == 0.0:
            return x
        shape = (x.shape[0] if self.mode == "row" else 1, *(1,) * (x.ndim - 1))
        return ag.mul(x, ag.dropout(Tensor.ones(shape, x.dtype, queue=x.queue), self.p))


class FrozenBatchNorm2d(nn.Module):
    """Batch normalization of images whose statistics and affine parameters are buffers, so that training does not change them.

    >>> from netcl.vision.ops import FrozenBatchNorm2d
    >>> FrozenBatchNorm2d(3)(Tensor.ones((1, 3, 2, 2))).shape
    (1, 3, 2, 2)
    """

    weight: Tensor
    bias: Tensor
    running_mean: Tensor
    running_var: Tensor

    def __init__(self, num_features: int, eps: float = 1e-5):
        super().__init__()
        self.num_features, self.eps = num_features, eps
        for name in ("weight", "bias", "running_mean", "running_var"):
            self.register_buffer(name, (Tensor.ones if name in ("weight", "running_var") else Tensor.zeros)((num_features,)))

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *rest: Any) -> None:
        state_dict.pop(f"{prefix}num_batches_tracked", None)  # a state dict of BatchNorm2d has it
        super()._load_from_state_dict(state_dict, prefix, *rest)

    def forward(self, x: Tensor) -> Tensor:
        scale = self.weight / ag.sqrt(self.running_var + self.eps)
        shape = (1, -1, 1, 1)
        return x * scale.reshape(shape) + (self.bias - self.running_mean * scale).reshape(shape)
