"""What travels between stages, learned by the first call of each input signature."""
