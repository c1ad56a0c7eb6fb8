"""LeNet-5 (LeCun et al. 1998), a convolutional network for digits, with ReLU and max pooling."""

from __future__ import annotations

import netcl.autograd as ag
from netcl.core.errors import ShapeError, message
from netcl.core.tensor import Tensor
from netcl.nn.activation import ReLU
from netcl.nn.conv import Conv2d
from netcl.nn.linear import Linear
from netcl.nn.module import Module
from netcl.nn.pool import MaxPool2d


class LeNet(Module):
    """Two convolutions with pooling, then three linear layers.

    - **num_classes**: width of the output.
    - **in_channels**, **image_size**: channels and side length of the images; by default 1 and 28, as in MNIST.

    Shapes: ``(N, in_channels, image_size, image_size)`` becomes ``(N, num_classes)``. Parameters: ``conv1``, ``conv2``, ``fc1``, ``fc2``,
    ``fc3``.

    >>> from netcl import nn, zeros
    >>> nn.LeNet()(zeros((2, 1, 28, 28))).shape
    (2, 10)
    """

    def __init__(self, num_classes: int = 10, in_channels: int = 1, image_size: int = 28):
        super().__init__()
        side = (image_size // 2 - 4) // 2
        if side < 1:
            raise ShapeError(message("LeNet", "images must be at least 12 x 12", "use a larger image_size", image_size=image_size))
        self.conv1 = Conv2d(in_channels, 6, 5, padding=2)
        self.conv2 = Conv2d(6, 16, 5)
        self.pool, self.relu = MaxPool2d(2), ReLU()
        self.fc1 = Linear(16 * side * side, 120)
        self.fc2 = Linear(120, 84)
        self.fc3 = Linear(84, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.pool(self.relu(self.conv1(x)))
        x = self.pool(self.relu(self.conv2(x)))
        x = self.relu(self.fc1(ag.flatten(x, 1)))
        return self.fc3(self.relu(self.fc2(x)))
