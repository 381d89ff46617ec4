"""How tensors get from rank to rank: one module for each way."""
