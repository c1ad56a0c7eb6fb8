"""The part of ``torch.utils`` that netcl has: ``netcl.utils.data``."""

from netcl.utils import data

__all__ = ["data"]
