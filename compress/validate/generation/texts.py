"""Texts of source and candidate, side by side: both continue the same prompts, greedily and sampled.

Sampled texts use one seed a prompt, and noise that is a function of seed, position and token
(`sampler.py`), so both models draw with the same luck, and texts part where the models differ.

    common tokens     tokens before the first difference; all of them where the texts are the same
    repeated 4-grams  share of 4-grams of a text that it had before
    length            tokens up to a stop string, the end of the sequence, or the most that were asked for
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from compress.data.text_files import json_rows, text_lines
from compress.errors import UsageError
from compress.runtime.request import SamplingParams
from compress.validate.acceptance import repeated_4grams
from compress.validate.stats import Estimate, mean_estimate, quantiles
from compress.validate.tasks.task import SIDES
from compress.validate.tasks.text_model import Continued, TextModel

CURVE_POINTS = 64


@dataclass(frozen=True)
class Example:
    """One prompt and what both models made of it; `common` is the beginning that the texts share."""

    prompt: str
    common: str
    source: str
    candidate: str
    position: int | None


@dataclass(frozen=True)
class GenerationRow:
    """One way of choosing tokens. `shift` is candidate - source, paired by prompt; `same_frac` has, for
    each of `same_tokens`, the share of prompts whose texts are still the same after so many tokens."""

    mode: str
    num_prompts: int
    num_same: int
    common_p10: float
    common_p50: float
    common_p90: float
    same_tokens: tuple[int, ...]
    same_frac: tuple[float, ...]
    length_source: float
    length_candidate: float
    length_shift: Estimate
    repeated_source: float
    repeated_candidate: float
    repeated_shift: Estimate
    ended_source: float
    ended_candidate: float
    examples: tuple[Example, ...]

    def as_json(self) -> dict[str, Any]:
        """Return the row as plain JSON values."""
        return asdict(self)


def read_prompts(path: Path, num: int) -> list[str]:
    """Return the first prompts of a file: of .jsonl (packed or not) the key `prompt` of each row, or the
    first of its `turns`; of other files each line.

    Raises:
        UsageError: there is no such file, a row has no prompt, or fewer than two prompts are there.
    """
    if not path.is_file():
        raise UsageError(f"generation: {path} is not a file of prompts.")
    found: list[str] = []
    if ".jsonl" in path.suffixes:
        for line, row in json_rows(path):
            turns = row.get("turns")
            prompt = row.get("prompt", turns[0] if isinstance(turns, list) and turns else None)
            if not isinstance(prompt, str) or not prompt:
                raise UsageError(
                    f"{path}:{line}: a row needs a `prompt`, a text, or `turns`, a list of texts."
                )
            found.append(prompt)
            if len(found) == num:
                break
    else:
        lines = (line.strip("\n") for line in text_lines(path))
        found = [line for line in lines if line.strip()][:num]
    if len(found) < 2:
        raise UsageError(f"{path}: two prompts are needed at least, to state how sure a difference is.")
    return found


def compare_texts(
    models: Mapping[str, TextModel],
    prompts: Sequence[str],
    params: Mapping[str, SamplingParams],
    *,
    num_shown: int,
    chat: bool = False,
) -> list[GenerationRow]:
    """Return one row for each way of choosing tokens, by its name; `seed` of the parameters is that of the
    first prompt, and one more each for the next ones.

    Raises:
        UsageError: `chat`, and the model has no chat template.
    """
    rows = []
    for mode, one in params.items():
        texts = {}
        for side in SIDES:
            model = models[side]
            asked = (
                [model.render([{"role": "user", "content": each}]) for each in prompts] if chat else prompts
            )
            texts[side] = model.generate(asked, _with_seeds(one, len(prompts)))
        rows.append(_row(mode, prompts, texts["source"], texts["candidate"], num_shown))
    return rows


def first_difference(one: Sequence[int], other: Sequence[int]) -> int | None:
    """Return the index of the first token in which two texts differ (the end of the shorter one, where it
    begins the longer one); None where they are the same."""
    for idx, (a, b) in enumerate(zip(one, other, strict=False)):
        if a != b:
            return idx
    return None if len(one) == len(other) else min(len(one), len(other))


def _with_seeds(params: SamplingParams, num: int) -> list[SamplingParams]:
    values = asdict(params)
    return [SamplingParams(**{**values, "seed": params.seed + idx}) for idx in range(num)]


def _row(
    mode: str,
    prompts: Sequence[str],
    source: Sequence[Continued],
    candidate: Sequence[Continued],
    num_shown: int,
) -> GenerationRow:
    pairs = list(zip(source, candidate, strict=True))
    places = [first_difference(a.tokens, b.tokens) for a, b in pairs]
    common = [len(a.tokens) if place is None else place for (a, _), place in zip(pairs, places, strict=True)]
    p10, p50, p90 = quantiles(common, (0.1, 0.5, 0.9))
    lengths = np.array(
        [[len(each.tokens) for each in side] for side in (source, candidate)], dtype=np.float64
    )
    repeated = np.array([[repeated_4grams(each.tokens) for each in side] for side in (source, candidate)])
    most = int(lengths.max())
    at = sorted({round(each) for each in np.linspace(1, most, min(most, CURVE_POINTS))})
    parted = np.array([np.inf if place is None else place for place in places])
    return GenerationRow(
        mode=mode,
        num_prompts=len(pairs),
        num_same=sum(place is None for place in places),
        common_p10=p10,
        common_p50=p50,
        common_p90=p90,
        same_tokens=tuple(at),
        same_frac=tuple(float((parted >= tokens).mean()) for tokens in at),
        length_source=float(lengths[0].mean()),
        length_candidate=float(lengths[1].mean()),
        length_shift=mean_estimate(lengths[1] - lengths[0]),
        repeated_source=float(repeated[0].mean()),
        repeated_candidate=float(repeated[1].mean()),
        repeated_shift=mean_estimate(repeated[1] - repeated[0]),
        ended_source=float(np.mean([each.reason == "stop" for each in source])),
        ended_candidate=float(np.mean([each.reason == "stop" for each in candidate])),
        examples=tuple(
            _example(prompt, a.text, b.text, place)
            for prompt, (a, b), place in list(zip(prompts, pairs, places, strict=True))[:num_shown]
        ),
    )


def _example(prompt: str, source: str, candidate: str, position: int | None) -> Example:
    shared = first_difference([*map(ord, source)], [*map(ord, candidate)])
    common = source[:shared]
    return Example(prompt, common, source[len(common) :], candidate[len(common) :], position)
