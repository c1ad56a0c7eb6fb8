"""Every op's kernels under Oclgrind, on small shapes: no access out of bounds, no race.

Oclgrind's check of uninitialised values is left out here: version 21.10 does not see that the host fills a buffer, or copies into one that
was used before, and of optimised code it does not know every instruction (``freeze`` ends a launch, row norms crash it).
``@netcl.kernel(check=True)`` keeps it on for single launches, without optimisation.
"""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from netcl import ops, selftest
from netcl.autograd import sanitizer
from netcl.engine.registry import REGISTRY, Choice

PARTS = 2
NAMES = sorted(name for name, row in REGISTRY.items() if not isinstance(row, Choice) and row.ref is not None)
assert ops.names() and selftest.TESTED_SIZES

SCRIPT = """
import sys
from netcl import ops, selftest
from netcl.core.device import manager
from netcl.engine.registry import REGISTRY
handle, number = manager.default("oclgrind"), int(sys.argv[1])
for name in sys.argv[2:]:
    row = REGISTRY[name]
    small = [case for case in selftest.cases(row, "float32", (1, 37)) if sum(getattr(x, "size", 1) for x in case.inputs) <= 400]
    for case in small[:number]:
        selftest.check_forward(row, case, handle)
    if row.differentiable and small:
        selftest.check_gradient(row, small[-1 if len(small) < 3 else 2], handle)
    handle.queue.finish()
    print(name, flush=True)
"""


FUSED = """
import numpy as np
import netcl.autograd as ag
from netcl.core.device import manager
from netcl.core.kernels import program
from netcl.engine import rows
queue = manager.default("oclgrind").queue
for spread in (rows.Spread(1, 1, 16, 2), rows.Spread(8, 8, 1, 1), rows.Spread(4, 1, 1, 1)):
    rows.row_spread = lambda *rest, spread=spread: spread
    program.forget("row plans")
    x, w, b = (ag.tensor(np.linspace(-2, 2, n, dtype=np.float32).reshape(s), requires_grad=True, queue=queue)
               for n, s in ((57, (3, 19)), (19, (19,)), (19, (19,))))
    function = ag.jit_compile(lambda x: ag.softmax(ag.layer_norm(ag.gelu(x.to("float16")).to("float32"), 19, w, b)))
    ag.sum(function(x) * x).backward()
    queue.finish()
    print(spread.group, x.grad.shape, flush=True)
"""


CONVOLUTION = """
import ast
import sys
import numpy as np
from netcl.core.device import manager
from netcl.core.kernel_selector import KernelConfig, KernelVariant
from netcl.core.tensor import Tensor
from netcl.ops.conv import arrays, plans
from netcl.ops.conv.geometry import geometry
from netcl.ops.matmul import gemm
queue, multiply = manager.default("oclgrind").queue, gemm.multiply
gemm.multiply = lambda queue, product, t, config=None: multiply(queue, product, t, KernelConfig(KernelVariant.MATMUL_NAIVE))
for name, (extra, kinds, shapes) in ast.literal_eval(sys.argv[1]).items():
    variant = KernelVariant(extra.pop("variant", "conv2d_implicit_gemm" if "form" in extra else "conv2d_winograd"))
    config = KernelConfig(variant, extra={"winograd_channels": 1, **extra})
    for x_shape, w_shape, padding, *rest in shapes:
        stride, dilation, groups = rest or (1, 1, 1)
        g = geometry("conv2d", x_shape, w_shape, stride, padding, dilation, groups)
        x, w, y = (np.linspace(-2, 2, np.prod(shape), dtype=np.float32).reshape(shape) for shape in (g.x_shape, g.w_shape, g.y_shape))
        for kind in kinds:
            first, second = {plans.FORWARD: (x, w), plans.INPUT_GRAD: (y, w)}.get(kind, (x, y))
            want = {plans.FORWARD: lambda: arrays.conv_forward(x, w, None, g=g),
                    plans.INPUT_GRAD: lambda: arrays.input_grad(y, w, None, g=g),
                    plans.WEIGHT_GRAD: lambda: arrays.weight_grad(y, x, g=g)}[kind]()
            first, second, got = Tensor.from_host(queue, first), Tensor.from_host(queue, second), Tensor.empty(want.shape, queue=queue)
            plans.run(plans.Convolution(kind, g, "float32"), queue, first, second, got, config)
            print(name, kind, np.allclose(got.to_host(), want, rtol=0, atol=2e-6 * np.abs(want).max()), flush=True)
"""


