"""Backends that store tensor bytes and copy them: one module for NumPy, one for OpenCL."""
