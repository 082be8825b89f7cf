"""Both backends behind one seam: the same requests, the same answers, the same effect of every order.

The reference is transformers, one forward pass at a time. The last tests are of SGLang alone, and end its server.
"""

import asyncio
import json
import shutil
import signal
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest
import torch

from corral.experiments.config.rollout import SamplingConfig, UpdateMode, WeightsConfig
from corral.workers.checkpoint.manifest import MANIFEST_NAME, write_manifest
from corral.workers.checkpoint.published_weights import PublishedWeights
from corral.workers.engine.engine import GenerationEngine, StagedModel
from corral.workers.episodes.partial_answer import PartialAnswer
from corral.workers.episodes.stream_events import StreamEvent
from corral.workers.generation import sglang as sglang_backend
from corral.workers.generation.backend import BackendLostError
from corral.workers.generation.embedded import EmbeddedBackend
from corral.workers.generation.held_weights import StaleServerError
from corral.workers.generation.server_client import ServerError, SglangClient
from corral.workers.generation.sglang import SglangBackend
from corral.workers.generation.weight_updates import UpdateOrder, WeightsTornError
from corral.workers.rollout.generation_client import FailedTry, GenerationClient, RouteFunction
from corral.workers.streams.https import open_session
from tests.workers.backends.trained_versions import publish, stepped
from tests.workers.backends.training_helpers import read_weights
from tests.workers.checkpoint.sealing import describe
from tests.workers.engine.tiny_models import (
    EOS_TOKEN_ID,
    load_reference,
    reference_greedy,
    reference_logprobs,
    reference_logprobs_over_cache,
    save_tiny_model,
)
from tests.workers.generation.hosts import running_hosts
from tests.workers.generation.servers import (
    ADMIN_KEY,
    API_KEY,
    DEADLINE_S,
    Served,
    serving,
    staging,
    wait_until,
)
from tests.workers.trusted import trust
from tests.workers.weight_transport.adapted_versions import merged, publish_adapted, random_adapter

SHORT = [7, 31, 15, 8]
LONG = [(3 * index) % 60 for index in range(37)]
GREEDY = {"max_new_tokens": 12, "temperature": 0, "ignore_eos": True}
IN_FLIGHT = {"max_new_tokens": 3000, "ignore_eos": True, "temperature": 1.0}
TOLERANCE = 1e-4  # float32; what is seen is 3e-6
SILENCE_TIMEOUT_S = 3.0


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    root = tmp_path_factory.mktemp("models")
    return [save_tiny_model(root / f"v{seed}", seed=seed) for seed in range(2)]


@pytest.fixture(scope="module")
def references(models: list[Path]) -> list[Any]:
    return [load_reference(directory) for directory in models]


@pytest.fixture(scope="module", params=["hf", "sglang"])
def shared(
    request: pytest.FixtureRequest, models: list[Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Served]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sglang_backend, "SILENCE_TIMEOUT_S", SILENCE_TIMEOUT_S)
        with serving(request.param, models[0], tmp_path_factory.mktemp("server")) as served:
            yield served


@pytest.fixture
def served(shared: Served, models: list[Path]) -> Served:
    """The module's server, idle, and with the first weights again."""
    shared.abort_all()
    shared.bring_to("0.0", models[0])
    return shared


def logprobs_of(answer: Any, kind: str = "output", name: str = "logprobs") -> list[float]:
    return [logprob for logprob, _, _ in answer["meta_info"][f"{kind}_token_{name}"]]


def ended(served: Served, running: "Future[Any]") -> Any:
    """What a request has got by now."""
    served.abort_all()
    answer = running.result(DEADLINE_S)
    assert answer["meta_info"]["finish_reason"]["type"] == "abort"
    return answer


def switch_of(answer: Any, old: str = "0.0", new: str = "0.1") -> int:
    """Tokens by the old weights; those behind them are by the new ones."""
    [(before, start, switch), (after, start_after, end)] = spans_of(answer)
    assert (before, after, start, start_after, end) == (old, new, 0, switch, len(answer["output_ids"]))
    assert 0 < switch < end
    return int(switch)


def spans_of(answer: Any) -> list[tuple[str, int, int]]:
    return [(span["version"], span["start"], span["end"]) for span in answer["meta_info"]["weight_versions"]]


