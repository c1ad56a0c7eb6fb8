"""Every op's kernels under Oclgrind, on small shapes: no access out of bounds, no race.

Oclgrind's check of uninitialised values is left out here: version 21.10 reports values that were copied into buffers by the host, and
does not know every instruction. ``@netcl.kernel(check=True)`` keeps it on for single launches.
"""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from netcl import ops, selftest
from netcl.autograd import sanitizer
from netcl.ops.registry import REGISTRY, Choice

PARTS = 8
NAMES = sorted(name for name, row in REGISTRY.items() if not isinstance(row, Choice) and row.ref is not None)
assert ops.names() and selftest.SIZES

SCRIPT = """
import sys
from netcl import ops, selftest
from netcl.core.device import manager
from netcl.ops.registry import REGISTRY
handle = manager.default("oclgrind")
for name in sys.argv[1:]:
    row = REGISTRY[name]
    small = [case for case in selftest.cases(row, "float32", (1, 37)) if sum(getattr(x, "size", 1) for x in case.inputs) <= 400]
    for case in small[:3]:
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
from netcl.ops import rows
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


WINOGRAD = """
import sys
import numpy as np
from netcl.core.device import manager
from netcl.core.kernel_selector import KernelConfig, KernelVariant
from netcl.core.tensor import Tensor
from netcl.ops.conv import arrays, plans
from netcl.ops.conv.geometry import geometry
queue = manager.default("oclgrind").queue
for tiles in ({"VW": 4, "NV": 1, "NT": 2, "MR": 4}, {"VW": 16, "NV": 1, "NT": 1, "MR": 4}):
    config = KernelConfig(KernelVariant.CONV2D_WINOGRAD, extra={"tier": "cpu", "winograd_channels": 1, **tiles})
    for kind in (plans.FORWARD, plans.INPUT_GRAD):
        g = geometry(kind, (2, 3, 7, 9), (5, 3, 3, 3), 1, ((1, 2), (0, 1)), 1, 1)
        source, result = (g.x_shape, g.y_shape) if kind == plans.FORWARD else (g.y_shape, g.x_shape)
        x, w = (np.linspace(-2, 2, np.prod(shape), dtype=np.float32).reshape(shape) for shape in (source, g.w_shape))
        want = (arrays.forward if kind == plans.FORWARD else arrays.input_grad)(x, w, None, g=g)
        x, w, y = Tensor.from_host(queue, x), Tensor.from_host(queue, w), Tensor.empty(result, queue=queue)
        plans.run(plans.Job(kind, g, "float32"), queue, x, w, w, y, config=config)
        print(kind, np.allclose(y.to_host(), want, rtol=0, atol=1e-4), flush=True)
"""


def under_oclgrind(script, arguments, tmp_path):
    """What a script prints under Oclgrind, which must find nothing."""
    if not sanitizer.available():
        pytest.skip("Oclgrind is not installed")
    log = tmp_path / "oclgrind.log"
    settings = {**sanitizer.SETTINGS, "OCLGRIND_UNINITIALIZED": "0", "OCLGRIND_LOG": str(log), "NETCL_CACHE_DIR": str(tmp_path)}
    env = {key: value for key, value in {**os.environ, **settings}.items() if value != "0"}
    done = subprocess.run([sys.executable, "-c", script, *arguments], env=env, capture_output=True, text=True, timeout=850)
    assert done.returncode == 0, f"after {done.stdout.split()[-1:]}: {done.stderr[-3000:]}"
    said = log.read_text().strip() if log.exists() else ""
    assert not said, said[:3000]
    return done.stdout


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("part", range(PARTS))
def test_kernels_are_clean(part, tmp_path):
    names = NAMES[part::PARTS]
    assert under_oclgrind(SCRIPT, names, tmp_path).split() == names


@pytest.mark.slow
def test_fused_kernels_are_clean(tmp_path):
    """Rows as CPUs and as GPUs share them, forward and backward, with sums over columns."""
    assert len(under_oclgrind(FUSED, (), tmp_path).splitlines()) == 3


@pytest.mark.slow
def test_winograd_on_cpus_is_clean(tmp_path):
    """Sizes that fill no tile, no strip and no block of filters; the op table's small shapes are never given to it."""
    assert under_oclgrind(WINOGRAD, (), tmp_path).split() == ["conv2d", "True", "conv2d_input_grad", "True"] * 2
