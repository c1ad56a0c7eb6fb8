"""Calls on images that torch has been asked for: op, shapes and options. Inputs come from the seed, answers from the .npz files."""

from __future__ import annotations

import zlib
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np


class Case(NamedTuple):
    """One call of an op; ``low`` and ``high`` bound its inputs."""

    op: str
    shapes: tuple[Any, ...]
    options: dict[str, Any]
    high: float = 1.0

    @property
    def key(self) -> str:
        return f"{self.op} {self.shapes} {self.options}"

    def inputs(self) -> list[np.ndarray | None]:
        rng = np.random.default_rng(zlib.crc32(self.key.encode()))
        return [None if s is None else rng.uniform(-self.high, self.high, s).astype(np.float32) for s in self.shapes]

    def gradient(self, shape: tuple[int, ...]) -> np.ndarray:
        """The gradient of the result that is sent back."""
        return np.random.default_rng(zlib.crc32(self.key.encode()) + 1).uniform(-1, 1, shape).astype(np.float32)


def case(op: str, *shapes: Any, high: float = 1.0, **options: Any) -> Case:
    return Case(op, shapes, options, high)


CONV = [
    case("conv2d", (2, 3, 9, 8), (5, 3, 3, 3), (5,)),
    case("conv2d", (2, 3, 9, 8), (5, 3, 3, 3), (5,), stride=2, padding=1),
    case("conv2d", (1, 4, 13, 11), (6, 4, 5, 3), None, stride=(2, 3), padding=(2, 0)),
    case("conv2d", (1, 4, 12, 12), (6, 4, 3, 3), (6,), dilation=2, padding=2),
    case("conv2d", (2, 6, 7, 7), (8, 3, 3, 3), (8,), groups=2, padding=1),
    case("conv2d", (2, 6, 9, 9), (6, 1, 3, 3), (6,), groups=6, padding=1, stride=2),
    case("conv2d", (1, 4, 8, 8), (8, 1, 3, 2), None, groups=4, padding="same"),
    case("conv2d", (2, 16, 6, 6), (20, 16, 1, 1), (20,)),
    case("conv2d", (1, 3, 20, 20), (8, 3, 7, 7), (8,), stride=2, padding=3),
    case("conv2d", (1, 70, 5, 5), (9, 70, 3, 3), None, padding=1),
    case("conv1d", (2, 4, 21), (6, 4, 5), (6,), stride=2, padding=2),
    case("conv1d", (1, 4, 30), (4, 2, 3), None, groups=2, dilation=3),
    case("conv1d", (2, 5, 17), (5, 1, 4), (5,), groups=5, padding="same"),
    case("conv_transpose2d", (2, 4, 5, 6), (4, 3, 3, 3), (3,), stride=2, padding=1, output_padding=1),
    case("conv_transpose2d", (1, 6, 4, 4), (6, 2, 4, 3), (4,), stride=(2, 1), groups=2),
    case("conv_transpose2d", (1, 4, 6, 5), (4, 5, 3, 3), None, dilation=2, padding=1),
    case("conv_transpose1d", (2, 4, 9), (4, 3, 4), (3,), stride=2, padding=1),
]

POOL = [
    case("max_pool2d", (2, 3, 9, 10), kernel_size=2),
    case("max_pool2d", (2, 3, 9, 10), kernel_size=3, stride=2, padding=1),
    case("max_pool2d", (1, 2, 11, 12), kernel_size=(2, 3), stride=(1, 2), dilation=2),
    case("max_pool2d", (1, 2, 8, 9), kernel_size=3, stride=2, padding=1, ceil_mode=True),
    case("max_pool1d", (2, 3, 15), kernel_size=3, stride=2, padding=1),
    case("avg_pool2d", (2, 3, 9, 10), kernel_size=2),
    case("avg_pool2d", (2, 3, 9, 10), kernel_size=3, stride=2, padding=1),
    case("avg_pool2d", (1, 2, 9, 8), kernel_size=3, stride=2, padding=1, count_include_pad=False),
    case("avg_pool2d", (1, 2, 8, 11), kernel_size=(2, 4), stride=3, padding=1, ceil_mode=True),
    case("avg_pool2d", (1, 2, 8, 11), kernel_size=(2, 4), stride=3, padding=1, ceil_mode=True, count_include_pad=False),
    case("avg_pool1d", (2, 3, 15), kernel_size=4, stride=3, padding=2),
    case("adaptive_avg_pool2d", (2, 3, 9, 10), output_size=(3, 4)),
    case("adaptive_avg_pool2d", (1, 2, 4, 5), output_size=7),
    case("adaptive_avg_pool1d", (2, 3, 11), output_size=4),
    case("adaptive_max_pool2d", (2, 3, 9, 10), output_size=(4, 3)),
]

RESAMPLE = [
    case("interpolate", (2, 3, 4, 5), scale_factor=2),
    case("interpolate", (1, 2, 7, 6), size=(5, 11)),
    case("interpolate", (1, 2, 7, 6), scale_factor=1.7),
    case("interpolate", (2, 3, 9), scale_factor=3),
    case("interpolate", (2, 3, 4, 5), scale_factor=2, mode="bilinear"),
    case("interpolate", (1, 2, 7, 6), size=(3, 13), mode="bilinear"),
    case("interpolate", (1, 2, 7, 6), size=(3, 13), mode="bilinear", align_corners=True),
    case("interpolate", (1, 2, 7, 6), scale_factor=(1.7, 0.6), mode="bilinear"),
    case("interpolate", (2, 3, 9), size=14, mode="linear", align_corners=True),
    *(
        case("grid_sample", (2, 3, 5, 6), (2, 4, 5, 2), high=1.3, mode=mode, padding_mode=pad, align_corners=align)
        for mode in ("bilinear", "nearest") for pad in ("zeros", "border") for align in (False, True)
    ),
    case("pixel_shuffle", (2, 8, 3, 4), factor=2),
    case("pixel_unshuffle", (1, 2, 6, 9), factor=3),
    case("im2col", (2, 3, 7, 8), kernel=(3, 2), stride=2, padding=1),
    case("im2col", (1, 2, 9, 9), kernel=(3, 3), dilation=2),
    case("col2im", (2, 12, 16), size=(6, 5), kernel=(3, 2)),
    case("col2im", (2, 18, 16), size=(7, 7), kernel=(3, 3), stride=2, padding=1),
]  # fmt: skip
FILES = {"conv": CONV, "pool": POOL, "resample": RESAMPLE}


def check(name: str, k: int, queue: Any) -> None:
    """Our result and gradients of the k-th call of a file against torch's: 1e-5 of the largest value, in float32."""
    import netcl.autograd as ag
    from netcl.core.tensor import Tensor

    chosen = FILES[name][k]
    with np.load(Path(__file__).parent / f"{name}.npz") as stored:
        want = [stored[f"{k}_{i}"] for i in range(sum(key.startswith(f"{k}_") for key in stored.files))]
    inputs = [None if x is None else Tensor.from_host(queue, x, requires_grad=True) for x in chosen.inputs()]
    y = getattr(ag, chosen.op)(*inputs, **chosen.options)
    gradient = Tensor.from_host(queue, chosen.gradient(y.shape))
    y.backward(gradient)
    got = [y, *(x.grad for x in inputs if x is not None)]
    for label, ours, theirs in zip(("result", "gradient 0", "gradient 1", "gradient 2"), got, want, strict=False):
        assert ours.shape == theirs.shape
        error = np.abs(ours.to_host() - theirs).max() / max(np.abs(theirs).max(), 1e-30)
        assert error <= 1e-5, f"{label} of {chosen.key}: {error}"
