"""The engine that runs rows of the op table: operands, plans, generated kernels, deferred values."""
