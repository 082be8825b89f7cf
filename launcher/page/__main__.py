"""Writes the page of a trial: `python -m corral.launcher.page --trial DIR --state COMPLETE`.

The supervisor runs this as a process of its own at the end of a trial; a failure to write is noted and harms nothing.
"""

import argparse
import sys
from collections.abc import Sequence
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


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="corral.launcher.page", description="Write the page of a trial.")
    parser.add_argument("--trial", type=Path, required=True, help="the trial directory")
    parser.add_argument("--state", type=TrialState, required=True, help="how it ends")
    options = parser.parse_args(arguments)
    write_page(TrialDirectory(options.trial.resolve()), state=options.state)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
