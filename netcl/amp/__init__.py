"""Mixed precision: halves where they pay, float32 where it matters, and losses scaled so that float16 can hold the gradients."""

from netcl.amp.autocast import autocast, get_autocast_dtype, is_autocast_enabled, master_param, maybe_cast_tensor, supports_fp16
from netcl.amp.grad_scaler import GradScaler

__all__ = [
    "GradScaler", "autocast", "get_autocast_dtype", "is_autocast_enabled", "master_param", "maybe_cast_tensor", "supports_fp16",
]  # fmt: skip
