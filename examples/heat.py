"""Physics in a kernel: heat flows along a rod, and the gradient through time finds the wall inside it.

    python examples/heat.py [--device gpu] [--steps 150]      # any OpenCL device, but not the NumPy backend

A kernel computes one step of the heat equation and its gradient. Given how temperatures end, descent finds how well each place conducts.
"""

import argparse

import numpy as np

import netcl
import netcl.autograd as ag
from netcl import nn, optim

PLACES, TIMES = 48, 40
FLOW = "k[j] * ((j + 1 < k_size) ? v[i + 1] - v[i] : 0.0f) - ((j > 0) ? k[j - 1] * (v[i] - v[i - 1]) : 0.0f)"


@netcl.kernel(
    vjp={
        "u": f"int j = i % k_size; du[i] = g[i] + 0.2f * ({FLOW.replace('v[', 'g[')});",
        "k": """
            float sum = 0.0f;
            for (int b = i; b < u_size && i + 1 < k_size; b += k_size) sum += (u[b + 1] - u[b]) * (g[b] - g[b + 1]);
            dk[i] = 0.2f * sum;
        """,
    },
    body=f"int j = i % k_size; out[i] = u[i] + 0.2f * ({FLOW.replace('v[', 'u[')});",
    shape=lambda u, k: u.shape,
)
def heat_step(u: "float32", k: "float32") -> "float32": ...  # type: ignore  # noqa: F821


def flow(start, conductivity):
    """Temperatures (experiments, places) after TIMES steps."""
    u = start
    for _ in range(TIMES):
        u = heat_step(u, conductivity)
    return u


def train(steps: int) -> tuple[np.ndarray, np.ndarray, list[float]]:
    """The true conductivity, the one that was found, and the losses."""
    true = np.ones(PLACES, np.float32)
    true[20:28] = 0.15  # the wall
    rng = np.random.default_rng(0)
    start = netcl.tensor(np.cumsum(rng.normal(0, 1, (12, PLACES)), axis=1).astype(np.float32))
    k, u = ag.tensor(rng.uniform(0.3, 1, 6), requires_grad=True), ag.tensor(rng.uniform(-1, 1, (2, 6)), requires_grad=True)
    assert ag.gradcheck(heat_step, [u, k])  # the gradients, against differences
    seen = flow(start, netcl.tensor(true))
    guess = nn.Parameter(np.full(PLACES, 0.6, np.float32))
    optimizer, losses = optim.Adam([guess], lr=0.03), []
    for step in range(steps):
        optimizer.zero_grad()
        loss = ag.mse(flow(start, guess), seen)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        if step % 50 == 0:
            print(f"step {step}: {losses[-1]:.6f}")
    return true, guess.numpy(), losses


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="auto", help="an OpenCL device")
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--smoke", action="store_true", help="three steps")
    arguments = parser.parse_args()
    with netcl.device(arguments.device):
        _, found, losses = train(3 if arguments.smoke else arguments.steps)
    print(
        f"loss {losses[0]:.5f} -> {losses[-1]:.5f}; conductivity of the wall: {found[20:28].mean():.2f}, elsewhere {found[:18].mean():.2f}"
    )


if __name__ == "__main__":
    main()
