"""Which process runs which rank, and the messages between them beside the payloads."""
