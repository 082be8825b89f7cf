"""Writes the page of a trial: `python -m corral.launcher.page TRIAL_DIRECTORY COMPLETE`.

The supervisor runs this as a process of its own at the end of a trial; a failure to write is noted and harms nothing.
"""

import sys
from pathlib import Path

from corral.experiments.trial.directory import TrialDirectory, atomic_write
from corral.launcher.page.render import render_page
from corral.launcher.page.view import TrialViews
from corral.launcher.status.words import TrialState
from corral.launcher.trial.find import load_facts


def write_page(directory: TrialDirectory, *, state: TrialState) -> None:
    """Writes the page of a trial that ends in this state, which is not on record yet."""
    facts = load_facts(directory)
    assert facts is not None, "the supervisor has read the plan"
    page = render_page(TrialViews([facts]).data(ends_as=state), title=facts.name)
    atomic_write(directory.page_path, page, is_durable=False)


def _main(directory: str, state: str) -> None:
    write_page(TrialDirectory(Path(directory).resolve()), state=TrialState(state))


if __name__ == "__main__":
    _main(*sys.argv[1:])
