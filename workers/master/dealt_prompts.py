"""The prompts of a trial with a sampler: drawn here, dealt by the manager, kept by commits.

DrawnPrompts ──those that are neither trained nor dropped──► the record that the manager reads
   ▲    │
   │    └── state ──► prompts.msgpack of the checkpoint, which the next epoch begins with
   └── weights ◄── PromptWeigher ◄── histories
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import msgspec

from corral.workers.checkpoint.checkpoint import PROMPTS_NAME
from corral.workers.checkpoint.ledger import Ledger
from corral.workers.data.prompts import PlannedPrompts
from corral.workers.lifecycle.worker import UserCodeError
from corral.workers.master.drawn_prompts import DrawnPrompts, PromptsState, Weigh
from corral.workers.master.epoch import Epoch
from corral.workers.streams.closing import AsyncClosing
from corral.workers.user_code import scoring
from corral.workers.user_code.children import Children, HostError, Launch, RunFailedError, RunLostError
from corral.workers.user_code.host import LATE, Setup

_WEIGHING_TIMEOUT_S = 120.0  # of a step's prompts
_TRIES = 3  # the function has no state, so a process that was killed, or hangs, is followed by another process


class PromptWeigher(AsyncClosing):
    """Asks a sampler's function of the user's, in a process without keys, which is started with the first question."""

    def __init__(self, import_path: str, *, hidden: Sequence[Path]) -> None:
        """
        Args:
            hidden: folders that the function does not see.
        """
        self._name = f"dataset.sampler {import_path}"
        setup = Setup(
            program=f"{scoring.__name__}:sampler",
            function=import_path,
            name=self._name,
            timeout_s=_WEIGHING_TIMEOUT_S,
            setting="the deadline of a step's weights",
        )
        self._children = Children(Launch(setup), hidden=hidden)

    async def weigh(self, histories: Sequence[Sequence[float]]) -> list[float]:
        """The weights of rows with these mean rewards.

        Raises:
            UserCodeError: if the function fails.
            TimeoutError: if process after process ends, or does not answer in time: the worker has to start again.
            HostError: if no process can be started: the same.
        """
        cause = ""
        for _ in range(_TRIES if histories else 0):
            try:
                return await self._children.call({"histories": list(map(list, histories))}, list[float])
            except RunLostError as error:
                cause = str(error)
            except (HostError, RunFailedError) as error:
                is_users = error.is_from_process if isinstance(error, HostError) else error.kind != LATE
                if is_users:
                    raise UserCodeError(
                        f"{self._name} fails: {error}; mend it in the folder `code` of the trial, and rl-submit "
                        "--resume it"
                    ) from error
                if isinstance(error, HostError):
                    raise
                cause = str(error)
        if histories:
            raise TimeoutError(f"{self._name} gave no weights in {_TRIES} tries: {cause}")
        return []

    async def close(self) -> None:
        await asyncio.to_thread(self._children.close)


@dataclass(frozen=True, slots=True)
class DealtPrompts:
    """Prompts that follow from trained samples, and the workers that get them."""

    drawn: DrawnPrompts
    weigh: Weigh
    say: Callable[[str], None]
    """Tells the manager all that are to be dealt, in order, as JSON."""

    def tell(self) -> None:
        self.say(msgspec.json.encode(self.drawn.open_uids()).decode())

    def note_dropped(self, uid: str, reward: float | None) -> None:
        """The ledger has it as dropped; the mean reward of its answers, if they were judged."""
        if self.drawn.drop(uid, reward):
            self.tell()

    async def note_trained(self, rewards: Mapping[str, float | None]) -> None:
        """The ledger has these as trained by a step."""
        await self.drawn.train(rewards, self.weigh)
        self.tell()

    def content(self) -> bytes:
        """For the commit that holds the ledger as it is now."""
        return msgspec.msgpack.encode(self.drawn.state())


@asynccontextmanager
async def open_dealt(
    epoch: Epoch, ledger: Ledger, prompts: PlannedPrompts, *, say: Callable[[str], None]
) -> AsyncIterator[DealtPrompts | None]:
    """As the commit has them that the epoch goes on from; None where the order of prompts is known from the start."""
    config, spec, checkpoint = prompts.config, epoch.spec, epoch.checkpoint
    if config.sampler is None:
        yield None
        return
    state = None
    if checkpoint is not None:
        content = await epoch.disk.run((checkpoint / PROMPTS_NAME).read_bytes)
        state = msgspec.msgpack.decode(content, type=PromptsState)
    drawn = DrawnPrompts(
        prompts.row_ids,
        ledger,
        seed=epoch.context.plan.seed,
        batch_size=spec.train_batch_size,
        eta=spec.max_head_offpolicyness,
        total=spec.num_prompts * spec.control.total_train_epochs,
        sources={name: one.weight for name, one in config.sources.items()},
        state=state,
    )
    async with PromptWeigher(config.sampler, hidden=[epoch.trial.secrets_path]) as weigher:
        dealt = DealtPrompts(drawn, weigher.weigh, say)
        dealt.tell()
        yield dealt
