"""The prompts of a trial with a sampler: drawn here, dealt by the manager, kept by commits.

DrawnPrompts ──those that are neither trained nor dropped──► the record that the manager reads
   ▲    │
   │    └── state ──► prompts.msgpack of the checkpoint, which the next epoch begins with
   └── weights ◄── PromptWeigher ◄── histories
"""

from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass

import msgspec

from corral.workers.checkpoint.checkpoint import PROMPTS_NAME
from corral.workers.checkpoint.ledger import Ledger
from corral.workers.data.prompts import PlannedPrompts
from corral.workers.master.drawn_prompts import DrawnPrompts, PromptsState, Weigh
from corral.workers.master.epoch import Epoch
from corral.workers.master.prompt_weigher import PromptWeigher


@dataclass(frozen=True, slots=True)
class DealtPrompts:
    """Prompts that follow from what was trained, and who hears of them."""

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
