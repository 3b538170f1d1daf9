"""The bundled model and a tiny one with a chat template, each loaded once, and a server for each."""

import json
from collections.abc import Iterator
from pathlib import Path

import openai
import pytest

import compress
from tests.support.http_server import Running, running
from tests.support.tiny_model import write_tiny_model

TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'refuse' %}{{ raise_exception('no such role') }}{% endif %}"
    "{{ m.role }}: {{ m.content }}\n{% endfor %}{% if shout %}LOUD {% endif %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)


@pytest.fixture(scope="session")
def llm() -> compress.LLM:
    return compress.load("builtin://reference", device="cpu", max_batch_size=4, prefix_cache=True)


@pytest.fixture(scope="session")
def chat_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = write_tiny_model(tmp_path_factory.mktemp("chat"))
    (path / "tokenizer_config.json").write_text(
        json.dumps({"chat_template": TEMPLATE, "bos_token": "<|endoftext|>"})
    )
    return path


@pytest.fixture(scope="session")
def chat_llm(chat_dir: Path) -> compress.LLM:
    return compress.load(chat_dir, device="cpu", max_batch_size=4)


@pytest.fixture(scope="module")
def server(llm: compress.LLM) -> Iterator[Running]:
    with running(llm, "reference") as found:
        yield found


@pytest.fixture(scope="module")
def chat_server(chat_llm: compress.LLM) -> Iterator[Running]:
    with running(chat_llm, "tiny") as found:
        yield found


@pytest.fixture
def client(server: Running) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0) as found:
        yield found


@pytest.fixture
def chat_client(chat_server: Running) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=chat_server.url + "/v1", api_key="none", max_retries=0) as found:
        yield found
