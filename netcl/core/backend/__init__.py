"""Transports: how a device holds bytes. One module for NumPy, one for OpenCL."""
