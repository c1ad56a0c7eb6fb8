"""How a row becomes work: operands, plans, generated kernels, deferred values. Knows no particular op."""
