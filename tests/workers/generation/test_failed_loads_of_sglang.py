"""Real SGLang whose load of new weights fails once, fails for good, and says nothing: every token computed again."""

import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from corral.workers.generation.backend import BackendLostError
from corral.workers.generation.server_client import ServerError, SglangClient
from corral.workers.generation.sglang import SglangBackend
from corral.workers.generation.weight_updates import UpdateOrder
from tests.workers.engine.tiny_models import load_reference, reference_logprobs, save_tiny_model
from tests.workers.generation.servers import DEADLINE_S, Served, serving, wait_until

pytestmark = pytest.mark.slow  # a start of SGLang

PROMPTS = ([7, 31, 15, 8], [(3 * index) % 60 for index in range(37)])
IN_FLIGHT = {"max_new_tokens": 3000, "ignore_eos": True, "temperature": 1.0}
TOLERANCE = 1e-4  # float32; what is seen is 3e-6


class Loads:
    """What is done to the files of a version, or to the server, before each of the loads that it is told of."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.before: list[Callable[[], object]] = []
        load = SglangClient.load

        async def told(client: SglangClient, **rest: Any) -> None:
            if self.before:
                self.before.pop(0)()
            await load(client, **rest)

        monkeypatch.setattr(SglangClient, "load", told)


def check(answers: list[Any], references: list[Any], *, version: str) -> int:
    """Tokens, of which each was made by the weights of its tag, computed again; no other tag was seen.

    SGLang gives an answer that was read back and given up without its tokens.
    """
    num_tokens = 0
    for prompt, answer in zip(PROMPTS, answers, strict=True):
        ids, logprobs = answer["output_ids"], [one for one, _, _ in answer["meta_info"]["output_token_logprobs"]]
        assert len(ids) == len(logprobs)
        num_tokens += len(ids)
        for span in answer["meta_info"]["weight_versions"]:
            assert span["version"] == version
            made = slice(span["start"], span["end"])
            again = reference_logprobs(references[int(span["version"][-1])], prompt, ids)[made].tolist()
            assert logprobs[made] == pytest.approx(again, abs=TOLERANCE), span
    return num_tokens


def in_flight(served: Served) -> list[Any]:
    """Requests that have tokens."""

    def num_steps() -> int:
        return served.log_path.read_text().count("Decode batch, #running-req: 2,")

    before = num_steps()
    running = [served.client.start(prompt, **IN_FLIGHT) for prompt in PROMPTS]
    wait_until(lambda: num_steps() > before + 10, "some tokens of each")
    return running


def now(served: Served) -> list[Any]:
    return [served.client.generate(prompt, max_new_tokens=40, ignore_eos=True) for prompt in PROMPTS]


def process_of(served: Served, name: str) -> psutil.Process:
    assert isinstance(served.backend, SglangBackend) and served.backend._process is not None
    everybody = psutil.Process(served.backend._process.pid).children(recursive=True)
    [found] = [one for one in everybody if name in one.name()]
    return found


def test_no_token_is_made_by_other_weights_than_its_tag_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    models = [save_tiny_model(tmp_path / f"v{seed}", seed=seed) for seed in range(4)]
    references = [load_reference(directory) for directory in models]
    loads = Loads(monkeypatch)

    def hide(number: int) -> None:
        (models[number] / "model.safetensors").rename(models[number] / "hidden")

    def show(number: int) -> None:
        (models[number] / "hidden").rename(models[number] / "model.safetensors")

    with serving("sglang", models[0], tmp_path) as served:
        running = in_flight(served)
        loads.before = [lambda: hide(1), lambda: show(1)]
        served.bring_to("0.1", models[1])  # at the second attempt
        check([one.result(DEADLINE_S) for one in running], references, version="0.0")
        assert check(now(served), references, version="0.1") == 80

        running = in_flight(served)
        loads.before = [lambda: hide(2)]
        with pytest.raises(ServerError, match="update_weights_from_disk answered 400"):
            served.bring_to("0.2", models[2])  # it has read those of 0.1 again
        check([one.result(DEADLINE_S) for one in running], references, version="0.1")
        assert check(now(served), references, version="0.1") == 80

        watching = served.loop.start(served.backend.wait_ended())
        running = in_flight(served)
        scheduler = process_of(served, "scheduler")
        loads.before = [scheduler.suspend]
        with pytest.raises(ServerError, match="update_weights_from_disk failed: no answer within 2 s"):
            order = UpdateOrder(version="0.3", weights=str(models[3]), digest=None, timeout_s=2.0)
            served.run(served.updates.bring_to(order))
        scheduler.send_signal(signal.SIGCONT)  # it now reads the weights that nobody waits for any more
        with pytest.raises(BackendLostError, match="cannot go on: which weights it holds is unknown"):
            watching.result(DEADLINE_S)
        wait_until(lambda: served.client.get("/get_model_info")["weight_version"] == "0.3", "the load to end")
        assert not any(one.done() for one in running)  # no token was made since
