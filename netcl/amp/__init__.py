"""Mixed precision: halves where they pay, float32 where it matters, and gradients scaled so that float16 can hold them."""

from netcl.amp.autocast import autocast, get_autocast_dtype, is_autocast_enabled, master_param, maybe_cast_tensor, supports_fp16

__all__ = ["autocast", "get_autocast_dtype", "is_autocast_enabled", "master_param", "maybe_cast_tensor", "supports_fp16"]
