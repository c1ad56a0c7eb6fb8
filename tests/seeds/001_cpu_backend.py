from netcl.core.backend.cpu import CPUBackend
be = CPUBackend()
x = be.from_host(host_arr, dtype="float32")
y = be.from_shape((4, 8), dtype="float32") # zeros
print(be.to_host(x, (4, 8), "float32")) # same ndarray
