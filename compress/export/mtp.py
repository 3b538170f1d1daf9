"""MTP heads, the layers of checkpoints that predict a further token: in exports, and who drafts with them."""

import logging
from pathlib import Path

from compress.errors import CompressError, UnsupportedArch, UnsupportedFormat, UsageError
from compress.export import FORMATS, codecs, is_graph, open_weights
from compress.models.arch import Arch
from compress.models.checkpoint import Checkpoint
from compress.models.mtp_reader import check_mtp, has_mtp
from compress.models.mtp_tensors import MtpTensors, mtp_tensors
from compress.models.weights import WeightSource

OF_VLLM = frozenset(
    {
        *("deepseek_v3", "deepseek_v32", "ernie4_5_moe", "exaone4_5", "exaone_moe", "glm4_moe"),
        *("glm4_moe_lite", "glm_moe_dsa", "glm_ocr", "hy_v3", "nemotron_h", "nemotron_h_omni"),
        *("mimo_v2_flash", "qwen3_5", "qwen3_5_moe", "qwen3_5_moe_text", "qwen3_5_text", "qwen3_next"),
    }
)
"""Families for which vLLM 0.32 has a method `mtp` (`vllm/config/speculative.py`)."""
_LOG = logging.getLogger("compress")


def exported_mtp(source: WeightSource, target: Arch) -> MtpTensors | None:
    """Return the layers of a checkpoint that predict further tokens, for exports of a model that was made of
    it; None where there are none."""
    if not isinstance(source, Checkpoint):
        return None
    return mtp_tensors(source, target, FORMATS.get("fp8").codec)


def check_place_of_head(mtp: MtpTensors | None, form: str) -> None:
    """Check that a trained head goes into the first checkpoint of an export.

    Raises:
        UsageError: it does not.
    """
    if is_graph(form):
        raise UsageError(
            f"draft: {form} has no place for an MTP head: name another format first, or leave the draft out."
        )
    if mtp is None or not mtp.names:
        reason = "the checkpoint stores none" if mtp is None else str(mtp.reason)
        raise UsageError(
            f"draft: the export has no place for an MTP head, because {reason}; take "
            "`init: {kind: eagle3}` or a smaller model."
        )


def checkpoint_with_mtp(path: Path | None) -> Checkpoint | None:
    """Return the checkpoint in a directory if it stores an MTP head that is read. One that is not read is
    named in a warning."""
    try:
        found = None if path is None else open_weights(path)
    except CompressError:  # of a model that is known by the names of its tensors alone, or not here
        return None
    if not isinstance(found, Checkpoint) or not has_mtp(found):
        return None
    try:
        check_mtp(found, codecs())
    except (UsageError, UnsupportedArch, UnsupportedFormat) as error:
        _LOG.warning("the MTP head of %s is not drafted with: %s", found.path, error)
        return None
    return found
