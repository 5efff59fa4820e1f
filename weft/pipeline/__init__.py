"""The `pipe` axis at run time: stages, the messages between them, and what runs a schedule's lists."""
