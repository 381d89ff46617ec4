"""What becomes of gradients before a step: sums, ties, clipping; and copies that stay equal."""
