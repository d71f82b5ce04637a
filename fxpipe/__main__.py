"""`python -m fxpipe` is the command."""

from fxpipe.cli import main

main()
