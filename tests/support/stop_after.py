"""A stop signal that comes at a boundary of one's choice."""

import signal


class StopAfter:
    """Asks to stop at the boundary after `num` others."""

    def __init__(self, num: int) -> None:
        self._left = num

    def __call__(self) -> int | None:
        self._left -= 1
        return signal.SIGTERM if self._left < 0 else None
