"""A rank's list as a program: compiled to bound calls, announced to the other ranks, and run."""
