"""`make demo` as a newcomer has it: the policy learns, and the page that it ends with opens in a browser."""

import os
import re
import subprocess
from pathlib import Path

import pytest

from tests.integration.trial_helpers import PROGRAMS, ROOT
from tests.launcher.page.page_trials import check_page

_DEADLINE_S = 3600.0


@pytest.mark.timeout(_DEADLINE_S + 60.0)
@pytest.mark.slow  # test_synchronous_ppo.py opens the page of a short trial; `make demo` itself is a matter of minutes
def test_the_demo_learns_and_ends_with_its_page(tmp_path: Path) -> None:
    environment = {**os.environ, "BIN": str(PROGRAMS), "CORRAL_FILEROOT": str(tmp_path / "corral")}
    command = ["sh", str(ROOT / "experiments" / "recipes" / "demo.sh")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=_DEADLINE_S, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    accuracy = re.search(r"held-out accuracy: ([\d.]+) after SFT, ([\d.]+) after GRPO", done.stdout)
    assert accuracy is not None, done.stdout
    first, last = map(float, accuracy.groups())
    assert last >= first + 0.1
    pages = re.findall(r"^page +(\S+)$", done.stdout, re.MULTILINE)
    check_page(Path(pages[-1]), tmp_path, headline="COMPLETE")
