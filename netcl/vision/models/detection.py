"""``torchvision.models.detection``: SSD300 on VGG16 (Liu et al. 2016)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

import netcl.autograd as ag
from netcl import nn
from netcl.core.errors import ShapeError, message
from netcl.core.tensor import Tensor
from netcl.nn import init
from netcl.nn.parameter import empty
from netcl.vision.models.blocks import architecture, draw
from netcl.vision.models.classic import make_layers
from netcl.vision.ops import box_convert, box_iou, clip_boxes_to_image, kept_boxes

_SIDE = 300
_IMAGE_MEAN = (0.48235, 0.45882, 0.40784)
_CODE = np.array([10.0, 10.0, 5.0, 5.0], np.float32)  # weights of the numbers that describe a box relative to its default box
_RATIOS = ((2,), (2, 3), (2, 3), (2, 3), (2,), (2,))
_SCALES, _BOX_STEPS, _WIDTHS = (0.07, 0.15, 0.33, 0.51, 0.69, 0.87, 1.05), (8, 16, 32, 64, 100, 300), (512, 1024, 512, 256, 256, 256)


class VGGPyramid(nn.Module):
    """The backbone of SSD: six feature maps, from VGG16's fourth stage, the convolutions after it, and four more blocks."""

    def __init__(self) -> None:
        super().__init__()
        stages = list(make_layers([64, 64, "M", 128, 128, "M", 256, 256, 256, "C", 512, 512, 512, "M", 512, 512, 512]))
        fc = [nn.MaxPool2d(3, 1, 1), nn.Conv2d(512, 1024, 3, padding=6, dilation=6), nn.ReLU(), nn.Conv2d(1024, 1024, 1), nn.ReLU()]
        rows = ((1024, 256, 512, 2), (512, 128, 256, 2), (256, 128, 256, 1), (256, 128, 256, 1))
        later = [nn.Sequential(nn.Conv2d(a, b, 1), nn.ReLU(), nn.Conv2d(b, c, 3, s, s - 1), nn.ReLU()) for a, b, c, s in rows]
        self.features, self.scale_weight = nn.Sequential(*stages[:23]), init.constant_(empty((512,)), 20.0)
        self.extra = nn.ModuleList([nn.Sequential(*stages[23:], nn.Sequential(*fc)), *later])

    def forward(self, x: Tensor) -> list[Tensor]:
        x = self.features(x)
        length = ag.maximum(ag.sqrt(ag.sum(ag.mul(x, x), axis=1, keepdims=True)), 1e-12)
        found = [ag.mul(ag.reshape(self.scale_weight, (1, -1, 1, 1)), ag.div(x, length))]
        for block in self.extra:
            x = block(x)
            found.append(x)
        return found


def default_boxes(sizes: Sequence[Sequence[int]]) -> np.ndarray:
    """Return the default boxes ``(center x, center y, width, height)`` of feature maps of these sizes, in pixels of the input."""
    found = []
    for k, (rows, columns) in enumerate(sizes):
        sides = [(_SCALES[k], 1.0), (math.sqrt(_SCALES[k] * _SCALES[k + 1]), 1.0)]
        sides += [(_SCALES[k], root) for ratio in _RATIOS[k] for root in (math.sqrt(ratio), 1 / math.sqrt(ratio))]
        shapes = np.clip([(side * root, side / root) for side, root in sides], 0, 1) * _SIDE
        y, x = np.meshgrid((np.arange(rows) + 0.5) * _BOX_STEPS[k], (np.arange(columns) + 0.5) * _BOX_STEPS[k], indexing="ij")
        centers = np.repeat(np.stack([x, y], -1).reshape(-1, 2), len(shapes), 0)
        found.append(np.concatenate([centers, np.tile(shapes, (rows * columns, 1))], 1))
    return np.concatenate(found).astype(np.float32)


