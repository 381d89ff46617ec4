"""What travels between stages, found on fake tensors and agreed on by all ranks."""
