import pyopencl as cl

# Context + queue — netcl's DeviceManager wraps this.
ctx = cl.create_some_context()
queue = cl.CommandQueue(ctx)

# Build a kernel.
src = """
    __kernel void relu(__global const float* in, __global float* out) {
        int gid = get_global_id(0);
        out[gid] = in[gid] > 0.0f ? in[gid] : 0.0f;
    }
"""
prg = cl.Program(ctx, src).build()
relu = prg.relu

# Allocate device buffers.
n = 1024
in_buf  = cl.Buffer(ctx, cl.mem_flags.READ_WRITE, n * 4)
out_buf = cl.Buffer(ctx, cl.mem_flags.READ_WRITE, n * 4)

# Copy input.
import numpy as np
host_in = np.random.randn(n).astype(np.float32)
cl.enqueue_copy(queue, in_buf, host_in)

# Launch.
relu(queue, (n,), None, in_buf, out_buf)

# Copy back.
host_out = np.empty(n, dtype=np.float32)
cl.enqueue_copy(queue, host_out, out_buf).wait()
