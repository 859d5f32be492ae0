"""`python -m windlass`."""

from windlass.cli import main

main()
