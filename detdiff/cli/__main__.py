"""``python -m detdiff.cli``."""

from . import main

main()
