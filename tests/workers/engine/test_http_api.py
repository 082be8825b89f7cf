"""The embedded engine over HTTP: SGLang's requests, replies and status codes, and nothing that a client can break."""

import json
import random
import shutil
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from corral.experiments.config.rollout import UpdateMode
from corral.experiments.trial.guarded_listener import GuardedListener
from corral.workers.engine.engine import GenerationEngine
from corral.workers.engine.requests import RequestOutput
from corral.workers.engine.server import EngineServer
from tests.strangers import asking, check_only_the_silent_are_closed
from tests.workers.engine.tiny_models import add_tokenizer, reference_greedy, reference_logprobs, text_of
from tests.workers.generation.servers import API_KEY, DEADLINE_S, Client, wait_until
from tests.workers.loop_thread import LoopThread, loop_thread
from tests.workers.trusted import trust

LONG = {"max_new_tokens": 3000, "ignore_eos": True}


@dataclass
class Served:
    server: EngineServer
    client: Client
    loop: LoopThread

    def pause(self, mode: UpdateMode) -> None:
        engine = self.server.loop.engine
        self.server.loop.call(lambda: engine.pause(mode)).result(DEADLINE_S)

    def go_on(self) -> None:
        engine = self.server.loop.engine
        self.server.loop.call(lambda: engine.resume() or ()).result(DEADLINE_S)


@contextmanager
def serving(engine: GenerationEngine, **options: Any) -> Iterator[Served]:
    """The server on an event loop in a thread, as it runs in a worker process."""

    async def create() -> EngineServer:
        return EngineServer(engine, API_KEY, "127.0.0.1", tls=trust().server(), **options)

    with loop_thread(deadline_s=DEADLINE_S) as loop:
        server = loop.run(create())
        client = Client(loop.run(server.start()), ThreadPoolExecutor(40))
        try:
            yield Served(server, client, loop)
        finally:
            loop.run(server.stop())
            client.pool.shutdown()


@pytest.fixture(scope="module")
def shared(directories: list[Path]) -> Iterator[Served]:
    engine = GenerationEngine(directories[0], version="1.0", max_running_requests=16)
    with serving(engine, max_body_bytes=100_000, max_queued_requests=20) as served:
        yield served


