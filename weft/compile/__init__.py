"""torch.compile: which blocks are compiled, and what compiled blocks keep for backward."""
