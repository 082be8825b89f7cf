"""The page of a trial, as a browser shows it: from a file, and as rl-view serves it."""

import asyncio
import contextlib
import queue
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from corral.experiments.errors import ConfigError
from corral.experiments.trial.directory import TrialDirectory
from corral.launcher.page.server import PageServer
from corral.launcher.page.view import TrialViews, choose_trials
from tests.chromium import Chromium, Tab, require_chromium
from tests.launcher.page.page_trials import HOSTILE, add_answers, add_steps, add_timeline, drawn, reach, write_trial

BIN = Path(sys.executable).parent
IDS = [2, 3, 4, 5, 1]


@pytest.fixture(scope="module")
def trial(tmp_path_factory: pytest.TempPathFactory) -> TrialDirectory:
    directory = write_trial(tmp_path_factory.mktemp("page"), "one")
    add_timeline(directory, steps=40)
    add_answers(directory, 1, ["nothing", "some needle here"], ids=IDS)
    add_answers(directory, 40, [HOSTILE, HOSTILE * 100_000], ids=IDS * 1000)
    return directory


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Chromium]:
    require_chromium()
    with Chromium(tmp_path_factory.mktemp("chromium")) as browser:
        yield browser


@pytest.fixture(scope="module")
def file(trial: TrialDirectory) -> Path:
    """The page as the supervisor has it written."""
    command = [sys.executable, "-m", "corral.launcher.page", str(trial.path), "COMPLETE"]
    subprocess.run(command, check=True, timeout=300)
    assert trial.page_path.stat().st_mode & 0o777 == 0o600
    return trial.page_path


@pytest.fixture(scope="module")
def tab(browser: Chromium, file: Path) -> Tab:
    return drawn(browser.open(file.as_uri()))


def test_a_file_draws_itself_and_asks_nobody(tab: Tab) -> None:
    names = tab.texts("#curve-chart .annotation-text")
    assert names == ["rewards/mean", "ppo/loss", "staleness/mean"]
    assert tab.evaluate("document.querySelectorAll('#curve-chart .scatterlayer .js-line').length") >= len(names)
    reach(tab, "times")
    assert tab.evaluate("document.querySelectorAll('#bars .bars .point').length") >= 40
    assert "COMPLETE step 40/" in tab.texts("#headline")[0]
    assert "COMPLETE" in tab.texts("#status-text")[0]
    for x, title in (("time", "minutes since the first line"), ("tokens", "tokens trained on"), ("step", "train step")):
        tab.evaluate(f"document.querySelector('input[name=x][value={x}]').click()")
        assert set(tab.texts("#curve-chart [class^=x][class$=title]")) == {title}
    tab.evaluate("document.getElementById('together').click()")
    assert len(tab.texts("#curve-chart .ytitle") + tab.texts("#curve-chart .y2title")) == 2
    tab.evaluate("document.getElementById('together').click()")
    assert tab.problems() == []


def test_events_are_told_and_marked_where_they_were(tab: Tab) -> None:
    told = tab.texts("#event-rows tr")
    assert any("5\tmodel_worker/0: " in line for line in told) and any(
        "trainer is started again" in line for line in told
    )
    assert tab.evaluate("document.querySelectorAll('#event-rows .break').length") == 2
    assert tab.evaluate("document.querySelectorAll('#curve-chart .shapelayer path').length") >= 3


def test_the_timeline_of_the_last_steps_is_explained_and_drawn(tab: Tab) -> None:
    reach(tab, "timeline")
    assert "of 200 s in steps 21 to 40, 80% went into" in tab.texts("#timeline-said")[0]
    assert tab.evaluate("document.querySelectorAll('#spans .bars .point').length") == 4 * 3
    assert set(tab.texts("#spans .ytick")) == {"master_worker/0 phases", "master_worker/0 steps"}


def test_numbers_are_found_and_drawn(tab: Tab) -> None:
    tab.evaluate("document.querySelector('#metrics summary').click()")
    tab.choose("#find-metric", "tokens")
    assert tab.texts("#metric-list label") == ["train/tokens"]
    tab.evaluate("document.querySelector('#metric-list input').click()")
    assert "train/tokens" in tab.texts("#curve-chart .annotation-text")
    tab.evaluate("document.querySelector('#metric-list input').click()")
    tab.choose("#find-metric", "")


