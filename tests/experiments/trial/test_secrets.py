import copy
import json
import logging
import os
import re
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from corral.experiments.trial.secrets import Secret, SecretFilter, TrialSecrets, UnsafeSecretsError
from corral.experiments.trial.trust import Trust
from corral.scheduling.worker_information import WORKER_KINDS


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return tmp_path / "secrets"


def test_secrets_load_as_they_were_created(directory: Path) -> None:
    created = TrialSecrets.create(directory)
    assert TrialSecrets.load(directory) == created
    assert stat.S_IMODE((directory / "secrets.json").stat().st_mode) == 0o600
    assert stat.S_IMODE(directory.stat().st_mode) == 0o700


def test_the_umask_does_not_decide_who_can_read_secrets(directory: Path) -> None:
    previous = os.umask(0)
    try:
        TrialSecrets.create(directory)
    finally:
        os.umask(previous)
    TrialSecrets.load(directory)


def test_every_key_and_password_is_different_from_every_other(directory: Path) -> None:
    secrets = TrialSecrets.create(directory)
    values = [secret.reveal() for secret in secrets.values()]
    lines = [line for line in Trust(directory).path.read_text().split() if line in values]
    assert len(lines) == 3 and len(set(values)) == len(values) == len(WORKER_KINDS) + 4 + len(lines)
    assert [secret.reveal() for secret in TrialSecrets.load(directory).values()] == values
    assert secrets != TrialSecrets.create(directory.parent / "other")


def test_no_password_can_be_taken_for_an_option_of_a_command(directory: Path) -> None:
    secrets = TrialSecrets.create(directory)
    given = (secrets.redis_password, secrets.http_api_key, secrets.http_admin_key)
    assert all(re.fullmatch("[0-9a-f]{64}", secret.reveal()) for secret in given)


def test_a_server_tells_roles_apart_by_public_key(directory: Path) -> None:
    secrets = TrialSecrets.create(directory)
    roles = secrets.role_by_public_key()
    assert {roles[secrets.clients[role].public.encode()] for role in WORKER_KINDS} == set(WORKER_KINDS)
    assert secrets.server.public.encode() not in roles


def test_secrets_are_never_overwritten(directory: Path) -> None:
    TrialSecrets.create(directory)
    before = (directory / "secrets.json").read_bytes()
    with pytest.raises(FileExistsError, match="exists already"):
        TrialSecrets.create(directory)
    assert (directory / "secrets.json").read_bytes() == before


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620, 0o602, 0o610, 0o777])
def test_a_file_that_others_may_touch_is_refused(directory: Path, mode: int) -> None:
    TrialSecrets.create(directory)
    (directory / "secrets.json").chmod(mode)
    with pytest.raises(UnsafeSecretsError, match=f"{mode:04o}"):
        TrialSecrets.load(directory)


@pytest.mark.parametrize("mode", [0o770, 0o720, 0o702, 0o777])
def test_a_directory_that_others_may_write_is_refused(directory: Path, mode: int) -> None:
    TrialSecrets.create(directory)
    directory.chmod(mode)
    with pytest.raises(UnsafeSecretsError, match=f"{mode:04o}"):
        TrialSecrets.load(directory)
    (directory / "secrets.json").unlink()
    with pytest.raises(UnsafeSecretsError):
        TrialSecrets.create(directory)


def test_secrets_of_another_user_are_refused(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    TrialSecrets.create(directory)
    me = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: me + 1)
    with pytest.raises(UnsafeSecretsError, match=f"belongs to user id {me}"):
        TrialSecrets.load(directory)


