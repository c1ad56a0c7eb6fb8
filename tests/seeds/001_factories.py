from netcl.core.tensor import Tensor
from netcl.core.device import manager
q = manager.default("auto").queue
a = Tensor.from_host(q, host_ndarray) # copy host -> device
b = Tensor.from_shape(q, (4, 8), dtype="float32") # zero-filled on device
