"""Size sweeps over three decades: whether cost grows as it should."""

from __future__ import annotations

import layers
import problems
import train_steps
from comparison import Case, Comparison


def sweeps(gpu: bool, quick: bool = False) -> list[Case]:
    """Cases named ``what size``, sizes growing by powers of two; ``quick`` takes every third."""
    sides = (16, 32, 64, 128, 256, 512, 1024, 2048, *((4096, 8192) if gpu else ()))
    batches = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, *((1024,) if gpu else ()))
    counts = [1 << p for p in range(10, 29 if gpu else 25, 2)]
    rows = (16, 64, 256, 1024, 4096, 16384)
    made = [
        [problems.matmul(n, n, n, name=f"sweep matmul {n}") for n in sides],
        [_renamed(problems.conv(n, 64, 32, 64), f"sweep conv {n}") for n in batches],
        [_renamed(problems.softmax(n, 1024), f"sweep softmax {n}") for n in rows],
        [_renamed(problems.total(n), f"sweep sum {n}") for n in counts],
        [_renamed(layers.chain(n), f"sweep chain {n}") for n in counts],
        [_resnet(n) for n in batches[: 11 if gpu else 7]],
    ]
    return [case for group in made for case in group[:: 3 if quick else 1]]


def _resnet(batch: int) -> Case:
    return _renamed(train_steps.resnet_step(batch, [Comparison(), Comparison("compiled")]), f"sweep ResNet-18 batch {batch}")


def _renamed(case: Case, name: str) -> Case:
    return Case(name, case.make, case.comparisons, case.tolerance, case.work)
