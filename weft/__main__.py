"""`python -m weft` is the command line."""

from weft.commands.app import main

main()
