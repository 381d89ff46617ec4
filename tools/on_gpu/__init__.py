"""What tools/gpu_hour.py tries on a GPU, and how."""
