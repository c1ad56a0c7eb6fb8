from netcl.core.kernels.primitives import KernelSpec, PRIMITIVE_PREAMBLE
src = KernelSpec(
    name="vec_add",
    params=[
        "__global const float* a",
        "__global const float* b",
        "__global float* c",
    ],
    preamble=PRIMITIVE_PREAMBLE,
    body="int gid = get_global_id(0); c[gid] = a[gid] + b[gid];",
).to_source()
