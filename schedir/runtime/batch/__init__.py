"""From a batch to microbatches, and from their losses to the loss."""
