"""The contract of registries against servers of other projects: MLflow with its SQLite store, and S3 of moto.

`make registries` builds their environment; the quick tests run against small servers of the same protocols.
"""

import functools
import tempfile
from pathlib import Path
from uuid import uuid4

import pytest

from tests.contract.test_registry_contract import (  # noqa: F401
    test_a_blob_is_stored_once_and_read_back,
    test_a_blob_that_is_not_what_it_claims_is_refused,
    test_a_file_changed_after_the_commit_is_not_pushed,
    test_a_push_killed_at_any_step_leaves_the_tags_on_the_old_good_artifact,
    test_evidence_travels_beside_the_artifact,
    test_pushing_again_adds_nothing,
    test_tags_move_and_the_digest_stays,
    test_unknown_names_tags_and_digests_get_a_suggestion,
    test_what_is_pulled_is_what_was_pushed,
)
from tests.support import s3_server
from tests.support.registries import free_port, start_server

ENVIRONMENT = ".venv-registries"
pytestmark = pytest.mark.interop(ENVIRONMENT)
BIN = Path(__file__).parents[2] / ENVIRONMENT / "bin"


@functools.cache
def moto() -> str:
    port = free_port()
    start_server([str(BIN / "moto_server"), "-H", "127.0.0.1", "-p", str(port)], port)
    return f"http://127.0.0.1:{port}"


@functools.cache
def mlflow() -> str:
    port = free_port()
    place = Path(tempfile.mkdtemp(prefix="mlflow-"))
    store = [
        "--backend-store-uri",
        f"sqlite:///{place}/mlflow.db",
        "--artifacts-destination",
        str(place / "a"),
    ]
    command = [str(BIN / "mlflow"), "server", "--host", "127.0.0.1", "--port", str(port), "--workers", "1"]
    start_server([*command, *store], port, "/health")
    return f"http://127.0.0.1:{port}"


def _clear(server: str) -> None:
    from mlflow import MlflowClient

    client = MlflowClient(server, server)
    for model in client.search_registered_models():
        client.delete_registered_model(model.name)


@pytest.fixture(params=["s3", "mlflow"])
def url(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    import boto3

    for name, value in s3_server.environment(moto()).items():
        monkeypatch.setenv(name, value)
    boto3.client("s3").create_bucket(Bucket=s3_server.BUCKET)
    store = f"s3://{s3_server.BUCKET}/t{uuid4().hex[:12]}"
    if request.param == "s3":
        return store
    _clear(mlflow())
    return f"mlflow+{mlflow()}/{store}"
