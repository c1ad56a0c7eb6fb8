"""Packed weights as layers need them: the block types of GGUF, and the order in which devices hold them."""

from netcl.ops.quantized.formats import Kind, kind_of, quantize
from netcl.ops.quantized.layout import device_bytes, pack_strips, unpack_strips

__all__ = ["Kind", "device_bytes", "kind_of", "pack_strips", "quantize", "unpack_strips"]
