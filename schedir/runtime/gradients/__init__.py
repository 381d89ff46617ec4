"""Gradients between backward and update: sums, ties, scaling, clipping, NaN and infinity."""
