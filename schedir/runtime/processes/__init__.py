"""Which process runs which rank, and what they say to each other beside the payloads."""
