"""The Python interface: load a model and generate text, quantize a model, run a recipe.

    import compress

    llm = compress.load("runs/quickstart/artifacts/export")
    print(llm.generate("def add(a, b):")[0].text)

    result = compress.quantize("./model", scheme="W4A16_G128", out="model-w4")
    result = compress.run("recipes/quickstart.yaml")

Everything here is also an attribute of `compress`, imported when it is first used. These functions share the
code of the command line. Every error that a caller can cause is a `compress.errors.CompressError`.
"""

import logging
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import torch

from compress.artifact.atomic import write_atomic
from compress.context import Progress
from compress.data.chat import Message
from compress.digest import digest_bytes
from compress.errors import UsageError, did_you_mean
from compress.export import PROPOSED, open_weights
from compress.export.draft import draft_within, open_draft, open_mtp
from compress.kernels.operands.paged import TOKEN_HEAD_FORMATS
from compress.llm import LLM, Output, Prompt, SamplingParams, Score, Stream, Timing
from compress.models.arch import Arch
from compress.pipeline import Job, Result, RunDir, StepResult, execute, pick_device, reads_calibration
from compress.pipeline.model_dir import find_model_dir
from compress.quant.kv import FP8_STATIC, INT4_HADAMARD, KV_DENSE
from compress.recipe import dump_yaml
from compress.runtime.engine import Engine
from compress.runtime.engine_config import EngineConfig
from compress.runtime.speculative.ngram import NGram
from compress.runtime.speculative.speculation import Speculative

__all__ = [
    "LLM",
    "Message",
    "Output",
    "Prompt",
    "Result",
    "SamplingParams",
    "Score",
    "Stream",
    "Timing",
    "load",
    "quantize",
    "run",
]

T = TypeVar("T")
DEFAULT_WORKSPACE = Path(".compress")
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_KV_FORMATS = (KV_DENSE, FP8_STATIC, *TOKEN_HEAD_FORMATS, INT4_HADAMARD)
_LOG = logging.getLogger("compress")


def load(
    ref: str | Path,
    *,
    device: str | None = None,
    dtype: str | None = None,
    kv_format: str | None = None,
    speculative: str | Path | None = None,
    num_draft_tokens: int = PROPOSED,
    max_batch_size: int = 8,
    max_model_len: int | None = None,
    kv_cache_bytes: int | None = None,
    prefix_cache: bool = False,
    itl_target_ms: float | None = None,
    offline: bool = False,
    cache_dir: str | Path | None = None,
) -> LLM:
    """Load a model for generation and scoring.

    Args:
        ref: a directory (an artifact, or a Hugging Face checkpoint), a registry reference
            (`layout://registry/name:tag`), a model of the hub (`hf://org/name@revision`) or
            `builtin://reference`, the small model that ships with the package.
        device: "cuda", "cuda:1" or "cpu"; by default the first GPU where there is one.
        dtype: of the activations: "bfloat16", "float16" or "float32"; by default the checkpoint's on a GPU,
            float32 on a CPU.
        kv_format: of the KV cache: "DENSE", "FP8_STATIC", "FP8_TOKEN_HEAD", "FP8_ATTENTION",
            "INT8_TOKEN_HEAD", "INT4_TOKEN_HEAD" or "INT4_TOKEN_HEAD_HADAMARD"; by default what the artifact
            states. Latent attention takes "DENSE", "FP8_TOKEN_HEAD" or "INT8_TOKEN_HEAD".
        speculative: who proposes tokens: "ngram" (prompt lookup), "draft" (the draft that the artifact
            carries), "mtp" (the layer of the checkpoint that predicts a further token), or a draft or an
            assistant: a directory, `hf://org/name@revision` or a registry reference. The text stays the
            same. By default nobody.
        num_draft_tokens: tokens proposed in a step, 1 to 7.
        max_batch_size: requests that run at once; more wait.
        max_model_len: the longest sequence, prompt included; by default the model's own limit, or what the
            cache holds.
        kv_cache_bytes: size of the KV cache; by default 80 % of the free GPU memory, or 256 MiB on a CPU.
        prefix_cache: keep keys and values of earlier prompts, and states of recurrences, for those that begin
            alike.
        itl_target_ms: the time between tokens that long prompts must not stretch; they are cut into chunks.
        offline: never use the network.
        cache_dir: where artifacts of a registry are kept, `~/.cache/compress/artifacts` by default.

    Example:
        llm = compress.load("builtin://reference")
        print(llm.generate("import ", compress.SamplingParams(max_tokens=16))[0].text)

    Raises:
        UsageError: no model there, an option that does not fit it, or no tokenizer.
        UnsupportedArch, UnsupportedFormat: the model is not understood wholly.
        StorageError: the hub or the registry cannot be reached.
        EnvironmentUnfit: no such device, or no kernel here serves the model.
    """
    path = find_model_dir(str(ref), offline=offline, cache_dir=None if cache_dir is None else Path(cache_dir))
    place = torch.device(pick_device(device))
    config = EngineConfig(
        dtype=None if dtype is None else _named(dtype, _DTYPES, "dtype"),
        max_batch_size=max_batch_size,
        max_model_len=max_model_len,
        kv_cache_bytes=kv_cache_bytes,
        kv_format=None
        if kv_format is None
        else _named(kv_format, {each: each for each in _KV_FORMATS}, "KV format"),
        speculative=None
        if speculative is None
        else _speculative(speculative, path, num_draft_tokens, offline=offline),
        prefix_cache=prefix_cache,
        itl_target_ms=itl_target_ms,
    )
    return LLM(Engine(open_weights(path), device=place, config=config), path)


