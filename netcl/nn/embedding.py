"""Embeddings: vectors looked up by number."""

from __future__ import annotations

import netcl.autograd as ag
from netcl.core.errors import ShapeError, message
from netcl.core.tensor import Tensor
from netcl.nn import init
from netcl.nn.module import Module
from netcl.nn.parameter import empty


class Embedding(Module):
    """A table of vectors: ``y = weight[index]``.

    - **num_embeddings**: how many vectors there are.
    - **embedding_dim**: their length.
    - **padding_idx**: a number whose vector starts as zeros and gets no gradient.

    Shapes: ``index`` of any shape and any dtype of integers, ``y`` ``(*index.shape, embedding_dim)``, ``weight``
    ``(num_embeddings, embedding_dim)``, which starts as standard normal values.

    >>> from netcl import nn
    >>> nn.Embedding(10, 4)([[1, 2, 3]]).shape
    (1, 3, 4)
    """

    def __init__(self, num_embeddings: int, embedding_dim: int, padding_idx: int | None = None):
        super().__init__()
        if padding_idx is not None and not -num_embeddings <= padding_idx < num_embeddings:
            what = "padding_idx is not in the table"
            raise ShapeError(message("Embedding", what, padding_idx=padding_idx, num_embeddings=num_embeddings))
        self.num_embeddings, self.embedding_dim = num_embeddings, embedding_dim
        self.padding_idx = None if padding_idx is None else padding_idx % num_embeddings
        self.weight = empty((num_embeddings, embedding_dim))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Start values anew."""
        init.normal_(self.weight)
        if self.padding_idx is not None:
            values = self.weight.to_host()
            values[self.padding_idx] = 0
            self.weight.write(values)

    def forward(self, index: Tensor) -> Tensor:
        return ag.embedding(index, self.weight, padding_idx=self.padding_idx)
