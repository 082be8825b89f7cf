"""The Lua scripts of the Redis name service: each changes one record and the sorted set of names in one step.

    store    nothing there | same owner | replace --> SET, add to the set, wake waiters --> ""
             another owner's record               -------------------------------------> that owner
    remove   (owner matches, if one is given)     --> take out of the set, DEL ----------> 0 | 1
    count    absent | an integer                  --> SET keeping the TTL ---------------> the new number, else nil
    prune    for each name: key expired           --> take out of the set

A script compares and writes without anything in between, which a GET followed by a SET cannot. Storing is idempotent
for one owner, hence safe to repeat after a lost reply.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import redis

# What we cannot read is treated as somebody else's, so that one foreign value stops no batch.
_OWNER_OF = """
local function owner_of(stored)
  local is_json, record = pcall(cjson.decode, stored)
  if is_json and type(record) == 'table' and type(record.owner) == 'string' then return record.owner end
  return 'unknown'
end
"""

_STORE = (
    _OWNER_OF
    + """
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
  redis.call('PUBLISH', KEYS[1], '')
end
return ''
"""
)

_REMOVE = (
    _OWNER_OF
    + """
if ARGV[2] ~= '' then
  local stored = redis.call('GET', KEYS[1])
  if stored and owner_of(stored) ~= ARGV[2] then return 0 end
end
redis.call('ZREM', KEYS[2], ARGV[1])
return redis.call('DEL', KEYS[1])
"""
)

_COUNT = """
local stored = redis.call('GET', KEYS[1])
local record = stored and cjson.decode(stored) or {owner = 'counter', value = '0'}
if not string.match(record.value, '^-?%d+$') then return false end
record.value = string.format('%.0f', tonumber(record.value) + tonumber(ARGV[2]))
redis.call('SET', KEYS[1], cjson.encode(record), 'KEEPTTL')
if not stored then
  redis.call('ZADD', KEYS[2], 0, ARGV[1])
  redis.call('PUBLISH', KEYS[1], '')
end
return record.value
"""

_PRUNE = """
for i, name in ipairs(ARGV) do
  if redis.call('EXISTS', KEYS[i + 1]) == 0 then redis.call('ZREM', KEYS[1], name) end
end
return #ARGV
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScriptCall:
    """One call of a script, as EVALSHA wants it."""

    source: str
    keys: tuple[str, ...]
    args: tuple[str, ...]

    def command(self, *, with_source: bool) -> tuple[str | int, ...]:
        if with_source:
            return ("EVAL", self.source, len(self.keys), *self.keys, *self.args)
        # SHA-1 is how Redis names a script; nothing is secured by it.
        sha = hashlib.sha1(self.source.encode(), usedforsecurity=False).hexdigest()
        return ("EVALSHA", sha, len(self.keys), *self.keys, *self.args)


def store_call(
    *, key: str, index: str, name: str, owner: str, record: str, ttl_ms: int | None, replace: bool
) -> ScriptCall:
    ttl = "" if ttl_ms is None else str(ttl_ms)
    args = (name, owner, record, ttl, "1" if replace else "0")
    return ScriptCall(source=_STORE, keys=(key, index), args=args)


def remove_call(*, key: str, index: str, name: str, owner: str | None) -> ScriptCall:
    return ScriptCall(source=_REMOVE, keys=(key, index), args=(name, owner or ""))


def count_call(*, key: str, index: str, name: str, amount: int) -> ScriptCall:
    return ScriptCall(source=_COUNT, keys=(key, index), args=(name, str(amount)))


def prune_call(*, index: str, names: Sequence[str], keys: Sequence[str]) -> ScriptCall:
    return ScriptCall(source=_PRUNE, keys=(index, *keys), args=tuple(names))


def run_scripts(client: Any, calls: Sequence[ScriptCall]) -> list[Any]:
    """Replies of all calls, sent in one batch; a script that the server does not know (any more) is sent along.

    Args:
        client: a `redis.Redis`; Any, because its `execute_command` and `pipeline` carry no types.

    Raises:
        redis.RedisError: the first error among the replies.
    """
    replies = _send(client, [call.command(with_source=False) for call in calls])
    unknown = [index for index, reply in enumerate(replies) if isinstance(reply, redis.exceptions.NoScriptError)]
    if unknown:
        # A NOSCRIPT reply means that this call was not executed, so sending it again changes nothing twice.
        sources_sent: set[str] = set()
        commands = []
        for index in unknown:
            call = calls[index]
            commands.append(call.command(with_source=call.source not in sources_sent))
            sources_sent.add(call.source)
        for index, reply in zip(unknown, _send(client, commands), strict=True):
            replies[index] = reply
    for reply in replies:
        if isinstance(reply, Exception):
            raise reply
    return replies


def _send(client: Any, commands: Sequence[tuple[str | int, ...]]) -> list[Any]:
    if not commands:
        return []
    with client.pipeline(transaction=False) as pipeline:
        for command in commands:
            pipeline.execute_command(*command)
        return list(pipeline.execute(raise_on_error=False))