def load_engine(
    ref: str | Path,
    config: EngineConfig,
    *,
    device: str | None = None,
    speculative: str | Path | None = None,
    num_draft_tokens: int = PROPOSED,
    offline: bool = False,
    cache_dir: str | Path | None = None,
) -> Engine:
    """Load a model for token ids alone; it needs no tokenizer. `config` decides everything but speculation;
    the other arguments are those of `load`.

    Raises:
        CompressError: as `load`.
    """
    path = find_model_dir(str(ref), offline=offline, cache_dir=None if cache_dir is None else Path(cache_dir))
    if speculative is not None:
        config = replace(
            config, speculative=_speculative(speculative, path, num_draft_tokens, offline=offline)
        )
    return Engine(open_weights(path), device=torch.device(pick_device(device)), config=config)


def read_arch(ref: str | Path, *, offline: bool = False) -> Arch:
    """Return the shapes of a model, without loading its weights.

    Raises:
        CompressError: as `load`.
    """
    return open_weights(find_model_dir(str(ref), offline=offline)).arch


def quantize(
    model: str | Path,
    scheme: str | Mapping[str, Any] = "W4A16_G128",
    *,
    data: str | Path = "builtin://python",
    num_samples: int = 128,
    seq_len: int = 512,
    preset: str | None = None,
    format: str = "compressed-tensors",
    out: str | Path | None = None,
    validate: bool | Mapping[str, Any] = False,
    seed: int = 0,
    device: str | None = None,
    workspace: str | Path = DEFAULT_WORKSPACE,
    run_dir: str | Path | None = None,
    offline: bool = False,
    **settings: Any,
) -> Result:
    """Quantize a model and return the result, whose `path` is the directory of the artifact.

    This is `run` with a recipe of the stages calibrate, quantize and export; what was built before with the
    same settings is found again. Settings under which nothing depends on activations, such as
    `round={"kind": "rtn"}` with "FP8_DYNAMIC", read no calibration text.

    Args:
        model: a directory, `hf://org/name@revision` or `builtin://reference`.
        scheme: the name of a scheme, or `{"kind": "mixed", ...}`, which chooses among several for each linear
            group.
        data: calibration text: the path of a data card, or `builtin://python`.
        num_samples: calibration windows.
        seq_len: tokens in a window.
        preset: "fast", "balanced" or "best" settings for the keys that are left out; by default GPTQ with
            min-max scales.
        format: of the checkpoint: "compressed-tensors", "fp8", "gptq" or "awq".
        out: a new directory that the artifact is copied to; by default it stays in the workspace.
        validate: also compare the artifact with its source and write a report (`Result.report`); a mapping
            has keys of the validate stage, such as `{"gates": {"ppl_ratio": 1.05}}`.
        seed: of the calibration sample.
        device: as `load`.
        workspace: the cache of stage results.
        run_dir: where report and lock file go; by default a directory in `runs/` named by the settings.
        offline: never use the network.
        settings: further keys of the quantize stage as in a recipe: smooth, target, round, refine, guide,
            tune, overrides, head, kv_cache, measure_error.

    Example:
        result = compress.quantize("builtin://reference", "W4A16_G128", preset="fast", out="reference-w4")
        print(result.path, result.size_bytes)

    Raises:
        UsageError: settings that cannot work, or `out` is not empty.
        StorageError, EnvironmentUnfit, LockHeld: as `run`.
    """
    target = None if out is None else Path(out)
    if target is not None and target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise UsageError(f"{target} exists and is not an empty directory; name a new one with `out`.")
    quantization = {
        key: value
        for key, value in {"scheme": scheme, "preset": preset, **settings}.items()
        if key != "preset" or value is not None
    }
    stages: list[dict[str, Any]] = [
        {"kind": "quantize", **quantization},
        {"kind": "export", "formats": [format]},
    ]
    if reads_calibration("quantize", quantization):
        text = {"data": str(data), "num_samples": num_samples, "seq_len": seq_len}
        stages.insert(0, {"kind": "calibrate", **text})
    if validate:
        stages.append({"kind": "validate", **(validate if isinstance(validate, Mapping) else {})})
    recipe = {"version": 1, "model": str(model), "seed": seed, "stages": stages}
    result = run(recipe, device=device, workspace=workspace, run_dir=run_dir, offline=offline)
    if target is None:
        return result
    shutil.copytree(result.path, target, dirs_exist_ok=True)
    return replace(result, copy=target)


