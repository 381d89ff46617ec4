"""schedir inside the training loops of others."""
