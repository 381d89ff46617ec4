"""Cut a model into the stages of a schedule."""
