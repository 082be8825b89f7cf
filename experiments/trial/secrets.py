"""A trial's secrets: made once at submission, kept in one file of mode 0600, handed on by path only.

    rl-submit --create--> {trial}/secrets/secrets.json, server.pem --load--> every worker of the trial, by the same user
                                     |
    rl-stop, completion --destroy----+

All server sockets of a trial share one CURVE key pair; each role has a client key pair of its own, so a server can
tell a rollout worker from a master worker, and a stranger from both. What speaks HTTP, and Redis between hosts, shows
the certificate in `server.pem`: see `trust.py`.
"""

import hmac
import logging
import os
import re
import secrets as random_tokens
import stat
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Final, NoReturn

import msgspec
import zmq

from corral.experiments.trial.directory import fsync_directory, write_new_file
from corral.experiments.trial.trust import Trust, new_identity
from corral.scheduling.worker_information import WORKER_KINDS

SECRETS_FILE: Final = "secrets.json"
_MAX_BYTES: Final = 65536
_HIDDEN: Final = "***"


class UnsafeSecretsError(PermissionError):
    """The secrets may have been read or written by somebody else, so they are not used."""


class Secret:
    """Text that shows as `***` wherever it is printed; `reveal()` is the one way out, and easy to search for."""

    __slots__ = ("_value",)

    def __init__(self, value: str) -> None:
        self._value = value

    def reveal(self) -> str:
        return self._value

    def __repr__(self) -> str:
        return _HIDDEN

    def __format__(self, format_spec: str) -> str:
        return _HIDDEN

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Secret):
            return NotImplemented
        return hmac.compare_digest(self._value.encode(), other._value.encode())

    def __hash__(self) -> int:
        return hash((Secret, self._value))

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise TypeError("a Secret is never serialized; hand on the path of the secrets directory instead")


