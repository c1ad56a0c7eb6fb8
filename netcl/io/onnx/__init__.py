"""ONNX: models out to other runtimes, and in from other frameworks."""

from netcl.io.onnx.export import export_onnx
from netcl.io.onnx.importer import OnnxModel, import_onnx

__all__ = ["OnnxModel", "export_onnx", "import_onnx"]
