"""What users of torch write, once: each row is a name and a snippet that leaves its value in ``result``.

``make_idioms.py`` runs the snippets with torch and keeps the results; ``tests/test_torch_idioms.py`` runs them with netcl on every
device. In a snippet ``torch``, ``nn``, ``F``, ``optim`` and ``data`` are torch's modules or netcl's, ``a(shape)`` is a float32 tensor
with fixed values, and ``fix(module)`` gives every parameter fixed values. A snippet that raises in torch must raise in netcl.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import numpy as np


def rows(text: str) -> dict[str, str]:
    """Snippets by name; a line that starts with ``## `` begins one."""
    parts = [part.partition("\n") for part in ("\n" + text).split("\n## ")[1:]]
    assert len({name for name, _, _ in parts}) == len(parts), "a name is used twice"
    return {name: source for name, _, source in parts}


# ---- views and changes in place

IN_PLACE = rows("""
## update under no_grad
w = a((3,)).requires_grad_()
(w * w).sum().backward()
with torch.no_grad():
    w -= 0.1 * w.grad
result = (w, w.requires_grad, w.is_leaf)
## views keep their memory when the base gets other data
x = a((2, 2))
v = x[:, 0]
x.add_(5.0)
x.data = torch.zeros(2, 2)
x.add_(1.0)
result = (v, x)
## data becomes a part of itself
x, y, z = a((2, 3)), a((2, 2)), a((2, 2))
x.data, y.data, z.data = x.data[:, 1:], y.data.t(), z.data.view(-1)
result = (x, y, z)
## in place on an item of a view of a leaf raises
x = a((2, 2)).requires_grad_()
x.view_as(x)[0].div_(2.0)
## a leaf that is frozen after the forward pass gets no gradient
result = []
for _ in range(4):
    x, w = a((3,)).requires_grad_(), a((3,)).requires_grad_()
    y = (x * w).sum()
    x.requires_grad_(False)
    y.backward()
    result.append((x.grad is None, w.grad))
## update of a parameter in a loop
w = a((3,)).requires_grad_()
for _ in range(3):
    (w * w).sum().backward()
    with torch.no_grad():
        w -= 0.1 * w.grad
    w.grad = None
result = w
## in place keeps the object
x = a((3,))
y = x
y += 1.0
result = x
## in place through an argument
def grow(v):
    v *= 2.0
x = a((3,))
grow(x)
result = x
## in place division and power
x = a((3,)) + 2.0
x /= 2.0
x **= 2.0
result = x
## in place on a leaf raises
w = a((3,)).requires_grad_()
w += 1.0
result = w
## in place on a result is differentiated
w = a((3,)).requires_grad_()
y = w * 2.0
y += w
y.sum().backward()
result = w.grad
## in place methods
x = a((3,))
x.add_(1.0).mul_(3.0).sub_(0.5)
result = x
## zero_ and fill_
x = a((3,))
y = a((3,))
x.zero_()
y.fill_(4.0)
result = (x, y)
## copy_
x = a((2, 2))
x.copy_(torch.ones(2, 2))
result = x
## clamp_ and relu_
x = a((5,))
x.clamp_(min=-0.5)
y = a((5,))
y.relu_()
result = (x, y)
## element through a row
x = a((2, 3))
x[0][1] = 9.0
result = x
## element through the transpose
x = a((2, 3))
x.T[0, 0] = 9.0
result = x
## rows filled in place
x = a((4, 2))
x[1:3].fill_(7.0)
result = x
## row increased
x = a((3, 2))
x[1] += 1.0
result = x
## column increased
x = a((3, 2))
x[:, 0] *= 2.0
result = x
## write through view
x = a((2, 3))
x.view(-1)[4] = 9.0
result = x
## write through a slice
x = a((5,))
y = x[1:4]
y[0] = 9.0
result = (x, y)
## write through unbound rows
x = a((2, 3))
for row in x:
    row[0] = 9.0
result = x
## setitem sends a gradient to the value
v = a((2,)).requires_grad_()
y = torch.zeros(3)
y[1:] = v
(y * y).sum().backward()
result = (v.grad, y)
## setitem takes the gradient of what it overwrites
x = a((3,)).requires_grad_()
y = x * 1.0
y[0] = 0.0
(y * y).sum().backward()
result = x.grad
## grad zeroed in place
w = a((3,)).requires_grad_()
(w * w).sum().backward()
w.grad.zero_()
(w * w).sum().backward()
result = w.grad
## data of a parameter changed
w = a((3,)).requires_grad_()
w.data.mul_(2.0)
result = (w, w.requires_grad)
## detach shares memory
w = a((3,)).requires_grad_()
w.detach()[0] = 5.0
result = w
## masked assignment
x = a((5,))
x[x < 0] = 0.0
result = x
## assignment by an index tensor
x = a((4, 2))
x[torch.tensor([0, 2])] = 1.0
result = x
""")

# ---- everything else

