"""How a host plays episodes: an agent of the user's own, with a session that asks the model endpoint by its own key.

    {"run", "task", "endpoint", "key"} ──► agent(task, session) ⇄ model endpoint ──► Done

What the key opens is the endpoint, for this episode and no other.
"""

import itertools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import aiohttp
import msgspec

from corral.experiments.prompts.chat import find_renderer
from corral.experiments.prompts.row_prompts import is_ids
from corral.experiments.prompts.tokens import eos_token_ids, load_tokenizer
from corral.workers.agents.contract import Endpoint, EpisodeEndedError, Message, Outcome, Task, Words
from corral.workers.agents.http_model import HttpModel, open_http
from corral.workers.agents.session import ModelLanguage, Session
from corral.workers.user_code.blame import LONGEST_NAME, printable
from corral.workers.user_code.checks import checked_reward
from corral.workers.user_code.host import Ask, Program, Setup
from corral.workers.user_code.loading import load_callable
from corral.workers.user_code.run import Run

_MOST_NOTES = 64  # numbers of an episode


class Done(msgspec.Struct):
    """What came of an episode."""

    reward: float | None = None
    """None: the trial's reward is to be asked."""
    metrics: dict[str, float] = {}
    turn_rewards: list[tuple[int, float]] = []
    untrained: list[int] = []
    ended: str = ""

    def __post_init__(self) -> None:
        """Texts are such as every file and connection takes."""
        self.ended = printable(self.ended[:LONGEST_NAME])
        self.metrics = {printable(name[:LONGEST_NAME]): number for name, number in self.metrics.items()}


def agent(setup: Setup) -> Program:
    """Many episodes at a time.

    Args:
        setup: its options are `model`, the folder with the tokenizer; `template_arguments`, which is
            `dataset.chat_template_kwargs`; and `max_tokens`, which is `rollout.episode.max_tokens`.
    """
    function, model, options = load_callable(setup.function), Path(setup.options["model"]), setup.options
    tokenizer, http_by_path = load_tokenizer(model), dict[str, aiohttp.ClientSession]()
    language = ModelLanguage(
        tokenizer,
        stop_token_ids=eos_token_ids(model),
        renderer=find_renderer(model, tokenizer, arguments=options["template_arguments"]),
        max_tokens=options["max_tokens"],
    )

    async def play(asked: Mapping[str, Any], run: Run, ask: Ask) -> dict[str, Any]:
        """One episode, from its task to what came of it."""
        task, path, key = Task(**asked["task"]), asked["endpoint"]["unix"], asked["key"]
        if path not in http_by_path:
            http_by_path[path] = open_http(path)
        session = Session(
            run.asks(HttpModel(http_by_path[path], key)),
            language,
            run.asks(ask),
            task.prompt_ids,
            conversation=_messages_of(task.prompt),
            endpoint=Endpoint(asked["endpoint"]["url"] + "/v1", key),
        )
        done = Done()
        try:
            outcome = _outcome_of(await run.wait(function(task, session, **setup.settings)))
            done.reward, done.ended = outcome.reward, outcome.ended
            session.note(**outcome.metrics)
        except EpisodeEndedError as error:
            done.ended = error.reason
        record = session.record
        done.ended = done.ended or record.ended
        done.turn_rewards, done.untrained = record.turn_rewards, record.untrained
        done.metrics = dict(itertools.islice(record.notes.items(), _MOST_NOTES))
        words: dict[str, Any] = msgspec.to_builtins(done)
        return words

    return Program(function=function, play=play)


def _messages_of(prompt: Words) -> list[Message] | None:
    """A prompt that is a conversation; None for text and token ids."""
    if isinstance(prompt, str) or is_ids(prompt):
        return None
    return [message for message in prompt if isinstance(message, Mapping)]


def _outcome_of(returned: Any) -> Outcome:
    """What an agent has returned, checked; TypeError or ValueError if it is no outcome."""
    outcome = returned if isinstance(returned, Outcome) else Outcome(returned)
    if outcome.reward is None:
        return outcome
    if isinstance(outcome.reward, str) or not hasattr(outcome.reward, "__float__"):
        raise TypeError(f"an agent returns a number, an Outcome or None, got {type(outcome.reward).__name__}")
    return Outcome(checked_reward(outcome.reward), metrics=outcome.metrics, ended=str(outcome.ended))
