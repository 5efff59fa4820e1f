"""Training data: documents, their tokens in a memory-mapped cache, images, and the global order of samples."""
