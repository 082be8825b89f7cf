"""Where a reward of one's own may live."""

from pathlib import Path

import pytest

from corral.experiments.inputs.import_paths import check_import_path


def test_folders_inside_folders_need_no_init_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "site_rewards" / "maths" / "exact"
    folder.mkdir(parents=True)
    (folder / "judge.py").write_text("def score(problem, answer):\n    return 1.0\n")
    monkeypatch.chdir(tmp_path)
    assert check_import_path("site_rewards.maths.exact.judge:score") is None
    problem = check_import_path("site_rewards.maths.exact.judge:scores")
    assert problem is not None and "score" in problem.hint
    missing = check_import_path("site_rewards.maths.exakt.judge:score")
    assert missing is not None and "there is no module" in missing.message
