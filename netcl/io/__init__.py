"""Reading and writing files: models, checkpoints, ONNX, and state dicts of netcl, NumPy, safetensors and PyTorch.

Nothing is ever unpickled. Files are checked before objects are changed. A file that is damaged, of another format, too new, or does not fit
its target raises with the reason. Saving to a path replaces an older file only once the new one is completely on disk.
"""

from netcl.io.archive import FileError
from netcl.io.checkpoint import Checkpoint, checkpoints, latest, latest_whole, load_checkpoint, run_of, save_checkpoint
from netcl.io.model import load_model, read_notes, save_model
from netcl.io.onnx import export_onnx, import_onnx
from netcl.io.state import load, load_params, load_safetensors, save, save_params, save_safetensors
from netcl.io.torch_format import load_torch, save_torch

__all__ = [
    "Checkpoint", "FileError", "checkpoints", "export_onnx", "import_onnx", "latest", "latest_whole", "load", "load_checkpoint",
    "load_model", "load_params", "load_safetensors", "load_torch", "read_notes", "run_of", "save", "save_checkpoint", "save_model",
    "save_params", "save_safetensors", "save_torch",
]  # fmt: skip
