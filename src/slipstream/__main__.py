"""python -m slipstream: the command line."""

from slipstream.cli import main

main()
