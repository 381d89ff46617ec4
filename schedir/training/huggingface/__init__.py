"""Hugging Face models as stages: the whole model's own code runs in each, over what it owns."""
