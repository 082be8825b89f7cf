"""Trials as they lie on disk, for pages: with metrics, events and answers, some of them hostile; and pages in a tab."""

import json
from pathlib import Path
from typing import Any

import msgspec
import pyarrow
import pyarrow.parquet

from corral.experiments.plan import TrialIdentity, make_run_plan
from corral.experiments.registry import load_experiment
from corral.experiments.trial.attempts import AttemptEnd, EndState, record_attempt, write_end
from corral.experiments.trial.directory import TrialDirectory
from corral.experiments.trial.samples import samples_file, schema
from corral.experiments.trial.spans import PHASES, STEPS, Clock, Span, spans_path
from tests.chromium import Chromium, Tab, require_chromium
from tests.experiments.broken_yaml import VALID_PPO, write_inputs

HOSTILE = '</script><script>window.hacked=1</script><img src=x onerror="window.hacked=2">\x1b[31m<!-- &lt; '
BEGUN_AT = 1_790_000_000.0


def write_trial(root: Path, name: str, *overrides: str, steps: int = 40) -> TrialDirectory:
    """A trial below `root / small-grpo` that has ended after so many steps, a restart among them."""
    write_inputs(root)
    (root / "ppo.yaml").write_text(VALID_PPO)
    experiment = load_experiment(root / "ppo.yaml", overrides)
    directory = TrialDirectory.of(root / "trials", experiment=experiment.name, trial=name)
    directory.create()
    identity = TrialIdentity(experiment=experiment.name, trial=name, uuid="ab" * 16, directory=directory.path)
    directory.plan_path.write_bytes(make_run_plan(experiment, identity, "local").to_json())
    record_attempt(directory, attempt=0, resume=False, mode="local")
    add_steps(directory, first=1, last=steps)
    killed: dict[str, Any] = {"event": "task_ended", "attempt": 0, "code": -9, "why": "SIGKILL"}
    told: list[dict[str, Any]] = [
        {"time": BEGUN_AT, "event": "supervisor_started", "attempt": 0},
        {"time": BEGUN_AT + 50, "who": "model_worker/0", "caused_by": "", **killed},
        {"time": BEGUN_AT + 51, "event": "unit_restarting", "attempt": 0, "unit": "trainer", "cause": HOSTILE},
        {"time": BEGUN_AT + 900, "who": "redis", "caused_by": "the attempt ends, COMPLETE", **killed},
    ]
    directory.journal_path.write_text("".join(json.dumps(event) + "\n" for event in told))
    end = AttemptEnd(attempt=0, state=EndState.COMPLETE, cause="", then="", ended_at=BEGUN_AT + 900)
    write_end(directory, end)
    return directory


def add_steps(directory: TrialDirectory, *, first: int, last: int) -> None:
    """Lines of these train steps, ten seconds and fifty tokens each."""
    with directory.metrics_path.open("a") as file:
        for step in range(first, last + 1):
            line: dict[str, Any] = {"step": step, "time": BEGUN_AT + 10.0 * step, "train/tokens": 50.0}
            line |= {"rewards/mean": step / last, "ppo/loss": (-1) ** step * 0.1, HOSTILE: 1.0, "staleness/mean": 1.0}
            line |= {"time/actor_train/inputs_s": 1.0, "time/actor_train/ranks_s": 0.5, "time/actor_train_s": 5.0}
            file.write(json.dumps(line) + "\n")


def add_timeline(directory: TrialDirectory, *, steps: int) -> None:
    """What the master did in these steps, of which most is a wait, and what somebody hostile calls his doing."""
    lines: list[Clock | Span] = [
        Clock(worker="master_worker/0", attempt=0, incarnation="a", offset_s=BEGUN_AT, error_s=0.0)
    ]
    for step in range(1, steps + 1):
        start_s = 10.0 * step
        lines.append(Span(lane=STEPS, name=f"step {step}", start_s=start_s, end_s=start_s + 10, step=step))
        lines.append(Span(lane=PHASES, name="wait for a batch", start_s=start_s, end_s=start_s + 8, about=HOSTILE))
        lines.append(Span(lane=PHASES, name="train step", start_s=start_s + 8, end_s=start_s + 10))
    directory.timeline_path.mkdir(exist_ok=True)
    text = b"".join(msgspec.json.encode(line) + b"\n" for line in lines)
    spans_path(directory.timeline_path, "master_worker/0").write_bytes(text)


def add_answers(directory: TrialDirectory, step: int, texts: list[str], *, ids: list[int]) -> None:
    """Answers of one step: that of number n has the reward n, and tokens of these ids, of
    which every third was given."""
    size = len(ids)
    rows = [
        {
            "step": step, "uid": f"0:row-{step}", "answer": at, "sequence": at, "prompt": "what is it? ", "said": said,
            "reward": float(at), "advantage": at - 1.0, "length": size - 1, "is_cut": False, "staleness": 1, "gap": 0.1,
            "ids": ids, "made": [place % 3 > 0 for place in range(size)], "remarks": f"good: {said[:100]}",
            "logprobs": [0.0, *[-2.0] * (size - 1)],
            "trainer_logprobs": [0.0, *[-2.1] * (size - 1)], "advantages": [0.0, *[at - 1.0] * (size - 1)],
            "versions": [-1, *[step - 1] * (size - 1)],
        }
        for at, said in enumerate(texts)
    ]  # fmt: skip
    directory.samples_path.mkdir(exist_ok=True)
    path = samples_file(directory.samples_path, step=step, epoch=1, rank=0)
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows, schema=schema()), path)


def drawn(tab: Tab) -> Tab:
    """Of a page, once what is in view is there."""
    tab.wait_until("document.body.dataset.drawnMs")
    return tab


def reach(tab: Tab, section: str) -> None:
    """As who scrolls there; its charts are drawn then."""
    tab.evaluate(f"document.getElementById('{section}').scrollIntoView({{behavior: 'instant'}})")
    tab.wait_until(f"[...document.querySelectorAll('#{section} .chart')].every((one) => one.children.length)")


def check_page(page: Path, folder: Path, *, headline: str) -> None:
    """Of a GRPO trial at its end: it is drawn whole, on a phone too, and one of its answers opens there."""
    require_chromium()
    with Chromium(folder) as browser:
        for width in (1200, 360):
            tab = drawn(browser.open(page.as_uri(), width=width))
            assert tab.texts("#headline")[0].startswith(headline)
            assert {"eval/accuracy", "rewards/mean"} <= {*tab.texts("#curve-chart .annotation-text")}
            for section, drawing in (("times", "#bars .bars .point"), ("timeline", "#spans .bars .point")):
                reach(tab, section)
                assert tab.texts(drawing), section
            for told in ("#timeline-said", "#status-text", "#event-rows tr", "#graph-table th", "#setting-rows tr"):
                assert all(tab.texts(told)) and tab.texts(told), told
            tab.evaluate("document.querySelector('#answer-rows button').click()")
            assert "reward" in tab.texts("#answer-facts")[0] and tab.texts("#answer-text span[title]")
            assert tab.evaluate("document.documentElement.scrollWidth") <= width
            assert tab.problems() == []
