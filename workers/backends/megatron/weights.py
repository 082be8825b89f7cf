"""Whole tensors by Hugging Face's names ◄──► the parts that the ranks of a mesh hold.

    directory, or another model ──(name, whole tensor)──► cut ──► this rank's parameters
    parameters ── joined over the ranks of a layer ──► given to the other stages ──(name, whole tensor)──► every rank
                  an expert's: given to the ranks with other experts, too

One parameter of the whole model is in memory at a time. Ranks agree once on what each stage has; from then on only
tensors travel between them.
"""

import json
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist
from megatron.core.process_groups_config import ProcessGroupCollection
from torch import Tensor, nn

from corral.workers.backends.megatron.bridge import Bridge, is_cut
from corral.workers.backends.parallel_context import broadcast_text
from corral.workers.backends.sharding import each_once


@dataclass(frozen=True, slots=True)
class Part:
    """A parameter of the whole model, as every stage knows it."""

    name: str
    shape: tuple[int, ...]
    """Of the whole parameter."""
    dtype: torch.dtype
    stage: int
    expert_rank: int | None
    """The expert-parallel rank that has it, if it is an expert's."""


class StageWeights:
    """The parameters of one rank's stage, and how they are given and taken.

    All methods but `take_over` are collectives of the model's ranks.
    """

    def __init__(
        self,
        parameters: dict[str, nn.Parameter],
        bridge: Bridge,
        groups: ProcessGroupCollection,
        device: torch.device,
    ) -> None:
        """
        Args:
            parameters: of this rank, by their names within the whole model.
        """
        self.parameters = parameters
        self.groups = groups
        self.device = device
        self._bridge = bridge
        self.parts: list[Part] = self._agree()
        self._part_by_name = {part.name: part for part in self.parts}
        self._averages: dict[str, Tensor] = {}

    @property
    def averages(self) -> dict[str, Tensor]:
        """This rank's parameters in float32, as a moving average moves them: in bfloat16 so small a step is none.

        They are made of the parameters when they are first asked for. From then on the parameters are these, rounded;
        those of float32 are the parameters themselves.
        """
        for name, parameter in self.parameters.items():
            if parameter.dtype != torch.float32 and name not in self._averages:
                self._averages[name] = parameter.detach().float()
        return {name: self._averages.get(name, parameter.data) for name, parameter in self.parameters.items()}

    def round_averages(self) -> None:
        """Let the parameters be what their averages are."""
        for name, average in self._averages.items():
            self.parameters[name].data.copy_(average)

    def beside_parameters(self) -> list[Tensor]:
        """The averages that take memory of their own."""
        return list(self._averages.values())

    def replicas(self, name: str) -> dist.ProcessGroup:
        """The ranks that have the same of a parameter."""
        is_shared = self._part_by_name[name].expert_rank is None
        group: dist.ProcessGroup = self.groups.dp_cp if is_shared else self.groups.expt_dp
        return group

    def counts(self, name: str) -> bool:
        """Whether a parameter of this stage is not a copy of an earlier one's."""
        return self._part_by_name[name].stage == int(self.groups.pp.rank())

    @property
    def num_parameters(self) -> int:
        """Of the whole model."""
        return sum(torch.Size(part.shape).numel() for part in self.parts)

    def stored_shapes(self) -> dict[str, tuple[int, ...]]:
        """Every tensor of the whole model, as directories have it."""
        return {
            name: tuple(tensor.shape)
            for part in self.parts
            for name, tensor in self._bridge.to_stored(part.name, torch.empty(part.shape, device="meta"))
        }

    @torch.no_grad()
    def export(self) -> Iterator[tuple[str, Tensor]]:
        """Every tensor of the whole model, by its stored name, on every rank; each rank reads to the end."""
        for part in self.parts:
            yield from self._bridge.to_stored(part.name, self._on_every_rank(part))

    @torch.no_grad()
    def whole(self, name: str) -> Tensor:
        """One parameter of the whole model, on every rank."""
        return self._on_every_rank(self._part_by_name[name])

    @torch.no_grad()
    def take_over(
        self, weights: Iterable[tuple[str, Tensor]], *, eta: float = 1.0, keeps_averages: bool = False
    ) -> None:
        """Move every parameter towards what is given: own = eta * given + (1 - eta) * own; no collective.

        Args:
            weights: every tensor of the whole model once, in any order, type and place.
            keeps_averages: whether own is that of `averages`, and not rounded in between.

        Raises:
            ValueError: if they are not exactly those of the model.
        """
        home = {stored: part.name for part in self.parts for stored in self._bridge.stored_names(part.name)}
        waiting: defaultdict[str, dict[str, Tensor]] = defaultdict(dict)
        for stored, tensor in each_once(self.stored_shapes(), weights, eta=eta):
            if (name := home[stored]) in self.parameters:
                waiting[name][stored] = tensor
                wanted = self._bridge.stored_names(name)
                if len(waiting[name]) == len(wanted):
                    pieces = waiting.pop(name)
                    self._write(name, [pieces[piece] for piece in wanted], eta, keeps_averages)

    def _write(self, name: str, pieces: list[Tensor], eta: float, keeps_averages: bool) -> None:
        parameter = self.parameters[name]
        given = self._bridge.own_part(name, self._bridge.from_stored(name, pieces), parameter)
        if keeps_averages and (eta < 1.0 or name in self._averages):
            average = self.averages[name]
            given = average.lerp_(given.to(average), eta)
        elif eta < 1.0:
            given = parameter.data.float().lerp_(given.to(parameter.device, torch.float32), eta)
        parameter.data.copy_(given)

    def _on_every_rank(self, part: Part) -> Tensor:
        """A whole parameter, given by the ranks that have it: within their stage first, then to the other stages."""
        stages, experts = self.groups.pp, self.groups.ep
        if part.name in self.parameters:
            whole = self._joined(part.name, self.parameters[part.name]).contiguous()
        else:
            whole = torch.empty(part.shape, dtype=part.dtype, device=self.device)
        if experts.size() > 1 and part.expert_rank is not None and part.stage == stages.rank():
            dist.broadcast(whole, group=experts, group_src=part.expert_rank)
        if stages.size() > 1:
            dist.broadcast(whole, group=stages, group_src=part.stage)
        return whole

    def _joined(self, name: str, parameter: nn.Parameter) -> Tensor:
        group = self.groups.tp
        if group.size() == 1 or not is_cut(parameter):
            return parameter.detach()
        parts = [torch.empty_like(parameter) for _ in range(group.size())]
        dist.all_gather(parts, parameter.detach().contiguous(), group=group)
        return self._bridge.join(name, parts, parameter)

    def _agree(self) -> list[Part]:
        """What each stage has; of a parameter that two have, the first one's counts."""
        parts: dict[str, Part] = {}
        own = json.dumps(self._own_parts())
        for stage in range(self.groups.pp.size()):
            for name, expert_rank, shape, dtype in json.loads(broadcast_text(own, source=stage, group=self.groups.pp)):
                parts.setdefault(name, Part(name, tuple(shape), getattr(torch, dtype), stage, expert_rank))
        return list(parts.values())

    def _own_parts(self) -> list[tuple[str, int | None, list[int], str]]:
        """Names, which rank has each, shapes and types of whole parameters, alike on all ranks of the stage."""
        return [
            (counterpart, expert_rank, list(self._joined(name, parameter).shape), str(parameter.dtype)[len("torch.") :])
            for name, parameter in self.parameters.items()
            for counterpart, expert_rank in self._bridge.counterparts(name)
        ]
