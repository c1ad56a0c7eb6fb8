"""ONNX models at inference: sessions with the interface of onnxruntime, on OpenCL devices."""

from netcl.onnx.options import GraphOptimizationLevel, SessionOptions, get_available_providers
from netcl.onnx.session import InferenceSession, IOBinding, NodeArg

__all__ = ["GraphOptimizationLevel", "IOBinding", "InferenceSession", "NodeArg", "SessionOptions", "get_available_providers"]
