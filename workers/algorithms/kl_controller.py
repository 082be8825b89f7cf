"""The weight of the KL penalty from step to step: fixed, or adapted to a target.

    coefficient ──► losses or rewards of this step
         ▲ after(divergence of the batch)      once per train step, never per micro-batch

The divergence is that of the policy that generated, measured on the whole batch before anything is trained. It does not
depend on weights or micro-batches, so that every rank, actor and critic alike, arrives at the same coefficient.
"""

from dataclasses import dataclass, replace

from corral.experiments.config.algorithm import KLConfig
from corral.workers.algorithms.functional.kl import adapt_kl_coefficient
from corral.workers.backends.train_state import Numbers

_COEFFICIENT = "kl_coefficient"


@dataclass(frozen=True, slots=True)
class KLController:
    """A coefficient and the rule by which it changes."""

    config: KLConfig
    coefficient: float

    @classmethod
    def at_start(cls, config: KLConfig) -> "KLController":
        return cls(config, config.coef)

    def after(self, *, observed_kl: float, num_answers: float) -> "KLController":
        """For the next step, having seen a batch; see `adapt_kl_coefficient`."""
        if self.config.target is None:
            return self
        adapted = adapt_kl_coefficient(
            self.coefficient,
            observed_kl=observed_kl,
            target=self.config.target,
            horizon=self.config.horizon,
            num_answers=num_answers,
        )
        return replace(self, coefficient=adapted)

    def state_dict(self) -> Numbers:
        """What a checkpoint keeps: nothing of a coefficient that is fixed."""
        return {} if self.config.target is None else {_COEFFICIENT: self.coefficient}

    def with_state(self, state: Numbers) -> "KLController":
        """The controller that `state_dict` described.

        Raises:
            ValueError: if it is missing.
        """
        if self.config.target is None:
            return self
        coefficient = state.get(_COEFFICIENT)
        if not isinstance(coefficient, float | int):
            raise ValueError(
                f"kl.target is set, but the checkpoint has no {_COEFFICIENT!r}: it was written without an adaptive "
                "coefficient; remove kl.target, or start a new trial from its weights"
            )
        return replace(self, coefficient=float(coefficient))
