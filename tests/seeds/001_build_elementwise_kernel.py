from netcl.core.kernels.primitives import build_elementwise_kernel
spec, kernel = build_elementwise_kernel(
    context, name="mul_add", arity=2,
    expression="MUL(ADD(v0, v1), 2.0f)",
    dtype="float",
)