IDIOMS = rows("""
# ---- values and dtypes

## tensor of floats
result = torch.tensor([1.0, 2.0])
## tensor of ints
result = torch.tensor([1, 2])
## tensor of bools
result = torch.tensor([True, False])
## tensor of a number
result = (torch.tensor(3.5), torch.tensor(3))
## zeros and ones
result = (torch.zeros(2, 3), torch.ones((2,)))
## full infers its dtype
result = (torch.full((2,), 3), torch.full((2,), True), torch.full((2,), 2.5))
## arange
result = (torch.arange(4), torch.arange(1, 7, 2), torch.arange(0.0, 1.0, 0.25))
## dtype names
result = [a((1,)).dtype == torch.float32, a((1,)).dtype == torch.float, torch.arange(2).dtype == torch.long, torch.float32 == torch.float64]
## dtype in a conversion
result = (a((3,)).to(torch.float16).dtype == torch.half, (a((3,)) * 3).to(torch.int32), a((3,)).half())
## equality with None
x = a((2,))
result = (x == None, x != None, x is None)
## int plus float scalar
result = torch.arange(3) + 0.5
## int times int
result = torch.arange(3) * 2
## int tensor with float tensor
result = torch.arange(3) * a((3,))
## int32 with int64
result = torch.arange(3, dtype=torch.int32) + torch.arange(3)
## bool plus int
result = torch.tensor([True, False]) + 1
## bool sum
result = torch.tensor([True, False, True]).sum()
## half with float
result = (a((3,)).half() + a((3,))).dtype == torch.float32
## half with a number stays half
result = (a((3,)).half() * 2.5).dtype == torch.float16
## uint8 wraps
result = torch.tensor([250, 3], dtype=torch.uint8) + torch.tensor([10, 3], dtype=torch.uint8)
## comparison gives bool
result = (a((3,)) > 0, a((3,)) <= 0, torch.arange(3) == 1)
## int division gives float
result = torch.tensor([-7, 7]) / 2
## floor division of negatives
result = (torch.tensor([-7, 7]) // 2, torch.tensor([-7.0, 7.0]) // 2)
## remainder of negatives
result = (torch.tensor([-7, 7]) % 3, torch.tensor([-7.0, 7.0]) % -3.0)
## fmod of negatives
result = torch.fmod(torch.tensor([-7.0, 7.0]), 3.0)
## rounding to even
result = torch.tensor([-2.5, -0.5, 0.5, 1.5, 2.5]).round()
## trunc floor ceil
x = torch.tensor([-1.5, 1.5])
result = (x.trunc(), x.floor(), x.ceil())
## float to int truncates
result = (torch.tensor([-1.9, 1.9]).int(), torch.tensor([-1.9, 1.9]).long())
## power of ints
result = torch.tensor([2, 3]) ** 2
## sqrt of ints
result = torch.tensor([4, 9]).sqrt()
## reflected operators
x = a((3,)) + 2.0
result = (1.0 - x, 2.0 / x, 2.0 ** x)
## sign and abs of zero
x = torch.tensor([-2.0, 0.0, 3.0])
result = (x.sign(), x.abs())
## NaN compares
x = torch.tensor([float('nan'), 1.0])
result = (x == x, x.isnan(), torch.maximum(x, torch.tensor([0.0, 0.0])))

# ---- scalars and Python

## item
result = (torch.tensor(2.5).item(), torch.tensor([3]).item(), torch.tensor([[True]]).item())
## item of many raises
result = torch.ones(2).item()
## float int bool of a tensor
x = torch.tensor(2.5)
result = (float(x), int(x), bool(x), bool(torch.tensor([0])))
## bool of many raises
result = bool(torch.ones(2))
## if on a comparison
x = a((3,))
result = 'above' if x.sum() > 0 else 'below'
## chained comparison raises
x = a((3,))
result = 0 < x < 1
## and on comparisons
x = a((5,))
result = ((x > -0.5) & (x < 0.5), (x > 0.5) | (x < -0.5), ~(x > 0))
## len and iteration
x = a((3, 2))
result = (len(x), [float(row.sum()) for row in x])
## len of a number raises
result = len(torch.tensor(1.0))
## a tensor as an index
result = [10, 20, 30][torch.tensor(1)]
## tolist
result = torch.arange(4).view(2, 2).tolist()
## in
result = (2 in torch.arange(4), 7 in torch.arange(4))
## f-string of an item
result = f'{torch.tensor(0.5).item():.3f}'
## numpy round trip
result = a((2, 2)).numpy().tolist()

# ---- shapes

## view and minus one
x = a((2, 6))
result = (x.view(3, -1).shape, x.view(-1).shape, x.reshape((4, 3)).shape)
## view that does not fit raises
result = a((2, 3)).view(4, 2)
## squeeze and unsqueeze
x = a((1, 3, 1))
result = (x.squeeze().shape, x.squeeze(0).shape, x.squeeze(1).shape, x.unsqueeze(-1).shape)
## expand
result = (a((3, 1)).expand(3, 4), a((3, 1)).expand(-1, 2).shape)
## transpose and permute
x = a((2, 3, 4))
result = (x.transpose(1, 2).shape, x.permute(2, 0, 1), x.permute((1, 0, 2)).shape)
## T
x = a((2, 3))
result = (x.T, x.t() if hasattr(x, 't') else x.T)
## flatten from an axis
x = a((2, 3, 4))
result = (x.flatten().shape, x.flatten(1).shape, x.flatten(0, 1).shape)
## cat and stack
x = a((2, 2))
result = (torch.cat([x, x], 1), torch.cat((x, x)).shape, torch.stack([x, x]).shape, torch.stack([x, x], dim=-1).shape)
## split and chunk
x = a((5, 2))
result = ([p.shape for p in x.split(2)], [p.shape for p in x.split([1, 4])], [p.shape for p in x.chunk(2)])
## repeat and tile
x = a((2,))
result = (x.repeat(2, 3), x.repeat(2))
## flip and roll
x = a((2, 3))
result = (x.flip(0), x.flip((0, 1)), x.roll(1, 1))
## tril and triu
x = a((3, 3))
result = (x.tril(), x.triu(1))
## broadcasting
result = (a((3, 1)) + a((4,)), (a((2, 1, 3)) * a((4, 1))).shape)
## broadcasting that does not fit raises
result = a((3,)) + a((4,))
## unsqueeze then matmul
result = (a((2, 3)) @ a((3,)).unsqueeze(1), a((2, 3)) @ a((3,)), a((3,)) @ a((3,)))
## batched matmul
result = (torch.bmm(a((2, 2, 3)), a((2, 3, 2))), a((2, 2, 3)) @ a((3, 2)))
## matmul that does not fit raises
result = a((2, 3)) @ a((2, 3))
## einsum
result = torch.einsum('ij,kj->ik', a((2, 3)), a((4, 3)))

# ---- indexing

## negative and stepped slices
x = a((6,))
result = (x[-2:], x[::2], x[1:-1:2])
## ellipsis and None
x = a((2, 3, 4))
result = (x[..., 0].shape, x[:, None].shape, x[0, ..., 1].shape)
## boolean mask
x = a((5,))
result = (x[x > 0], x[torch.tensor([True, False, False, False, True])])
## mask of two axes
x = a((2, 3))
result = x[x > 0]
## index tensor
x = a((4, 2))
result = (x[torch.tensor([3, 0, 0])], x[torch.tensor([0, 1]), torch.tensor([1, 0])])
## row labels
x = a((3, 4))
y = torch.tensor([1, 0, 3])
result = x[torch.arange(3), y]
## index out of range raises
result = a((3,))[5]
## setitem of a slice
x = torch.zeros(4)
x[1:3] = 7.0
x[0] = 1.0
result = x
## gather
result = a((3, 4)).gather(1, torch.tensor([[1], [0], [3]]))
## gather and its gradient
x = a((2, 3)).requires_grad_()
x.gather(1, torch.tensor([[1, 1], [0, 2]])).sum().backward()
result = x.grad
## scatter_add
result = torch.zeros(2, 3).scatter_add(1, torch.tensor([[0, 0], [2, 1]]), torch.ones(2, 2))
## index_select
result = a((3, 4)).index_select(1, torch.tensor([2, 0]))
## index_add
result = torch.zeros(3, 2).index_add(0, torch.tensor([0, 2, 0]), torch.ones(3, 2))
## take
result = torch.take(a((2, 3)), torch.tensor([0, 5, 1]))
## nonzero
result = torch.tensor([[0, 1], [2, 0]]).nonzero()
## masked_fill
x = a((2, 3))
result = x.masked_fill(x < 0, -1000000000.0)
## where of three
x = a((5,))
result = (torch.where(x > 0, x, 0.0), torch.where(x > 0, 1, 0))
## where as a method
x = a((5,))
result = x.where(x > 0, -x)
## where and its gradient
x = a((5,)).requires_grad_()
y = a((5,)).requires_grad_()
x.where(x > 0, 2.0 * y).sum().backward()
result = (x.grad, y.grad)
## one_hot
result = (F.one_hot(torch.tensor([0, 2, 1]), 3), F.one_hot(torch.tensor([0, 2])))
## isin
result = torch.isin(torch.arange(5), torch.tensor([1, 4]))

# ---- reductions

## max unpacks
out = a((3, 4))
_, pred = out.max(1)
result = pred
## max of a dim
m = a((3, 4)).max(dim=0)
result = (m.values, m.indices)
## max keeps a dim
v, i = a((3, 4)).max(1, keepdim=True)
result = (v, i)
## max of all and of two
x = a((3,))
result = (x.max(), torch.max(x, -x), x.min(), torch.min(x, -x))
## min of a dim
v, i = torch.min(a((3, 4)), 1)
result = (v, i)
## amax of two dims
result = (a((2, 3, 4)).amax(dim=(0, 2)), a((2, 3)).amin(1, keepdim=True))
## gradient of max goes to one
x = torch.tensor([[1.0, 3.0, 3.0]], requires_grad=True)
x.max(1).values.sum().backward()
result = x.grad
## gradient of amax is shared
x = torch.tensor([[1.0, 3.0, 3.0]], requires_grad=True)
x.amax(1).sum().backward()
result = x.grad
## gradient of a max of all is shared
x = torch.tensor([3.0, 1.0, 3.0], requires_grad=True)
x.max().backward()
result = x.grad
## argmax takes the first of equals
result = (torch.tensor([1.0, 5.0, 5.0]).argmax(), torch.tensor([[2, 2], [1, 1]]).argmin(1))
## argmax of all
result = (a((3, 4)).argmax(), a((3, 4)).argmax(dim=1, keepdim=True))
## accuracy
out = a((4, 3))
y = torch.tensor([0, 1, 2, 0])
result = ((out.argmax(1) == y).float().mean(), (out.argmax(dim=1) == y).sum().item())
## sum over dims
x = a((2, 3, 4))
result = (x.sum(), x.sum(0), x.sum((1, 2)), x.sum(-1, keepdim=True).shape, x.sum(dim=1).shape)
## sum of ints
result = (torch.arange(4, dtype=torch.int32).sum(), torch.tensor([[1, 2], [3, 4]]).sum(0))
## mean of ints raises
result = torch.arange(4).mean()
## mean of bools raises
result = (a((4,)) > 0).mean()
## std of ints raises
result = torch.arange(4).std()
## mean
x = a((2, 3))
result = (x.mean(), x.mean(1), x.mean((0, 1)), x.mean(dim=0, keepdim=True))
## std and var are unbiased
x = a((2, 5))
result = (x.std(), x.var(1), x.std(0))
## biased var
result = (a((2, 5)).var(1, correction=0), a((2, 5)).std(dim=0, unbiased=False))
## var of one is NaN
result = torch.tensor([2.0]).var()
## norm
x = a((3, 4))
result = (x.norm(), x.norm(dim=1), x.norm(p=1))
## prod any all
x = torch.tensor([[1, 2], [3, 0]])
result = (x.prod(), x.bool().any(1), x.bool().all(), (x > 0).all(0))
## logsumexp
result = (torch.logsumexp(a((2, 3)), 1), a((2, 3)).logsumexp(dim=0))
## cumsum
result = (a((2, 3)).cumsum(1), torch.arange(4).cumsum(0), torch.tensor(2.5).cumsum(0))
## sort
v, i = torch.tensor([3.0, 1.0, 2.0]).sort()
d = torch.tensor([[3, 1, 2]]).sort(descending=True)
result = (v, i, d.values, d.indices)
## topk
r = torch.tensor([[1.0, 9.0, 3.0], [7.0, 5.0, 6.0]]).topk(2)
result = (r.values, r.indices, r[0].shape)
## gradient of topk
x = a((5,)).requires_grad_()
v, _ = x.topk(2)
(v * v).sum().backward()
result = x.grad
## argsort
result = (torch.tensor([3.0, 1.0, 2.0]).argsort(), torch.tensor([3.0, 1.0, 2.0]).argsort(descending=True))
## max of nothing raises
result = torch.zeros(0).max()
## sum of nothing
result = (torch.zeros(0).sum(), torch.zeros(0, 3).sum(0), torch.zeros(0).mean())

# ---- pointwise

## clamp and clip
x = a((5,))
result = (x.clamp(-0.5, 0.5), x.clamp(min=0), x.clip(max=0.25), torch.clamp(x, 0, 0.1))
## clamp and its gradient
x = torch.tensor([-1.0, 0.0, 0.5, 1.0, 2.0], requires_grad=True)
x.clamp(0.0, 1.0).sum().backward()
result = x.grad
## softmax of a dim
x = a((2, 3))
result = (x.softmax(1), F.softmax(x, dim=0), x.log_softmax(dim=-1))
## sigmoid tanh relu
x = a((5,))
result = (torch.sigmoid(x), torch.tanh(x), torch.relu(x), F.relu(x))
## relu at zero
x = torch.tensor([-1.0, 0.0, 1.0], requires_grad=True)
F.relu(x).sum().backward()
result = x.grad
## abs at zero
x = torch.tensor([-1.0, 0.0, 1.0], requires_grad=True)
x.abs().sum().backward()
result = x.grad
## maximum at a tie
x = torch.tensor([1.0, 2.0], requires_grad=True)
y = torch.tensor([1.0, 1.0], requires_grad=True)
torch.maximum(x, y).sum().backward()
result = (x.grad, y.grad)
## gelu leaky_relu elu
x = a((5,))
result = (F.gelu(x), F.gelu(x, approximate='tanh'), F.leaky_relu(x), F.elu(x), F.silu(x), F.softplus(x))
## logical functions
x = torch.tensor([0, 1, 2])
result = (torch.logical_not(x), torch.logical_and(x, x > 1))
## atan2 and lerp
x = a((3,))
result = (torch.atan2(x, x + 2.0), torch.lerp(x, x + 1.0, 0.25))
## log of zero and below
result = (torch.tensor([0.0, -1.0, 1.0]).log(), torch.tensor([-1.0]).sqrt())
## division by zero
result = torch.tensor([1.0, -1.0, 0.0]) / 0.0

# ---- gradients

## backward accumulates
x = a((3,)).requires_grad_()
(x * x).sum().backward()
(x * x).sum().backward()
result = x.grad
## backward twice through one graph raises
x = a((3,)).requires_grad_()
y = (x * x).sum()
y.backward()
y.backward()
result = x.grad
## backward with retain_graph
x = a((3,)).requires_grad_()
y = (x * x).sum()
y.backward(retain_graph=True)
y.backward()
result = x.grad
## backward of many without a gradient raises
x = a((3,)).requires_grad_()
(x * x).backward()
result = x.grad
## backward with a gradient
x = a((3,)).requires_grad_()
(x * x).backward(torch.tensor([1.0, 0.0, 2.0]))
result = x.grad
## backward without a graph raises
x = a((3,))
x.sum().backward()
result = x.grad
## requires_grad spreads
x = a((3,))
w = a((3,)).requires_grad_()
result = ((x * w).requires_grad, (x * x).requires_grad, (w > 0).requires_grad, w.detach().requires_grad)
## no_grad
w = a((3,)).requires_grad_()
with torch.no_grad():
    y = w * 2.0
result = (y.requires_grad, y)
## grad of what is not used is None
w = a((3,)).requires_grad_()
v = a((3,)).requires_grad_()
w.sum().backward()
result = (v.grad is None, w.grad)
## detach cuts
w = a((3,)).requires_grad_()
(w * w.detach()).sum().backward()
result = w.grad
## gradients of integers raise
torch.arange(3).requires_grad_()
result = None
## requires_grad of integers in a constructor raises
torch.tensor([1, 2], requires_grad=True)
result = None
## a result that stops requiring a gradient raises
w = a((3,)).requires_grad_()
y = w * 2.0
y.requires_grad = False
result = y
## autograd.grad
x = a((3,)).requires_grad_()
g, = torch.autograd.grad((x ** 3).sum(), [x])
result = (g, x.grad is None)
## double backward
x = a((3,)).requires_grad_()
g, = torch.autograd.grad((x ** 3).sum(), [x], create_graph=True)
h, = torch.autograd.grad((g * g).sum(), [x])
result = h
## gradient of a broadcast
x = a((3, 1)).requires_grad_()
(x * a((4,))).sum().backward()
result = x.grad
## gradient through matmul
x = a((2, 3)).requires_grad_()
w = a((3, 2)).requires_grad_()
(x @ w).pow(2).sum().backward()
result = (x.grad, w.grad)
## gradient through indexing
x = a((4, 2)).requires_grad_()
x[torch.tensor([1, 1, 3])].sum().backward()
result = x.grad
## hook
x = a((3,)).requires_grad_()
x.register_hook(lambda g: g * 2.0)
(x * x).sum().backward()
result = x.grad
## grad of a copy
x = a((3,)).requires_grad_()
y = x.clone()
(y * y).sum().backward()
result = (x.grad, y.grad_fn is None)

# ---- layers

## Linear
m = fix(nn.Linear(3, 2))
result = (m(a((4, 3))), [k for k in m.state_dict()], [p.shape for p in m.parameters()])
## Linear without bias
m = fix(nn.Linear(3, 2, bias=False))
result = (m(a((3,))), m.bias is None, list(m.state_dict()))
## a net's names
m = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.BatchNorm1d(4))
result = ([n for n, _ in m.named_parameters()], list(m.state_dict()), len(m), len(list(m.modules())))
## a module of one's own
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.b = nn.Linear(2, 2)
        self.a = nn.Linear(2, 1)
        self.w = nn.Parameter(torch.ones(2))
    def forward(self, x):
        return self.a(F.relu(self.b(x)) * self.w)
m = fix(Net())
result = (m(a((3, 2))), [n for n, _ in m.named_parameters()])
## a plain tensor in place of a parameter raises
m = nn.Linear(2, 2)
m.weight = torch.ones(2, 2)
result = None
## train and eval
m = nn.Sequential(nn.Dropout(0.5))
result = (m.training, m.eval()[0].training, m(a((2, 2))))
## Dropout of nothing and all
result = (nn.Dropout(0.0)(a((3,))), nn.Dropout(1.0)(a((3,))))
## Dropout of a wrong p raises
nn.Dropout('0.5')
result = None
## BatchNorm statistics
m = nn.BatchNorm1d(3)
y = m(a((4, 3)) + 1.0)
result = (y, m.running_mean, m.running_var, m.num_batches_tracked.item(), m.momentum, m.eps)
## BatchNorm in evaluation
m = nn.BatchNorm2d(2)
m(a((2, 2, 2, 2)))
m.eval()
result = m(a((1, 2, 2, 2)))
## LayerNorm
m = nn.LayerNorm(4)
result = (m(a((2, 4))), m.eps, list(m.state_dict()))
## GroupNorm
result = nn.GroupNorm(2, 4)(a((1, 4, 2, 2)))
## Embedding
m = fix(nn.Embedding(4, 2))
result = m(torch.tensor([[0, 3], [1, 1]]))
## Embedding with padding_idx
m = nn.Embedding(4, 2, padding_idx=1)
y = m(torch.tensor([1, 2]))
y.sum().backward()
result = (y[0], m.weight.grad, m.weight[1])
## Conv2d
m = fix(nn.Conv2d(1, 2, 3))
result = m(a((1, 1, 4, 4)))
## Conv2d strides and padding
m = fix(nn.Conv2d(2, 2, 3, stride=2, padding=1, groups=2))
result = m(a((1, 2, 5, 5)))
## Conv2d padding same
m = fix(nn.Conv2d(1, 1, 3, padding='same'))
result = m(a((1, 1, 4, 4)))
## Conv2d padding modes
result = [fix(nn.Conv2d(1, 1, 3, padding=1, padding_mode=mode))(a((1, 1, 4, 4))) for mode in ('zeros', 'reflect', 'circular', 'replicate')]
## pooling
x = a((1, 1, 4, 4))
wide = (F.max_pool2d(x, 3, stride=1, padding=1), F.avg_pool2d(x, 3, stride=1, padding=1))
result = (nn.MaxPool2d(2)(x), nn.AvgPool2d(2)(x), *wide, nn.AdaptiveAvgPool2d(1)(x))
## pad
x = a((1, 2, 2))
result = (F.pad(x, (1, 0)), F.pad(x, (1, 1, 0, 1), value=2.0), F.pad(x, (1, 1), mode='replicate'))
## interpolate
x = a((1, 1, 2, 2))
result = (F.interpolate(x, scale_factor=2), F.interpolate(x, size=(3, 3), mode='bilinear', align_corners=False))
## Flatten
result = nn.Flatten()(a((2, 3, 4))).shape
## LSTM
m = fix(nn.LSTM(2, 3))
y, (h, c) = m(a((4, 1, 2)))
result = (y, h, c, list(m.state_dict()))
## GRU of batches first
m = fix(nn.GRU(2, 3, batch_first=True))
y, h = m(a((2, 4, 2)))
result = (y, h)
## MultiheadAttention
m = fix(nn.MultiheadAttention(4, 2, batch_first=True))
y, w = m(a((1, 3, 4)), a((1, 3, 4)), a((1, 3, 4)))
result = (y, w)
## scaled_dot_product_attention
q = a((1, 2, 3, 4))
result = (F.scaled_dot_product_attention(q, q, q), F.scaled_dot_product_attention(q, q, q, is_causal=True))
## normalize and cosine
x = a((2, 3))
result = (F.normalize(x), F.normalize(x, dim=0), F.cosine_similarity(x, x + 1.0))

# ---- losses

## cross_entropy
result = F.cross_entropy(a((4, 3)), torch.tensor([0, 2, 1, 1]))
## cross_entropy ignores
result = (F.cross_entropy(a((4, 3)), torch.tensor([0, -100, 1, 1])), F.cross_entropy(a((2, 3)), torch.tensor([0, 2]), ignore_index=2))
## cross_entropy with weights
result = F.cross_entropy(a((4, 3)), torch.tensor([0, 2, 1, 1]), weight=torch.tensor([1.0, 2.0, 0.5]))
## cross_entropy smoothed
result = nn.CrossEntropyLoss(label_smoothing=0.1)(a((4, 3)), torch.tensor([0, 2, 1, 1]))
## cross_entropy of probabilities
result = F.cross_entropy(a((2, 3)), torch.tensor([[0.5, 0.5, 0.0], [0.1, 0.2, 0.7]]))
## cross_entropy without reduction
(x, y) = (a((4, 3)), torch.tensor([0, 2, 1, 1]))
result = (F.cross_entropy(x, y, reduction='none'), F.cross_entropy(x, y, reduction='sum'))
## cross_entropy of images
result = F.cross_entropy(a((1, 3, 2, 2)), torch.tensor([[[0, 2], [1, 1]]]))
## cross_entropy of a wrong label raises
result = F.cross_entropy(a((2, 3)), torch.tensor([0, 3]))
## gradient of cross_entropy
x = a((2, 3)).requires_grad_()
F.cross_entropy(x, torch.tensor([0, 2])).backward()
result = x.grad
## NLLLoss
result = nn.NLLLoss()(F.log_softmax(a((4, 3)), dim=1), torch.tensor([0, 2, 1, 1]))
## MSELoss and L1Loss
x = a((3, 2))
result = (nn.MSELoss()(x, x + 1.5), nn.L1Loss()(x, -x), F.mse_loss(x, -x, reduction='sum'), F.mse_loss(x, -x, reduction='none'))
## SmoothL1Loss and HuberLoss
x = a((5,)) * 3.0
result = (nn.SmoothL1Loss()(x, -x), nn.HuberLoss(delta=0.5)(x, -x))
## BCELoss
x = a((4,)).sigmoid()
result = (nn.BCELoss()(x, torch.tensor([0.0, 1.0, 1.0, 0.0])), nn.BCELoss()(torch.tensor([0.0, 1.0]), torch.tensor([1.0, 0.0])))
## BCEWithLogitsLoss
y = torch.tensor([0.0, 1.0, 1.0, 0.0])
result = (nn.BCEWithLogitsLoss()(a((4,)), y), F.binary_cross_entropy_with_logits(a((4,)), y, pos_weight=torch.tensor([3.0])))
## BCELoss of unequal shapes raises
result = nn.BCELoss()(torch.ones(4, 1), torch.ones(4))
## KLDivLoss
result = F.kl_div(F.log_softmax(a((2, 3)), dim=1), F.softmax(-a((2, 3)), dim=1), reduction='batchmean')

# ---- optimizers

## SGD
w = a((3,)).requires_grad_()
o = optim.SGD([w], lr=0.1)
(w * w).sum().backward()
o.step()
result = (w, list(o.param_groups[0]['params'])[0] is w)
## SGD with momentum and decay
w = a((3,)).requires_grad_()
o = optim.SGD([w], lr=0.1, momentum=0.9, weight_decay=0.01, nesterov=True)
for _ in range(3):
    o.zero_grad()
    (w * w).sum().backward()
    o.step()
result = w
## zero_grad sets None
w = a((3,)).requires_grad_()
o = optim.SGD([w], lr=0.1)
w.sum().backward()
o.zero_grad()
result = w.grad is None
## Adam
w = a((3,)).requires_grad_()
o = optim.Adam([w])
for _ in range(3):
    o.zero_grad()
    (w * w).sum().backward()
    o.step()
result = (w, o.param_groups[0]['lr'], o.defaults['betas'], o.defaults['eps'])
## Adam with decay
w = a((3,)).requires_grad_()
o = optim.Adam([w], lr=0.05, weight_decay=0.1)
for _ in range(2):
    o.zero_grad()
    (w * w).sum().backward()
    o.step()
result = w
## AdamW
w = a((3,)).requires_grad_()
o = optim.AdamW([w], lr=0.05)
for _ in range(2):
    o.zero_grad()
    (w * w).sum().backward()
    o.step()
result = (w, o.defaults['weight_decay'])
## RMSprop
w = a((3,)).requires_grad_()
o = optim.RMSprop([w])
for _ in range(2):
    o.zero_grad()
    (w * w).sum().backward()
    o.step()
result = (w, o.defaults['alpha'])
## a step without gradients
w = a((3,)).requires_grad_()
o = optim.SGD([w], lr=0.1)
o.step()
result = w
## an lr of text raises
optim.SGD([a((2,)).requires_grad_()], lr='0.1')
result = None
## groups
w = a((3,)).requires_grad_()
v = a((3,)).requires_grad_()
o = optim.SGD([{'params': [w]}, {'params': [v], 'lr': 1.0}], lr=0.1)
(w * v).sum().backward()
o.step()
result = (w, v)
## StepLR
w = a((2,)).requires_grad_()
o = optim.SGD([w], lr=1.0)
s = optim.lr_scheduler.StepLR(o, 2)
r = []
for _ in range(5):
    r.append(o.param_groups[0]['lr'])
    o.step()
    s.step()
result = r
## CosineAnnealingLR
w = a((2,)).requires_grad_()
o = optim.SGD([w], lr=1.0)
s = optim.lr_scheduler.CosineAnnealingLR(o, 4)
r = []
for _ in range(5):
    r.append(o.param_groups[0]['lr'])
    o.step()
    s.step()
result = r
## OneCycleLR
w = a((2,)).requires_grad_()
o = optim.SGD([w], lr=1.0, momentum=0.9)
s = optim.lr_scheduler.OneCycleLR(o, 0.5, total_steps=6)
r = []
for _ in range(5):
    r.append([o.param_groups[0]['lr'], o.param_groups[0]['momentum']])
    o.step()
    s.step()
result = r
## LambdaLR and get_last_lr
w = a((2,)).requires_grad_()
o = optim.SGD([w], lr=1.0)
s = optim.lr_scheduler.LambdaLR(o, lambda e: 0.5 ** e)
r = [s.get_last_lr()]
for _ in range(3):
    o.step()
    s.step()
    r.append(s.get_last_lr())
result = r
## ReduceLROnPlateau
w = a((2,)).requires_grad_()
o = optim.SGD([w], lr=1.0)
s = optim.lr_scheduler.ReduceLROnPlateau(o, patience=1)
r = []
for loss in (1.0, 0.5, 0.6, 0.7, 0.8):
    s.step(loss)
    r.append(o.param_groups[0]['lr'])
result = r
## clip_grad_norm_
w = a((3,)).requires_grad_()
(w * w).sum().backward()
n = clip_grad_norm_([w], 0.5)
result = (float(n), w.grad)
## a training loop
m = fix(nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 1)))
o = optim.SGD(m.parameters(), lr=0.1, momentum=0.9)
x, y = (a((8, 2)), a((8, 1)))
r = []
for _ in range(4):
    o.zero_grad()
    loss = F.mse_loss(m(x), y)
    loss.backward()
    o.step()
    r.append(loss.item())
result = r

# ---- data

## loader defaults
d = data.DataLoader(list(range(4)))
result = ([np.asarray(b).tolist() for b in d], len(d))
## loader batches
d = data.DataLoader(list(range(5)), batch_size=2)
result = ([np.asarray(b).tolist() for b in d], len(d), len(data.DataLoader(list(range(5)), batch_size=2, drop_last=True)))
## loader of pairs
d = data.DataLoader(data.TensorDataset(pairs(np.arange(4.0, dtype=np.float32)), pairs(np.arange(4))), batch_size=3)
result = [[np.asarray(p).tolist() for p in b] for b in d]
## is_leaf
w = a((2,)).requires_grad_()
result = (w.is_leaf, (w * 2).is_leaf, a((2,)).is_leaf)

# ---- functions and their defaults

## F.linear
result = (F.linear(a((2, 3)), a((4, 3)), a((4,))), F.linear(a((3,)), a((4, 3))))
## F.conv2d
grouped = F.conv2d(a((1, 2, 5, 5)), a((2, 1, 3, 3)), stride=2, groups=2, dilation=2)
result = (F.conv2d(a((1, 2, 4, 4)), a((3, 2, 3, 3)), a((3,)), 1, 1), grouped)
## F.conv1d
result = F.conv1d(a((1, 2, 6)), a((3, 2, 3)), stride=2)
## F.conv_transpose2d
result = F.conv_transpose2d(a((1, 2, 2, 2)), a((2, 3, 3, 3)), stride=2, padding=1)
## F.embedding
result = F.embedding(torch.tensor([0, 2]), a((3, 2)))
## F.layer_norm
result = (F.layer_norm(a((2, 4)), (4,)), F.layer_norm(a((2, 2, 2)), (2, 2)))
## F.batch_norm in evaluation
result = F.batch_norm(a((4, 2)), torch.zeros(2), torch.ones(2))
## F.batch_norm in training
m = torch.zeros(2)
v = torch.ones(2)
y = F.batch_norm(a((4, 2)), m, v, training=True)
result = (y, m, v)
## F.dropout out of training
result = (F.dropout(a((3,)), 0.9, False), F.dropout(a((3,)), training=False))
## F.nll_loss
result = F.nll_loss(F.log_softmax(a((3, 2)), 1), torch.tensor([0, 1, 1]), reduction='sum')
## F.l1_loss and smooth_l1_loss
x = a((4,)) * 3.0
result = (F.l1_loss(x, -x), F.smooth_l1_loss(x, -x, beta=0.5), F.huber_loss(x, -x))
## F.binary_cross_entropy
result = F.binary_cross_entropy(a((4,)).sigmoid(), torch.tensor([0.0, 1.0, 1.0, 0.0]), reduction='none')
## F.triplet_margin_loss
x = a((2, 3))
result = F.triplet_margin_loss(x, x + 0.5, -x)
## KLDivLoss default
result = nn.KLDivLoss()(F.log_softmax(a((2, 3)), dim=1), F.softmax(-a((2, 3)), dim=1))
## flip and roll by lists
x = a((2, 3))
result = (torch.flip(x, [0]), torch.roll(x, 1), torch.roll(x, (1, 1), (0, 1)))
## sort by position
r = a((2, 3)).sort(0, True)
result = (r.values, r.indices)
## topk of the smallest
r = a((4, 2)).topk(2, dim=0, largest=False)
result = (r.values, r.indices)
## split along a dim
x = a((2, 4))
result = ([p.shape for p in x.split(3, dim=1)], [p.shape for p in torch.chunk(x, 3, 1)])
## narrow and outer
result = (a((3, 4)).narrow(1, 1, 2), torch.outer(a((2,)), a((3,))))
## addcmul
x = a((3,))
result = torch.addcmul(x, x, x, value=0.5)
## squeeze of several
result = (a((1, 3, 1)).squeeze((0, 2)).shape, a((2, 3)).squeeze(0).shape)
## norms
x = a((2, 3))
result = (torch.norm(x, dim=0), x.norm(1), x.norm(float('inf'), 1), x.norm(dim=1, keepdim=True))
## tril below
result = (a((3, 3)).tril(-1), torch.triu(a((2, 3)), -1))
## count_nonzero
x = torch.tensor([[0, 1], [2, 0]])
result = (torch.count_nonzero(x), x.count_nonzero(dim=0))
## max of bools and ints
result = (torch.tensor([True, False]).max(), torch.tensor([3, 9, 4]).max(0).indices, torch.tensor([3, 9]).amax())
## min and max with NaN
x = torch.tensor([1.0, float('nan'), 3.0])
result = (x.max(), x.min(0).indices, x.argmax())
## gradient of min
x = a((2, 3)).requires_grad_()
x.min(0)[0].sum().backward()
result = x.grad
## gradient of sort
x = a((4,)).requires_grad_()
(x.sort().values * torch.arange(4)).sum().backward()
result = x.grad
## gradient of prod with a zero
x = torch.tensor([2.0, 0.0, 3.0], requires_grad=True)
x.prod().backward()
result = x.grad
## gradient of norm at zero
x = torch.zeros(3, requires_grad=True)
x.norm().backward()
result = x.grad
## gradient of std
x = a((4,)).requires_grad_()
x.std().backward()
result = x.grad
## gradient of where with NaN
x = torch.tensor([-1.0, 4.0], requires_grad=True)
torch.where(x > 0, x, 0.0).sqrt().sum().backward()
result = x.grad
## gradient of softmax
x = a((2, 3)).requires_grad_()
(x.softmax(1) * a((2, 3))).sum().backward()
result = x.grad
## gradient of a view
x = a((2, 3)).requires_grad_()
(x.view(-1)[2:] ** 2).sum().backward()
result = x.grad
## gradient of cat
x = a((2,)).requires_grad_()
(torch.cat([x, x * 2.0]) ** 2).sum().backward()
result = x.grad
## gradient of a half
x = a((3,)).requires_grad_()
(x.half() * 2.0).float().sum().backward()
result = x.grad
## gradient of pow
x = torch.tensor([0.0, 2.0], requires_grad=True)
(x ** 2).sum().backward()
result = x.grad
## activations' defaults
x = a((5,))
result = (nn.LeakyReLU()(x), nn.ELU()(x), nn.Softplus()(x), nn.PReLU()(x), nn.SELU()(x), nn.Mish()(x), nn.GELU()(x))
## Softmax of a dim
result = (nn.Softmax(dim=1)(a((2, 3))), nn.LogSoftmax(dim=0)(a((2, 3))))
## RNN
m = fix(nn.RNN(2, 3))
y, h = m(a((3, 1, 2)))
result = (y, h)
## RMSNorm
result = nn.RMSNorm(4)(a((2, 4)))
## InstanceNorm2d
result = nn.InstanceNorm2d(2)(a((1, 2, 2, 2)))
## BatchNorm without statistics
m = nn.BatchNorm1d(2, track_running_stats=False).eval()
result = (m(a((3, 2))), list(m.state_dict()))
## BatchNorm of momentum None
m = nn.BatchNorm1d(2, momentum=None)
m(a((3, 2)))
m(a((3, 2)) * 2.0)
result = (m.running_mean, m.running_var)
## PixelShuffle
result = nn.PixelShuffle(2)(a((1, 4, 2, 2)))
## Upsample
result = nn.Upsample(scale_factor=2, mode='nearest')(a((1, 1, 2, 2)))
## pooling with ceil_mode
result = (F.max_pool2d(a((1, 1, 5, 5)), 2, ceil_mode=True).shape, F.avg_pool2d(a((1, 1, 4, 4)), 3, 2, 1, count_include_pad=False))
## load_state_dict reports
m = nn.Linear(2, 2)
r = m.load_state_dict({'weight': torch.ones(2, 2)}, strict=False)
result = (r.missing_keys, r.unexpected_keys, m.weight)
## load_state_dict of wrong names raises
nn.Linear(2, 2).load_state_dict({'wight': torch.ones(2, 2)})
result = None
## frozen parameters
m = fix(nn.Linear(2, 2))
m.weight.requires_grad = False
m(a((3, 2))).sum().backward()
result = (m.weight.grad is None, m.bias.grad)
## requires_grad_ of a module
m = nn.Linear(2, 2).requires_grad_(False)
result = [p.requires_grad for p in m.parameters()]
## zero_grad of a module
m = fix(nn.Linear(2, 2))
m(a((3, 2))).sum().backward()
m.zero_grad()
result = [p.grad is None for p in m.parameters()]
## ModuleList and ModuleDict
l = nn.ModuleList([nn.Linear(1, 1), nn.ReLU()])
d = nn.ModuleDict({'x': nn.Linear(1, 1)})
result = (list(l.state_dict()), list(d.state_dict()), len(l), 'x' in d)
## buffers
m = nn.Module()
m.register_buffer('b', torch.ones(2))
m.register_buffer('c', torch.ones(1), persistent=False)
result = (list(m.state_dict()), [n for n, _ in m.named_buffers()], list(m.parameters()))
## shared weights
x = nn.Linear(2, 2)
m = nn.Sequential(x, x)
result = (len(list(m.parameters())), list(m.state_dict()))
## SGD's default lr
w = a((2,)).requires_grad_()
result = (optim.SGD([w]).defaults['lr'], optim.RMSprop([w]).defaults['lr'], optim.AdamW([w]).defaults['lr'])
## MultiStepLR
w = a((2,)).requires_grad_()
o = optim.SGD([w], lr=1.0)
s = optim.lr_scheduler.MultiStepLR(o, [1, 3], gamma=0.5)
r = []
for _ in range(5):
    r.append(o.param_groups[0]['lr'])
    o.step()
    s.step()
result = r
## ExponentialLR and LinearLR
w = a((2,)).requires_grad_()
o = optim.SGD([w], lr=1.0)
s = optim.lr_scheduler.ExponentialLR(o, 0.9)
p = optim.SGD([w], lr=1.0)
q = optim.lr_scheduler.LinearLR(p)
r = []
for _ in range(4):
    r.append([o.param_groups[0]['lr'], p.param_groups[0]['lr']])
    o.step()
    s.step()
    p.step()
    q.step()
result = r
## optimizer state goes round
w = a((3,)).requires_grad_()
o = optim.Adam([w], lr=0.1)
(w * w).sum().backward()
o.step()
p = optim.Adam([w], lr=0.5)
p.load_state_dict(o.state_dict())
o.zero_grad()
(w * w).sum().backward()
p.step()
result = (w, p.param_groups[0]['lr'])
## bitwise operators of integers
x = torch.arange(-4, 5)
result = (x & 3, x | 1, x ^ 5, ~x, 6 & x, x.bitwise_xor(1), torch.bitwise_not(x.to(torch.uint8)), x.int() & x)
## shifts
x = torch.arange(-4, 5)
result = (x << 2, x >> 1, 1 << x.clamp(0), x.int() << 31, x >> 70, torch.bitwise_left_shift(x, 3), x.to(torch.uint8) << 7)
## bitwise operators of truth values and in place
x = torch.arange(4)
m = x > 1
x &= 1
m ^= True
result = (x, m, m | (x == 0), ~m, True & m)
## diagonals of linalg are those of the last axes
x = a((2, 3, 4))
result = (torch.linalg.diagonal(x), torch.linalg.diagonal(x, offset=1), torch.linalg.diagonal(x, offset=-1, dim1=0, dim2=2))
## cross takes the first axis of 3
x, y, z = a((3, 3)), a((3, 3)) * 2 + 1, a((3, 2, 3))
result = [torch.cross(x, y), x.cross(y), torch.cross(x, y, dim=1), torch.linalg.cross(x, y)]
result += [torch.cross(z, z + 1), torch.linalg.cross(z, z + 1)]
## cross of another size raises
result = torch.linalg.cross(a((3, 4)), a((3, 4)))
## masked_fill has a gradient for its value
x, v = a((2, 3)).requires_grad_(), torch.tensor(0.5, requires_grad=True)
y = (x * 2).masked_fill(x > 0, v)
z = (x * 3).masked_fill_(x < 0, v * 2)
((y * y).sum() + z.sum()).backward()
result = (y, z, x.grad, v.grad)
## threshold keeps NaN and dtypes
x, n = a((4,)), torch.tensor([0, 1, 2])
x[1] = float("nan")
result = (F.threshold(x, 0.1, 5.0), F.threshold(n, 1, 7), F.threshold(x, float("nan"), 5.0))
## a small variance of gaussian_nll_loss has a gradient
x, v = a((2,)), torch.tensor([0.01, 2.0], requires_grad=True)
y = F.gaussian_nll_loss(x, x + 1, v, eps=0.25)
y.backward()
result = (y, v.grad)
## diff of order 0 ignores what it joins
x = a((3,))
result = (torch.diff(x, n=0, append=x), torch.diff(x, n=1, prepend=x))
## alpha does not promote
n, b, h = torch.tensor([1, 2], dtype=torch.int32), torch.tensor([True, False]), a((2,)).half()
k = torch.tensor([3, 5])
h2 = a((2,)).half()
h2.add_(k, alpha=0.5)
result = (torch.add(n, b, alpha=2), torch.add(h, k, alpha=0.5), torch.sub(h, k, alpha=2), h2)
## ldexp, square and logit of integers
k = torch.tensor([3, 5])
n = torch.tensor([0, 1, 3], dtype=torch.uint8)
result = (torch.ldexp(a((2,)).half(), k), torch.ldexp(k, k), torch.square(torch.tensor([True, False])), torch.logit(n))
## every NaN is unique
x = torch.tensor([1.0, float("nan"), 0.0, float("nan"), 1.0])
result = torch.unique(x, return_inverse=True, return_counts=True)
## cosine similarity broadcasts before it measures
x, y = a((2, 3)), a((3,)).requires_grad_()
z = F.cosine_similarity(x.flip(1), y, dim=-1)
z.sum().backward()
result = [F.cosine_similarity(a((3, 3)), y, dim=0), F.cosine_similarity(x, torch.tensor([0.5]), dim=-1), z, y.grad]
result += [F.cosine_similarity(x[:, None], a((3, 3)), dim=1)]
## prelu of a number
x, w = torch.tensor(-2.0, requires_grad=True), torch.tensor([0.25], requires_grad=True)
y = F.prelu(x, w)
y.backward()
result = (y, x.grad, w.grad)
## prelu of a number with several weights raises
result = F.prelu(torch.tensor(-2.0), a((3,)))
## windows of one value
made = [getattr(torch, f"{name}_window") for name in ("hann", "hamming", "blackman", "bartlett")]
result = [window(n, periodic=p) for window in made for n in (0, 1, 2, 5) for p in (True, False)]
## hamming windows with other coefficients
result = (torch.hamming_window(4, True, 0.6, 0.3), torch.hamming_window(5, False, alpha=0.2))
## batchmean of no samples
result = F.kl_div(torch.zeros(0, 3), torch.zeros(0, 3), reduction="batchmean")
## second gradient of grid_sample
x, g = a((1, 2, 3, 4)).double().requires_grad_(), (a((1, 3, 3, 2)) * 0.9).double().requires_grad_()
result = []
for padding in ("zeros", "border", "reflection"):
    for align in (True, False):
        y = F.grid_sample(x.sin(), g.sin(), padding_mode=padding, align_corners=align)
        first = torch.autograd.grad((y * y).sum(), [x, g], create_graph=True)
        result.append(torch.autograd.grad(first[0].sum() + (first[1] ** 2).sum(), [x, g]))
## grid_sample with default alignment
x, g = a((1, 1, 4, 4)), a((1, 2, 2, 2))
result = [F.grid_sample(x, g, mode=m, padding_mode="reflection", align_corners=None) for m in ("bilinear", "nearest", "bicubic")]
## unbind of nothing
result = len(torch.zeros(0, 3, requires_grad=True).unbind(0))
## unbind of a number raises
result = torch.tensor(1.0).unbind(0)
## kthvalue of 0 raises
result = torch.kthvalue(a((3,)), 0)
## divisor of 0 raises
result = F.avg_pool2d(a((1, 1, 2, 2)), 2, divisor_override=0)
## index tensors that do not broadcast raise
result = a((3, 3))[torch.tensor([0, 1]), torch.tensor([0, 1, 2])]
## broadcast_tensors of other shapes raises
result = torch.broadcast_tensors(a((3, 3)), a((2, 3)))
## roll of a number raises
result = torch.roll(torch.tensor(1.0), 1, 0)
## unique along an absent axis raises
result = torch.unique(a((3,)), dim=1)
## glu of a number raises
result = F.glu(torch.tensor(1.0))
## clip beside optimizers
result = (torch.clip(a((3,)), -0.5, 0.5), a((3,)).clip(min=0.1), optim.SGD([a((2,)).requires_grad_()], lr=0.1).param_groups[0]["lr"])
## nested parameter lists
nested = nn.ParameterList([nn.ParameterList([nn.Parameter(a((2,))), nn.Parameter(a((3,)))]), nn.Parameter(a((1,)))])
result = ([name for name, _ in nested.named_parameters()], len(nested), len(nested[0]), list(nested.state_dict()))
## ranges as indices
x = a((3, 4))
x[range(3), torch.tensor([0, 1, 2])] = 5.0
result = (x, x[range(2)], x[:, range(1, 3)])
## layers that pass device and dtype on
class Wide(nn.Linear):
    def __init__(self, inner, outer, bias=True, device=None, dtype=None):
        super().__init__(inner, outer, bias, device, dtype)
class Kernel(nn.Conv2d):
    def __init__(self, *sizes, device=None, dtype=None):
        super().__init__(*sizes, device=device, dtype=dtype)
half = torch.float16
layers = (Wide(2, 3, dtype=half), nn.Linear(2, 3, True, None, half), Kernel(1, 1, 1, dtype=half))
result = (Wide(2, 3).weight.shape[0], [fix(layer).weight for layer in layers])
## all and any of uint8
x = torch.tensor([[1, 2], [0, 0]], dtype=torch.uint8)
result = (x.all(), x.any(), torch.all(x, dim=1), torch.any(x, 0, keepdim=True), (x > 0).all())
## bincount of integer and half weights
w = torch.tensor([1, 2, 3])
result = [torch.bincount(torch.tensor([0, 1, 1]), weights=w.to(kind)) for kind in (torch.int64, torch.uint8, torch.float16, torch.float32)]
## addcmul of integers with a whole float
x = torch.tensor([1, 2])
result = (torch.addcmul(x, x + 2, x + 4, value=2.0), x.float().addcmul(x, x, value=0.5), x.clone().addcmul_(x, x, value=3.0))
## arange of an integer dtype with float bounds
bounds = ((0.5, 3.7), (0, 5, 1.5), (1.5,), (-2.5, 2.5), (5, 0.5, -1.5))
result = [torch.arange(*given, dtype=torch.int64) for given in bounds] + [torch.arange(*given) for given in bounds]
## arange with a truncated step raises
result = torch.arange(0, 1, 0.3, dtype=torch.int64)
## arange away from its end raises
result = torch.arange(5, 0)
## arange of nothing
result = (torch.arange(3, 3), torch.arange(3, 3, -1), torch.arange(0))
## gradients of logit outside
x = torch.tensor([-1.0, 0.05, 0.5, 1.5], requires_grad=True)
torch.logit(x, 0.1).sum().backward()
y = torch.tensor([-1.0, 0.0, 0.05, 0.5, 1.0, 1.5], requires_grad=True)
(torch.logit(y) * 2.0).sum().backward()
result = (x.grad, torch.logit(x, eps=0.1), torch.nan_to_num(y.grad, nan=-7.0), y.grad.isnan(), torch.logit(y).isnan())
## hardtanh with exchanged bounds raises
result = F.hardtanh(a((3,)), 1.0, -1.0)
## InstanceNorm counts no batches
result = []
for momentum in (0.1, None):
    layer = nn.InstanceNorm2d(2, track_running_stats=True, momentum=momentum)
    y = layer(a((2, 2, 3, 3)))
    result += [y, layer.num_batches_tracked, layer.running_mean, layer.running_var]
## masked_fill by a tensor
mask, value = torch.tensor([True, False]), torch.tensor(2.75, requires_grad=True)
y = a((2,)).masked_fill(mask, value)
(y * 3.0).sum().backward()
result = (y, value.grad, torch.tensor([1, 2]).masked_fill(mask, value.detach()), a((2,)).masked_fill(mask, torch.tensor(True)))
## causal attention with another mask
layer, x = fix(nn.MultiheadAttention(4, 2)), a((3, 1, 4))
mask = torch.tensor([[False, True, False]] * 3)
result = [layer(x, x, x, attn_mask=mask, is_causal=True, need_weights=need)[0] for need in (True, False)]

# ---- numbers at the edge of a dtype

## a float64 array with a float64 tensor
x = torch.zeros(2, dtype=torch.float64)
result = (x + np.array([0.1, 1e300]), x.add_(0.1) == np.array([0.1, 0.1]))
## isclose of integers and bools
byte = lambda *v: torch.tensor(v, dtype=torch.int8)
result = (torch.isclose(byte(-128, 1, 5), byte(0, 3, 5), atol=3),
          torch.isclose(byte(2, 1).to(torch.uint8), byte(1, 2).to(torch.uint8), atol=1),
          torch.isclose(torch.tensor([-2**63]), torch.tensor([0])),
          torch.allclose(torch.tensor([True]), torch.tensor([True])))
## cosine of halves and integers
half = lambda *v: torch.tensor([v], dtype=torch.float16)
result = (F.cosine_similarity(half(300.0, 300.0), half(300.0, 300.0)),
          F.cosine_similarity(torch.tensor([[100, 100]], dtype=torch.int8), torch.tensor([[1.0, 2.0]])))
## ldexp beyond the powers of two
result = torch.ldexp(torch.tensor([1e-30, 0.0, -inf, 1.0, 1e30]), torch.tensor([200, 200, -200, -140, -250]))
## halves rounded to decimals
result = (torch.round(torch.tensor([60000.0], dtype=torch.float16), decimals=1),
          torch.round(torch.tensor([1.85], dtype=torch.bfloat16), decimals=1))
## factors of integers and bools
ones = torch.ones(2, dtype=torch.bool)
result = (torch.rsub(torch.tensor([1, 2], dtype=torch.uint8), torch.tensor([1, 0]), alpha=-1),
          torch.addr(torch.ones(2, 2) > 0, ones, ones, beta=2),
          torch.rsub(torch.tensor([1]), torch.tensor([0.5], dtype=torch.float16), alpha=0.5))
## an integer to a negative power raises
torch.tensor([1, 2]) ** -1
## a tensor contains a number
result = (5 in torch.tensor([[1, 5], [2, 3]]), 2 in torch.tensor(2), torch.tensor([1, 2]) in torch.tensor([[1, 3]]))

# ---- arguments that cannot be meant

## a hook without a gradient raises
a((2,)).register_hook(lambda g: g)
## backward to no inputs raises
a((2,)).requires_grad_().sum().backward(inputs=[])
## a negative standard deviation raises
a((2,)).normal_(0.0, -1.0)
## normal values with a negative standard deviation raises
torch.normal(0.0, -1.0, (2,))
## an empty range of uniform values raises
a((2,)).uniform_(3.0, 1.0)
## to fill with None raises
a((2,)).fill_(None)
## the histogram of NaN raises
torch.histc(torch.tensor([1.0, nan]))
## a negative minlength raises
torch.bincount(torch.tensor([1]), minlength=-1)
""")

