"""The problems that ``netcl bench`` times."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from netcl import autograd as ag
from netcl import nn, optim
from netcl.bench import Compiled, Setting, Way, last_loss, training_step, values

Ways = Callable[[Setting], dict[str, Way]]


def groups() -> dict[str, dict[str, Ways]]:
    """Return the problems by topic and name, from small to large. A problem is a function of a :class:`Setting` that returns its ways."""

    def matrices(n: int) -> list[np.ndarray]:
        return [values(n, n, seed=seed) for seed in (0, 1)]

    def images(n: int) -> list[np.ndarray]:
        return [values(n, 32, 16, 16), values(32, 32, 3, 3, seed=1)]

    def vectors(power: int) -> list[np.ndarray]:
        return [values(1 << power, seed=seed) for seed in range(3)]

    def chain(a: Any, b: Any, c: Any) -> Any:
        return ag.relu(a * b + c) * 0.5 + a

    matmul = partial(_ways, ag.matmul, lambda torch, a, b: torch.matmul(a, b), np.matmul)
    conv = partial(_ways, partial(ag.conv2d, padding=1), lambda torch, x, w: torch.nn.functional.conv2d(x, w, padding=1), None)
    fused = partial(_ways, chain, lambda torch, a, b, c: torch.relu(a * b + c) * 0.5 + a, None)
    total = partial(_ways, ag.sum, lambda torch, a: a.sum(), np.sum)
    softmax = partial(_ways, ag.softmax, lambda torch, a: a.softmax(-1), None)
    return {
        "matrix products": {f"matmul {n}": partial(matmul, partial(matrices, n)) for n in (32, 128, 512, 1024)},
        "convolutions": {f"conv 3x3 {n}x32x16x16 to 32 forward": partial(conv, partial(images, n)) for n in (1, 16, 64)},
        "elementwise chains": {f"chain 2^{p}": partial(fused, partial(vectors, p)) for p in (10, 16, 22)},
        "sums": {f"sum 2^{p}": partial(total, lambda p=p: [np.abs(values(1 << p))]) for p in (10, 16, 22)},
        "softmax": {f"softmax {n}x512": partial(softmax, lambda n=n: [values(n, 512)]) for n in (8, 128, 2048)},
        "training an MLP": {f"MLP 784-128-10 step, batch {n}": partial(_mlp_ways, n) for n in (16, 256)},
    }


def _ways(ours: Any, theirs: Any, reference: Any, arrays: Callable[[], list[np.ndarray]], where: Setting) -> dict[str, Way]:
    """Return ways to compute a function of arrays: eager, compiled, and torch. Without torch, the NumPy ``reference`` is used if given."""
    given = arrays()
    tensors = [where.tensor(array) for array in given]
    ways = {"ours": where.ours(lambda: ours(*tensors)), "compiled": Compiled(ours, *tensors).way(where)}
    if where.torch is not None:
        operands = [where.torch_tensor(array) for array in given]
        return ways | {"torch": where.theirs(lambda: theirs(where.torch, *operands))}
    return ways | ({"numpy": Way(result=lambda: [reference(*given)])} if reference else {})


def _mlp_ways(batch: int, where: Setting) -> dict[str, Way]:
    """Return the ways to run a training step of a 784-128-10 MLP with Adam: eager, compiled and in torch, from the same weights."""
    x, y = values(batch, 784), np.arange(batch) % 10
    data = where.tensor(x), where.tensor(y)
    models = [nn.MLP(784, [128], 10) for _ in range(2)]
    weights = {name: tensor.to_host().copy() for name, tensor in models[0].state_dict().items()}
    models[1].load_state_dict(weights)
    eager, again = (training_step(model, optim.Adam(model.parameters()), ag.cross_entropy) for model in models)
    ways = {"ours": replace(where.ours(lambda: eager(*data)), result=lambda: last_loss(lambda: eager(*data)))}
    ways["compiled"] = Compiled(again, *data).losses(where)
    if where.torch is None:
        return ways
    torch = where.torch
    twin = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(784, 128), torch.nn.ReLU(), torch.nn.Linear(128, 10))
    twin.load_state_dict({name.removeprefix("layers."): torch.from_numpy(array) for name, array in weights.items()})
    twin.to(where.torch_device)
    step = training_step(twin, torch.optim.Adam(twin.parameters()), torch.nn.functional.cross_entropy)
    operands = where.torch_tensor(x), where.torch_tensor(y)
    return ways | {"torch": replace(where.theirs(lambda: step(*operands)), result=lambda: last_loss(lambda: step(*operands)))}
