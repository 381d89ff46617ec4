"""From a model to the stages of a schedule."""