class CurvePair(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A CURVE key pair, each key as 40 characters of Z85."""

    public: str
    secret: Secret


class TrialSecrets(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Everything that lets a process take part in one trial."""

    server: CurvePair
    clients: Mapping[str, CurvePair]
    """Client key pair by role."""
    redis_password: Secret
    http_api_key: Secret
    """Guards generation servers' HTTP."""
    http_admin_key: Secret
    """Guards what changes them: pauses, aborts, new weights."""
    tls_key: tuple[Secret, ...] = ()
    """Lines of the private key in `server.pem`, which alone has them."""

    @classmethod
    def create(cls, directory: Path) -> "TrialSecrets":
        """Makes new secrets in `directory` (created with mode 0700 if missing).

        Raises:
            FileExistsError: if there are secrets already; they are never overwritten.
            UnsafeSecretsError: if others may write into `directory`.
        """
        new = cls(
            server=_new_pair(),
            clients={role: _new_pair() for role in WORKER_KINDS},
            # In hexadecimal: SGLang hands its keys on as arguments, where one that begins with - is an option.
            redis_password=Secret(random_tokens.token_hex(32)),
            http_api_key=Secret(random_tokens.token_hex(32)),
            http_admin_key=Secret(random_tokens.token_hex(32)),
        )
        directory.mkdir(mode=0o700, exist_ok=True)
        _require_private_directory(directory)
        path = directory / SECRETS_FILE
        try:
            write_new_file(path, msgspec.json.encode(new, enc_hook=Secret.reveal))
        except FileExistsError:
            raise FileExistsError(
                f"{path} exists already; a trial keeps its secrets for life, so load them, or start a new trial"
            ) from None
        identity = new_identity()
        write_new_file(Trust(directory).path, identity)
        fsync_directory(directory)
        return msgspec.structs.replace(new, tls_key=_key_lines(identity))

    @classmethod
    def load(cls, directory: Path) -> "TrialSecrets":
        """Reads the secrets, refusing what somebody else may have read or replaced.

        Raises:
            FileNotFoundError: if there are none (the trial has ended, or this is no trial directory).
            UnsafeSecretsError: naming path, rule and remedy.
            ValueError: if the file is no secrets file.
        """
        _require_private_directory(directory)
        path = directory / SECRETS_FILE
        try:
            found = msgspec.json.decode(_read_private_file(path), type=cls, dec_hook=_secret_of)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            # The cause is not chained: it may quote the file.
            raise ValueError(f"{path} is not a secrets file ({type(error).__name__}); start a new trial") from None
        identity = _read_private_file(Trust(directory).path)
        return msgspec.structs.replace(found, tls_key=_key_lines(identity))

    @staticmethod
    def destroy(directory: Path) -> None:
        """Removes everything in the secrets directory, and the directory; does nothing if it is gone."""
        if directory.is_symlink():
            raise UnsafeSecretsError(f"{directory} is a symbolic link, so what it leads to is not removed; remove it")
        try:
            for path in directory.iterdir():
                path.unlink(missing_ok=True)
            directory.rmdir()
        except FileNotFoundError:
            return

    def role_by_public_key(self) -> dict[bytes, str]:
        """Who a client is, by its public key in Z85."""
        return {pair.public.encode("ascii"): role for role, pair in self.clients.items()}

    def values(self) -> list[Secret]:
        """All secret values, for `SecretFilter`."""
        pairs = [self.server, *self.clients.values()]
        passwords = (self.redis_password, self.http_api_key, self.http_admin_key)
        return [*(pair.secret for pair in pairs), *passwords, *self.tls_key]


class SecretFilter(logging.Filter):
    """Replaces known secrets in log records by `***`. Add it to handlers: a logger's filter misses child loggers."""

    def __init__(self, secrets: Iterable[Secret]) -> None:
        super().__init__()
        values = sorted((secret.reveal() for secret in secrets), key=len, reverse=True)
        self._pattern = re.compile("|".join(re.escape(value) for value in values if value) or r"(?!)")

    def filter(self, record: logging.LogRecord) -> bool:
        message = record.getMessage()
        if self._pattern.search(message):
            record.msg, record.args = self.scrub(message), ()
        if record.exc_info and not record.exc_text:
            # Formatters print exc_text if it is there, so a traceback is scrubbed before any handler sees it.
            record.exc_text = logging.Formatter().formatException(record.exc_info)
        if record.exc_text:
            record.exc_text = self.scrub(record.exc_text)
        if record.stack_info:
            record.stack_info = self.scrub(record.stack_info)
        return True

    def scrub(self, text: str) -> str:
        return self._pattern.sub(_HIDDEN, text)


def _new_pair() -> CurvePair:
    public, secret = zmq.curve_keypair()
    return CurvePair(public.decode("ascii"), Secret(secret.decode("ascii")))


def _key_lines(identity: bytes) -> tuple[Secret, ...]:
    """Of a private key as PEM, which stands before its certificate; each by itself, as a part of it may be shown."""
    key = identity.decode("ascii").partition("-----END ")[0]
    return tuple(map(Secret, key.split("-----")[-1].split()))


def _secret_of(kind: type, text: Any) -> Secret:
    if not isinstance(text, str):
        raise TypeError("a secret is text")
    return Secret(text)


def _read_private_file(path: Path) -> bytes:
    if path.is_symlink():
        raise UnsafeSecretsError(f"{path} is a symbolic link; secrets must be a regular file, start a new trial")
    with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
        status = os.fstat(file.fileno())
        if not stat.S_ISREG(status.st_mode):
            raise UnsafeSecretsError(f"{path} is not a regular file; remove it and start a new trial")
        remedy = "have read it; start a new trial (or `chmod 600` it if you know that nobody has)"
        _require_own(path, status, shared_bits=0o077, others_may=remedy)
        return file.read(_MAX_BYTES)


def _require_private_directory(directory: Path) -> None:
    status = os.lstat(directory)
    if not stat.S_ISDIR(status.st_mode):
        raise UnsafeSecretsError(f"{directory} is not a directory (or a symbolic link to one); remove it")
    remedy = "replace what is in it; `chmod 700` it and start a new trial"
    _require_own(directory, status, shared_bits=0o022, others_may=remedy)


def _require_own(path: Path, status: os.stat_result, *, shared_bits: int, others_may: str) -> None:
    if status.st_uid != os.geteuid():
        raise UnsafeSecretsError(
            f"{path} belongs to user id {status.st_uid}, not to {os.geteuid()} who reads it; "
            f"use the trial as the user who submitted it"
        )
    if status.st_mode & shared_bits:
        raise UnsafeSecretsError(f"{path} has mode {stat.S_IMODE(status.st_mode):04o}, so others may {others_may}")