# ---- NaN, infinities, ties and bounds; ``grads(f, x, ...)`` is f(x, ...) and its gradients

EDGES = rows("""
## maximum and minimum of NaN and ties
x, y = [1.0, nan, nan, 2.0, 3.0, 0.0], [nan, 1.0, nan, 2.0, 1.0, -0.0]
result = [grads(f, torch.tensor(x), torch.tensor(y)) for f in (torch.maximum, torch.minimum)]
## max, min and median of all elements with NaN and ties
tables = ([[1.0, 2.0, 2.0], [1.0, 2.0, 1.0]], [[1.0, nan, 2.0], [nan, 1.0, 2.0]])
result = [grads(f, torch.tensor(t)) for f in (torch.max, torch.min, torch.median) for t in tables]
## activations of NaN
x = torch.tensor([-1.0, 0.0, 1.0, 6.0, nan])
result = [grads(f, x) for f in (F.relu6, F.hardtanh, F.elu, F.selu, F.celu, F.hardswish, F.hardsigmoid, F.relu, F.leaky_relu)]
## remainder and fmod
x, y = [5.0, -5.0, 5.0, -5.0, 0.0, 7.5, 6.0, 1.0], [3.0, 3.0, -3.0, -3.0, 3.0, 2.5, 3.0, 0.1]
result = [grads(f, torch.tensor(x), torch.tensor(y)) for f in (torch.remainder, torch.fmod)]
## powers of zero
x, y = torch.tensor([0.0, 0.0, 0.0, 0.0, 2.0, -2.0]), torch.tensor([0.0, 1.0, -1.0, 2.0, 0.0, 2.0])
result = [grads(torch.pow, x, y), grads(lambda y: 0 ** y, y), grads(lambda x: x ** 0, x)]
## quantile and median of rows with NaN
x = torch.tensor([[2.0, 1.0, 2.0, 1.0, 1.0], [nan, 1.0, nan, 1.0, 1.0], [1.0, 2.0, 2.0, 3.0, nan]])
result = [grads(lambda x: torch.median(x, 1)[0], x), torch.median(x, 1)[1], grads(lambda x: torch.quantile(x, 0.5, dim=1)[1:], x)]
## mode of NaN
result = torch.mode(torch.tensor([[2.0, nan, 3.0, nan, 0.0], [nan, nan, 1.0, 1.0, 2.0], [nan, nan, nan, nan, nan]]), 1)
## embedding_bag of equal vectors
index, table = torch.tensor([[0, 1, 2], [1, 0, 0]]), torch.tensor([[1.0, 2.0], [1.0, 2.0], [3.0, 0.0]])
bags = (torch.tensor([0, 1, 2, 1, 0]), torch.tensor([0, 3]))
result = [grads(lambda t: F.embedding_bag(index, t, mode="max"), table)]
result += [grads(lambda t: F.embedding_bag(bags[0], t, bags[1], mode="max"), table)]
## losses at their hinge
x, y = torch.tensor([1.0, 2.0, 0.5, 0.0]), torch.tensor([0.5, 2.0, 1.0, 0.0])
sign = torch.tensor([1.0, 1.0, -1.0, -1.0])
result = [grads(lambda x, y: F.margin_ranking_loss(x, y, sign, margin=0.5, reduction="none"), x, y)]
result += [grads(lambda x: F.hinge_embedding_loss(x, torch.tensor([-1.0, 1.0, -1.0, 0.0]), reduction="none"), x)]
x, y, z = torch.tensor([[1.0, 0.0]] * 3), torch.tensor([[0.0, 1.0], [1.0, 0.0], [0.0, 1.0]]), torch.tensor([[0.0, 2.0]] * 3)
result += [grads(lambda x, y: F.cosine_embedding_loss(x, y, torch.tensor([-1, -1, 0]), reduction="none"), x, y)]
result += [grads(lambda x, y: F.triplet_margin_loss(x, y, z, p=p, margin=m, reduction="none"), torch.zeros(3, 2), torch.ones(3, 2))
           for p, m in ((1, 1e-6), (2, 0.5857864))]
x, y = torch.zeros(2, 1), torch.ones(2, 1)
result += [grads(lambda x, y: F.triplet_margin_loss(x, y, y * 2, p=1, swap=s, eps=0.0, reduction="none"), x, y) for s in (False, True)]
## smooth l1 and huber loss of infinities
x, y = torch.tensor([1.0, 3.0, inf, -inf]), torch.tensor([1.5, 1.0, 1.0, 1.0])
result = [grads(lambda x: f(x, y, reduction="none"), x) for f in (F.smooth_l1_loss, F.huber_loss)]
## smooth l1 loss with a negative beta raises
result = F.smooth_l1_loss(a((3,)), a((3,)), beta=-1.0)
## huber loss without delta raises
result = F.huber_loss(a((3,)), a((3,)), delta=0.0)
## margin ranking loss of other dims raises
result = F.margin_ranking_loss(a((2,)), a((2, 1)), a((2,)))
## multi margin loss of one sample
x = torch.tensor([0.0, 1.0, 2.0])
result = [grads(lambda x: F.multi_margin_loss(x, torch.tensor(t), reduction=r), x) for t in (1, [1]) for r in ("mean", "none")]
## variances of gaussian_nll_loss
x, y = a((4, 3)), a((4, 3)) + 0.5
result = [grads(lambda x, v: F.gaussian_nll_loss(x, y, v), x, torch.full(shape, 0.5)) for shape in ((4, 3), (4, 1), (4,), (1, 3))]
result += [F.gaussian_nll_loss(x, y, 0.5), grads(lambda v: F.gaussian_nll_loss(x, y, v, eps=1.0), torch.full((4, 3), 0.5))]
## variance of another shape raises
result = F.gaussian_nll_loss(a((4, 3)), a((4, 3)), torch.ones(4, 2))
## variance of the last axis raises
result = F.gaussian_nll_loss(a((4, 3)), a((4, 3)), torch.ones(3))
## rot90 of one axis raises
result = torch.rot90(a((2, 2)), 1, (0, -2))
## norms of short vectors in 16 bits
x = torch.tensor([[1e-6, 1e-6], [0.0, 0.0], [3.0, 4.0]], dtype=torch.float16)
result = [part.float() for part in grads(lambda x: torch.norm(x, 2, 1), x)]
x = torch.tensor([[1.0, 0.0, -2.0], [0.0, 0.0, 0.0], [1.0, 2.0, -4.0]])
result += [grads(lambda x: torch.norm(x, p, 1), x) for p in (-1, 0.5, 1.5, 3)]
## addbmm of small integers
x, y, z = torch.ones(2, 2, 3, dtype=torch.int32), torch.ones(2, 3, 2, dtype=torch.int32), torch.ones(2, 2, dtype=torch.int32)
result = (torch.addbmm(z, x, y, alpha=2), torch.addmm(z, x[0], y[0], beta=2.0))
## a fraction of integers added raises
result = torch.add(torch.tensor([1, 2]), torch.tensor([1, 2]), alpha=0.5)
## a fraction of an outer product of integers raises
result = torch.addr(torch.ones(2, 2, dtype=torch.int64), torch.tensor([1, 2]), torch.tensor([1, 2]), beta=0.5)
## sums of bools with a factor
x = torch.tensor([True, False])
result = (torch.add(x, x, alpha=2), torch.add(x, 3, alpha=2))
## nll_loss and cross_entropy of infinite values
x = torch.tensor([[-1.0, -inf, -2.0], [-inf, -0.5, nan], [-1.0, -inf, -inf], [nan, 0.0, 1.0]])
labels, weight, p = torch.tensor([0, 1, -100, 1]), torch.tensor([1.0, 0.0, 2.0]), torch.tensor([[0.5, 0.0, 0.5]] * 4)
result = [grads(lambda x: f(x, labels, reduction=r, **how), x) for f in (F.nll_loss, F.cross_entropy) for r in ("mean", "none")
          for how in ({}, {"weight": weight})]
result += [grads(lambda x: F.cross_entropy(x, target, reduction="none", **how), x)
           for target, how in ((labels, {"label_smoothing": 0.1}), (p, {}), (p, {"weight": weight}))]
## ignore_index of probabilities raises
result = F.cross_entropy(a((2, 3)), torch.ones(2, 3), ignore_index=1)
## norm as an integer raises
result = torch.norm(a((3,)), dtype=torch.int64)
## nanmean as an integer raises
result = torch.nanmean(a((3,)), dtype=torch.int64)
## gradients of impossible alignments
labels, steps, lengths = torch.tensor([[1, 1, 1], [2, 1, 0]]), torch.tensor([4, 4]), torch.tensor([3, 2])
def loss(x, **how):
    return F.ctc_loss(torch.log_softmax(x, -1), labels, steps, lengths, reduction="none", **how)
made, grad = grads(loss, a((4, 2, 3)))
result = [*grads(lambda x: loss(x, zero_infinity=True), a((4, 2, 3))), made, grad[:, 0].isfinite().all(), grad[:, 1]]
## instance_norm of one pixel raises
result = F.instance_norm(a((2, 3, 1, 1)))
## batch_norm without statistics raises
result = F.batch_norm(a((2, 3)), None, None)
## angle of zeros
result = torch.angle(torch.tensor([-0.0, 0.0, -1.0, 2.0, nan]))
## diff with a negative number raises
result = torch.diff(a((3,)), -1)
## results that are copies
x = a((1, 4, 3, 3))
pixel = a((1, 4, 1, 1))
copies = [torch.rot90(x, 4), torch.rot90(x, 0), torch.diff(x, 0), torch.repeat_interleave(x, 1, 0), torch.diag(x[0, 0]),
          torch.cumprod(x, 0), torch.logcumsumexp(x, 0), torch.matrix_power(x[0, 0], 1), F.pixel_shuffle(x, 1), F.pixel_shuffle(pixel, 2),
          F.pixel_unshuffle(x, 1), F.pixel_unshuffle(x, 3), F.channel_shuffle(x, 1), F.channel_shuffle(x, 4), F.unfold(x, 3)]
for y in copies:
    y.add_(100.0)
result = (copies, x, pixel, torch.cartesian_prod(x[0, 0, 0]))
## hardtanh of integers
result = (F.hardtanh(torch.tensor([-3, 0, 2])), F.hardtanh(torch.tensor([-3, 0, 2], dtype=torch.int8), -2, 1))
## cdist of integers raises
result = torch.cdist(torch.tensor([[1, 2]]), torch.tensor([[1, 2]]))
""")

