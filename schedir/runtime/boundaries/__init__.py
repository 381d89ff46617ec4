"""The boundaries between stages, which the first call of each input signature learns."""