class SSD(nn.Module):
    """Single shot multibox detector for 300 x 300 pixels. Images of other sizes are resized; boxes are in pixels of the original image.

    In evaluation, ``model(images)`` returns a list with a dictionary per image: ``boxes`` (x1, y1, x2, y2), ``scores`` and ``labels``.
    In training, ``model(images, targets)`` returns the losses ``bbox_regression`` and ``classification``. ``images`` is a batch or a
    list of images ``(3, H, W)`` with values from 0 to 1; ``targets`` a list of dictionaries of ``boxes`` and ``labels``. Class 0 is
    the background.
    """

    def __init__(self, num_classes: int = 91, score_thresh: float = 0.01, nms_thresh: float = 0.45, detections_per_img: int = 200,
                 iou_thresh: float = 0.5, topk_candidates: int = 400, positive_fraction: float = 0.25):  # fmt: skip
        super().__init__()
        self.num_classes, self.score_thresh, self.nms_thresh = num_classes, score_thresh, nms_thresh
        self.detections_per_img, self.topk_candidates, self.iou_thresh = detections_per_img, topk_candidates, iou_thresh
        self.negatives = (1 - positive_fraction) / positive_fraction
        self.backbone, self.head = VGGPyramid(), nn.ModuleDict()
        for name, columns in (("classification_head", num_classes), ("regression_head", 4)):
            counts = [(2 + 2 * len(ratios)) * columns for ratios in _RATIOS]
            convs = [nn.Conv2d(width, count, 3, padding=1) for width, count in zip(_WIDTHS, counts, strict=True)]
            self.head[name] = nn.ModuleDict({"module_list": nn.ModuleList(convs)})
        draw(self.head, "xavier_uniform")

    def forward(self, images: Any, targets: Sequence[Mapping[str, Any]] | None = None) -> Any:
        listed = list(images)
        if not listed or any(image.ndim != 3 for image in listed):
            what = "there must be at least one image, each of shape (channels, height, width)"
            raise ShapeError(message("SSD", what, shapes=[x.shape for x in listed]))
        if self.training and targets is None:
            raise ValueError(message("SSD", "targets are required in training", "call model(images, targets), or model.eval() first"))
        mean = Tensor.from_host(listed[0].queue, np.reshape(_IMAGE_MEAN, (3, 1, 1)), listed[0].dtype)
        scaled = (ag.unsqueeze(ag.mul(ag.sub(image, mean), 255.0), 0) for image in listed)
        maps = self.backbone(ag.cat([ag.interpolate(x, size=(_SIDE, _SIDE), mode="bilinear", align_corners=False) for x in scaled]))
        logits, offsets = (self._columns(name, maps) for name in ("classification_head", "regression_head"))
        around, sizes = default_boxes([x.shape[2:] for x in maps]), [image.shape[1:] for image in listed]
        if targets is not None and self.training:
            return self._losses(logits, offsets, around, sizes, targets)
        (center, size), code = ag.split(Tensor.from_host(logits.queue, around), 2, axis=1), Tensor.from_host(logits.queue, _CODE)
        move, grow = ag.split(ag.div(offsets, code), 2, axis=-1)
        found = ag.cat([ag.add(ag.mul(move, size), center), ag.mul(ag.exp(ag.clamp(grow, max=math.log(1000 / 16))), size)], axis=-1)
        boxes = clip_boxes_to_image(box_convert(found, "cxcywh", "xyxy"), (_SIDE, _SIDE)).to_host()
        return [self._kept(*each, logits.queue) for each in zip(boxes, ag.softmax(logits, axis=-1).to_host(), sizes, strict=True)]

    def _columns(self, head: str, maps: Sequence[Tensor]) -> Tensor:
        """Return the outputs of ``head`` for every default box: class logits or box offsets."""
        made = [ag.permute(conv(x), (0, 2, 3, 1)) for conv, x in zip(self.head[head].module_list, maps, strict=True)]
        return ag.cat([ag.reshape(x, (x.shape[0], -1, 4 if head[0] == "r" else self.num_classes)) for x in made], axis=1)

    def _kept(self, boxes: np.ndarray, scores: np.ndarray, size: Any, queue: Any) -> dict[str, Tensor]:
        """Return the detections of an image: the best candidates of each class after non-maximum suppression, then the best of all."""
        rows = []
        for label in range(1, self.num_classes):
            over = np.flatnonzero(scores[:, label] > self.score_thresh)
            best = over[np.argsort(-scores[over, label], kind="stable")[: self.topk_candidates]]
            rows.append(best[kept_boxes(boxes[best], scores[best, label], self.nms_thresh)])
        row, label_of = np.concatenate(rows), np.repeat(np.arange(1, self.num_classes), [len(found) for found in rows])
        order = np.argsort(-scores[row, label_of], kind="stable")[: self.detections_per_img]
        row, label_of = row[order], label_of[order]
        back = np.array([size[1], size[0]] * 2, np.float32) / _SIDE
        made = {"boxes": boxes[row] * back, "scores": scores[row, label_of], "labels": label_of.astype(np.int64)}
        return {name: Tensor.from_host(queue, value) for name, value in made.items()}

    def _losses(self, logits: Tensor, offsets: Tensor, around: np.ndarray, sizes: Sequence[Any], targets: Any) -> dict[str, Tensor]:
        """Return the smooth L1 loss of the matched boxes in ``around``, and the cross entropy of matched boxes and the hardest others."""
        queue, made = logits.queue, []
        for (height, width), target in zip(sizes, targets, strict=True):
            boxes, labels = (np.asarray(x.to_host() if isinstance(x, Tensor) else x) for x in (target["boxes"], target["labels"]))
            if boxes.shape != (len(labels), 4) or not (boxes[:, 2:] > boxes[:, :2]).all():
                what = "boxes must have shape (N, 4) and positive sizes (x1 < x2, y1 < y2), with one label for each"
                raise ShapeError(message("SSD", what, boxes=boxes.shape, labels=labels.shape))
            made.append(self._matched(boxes * (_SIDE / np.array([width, height] * 2, np.float32)), labels, around))
        goal, label = (np.stack(values) for values in zip(*made, strict=True))
        taken = label > 0
        each = ag.cross_entropy(ag.reshape(logits, (-1, self.num_classes)), Tensor.from_host(queue, label.reshape(-1)), reduction="none")
        order = np.where(taken, np.inf, -each.to_host().reshape(label.shape))
        counted = taken | (order.argsort(1, kind="stable").argsort(1) < self.negatives * taken.sum(1, keepdims=True))
        wanted, mask, weight = (Tensor.from_host(queue, x.astype(np.float32)) for x in (goal, taken[..., None], counted.reshape(-1)))
        near = ag.smooth_l1_loss(offsets, wanted, reduction="none")
        totals = {"bbox_regression": ag.sum(ag.mul(near, mask)), "classification": ag.sum(ag.mul(each, weight))}
        return {name: ag.div(total, float(max(1, taken.sum()))) for name, total in totals.items()}

    def _matched(self, boxes: np.ndarray, labels: np.ndarray, around: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Match default boxes to targets; returns the offsets and labels of all default boxes; label 0 means no target.

        Each default box in ``around`` gets its best target if their IoU is at least ``iou_thresh``; each target gets its best default box.
        """
        if not len(boxes):
            return np.zeros_like(around), np.zeros(len(around), np.int64)
        corners = box_convert(Tensor.from_host(around), "cxcywh", "xyxy")
        overlap = box_iou(Tensor.from_host(boxes.astype(np.float32)), corners).to_host()
        match = np.where(overlap.max(0) >= self.iou_thresh, overlap.argmax(0), -1)
        match[overlap.argmax(1)] = np.arange(len(boxes))
        size = boxes[match, 2:] - boxes[match, :2]
        center = (boxes[match, :2] + size / 2 - around[:, :2]) / around[:, 2:]
        goal = np.concatenate([center, np.log(np.maximum(size / around[:, 2:], 1e-12))], 1) * _CODE
        return goal, np.where(match < 0, 0, labels[match]).astype(np.int64)


ssd300_vgg16 = architecture("ssd300_vgg16", lambda num_classes=None, **options: SSD(num_classes or 91, **options))
