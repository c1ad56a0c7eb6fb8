"""``torchvision.models`` by their names."""
from netcl.vision.models import inception, mobile, plain, residual, transformers
from netcl.vision.models.blocks import ARCHITECTURES
