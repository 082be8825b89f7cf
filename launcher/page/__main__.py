"""Writes the page of a trial: `python -m corral.launcher.page TRIAL_DIRECTORY COMPLETE`.

The supervisor runs this as a process of its own at the end of a trial; a failure to write is noted and harms nothing.
"""

import sys
from pathlib import Path

from corral.experiments.trial.directory import TrialDirectory, atomic_write
from corral.launcher.page.view import TrialViews, render_page
from corral.launcher.trial.view import load_facts
from corral.launcher.trial.words import TrialState


def _main(path: str, state: str) -> None:
    facts = load_facts(TrialDirectory(Path(path).resolve()))
    assert facts is not None, "the supervisor has read the plan"
    # How it ends is not on record yet.
    page = render_page(TrialViews([facts]).data(ends_as=TrialState(state)), title=facts.name)
    atomic_write(facts.directory.page_path, page, is_durable=False)


if __name__ == "__main__":
    _main(*sys.argv[1:])