def test_greedy_answers_are_those_of_transformers(served: Served, references: list[Any]) -> None:
    answers = served.client.generate([SHORT, LONG], logprob_start_len=0, **GREEDY)
    for prompt, answer in zip([SHORT, LONG], answers, strict=True):
        ids = answer["output_ids"]
        assert ids == reference_greedy(references[0], prompt, max_new_tokens=12)
        assert logprobs_of(answer, "input")[0] is None
        scored = logprobs_of(answer, "input")[1:]
        assert scored == pytest.approx(
            reference_logprobs(references[0], prompt[:1], prompt[1:]).tolist(), abs=TOLERANCE
        )
        meta = answer["meta_info"]
        assert [token for _, token, _ in meta["input_token_logprobs"]] == prompt
        assert [token for _, token, _ in meta["output_token_logprobs"]] == ids
        assert spans_of(answer) == [("0.0", 0, 12)] and meta["finish_reason"] == {"type": "length", "length": 12}


def test_the_logprobs_of_sampled_tokens_are_those_of_the_tempered_distribution_of_their_own_answer(
    served: Served, references: list[Any]
) -> None:
    asked = {"max_new_tokens": 48, "ignore_eos": True}
    at_once = [
        (prompt, temperature, served.client.start(prompt, temperature=temperature, **asked))
        for prompt in (SHORT, LONG)
        for temperature in (1.0, 0.7, 1.4)
    ]
    for prompt, temperature, asking in at_once:
        answer = asking.result()
        expected = reference_logprobs(references[0], prompt, answer["output_ids"], temperature=temperature)
        assert logprobs_of(answer) == pytest.approx(expected.tolist(), abs=TOLERANCE)


def test_an_answers_logprobs_at_temperature_1_are_those_of_the_model(served: Served, references: list[Any]) -> None:
    """In the answer itself, and by reading it once more, which is SGLang's only way beside the tempered ones."""
    asked = {"max_new_tokens": 24, "temperature": 0.6, "top_p": 0.9, "ignore_eos": True}
    for prompt in (SHORT, LONG):
        answer = served.client.generate(prompt, return_original_logprob=True, **asked)
        ids = answer["output_ids"]
        tempered = reference_logprobs(references[0], prompt, ids, temperature=0.6).tolist()
        at_1 = reference_logprobs(references[0], prompt, ids).tolist()
        assert logprobs_of(answer) == pytest.approx(tempered, abs=TOLERANCE) != pytest.approx(at_1, abs=TOLERANCE)
        read = served.client.generate(
            [*prompt, *ids], logprob_start_len=len(prompt) - 1, **asked | {"max_new_tokens": 1}
        )
        assert logprobs_of(read, "input")[1:] == pytest.approx(at_1, abs=TOLERANCE)
        if isinstance(served.backend, SglangBackend):
            assert "output_token_original_logprobs" not in answer["meta_info"]
        else:
            assert [token for _, token, _ in answer["meta_info"]["output_token_original_logprobs"]] == ids
            assert logprobs_of(answer, "output", "original_logprobs") == pytest.approx(at_1, abs=TOLERANCE)


def test_a_stream_brings_each_token_once_and_as_many_at_a_time_as_are_asked_for(
    served: Served, references: list[Any]
) -> None:
    sampling = {"max_new_tokens": 40, "temperature": 0, "ignore_eos": True}
    whole = reference_greedy(references[0], SHORT, max_new_tokens=40)
    singly, by_ten = (served.client.stream(SHORT, stream_interval=interval, **sampling) for interval in (1, 10))
    assert 1 < len(by_ten) <= 5 < len(singly)
    for events in (singly, by_ten):
        assert [token for event in events for token in event["output_ids"]] == whole
        assert [len(logprobs_of(event)) for event in events] == [len(event["output_ids"]) for event in events]
        assert [event["meta_info"]["finish_reason"] for event in events[:-1]] == [None] * (len(events) - 1)
        assert events[-1]["meta_info"]["finish_reason"] == {"type": "length", "length": 40}
        assert spans_of(events[-1]) == [("0.0", 0, 40)]


def test_what_a_sibling_and_a_next_turn_share_with_another_request_is_computed_once_by_a_version(
    served: Served, models: list[Path], references: list[Any]
) -> None:
    prompt = [*LONG, *SHORT]  # which nobody else has asked for
    [running] = served.start_running([prompt], **IN_FLIGHT)
    sibling = served.client.generate(prompt, **GREEDY)
    turn = [*prompt, *sibling["output_ids"], 5, 6, 7]
    after = served.client.generate(turn, logprob_start_len=len(turn) - 3, **GREEDY)
    cached = [answer["meta_info"]["cached_tokens"] for answer in (sibling, after)]
    assert cached == [len(prompt) - 1, len(prompt) + 11]  # the last token of an answer was read by nobody
    for asked, answer in ((prompt, sibling), (turn, after)):
        assert answer["output_ids"] == reference_greedy(references[0], asked, max_new_tokens=12)
        expected = reference_logprobs(references[0], asked, answer["output_ids"]).tolist()
        assert logprobs_of(answer) == pytest.approx(expected, abs=TOLERANCE)
    assert logprobs_of(after, "input")[1:] == pytest.approx(
        reference_logprobs(references[0], turn[:-2], turn[-2:]).tolist(), abs=TOLERANCE
    )
    served.abort_all()
    running.result(DEADLINE_S)
    served.bring_to("0.1", models[1])
    by_newer = served.client.generate(turn, **GREEDY)
    assert by_newer["meta_info"]["cached_tokens"] == 0
    assert by_newer["output_ids"] == reference_greedy(references[1], turn, max_new_tokens=12)


