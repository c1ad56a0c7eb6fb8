"""ONNX: export of models to other runtimes, and import of models from other frameworks."""

from netcl.io.onnx.export import export_onnx
from netcl.io.onnx.importer import OnnxModel, import_onnx

__all__ = ["OnnxModel", "export_onnx", "import_onnx"]