# ---- refused on purpose: torch broadcasts with a warning, or has what netcl has not; error and words are netcl's own

REFUSED = {
    "mse_loss of (N, 1) and (N,)": ("F.mse_loss(a((4, 1)), a((4,)))", ValueError, r"\[mse\] x and target must have the same shape"),
    "bce of (N, 1) and (N,)": (
        "F.binary_cross_entropy_with_logits(a((4, 1)), a((4,)))",
        ValueError,
        r"\[bce_with_logits\] x and target must have the same shape; .*x\.squeeze\(1\)",
    ),
    "a list of lists as an index": ("a((2, 3))[[[0, 1], [1, 0]]]", IndexError, r"\[getitem\] a list must not hold indices"),
    "padding in pairs": ("F.pad(a((2, 3)), ((1, 1), (0, 0)))", ValueError, r"\[pad\] .*written flat: padding=\(0, 0, 1, 1\)"),
    "bitwise operators of floats": ("a((3,)) & 1", TypeError, r"\[bitwise_and\] inputs must be integers or truth values"),
    "max of several dims": ("a((2, 3)).max((0, 1))", ValueError, r"\[max\] dim must be one integer or a tensor; .*amax\(x, \(0, 1\)\)"),
    "std(False)": ("a((4,)).std(False)", ValueError, r"\[std\] axis must be an integer, not a bool; .*unbiased=False"),
    "sum(True)": ("a((2, 3)).sum(True)", ValueError, r"\[sum\] axis must be an integer, not a bool"),
    "argmax(True)": ("a((2, 3)).argmax(True)", ValueError, r"\[argmax\] axis must be an integer, not a bool"),
    "var(1, False)": ("a((2, 3)).var(1, False)", TypeError, r"var\(\) takes from 1 to 2 positional arguments"),
    "addcmul of integers with a fraction": (
        "torch.addcmul(torch.tensor([1, 2]), torch.tensor([3, 4]), torch.tensor([5, 6]), value=1.5)",
        TypeError,
        r"\[addcmul\] a number must be representable in int64, got 1\.5; use floats",
    ),
    "pickled tensors": ("__import__('pickle').dumps(a((2,)))", TypeError, r"\[pickle\] a tensor cannot be pickled"),
}


def values(shape: tuple[int, ...]) -> np.ndarray:
    """Fixed values around 0, all different, in no order."""
    n = int(np.prod(shape))
    return (((np.arange(n) * 37 + 11) % 101) / 50.0 - 1.0).astype(np.float32).reshape(shape)


def grads(torch: Any, function: Callable[..., Any], *inputs: Any) -> list[Any]:
    """The result of a function and the gradients of its inputs, for gradients 1, 2, 3, ... of the result."""
    inputs = tuple(x.detach().clone().requires_grad_() for x in inputs)
    made = function(*inputs)
    made.backward(torch.arange(1, made.numel() + 1, dtype=made.dtype).reshape(made.shape))
    return [made, *(x.grad for x in inputs)]


def run(source: str, names: Mapping[str, Any], plain: Callable[[Any], Any]) -> Any:
    """The result of a snippet as plain data."""
    scope = {"nan": math.nan, "inf": math.inf, "grads": partial(grads, names["torch"]), **names}
    exec(compile(source, "<idiom>", "exec"), scope)
    return plain(scope["result"])
