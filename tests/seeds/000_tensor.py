import netcl as nc
from netcl.core.tensor import Tensor
# Allocate a 4 x 1024 fp32 tensor on the active OpenCL device.
ctx, queue = nc.device.manager.default()
t = Tensor.zeros((4, 1024), dtype="float32", context=ctx, queue=queue)
print(t.shape) # (4, 1024)
print(t.requires_grad) # False
# Mark it as a learnable parameter.
t.requires_grad = True
# Move data to the device and back.
t.from_host(numpy_array) # blocking or non-blocking depending on flags
host = t.to_host() # numpy.ndarray on the host
# Free the underlying buffer (normally done by GC).
del t
