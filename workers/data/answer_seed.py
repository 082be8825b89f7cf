"""Which random numbers make an answer: they follow from the trial's seed, its prompt and the train step it is for.

    (trial seed, prompt, step, tries, call, answer) --> sampling seed --> with its position, a token's random number

All generators derive the same seeds: a rollout worker, a model worker with `generate` in the graph, and each of them
again
after a stop or a failure, for nothing of when or by whom an answer was asked for is part of them.
"""

import hashlib
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class AnswerSeeds:
    """The random numbers of the answers to a prompt.

    What could not be trained on does not come back token by token: what came too late is made anew for a later step,
    and what had no finite loss by a further try.
    """

    trial_seed: int
    """The plan's `seed`."""
    prompt: str
    """Its uid, or another name."""
    step: int
    """The train step, from 0, that the answers are for."""
    tries: int = 0
    """How often answers to it have had no finite loss."""

    def of(self, answer: int, *, call: int = 0) -> int:
        """The sampling seed of one answer, in [0, 2**63) as generation servers take it.

        Args:
            answer: which one of the group.
            call: how many groups were sampled for this prompt before; an agent may ask several times.
        """
        name = f"{self.trial_seed}/{self.step}/{self.tries}/{call}/{answer}/{self.prompt}"
        return int.from_bytes(hashlib.blake2b(name.encode(errors="surrogatepass"), digest_size=8).digest(), "big") >> 1

    def of_group(self, group_size: int) -> list[int]:
        """Of every answer of a group."""
        return [self.of(answer) for answer in range(group_size)]
