"""A server as a target, against one that plays a script; nothing is asserted of a time but its order."""

from typing import Any

import pytest

from compress.errors import StorageError, UsageError
from compress.validate.load.arrivals import Traffic
from compress.validate.load.metrics import run_metrics
from compress.validate.load.objectives import Objectives
from compress.validate.load.url_target import UrlTarget, served_model
from compress.validate.load.workload import LoadRequest, Workload
from tests.support.completion_server import Answer, completion_server


def load(traffic: Traffic, *output_tokens: int) -> Workload:
    requests = tuple(LoadRequest((11, 12, 13 + idx), each) for idx, each in enumerate(output_tokens))
    return Workload("url", requests, traffic.arrivals_s(len(requests), seed=0), traffic, traffic.mode)


OFFLINE = Traffic()


def test_every_request_gets_its_tokens_and_is_sent_as_token_ids() -> None:
    workload = load(OFFLINE, 3, 1, 5)
    with completion_server() as server:
        run = UrlTarget(server.url, "scripted", api_key="secret").run(workload)
    assert [len(each.token_times_s) for each in run.served] == [3, 1, 5]
    assert [each.prompt_tokens for each in run.served] == [3, 3, 3]
    assert not any(each.inferred or each.error for each in run.served)
    assert sorted(body["prompt"] for body in server.bodies) == [[11, 12, 13], [11, 12, 14], [11, 12, 15]]
    (body,) = [body for body in server.bodies if body["max_tokens"] == 5]
    assert body["stream"]
    assert body["ignore_eos"]
    assert body["stream_options"]["include_usage"]
    assert server.headers[0]["Authorization"] == "Bearer secret"
    assert run.client_lags_s is not None
    for each in run.served:
        assert run.started_s <= each.arrival_s <= each.sent_s < each.token_times_s[0]
        assert list(each.token_times_s) == sorted(each.token_times_s)


def test_a_server_that_refuses_to_state_chunks_is_asked_without() -> None:
    target_load = load(OFFLINE, 2, 3)
    with completion_server(
        lambda num, body: Answer((1,) * body["max_tokens"], stated=False), takes_stated=False
    ) as server:
        target = UrlTarget(server.url, "scripted")
        runs = [target.run(target_load), target.run(target_load)]
    assert len(server.probes) == 1
    assert all(body["stream_options"] == {"include_usage": True} for body in server.bodies)
    for run in runs:
        assert [len(each.token_times_s) for each in run.served] == [2, 3]
        assert not any(each.error or each.inferred for each in run.served)


def test_waits_of_the_server_are_in_the_times() -> None:
    delay_s = 0.02
    with completion_server(lambda num, body: Answer((1, 1, 1), delay_s)) as server:
        run = UrlTarget(server.url, "scripted").run(load(OFFLINE, 3))
    (only,) = run.served
    assert only.token_times_s[0] - only.sent_s >= delay_s
    assert only.token_times_s[-1] - only.sent_s >= 3 * delay_s
    assert run.duration_s >= 3 * delay_s


def test_several_tokens_of_a_chunk_have_one_time_and_are_counted() -> None:
    with completion_server(lambda num, body: Answer((1, 3), 0.01)) as server:
        run = UrlTarget(server.url, "scripted").run(load(OFFLINE, 4))
    gaps_s = run.served[0].gaps_s
    assert gaps_s[0] > 0
    assert gaps_s[1:] == [0.0, 0.0]
    found = run_metrics(run, load(OFFLINE, 4), Objectives())
    assert found["tokens_per_chunk"] == 2.0
    assert found["total_output_tokens"] == 4


def test_refusals_errors_and_cut_connections_are_failed_requests() -> None:
    answers = {
        1: Answer((1, 1), status=429),
        2: Answer((1, 1), cut=1),
        3: Answer((1, 1), error="engine failed"),
        4: Answer((1, 1), cut=0),
        5: Answer((1, 1), stated=False, usage=False, cached_tokens=1),
    }

    def script(num: int, body: dict[str, Any]) -> Answer:
        return answers.get(body["max_tokens"], Answer((1, 1)))

    workload = load(OFFLINE, 1, 2, 3, 4, 5, 6)
    with completion_server(script) as server:
        run = UrlTarget(server.url, "scripted").run(workload)
    errors = [each.error for each in run.served]
    assert "429" in errors[0]
    assert "not now" in errors[0]
    assert "closed the connection" in errors[1]
    assert "engine failed" in errors[2]
    assert "closed the connection" in errors[3]
    assert errors[4:] == ["", ""]
    assert run.served[4].inferred
    found = run_metrics(run, workload, Objectives(e2el=60_000.0))
    assert (found["completed"], found["failed"], found["short_outputs"]) == (2, 4, 2)
    assert found["goodput_frac"] == pytest.approx(2 / 6)


def test_a_closed_loop_never_has_more_requests_than_clients() -> None:
    with completion_server(lambda num, body: Answer((1, 1), 0.005)) as server:
        run = UrlTarget(server.url, "scripted").run(load(Traffic(max_concurrency=2), 2, 2, 2, 2, 2))
    assert server.most_open == 2
    assert run.peak_concurrency == 2
    assert len(run.completed) == 5
    assert all(each.arrival_s == each.sent_s for each in run.served)


def test_an_open_loop_follows_its_schedule() -> None:
    workload = load(Traffic(100.0), 1, 1, 1, 1)
    with completion_server() as server:
        run = UrlTarget(server.url, "scripted").run(workload)
    assert workload.arrivals_s is not None
    assert [each.arrival_s - run.started_s for each in run.served] == pytest.approx(workload.arrivals_s)
    assert all(each.sent_s >= each.arrival_s for each in run.served)


def test_the_model_of_a_server_is_asked_for() -> None:
    with completion_server() as server:
        assert served_model(server.url) == "scripted"
        with pytest.raises(StorageError, match="404"):
            served_model(server.url.replace("/v1", "/v7"))


def test_an_address_where_nothing_answers_is_an_error_or_a_failed_request() -> None:
    with completion_server() as server:
        pass
    with pytest.raises(StorageError, match="nothing answers"):
        served_model(server.url)
    run = UrlTarget(server.url, "scripted").run(load(OFFLINE, 1))
    assert "nothing answers" in run.served[0].error


def test_a_key_that_no_header_may_have_is_refused() -> None:
    with pytest.raises(UsageError, match="API key"):
        UrlTarget("http://localhost:1", "scripted", api_key="a\r\nb")
