"""`python -m weft` is the command line."""

from weft.commands.main import run

run()
