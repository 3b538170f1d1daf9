"""The model card (README.md with Hugging Face front matter) of a compressed artifact, written from its
report.

The front matter has what the hub indexes: `base_model`, `base_model_relation` (`quantized`, or `finetune` for
a pruned model), the inherited licence. The text has what a reader needs before loading the model: how much
accuracy moved and how that was measured, what it was calibrated on, and the exact commands to serve it and to
measure it again. Numbers come from the report and nowhere else.
"""

import re
from typing import Any

from compress.validate.display import Json, markdown_code, markdown_sentence, markdown_text
from compress.validate.report import parts_in_order

_ORDER = ["base_model", "base_model_relation", "license", "language", "library_name", "pipeline_tag", "tags"]
_ORDINARY = re.compile(r"(?!.*---)[\w ./:@+-]{1,60}")


def render_markdown_card(
    report: Json,
    *,
    base_model: str,
    license_id: str,
    serve_command: str,
    eval_command: str,
    language: str | None = None,
    library_name: str | None = "transformers",
) -> str:
    """Return the card, without the sections whose part the report lacks; `license_id` is the base model's,
    such as `apache-2.0`. `library_name` is the library that the hub recommends for loading, None for none.
    """
    artifact: Json = report.get("artifact", {})
    parts = parts_in_order()
    made = "A checkpoint compared with" if artifact.get("foreign") else "A compressed form of"
    form = f"{made} {markdown_code(base_model)}{_scheme(artifact)}."
    front = _front_matter(
        base_model=base_model,
        # The hub has no word for a model with fewer heads.
        base_model_relation="finetune" if "pruning" in report else "quantized",
        license=license_id,
        language=language,
        library_name=library_name,
        pipeline_tag="text-generation",
        tags=["compressed"],
    )
    sections = [
        front,
        f"# {markdown_text(report['title'])}",
        " ".join(
            [form, *filter(None, (part.sentence(report) for part in reversed(parts)))]
        ),  # the verdict last
        *(f"> **Warning.** {markdown_sentence(warning)}" for warning in report.get("warnings", [])),
        *(paragraph for part in parts for paragraph in part.card(report)),
        f"## Use\n\nServe:\n\n```sh\n{serve_command}\n```\n\nMeasure again:\n\n```sh\n{eval_command}\n```",
    ]
    if digest := artifact.get("digest"):
        sections.append(
            f"These numbers belong to the artifact `{digest}`. The full report, with plots"
            f"{' and per-layer errors' if report.get('layers') else ''}, is `report.html`."
        )
    return "\n\n".join(sections) + "\n"


def _front_matter(**facts: Any) -> str:
    """Return the facts as YAML between `---` lines, quoted wherever YAML 1.1 would read something else. A
    text with line breaks or dashes in a row is escaped, so that no reader of lines takes it for an end.
    """
    from huggingface_hub import ModelCardData

    lines = [
        f"{name}: {_quoted(facts[name])}"
        if isinstance(facts[name], str) and not _ORDINARY.fullmatch(facts[name])
        else ModelCardData(**{name: facts[name]}).to_yaml()
        for name in _ORDER
        if facts.get(name) is not None
    ]
    return "\n".join(["---", *lines, "---"])


def _quoted(text: str) -> str:
    """Return a double-quoted YAML scalar of ASCII on one line, without three dashes in a row."""
    return '"' + "".join(_escaped(char) for char in text).replace("---", "-\\x2d-") + '"'


def _escaped(char: str) -> str:
    if char in '"\\':
        return "\\" + char
    if " " <= char <= "~":
        return char
    return f"\\x{ord(char):02x}" if ord(char) < 256 else f"\\U{ord(char):08x}"


def _scheme(artifact: Json) -> str:
    cache = f" with a KV cache in {markdown_code(artifact['kv_cache'])}" if artifact.get("kv_cache") else ""
    return (f" in {markdown_code(artifact['scheme'])}" if artifact.get("scheme") else "") + cache
