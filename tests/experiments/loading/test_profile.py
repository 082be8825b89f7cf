"""Profiles beneath an experiment file: what wins, what is relative to what, and which file an error names."""

from pathlib import Path

import pytest

from corral.experiments.errors import ConfigError
from corral.experiments.loading.profile import find_profiles
from corral.experiments.registry import load_experiment, load_with_source
from tests.experiments.broken_yaml import VALID_PPO, VALID_SFT, write_inputs


@pytest.fixture
def experiment(tmp_path: Path) -> Path:
    write_inputs(tmp_path)
    path = tmp_path / "experiment.yaml"
    path.write_text(VALID_PPO)
    return path


def _profile(folder: Path, text: str, name: str = "profile.yaml") -> Path:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def test_what_is_stronger_wins_and_what_it_leaves_open_comes_from_beneath(experiment: Path, tmp_path: Path) -> None:
    site = _profile(tmp_path / "site", "launch: {partition: site, account: lab, time_limit: '9', qos: low}\n")
    user = _profile(tmp_path / "user", "launch:\n  partition: mine\n  qos: mine\n")
    loaded = load_experiment(experiment, ["launch.qos=typed"], profiles=[site, user])
    launch = loaded.launch
    assert (launch.account, launch.partition, launch.time_limit, launch.qos) == ("lab", "mine", "1:00:00", "typed")


def test_a_list_is_replaced_as_a_whole(experiment: Path, tmp_path: Path) -> None:
    weak = _profile(tmp_path, "launch: {extra_sbatch_arguments: [--licenses=a, --nice]}\n", "weak.yaml")
    strong = _profile(tmp_path, "launch: {extra_sbatch_arguments: [--licenses=b]}\n", "strong.yaml")
    assert load_experiment(experiment, profiles=[weak, strong]).launch.extra_sbatch_arguments == ("--licenses=b",)


def test_resources_of_a_group_merge_key_by_key(experiment: Path, tmp_path: Path) -> None:
    profile = _profile(tmp_path, "groups: {model_worker: {scheduling: {cpu: 7, partition: big}}}\n")
    group = load_experiment(experiment, profiles=[profile]).groups["model_worker"].scheduling
    assert group is not None
    assert (group.cpu, group.partition, group.gpu, group.mem) == (1, "big", 0, 1024)


def test_a_relative_path_in_a_profile_is_relative_to_the_profile(experiment: Path, tmp_path: Path) -> None:
    profile = _profile(tmp_path / "site", "cluster: {fileroot: trials}\n")
    assert load_experiment(experiment, profiles=[profile]).cluster.fileroot == tmp_path / "site" / "trials"


def test_what_only_other_experiments_have_does_not_disturb_this_one(experiment: Path, tmp_path: Path) -> None:
    text = "ppo: {group_size: 2}\ngroups: {rollout_worker: {count: 3}, model_worker: {scheduling: {cpu: 2}}}\n"
    profile = _profile(tmp_path, text)
    assert load_experiment(experiment, profiles=[profile]).groups["rollout_worker"].count == 3
    experiment.write_text(VALID_SFT)
    assert "rollout_worker" not in load_experiment(experiment, profiles=[profile]).groups


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("cluster:\n  fileroot: x\n  max_node: 3\n", ["unknown key 'max_node'", "profile.yaml:3", "'max_nodes'"]),
        ("launch:\n  account: 7\n", ["launch.account", "text", "profile.yaml:2"]),
        (
            'seed: 1\nlaunch:\n  qos: "now; ls"\n',
            ["launch.qos", "qos 'now; ls' has another form", "hint: it must match", "profile.yaml:3"],
        ),
        ("supervison: {}\n", ["unknown key 'supervison'", "profile.yaml:1", "'supervision'"]),
        ("launch: {}\nname: all\n", ["may not set 'name'", "profile.yaml:2", "experiment file"]),
        ("launch: [\n", ["not valid YAML", "profile.yaml:2"]),
        ("- cluster\n", ["the profile must hold a mapping", "profile.yaml:1", "'cluster:'"]),
        ("launch:\n  qos: a\n  qos: b\n", ["twice", "profile.yaml:3"]),
    ],
)
def test_a_broken_profile_is_named_with_its_line(text: str, words: list[str], experiment: Path, tmp_path: Path) -> None:
    profile = _profile(tmp_path / "site", text)
    with pytest.raises(ConfigError) as refused:
        load_experiment(experiment, profiles=[profile])
    assert all(word in str(refused.value) for word in words), str(refused.value)


def test_every_value_knows_the_line_of_the_file_that_gave_it(experiment: Path, tmp_path: Path) -> None:
    profile = _profile(tmp_path / "site", "launch:\n  partition: a\n  time_limit: '5'\n")
    source = load_with_source(experiment, ["launch.qos=q"], profiles=[profile]).source
    assert source.place(("launch", "partition")).endswith("site/profile.yaml:2")
    assert source.place(("launch", "time_limit")).endswith("experiment.yaml:29")
    assert source.place(("launch", "qos")) == "-s launch.qos=q"
    assert source.profiles == (profile,)


def _go_home(monkeypatch: pytest.MonkeyPatch, home: Path) -> None:
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.delenv("XDG_CONFIG_HOME", raising=False)
    monkeypatch.delenv("CORRAL_SITE_PROFILE", raising=False)


def test_profiles_are_found_from_the_weakest_to_the_strongest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    site = _profile(tmp_path / "etc", "{}\n")
    user = _profile(tmp_path / "config" / "corral", "{}\n")
    named = _profile(tmp_path / "config" / "corral" / "profiles", "{}\n", "h100.yaml")
    _go_home(monkeypatch, tmp_path)
    assert find_profiles(str(named)) == [named]
    assert find_profiles() == []
    monkeypatch.setenv("CORRAL_SITE_PROFILE", str(site))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    assert find_profiles("h100") == [site, user, named]


def test_a_profile_that_does_not_exist_is_refused_with_the_nearest_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _go_home(monkeypatch, tmp_path)
    _profile(tmp_path / ".config" / "corral" / "profiles", "{}\n", "h100.yaml")
    with pytest.raises(ConfigError, match="did you mean 'h100'"):
        find_profiles("h10")
    with pytest.raises(ConfigError, match="no profile"):
        find_profiles("./h100.yaml")
    monkeypatch.setenv("CORRAL_SITE_PROFILE", str(tmp_path / "absent"))
    with pytest.raises(ConfigError, match="CORRAL_SITE_PROFILE"):
        find_profiles()
