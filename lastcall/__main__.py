"""`python -m lastcall`, where the program's folder is not on the path."""

from lastcall.cli import main

main()
