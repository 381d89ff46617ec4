"""Cut Hugging Face models: every stage runs the model's own code, over what the stage owns."""
