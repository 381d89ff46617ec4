"""The standard library of schedules, one generator per file, of the form that a user writes."""
