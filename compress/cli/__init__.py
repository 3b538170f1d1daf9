"""The command line: one command a file, registered in `app`. Only this package prints and looks at the
terminal.
"""
