"""The name service in Redis (>= 6.2), which is what trials use.

    {prefix}{name}     JSON {"owner", "value"}, with the TTL of the record        corral/<uuid>/workers/rollout_worker/0
    {prefix}~names     sorted set of names, all with score 0, so in byte order    corral/<uuid>/~names
    {prefix}~changed/  by root a stream of one entry, whose id marks the change   corral/<uuid>/~changed/trainer

A subtree is a range of the sorted set plus one MGET: it costs what it returns, where KEYS and SCAN cost what the server
holds. Lua scripts change a record and the set in one step, so the set always contains every living name; a name whose
record has expired is skipped, and removed by the next call that finds it. They compare and write without anything in
between, which a GET followed by a SET cannot:

    store    nothing there | same owner | replace --> SET, add to the set, mark a change -> ""
             another owner's record               -------------------------------------> that owner
    remove   (owner matches, if one is given)     --> take out of the set, DEL, mark it
    prune    for each name: key expired           --> take out of the set

Who waits for changes blocks in XREAD: one that waits costs nothing until there is one, and none is missed, since the
marks are kept by who waits. They follow the clock, so that those of a Redis that lost everything are newer ones.

Every operation retries over reconnects, for `unavailable_timeout_s`. That is safe because storing is idempotent for one
owner, and removing for all. Connections come from a pool, one for each thread that is in an operation.
"""

import json
import socket
import ssl
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

import redis
from redis.backoff import NoBackoff
from redis.connection import Connection, ConnectionPool
from redis.retry import Retry

from corral.name_resolve.base import (
    NameService,
    NameServiceError,
    NameServiceUnavailableError,
    Put,
    check_prefix,
    check_root,
)

_SOCKET_TIMEOUT_S = 2.0  # all replies are small; a server that needs longer is hung, and a beat must not wait for it
_LONGEST_WAIT_S = 10.0  # for a change, before the connection is proved to live
_FIRST_BACKOFF_S, _MAX_BACKOFF_S = 0.05, 0.5
_NAMES_PER_COMMAND = 1000  # keeps single commands short, since Redis serves nobody else meanwhile

Result = TypeVar("Result")
ScriptCall = tuple[str, Sequence[str], Sequence[str]]
"""A script, its keys and its arguments."""

# What we cannot read is treated as somebody else's, so that one foreign value stops no batch.
_OWNER_OF = """
local function owner_of(stored)
  local is_json, record = pcall(cjson.decode, stored)
  if is_json and type(record) == 'table' and type(record.owner) == 'string' then return record.owner end
  return 'unknown'
end
"""
_STORE = f"""{_OWNER_OF}
local stored = redis.call('GET', KEYS[1])
if stored and ARGV[5] == '0' then
  local holder = owner_of(stored)
  if holder ~= ARGV[2] then return holder end
end
if ARGV[4] == '' then
  redis.call('SET', KEYS[1], ARGV[3])
else
  redis.call('SET', KEYS[1], ARGV[3], 'PX', ARGV[4])
end
if not stored then
  redis.call('ZADD', KEYS[2], 0, ARGV[1])
end
if stored ~= ARGV[3] then
  redis.call('XADD', KEYS[3], 'MAXLEN', 1, '*', '', '')
end
return ''
"""
_REMOVE = f"""{_OWNER_OF}
if ARGV[2] ~= '' then
  local stored = redis.call('GET', KEYS[1])
  if stored and owner_of(stored) ~= ARGV[2] then return end
end
redis.call('ZREM', KEYS[2], ARGV[1])
if redis.call('DEL', KEYS[1]) == 1 then
  redis.call('XADD', KEYS[3], 'MAXLEN', 1, '*', '', '')
end
"""
_PRUNE = """
for i, name in ipairs(ARGV) do
  if redis.call('EXISTS', KEYS[i + 1]) == 0 then redis.call('ZREM', KEYS[1], name) end
end
return #ARGV
"""


