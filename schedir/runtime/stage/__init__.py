"""One stage: its cells, weight versions, statistics, split backward and seeds."""
