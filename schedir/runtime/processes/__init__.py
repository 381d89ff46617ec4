"""The processes: which runs which rank, their groups, their control messages, their failures."""
