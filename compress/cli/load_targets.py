"""The targets of `compress bench`: models with a policy each, and servers."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from compress.errors import UsageError

if TYPE_CHECKING:
    from compress.models.arch import Arch
    from compress.validate.load.target import LoadTarget

_URL = re.compile(r"https?://")


@dataclass(frozen=True)
class TargetName:
    """A target before it is loaded: a server, or a model and the policy of its engine."""

    name: str
    ref: str
    policy: str | None = None

    @property
    def is_url(self) -> bool:
        return _URL.match(self.ref) is not None


def target_names(refs: Sequence[str], policies: Sequence[str]) -> list[TargetName]:
    """Return the targets with names of their own; models once for each policy."""
    if not refs:
        raise UsageError("name what serves: an artifact, a model or the URL of a server.")
    places = []
    for ref in dict.fromkeys(refs):
        short = ref if _URL.match(ref) or "://" in ref else Path(ref).name or ref
        name = short if [Path(each).name for each in refs].count(short) <= 1 else ref
        if _URL.match(ref) or not policies:
            places.append(TargetName(name, ref))
        else:
            each_name = (lambda policy, name=name: f"{name} {policy}") if len(policies) > 1 else None
            places += [TargetName(each_name(each) if each_name else name, ref, each) for each in policies]
    return places


def shapes_of(places: Sequence[TargetName], *, offline: bool) -> "dict[str, Arch]":
    """Return the shapes of the models that are served here, by name."""
    from compress.api import read_arch

    return {each.name: read_arch(each.ref, offline=offline) for each in places if not each.is_url}


def check_lengths(shapes: "dict[str, Arch]", longest: int) -> None:
    """Raise UsageError where a model is too short for a request."""
    from compress.models.max_position import why_no_longer

    for name, arch in shapes.items():
        if longest > arch.max_position:
            raise UsageError(
                f"the longest request has {longest:,} tokens, prompt and output, and {name} has "
                f"{arch.max_position:,} positions{why_no_longer(arch)}; ask for shorter ones, or with "
                "--num-prompts for the first requests of the file."
            )


def engine_target(
    place: TargetName, options: dict[str, Any], *, device: str | None, speculative: str | None, offline: bool
) -> "LoadTarget":
    from compress.api import load_engine
    from compress.runtime.engine_config import EngineConfig
    from compress.validate.load.engine_target import EngineTarget

    own: dict[str, Any] = {} if place.policy is None else {"policy": place.policy}
    config = EngineConfig(**options, **own)
    engine = load_engine(place.ref, config, device=device, speculative=speculative, offline=offline)
    return EngineTarget(engine, place.ref)


def url_target(place: TargetName, model: str | None, api_key: str | None) -> "LoadTarget":
    from compress.validate.load.url_target import UrlTarget, served_model

    served = model if model is not None else served_model(place.ref, api_key=api_key)
    return UrlTarget(place.ref, served, api_key=api_key)
