"""Lengths, tokens and workload files follow from the seed, exactly as the documented rule gives them."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from compress.errors import UsageError
from compress.validate.load.arrivals import Traffic
from compress.validate.load.lengths import LengthLaw, Lengths, draw_lengths
from compress.validate.load.sweep import file_sweep, random_sweep
from compress.validate.load.workload import RandomWorkload, draw_requests, token_digest
from compress.validate.load.workload_file import DIGEST_KEY, read_workload

SEED = 20261122
VOCAB = 128256
DIGEST = "sha256:d609c9a56adb4879c3f5e3b63f9d32f185ddafaa4f88326fbb63a3b840420071"
"""What the file `workload_512.json` states of all its prompt tokens."""


def lengths_512() -> Lengths:
    return draw_lengths(
        512, prompt=LengthLaw(256, 0.9, 16, 2048), output=LengthLaw(160, 0.8, 8, 1024), seed=SEED
    )


def test_the_documented_law_gives_the_workload_that_the_file_fixes() -> None:
    lengths = lengths_512()
    assert (sum(lengths.prompt_tokens), sum(lengths.output_tokens)) == (177432, 113360)
    requests = draw_requests(lengths, vocab_size=VOCAB, seed=SEED)
    assert requests[0].prompt[:8] == (27376, 543, 59233, 78901, 105910, 126193, 76789, 68971)
    assert token_digest(requests) == DIGEST


def test_lengths_are_lognormal_within_their_limits() -> None:
    law = LengthLaw(100, 0.5, 40, 250)
    drawn = np.array(law.draw(20_000, np.random.default_rng(1)))
    assert drawn.min() == 40
    assert drawn.max() == 250
    inner = np.log(drawn[(drawn > 40) & (drawn < 250)])
    assert abs(np.median(drawn) - 100) < 4 * 0.5 * 100 * math.sqrt(math.pi / 2 / drawn.size) + 1
    assert 0.3 < inner.std() < 0.5


def test_a_spread_of_zero_fixes_the_length() -> None:
    for median in (1, 7, 256, 1024):
        assert set(LengthLaw(median).draw(5, np.random.default_rng(0))) == {median}
        assert LengthLaw(median).longest == median


@pytest.mark.parametrize("wrong", [(0, 0.0, 0, 9), (5, 0.0, 6, 9), (5, 0.0, 1, 4), (5, -1.0, 1, 9)])
def test_limits_that_leave_no_length_are_refused(wrong: tuple[int, float, int, int]) -> None:
    with pytest.raises(UsageError, match="cannot be drawn"):
        LengthLaw(*wrong)


def test_repeats_have_the_same_lengths_and_arrivals_and_other_tokens() -> None:
    drawn = RandomWorkload(20, LengthLaw(30, 0.5, 1, 90), LengthLaw(5), 500, Traffic(4.0), seed=3)
    first, again, second = drawn.draw(0), drawn.draw(0), drawn.draw(1)
    assert first == again
    assert first.arrivals_s == second.arrivals_s
    assert [len(each.prompt) for each in first.requests] == [len(each.prompt) for each in second.requests]
    assert first.digest != second.digest
    tokens = {token for each in first.requests for token in each.prompt}
    assert min(tokens) >= 10
    assert max(tokens) < 490


def test_a_common_prefix_is_shared_by_all_and_never_a_whole_prompt() -> None:
    lengths = Lengths((20, 8, 30), (1, 1, 1))
    long, short, other = draw_requests(lengths, vocab_size=900, seed=0, prefix_tokens=12)
    assert long.prompt[:12] == other.prompt[:12]
    assert long.prompt[12:] != other.prompt[12:20]
    assert short.prompt[:7] == long.prompt[:7]
    assert len(short.prompt) == 8


def test_a_vocabulary_that_is_too_small_is_refused() -> None:
    with pytest.raises(UsageError, match="vocabulary of more than 20"):
        draw_requests(Lengths((1,), (1,)), vocab_size=20, seed=0)


def workload_document(name: str, lengths: Lengths, *, vocab_size: int, seed: int) -> dict[str, Any]:
    requests = draw_requests(lengths, vocab_size=vocab_size, seed=seed)
    return {
        "name": name,
        "seed": seed,
        "vocab": vocab_size,
        DIGEST_KEY: token_digest(requests).removeprefix("sha256:"),
        "requests": [
            {"prompt_tokens": num_prompt, "output_tokens": num_output}
            for num_prompt, num_output in zip(lengths.prompt_tokens, lengths.output_tokens, strict=True)
        ],
    }


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "workload.json"
    lengths = Lengths((5, 9, 3), (2, 4, 1))
    path.write_text(json.dumps(workload_document("small", lengths, vocab_size=100, seed=5)))
    return path


def changed(path: Path, **values: Any) -> Path:
    document = json.loads(path.read_text()) | values
    path.write_text(json.dumps({name: value for name, value in document.items() if value is not None}))
    return path


def test_a_workload_file_gives_its_requests_back(file: Path) -> None:
    workload = read_workload(file, traffic=Traffic(max_concurrency=2))
    assert [(len(each.prompt), each.output_tokens) for each in workload.requests] == [(5, 2), (9, 4), (3, 1)]
    assert workload.digest.endswith(json.loads(file.read_text())[DIGEST_KEY])
    assert (workload.name, workload.mode, workload.longest) == ("small", "closed", 13)
    assert len(workload.cut(2).requests) == 2


def test_a_file_with_arrivals_keeps_them(file: Path) -> None:
    rows = json.loads(file.read_text())["requests"]
    changed(
        file, requests=[row | {"arrival_s": time_s} for row, time_s in zip(rows, (0, 0.5, 2), strict=True)]
    )
    sweep = file_sweep(file, [Traffic()])
    workload = sweep.loads[0](0)
    assert (workload.mode, workload.arrivals_s) == ("trace", (0.0, 0.5, 2.0))
    assert workload.cut(2).arrivals_s == (0.0, 0.5)
    with pytest.raises(UsageError, match="arrivals of their own"):
        file_sweep(file, [Traffic(2.0)])


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"seed": 6}, "digest"),
        ({DIGEST_KEY: None}, "no field"),
        ({"requests": []}, "0 requests"),
        ({"requests": [{"prompt_tokens": 0, "output_tokens": 1}]}, "prompt_tokens = 0"),
        ({"requests": [{"prompt_tokens": 5}]}, "no field 'output_tokens'"),
        ({"vocab": "many"}, "vocab"),
    ],
)
def test_a_file_that_is_no_workload_is_refused_by_one_sentence(
    file: Path, values: dict[str, Any], message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        read_workload(changed(file, **values), traffic=Traffic())


def test_a_file_that_is_not_there_or_not_json_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot be read"):
        read_workload(tmp_path / "none.json", traffic=Traffic())
    (tmp_path / "bad.json").write_text("{")
    with pytest.raises(UsageError, match="is not JSON"):
        read_workload(tmp_path / "bad.json", traffic=Traffic())


def test_a_sweep_serves_the_same_requests_at_every_rate() -> None:
    sweep = random_sweep(
        [Traffic(1.0), Traffic(8.0)],
        num_requests=6,
        prompt=LengthLaw(10, 0.5, 1, 40),
        output=LengthLaw(3),
        vocab_size=300,
        seed=1,
    )
    slow, fast = (load(0) for load in sweep.loads)
    assert slow.requests == fast.requests
    assert slow.arrivals_s is not None
    assert fast.arrivals_s == pytest.approx([each / 8 for each in slow.arrivals_s])
    assert sweep.longest == slow.longest
    warm = sweep.warmup(2)
    assert warm is not None
    assert len(warm.requests) == 2
    assert warm.requests[0].prompt != slow.requests[0].prompt
    assert sweep.warmup(0) is None