def run(
    recipe: str | Path | Mapping[str, Any],
    *,
    device: str | None = None,
    workspace: str | Path = DEFAULT_WORKSPACE,
    run_dir: str | Path | None = None,
    case: str | None = None,
    until: str | None = None,
    rebuild_from: str | None = None,
    if_changed: bool = False,
    offline: bool = False,
) -> Result:
    """Run a recipe as `compress run` does: build what is missing, validate, let the gates decide, push.

    A failed gate is a result (`Result.status` "gate_failed", `exit_code` 3), not an error. Progress goes to
    the logger "compress".

    Args:
        recipe: the path of a recipe, its YAML text (of several lines), or its content as a mapping.
        device: as `load`.
        workspace: the cache of stage results, shared by all recipes.
        run_dir: where report and lock file go; by default `runs/<name of the file>`, or a name made of the
            recipe's content.
        case: the case to run, of a recipe with a matrix.
        until: stop after this stage.
        rebuild_from: build this stage and those that follow it again, cached or not.
        if_changed: do nothing when neither recipe, model, data nor registry changed.
        offline: never use the network.

    Example:
        result = compress.run("recipes/quickstart.yaml")
        print(result.status, result.path, result.report)

    Raises:
        RecipeError, UsageError, UnsupportedArch, UnsupportedFormat: what cannot work, before any work.
        LockHeld: another run has the run directory, or a command has the workspace alone.
        StorageError: the hub, the registry or a file.
        EnvironmentUnfit: no such device.
    """
    file, directory = _recipe_file(recipe, None if run_dir is None else Path(run_dir), case)
    job = Job(
        file,
        directory,
        Path(workspace),
        pick_device(device),
        case=case,
        until=until,
        rebuild_from=rebuild_from,
        if_changed=if_changed,
        offline=offline,
        step_done=_log_step,
        note=_LOG.info,
    )
    return execute(job, _LogWatch())


def _speculative(
    proposer: str | Path, model_dir: Path, num_draft_tokens: int, *, offline: bool
) -> Speculative:
    """Return the options of prompt lookup, of the model's own draft or MTP head, or of a draft or an
    assistant that is named."""
    if proposer == "ngram":
        return Speculative(NGram(), k=num_draft_tokens)
    if proposer == "mtp":
        return Speculative(open_mtp(model_dir), k=num_draft_tokens)
    if "://" in str(proposer):
        path = find_model_dir(str(proposer), offline=offline)
    else:
        path = draft_within(model_dir) if proposer == "draft" else Path(proposer)
    if not path.is_dir():
        raise UsageError(
            f'speculative is \'{proposer}\', which is no directory; write "ngram", "draft", "mtp" or the '
            "directory of a draft or an assistant."
        )
    return Speculative(open_draft(path), k=num_draft_tokens)


def _named(name: str, known: Mapping[str, T], noun: str) -> T:
    if name not in known:
        raise UsageError(f"unknown {noun} '{name}'.{did_you_mean(name, known)}")
    return known[name]


def _recipe_file(
    recipe: str | Path | Mapping[str, Any], run_dir: Path | None, case: str | None
) -> tuple[Path, RunDir]:
    """Return the file of a recipe, written into the run directory where it was given as text or mapping, and
    the run directory.
    """
    if isinstance(recipe, Path) or (isinstance(recipe, str) and "\n" not in recipe):
        path = Path(recipe)
        return path, RunDir(run_dir or RunDir.for_recipe(path, case).path)
    text = recipe if isinstance(recipe, str) else dump_yaml(recipe)
    content = text.encode()
    name = f"recipe-{digest_bytes(content).removeprefix('sha256:')[:12]}"
    directory = RunDir(run_dir or RunDir.for_recipe(Path(name), case).path)
    directory.path.mkdir(parents=True, exist_ok=True)
    write_atomic(directory.path / "recipe.yaml", content)
    return directory.path / "recipe.yaml", directory


def _log_step(result: StepResult) -> None:
    _LOG.info("%s %s %s", result.kind, result.how, result.artifact.digest)


class _LogProgress:
    """Progress of a stage as lines of the logger "compress"."""

    def __init__(self, stage: str) -> None:
        self._stage = stage

    def update(self, done: int, total: int, note: str) -> None:
        _LOG.info("%s %d/%d %s", self._stage, done, total, note)

    def log(self, text: str) -> None:
        _LOG.info("%s", text)


class _LogWatch:
    """Watches a run from Python: every stage writes to the logger "compress"."""

    @contextmanager
    def stage(self, kind: str, *, cached: bool) -> Iterator[Progress]:
        del cached
        yield _LogProgress(kind)
