"""``python -m stager.cli``."""

from stager.cli import main

main(prog_name="stager")
