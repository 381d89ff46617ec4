"""Checkpoints: save a training under the whole model's names, and load it again."""
