"""A training kept under the whole model's names, and gone on with."""