def test_a_file_of_another_user_in_our_directory_is_refused(directory: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root can give a file away")
    TrialSecrets.create(directory)
    os.chown(directory / "secrets.json", 12345, -1)
    with pytest.raises(UnsafeSecretsError, match="12345"):
        TrialSecrets.load(directory)


def test_links_and_pipes_are_refused_in_place_of_the_file(directory: Path) -> None:
    TrialSecrets.create(directory)
    path = directory / "secrets.json"
    path.rename(directory / "real.json")
    path.symlink_to("real.json")
    with pytest.raises(UnsafeSecretsError, match="symbolic link"):
        TrialSecrets.load(directory)
    path.unlink()
    os.mkfifo(path, 0o600)
    with pytest.raises(UnsafeSecretsError, match="not a regular file"):
        TrialSecrets.load(directory)


def test_a_link_in_place_of_the_directory_is_refused(directory: Path) -> None:
    TrialSecrets.create(directory)
    link = directory.parent / "link"
    link.symlink_to(directory)
    with pytest.raises(UnsafeSecretsError, match="not a directory"):
        TrialSecrets.load(link)
    with pytest.raises(UnsafeSecretsError, match="symbolic link"):
        TrialSecrets.destroy(link)


def test_a_damaged_file_is_refused_without_quoting_it(directory: Path) -> None:
    TrialSecrets.create(directory)
    path = directory / "secrets.json"
    content = json.loads(path.read_bytes())
    content["redis_password"] = ["hunter2"]
    path.write_text(json.dumps(content))
    with pytest.raises(ValueError) as caught:
        TrialSecrets.load(directory)
    assert "hunter2" not in str(caught.value) and caught.value.__cause__ is None


def test_destroyed_secrets_are_gone_and_destroying_twice_is_fine(directory: Path) -> None:
    TrialSecrets.create(directory)
    (directory / "sglang.json").write_text("{}")
    TrialSecrets.destroy(directory)
    TrialSecrets.destroy(directory)
    assert not directory.exists()
    with pytest.raises(FileNotFoundError):
        TrialSecrets.load(directory)


def test_a_secret_shows_nowhere_by_accident() -> None:
    secret = Secret("hunter2")
    assert f"{secret} {secret!r} {secret!s} {secret:>20}" == "*** *** *** ***" and str([secret]) == "[***]"
    assert secret.reveal() == "hunter2"
    with pytest.raises(TypeError):
        copy.copy(secret)
    with pytest.raises(TypeError):
        json.dumps({"password": secret})


def test_secrets_do_not_show_in_the_repr_of_all(directory: Path) -> None:
    secrets = TrialSecrets.create(directory)
    text = f"{secrets} {secrets!r}"
    assert not [secret for secret in secrets.values() if secret.reveal() in text]


def test_equal_secrets_are_equal() -> None:
    assert Secret("a") == Secret("a") and hash(Secret("a")) == hash(Secret("a"))
    assert Secret("a") != Secret("b") and Secret("a") != "a"


@pytest.fixture
def filtered_lines() -> Iterator[tuple[logging.Logger, list[str]]]:
    lines: list[str] = []

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.append(self.format(record))

    handler = Keep()
    handler.addFilter(SecretFilter([Secret("hunter2"), Secret("hunter2-long"), Secret("a+b(c%s"), Secret("")]))
    logger = logging.getLogger("test_secrets.filtered")
    logger.addHandler(handler)
    yield logger, lines
    logger.removeHandler(handler)


def test_log_records_are_scrubbed(filtered_lines: tuple[logging.Logger, list[str]]) -> None:
    logger, lines = filtered_lines
    logger.error("password hunter2-long and %s", "a+b(c%s")
    logger.error("clean %d", 5)
    assert lines == ["password *** and ***", "clean 5"]


def test_tracebacks_are_scrubbed_too(filtered_lines: tuple[logging.Logger, list[str]]) -> None:
    logger, lines = filtered_lines
    password = "".join(["hunter", "2"])  # so that the source line in the traceback is clean
    try:
        raise RuntimeError(f"cannot log in with {password}")
    except RuntimeError:
        logger.exception("failed")
    assert "cannot log in with ***" in lines[0] and password not in lines[0]
