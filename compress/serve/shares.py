"""Fair shares of a limited resource: nobody can take so much that nothing is left for others.

A client may hold as much as is free: dynamic thresholds (Choudhury and Hahne, 1998). One client alone gets
half of the whole, two get a third each, and a client that holds nothing always finds something free.
"""

from collections import Counter


class Shares:
    """A resource of a fixed size and who holds how much of it. Clients that hold nothing take no memory."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._held: Counter[str] = Counter()
        self._total = 0

    @property
    def total(self) -> int:
        """How much all clients hold."""
        return self._total

    def allows(self, client: str, amount: int) -> bool:
        """Return whether a client may take that much."""
        return self._held.get(client, 0) + amount <= self._size - self._total

    def take(self, client: str, amount: int = 1) -> bool:
        """Give a client that much, if it may have it; return whether it got it."""
        if not self.allows(client, amount):
            return False
        self._held[client] += amount
        self._total += amount
        return True

    def give_back(self, client: str, amount: int = 1) -> None:
        """Take back what a client was given."""
        self._total -= amount
        self._held[client] -= amount
        if self._held[client] <= 0:
            del self._held[client]
