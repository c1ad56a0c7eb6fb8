"""Normalization layers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import netcl.autograd as ag
from netcl.core import recording
from netcl.core.errors import ShapeError, message
from netcl.core.tensor import Tensor
from netcl.core.writes import writes_of
from netcl.nn import init
from netcl.nn.module import Module
from netcl.nn.parameter import empty, full
from netcl.nn.pickling import Recomputed

#: Machine epsilons of the compute types, which ``RMSNorm(eps=None)`` uses, as in torch.
EPSILON = {"float16": 2.0**-23, "bfloat16": 2.0**-23, "float32": 2.0**-23, "float64": 2.0**-52}
_FLOPS_PER_ELEMENT = 8  # two passes for the statistics, then subtract, scale, scale and shift


class _Norm(Module):
    """Base class of norms: the optional ``weight`` and ``bias`` after the normalization."""

    def _affine(self, shape: Sequence[int], weight: bool, bias: bool) -> None:
        self.weight = empty(shape) if weight else None
        self.bias = empty(shape) if bias else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Set weights to ones and biases to zeros."""
        if self.weight is not None:
            init.ones_(self.weight)
        if self.bias is not None:
            init.zeros_(self.bias)

    def flops(self, args: tuple[Any, ...], output: Any) -> int:
        return _FLOPS_PER_ELEMENT * output.size


class _Running(_Norm):
    """Base class of norms with running statistics per channel, for evaluation. Batches are counted on the host."""

    ranks: tuple[int, ...] = ()
    running_mean: Tensor | None
    running_var: Tensor | None
    _counted: Tensor

    def __init__(self, num_features: int, eps: float = 1e-5, momentum: float | None = 0.1, affine: bool = True,
                 track_running_stats: bool = True, *, bias: bool = True):  # fmt: skip
        super().__init__()
        self.num_features, self.eps, self.momentum = num_features, eps, momentum
        self.affine, self.track_running_stats = affine, track_running_stats
        self._affine((num_features,), affine, affine and bias)
        self.register_buffer("running_mean", full((num_features,), 0.0) if track_running_stats else None)
        self.register_buffer("running_var", full((num_features,), 1.0) if track_running_stats else None)
        self._handed_out = Recomputed()  # the write record of the counter that a caller may write, and its last write
        if track_running_stats:
            self._counted = full((), 0, "int64")
            self._set_count(0)
        self._batches, self._shown = 0, 0

    @property
    def num_batches_tracked(self) -> Tensor | None:
        """The number of batches in the running statistics, as a tensor; ``None`` without running statistics."""
        if not hasattr(self, "_counted"):  # it is there also if track_running_stats was turned off later
            return None
        self._take_written()
        if self._shown != self._batches:
            self._counted.fill_(self._batches)
            self._shown = self._batches
        written = writes_of(self._counted)
        self._handed_out.update(record=written, last=written.last)
        return self._counted

    @num_batches_tracked.setter
    def num_batches_tracked(self, value: Tensor | int) -> None:
        counted = self.num_batches_tracked
        if counted is not None:
            self._set_count(int(counted.item() if value is None else value))
        if counted is None or value is None:
            what = "num_batches_tracked must be a count, of a layer with running statistics"
            raise TypeError(message(type(self).__name__, what, given=type(value).__name__, track_running_stats=self.track_running_stats))

    def _set_count(self, batches: int) -> None:
        self._roles["num_batches_tracked"] = "buffer"
        self._batches, self._shown = batches, -1
        self._handed_out.clear()

    def _take_written(self) -> None:
        """Adopt the value of ``num_batches_tracked`` if it was written since it was returned."""
        written = writes_of(self._counted)
        if self._handed_out and (self._handed_out["record"] is not written or self._handed_out["last"] != written.last):
            self.__dict__["_batches"] = self.__dict__["_shown"] = int(self._counted.item())
            self._handed_out.update(record=written, last=written.last)

    def reset_running_stats(self) -> None:
        """Reset the running statistics to mean 0 and variance 1."""
        if self.running_mean is not None and self.running_var is not None:
            init.zeros_(self.running_mean)
            init.ones_(self.running_var)
            self._set_count(0)

    def _after_loading(self) -> None:
        if hasattr(self, "_counted"):
            self._set_count(int(self._counted.item()))

    def _count(self) -> float:
        """Count a batch; returns its weight in the running statistics."""
        if self._handed_out:
            self._take_written()
        self.__dict__["_batches"] = batches = self._batches + 1  # not by __setattr__: every replay counts
        return 1.0 / batches if self.momentum is None else self.momentum

    def _check(self, x: Tensor) -> None:
        if x.ndim not in self.ranks or x.shape[1] != self.num_features:
            what = f"x must have {' or '.join(f'{rank}' for rank in self.ranks)} dimensions with {self.num_features} channels in dim 1"
            raise ShapeError(message(type(self).__name__, what, shape=x.shape))


