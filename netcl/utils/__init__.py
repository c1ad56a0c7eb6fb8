"""torch.utils by its names: ``netcl.utils.data``."""

from netcl.utils import data

__all__ = ["data"]