ATTENTION = """
import sys
import numpy as np
from netcl import ops
from netcl.core.device import manager
from netcl.core.tensor import Tensor
from netcl.engine.launch import numpy_reference
module = sys.modules["netcl.ops.attention"]
queue = manager.default("oclgrind").queue
config = module.simt_config(16 * 1024, 64, False, 32)
module.choose_kernel = lambda q, k, p: config._replace(defines={**config.defines, "APART": 1})
rng = np.random.default_rng(0)
for depth, mask in ((4, rng.random((20, 40)) < 0.7), (6, None))[: int(sys.argv[1])]:
    q, k, v, g = (rng.standard_normal(s).astype(np.float32) for s in ((2, 20, depth), (1, 40, depth), (1, 40, depth), (2, 20, depth)))
    given = [None if x is None else Tensor.from_host(queue, x) for x in (q, k, v, mask)]
    got = ops.attention(*given, causal=mask is None)
    got += ops.attention_grad(Tensor.from_host(queue, g), *given, *got, causal=mask is None)
    want = numpy_reference("attention", q, k, v, mask, causal=mask is None)
    want += numpy_reference("attention_grad", g, q, k, v, mask, *want, causal=mask is None)
    print(*(np.allclose(a.to_host(), b, rtol=0, atol=1e-5) for a, b in zip(got, want)), flush=True)
module.launch.on_cpu_device = lambda queue: False  # read views as GPUs do
z, g = rng.standard_normal((2, 20, 3, 2, 4)).astype(np.float32), rng.standard_normal((2, 20, 2, 4)).astype(np.float32)
q, k, v = (z[:, :, i].swapaxes(1, 2) for i in range(3))
views = ops.unbind(Tensor.from_host(queue, z), 2, order=(0, 2, 1, 3))
upstream = ops.reorder(Tensor.from_host(queue, g), (0, 2, 1, 3))
got = ops.attention(*views, causal=True)
got += ops.attention_grad(upstream, *views, None, *got, causal=True)
assert all(t.source is not None and t.source.inputs for t in (*views, upstream)), "a view was copied"
want = numpy_reference("attention", q, k, v, None, causal=True)
want += numpy_reference("attention_grad", g.swapaxes(1, 2), q, k, v, None, *want, causal=True)
print(*(np.allclose(a.to_host(), b, rtol=0, atol=1e-5) for a, b in zip(got, want)), flush=True)
"""


def under_oclgrind(script, arguments, tmp_path, full):
    """What a script prints under Oclgrind, which must find nothing. The interpreter needs half the time for optimised kernels, which are
    what devices run; ``--full`` takes them as they are written, with reads of which nothing depends."""
    if not sanitizer.oclgrind_available():
        pytest.skip("Oclgrind is not installed")
    log = tmp_path / "oclgrind.log"
    settings = {**sanitizer.SETTINGS, "OCLGRIND_UNINITIALIZED": "0", "OCLGRIND_LOG": str(log), "NETCL_CACHE_DIR": str(tmp_path)}
    settings |= {} if full else {"OCLGRIND_BUILD_OPTIONS": "0"}
    env = {key: value for key, value in {**os.environ, **settings}.items() if value != "0"}
    done = subprocess.run([sys.executable, "-c", script, *arguments], env=env, capture_output=True, text=True, timeout=850)
    assert done.returncode == 0, f"after {done.stdout.split()[-1:]}: {done.stderr[-3000:]}"
    said = log.read_text().strip() if log.exists() else ""
    assert not said, said[:3000]
    return done.stdout


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("part", range(PARTS))
def test_kernels_are_clean(part, tmp_path, full):
    """Every op and its gradient; forward with three cases of an op where --full asks for it, else with one."""
    names = NAMES[part::PARTS]
    assert under_oclgrind(SCRIPT, ["3" if full else "1", *names], tmp_path, full).split() == names


