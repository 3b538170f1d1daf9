"""Texts whose tokens are taken in one thread while another receives more."""

import threading
from types import SimpleNamespace
from typing import Any

import compress
from compress.serve.ask import Prompt
from compress.serve.choice import Choice, Piece
from compress.serve.engine_thread import Progress

PARAMS = compress.SamplingParams(max_tokens=3, ignore_eos=True)
OBSERVER: Any = SimpleNamespace(
    first_token=lambda ttft_s: None,
    later_tokens=lambda num_tokens, gap_s: None,
    generated=lambda num_tokens: None,
)


class Raced(Choice):
    """A choice that gets its last token from another thread at the moment at which `take` looks whether it is
    done."""

    last: Progress | None = None
    is_done = False
    thread: threading.Thread | None = None

    @property
    def done(self) -> bool:  # type: ignore[override]
        if self.last is not None and threading.current_thread() is threading.main_thread():
            self.thread = threading.Thread(target=self.receive, args=(self.last,))
            self.last = None
            self.thread.start()
            self.thread.join(0.2)
        return self.is_done

    @done.setter
    def done(self, value: bool) -> None:
        self.is_done = value


def test_tokens_that_come_while_others_are_taken_are_in_the_next_piece(llm: compress.LLM) -> None:
    choice = Raced(
        0,
        Prompt((5,), "%"),
        llm.continuation((5,), PARAMS),
        may_stop=False,
        eager=True,
        arrival_s=0.0,
        observer=OBSERVER,
        wake=lambda: None,
        stop=lambda choice: None,
    )
    choice.receive(Progress(1.0, (70, 71)))
    finished: Any = SimpleNamespace(reason="length")
    choice.last = Progress(2.0, (72,), finished=finished)
    pieces = list[Piece]()
    for _ in range(2):
        if (piece := choice.take()) is not None:
            pieces.append(piece)
        assert choice.thread is not None
        choice.thread.join()
    assert [token for each in pieces for token in each.tokens] == [70, 71, 72]
    assert pieces[-1].finish_reason == "length"
    assert "".join(each.text for each in pieces) == llm.tokenizer.decode([70, 71, 72])
