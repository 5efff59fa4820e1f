"""The command line: one file per command, and the output on the terminal."""