@pytest.mark.parametrize(
    ("field", "wrong"),
    [("min_p", 1.5), ("frequency_penalty", 2.5), ("stop", "a")],
)
def test_a_request_out_of_range_is_refused_by_the_name_of_its_field(served: Served, field: str, wrong: Any) -> None:
    """A stop string always is: there is no tokenizer."""
    status, answer = served.client.call("POST", "/generate", {"input_ids": SHORT, "sampling_params": {field: wrong}})
    assert status == 400 and field in answer["error"]["message"]


def test_an_answer_ends_with_the_token_that_stops_it(served: Served, references: list[Any]) -> None:
    whole = reference_greedy(references[0], SHORT, max_new_tokens=12)
    wanted = next(token for token in whole[2:] if token not in whole[:2] and token != EOS_TOKEN_ID)
    end = whole.index(wanted) + 1
    stopped = served.client.generate(SHORT, max_new_tokens=12, temperature=0, stop_token_ids=[wanted])
    assert stopped["output_ids"] == whole[:end]
    assert stopped["meta_info"]["finish_reason"] == {"type": "stop", "matched": wanted}
    taken = PartialAnswer(max_new_tokens=12)
    taken.extend(msgspec.convert(stopped, StreamEvent))
    assert taken.stopped and taken.finished


def test_the_models_own_end_stops_an_answer_unless_it_is_to_be_ignored(served: Served) -> None:
    first = served.client.generate([SHORT] * 8, max_new_tokens=120, temperature=1.0)
    for answer in first:
        ids, reason = answer["output_ids"], answer["meta_info"]["finish_reason"]
        if reason["type"] == "stop":
            assert ids.index(EOS_TOKEN_ID) == len(ids) - 1 and reason["matched"] == EOS_TOKEN_ID
        else:
            assert EOS_TOKEN_ID not in ids and len(ids) == 120
    assert any(answer["meta_info"]["finish_reason"]["type"] == "stop" for answer in first)
    every_token = {"stop_token_ids": list(range(EOS_TOKEN_ID))}
    ignored = served.client.generate(SHORT, max_new_tokens=20, temperature=1.0, ignore_eos=True, **every_token)
    assert len(ignored["output_ids"]) == 20


def test_an_aborted_request_gives_the_tokens_that_it_has(served: Served, references: list[Any]) -> None:
    [running] = served.start_running([SHORT], **IN_FLIGHT)
    answer = ended(served, running)
    ids = answer["output_ids"]
    assert 0 < len(ids) < 3000
    assert logprobs_of(answer) == pytest.approx(reference_logprobs(references[0], SHORT, ids).tolist(), abs=TOLERANCE)
    taken = PartialAnswer(max_new_tokens=3000)
    taken.extend(msgspec.convert(answer, StreamEvent))
    assert not taken.finished and taken.output_ids == ids


def test_who_generates_cannot_change_the_server(served: Served) -> None:
    """The embedded engine has no such endpoints at all."""
    is_embedded = not isinstance(served.backend, SglangBackend)
    for path in ("/pause_generation", "/continue_generation", "/abort_request", "/update_weights_from_disk"):
        for key in (None, "wrong", API_KEY):
            refusal = 404 if is_embedded and key == API_KEY else 401
            assert served.client.call("POST", path, {}, key=key)[0] == refusal, (path, key)
    assert served.client.call("POST", "/generate", {"input_ids": SHORT}, key=None)[0] == 401
    assert served.client.call("POST", "/generate", {"input_ids": SHORT}, key="wrong")[0] == 401


@pytest.mark.parametrize("mode", ["abort", "in_place", "retract"])
def test_a_paused_server_takes_no_requests_until_it_goes_on(served: Served, mode: UpdateMode) -> None:
    served.pause(mode)
    assert served.client.call("GET", "/ready")[0] == 503
    waiting = served.client.start(SHORT, max_new_tokens=4, temperature=1.0, ignore_eos=True)
    assert served.client.call("GET", "/ready")[0] == 503
    assert not waiting.done()
    served.go_on()
    assert served.client.call("GET", "/ready")[0] == 200
    assert len(waiting.result(DEADLINE_S)["output_ids"]) == 4