def test_answers_are_found_sorted_and_opened_with_their_tokens(tab: Tab) -> None:
    assert [row.split("\t")[0] for row in tab.texts("#answer-rows tr")] == ["40", "40", "1", "1"]
    tab.choose("#find-answer", "needle")
    assert tab.texts("#answer-rows button") == ["0:row-1#1"]
    tab.evaluate("document.querySelector('#answer-rows button').click()")
    assert tab.evaluate("document.getElementById('answer').open")
    spans = "document.querySelectorAll('#answer-text span')"
    assert tab.evaluate(f"[{spans}.length, {spans}[0].className, {spans}[1].title]") == [
        len(IDS), "given", "logprob -2, gap -0.1, advantage 0",
    ]  # fmt: skip
    assert tab.texts("#answer-text h3") == ["1 tokens given", "2 tokens made", "1 tokens given", "1 tokens made"]
    assert tab.texts("#answer-remarks") == ["good: some needle here"]
    before = tab.evaluate(f"{spans}[1].style.backgroundColor")
    tab.choose("#colour", "gap")
    assert tab.evaluate(f"{spans}[1].style.backgroundColor") != before
    tab.press("Escape")
    assert not tab.evaluate("document.getElementById('answer').open")
    tab.choose("#find-answer", "")
    tab.choose("#sort-answers", "reward")
    assert [row.split("\t")[2] for row in tab.texts("#answer-rows tr")] == ["1", "1", "0", "0"]


def test_what_others_wrote_is_text_and_however_much_of_it_the_page_stays_small(tab: Tab, file: Path) -> None:
    assert file.stat().st_size < 6_000_000
    tab.choose("#find-answer", "onerror")
    tab.evaluate("document.querySelector('#answer-rows button').click()")
    assert "more tokens: rl-samples small-grpo/one --step 40" in tab.texts("#answer-text")[0]
    tab.evaluate("document.getElementById('close').click()")
    shown = tab.texts("#answer-rows .said")
    assert any(text.startswith("</script><script>window.hacked=1</script><img src=x") for text in shown)
    assert tab.evaluate("document.querySelectorAll('main img, main script').length") == 0
    assert tab.evaluate("document.getElementById('metric-list').innerText.includes('<img src=x')")
    tab.evaluate(
        "[...document.querySelectorAll('#metric-list label')].find((one) => one.innerText.includes('img')).click()"
    )
    assert tab.evaluate("document.querySelectorAll('#curve-chart img, #curve-chart a').length") == 0
    tab.evaluate(
        "document.body.append(Object.assign(document.createElement('script'), {textContent: 'window.hacked=3'}))"
    )
    assert tab.evaluate("typeof window.hacked") == "undefined"
    assert all("Content Security Policy" in problem for problem in tab.problems())


def test_a_phone_shows_all_of_it_and_keys_reach_all_of_it(browser: Chromium, file: Path) -> None:
    tab = drawn(browser.open(file.as_uri(), width=360, height=640, is_dark=True))
    assert tab.evaluate("document.documentElement.scrollWidth") == 360
    assert tab.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(20, 23, 27)"
    tab.evaluate("document.getElementById('metrics').open = true")
    usable = "a[href], button, input, select, summary"
    seen = "(one) => one.checkVisibility() && !(one.type === 'radio' && !one.checked)"
    everything = tab.evaluate(f"[...document.querySelectorAll('{usable}')].filter({seen}).length")
    reached, focused = set(), "document.activeElement"
    for _ in range(2 * everything):
        tab.press("Tab")
        reached.add(tab.evaluate(f"[...document.querySelectorAll('{usable}')].indexOf({focused})"))
    assert len(reached - {-1}) == everything
    tab.evaluate("document.querySelector('#answer-rows button').focus()")
    assert tab.evaluate(f"getComputedStyle({focused}).outlineStyle") == "solid"
    tab.press("Enter")
    tab.wait_until("document.getElementById('answer').open")
    tab.press("Escape")
    assert tab.problems() == []


@contextlib.contextmanager
def served(views: TrialViews) -> Iterator[str]:
    """The address at which rl-view has it."""
    told: queue.Queue[tuple[str, int]] = queue.Queue()

    async def serve() -> None:
        loops.put((asyncio.get_running_loop(), asyncio.current_task()))
        server = PageServer(views.data, title="trials", refresh_s=0.2)
        with contextlib.suppress(asyncio.CancelledError):
            await server.serve(lambda address, port: told.put((address, port)))

    loops: queue.Queue[Any] = queue.Queue()
    thread = threading.Thread(target=lambda: asyncio.run(serve()))
    thread.start()
    loop, task = loops.get(timeout=60)
    try:
        yield told.get(timeout=60)[0]
    finally:
        loop.call_soon_threadsafe(task.cancel)
        thread.join()


