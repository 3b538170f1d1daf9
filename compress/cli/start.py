"""The entry point of the process: it is ready for SIGTERM before the command line is imported."""

from compress.cli import signals


def main() -> int:
    """Run the command line and return its exit code; a SIGTERM during the imports ends it in order."""
    signals.remember()
    from compress.cli import app

    return app.main()
