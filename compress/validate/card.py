"""The model card (README.md with Hugging Face front matter) of a compressed artifact, written from its
report.

The front matter has what the hub indexes: `base_model`, `base_model_relation` (`quantized`, or `finetune` for
a pruned model), the inherited licence. The text has what a reader needs before loading the model: how much
accuracy moved and how that was measured, what it was calibrated on, and the exact commands to serve it and to
measure it again. Numbers come from the report and nowhere else.
"""

from typing import Any

from compress.validate.display import Json
from compress.validate.report import parts_in_order

_ORDER = ["base_model", "base_model_relation", "license", "language", "library_name", "pipeline_tag", "tags"]


def render_markdown_card(
    report: Json,
    *,
    base_model: str,
    license_id: str,
    serve_command: str,
    eval_command: str,
    language: str | None = None,
) -> str:
    """Return the card, without the sections whose part the report lacks; `license_id` is the base model's,
    such as `apache-2.0`.
    """
    artifact: Json = report.get("artifact", {})
    parts = parts_in_order()
    form = f"A compressed form of `{_one_line(base_model)}`{_scheme(artifact)}."
    front = _front_matter(
        base_model=base_model,
        # The hub has no word for a model with fewer heads.
        base_model_relation="finetune" if "pruning" in report else "quantized",
        license=license_id,
        language=language,
        library_name="transformers",
        pipeline_tag="text-generation",
        tags=["compressed"],
    )
    sections = [
        front,
        f"# {_one_line(report['title'])}",
        " ".join(
            [form, *filter(None, (part.sentence(report) for part in reversed(parts)))]
        ),  # the verdict last
        *(f"> **Warning.** {warning}" for warning in report.get("warnings", [])),
        *(paragraph for part in parts for paragraph in part.card(report)),
        f"## Use\n\nServe:\n\n```sh\n{serve_command}\n```\n\nMeasure again:\n\n```sh\n{eval_command}\n```",
    ]
    if digest := artifact.get("digest"):
        sections.append(
            f"These numbers belong to the artifact `{digest}`. The full report, with plots and per-layer "
            "errors, is `report.html`."
        )
    return "\n\n".join(sections) + "\n"


def _front_matter(**facts: Any) -> str:
    """Return the facts as YAML between `---` lines, quoted wherever YAML 1.1 would read something else."""
    from huggingface_hub import ModelCardData

    return f"---\n{ModelCardData(**facts).to_yaml(original_order=_ORDER)}\n---"


def _scheme(artifact: Json) -> str:
    cache = f" with a KV cache in `{artifact['kv_cache']}`" if artifact.get("kv_cache") else ""
    return (f" in `{artifact['scheme']}`" if artifact.get("scheme") else "") + cache


def _one_line(text: str) -> str:
    return " ".join(text.split())