class ProvedConnection(Connection):
    """A connection that sends nothing before the server has proved that it has the trial's key.

    redis-py's own TLS connection accepts the certificates of the system as well, so that their owners would pass.
    """

    def __init__(self, *, tls: ssl.SSLContext, **arguments: Any) -> None:
        super().__init__(**arguments)  # type: ignore[no-untyped-call]
        self._tls = tls

    def _connect(self) -> socket.socket:
        plain: socket.socket = super()._connect()  # type: ignore[no-untyped-call]
        try:
            return self._tls.wrap_socket(plain)
        except BaseException:
            plain.close()
            raise


class RedisNameService(NameService):
    """A name service in the Redis at `host:port`, under `prefix`.

    Args:
        tls: `Trust.client()`.
        prefix: `TrialKeys.prefix`; the ACL user needs `~{prefix}*`, `+@read +@write +@connection +eval +time`.
        unavailable_timeout_s: how long an operation tries to reach the server before NameServiceUnavailableError.
    """

    def __init__(
        self,
        host: str,
        port: int,
        password: str | None,
        prefix: str,
        username: str | None = None,
        *,
        tls: ssl.SSLContext,
        unavailable_timeout_s: float = 10.0,
    ) -> None:
        super().__init__(described=f"Redis at {host}:{port}")
        self._prefix = check_prefix(prefix)
        self._index = self._prefix + "~names"
        self._user = username or "default"
        self._unavailable_timeout_s = unavailable_timeout_s
        self._is_disconnected = False
        open_pool = partial(
            ConnectionPool,
            connection_class=ProvedConnection,
            tls=tls,
            host=host,
            port=port,
            username=username,
            password=password,
            socket_connect_timeout=_SOCKET_TIMEOUT_S,
            retry=Retry(NoBackoff(), 0),  # retries are ours: with one deadline, and with the server named in the error
            protocol=2,
            decode_responses=True,
        )
        # Any: redis-py gives its commands either no types or unions with awaitables.
        self._client: Any = redis.Redis.from_pool(open_pool(socket_timeout=_SOCKET_TIMEOUT_S))
        self._waiting: Any = redis.Redis.from_pool(open_pool(socket_timeout=_LONGEST_WAIT_S + _SOCKET_TIMEOUT_S))

    def _put(self, puts: Sequence[Put], *, patience_s: float | None = None) -> list[str]:
        calls = [self._store_call(put) for put in puts]
        return [str(holder) for holder in self._retry(lambda: self._evaluate(calls), patience_s)]

    def _store_call(self, put: Put) -> ScriptCall:
        record = json.dumps({"owner": put.owner, "value": put.value})
        ttl_ms = "" if put.ttl_s is None else str(max(round(put.ttl_s * 1000), 1))
        arguments = (put.name, put.owner, record, ttl_ms, "1" if put.replace else "0")
        return _STORE, (self._key(put.name), self._index, self._mark_key(put.name.rpartition("/")[0])), arguments

    def _remove(self, name: str, *, owner: str | None, patience_s: float | None = None) -> None:
        keys = (self._key(name), self._index, self._mark_key(name.rpartition("/")[0]))
        call = _REMOVE, keys, (name, owner or "")
        self._retry(lambda: self._evaluate([call]), patience_s)

    def _fetch(self, name: str, *, patience_s: float | None = None) -> str | None:
        stored = self._retry(lambda: self._client.execute_command("GET", self._key(name)), patience_s)
        return None if stored is None else self._value(name, stored)

    def get_subtree(self, root: str) -> dict[str, str]:
        return self._retry(partial(self._read_subtree, check_root(root)))

    def _read_subtree(self, root: str) -> dict[str, str]:
        names = self._indexed_names(root)
        values: dict[str, str] = {}
        for start in range(0, len(names), _NAMES_PER_COMMAND):
            chunk = names[start : start + _NAMES_PER_COMMAND]
            stored = self._client.execute_command("MGET", *(self._key(name) for name in chunk))
            values |= {name: self._value(name, text) for name, text in zip(chunk, stored, strict=True) if text}
            if expired := [name for name in chunk if name not in values]:
                self._evaluate([(_PRUNE, (self._index, *map(self._key, expired)), expired)])
        return values

    def changes(self, seen: Mapping[str, str], *, timeout_s: float) -> dict[str, str]:
        roots = {self._mark_key(check_root(root)): root for root in seen}
        block_ms = max(1, round(1000 * min(timeout_s, _LONGEST_WAIT_S)))  # 0 would be for ever
        command = ("XREAD", "BLOCK", block_ms, "STREAMS", *roots, *(mark or "0" for mark in seen.values()))
        found = self._retry(lambda: self._waiting.execute_command(*command))
        return {roots[key]: str(entries[-1][0]) for key, entries in found or ()}

    def clock(self) -> float:
        seconds, microseconds = self._retry(lambda: self._client.execute_command("TIME"))
        return int(seconds) + int(microseconds) / 1e6

    def close(self) -> None:
        super().close()
        self._is_disconnected = True
        self._client.close()
        self._waiting.close()

    def _key(self, name: str) -> str:
        return self._prefix + name

    def _mark_key(self, root: str) -> str:
        return f"{self._prefix}~changed/{root}"

    def _value(self, name: str, stored: str) -> str:
        try:
            return str(json.loads(stored)["value"])
        except (ValueError, KeyError, TypeError) as error:
            where = f"{self._key(name)} in {self._described}"
            raise NameServiceError(f"{where} is not a record of a name service: {stored[:80]!r}; delete it") from error

    def _indexed_names(self, root: str) -> list[str]:
        """All living names of the subtree in byte order, and perhaps some that have expired."""
        if not root:
            return [str(name) for name in self._client.execute_command("ZRANGEBYLEX", self._index, "-", "+")]
        # '0' is the character after '/', so this range is exactly what starts with "root/".
        below = self._client.execute_command("ZRANGEBYLEX", self._index, f"[{root}/", f"({root}0")
        return [root, *(str(name) for name in below)]

    def _evaluate(self, calls: Sequence[ScriptCall]) -> list[Any]:
        """Replies of all calls, sent in one batch, each with its script: the few hundred bytes spare a lost cache.

        Raises:
            redis.RedisError: the first error among the replies.
        """
        with self._client.pipeline(transaction=False) as pipeline:
            for script, keys, arguments in calls:
                pipeline.eval(script, len(keys), *keys, *arguments)
            replies = list(pipeline.execute(raise_on_error=False))
        for reply in replies:
            if isinstance(reply, Exception):
                raise reply
        return replies

    def _retry(self, operation: Callable[[], Result], patience_s: float | None = None) -> Result:
        """Run an operation, again after each connection error, at most for the patience or `unavailable_timeout_s`."""
        limit_s = self._unavailable_timeout_s
        patience_s = limit_s if patience_s is None else min(patience_s, limit_s)
        deadline_s = time.monotonic() + patience_s
        backoff_s = _FIRST_BACKOFF_S
        while True:
            if self._is_disconnected:
                raise NameServiceError(f"the name service on {self._described} is closed")
            try:
                return operation()
            except (redis.AuthenticationError, redis.exceptions.NoPermissionError) as error:
                # A subclass of ConnectionError, but no reconnect gives us another password.
                raise NameServiceError(f"{self._described} refuses user {self._user!r}: {error}") from error
            except (redis.ConnectionError, redis.TimeoutError) as error:
                if time.monotonic() + backoff_s > deadline_s:
                    raise NameServiceUnavailableError(
                        f"{self._described} is unreachable (tried for {patience_s:g} s): {error}"
                    ) from error
                time.sleep(backoff_s)
                backoff_s = min(2 * backoff_s, _MAX_BACKOFF_S)
            except redis.RedisError as error:
                raise NameServiceError(f"{self._described} answers: {error}") from error
