"""The foundation: devices, tensors, memory, kernels. Nothing here imports from the layers above."""

from netcl.core.device import DeviceHandle, DeviceManager, manager
from netcl.core.memory import BufferHandle, BufferPool
from netcl.core.tensor import Tensor

__all__ = ["BufferHandle", "BufferPool", "DeviceHandle", "DeviceManager", "Tensor", "manager"]
