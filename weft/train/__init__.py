"""The training loop and what accompanies it: data, metrics, saving, resuming, stopping."""