class _BatchNorm(_Running):
    def forward(self, x: Tensor) -> Tensor:
        self._check(x)
        training = self.training or self.running_mean is None
        momentum = recording.again(self._count) if self.training and self.track_running_stats else 0.0
        return ag.batch_norm(
            x, self.running_mean, self.running_var, self.weight, self.bias, training=training, momentum=momentum, eps=self.eps
        )


class BatchNorm1d(_BatchNorm):
    """Batch norm of vectors or signals: ``y = (x - mean) / sqrt(var + eps) * weight + bias``, per channel.

    Training uses the batch's mean and variance and updates running averages: ``running = (1 - momentum) running + momentum batch``.
    Evaluation uses the running statistics, or the batch's with ``track_running_stats=False``.

    - **num_features**: the number of channels.
    - **eps**, **momentum** (``None``: a plain average over all batches), **affine**, **track_running_stats**, **bias**: as in torch.

    Shapes: ``(N, C)`` or ``(N, C, L)``.

    >>> from netcl import nn
    >>> nn.BatchNorm1d(1, eps=0.0)([[1.0], [3.0]]).tolist()
    [[-1.0], [1.0]]
    """

    ranks = (2, 3)


def _of_rank(name: str, base: type[_Running], like: str, of: str) -> Any:
    """Return a subclass of ``base``, documented as ``{like} for {of}``. A ``name`` that ends with ``2d`` takes tensors with 4 axes."""
    axes = int(name[-2])
    shape = (2, 3, 2, 4, 4)[: axes + 2]
    doc = f""":class:`{like}` for {of}.

    >>> from netcl import nn, ones
    >>> nn.{name}(3)(ones({shape})).shape
    {shape}
    """
    return type(Module)(name, (base,), {"ranks": (axes + 2,), "__doc__": doc, "__module__": __name__})  # type: ignore[misc]


BatchNorm2d = _of_rank("BatchNorm2d", _BatchNorm, "BatchNorm1d", "images ``(N, C, H, W)``")
BatchNorm3d = _of_rank("BatchNorm3d", _BatchNorm, "BatchNorm1d", "volumes ``(N, C, D, H, W)``")


