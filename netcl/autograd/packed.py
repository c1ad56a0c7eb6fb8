"""The names that layers with packed weights need: the block types of GGUF and their layout on devices."""

from netcl.ops.quantized.formats import Kind, kind_of, quantize
from netcl.ops.quantized.layout import STRIP_ROWS, device_bytes, pack_strips, unpack_strips

__all__ = ["STRIP_ROWS", "Kind", "device_bytes", "kind_of", "pack_strips", "quantize", "unpack_strips"]
