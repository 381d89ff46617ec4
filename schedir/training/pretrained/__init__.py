"""Hugging Face models as stages: the whole model's own code runs in each, over what it owns."""

from schedir.training.pretrained.cutting import stages_of

__all__ = ["stages_of"]
