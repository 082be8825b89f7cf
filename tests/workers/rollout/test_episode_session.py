"""Turns of an episode at a real server: what is sampled, cut, kept, and where an episode has no room for more."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path

import pytest

from corral.experiments.config.rollout import SamplingConfig
from corral.experiments.prompts.tokens import load_tokenizer
from corral.workers.engine.engine import GenerationEngine
from corral.workers.episodes.turn_request import EpisodeEndedError, RequestRefusedError, TurnRequest
from corral.workers.rollout.episode_session import EpisodeSession
from corral.workers.rollout.generation_client import FailedTry, GenerationClient
from corral.workers.rollout.turn_journal import TurnJournal
from tests.workers.data.tiny_tokenizer import write_tokenizer
from tests.workers.engine.tiny_models import save_tiny_model
from tests.workers.rollout.engine_servers import DEADLINE_S, serving

PROMPT = [4, 5, 6]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("model"))


def play(
    model: Path,
    episode: Callable[[Callable[..., EpisodeSession]], Awaitable[None]],
    *,
    max_new_tokens: int = 12,
    tokenizer: Path | None = None,
) -> list[str]:
    """Run an episode against one server; the oldest versions that its requests named."""
    named: list[str] = []

    async def run() -> None:
        async with serving(GenerationEngine(model, seed=0, version="0.3")) as ([url], session):

            async def route(uid: str, tokens: int, oldest_version: str, setback: FailedTry | None) -> str | None:
                named.append(oldest_version)
                return url

            client = GenerationClient(
                session,
                route,
                sampling=SamplingConfig(max_new_tokens=max_new_tokens),
                stop_token_ids=[0],
                token_timeout_s=DEADLINE_S,
            )

            def opened(**options: object) -> EpisodeSession:
                read = load_tokenizer(tokenizer) if tokenizer else None
                return EpisodeSession("0:a", client, read, seed_of=lambda turn: 100 + turn, **options)  # type: ignore[arg-type]

            await asyncio.wait_for(episode(opened), DEADLINE_S)

    asyncio.run(run())
    return named


def test_turns_go_on_from_what_was_made_and_no_older_weights_may_answer(model: Path) -> None:
    async def episode(opened: Callable[..., EpisodeSession]) -> None:
        session = opened()
        first = await session.generate(PROMPT, TurnRequest(max_new_tokens=3))
        history = [*PROMPT, *first.answer.output_ids, 9, 9]
        second = await session.generate(history, TurnRequest())
        assert [branch.ids for branch in session.log.branches] == [[*history, *second.answer.output_ids]]
        assert [segment.is_trained for segment in second.branch.segments] == [False, True, False, True]
        assert len(first.answer.output_ids) == 3 and second.answer.finished

    assert play(model, episode) == ["", "0.3"]


def test_what_is_sampled_in_another_way_than_the_trial_says_is_not_trained(model: Path) -> None:
    async def episode(opened: Callable[..., EpisodeSession]) -> None:
        session = opened()
        requests = [TurnRequest(temperature=0.5), TurnRequest(temperature=1.0), TurnRequest()]
        turns = [await session.generate([*PROMPT, number], each) for number, each in enumerate(requests)]
        assert [turn.branch.segments[-1].is_trained for turn in turns] == [False, True, True]
        # Of a row that has a temperature of its own.
        session = opened()
        session.client = session.client.sampling_by(temperature=0.5)
        requests = [TurnRequest(temperature=0.5), TurnRequest(temperature=1.0), TurnRequest()]
        turns = [await session.generate([*PROMPT, number], each) for number, each in enumerate(requests)]
        assert [turn.branch.segments[-1].is_trained for turn in turns] == [True, False, True]

    play(model, episode)


def test_a_text_ends_an_answer_with_the_token_that_completes_it(model: Path, tmp_path: Path) -> None:
    async def episode(opened: Callable[..., EpisodeSession]) -> None:
        session = opened()
        whole = (await session.generate(PROMPT, TurnRequest())).answer
        texts = [session.tokenizer.decode([token]) for token in whole.output_ids]
        wanted = next(text for text in texts[4:] if text)  # of a token that the tokenizer knows
        session = opened()
        cut = (await session.generate(PROMPT, TurnRequest(stop=["never said", wanted]))).answer
        first = texts.index(wanted) + 1
        assert cut.stopped and cut.output_ids == whole.output_ids[:first]
        assert len(cut.logprobs) == len(cut.versions()) == first
        # And where the trial's sampling says so, with no agent that asks.
        sampling = session.client.sampling.model_copy(update={"stop": (wanted,)})
        client = replace(session.client, tokenizer=session.tokenizer, sampling=sampling)
        (single,) = await client.sample_group("0:a", PROMPT, seeds=[100])
        assert single.stopped and (single.output_ids, single.logprobs) == (cut.output_ids, cut.logprobs)

    play(model, episode, tokenizer=write_tokenizer(tmp_path), max_new_tokens=64)


def test_an_episode_ends_at_its_limits_and_stays_so(model: Path) -> None:
    async def episode(opened: Callable[..., EpisodeSession]) -> None:
        session = opened(max_turns=1, max_tokens=5)
        assert len((await session.generate(PROMPT, TurnRequest())).answer.output_ids) <= 2
        with pytest.raises(EpisodeEndedError, match="has had its 1 turns"):
            await session.generate(PROMPT, TurnRequest())
        assert session.ended == "turns"
        session = opened(max_tokens=3)
        for _ in range(2):
            with pytest.raises(EpisodeEndedError) as raised:
                await session.generate(PROMPT, TurnRequest())
            assert raised.value.reason == session.ended == "length"

    play(model, episode)


def test_an_episode_that_is_played_again_makes_only_what_it_had_not_come_to(model: Path, tmp_path: Path) -> None:
    journal = TurnJournal(tmp_path / "turns")

    async def episode(opened: Callable[..., EpisodeSession]) -> None:
        first = (
            await opened(journal=await journal.open("0:a", 0)).generate(PROMPT, TurnRequest(max_new_tokens=4))
        ).answer
        again = opened(journal=await journal.open("0:a", 0))
        kept = (await again.generate(PROMPT, TurnRequest(max_new_tokens=4))).answer
        assert (kept.output_ids, kept.logprobs, kept.spans) == (first.output_ids, first.logprobs, first.spans)
        await again.generate([*PROMPT, *kept.output_ids, 7], TurnRequest())

    assert play(model, episode) == ["", "0.3"]


def test_an_episode_whose_time_is_up_has_no_further_turn(model: Path) -> None:
    async def episode(opened: Callable[..., EpisodeSession]) -> None:
        session = opened(timeout_s=0.0)
        for _ in range(2):
            with pytest.raises(EpisodeEndedError) as ended:
                await session.generate(PROMPT, TurnRequest())
            assert ended.value.reason == session.ended == "time"
        assert session.log.branches == []

    play(model, episode)


def test_a_turn_that_the_worker_or_its_servers_fail_at_is_known_to_be_no_fault_of_the_request(model: Path) -> None:
    async def episode(opened: Callable[..., EpisodeSession]) -> None:
        errors = [OSError(28, "no space"), RequestRefusedError("x", kind="server_error"), RequestRefusedError("x")]
        for error in errors:

            async def fail(*given: object, error: Exception = error) -> str | None:
                raise error

            session = opened()
            session.client = replace(session.client, route=fail)
            with pytest.raises(type(error)):
                await session.generate(PROMPT, TurnRequest())
            assert session.failure is (None if error is errors[-1] else error)

    play(model, episode)