def test_pause_abort_ends_requests_on_the_old_weights(
    served: Served, models: list[Path], references: list[Any]
) -> None:
    running = served.start_running([SHORT, LONG], **IN_FLIGHT)
    served.pause("abort")
    for prompt, future in zip([SHORT, LONG], running, strict=True):
        answer = future.result(DEADLINE_S)
        ids = answer["output_ids"]
        assert answer["meta_info"]["finish_reason"]["type"] == "abort" and 0 < len(ids) < 3000
        assert spans_of(answer) == [("0.0", 0, len(ids))]
        expected = reference_logprobs(references[0], prompt, ids).tolist()
        assert logprobs_of(answer) == pytest.approx(expected, abs=TOLERANCE)


def test_pause_in_place_goes_on_with_the_cache_of_the_old_weights(
    served: Served, models: list[Path], references: list[Any]
) -> None:
    [running] = served.start_running([SHORT], **IN_FLIGHT)
    with served.taking(staging(), mode="in_place") as taking:
        taking.bring_to("0.1", models[1])
    served.client.generate(SHORT, **GREEDY)
    answer = ended(served, running)
    ids, switch = answer["output_ids"], switch_of(answer)
    # SGLang has always begun the next token when it pauses: the old weights make it, and the new ones get the credit.
    switch += isinstance(served.backend, SglangBackend)
    before = reference_logprobs(references[0], SHORT, ids[:switch]).tolist()
    num_cached = len(SHORT) + switch - 1  # the last old token is read, and the next predicted, by the new weights
    after = reference_logprobs_over_cache(references[0], references[1], SHORT, ids, num_cached=num_cached).tolist()
    assert logprobs_of(answer) == pytest.approx(before + after, abs=TOLERANCE)


def test_pause_retract_goes_on_as_if_the_new_weights_had_read_everything(
    served: Served, models: list[Path], references: list[Any]
) -> None:
    running = served.start_running([SHORT, LONG], **IN_FLIGHT)
    served.bring_to("0.1", models[1])
    served.client.generate(SHORT, **GREEDY)
    served.abort_all()
    for prompt, future in zip([SHORT, LONG], running, strict=True):
        answer = future.result(DEADLINE_S)
        ids, switch = answer["output_ids"], switch_of(answer)
        before = reference_logprobs(references[0], prompt, ids[:switch]).tolist()
        after = reference_logprobs(references[1], prompt, ids)[switch:].tolist()
        assert logprobs_of(answer) == pytest.approx(before + after, abs=TOLERANCE)
        taken = PartialAnswer(max_new_tokens=3000)
        taken.extend(msgspec.convert(answer, StreamEvent))
        assert [version.step for version in taken.versions()] == [0] * switch + [1] * (len(ids) - switch)


def test_a_late_joiner_is_brought_to_the_present_weights_and_not_touched_again(
    served: Served, models: list[Path], references: list[Any]
) -> None:
    served.bring_to("3.17", models[1])
    assert served.client.get("/get_model_info")["weight_version"] == "3.17"
    [running] = served.start_running([SHORT], **IN_FLIGHT)
    served.bring_to("3.17", models[1])
    assert ended(served, running)["meta_info"]["num_retractions"] == 0
    answer = served.client.generate(SHORT, **GREEDY)
    assert answer["output_ids"] == reference_greedy(references[1], SHORT, max_new_tokens=12)
    assert spans_of(answer) == [("3.17", 0, 12)]


def test_torn_weights_are_refused_before_the_server_hears_of_them(
    served: Served, models: list[Path], references: list[Any], tmp_path: Path
) -> None:
    torn = tmp_path / "v1"
    shutil.copytree(models[1], torn)
    write_manifest(torn, describe(torn), {})
    with pytest.raises(WeightsTornError, match=f"manifest.json: expected BLAKE3 {'0' * 64}"):
        served.bring_to("0.1", torn, digest="0" * 64)
    content = bytearray((torn / "model.safetensors").read_bytes())
    content[-1] ^= 1  # still a valid file of the right size, which any engine would load
    (torn / "model.safetensors").write_bytes(content)
    [running] = served.start_running([SHORT], **IN_FLIGHT)
    with pytest.raises(WeightsTornError, match="model.safetensors: expected BLAKE3"):
        served.bring_to("0.1", torn)
    answer = ended(served, running)
    assert [version for version, _, _ in spans_of(answer)] == ["0.0"] and answer["meta_info"]["num_retractions"] == 0
    with pytest.raises(ServerError, match="is not there"):
        served.bring_to("0.1", tmp_path / "absent")
    (tmp_path / "empty").mkdir()  # nothing to compare it with: the engine itself refuses it
    with pytest.raises(ServerError, match="could not be read|update_weights_from_disk answered 400"):
        served.bring_to("0.1", tmp_path / "empty")
    answer = served.client.generate(SHORT, **GREEDY)
    assert answer["output_ids"] == reference_greedy(references[0], SHORT, max_new_tokens=12)
    assert served.client.call("GET", "/ready")[0] == 200


