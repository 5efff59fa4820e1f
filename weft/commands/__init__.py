"""The command line: one file per command, and what the terminal shows."""
