"""The variants of tiny models in which configs of a family differ: a case -> the family, and the fields of
its config that are not those of `tiny_families.SMALL`."""

from typing import Any

from tests.support.tiny_cases import dense, hybrids, latents, mixtures, wrappers

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    **dense.CASES,
    **mixtures.CASES,
    **hybrids.CASES,
    **latents.CASES,
    **wrappers.CASES,
}