def test_published_weights_are_read_once_and_what_they_cost_is_told(
    served: Served, models: list[Path], references: list[Any], tmp_path: Path
) -> None:
    published = tmp_path / "v1"
    shutil.copytree(models[1], published)
    sealed = write_manifest(published, describe(published), {})
    [running] = served.start_running([SHORT], **IN_FLIGHT)
    served.bring_to("0.1", published, digest=sealed.digest)
    shutil.rmtree(published)
    update = served.updates.last
    assert update is not None and update.version == "0.1" and update.staged_s > 0.0 and update.stopped_s > 0.0
    assert update.bytes_read == sum(entry.size for entry in sealed.files.values())
    assert Path(served.client.get("/get_model_info")["model_path"]).name == sealed.digest  # in the host's memory
    answer = served.client.generate(SHORT, **GREEDY)
    assert answer["output_ids"] == reference_greedy(references[1], SHORT, max_new_tokens=12)
    switch_of(ended(served, running))


@pytest.mark.parametrize("shared", ["hf"], indirect=True)  # a server of SGLang is given files of the same folder
def test_weights_from_another_host_are_taken_over_with_requests_in_flight(
    served: Served, models: list[Path], references: list[Any], tmp_path: Path
) -> None:
    published = tmp_path / "v1"
    shutil.copytree(models[1], published)
    sealed = write_manifest(published, describe(published), {})
    weights = PublishedWeights(version="0.1", weights=str(published), digest=sealed.digest)
    memory = tmp_path / "memory"
    memory.mkdir()
    config = WeightsConfig(transport="broadcast", host_directory=memory)
    with running_hosts(tmp_path) as hosts, served.taking(staging(config)) as taking:
        giver = hosts.add()
        hosts.stage(giver, weights)
        for name in sealed.files.keys() - {MANIFEST_NAME}:
            (published / name).unlink()
        [running] = taking.start_running([SHORT], **IN_FLIGHT)
        taking.bring_to("0.1", published, digest=sealed.digest, sources=[giver.control])
        update = taking.updates.last
        answer = taking.client.generate(SHORT, **GREEDY)
    switch_of(ended(served, running))
    assert update is not None
    manifest_size = sealed.files[MANIFEST_NAME].size
    assert update.bytes_read == manifest_size
    assert update.bytes_received == sum(entry.size for entry in sealed.files.values()) - manifest_size
    assert answer["output_ids"] == reference_greedy(references[1], SHORT, max_new_tokens=12)


