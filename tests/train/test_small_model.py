"""A small model trained with nothing but ops and the tape."""

import gc
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import netcl.autograd as ag
from netcl.core import memory
from netcl.core.device import manager

ROOT = Path(__file__).parents[2]


def resident_bytes() -> int:
    return int(Path("/proc/self/status").read_text().split("VmRSS:")[1].split()[0]) * 1024


class TwoLayers:
    def __init__(self, queue, seed=0):
        rng = np.random.default_rng(seed)
        self.parameters = [
            ag.tensor(rng.normal(size=shape) * 0.5, requires_grad=True, queue=queue) for shape in ((8, 4), (8,), (3, 8), (3,))
        ]

    def __call__(self, x):
        w1, b1, w2, b2 = self.parameters
        return ag.linear(ag.relu(ag.linear(x, w1, b1)), w2, b2)

    def step(self, x, y, rate=0.1):
        loss = ag.cross_entropy(self(x), y)
        loss.backward()
        with ag.no_grad():
            for p in self.parameters:
                p.from_host(p.to_host() - rate * p.grad.to_host())
                p.zero_grad()
        return loss


def batch(queue, one_hot=False, seed=1):
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(32, 4)).astype(np.float32)
    labels = (x[:, 0] > 0).astype(np.int64) + (x[:, 1] > 0)
    y = np.eye(3, dtype=np.float32)[labels] if one_hot else labels
    return ag.tensor(x, queue=queue), ag.tensor(y, queue=queue)


@pytest.mark.parametrize("one_hot", [False, True], ids=["class indices", "probabilities"])
def test_it_overfits_a_batch(device, one_hot):
    model, (x, y) = TwoLayers(device.queue), batch(device.queue, one_hot)
    losses = [model.step(x, y, 0.5).item() for _ in range(60)]
    assert losses[-1] < 0.35 * losses[0]


def test_two_runs_agree_bit_for_bit(device):
    ends = []
    for _ in range(2):
        model, (x, y) = TwoLayers(device.queue), batch(device.queue)
        for _ in range(10):
            model.step(x, y)
        ends.append([p.to_host() for p in model.parameters])
    for a, b in zip(*ends, strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.skipif(sys.platform != "linux", reason="resident memory is read from /proc")
def test_thousands_of_steps_stay_flat(cl_device, full):
    """In a process of its own: one that has run other tests may still grow by what they left."""
    script = "import sys; from tests.train.test_small_model import stay_flat; stay_flat(sys.argv[1], int(sys.argv[2]))"
    words = [cl_device.platform_name, "10000" if full else "1500"]
    done = subprocess.run([sys.executable, "-c", script, *words], cwd=ROOT, capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, done.stderr


def stay_flat(platform: str, steps: int) -> None:
    queue = manager.default(platform).queue
    model, (x, y) = TwoLayers(queue), batch(queue)
    pool = memory.get_persistent_pool(queue)
    for _ in range(500 if steps == 10_000 else 200):
        model.step(x, y, 0.01)
    gc.collect()
    held, resident, hits, misses = pool.stats.bytes_allocated, resident_bytes(), pool.stats.hits, pool.stats.misses
    for _ in range(steps):
        model.step(x, y, 0.01)
    gc.collect()
    assert pool.stats.bytes_allocated == held
    assert resident_bytes() - resident < (8 << 20 if steps == 10_000 else 4 << 20)
    hits, misses = pool.stats.hits - hits, pool.stats.misses - misses
    assert hits / (hits + misses) > 0.95
