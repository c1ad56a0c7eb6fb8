"""A policy gradient on a two-armed bandit. ``torch.distributions`` is a part of torch that netcl does not have."""

import torch
import torch.nn as nn
from torch.distributions import Categorical

policy = nn.Linear(1, 2)
optimizer = torch.optim.Adam(policy.parameters(), lr=0.1)
for _ in range(30):
    choice = Categorical(torch.softmax(policy(torch.ones(1)), dim=-1))
    action = choice.sample()
    loss = -choice.log_prob(action) * (1.0 if action.item() == 1 else -1.0)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
torch.linalg.eigvals(policy.weight)
