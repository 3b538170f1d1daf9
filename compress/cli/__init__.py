"""The command line: one command per file, registered in `app`. Only this package prints, and only it knows
that there is a terminal.
"""
