"""Mixed precision: half precision for products and convolutions, float32 where range matters, loss scaling for float16 gradients."""

from netcl.amp.autocast import autocast, get_autocast_dtype, is_autocast_enabled, master_param, maybe_cast_tensor, supports_fp16
from netcl.amp.grad_scaler import GradScaler

__all__ = [
    "GradScaler", "autocast", "get_autocast_dtype", "is_autocast_enabled", "master_param", "maybe_cast_tensor", "supports_fp16",
]  # fmt: skip
