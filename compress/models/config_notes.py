"""Notes on a `config.json` that was read: its fields that change nothing, and those that other programs read
otherwise.
"""

from compress.models.arch import Arch
from compress.models.config_fields import MAX_NAMED, field_name, listed
from compress.models.eos import NO_TOKEN, stated_eos
from compress.models.family import family_of_arch
from compress.models.rope_config import YARN_FACTOR_NOTE, states_yarn_factor


def unread_note(arch: Arch) -> str | None:
    """Return the notes on a model's `config.json`: what `transformers` computes otherwise, and the fields
    that change nothing or are read as none; None where there is no note."""
    family = family_of_arch(arch)
    names = family.unread_fields(arch.config)
    otherwise = family.computed_otherwise
    otherwise = otherwise(arch) if callable(otherwise) else otherwise
    sentences = [] if otherwise is None else [otherwise]
    if stated_eos(arch.config) == NO_TOKEN:
        sentences.append(
            f"config.json has eos_token_id = {NO_TOKEN}, which is read as no end-of-sequence token."
        )
    if states_yarn_factor(arch.config):
        sentences.append(YARN_FACTOR_NOTE)
    if names:
        sentences.append(
            f"config.json has fields that change nothing in a {arch.family} model and are not read: "
            f"{listed([field_name(name) for name in names], MAX_NAMED)}."
        )
    return " ".join(sentences) or None
