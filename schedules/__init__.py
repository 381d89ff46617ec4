"""The standard library of schedules: one generator per file, in the form that a user writes."""
