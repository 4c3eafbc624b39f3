"""`python -m tk_core`, which is `tk`."""

from tk_core.cli import main

main()
