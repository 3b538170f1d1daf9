"""Causal language models that `transformers` runs, for models that the bundled runtime does not support.

Classes of `transformers` itself are run, never code that comes with a checkpoint, and weights are read from
safetensors alone. A checkpoint that leaves a parameter without a value is refused, because `transformers`
would fill it with random numbers.
"""

import contextlib
import io
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from compress.errors import EnvironmentUnfit, UsageError
from compress.plugins import installed_version
from compress.untrusted.text import one_line

CAUSAL_NAMES = ("ForCausalLM", "LMHeadModel")
"""Ends of the names of classes that predict the next token."""
LEAVE_OUT = "Leave out the stage `validate`: the quantized checkpoint does not need it."
_WANTS = {"compressed-tensors": "compressed-tensors", "fp8": "accelerate"}
"""`quant_method` -> the package without which transformers does not load it."""


def transformers_version() -> str:
    """Return the name and the installed version of the library."""
    return f"transformers {installed_version('transformers') or 'is not installed'}"


def check_causal(config: Mapping[str, Any]) -> None:
    """Check that `transformers` has a causal language model for a `config.json`.

    Raises:
        UsageError: it has none, or the checkpoint is another kind of model.
    """
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    model_type = config.get("model_type")
    if not isinstance(model_type, str) or model_type not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        raise UsageError(
            f"validate: {transformers_version()} has no causal language model of model_type "
            f"'{one_line(f'{model_type:.80}' if isinstance(model_type, str) else 'none')}', so nothing here "
            f"measures it. {LEAVE_OUT}"
        )
    stated = config.get("architectures")
    names = [each for each in stated if isinstance(each, str)] if isinstance(stated, list) else []
    if names and not any(name.endswith(CAUSAL_NAMES) for name in names):
        raise UsageError(
            f"validate: config.json names the class {one_line(f'{names[0]:.80}')}, which predicts no next "
            f"token, and accuracy is measured on next tokens. {LEAVE_OUT}"
        )


class TransformersModel:
    """A model of a directory, ready to score tokens on a device.

    Raises:
        UsageError: `transformers` cannot load it, or would fill parameters with random numbers.
        EnvironmentUnfit: a package that it needs is not installed.
    """

    def __init__(self, path: Path, quant_method: str | None, *, device: torch.device) -> None:
        from transformers import AutoModelForCausalLM

        package = _WANTS.get(quant_method or "")
        if package is not None and installed_version(package) is None:
            raise EnvironmentUnfit(
                f"transformers loads {quant_method} checkpoints with the package {package}, which is not "
                f"installed: pip install {package}."
            )
        dtype: torch.dtype | str = torch.float32 if device.type == "cpu" else "auto"
        with _quiet(), _as_refusal(path):
            model, info = AutoModelForCausalLM.from_pretrained(
                path,
                dtype=dtype,
                trust_remote_code=False,
                use_safetensors=True,
                local_files_only=True,
                output_loading_info=True,
            )
        _refuse_incomplete(path, info)
        if device.type == "cpu" and all(each.dtype.itemsize > 1 for each in model.parameters()):
            model = model.float()  # blocks of FP8 are decompressed to 16 bits, whatever dtype is asked for
        self._path = path
        self._model = model.to(device).eval()

    def score(self, tokens_BS: Tensor) -> Tensor:
        """Return the logits of every position, [B, S, V].

        Raises:
            UsageError: the model fails.
        """
        with _quiet(), _as_refusal(self._path), torch.inference_mode():
            logits: Tensor = self._model(input_ids=tokens_BS.to(torch.int64), use_cache=False).logits
        return logits


def _refuse_incomplete(path: Path, info: Mapping[str, Any]) -> None:
    for kind, sentence in (
        ("missing_keys", "has no value for"),
        ("mismatched_keys", "has another shape for"),
        ("unexpected_keys", "has a tensor that the class does not read,"),
    ):
        names = sorted(str(each) for each in info.get(kind) or ())
        if names:
            raise UsageError(
                f"validate: transformers loads {path} only in part: it {sentence} {one_line(names[0])} "
                f"({len(names)} in all), so its numbers would prove nothing. {LEAVE_OUT}"
            )


@contextlib.contextmanager
def _as_refusal(path: Path) -> Iterator[None]:
    """Make UsageError of whatever a class of `transformers` raises for a checkpoint that it does not run."""
    try:
        yield
    except (MemoryError, torch.OutOfMemoryError) as error:
        raise EnvironmentUnfit(
            f"validate: both models have to fit in memory to be compared, and {path} did not. {LEAVE_OUT}"
        ) from error
    except Exception as error:
        reason = one_line(str(error).strip().partition("\n")[0][:300]) or type(error).__name__
        raise UsageError(
            f"validate: {transformers_version()} does not run {path}: {reason} {LEAVE_OUT}"
        ) from error


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Keep warnings and bars of the library, and of those that it uses, off the terminal while the block
    runs."""
    from transformers.utils import logging

    level = logging.get_verbosity()
    bars = logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        with contextlib.redirect_stderr(io.StringIO()):
            yield
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()
