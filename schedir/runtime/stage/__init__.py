"""One stage: its activations, weight versions, buffers, split backward and seeds."""
