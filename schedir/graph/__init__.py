"""A schedule compiled: its values, what waits for what, when it all happens, what is alive."""
