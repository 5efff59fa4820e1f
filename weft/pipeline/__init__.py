"""The `pipe` axis at run time: stages, the messages between them, and the code that runs a schedule's lists."""
