"""An op of your own: an OpenCL kernel, its gradient, a check of both, and a model that uses it.

    python examples/kernel_with_gradient.py [--device gpu]      # any OpenCL device, but not the NumPy backend

The op is a bump with a width that is learned: out = exp(-(x * width)^2).
"""

import argparse

import numpy as np

import netcl as nc
import netcl.autograd as ag
from netcl import nn, optim


@nc.kernel(
    vjp={
        "x": "dx[i] = -2.0f * g[i] * out[i] * x[i] * width[0] * width[0];",
        "width": """
            float sum = 0.0f;
            for (int j = 0; j < x_size; ++j) sum -= 2.0f * g[j] * out[j] * x[j] * x[j] * width[0];
            dwidth[i] = sum;
        """,
    },
    shape=lambda x, width: x.shape,
)
def bump(x: "float32", width: "float32") -> "float32":  # type: ignore  # noqa: F821
    "out[i] = exp(-(x[i] * width[0]) * (x[i] * width[0]));"


class Bumps(nn.Module):
    """Sums of bumps: a layer like any other."""

    def __init__(self, count: int):
        super().__init__()
        self.place, self.height = nn.Linear(1, count), nn.Linear(count, 1)
        self.width = nn.Parameter(np.ones(1, np.float32))

    def forward(self, x):
        return self.height(bump(self.place(x), self.width))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="auto", help="an OpenCL device")
    parser.add_argument("--smoke", action="store_true", help="a few steps")
    arguments = parser.parse_args()
    nc.manual_seed(0)
    with nc.device(arguments.device):
        x = ag.tensor(np.linspace(-1, 1, 33), requires_grad=True)
        width = ag.tensor([0.7], requires_grad=True)
        assert ag.gradcheck(bump, [x, width])  # the gradients, against differences
        print(bump.source())

        places = np.linspace(-1, 1, 64, dtype=np.float32)[:, None]
        wanted = np.sin(4 * places)
        model = Bumps(16)
        optimizer, loss = optim.Adam(model.parameters(), lr=0.02), nc.zeros(1)
        for step in range(5 if arguments.smoke else 400):
            optimizer.zero_grad()
            loss = ag.mse(model(places), wanted)
            loss.backward()
            optimizer.step()
            if step % 100 == 0:
                print(f"step {step}: {loss.item():.5f}")
        print(f"at the end: {loss.item():.5f}, width {model.width.item():.3f}")


if __name__ == "__main__":
    main()
