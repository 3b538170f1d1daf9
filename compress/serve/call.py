"""One request on its way through the server: its texts, what is known of them so far, and its end."""

import asyncio
import secrets
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from compress.data.token_text import TokenTexts
from compress.llm import LLM
from compress.runtime.request import Request
from compress.serve.ask import Ask
from compress.serve.body_fields import MAX_SEED
from compress.serve.choice import Choice, Piece
from compress.serve.endpoint import Endpoint, joined
from compress.serve.engine_thread import EngineThread, Job
from compress.serve.metrics import Metrics


class Call:
    """The texts of one request. It belongs to the event loop.

    `left` is set when its client has gone; `wait` then returns as it does for new tokens.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        ask: Ask,
        *,
        client: str,
        arrival_s: float,
        deadline_s: float | None,
        llm: LLM,
        thread: EngineThread,
        metrics: Metrics,
        texts: TokenTexts,
        model_name: str,
    ) -> None:
        self.endpoint = endpoint
        self.ask = ask
        self.client = client
        self.arrival_s = arrival_s
        self.id = f"{endpoint.id_prefix}-{secrets.token_hex(12)}"
        self.created = int(time.time())
        self.model_name = model_name
        self.left = False
        self._thread = thread
        self._metrics = metrics
        self._event = asyncio.Event()
        self._pieces: dict[Choice, list[Piece]] = {}
        self.choices = [self._choice(idx, llm) for idx in range(ask.num_choices)]
        self._writers = [endpoint.writer(ask, each, texts) for each in self.choices]
        self._opened = [False] * len(self.choices)
        self._jobs = [job for each in self.choices if (job := self._job(each, deadline_s)) is not None]
        self._deadline_s = deadline_s
        self._timer: asyncio.TimerHandle | None = None

    @property
    def done(self) -> bool:
        """Whether the engine has no more of its texts."""
        return all(each.done for each in self.choices)

    @property
    def error(self) -> Exception | None:
        """The error of the first text that has one."""
        return next((each.error for each in self.choices if each.error is not None), None)

    def submit(self) -> None:
        """Queue the texts, and cancel those that have not ended at their deadline.

        Raises:
            QueueFull: there is no place for them.
            EnvironmentUnfit: the engine has stopped.
        """
        self._thread.submit(self._jobs)
        if self._deadline_s is not None:
            left_s = self._deadline_s - time.perf_counter()
            self._timer = asyncio.get_running_loop().call_later(max(0.0, left_s), self._cancel_open)
        params = self.ask.params
        self._metrics.asked(n=self.ask.n, max_tokens=0 if params is None else params.max_tokens)

    def leave(self) -> None:
        """Note that the client has gone, and wake the one who serves it."""
        self.left = True
        self._event.set()

    async def wait(self) -> None:
        """Wait for new tokens, the end of a text, or the client's leave."""
        await self._event.wait()
        self._event.clear()

    async def settle(self) -> None:
        """Cancel what has not ended, wait for the engine to have freed its blocks, and count every text."""
        if self._timer is not None:
            self._timer.cancel()
        self._cancel_open()
        while not self.done:
            await self.wait()
        for each in self.choices:
            each.take()
            self._metrics.ended(each)

    def poll(self) -> list[tuple[Choice, Piece]]:
        """Return the new pieces of all texts."""
        return [(each, piece) for each in self.choices if (piece := each.take()) is not None]

    def keep(self) -> None:
        """Take the new pieces, and keep them for `answer`."""
        for choice, piece in self.poll():
            self._pieces.setdefault(choice, []).append(piece)

    def chunks(self) -> list[dict[str, Any]]:
        """Return the new pieces as chunks of a stream."""
        found = []
        for choice, piece in self.poll():
            writer = self._writers[choice.index]
            opening = None if self._opened[choice.index] else writer.opening()
            self._opened[choice.index] = True
            if opening is not None:
                found.append(self._chunk([opening]))
            found.append(self._chunk([writer.delta(piece)]))
        return found

    def usage_chunk(self) -> dict[str, Any]:
        """Return the chunk that ends a stream with the usage."""
        return {**self._chunk([]), "usage": self.usage()}

    def answer(self) -> dict[str, Any]:
        """Return the whole answer, once all texts have ended."""
        choices = [
            writer.whole(joined(self._pieces.get(choice, [])))
            for choice, writer in zip(self.choices, self._writers, strict=True)
        ]
        return {**self._head(self.endpoint.kind), "choices": choices, "usage": self.usage()}

    def usage(self) -> dict[str, Any]:
        """Return how many tokens were read and generated; a prompt counts once, however often continued."""
        prompt_tokens = self.ask.num_prompt_tokens
        completion_tokens = sum(each.num_tokens for each in self.choices)
        return {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": completion_tokens,
            "total_tokens": prompt_tokens + completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
        }

    @property
    def cached_tokens(self) -> int:
        """Prompt tokens that came from the prefix cache, of the first continuation of each prompt."""
        finished = [each.finished for each in self.choices[:: self.ask.n]]
        return sum(each.cached_tokens for each in finished if each is not None)

    def log_record(self) -> dict[str, Any]:
        """Return the record of the request for the log."""
        firsts = [each.first_s - self.arrival_s for each in self.choices if each.first_s is not None]
        tpots = [each.tpot_s for each in self.choices if each.tpot_s is not None]
        steps = sum(each.num_steps for each in self.choices)
        reasons = sorted({each.finish_reason or "abort" for each in self.choices})
        return {
            "id": self.id,
            "client": self.client,
            "stream": self.ask.stream,
            "choices": len(self.choices),
            "ttft_ms": _ms(min(firsts, default=None)),
            "tpot_ms": _ms(sum(tpots) / len(tpots) if tpots else None),
            "total_ms": _ms(time.perf_counter() - self.arrival_s),
            "prompt_tokens": self.ask.num_prompt_tokens,
            "completion_tokens": sum(each.num_tokens for each in self.choices),
            "cached_tokens": self.cached_tokens,
            "batch_size": round(sum(each.batch_sizes for each in self.choices) / steps, 2) if steps else 0,
            "reason": ",".join(reasons),
            "disconnected": self.left,
        }

    def _cancel_open(self) -> None:
        """Cancel the texts that have not ended. Those that wait end at once, the others after the step."""
        open_jobs = [each.job for each in self.choices if each.job is not None and not each.done]
        never_ran = self._thread.cancel(open_jobs)
        for each in self.choices:
            if each.job in never_ran:
                each.abort()

    def _head(self, kind: str) -> dict[str, Any]:
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model_name}

    def _chunk(self, choices: Sequence[dict[str, Any]]) -> dict[str, Any]:
        usage: dict[str, Any] = {"usage": None} if self.ask.include_usage else {}
        return {**self._head(self.endpoint.chunk_kind), "choices": list(choices), **usage}

    def _choice(self, index: int, llm: LLM) -> Choice:
        prompt = self.ask.prompts[index // self.ask.n]
        params = self.ask.params
        continuation = None if params is None else llm.continuation(prompt.tokens, params)
        return Choice(
            index,
            prompt,
            continuation,
            may_stop=params is not None and llm.may_stop(params),
            eager=self.ask.stream,
            arrival_s=self.arrival_s,
            observer=self._metrics,
            wake=self._event.set,
            stop=self._stop,
        )

    def _stop(self, choice: Choice) -> None:
        if choice.job is not None:
            self._thread.cancel([choice.job])

    def _job(self, choice: Choice, deadline_s: float | None) -> Job | None:
        """Return the job of a choice, and None where the engine has nothing to do for it."""
        ask = self.ask
        if ask.params is None and ask.num_scored_top is None:
            choice.done = True
            return None
        request = None
        if ask.params is not None:
            seed = (ask.params.seed + choice.index % ask.n) & MAX_SEED
            params = replace(ask.params, seed=seed)
            group = self.id if ask.n > 1 else None
            request = Request(f"{self.id}-{choice.index}", choice.prompt.tokens, params, 0, deadline_s, group)
        choice.job = Job(
            self.client,
            choice.prompt.tokens,
            request,
            choice.receive,
            priority=ask.priority,
            num_scored_top=ask.num_scored_top,
        )
        return choice.job


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds * 1e3, 3)
