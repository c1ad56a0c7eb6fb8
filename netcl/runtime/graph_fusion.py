"""The public name of folding batch norms into layers, which :mod:`netcl.replay` defines."""

from netcl.replay.fold_batchnorm import fuse_graph

__all__ = ["fuse_graph"]
