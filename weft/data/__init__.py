"""Training data: documents, tokens in a memory-mapped cache, and the global order of samples."""
