"""An engine without a model: every step gives each running request its next token, which is its position."""

import threading
import time
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch

from compress.errors import UsageError
from compress.runtime.request import EngineCounts, Finished, Request


@dataclass
class ScriptedEngine:
    """Stands in for `Engine` where only its queue and its steps matter. `gate` holds up every step while it
    is not set; `fails_at` is the step that raises.
    """

    max_batch_size: int = 2
    step_s: float = 0.0
    fails_at: int | None = None
    order: list[str] = field(default_factory=list)
    threads: set[str] = field(default_factory=set)
    num_steps: int = 0

    def __post_init__(self) -> None:
        self.config = SimpleNamespace(max_batch_size=self.max_batch_size)
        self.device = torch.device("cpu")
        self.gate = threading.Event()
        self.gate.set()
        self.requests: dict[str, Request] = {}
        self.tokens: dict[str, list[int]] = {}

    @property
    def counts(self) -> EngineCounts:
        num = len(self.requests)
        return EngineCounts(num, 0, 1000, 10 * num, num, 0, 0, 0, 0, 0, 0)

    @property
    def has_work(self) -> bool:
        return bool(self.requests)

    def add(self, request: Request) -> None:
        self._note()
        if request.prompt == (666,):
            raise UsageError("this prompt is refused.")
        self.requests[request.id] = request
        self.tokens[request.id] = []
        self.order.append(request.id)

    def cancel(self, request_id: str) -> Finished:
        self._note()
        return self._finish(request_id, "cancelled")

    def tokens_of(self, request_id: str, *, start: int = 0) -> list[int]:
        return self.tokens[request_id][start:]

    def step(self) -> list[Finished]:
        self._note()
        self.gate.wait()
        time.sleep(self.step_s)
        self.num_steps += 1
        if self.num_steps == self.fails_at:
            raise RuntimeError("the device fell off")
        finished = []
        for request_id, request in list(self.requests.items()):
            self.tokens[request_id].append(len(self.tokens[request_id]))
            if len(self.tokens[request_id]) == request.params.max_tokens:
                finished.append(self._finish(request_id, "length"))
        return finished

    def _finish(self, request_id: str, reason: Any) -> Finished:
        request = self.requests.pop(request_id)
        tokens = tuple(self.tokens.pop(request_id))
        return Finished(request_id, request.prompt, tokens, reason, 0.0, (0.0,) * len(tokens))

    def _note(self) -> None:
        self.threads.add(threading.current_thread().name)
