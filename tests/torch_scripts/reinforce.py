"""A policy gradient: a walker on a line is rewarded for steps to the right. Actions are drawn from ``torch.distributions``."""

from collections import deque

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
import torch.optim as optim
from torch.distributions import Categorical, Normal, kl_divergence


class Policy(nn.Module):
    def __init__(self):
        super().__init__()
        self.affine1 = nn.Linear(2, 16)
        self.affine2 = nn.Linear(16, 2)
        self.log_probs, self.rewards = [], []

    def forward(self, x):
        return F.softmax(self.affine2(F.relu(self.affine1(x))), dim=1)


torch.manual_seed(543)
policy = Policy()
optimizer = optim.Adam(policy.parameters(), lr=2e-2)
eps = np.finfo(np.float32).eps.item()


def episode():
    place, steps = 0, 0
    while -4 < place < 4 and steps < 20:
        state = torch.from_numpy(np.array([place / 4, 1.0])).float().unsqueeze(0)
        choice = Categorical(policy(state))
        action = choice.sample()
        policy.log_probs.append(choice.log_prob(action))
        place, steps = place + (1 if action.item() == 1 else -1), steps + 1
        policy.rewards.append(1.0 if action.item() == 1 else -1.0)
    return steps


lengths = []
for _ in range(40):
    lengths.append(episode())
    R, returns = 0.0, deque()
    for r in policy.rewards[::-1]:
        R = r + 0.5 * R
        returns.appendleft(R)
    returns = torch.tensor(returns)
    returns = (returns - returns.mean()) / (returns.std() + eps)
    loss = torch.cat([-log_prob * R for log_prob, R in zip(policy.log_probs, returns)]).sum()  # noqa: B905
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    del policy.rewards[:], policy.log_probs[:]
right = policy(torch.tensor([[0.0, 1.0]]))[0, 1].item()
assert kl_divergence(Normal(0.0, 1.0), Normal(torch.zeros(2), torch.ones(2))).abs().max() < 1e-6
print(f"first {1.0:.6f} last {1.0 - right:.6f} lengths {lengths[0]} {lengths[-1]}")
