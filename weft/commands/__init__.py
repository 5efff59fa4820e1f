"""The command line: one file per command, and the output on the terminal."""

PROMPT = "def "  # the prompt of samples if no other is given
