"""Inference with ONNX models: sessions with an interface like onnxruntime's, on OpenCL devices or NumPy."""

from netcl.onnx.session import GraphOptimizationLevel, InferenceSession, IOBinding, NodeArg, SessionOptions, get_available_providers

__all__ = ["GraphOptimizationLevel", "IOBinding", "InferenceSession", "NodeArg", "SessionOptions", "get_available_providers"]