def test_a_delta_is_taken_over_as_the_whole_weights_are_with_requests_in_flight(
    served: Served, models: list[Path], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    weights = [{name: tensor.bfloat16() for name, tensor in read_weights(models[1]).items()}]
    versions = [publish(tmp_path / "v1", weights[0], companions=models[1])]
    for number in (2, 3):
        weights.append(stepped(weights[-1], share=0.02, seed=number, size=16))
        base = versions[-1].path
        versions.append(publish(tmp_path / f"v{number}", weights[-1], base=base, companions=models[1]))
    tear(versions[2].path / "model.safetensors.delta")
    references = [load_reference(version.path) for version in versions]
    with served.taking(staging(WeightsConfig(transport="delta"))) as taking:
        taking.bring_to("0.1", versions[0].path, digest=versions[0].digest)
        bytes_read = [bytes_of_last_update(taking)]
        for old, version in enumerate(versions[1:]):
            [running] = taking.start_running([SHORT], **IN_FLIGHT)
            taking.bring_to(f"0.{old + 2}", version.path, digest=version.digest)
            bytes_read.append(bytes_of_last_update(taking))
            taking.client.generate(SHORT, **GREEDY)
            answer = ended(served, running)
            ids, switch = answer["output_ids"], switch_of(answer, f"0.{old + 1}", f"0.{old + 2}")
            both = [reference_logprobs(reference, SHORT, ids) for reference in references[old : old + 2]]
            assert (both[0] - both[1]).abs().max() > 100 * TOLERANCE
            expected = both[0][:switch].tolist() + both[1][switch:].tolist()
            assert logprobs_of(answer) == pytest.approx(expected, abs=TOLERANCE)
    first, by_delta, whole = bytes_read
    assert by_delta < 0.05 * first and whole > 0.95 * first
    assert "model.safetensors is read whole, from the next that has it: the delta ends" in caplog.text


@pytest.mark.parametrize("shared", ["hf"], indirect=True)  # a server of SGLang is given files of the same folder
def test_after_many_adapters_a_server_has_the_bits_of_the_last_merged_weights(
    served: Served, models: list[Path], tmp_path: Path
) -> None:
    last = 50
    weights, generator = read_weights(models[0]), torch.Generator().manual_seed(0)
    shapes = {name: tensor.shape for name, tensor in weights.items() if name.endswith("_proj.weight")}
    with served.taking(staging(WeightsConfig(transport="lora"))) as taking:
        for number in range(1, last + 1):
            adapter = random_adapter(shapes, rank=1, generator=generator)
            files = {"model.safetensors": merged(weights, adapter, dtype=torch.float32)}
            version = publish_adapted(tmp_path / f"v{number}", files, adapter, base=models[0])
            running = taking.start_running([SHORT], **IN_FLIGHT) if number == last else []
            taking.bring_to(f"0.{number}", version.path, digest=version.digest)
            if number > 2:  # the first was read whole, and with the second the base
                assert bytes_of_last_update(taking) < 0.15 * (version.path / "model.safetensors").stat().st_size
    served.client.generate(SHORT, **GREEDY)
    switch_of(ended(served, running[0]), f"0.{last - 1}", f"0.{last}")
    by_adapters = served.run(served.backend.fingerprints(skipped=()))
    served.bring_to("1.0", version.path)
    assert served.run(served.backend.fingerprints(skipped=())) == by_adapters
    answer = served.client.generate(SHORT, **GREEDY)
    assert answer["output_ids"] == reference_greedy(load_reference(version.path), SHORT, max_new_tokens=12)


def bytes_of_last_update(served: Served) -> int:
    assert served.updates.last is not None
    return served.updates.last.bytes_read


def tear(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def test_a_server_that_acknowledges_an_update_and_does_not_load_it_is_found_and_updated_again(
    served: Served, models: list[Path], references: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    served.bring_to("0.1", models[1])
    served.bring_to("0.0", models[0])
    [running] = served.start_running([SHORT], **IN_FLIGHT)
    with monkeypatch.context() as patch:
        only_say_so(patch, served)
        with pytest.raises(StaleServerError, match=r"holds others in model\.layers\.0\.self_attn\.o_proj\.weight"):
            served.bring_to("0.1", models[1])
    has_gone_back = isinstance(served.backend, SglangBackend)  # to weights that it does hold, before it went on
    assert served.client.get("/get_model_info")["weight_version"] == ("0.0" if has_gone_back else "0.1")
    given_up = running.result(DEADLINE_S)
    assert given_up["meta_info"]["finish_reason"]["type"] == "abort"
    assert [version for version, _, _ in spans_of(given_up)] == ["0.0"]
    served.bring_to("0.1", models[1])
    answer = served.client.generate(SHORT, **GREEDY)
    assert answer["output_ids"] == reference_greedy(references[1], SHORT, max_new_tokens=12)


def only_say_so(patch: pytest.MonkeyPatch, served: Served) -> None:
    """Let the server take over the version of an update, and not its weights."""
    if not isinstance(served.backend, SglangBackend):

        def apply(self: GenerationEngine, staged: StagedModel, *, version: str) -> None:
            self.version = version

        patch.setattr(GenerationEngine, "apply_weights", apply)
        return

    async def load(self: SglangClient, *, version: str, **rest: Any) -> None:
        await asyncio.to_thread(served.client.order, "/update_weight_version", new_version=version)

    patch.setattr(SglangClient, "load", load)


def test_answers_whose_streams_go_silent_keep_their_tokens_and_go_on_by_newer_weights(
    served: Served, models: list[Path], references: list[Any]
) -> None:
    told = list[FailedTry]()

    async def route(uid: str, tokens: int, oldest_version: str, setback: FailedTry | None) -> str | None:
        if setback is not None:
            told.append(setback)
            order = UpdateOrder(version="0.1", weights=str(models[1]), digest=None, timeout_s=DEADLINE_S)
            await served.updates.bring_to(order)
        return served.client.url

    with ThreadPoolExecutor(1) as pool:
        sampling = sample_group(route, num_answers=8, max_new_tokens=1000, token_timeout_s=2.0)
        asking = pool.submit(served.run, sampling)
        wait_until(lambda: served.client.metric("num_running_reqs") >= 1, "answers to be under way")
        wait_until(lambda: served.client.metric("generation_tokens_total") >= 8, "tokens")
        served.pause("in_place")
        answers = asking.result(DEADLINE_S)
    assert told and not told[0].is_busy and "said nothing for" in told[0].reason
    assert all(answer.finished for answer in answers)
    check_versions(answers, references)
    assert {version.step for answer in answers for version in answer.versions()} == {0, 1}


def test_answers_beyond_those_that_are_enough_are_left_out_and_given_up_by_the_server(served: Served) -> None:
    async def route(uid: str, tokens: int, oldest_version: str, setback: FailedTry | None) -> str | None:
        return served.client.url

    answers = served.run(sample_group(route, num_answers=16, max_new_tokens=3000, enough=5))
    assert len(answers) == 5 and all(answer.finished for answer in answers)
    wait_until(lambda: served.client.metric("num_running_reqs") == 0, "the others to be given up")


def test_rollout_workers_get_whole_groups_over_an_update_in_the_middle_of_answers(
    served: Served, models: list[Path], references: list[Any]
) -> None:
    check_group_over_an_update(served, models, references, "abort")


@pytest.mark.parametrize("shared", ["hf"], indirect=True)  # of SGLang, this mode is refused
def test_rollout_workers_get_whole_groups_over_an_update_that_keeps_the_cache(
    served: Served, models: list[Path], references: list[Any]
) -> None:
    check_group_over_an_update(served, models, references, "in_place")


def check_group_over_an_update(served: Served, models: list[Path], references: list[Any], mode: UpdateMode) -> None:
    """More answers than the server decodes at a time, so that some of them wait in its queue."""
    tried = list[FailedTry | None]()

    async def route(uid: str, tokens: int, oldest_version: str, setback: FailedTry | None) -> str | None:
        tried.append(setback)
        return served.client.url

    with served.taking(staging(), mode=mode) as taking, ThreadPoolExecutor(1) as pool:
        sampling = sample_group(route, num_answers=24, max_new_tokens=120)
        asking = pool.submit(served.run, sampling)
        wait_until(lambda: served.client.metric("num_running_reqs") >= 8, "answers to be under way")
        if not isinstance(served.backend, SglangBackend):  # whose answers take ten times as long as the update
            served.pause("in_place")
        taking.bring_to("0.1", models[1])
        answers = asking.result(DEADLINE_S)
    # No server was told of as lost or failed.
    assert [setback and setback.is_busy for setback in tried] == [None, True][: 2 if mode == "abort" else 1]
    steps = [[version.step for version in answer.versions()] for answer in answers]
    assert any(set(versions) == {0, 1} for versions in steps)
    for answer, versions in zip(answers, steps, strict=True):
        ids = answer.output_ids
        assert versions == sorted(versions) and (len(ids) == 120 or ids[-1] == EOS_TOKEN_ID)
        both = [reference_logprobs(reference, SHORT, ids).tolist() for reference in references]
        expected = [both[version][index] for index, version in enumerate(versions)]
        is_mixed = mode == "in_place" and len(set(versions)) > 1
        end = versions.index(1) if is_mixed else len(ids)
        assert answer.logprobs[:end] == pytest.approx(expected[:end], abs=TOLERANCE)
        if is_mixed and len(ids) - end > 8:
            assert answer.logprobs[end:] != pytest.approx(expected[end:], abs=TOLERANCE)  # over the old cache


def check_versions(answers: list[PartialAnswer], references: list[Any]) -> None:
    """Each token of an answer to SHORT has the log-probability that the weights of its version give it."""
    for answer in answers:
        both = [reference_logprobs(reference, SHORT, answer.output_ids).tolist() for reference in references]
        expected = [both[version.step][index] for index, version in enumerate(answer.versions())]
        assert answer.logprobs == pytest.approx(expected, abs=TOLERANCE)


async def sample_group(
    route: RouteFunction,
    *,
    num_answers: int,
    max_new_tokens: int,
    token_timeout_s: float = DEADLINE_S,
    enough: int | None = None,
) -> list[PartialAnswer]:
    """As a rollout worker asks for it."""
    async with open_session(trust().client(), headers={"Authorization": f"Bearer {API_KEY}"}) as session:
        client = GenerationClient(
            session,
            route,
            sampling=SamplingConfig(max_new_tokens=max_new_tokens),
            stop_token_ids=[EOS_TOKEN_ID],
            token_timeout_s=token_timeout_s,
        )
        return await client.sample_group("0:a", SHORT, seeds=range(num_answers), enough=enough)


@pytest.mark.parametrize("kind", ["hf", pytest.param("sglang", marks=pytest.mark.slow)])
def test_a_server_that_is_told_to_end_gives_out_all_that_it_has_made(
    kind: str, references: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also what came in one event with new weights, whose version SGLang says only at the end of a request."""
    monkeypatch.setattr(sglang_backend, "_GIVE_UP_TIMEOUT_S", DEADLINE_S)  # however loaded the machine is
    monkeypatch.setattr(sglang_backend, "STOP_GRACE_S", DEADLINE_S)
    models = [save_tiny_model(tmp_path / f"v{seed}", seed=seed) for seed in range(2)]
    for path in (model / name for model in models for name in ("config.json", "generation_config.json")):
        path.write_text(json.dumps(json.loads(path.read_text()) | {"eos_token_id": None}))  # answers of full length
    setbacks, answers = list[FailedTry](), [PartialAnswer(max_new_tokens=3000, sampling_seed=seed) for seed in range(4)]
    with serving(kind, models[0], tmp_path) as served, ThreadPoolExecutor(1) as pool:

        async def route(uid: str, tokens: int, oldest_version: str, setback: FailedTry | None) -> str | None:
            if setback is None:
                return served.client.url
            setbacks.append(setback)
            raise asyncio.CancelledError  # it would go on elsewhere

        async def ask() -> None:
            async with open_session(trust().client(), headers={"Authorization": f"Bearer {API_KEY}"}) as session:
                client = GenerationClient(
                    session,
                    route,
                    sampling=SamplingConfig(max_new_tokens=3000),
                    stop_token_ids=[],
                    token_timeout_s=DEADLINE_S,
                )
                making = [client.complete(f"0:{n}", SHORT, answers[n], sampling=client.sampling) for n in range(4)]
                await asyncio.gather(*making, return_exceptions=True)

        asking = pool.submit(served.run, ask())
        wait_until(lambda: all(len(answer.output_ids) >= 32 for answer in answers), "answers to be under way")
        served.bring_to("0.1", models[1])
        num_before = [len(answer.output_ids) for answer in answers]
        wait_until(
            lambda: all(len(answer.output_ids) > num for answer, num in zip(answers, num_before, strict=True)),
            "tokens of the new weights",
        )
        served.run(served.backend.stop())
        asking.result(DEADLINE_S)
        under_way = [answer for answer in answers if not answer.finished]
        assert len(setbacks) == len(under_way) and all(setback.is_busy for setback in setbacks)
        if isinstance(served.backend, EmbeddedBackend):
            assert sum(len(answer.output_ids) for answer in answers) == served.backend.progress()["tokens_generated"]
    assert under_way and all(answer.versions()[-1].step == 1 for answer in under_way)
    check_versions(answers, references)


def test_the_server_says_what_it_does(served: Served) -> None:
    before = served.client.metric("generation_tokens_total")
    served.client.generate([SHORT, LONG], max_new_tokens=20, temperature=1.0, ignore_eos=True)
    wait_until(lambda: served.client.metric("generation_tokens_total") == before + 40, "the tokens to be counted")


@pytest.mark.parametrize("shared", ["sglang"], indirect=True)
def test_nobody_else_reads_the_keys_of_sglang(served: Served) -> None:
    server = process_of(served)
    settings = served.log_path.parent
    assert "--config" in server.cmdline() and "server_args=" in served.log_path.read_text()
    assert [path.name for path in settings.iterdir()] == ["sglang.log"]  # what `--config` named is gone
    for process in (server, *server.children(recursive=True)):
        shown = " ".join(process.cmdline()) + str(process.environ())
        assert API_KEY not in shown and ADMIN_KEY not in shown
    assert API_KEY not in served.log_path.read_text() and ADMIN_KEY not in served.log_path.read_text()


@pytest.mark.parametrize("shared", ["sglang"], indirect=True)
def test_sglang_that_hangs_or_dies_is_noticed_and_leaves_nothing_behind(served: Served) -> None:
    server = process_of(served)
    everybody = [server, *server.children(recursive=True)]
    [scheduler] = [process for process in everybody if "scheduler" in process.name()]

    async def watch() -> None:
        await served.backend.wait_ended()

    watching = served.loop.start(watch())
    scheduler.send_signal(signal.SIGSTOP)
    assert served.client.call("GET", "/ready")[0] == 200  # which says nothing of who generates
    with pytest.raises(BackendLostError, match="hangs: .* no answer"):
        watching.result(DEADLINE_S)
    scheduler.send_signal(signal.SIGCONT)
    scheduler.kill()
    with pytest.raises(BackendLostError, match="SGLang (ended|at http.* hangs)"):
        served.run(watch())
    assert "scheduler_0" in served.log_path.read_text() and "crashed with exit code -9" in served.log_path.read_text()
    served.run(served.backend.stop())
    wait_until(lambda: not any(process.is_running() for process in everybody), "the whole group to be gone")


def process_of(served: Served) -> psutil.Process:
    assert isinstance(served.backend, SglangBackend) and served.backend._process is not None
    return psutil.Process(served.backend._process.pid)
