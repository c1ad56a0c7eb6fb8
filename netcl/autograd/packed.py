"""Re-exports of ``netcl.ops`` for layers with packed weights (block types of GGUF, their layout on devices) and for decoding steps."""

from netcl.ops.decode import decodes_in_blocks, decodes_together, multiplies_halves
from netcl.ops.quantized.formats import kind_of, quantize
from netcl.ops.quantized.layout import STRIP_ROWS, device_bytes, pack_strips, unpack_strips

__all__ = ["STRIP_ROWS", "decodes_in_blocks", "decodes_together", "device_bytes", "kind_of",
           "multiplies_halves", "pack_strips", "quantize", "unpack_strips"]  # fmt: skip
