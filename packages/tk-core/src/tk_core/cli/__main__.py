"""`python -m tk_core.cli`, which is `tk`."""

from tk_core.cli import main

main()