@pytest.mark.slow
def test_fused_kernels_are_clean(tmp_path, full):
    """Rows as CPUs and as GPUs share them, forward and backward, with sums over columns."""
    assert len(under_oclgrind(FUSED, (), tmp_path, full).splitlines()) == 3


# One fills no tile, no strip and no block of filters; the op table's small shapes are never given to Winograd. The other has rows of fours.
RAGGED, EVEN = ((2, 3, 7, 9), (5, 3, 3, 3), ((1, 2), (0, 1))), ((3, 4, 4, 8), (8, 4, 3, 3), 1)
KINDS = ["conv2d", "conv2d_input_grad", "conv2d_weight_grad"]
#: By name: a configuration, the kinds it computes, and shapes.
CONVOLUTIONS = {
    # Around the simplest product: blocks of zeros would take minutes here, and have tests of their own.
    "winograd-cpu-4": ({"tier": "cpu", "VW": 4, "NV": 1, "NT": 2, "MR": 4, "FRESH": 0}, KINDS, [RAGGED]),
    "winograd-cpu-16": ({"tier": "cpu", "VW": 16, "NV": 1, "NT": 1, "MR": 4, "FRESH": 1}, KINDS, [RAGGED]),
    "winograd-simt": ({"tier": "simt"}, KINDS, [RAGGED, EVEN]),
    # Without unfolding: lines shorter and longer than a tile, filters that fill no vector, rims wider than the image.
    **{
        f"{form}-{lanes}": (
            {"tier": "cpu", "form": form, "VW": lanes},
            KINDS if form == "filters" else KINDS[:2],
            [RAGGED, ((1, 2, 4, 19), (6, 2, 3, 5), ((4, 4), (6, 6)))],
        )
        for form in ("filters", "pixels")
        for lanes in (4, 16)
    },
    # Divided sums: parts that have no terms, tiles that the results do not fill, a 1 x 1 kernel whose weights are vectors.
    "split": (
        {"tier": "simt", "form": "split", "BM": 32, "BN": 32, "splits": 3},
        KINDS[:2],
        [RAGGED, ((1, 8, 3, 3), (5, 8, 1, 1), 0)],
    ),
    # Columns: windows that the image does not fill, pixels that no window holds, groups; images apart, and without columns.
    "columns": (
        {"tier": "simt", "variant": "conv2d_im2col"},
        KINDS,
        [
            ((2, 3, 9, 6), (4, 3, 3, 3), ((1, 2), (0, 1)), (2, 3), (1, 1), 1),
            ((1, 4, 7, 9), (6, 2, 2, 3), (2, 1), (1, 2), (3, 2), 2),
            ((2, 2, 15, 31), (3, 2, 3, 3), 1, 2, 1, 1),
            ((2, 2, 8, 16), (3, 2, 1, 1), 0),
        ],
    ),
}


@pytest.mark.slow
def test_convolutions_are_clean(tmp_path, full):
    """Every configuration in one process: a start of Python and Oclgrind costs as much as most of them."""
    said = under_oclgrind(CONVOLUTION, [repr(CONVOLUTIONS)], tmp_path, full)
    want = [f"{name} {kind} True" for name, (_, kinds, shapes) in CONVOLUTIONS.items() for kind in kinds * len(shapes)]
    assert said.splitlines() == want


@pytest.mark.slow
def test_attention_of_gpus_is_clean(tmp_path, full):
    """Several blocks of queries and of keys, heads that share keys, rows that are whole quads; with --full rows that are not as well."""
    number = 2 if full else 1
    assert under_oclgrind(ATTENTION, [str(number)], tmp_path, full).splitlines() == ["True " * 4 + "True"] * (number + 1)
