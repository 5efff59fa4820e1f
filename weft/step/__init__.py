"""One training step under any plan: objective, task, step and CUDA graph."""
