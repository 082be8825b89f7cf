"""Which random numbers make an answer: they follow from the trial's seed and from when its prompt was admitted.

    (trial seed, order, call, answer) --> sampling seed --> with its position, the random number of each token

Whoever generates derives the same seeds, a rollout worker or a model worker with `generate` in the graph.
"""

import hashlib


def answer_seed(trial_seed: int, *, order: int, answer: int, call: int = 0) -> int:
    """The sampling seed of one answer, in [0, 2**63) as generation servers take it.

    A prompt that is issued again has another order, and with it other answers: what a trainer could not use does not
    come back token by token.

    Args:
        trial_seed: the plan's `seed`.
        order: the prompt's admission number.
        answer: which one of the group.
        call: how many groups were sampled for this admission before; an agent may ask several times.
    """
    name = f"{trial_seed}/{order}/{call}/{answer}"
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "big") >> 1


def group_seeds(trial_seed: int, *, order: int, group_size: int, call: int = 0) -> list[int]:
    """The sampling seed of every answer of a group."""
    return [answer_seed(trial_seed, order=order, answer=answer, call=call) for answer in range(group_size)]
