"""torch.compile: which blocks are compiled, and which activations compiled blocks save for backward."""
