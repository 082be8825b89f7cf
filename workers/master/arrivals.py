"""Arrivals: what rollout workers have delivered to any rank, as soon as the rank says so.

    ask() ──one Fetch that waits──► every rank that has none ──something arrived, or nothing for a while──► reply
       aboard the next message, or, at `hurry`, by itself                                                     │
    take() ◄── what to keep, in order of arrival ◄──────────────────────────────────────────── wake() ◄───────────┘

Nobody polls: a rank holds its Fetch until it has something to say. What it then says is repeated by the request stream
until it is here, and if it cannot be, the rank counts as dead and the epoch ends: so nothing that a rank has taken in
is forgotten while the epoch lasts, and the next one's session asks for it again.
"""

from array import array
from collections.abc import Callable, Mapping
from functools import lru_cache

from corral.scheduling.policy_version import PolicyVersion
from corral.workers.master.sequence_buffer import BufferedSample
from corral.workers.requests.client import RequestClient
from corral.workers.requests.messages import Fetch, MetadataReply, ReplyPayload
from corral.workers.requests.pending_replies import PendingReplies

_AT_MOST = 1024  # samples in one reply
_WAIT_S = 60.0  # a rank without arrivals costs a message a minute, and a link that is dead is noticed otherwise
_DEADLINE_S = _WAIT_S + 60.0


class Arrivals:
    """Belongs to the thread of the client's loop.

    Example:
        arrivals = Arrivals(client, {0: "model_worker/0", 1: "model_worker/1"}, wake=event.set)
        arrivals.ask()
        arrivals.hurry()
        await event.wait()
        arrivals.take()     # [BufferedSample(owner=1, ...), ...]
    """

    def __init__(self, client: RequestClient, worker_by_rank: Mapping[int, str], *, wake: Callable[[], None]) -> None:
        """
        Args:
            worker_by_rank: ids of those that receive.
            wake: called whenever there is something to take, be it an error.
        """
        self._client = client
        self._worker_by_rank = worker_by_rank
        self._wake = wake
        self._idle = set(worker_by_rank)  # ranks without a Fetch
        self._arrived: list[BufferedSample] = []
        self.failed: PendingReplies | None = None
        """Replies of which one is an error, for whoever awaits them; None while all is well."""

    def ask(self) -> None:
        """Let every rank say what arrives from now on, if it has not been asked; with the next message that it gets.

        What has found none since the last call goes now: no rank's arrivals wait for more than two calls.
        """
        self._client.send_waiting()
        if not self._idle:
            return
        ranks = sorted(self._idle)
        self._idle.clear()
        request = Fetch(max_samples=_AT_MOST, wait_s=_WAIT_S)
        rank_by_worker = {self._worker_by_rank[rank]: rank for rank in ranks}
        pending = self._client.post_aboard(rank_by_worker, request, deadline_s=_DEADLINE_S)
        pending.on_each(lambda worker, reply: self._absorb(rank_by_worker[worker], reply, pending))

    def hurry(self) -> None:
        """Ask now: there may be no other message for long."""
        self._client.send_waiting()

    def take(self) -> list[BufferedSample]:
        """What has arrived since the last call, each with the rank that holds it."""
        arrived, self._arrived = self._arrived, []
        return arrived

    def _absorb(self, rank: int, reply: ReplyPayload | None, pending: PendingReplies) -> None:
        if reply is None:
            self.failed = pending
        elif isinstance(reply, MetadataReply):
            self._idle.add(rank)
            self._arrived += buffered(reply, owner=rank)  # now, while it is at hand
        self._wake()


def buffered(reply: MetadataReply, *, owner: int) -> list[BufferedSample]:
    """What the master keeps of the samples that a rank has described."""
    samples: list[BufferedSample] = []
    for group in reply.groups:
        versions, keys = _versions(group.versions), _keys(group.keys)
        samples += [
            BufferedSample(
                uid=uid,
                order=order,
                owner=owner,
                num_tokens=array("I", num_tokens),
                versions=versions,
                keys=keys,
                dropped_because=group.dropped_because,
            )
            for uid, order, num_tokens in zip(group.uids, group.orders, group.num_tokens, strict=True)
        ]
    return samples


@lru_cache(maxsize=1024)  # the samples of a step share a few combinations
def _versions(tags: tuple[str, ...]) -> frozenset[PolicyVersion]:
    return frozenset(PolicyVersion.parse(tag) for tag in tags)


@lru_cache(maxsize=64)
def _keys(keys: tuple[str, ...]) -> frozenset[str]:
    return frozenset(keys)
