"""EpisodeLog: the tokens given to a model and the tokens that it generated, in the order of an episode.

    request's ids ──begin──► Turn: goes on from a branch, or begins a new one ──its answer grows──► finish: appended
                                                                              └──abandon: as if it had never been

    branch 0    given P P P P │ made a a a │ given t t │ made b b b          a tool's output, and what followed it
    branch 1    given P P P P   given t t u u          │ made c c            the history was rewritten: a new branch

A branch is append-only. What follows all of its tokens exactly goes on in it; anything else is a new branch, in which
everything before its first own answer is given, also what was made in another one. So each made token is trained in the
branch that it was made in, and nowhere else, and nothing that was tokens is ever tokenised again.

Pure; who asks the model is `corral.workers.rollout.episode_session`.
"""

from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass, field

from corral.experiments.worker_specs import RoutedExpertsSpec
from corral.scheduling.policy_version import PolicyVersion
from corral.workers.episodes.partial_answer import PartialAnswer
from corral.workers.episodes.routed_experts import AnswerExperts


@dataclass(slots=True)
class Segment:
    """Tokens of a branch that came at once."""

    ids: Sequence[int]
    answer: PartialAnswer | None = None
    """Of what was made, the one that has these tokens; None: they were given."""
    is_trained: bool = False
    """Whether something is learned from them."""
    reward: float = 0.0
    """Of the turn, beside the episode's own."""


@dataclass(slots=True)
class Branch:
    """One sequence of the trainer."""

    segments: list[Segment] = field(default_factory=list)
    is_busy: bool = False
    """Whether an answer of its is being made: nothing else can go on from it meanwhile."""
    experts: AnswerExperts | None = None
    first_turn: int = 0
    """Number of the turn that it was begun for."""

    @classmethod
    def of(cls, prompt_ids: Sequence[int], answer: PartialAnswer) -> "Branch":
        """One prompt, one answer."""
        segment = Segment(answer.output_ids, answer, is_trained=True)
        return cls([Segment(prompt_ids), segment], experts=answer.experts)

    @property
    def ids(self) -> list[int]:
        """All of its tokens."""
        return [token for segment in self.segments for token in segment.ids]

    @property
    def num_tokens(self) -> int:
        return sum(len(segment.ids) for segment in self.segments)

    @property
    def is_cut(self) -> bool:
        """Whether its last answer was ended by a limit."""
        answers = [segment.answer for segment in self.segments if segment.answer is not None]
        return bool(answers) and not answers[-1].stopped


@dataclass(frozen=True, slots=True)
class Turn:
    """One answer of the model, in the making or made."""

    number: int
    """From 0, over all branches, in the order in which they were begun."""
    prompt_ids: Sequence[int]
    """All that comes before it."""
    answer: PartialAnswer
    branch: Branch
    given_ids: Sequence[int]
    """Of those before it, the ones that its branch does not have yet."""


@dataclass(slots=True)
class EpisodeLog:
    """The branches of one episode.

    Example:
        log = EpisodeLog()
        turn = log.begin([1, 2], max_new_tokens=4)
        ...                                             # turn.answer.extend(event), until it is finished
        log.finish(turn)
    """

    _: KW_ONLY
    experts: RoutedExpertsSpec | None = None
    """The form of the recorded experts of a mixture; None if they are not recorded."""
    branches: list[Branch] = field(default_factory=list)
    """In the order in which they were begun."""
    num_turns: int = 0
    _generated: dict[int, Segment] = field(default_factory=dict)
    """Of the finished turns, by number."""

    def begin(self, prompt_ids: Sequence[int], *, max_new_tokens: int, sampling_seed: int | None = None) -> Turn:
        """The turn that answers these tokens; the branch that it goes on from is busy until it is over."""
        branch = max(
            (each for each in self.branches if not each.is_busy and _begins_with(prompt_ids, each)),
            key=lambda each: each.num_tokens,
            default=Branch(first_turn=self.num_turns),
        )
        branch.is_busy = True
        answer = PartialAnswer(max_new_tokens=max_new_tokens, sampling_seed=sampling_seed)
        if self.experts is not None:
            known = branch.experts
            answer.experts = AnswerExperts(self.experts, prompt_ids) if known is None else known.before(prompt_ids)
        turn = Turn(self.num_turns, prompt_ids, answer, branch, prompt_ids[branch.num_tokens :])
        self.num_turns += 1
        return turn

    def finish(self, turn: Turn, *, is_trained: bool = True) -> None:
        """Its answer is complete: what was given before it and what was made become part of its branch.

        Args:
            is_trained: False where nothing may be learned from it.
        """
        branch, answer = turn.branch, turn.answer
        if not branch.segments:
            self.branches.append(branch)
            self.branches.sort(key=lambda each: each.first_turn)
        if turn.given_ids:
            branch.segments.append(Segment(turn.given_ids))
        segment = Segment(answer.output_ids, answer, is_trained=is_trained)
        branch.segments.append(segment)
        branch.experts, branch.is_busy = answer.experts, False
        self._generated[turn.number] = segment

    def abandon(self, turn: Turn) -> None:
        """Nothing comes of it."""
        turn.branch.is_busy = False

    def reward(self, value: float, *, turn: int) -> None:
        """Add to the reward of a finished turn.

        Raises:
            KeyError: if it is not finished.
        """
        self._generated[turn].reward += value

    def leave_out(self, *, turn: int) -> None:
        """Nothing is learned from a finished turn.

        Raises:
            KeyError: if it is not finished.
        """
        self._generated[turn].is_trained = False

    @property
    def answers(self) -> list[PartialAnswer]:
        """Of the finished turns, in the order in which they were begun."""
        answers = (self._generated[number].answer for number in sorted(self._generated))
        return [answer for answer in answers if answer is not None]

    @property
    def oldest_version(self) -> str:
        """Of all tokens made so far; empty if there are none. What follows may come from no older weights."""
        answers = (segment.answer for segment in self._generated.values())
        versions = {span.version for answer in answers if answer is not None for span in answer.spans}
        return min(versions, key=PolicyVersion.parse, default="")

    @property
    def num_generated(self) -> int:
        """Tokens that the model has made in finished turns."""
        return sum(len(segment.ids) for segment in self._generated.values())


def _begins_with(ids: Sequence[int], branch: Branch) -> bool:
    start = 0
    for segment in branch.segments:
        end = start + len(segment.ids)
        if list(ids[start:end]) != list(segment.ids):
            return False
        start = end
    return True
