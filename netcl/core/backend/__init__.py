"""Backends that store and copy tensors, on NumPy and on OpenCL, and the handling of fork, interrupts and exit."""
