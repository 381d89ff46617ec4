"""A rank's list, compiled into operations, opened with the other ranks and run."""
