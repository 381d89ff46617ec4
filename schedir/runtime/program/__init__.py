"""The list of a rank, compiled into bound calls and run."""
