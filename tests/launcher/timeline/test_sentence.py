"""The sentence about where the time of steps went names who is to blame, and what would change it."""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from corral.experiments.trial.directory import TrialDirectory
from corral.experiments.trial.spans import PHASES, STEPS, Span
from corral.launcher.timeline.sentence import Figures, describe_steps, explain_time
from tests.launcher.status.test_status import FACTS

MASTER = "master_worker/0"
SERVERS = ("generation_server/0", "generation_server/1", "generation_server/2")


def span(worker: str, lane: str, name: str, start_s: float, end_s: float, **more: object) -> Span:
    return Span(worker=worker, lane=lane, name=name, start_s=start_s, end_s=end_s, **more)  # type: ignore[arg-type]


def steps(*phases: tuple[str, float], number: int = 40) -> list[Span]:
    """A step of the master in which these phases took so many seconds."""
    spans, now = [], 0.0
    for name, seconds in phases:
        spans.append(span(MASTER, PHASES, name, now, now + seconds))
        now += seconds
    return [span(MASTER, STEPS, f"step {number}", 0.0, now, step=number), *spans]


def groups(token_ms: Sequence[float], *, reward_s: float = 0.1) -> list[Span]:
    made = [
        span("rollout_worker/0", "answers", "generate", 0.0, ms / 10, tokens=100, waits_for=(server,))
        for server, ms in zip(SERVERS, token_ms, strict=False)
    ]
    return [*made, *(span("rollout_worker/0", "rewards", "reward", 1.0, 1.0 + reward_s) for _ in token_ms)]


def ranks(*among_ranks_s: float, name: str = "train step") -> list[Span]:
    return [
        span(f"model_worker/{rank}", PHASES, name, 0.0, 10.0, among_ranks_s=seconds)
        for rank, seconds in enumerate(among_ranks_s)
    ]


WAITS = (("wait for a batch", 9.0), ("train step", 1.0))
TRAINS = (("wait for a batch", 0.5), ("train step", 9.5))
CASES = {
    "a server among three": (steps(*WAITS) + groups([9, 40, 10]), f"40 ms for each token of {SERVERS[1]}, and 9.5"),
    "a reward": (steps(*WAITS) + groups([9, 10], reward_s=3.0), "3 s for its reward, 76% of its time; make the reward"),
    "a teacher outside": (
        [*steps(*WAITS), *groups([9]), span("rollout_worker/0", "teachers", "teacher", 1.0, 7.0)],
        "6 s for its teacher, 87% of its time; give rollout.teacher",
    ),
    "an agent": (
        [*steps(*WAITS), *groups([9]), span("rollout_worker/0", "episodes", "episode", 0.0, 9.0)],
        "90% of the time of episodes is the agent's own",
    ),
    "the gate": (
        [
            *steps(*WAITS),
            span("rollout_worker/0", PHASES, "generate", 0.0, 6.0),
            span("rollout_worker/0", PHASES, "wait for admission", 6.0, 10.0),
        ],
        "nothing for 40% of the time; raise rollout.max_head_offpolicyness (eta)",
    ),
    "weights": (
        [*steps(*WAITS), span("gserver_manager/0", PHASES, "route", 0.0, 5.0, waits_for=SERVERS)],
        "no server holds the new weights for 50%",
    ),
    "few servers": (steps(*WAITS) + groups([9, 10]), "answers are made more slowly than they are trained on"),
    "a rank among three": (steps(*TRAINS) + ranks(6.0, 0.5, 7.0), "model_worker/1 holds up the other ranks"),
    "a reward in the step": (
        [*steps(*TRAINS), span("model_worker/0", "rewards", "reward", 1.0, 9.0), span(MASTER, "a", "a", 0.5, 10.0)],
        "rewards take 84% of it; make the reward faster",
    ),
    "a call": (
        [
            *steps(*TRAINS),
            *ranks(3.0, 3.5),
            span(MASTER, "actor_train", "actor_train", 1.0, 9.0),
            span(MASTER, "ref_inf", "ref_inf", 0.5, 1.0),
            span(MASTER, "actor_train", "wait for ref_inf", 0.5, 1.0),
        ],
        "actor_train runs for 84% of it; raise its max_tokens_per_micro_batch",
    ),
    "commits": (steps(("copy", 2.0), ("commit", 2.0), ("train step", 1.0)), "80% went into commits"),
    "evaluations": (steps(("evaluate", 6.0), ("train step", 4.0)), "60% went into evaluations"),
    "weights on a slow disk": (steps(("write weights", 6.0), ("train step", 4.0)), "60% went into writing weights"),
}


@pytest.mark.parametrize("case", CASES)
def test_the_sentence_names_what_was_slow(case: str) -> None:
    spans, said = CASES[case]
    sentence = describe_steps(spans, FACTS)[0]
    assert said in sentence and sentence.startswith("of ") and " in step 40, " in sentence


def test_the_dearest_is_said_first_what_else_was_slow_follows_and_what_took_little_is_not_told() -> None:
    spans = steps(("wait for a batch", 5.0), ("train step", 4.5), ("commit", 0.5))
    spans += groups([9, 40, 10], reward_s=30.0) + ranks(6.0, 0.1)
    causes = [(round(cause.fraction, 2), str(cause)) for cause in explain_time(spans)]
    assert [share for share, _ in causes] == [0.5, 0.5, 0.45]
    for (_, text), who in zip(causes, ("for its reward", SERVERS[1], "model_worker/1"), strict=True):
        assert who in text
    assert [line.partition(" ")[0] for line in describe_steps(spans, FACTS)] == ["of", "besides,", "besides,"]


def test_phases_are_cut_to_the_steps_and_make_up_all_of_their_time() -> None:
    spans = [
        span(MASTER, PHASES, "initialize", 0.0, 12.0),
        span(MASTER, PHASES, "train step", 12.0, 18.0),
        span(MASTER, PHASES, "commit", 18.0, 25.0),
        span(MASTER, STEPS, "step 1", 10.0, 20.0, step=1),
    ]
    figures = Figures(spans)
    assert figures.master_s == {"initialize": 2.0, "train step": 6.0, "commit": 2.0}
    assert figures.wall_s == sum(figures.master_s.values())


def test_nothing_is_said_of_no_step() -> None:
    assert describe_steps(ranks(1.0, 2.0), FACTS) == [] and explain_time([]) == []
    assert describe_steps(steps(("train", 1.0)), FACTS)[0] == "of 1 s in step 40, nothing stands out"


def test_more_servers_are_no_advice_where_prompts_are_dropped(tmp_path: Path) -> None:
    spans, facts = steps(*WAITS) + groups([9, 10]), replace(FACTS, directory=TrialDirectory(tmp_path))

    def said(dropped: int) -> str:
        lines = [
            {"step": step, "train/tokens": 9.0, "data/samples_trained": 8.0 * step, "data/samples_dropped": number}
            for step, number in ((39, 0.0), (40, float(dropped)))
        ]
        facts.directory.metrics_path.write_text("".join(json.dumps(line) + "\n" for line in lines))
        return " ".join(describe_steps(spans, facts))

    assert "20% of the prompts were dropped" in said(2) and "generation servers" not in said(2)
    assert f"rl-logs {facts.name} --errors says why" in said(2)
    assert "take more generation servers" in said(0) and "dropped" not in said(0)
