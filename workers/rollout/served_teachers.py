"""ServedTeachers: how likely models outside of the trial find the tokens of answers, beside their rewards.

    a group ──its sequences, as teachers read them──► POST {url}/completions with echo ──► teacher_logprobs
                 ├── down, busy, late ──► it waits, and rl-status says for whom; in the end the worker starts again
                 └── refused; not a finite number for each token ──► TeacherFailedError: its prompt is dropped

Each source of rows may have a teacher of its own, whose key is 0 on the answers to other rows.
"""

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Annotated

import msgspec
import numpy as np
import numpy.typing as npt

from corral.experiments.config.endpoint import TeacherEndpointConfig
from corral.experiments.trial.spans import Span
from corral.scheduling.keys import keys_of_teachers
from corral.workers.data.sequence_sample import SequenceSample, answer_slices
from corral.workers.data.teacher_prompts import as_it_is, behind_prompts
from corral.workers.lifecycle.timeline import Record, unrecorded
from corral.workers.rewards.endpoint import ask

logger = logging.getLogger(__name__)

TEACHER_SECONDS = "teacher/seconds"
"""Name of the statistic of a group: from its reward to what its teacher says."""


class TeacherFailedError(RuntimeError):
    """The endpoint is there, and does not say what it was asked."""


class _Logprobs(msgspec.Struct):
    token_logprobs: list[float | None]


class _Choice(msgspec.Struct):
    logprobs: _Logprobs
    index: int = 0


class _Completion(msgspec.Struct):
    """What is read of a completion."""

    choices: Annotated[list[_Choice], msgspec.Meta(min_length=1)]


@dataclass(frozen=True, slots=True)
class ServedTeachers:
    """Those of one rollout worker."""

    endpoints: Mapping[str, TeacherEndpointConfig]
    """By source of rows; that of all rows by ""."""
    show_wait: Callable[[str], None]
    """Called with the teacher that groups wait for; "" when they no longer wait."""
    record: Record = unrecorded
    """Has how long each group has waited."""
    _down: set[str] = field(default_factory=set, init=False)
    """URLs that did not answer last."""

    async def judge(
        self, sample: SequenceSample, *, source: str, prompt_ids: Sequence[int]
    ) -> tuple[SequenceSample, dict[str, float]]:
        """A group with what teachers say of it, and how long that took.

        Args:
            source: of its row.
            prompt_ids: what teachers read before its answers; none: all as it is.

        Raises:
            TeacherFailedError, EndpointDownError: as above.
        """
        started = time.monotonic()
        taught = as_it_is(sample)
        if prompt_ids:
            taught = behind_prompts(sample, [prompt_ids] * len(sample.answer_lengths()))
        for name, endpoint in self.endpoints.items():
            (key,) = keys_of_teachers([name] if name else [], None)
            values = np.zeros(len(taught.policy_mask), np.float32)
            if name in ("", source):
                values[taught.policy_mask] = (await self._logprobs(endpoint, taught.sample))[taught.mask]
            sample = sample.with_key(key, values)
        ended = time.monotonic()
        self.record(Span(lane="teachers", name="teacher", start_s=started, end_s=ended))
        return sample, {TEACHER_SECONDS: ended - started}

    async def _logprobs(self, endpoint: TeacherEndpointConfig, sample: SequenceSample) -> npt.NDArray[np.float32]:
        """Of its shifted tokens; 0 of those that were given."""
        answers = answer_slices(sample.answer_lengths())
        asked = [sample.data["input_ids"][answer].tolist() for answer in answers]
        # One token more than is wanted, as SGLang refuses to make none.
        body = {"model": endpoint.model, "prompt": asked, "max_tokens": 1, "echo": True, "logprobs": 1}
        try:
            text = await ask(endpoint, "completions", body, before_try=partial(self._note, endpoint.url))
            choices = msgspec.json.decode(text, type=_Completion).choices
        except (ValueError, msgspec.MsgspecError) as error:
            raise TeacherFailedError(f"{endpoint.url}: {error}") from error
        if endpoint.url in self._down:
            self._down.remove(endpoint.url)
            self.show_wait("")
        logprobs = [one.logprobs.token_logprobs for one in sorted(choices, key=lambda one: one.index)]
        wanted, found = [len(ids) + 1 for ids in asked], list(map(len, logprobs))
        if found != wanted:
            raise TeacherFailedError(f"{endpoint.url} says {found} log-probabilities, and was asked for {wanted}")
        values = np.concatenate([np.array(one[1:-1], np.float32) for one in logprobs])
        is_given = np.concatenate([sample.data["prompt_mask"][answer][1:] for answer in answers])
        if not np.isfinite(values[~is_given]).all():
            raise TeacherFailedError(f"{endpoint.url} says of some tokens what is no finite number")
        return np.where(is_given, np.float32(0.0), values)

    def _note(self, url: str, cause: str) -> None:
        if not cause:
            return
        self.show_wait(f"the teacher at {url}")
        if url not in self._down:  # said once, and not by every group
            self._down.add(url)
            logger.warning("the teacher at %s does not answer, and is asked again: %s", url, cause)
