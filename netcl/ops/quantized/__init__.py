"""Products with weights that stay packed in the blocks of GGUF."""
