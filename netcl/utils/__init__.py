"""The names of ``torch.utils``: ``netcl.utils.data``."""

from netcl.utils import data

__all__ = ["data"]