class InstanceNorm2d(_Running):
    """Normalizes each channel of each image separately: ``y = (x - mean) / sqrt(var + eps) * weight + bias``.

    - **num_features**: the number of channels.
    - **eps**, **momentum** (``None``: running statistics stay), **affine**, **track_running_stats** (both off): as in torch.

    Shapes: ``(N, C, H, W)``.

    >>> from netcl import nn, ones
    >>> nn.InstanceNorm2d(3)(ones((2, 3, 4, 4))).shape
    (2, 3, 4, 4)
    """

    ranks = (4,)

    def __init__(self, num_features: int, eps: float = 1e-5, momentum: float | None = 0.1, affine: bool = False,
                 track_running_stats: bool = False, *, bias: bool = True):  # fmt: skip
        super().__init__(num_features, eps, momentum, affine, track_running_stats, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        if x.ndim == self.ranks[0] - 1:  # one sample without the batch dimension
            return ag.squeeze(self.forward(ag.unsqueeze(x, 0)), 0)
        self._check(x)
        if not self.training and self.running_mean is not None:
            return ag.batch_norm(x, self.running_mean, self.running_var, self.weight, self.bias, eps=self.eps)
        if self.running_mean is not None:
            self._update(x, self.momentum or 0.0)  # batches are not counted, as in torch
        return ag.instance_norm(x, self.weight, self.bias, eps=self.eps)

    def _update(self, x: Tensor, momentum: float) -> None:
        with ag.no_grad():
            axes = tuple(range(2, x.ndim))
            means, variances = ag.mean(x, axis=axes), ag.var(x, axis=axes)
            for running, new in ((self.running_mean, means), (self.running_var, variances)):
                assert running is not None
                ag.lerp(running, ag.mean(new, axis=0).to(running.dtype), momentum, out=running)  # in place: recorded launches look here


InstanceNorm1d = _of_rank("InstanceNorm1d", InstanceNorm2d, "InstanceNorm2d", "signals ``(N, C, L)``")
InstanceNorm3d = _of_rank("InstanceNorm3d", InstanceNorm2d, "InstanceNorm2d", "volumes ``(N, C, D, H, W)``")


class LayerNorm(_Norm):
    """Normalizes over the last axes: ``y = (x - mean) / sqrt(var + eps) * weight + bias``, statistics per row.

    - **normalized_shape**: the sizes of the normalized axes, or the size of the last axis.
    - **eps**: keeps the division finite.
    - **elementwise_affine**, **bias**: whether there are ``weight`` and ``bias`` (of ``normalized_shape``).

    Shapes: ``(..., *normalized_shape)`` in and out.

    >>> from netcl import nn
    >>> nn.LayerNorm(2, eps=0.0)([[1.0, 3.0]]).tolist()
    [[-1.0, 1.0]]
    """

    def __init__(self, normalized_shape: int | Sequence[int], eps: float = 1e-5, elementwise_affine: bool = True, bias: bool = True):
        super().__init__()
        self.normalized_shape = (normalized_shape,) if isinstance(normalized_shape, int) else tuple(normalized_shape)
        self.eps = eps
        self._affine(self.normalized_shape, elementwise_affine, elementwise_affine and bias)

    def forward(self, x: Tensor) -> Tensor:
        return ag.layer_norm(x, self.normalized_shape, self.weight, self.bias, eps=self.eps)


class RMSNorm(_Norm):
    """Divides by the root of the mean square over the last axes: ``y = x / sqrt(mean(x^2) + eps) * weight``.

    - **normalized_shape**: the sizes of the normalized axes, or the size of the last axis.
    - **eps**: keeps the division finite; ``None`` is the machine epsilon of the compute dtype (float32 for half dtypes).
    - **elementwise_affine**: whether there is a ``weight``.

    Shapes: ``(..., *normalized_shape)`` in and out.

    >>> from netcl import nn
    >>> nn.RMSNorm(2, eps=0.0)([[2.0, 2.0]]).tolist()
    [[1.0, 1.0]]
    """

    def __init__(self, normalized_shape: int | Sequence[int], eps: float | None = None, elementwise_affine: bool = True):
        super().__init__()
        self.normalized_shape = (normalized_shape,) if isinstance(normalized_shape, int) else tuple(normalized_shape)
        self.eps = eps
        self._affine(self.normalized_shape, elementwise_affine, False)

    def forward(self, x: Tensor) -> Tensor:
        eps = EPSILON[x.dtype] if self.eps is None else self.eps
        return ag.rms_norm(x, self.normalized_shape, self.weight, eps=eps)


class GroupNorm(_Norm):
    """Normalizes groups of channels of each image separately: ``y = (x - mean) / sqrt(var + eps) * weight + bias``.

    - **num_groups**: how many groups the channels are divided into.
    - **num_channels**: the number of channels.
    - **eps**: keeps the division finite.
    - **affine**: whether there are ``weight`` and (unless **bias** is off) ``bias``, one per channel.

    Shapes: ``(N, C, ...)`` in and out.

    >>> from netcl import nn, ones
    >>> nn.GroupNorm(2, 6)(ones((2, 6, 4))).shape
    (2, 6, 4)
    """

    def __init__(self, num_groups: int, num_channels: int, eps: float = 1e-5, affine: bool = True, *, bias: bool = True):
        super().__init__()
        if num_groups < 1 or num_channels % num_groups:
            what = "num_groups must be at least 1 and divide num_channels"
            raise ShapeError(message("GroupNorm", what, num_groups=num_groups, num_channels=num_channels))
        self.num_groups, self.num_channels, self.eps = num_groups, num_channels, eps
        self._affine((num_channels,), affine, affine and bias)

    def forward(self, x: Tensor) -> Tensor:
        return ag.group_norm(x, self.num_groups, self.weight, self.bias, eps=self.eps)
