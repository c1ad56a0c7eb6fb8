import netcl as nc

spec = nc.KernelSpec(
    name="scale_by_two",
    src="__kernel void scale_by_two(__global float* x) {"
        "  int gid = get_global_id(0);"
        "  x[gid] *= 2.0f;"
        "}",
)
prg = spec.build(queue)
prg.run(queue, (n,), None, x)