def test_a_served_page_follows_its_trial_and_tells_who_has_its_address_alone(browser: Chromium, tmp_path: Path) -> None:
    directory = write_trial(tmp_path, "live", steps=5)
    facts, _ = choose_trials([str(directory.path)], tmp_path)
    with served(TrialViews(facts)) as address:
        tab = drawn(browser.open(address))
        assert "step 5/" in tab.texts("#headline")[0]
        add_steps(directory, first=6, last=7)
        tab.wait_until("document.getElementById('headline').innerText.includes('step 7/')")
        assert tab.problems() == []
        root, token = address.rstrip("/").rsplit("/", 1)
        codes = asyncio.run(answers_to(root, [("/", ""), (f"/{token}x/data", ""), (f"/{token}/", "evil.example")]))
        assert codes == [404, 404, 403]
        for line, status in (("GET / HTTP/1.1\r\nHost: [::1", 403), ("OPTIONS * HTTP/1.1\r\nHost: localhost", 404)):
            with socket.create_connection(("127.0.0.1", int(root.rpartition(":")[2])), timeout=60) as connection:
                connection.sendall(f"{line}\r\n\r\n".encode())
                assert connection.recv(100).startswith(f"HTTP/1.1 {status} ".encode())
        assert asyncio.run(answers_to(root, [(f"/{token}/data", "localhost:1"), (f"/{token}/x", "")])) == [200, 404]
    tab.wait_until("document.getElementById('headline').innerText.includes('does not answer any more')")


async def answers_to(root: str, asked: list[tuple[str, str]]) -> list[int]:
    """Status of each path, asked for under this name of the host, if any."""
    async with aiohttp.ClientSession() as session:
        found = []
        for path, host in asked:
            async with session.get(root + path, headers={"Host": host} if host else {}) as answer:
                found.append(answer.status)
        return found


def test_trials_are_drawn_together_with_what_differs_and_a_number_that_one_has_alone_leaves_all_panels(
    browser: Chromium, tmp_path: Path
) -> None:
    evaluated = write_trial(tmp_path, "a", steps=3)
    write_trial(tmp_path, "b", "actor.optimizer.lr=1e-3")
    with evaluated.metrics_path.open("a") as file:
        file.write('{"step": 3, "time": 1790000030.0, "eval/accuracy": 0.5}\n')
    page = tmp_path / "page.html"
    command = [str(BIN / "rl-view"), str(tmp_path / "trials"), "-o", str(page)]
    said = subprocess.run(command, check=True, capture_output=True, timeout=300).stdout.decode()
    assert said.split()[-1] == str(page)
    tab = drawn(browser.open(page.as_uri()))
    assert [row.split("\t")[1:4] for row in tab.texts("#trial-rows tr")] == [
        ["small-grpo/a", "COMPLETE", "3/10"], ["small-grpo/b (chosen)", "COMPLETE", "40/10"],
    ]  # fmt: skip
    assert sorted(tab.texts("#curve-chart .legendtext")) == ["small-grpo/a", "small-grpo/b"]
    rows = [row.split("\t") for row in tab.texts("#setting-rows tr")]
    assert rows == [["actor.optimizer.lr", "0.001", "0.0003"]]
    tab.evaluate("document.querySelector('#trial-rows input').click()")  # only b, which has no accuracy
    assert "no data" in tab.texts("#curve-chart .annotation-text")
    domains = tab.evaluate(
        "Object.entries(document.getElementById('curve-chart')._fullLayout).filter(([key]) => key.startsWith('yaxis'))"
        ".map(([, axis]) => axis.domain.map((end) => Math.round(1000 * end) / 1000).join())"
    )
    num_panels = tab.evaluate(
        "[...document.querySelectorAll('#metric-list input')].filter((one) => one.checked).length"
    )
    assert len(domains) == num_panels and "0,1" not in domains
    assert tab.problems() == []


def test_folders_without_trials_are_users_mistakes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="has no trials in it"):
        choose_trials([str(tmp_path)], tmp_path)
    monkeypatch.setattr(
        "os.listdir", lambda path: (_ for _ in ()).throw(PermissionError(13, "Permission denied", path))
    )
    with pytest.raises(ConfigError, match="cannot be read: Permission denied"):
        choose_trials([str(tmp_path)], tmp_path)


def test_of_many_trials_the_newest_have_room(tmp_path: Path) -> None:
    first = write_trial(tmp_path, "t0", steps=1)
    for number in range(1, 52):
        other = first.path.with_name(f"t{number}")
        other.mkdir()
        text = first.plan_path.read_text().replace('"trial": "t0"', f'"trial": "t{number}"')
        (other / "plan.json").write_text(text)
    facts, left_out = choose_trials([], tmp_path / "trials")
    assert (len(facts), left_out, facts[-1].trial) == (50, 2, "t51")
