"""From a loader to the batches of every step."""