def test_a_connection_without_the_key_is_closed_and_one_with_it_stays(
    directories: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("corral.workers.engine.server.GuardedListener", partial(GuardedListener, timeout_s=3.0))
    engine = GenerationEngine(directories[0], version="1.0", max_running_requests=1)
    with serving(engine) as served:
        address = urlsplit(served.client.url)
        check_only_the_silent_are_closed(("127.0.0.1", address.port or 0), trust().client(), asking("/health", API_KEY))


@pytest.fixture
def client(shared: Served) -> Client:
    """The module's server, idle."""
    shared.pause("abort")
    shared.go_on()
    return shared.client


def test_a_single_prompt_is_answered_as_sglang_answers(client: Client, references: list[Any]) -> None:
    prompt = [7, 31, 15, 8]
    answer = client.generate(prompt, max_new_tokens=3, temperature=0, ignore_eos=True, logprob_start_len=0)
    expected = reference_greedy(references[0], prompt, max_new_tokens=3)
    meta = answer["meta_info"]
    assert answer["output_ids"] == expected and "text" not in answer  # there is no tokenizer
    assert meta["id"]
    assert meta["finish_reason"] == {"type": "length", "length": 3}
    assert (meta["prompt_tokens"], meta["completion_tokens"], meta["cached_tokens"]) == (4, 3, 0)
    assert (meta["weight_version"], meta["num_retractions"]) == ("1.0", 0)
    assert meta["weight_versions"] == [{"version": "1.0", "start": 0, "end": 3}]
    assert [[token_id, text] for _, token_id, text in meta["output_token_logprobs"]] == [[t, None] for t in expected]
    assert meta["output_token_logprobs_length"] == 3
    logprobs = [logprob for logprob, _, _ in meta["output_token_logprobs"]]
    assert logprobs == pytest.approx(reference_logprobs(references[0], prompt, expected).tolist(), abs=1e-4)
    assert [token_id for _, token_id, _ in meta["input_token_logprobs"]] == prompt
    assert meta["input_token_logprobs"][0] == [None, 7, None]
    scored = [logprob for logprob, _, _ in meta["input_token_logprobs"][1:]]
    assert scored == pytest.approx(reference_logprobs(references[0], prompt[:1], prompt[1:]).tolist(), abs=1e-4)


def test_where_there_is_a_tokenizer_answers_have_their_text(
    directories: list[Path], references: list[Any], tmp_path: Path
) -> None:
    model = add_tokenizer(shutil.copytree(directories[0], tmp_path / "model"))
    whole = reference_greedy(references[0], [7, 31, 15, 8], max_new_tokens=12)
    stop_token = next(token for token in whole[3:] if token not in whole[:3])
    end = whole.index(stop_token)
    greedy = {"max_new_tokens": 12, "temperature": 0, "ignore_eos": True}
    stopped = {**greedy, "ignore_eos": False, "stop_token_ids": [stop_token]}
    with serving(GenerationEngine(model)) as served:
        sampling = [greedy, {**greedy, "stop": text_of(whole[5:7])}, stopped, {**stopped, "no_stop_trim": True}]
        answers = [served.client.generate([7, 31, 15, 8], **params) for params in sampling]
        assert [answer["text"] for answer in answers] == [
            text_of(whole),
            text_of(whole).partition(text_of(whole[5:7]))[0],
            text_of(whole[:end]),
            text_of(whole[: end + 1]),
        ]


def test_a_tokenizer_that_cannot_be_used_costs_answers_their_text_only(
    directories: list[Path], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = shutil.copytree(directories[0], tmp_path / "model")
    (model / "tokenizer.json").write_text("{")
    with serving(GenerationEngine(model)) as served:
        answer = served.client.generate([7], max_new_tokens=2, ignore_eos=True)
    assert len(answer["output_ids"]) == 2 and "text" not in answer
    assert "answers come without their text: cannot use the tokenizer" in caplog.text


WRONG: list[tuple[Any, str]] = [
    ({}, "input_ids: Field required"),
    ({"input_ids": []}, "the prompt is empty"),
    ({"input_ids": [3, 64]}, "token id 64 at position 1 of the prompt is outside the vocabulary [0, 64)"),
    ({"input_ids": [3, -1]}, "token id -1 at position 1"),
    ({"input_ids": [10**30]}, "outside the vocabulary"),
    ({"input_ids": ["a"]}, "input_ids"),
    ({"input_ids": [True]}, "input_ids"),
    ({"input_ids": [[1], [2]]}, "must be a list of integer token ids, of one prompt"),
    ({"input_ids": [1] * 4000}, "may reach 4128 tokens, more than the model's context length of 4096"),
    ({"input_ids": [1], "sampling_params": {"max_new_tokens": 10**20}}, "context length of 4096"),
    (
        {"input_ids": [1], "sampling_params": {"temperature": -1}},
        "temperature: Input should be greater than or equal to 0, got -1",
    ),
    ({"input_ids": [1], "sampling_params": {"n": 2}}, "sampling_params.n: Extra inputs are not permitted, got 2"),
    ({"input_ids": [1], "sampling_params": {"frequency_penalty": 1}}, "sampling_params.frequency_penalty: Extra"),
    ({"input_ids": [1], "sampling_params": {"min_p": "a"}}, "sampling_params.min_p"),
    ({"input_ids": [1], "sampling_params": {"stop": "a"}}, "stop=['a'] needs the text of the answer"),
    ({"input_ids": [1], "sampling_params": {"stop": ["a", 5]}}, "sampling_params.stop"),
    ({"input_ids": [1], "sampling_params": {"regex": "a+"}}, "sampling_params.regex"),
    ({"input_ids": [1], "sampling_params": {"logit_bias": {"1": 2}}}, "sampling_params.logit_bias"),
    ({"input_ids": [1, 99], "stream": True}, "token id 99"),
    ({"input_ids": [1], "stream": "yes"}, "stream"),
    ({"text": "hello"}, "text"),
    ({"input_ids": [1], "logprob_start_len": 1, "return_logprob": True}, "logprob_start_len must be below"),
    ({"input_ids": [1], "return_original_logprob": True}, "return_original_logprob needs return_logprob: true"),
    ({"input_ids": [1], "rid": "a"}, "rid: Extra inputs are not permitted"),
    ({"input_ids": [1], "sampling_params": [{}]}, "sampling_params: Input should be"),
    ({"input_ids": [1], "sampling_params": 5}, "sampling_params: Input should be"),
    ({"input_ids": [1], "sampling_params": {"sampling_seed": 2**63}}, "sampling_params.sampling_seed"),
    ([1, 2], "should be an object"),
]


def test_a_wrong_request_is_answered_400_and_says_why(client: Client) -> None:
    for body, message in WRONG:
        status, answer = client.call("POST", "/generate", body)
        assert (status, message in answer["error"]["message"]) == (400, True), (body, answer)
    for malformed in (b"{", b"\xff\xfe", b"[" * 50_000, b'{"input_ids": "\\ud800"}', b"null"):
        status, answer = client.call("POST", "/generate", malformed)
        assert status == 400 and answer["error"]["message"], malformed[:30]


def test_a_body_beyond_the_limit_is_answered_413(client: Client) -> None:
    assert client.call("POST", "/generate", b" " * 100_001)[0] == 413


def test_every_endpoint_is_closed_without_the_key(client: Client) -> None:
    paths = ("/health", "/ready", "/get_model_info", "/metrics", "/no_such_endpoint")
    for method, path in [("POST", "/generate"), *(("GET", path) for path in paths)]:
        for key in (None, "", "wrong", API_KEY + "x", "h\xe9"):
            status, answer = client.call(method, path, key=key)
            assert status == 401 and API_KEY not in str(answer), (path, key)


def test_unknown_paths_and_methods_are_answered_404_and_405(client: Client) -> None:
    assert client.call("GET", "/no_such_endpoint")[0] == 404
    assert client.call("GET", "/generate")[0] == 405


def test_the_server_tells_its_model_state_and_metrics(shared: Served, client: Client, directories: list[Path]) -> None:
    model = client.get("/get_model_info")
    assert (model["model_path"], model["weight_version"]) == (str(directories[0]), "1.0")
    assert model["model_type"] == "qwen2"
    assert client.call("GET", "/health")[0] == client.call("GET", "/ready")[0] == 200
    running = [client.start([7, index], **LONG) for index in range(2)]
    wait_until(lambda: client.metric("num_running_reqs") == 2, "the requests to run")
    assert (client.metric("num_running_reqs"), client.metric("num_queue_reqs")) == (2, 0)
    shared.pause("abort")
    shared.go_on()
    assert all(answer.result(DEADLINE_S)["meta_info"]["finish_reason"]["type"] == "abort" for answer in running)
    before = client.metric("generation_tokens_total")
    client.generate([7], max_new_tokens=9, ignore_eos=True)
    assert client.metric("generation_tokens_total") == before + 9


@pytest.mark.parametrize("streamed", [b"true", b"false"])
def test_a_client_that_hangs_up_ends_its_answer(client: Client, streamed: bytes) -> None:
    sampling = json.dumps(LONG).encode()
    body = b'{"input_ids": [7], "stream": %b, "sampling_params": %b}' % (streamed, sampling)
    with raw_connection(client) as connection:
        connection.sendall(raw_request(body))
        wait_until(lambda: client.metric("num_running_reqs") == 1, "the request to run")
        if streamed == b"true":
            assert connection.recv(100)
    wait_until(lambda: client.metric("num_running_reqs") == 0, "the request to be aborted")


def test_an_aborted_stream_ends_with_the_reason(shared: Served, client: Client) -> None:
    streaming = client.pool.submit(lambda: client.stream([7], **LONG))
    wait_until(lambda: client.metric("num_running_reqs") == 1, "the request to run")
    shared.pause("abort")
    assert streaming.result(DEADLINE_S)[-1]["meta_info"]["finish_reason"]["type"] == "abort"


def test_a_full_queue_is_answered_503(shared: Served, client: Client) -> None:
    for _ in range(2):  # the second changes nothing
        shared.pause("abort")
    assert client.call("GET", "/ready")[0] == client.call("GET", "/health")[0] == 503
    waiting = [client.start([7], max_new_tokens=2, ignore_eos=True) for _ in range(36)]
    wait_until(lambda: client.metric("num_queue_reqs") == 36, "the requests to queue")
    status, answer = client.call("POST", "/generate", {"input_ids": [7]})
    assert status == 503
    assert "36 of at most 36 requests are in flight" in answer["error"]["message"]
    shared.go_on()
    assert all(len(future.result(DEADLINE_S)["output_ids"]) == 2 for future in waiting)


@contextmanager
def raw_connection(client: Client) -> Iterator[socket.socket]:
    """What is sent by it is no HTTP but what the test makes so."""
    url = urlsplit(client.url)
    with socket.create_connection((url.hostname, url.port), DEADLINE_S) as plain:
        with trust().client().wrap_socket(plain) as connection:
            yield connection


def raw_request(body: bytes, headers: bytes = b"") -> bytes:
    head = f"POST /generate HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {API_KEY}\r\nContent-Length: {len(body)}\r\n"
    return head.encode() + headers + b"\r\n" + body


def test_hundreds_of_random_blobs_do_not_harm_the_server(client: Client, references: list[Any]) -> None:
    generator = random.Random(7)
    valid = json.dumps({"input_ids": [7, 8], "sampling_params": {"max_new_tokens": 2}}).encode()

    def blob(index: int) -> bytes:
        noise = generator.randbytes(generator.randrange(1, 300))
        spoilt = bytearray(valid)
        for _ in range(3):
            spoilt[generator.randrange(len(spoilt))] = generator.randrange(256)
        kinds = [
            noise,
            raw_request(noise),
            raw_request(bytes(spoilt)),
            raw_request(noise, b"Content-Encoding: gzip\r\n"),
            raw_request(valid, b"Transfer-Encoding: chunked\r\n"),
            raw_request(valid)[: generator.randrange(5, 150)],
        ]
        return kinds[index % len(kinds)]

    for index in range(300):
        with raw_connection(client) as connection:
            connection.sendall(blob(index))
            if index % 10 == 0:  # most clients just vanish; some wait until the server has answered or hung up
                with suppress(ConnectionError):
                    connection.shutdown(socket.SHUT_WR)
                    while connection.recv(4096):
                        pass
    answer = client.generate([7], max_new_tokens=8, temperature=0, ignore_eos=True)
    assert answer["output_ids"] == reference_greedy(references[0], [7], max_new_tokens=8)
    wait_until(lambda: client.metric("num_running_reqs") == 0, "the requests of vanished clients to end")


class FailingEngine(GenerationEngine):
    """Fails at its first step, as when a device is lost."""

    def step(self) -> list[RequestOutput]:
        raise RuntimeError("the device is gone")


def test_a_failed_engine_answers_everyone_and_reports_itself(directories: list[Path]) -> None:
    with serving(FailingEngine(directories[0])) as served:
        client = served.client
        served.pause("abort")
        waiting = client.pool.submit(lambda: client.call("POST", "/generate", {"input_ids": [7]}))
        streaming = client.pool.submit(lambda: client.stream([7]))
        wait_until(lambda: client.metric("num_queue_reqs") == 2, "the requests to queue")
        served.go_on()
        with pytest.raises(RuntimeError, match="the device is gone"):
            served.loop.run(served.server.wait_ended())
        status, answer = waiting.result(DEADLINE_S)
        assert status == 503
        assert "the device is gone" in answer["error"]["message"]
        [event] = streaming.result(DEADLINE_S)
        assert "the device is gone" in event["error"]["message"]
        assert client.call("GET", "/health")[0] == 503
        assert client.call("POST", "/generate", {"input_ids": [7]})[0] == 503
