"""A tiny model with a tokenizer, loaded once."""

import json
import shutil
from pathlib import Path

import pytest

import compress
from tests.support.tiny_model import write_tiny_model


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="session")
def chat_model_dir(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same model with a chat template and a second end-of-sequence token, "a"."""
    path = tmp_path_factory.mktemp("chat") / "model"
    shutil.copytree(model_dir, path)
    template = (
        "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
        "{% if add_generation_prompt %}assistant:{% endif %}"
    )
    (path / "tokenizer_config.json").write_text(
        json.dumps({"chat_template": template, "bos_token": "<|endoftext|>"})
    )
    return path


@pytest.fixture(scope="session")
def llm(model_dir: Path) -> compress.LLM:
    return compress.load(model_dir, device="cpu", max_batch_size=2)


@pytest.fixture(scope="session")
def chat_llm(chat_model_dir: Path) -> compress.LLM:
    return compress.load(str(chat_model_dir), device="cpu")
