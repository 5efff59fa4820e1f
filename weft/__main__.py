"""`python -m weft` is the command line."""

from weft.cli import main

main()
