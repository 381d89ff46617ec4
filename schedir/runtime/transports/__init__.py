"""Moves tensors from rank to rank: over gloo, over NCCL, or within one process."""
