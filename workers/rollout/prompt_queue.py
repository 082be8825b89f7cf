"""PromptQueue: which prompt a rollout worker starts next; each is issued until a commit covers it.

    waiting ──take──► running ──finished──► spooled ──covered by a commit──► done
     ▲  ▲                │ failed               │ rejected as stale            │ the trainer fell back
     │  └──── first ─────┴──────────────────────┘                              │ past that commit
     └──── start_over ─────────────────────────────────────────────────────────┘

Pure; what is done comes from the ledger, what is spooled from the spool.

That no uid is lost when a process dies rests on the walk over the whole share, at each start and after each fall-back,
past nothing but what the committed ledger holds or this worker still has. The spool only saves generating again.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator


class PromptQueue:
    """The prompts of one rollout worker, in the order of the seed; those issued again come first.

    Args:
        share: gives all uids of this worker's share, in order, each time that it is called.
        is_settled: whether a uid is in the ledger or in the spool, and must not be generated.
    """

    def __init__(self, share: Callable[[], Iterable[str]], *, is_settled: Callable[[str], bool]) -> None:
        self._share = share
        self._fresh: Iterator[str] = iter(share())
        self._again: deque[str] = deque()
        self._is_settled = is_settled

    def take(self) -> str | None:
        """The next prompt to start, or None if there is none at the moment."""
        while self._again:
            uid = self._again.popleft()
            if not self._is_settled(uid):
                return uid
        return next((uid for uid in self._fresh if not self._is_settled(uid)), None)

    def put_back(self, uid: str) -> None:
        """A prompt was taken and not started, failed, or was rejected: it is issued again."""
        if uid not in self._again:
            self._again.append(uid)

    def start_over(self) -> None:
        """Something that was settled is so no longer: the whole share is looked at again, from its beginning."""
        self._fresh = iter(self._share())
