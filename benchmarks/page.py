"""What a page costs: of a trial with so many steps and kept answers, CPU seconds to write it, and time to open it.

    python benchmarks/page.py [--steps 10000] [--answers-per-step 10]

Chromium opens the file, without a GPU. Told is when what is in view is drawn, and when texts are; CPU seconds are its
main thread's alone, which count where something else runs beside it. The page is not watched meanwhile: whoever watches
has the browser parse all functions again for their positions, which doubles the time.
"""

import argparse
import json
import os
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from corral.launcher.page.view import (
    TrialViews,  # noqa: E402
    choose_trials,  # noqa: E402 - found through the line above
    render_page,  # noqa: E402
)
from tests.chromium import Chromium  # noqa: E402
from tests.launcher.page.page_trials import BEGUN_AT, add_answers, add_timeline, write_trial  # noqa: E402

_DRAWN = ("eval/accuracy", "rewards/mean", "ppo/loss", "response_length/mean", "staleness/mean", "gap/of_allowed")
_NUMBERS = [*_DRAWN, *(f"part/{number}" for number in range(54))]  # as many as the arithmetic recipe writes
_CALLS = ("actor_inf", "ref_inf", "actor_train")
_IDS = [2, 3, 4, 5] * 25


def main() -> None:
    """Write the trial and the page, open it, and print the figures."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--steps", type=int, default=10_000)
    parser.add_argument("--answers-per-step", type=int, default=10)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="corral-page-") as folder:
        root = Path(folder)
        directory = write_trial(root, "long", steps=1)
        with directory.metrics_path.open("w") as file:
            for step in range(1, options.steps + 1):
                line = {"step": step, "time": BEGUN_AT + 10.0 * step, "train/tokens": 5000.0}
                numbers = {name: (step * (at + 7) % 1009) / 1009 for at, name in enumerate(_NUMBERS)}
                numbers |= {f"time/{call}{part}": 1.0 for call in _CALLS for part in ("/inputs_s", "/ranks_s", "_s")}
                file.write(json.dumps(line | numbers) + "\n")
        add_timeline(directory, steps=options.steps)
        add_answers(directory, 1, ["a word " * 40] * options.answers_per_step, ids=_IDS)
        (first,) = directory.samples_path.iterdir()
        for step in range(2, options.steps + 1 if options.answers_per_step else 1):
            os.link(first, directory.samples_path / first.name.replace("00000001", f"{step:08d}"))
        page = root / "page.html"
        before, began = time.process_time(), time.perf_counter()
        facts, _ = choose_trials([str(directory.path)], root)
        page.write_bytes(render_page(TrialViews(facts).data(), title="long"))
        cpu_s, wall_s = time.process_time() - before, time.perf_counter() - began
        size = page.stat().st_size / 1e6
        print(f"{options.steps:,} steps, {options.steps * options.answers_per_step:,} kept answers: ", end="")
        print(f"a page of {size:.1f} MB, written in {cpu_s:.2f} CPU s ({wall_s:.2f} s)")
        with Chromium(root / "chromium") as browser:
            for place in ("first", "again"):
                tab = browser.open("about:blank", is_watched=False)
                tab.call("Performance.enable", timeDomain="threadTicks")
                tab.call("Page.navigate", url=page.as_uri())
                drawn_ms = float(tab.wait_until("document.body.dataset.drawnMs"))
                metrics = tab.call("Performance.getMetrics")["metrics"]
                cpu = {one["name"]: one["value"] for one in metrics}["TaskDuration"]
                readable_s = float(tab.evaluate("document.body.dataset.readableMs")) / 1e3
                print(f"opened {place}: {drawn_ms / 1e3:.2f} s by the clock, texts {readable_s:.2f} s, {cpu:.2f} CPU s")


if __name__ == "__main__":
    main()
