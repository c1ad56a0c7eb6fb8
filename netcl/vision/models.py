"""``torchvision.models`` by their names. Weights are not downloaded: load a state dict of torchvision with ``netcl.load``."""

from netcl.nn import ResNet, VisionTransformer, resnet18, resnet34, resnet50, resnet101, resnet152

__all__ = ["ResNet", "VisionTransformer", "resnet18", "resnet34", "resnet50", "resnet101", "resnet152"]
