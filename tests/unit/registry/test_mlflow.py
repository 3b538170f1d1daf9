"""An MLflow server whose answers are lost on their way."""

from pathlib import Path

import pytest

from compress.artifact.manifest import Artifact
from compress.artifact.workspace import Workspace
from compress.artifact.writer import ArtifactWriter
from compress.cli.app import main
from compress.registry.protocol import open_registry
from compress.registry.transfer import pull, push
from tests.support import mlflow_server, s3_server


def _artifact(root: Path) -> Artifact:
    def build(writer: ArtifactWriter) -> None:
        (writer.path / "weights.bin").write_bytes(bytes(1000))
        writer.describe(role="checkpoint")

    return Workspace(root / "workspace").commit(Workspace.key("test", 1, {}, {}, 0), "test", {}, build)


@pytest.mark.parametrize("in_headers", [False, True])
def test_an_answer_that_is_cut_is_requested_again_and_given_up_in_the_end(
    in_headers: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("compress.registry.resuming.PAUSES_S", (0.0, 0.0, 0.0))
    for name, value in s3_server.environment(s3_server.start(s3_server.Store())).items():
        monkeypatch.setenv(name, value)
    tracking = mlflow_server.Tracking()
    url = f"mlflow+{mlflow_server.start(tracking)}/s3://{s3_server.BUCKET}/team"
    artifact = _artifact(tmp_path)
    push(open_registry(url), artifact, name="model", aliases=["stable"])
    tracking.in_headers = in_headers
    for number, tag in enumerate(("latest", "stable")):
        tracking.num_drops = 1 if in_headers else 3
        assert pull(f"{url}/model:{tag}", tmp_path / str(number)).digest == artifact.digest
        assert tracking.num_drops == 0
    tracking.num_drops = 1000
    assert main(["pull", f"{url}/model:stable", str(tmp_path / "out")]) == 5
    assert "lost" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
