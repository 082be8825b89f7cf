"""The rollout worker: prompts in, judged trajectories out, each delivered until a commit covers it.

manager ──a prompt──► agent ⇄ generation servers ─► reward ─► spool (fsync) ─► stream ─► trainer
   ▲                                                            │
   └── finished; failed, or rejected as stale: issue it again ◄─┤
                                   commits in the trial log ──► covered: forgotten

loop         consumes              waits for                unblocked by            produces
prompts      Allocation            the manager              its gate                running groups
(held out)   one problem           generation servers       the reward              what came out, for the manager
(a group)    one prompt            generation servers       the reward              a record, or the prompt back
verdicts     rejected records      the sender               model workers           the prompt back
receivers    receivers' records    name-resolve             model workers           connections of the sender
commits      trial log             the master               Commit                  space in the spool

All of them, each group too, are tasks of one TaskGroup: what none of them answers ends the worker with its cause.
"""

import asyncio
import json
import logging
import time
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import replace
from functools import partial
from typing import Any

import msgspec

from corral.experiments.config.rollout import RewardConfig
from corral.experiments.datasets.dataset import Dataset
from corral.experiments.prompts.row_prompts import PromptEncoder
from corral.experiments.prompts.tokens import eos_token_ids
from corral.experiments.trial.spans import Span
from corral.experiments.trial.worker_record import MANAGER
from corral.experiments.worker_specs import RolloutWorkerSpec
from corral.workers.checkpoint.checkpoint import CommittedLedger
from corral.workers.data.answer_seed import AnswerSeeds
from corral.workers.data.prompts import split_uid
from corral.workers.delivery.messages import (
    UNTIL_A_COMMIT,
    TrajectoryHeader,
    VerdictKind,
    delivery_id,
    order_of_delivery,
    uid_of_delivery,
)
from corral.workers.delivery.sender import TrajectorySender
from corral.workers.delivery.spool import Spool
from corral.workers.episodes.trajectories import version_spans
from corral.workers.lifecycle.worker import Worker, WorkerContext, run_async
from corral.workers.requests.manager_messages import (
    LATE_BY_S,
    LONGEST_TURN_S,
    LONGEST_WAIT_FOR_SERVER_S,
    REQUEST_DEADLINE_S,
    Admitted,
    Allocate,
    Allocation,
    Answered,
    Finish,
    HeldOutProblem,
    ManagerReply,
    ManagerRequest,
    Outcome,
    Report,
    Route,
    Schedule,
)
from corral.workers.rollout.episode_player import open_player
from corral.workers.rollout.generation_client import FailedTry, GenerationClient
from corral.workers.rollout.group_maker import GroupMaker, PromptFailedError
from corral.workers.rollout.held_out import HeldOutProblems
from corral.workers.rollout.judging import RewardJudge, verdict_on
from corral.workers.rollout.served_teachers import ServedTeachers
from corral.workers.rollout.trial_judge import Judges, asking_judges
from corral.workers.rollout.turn_journal import TurnJournal
from corral.workers.streams.errors import StreamError, StreamTimeoutError
from corral.workers.streams.https import open_session
from corral.workers.streams.rpc import ServerClient
from corral.workers.user_code.children import HostError

logger = logging.getLogger(__name__)

_LONGEST_BLINDNESS_S = 300.0  # of receivers and commits, should news of them be lost
_SENDER_LOOK_S = 1.0
_SLOW_ANSWER_S = 1.0  # a manager answers within milliseconds what it lets nobody wait for
_MAX_CONNECTIONS = 0  # no limit: one for each answer under way, whose server would seem silent while it waits for one


class RolloutWorker(Worker):
    """Generates for the prompts that the manager deals to it."""

    def __init__(self, context: WorkerContext) -> None:
        super().__init__(context)
        self._spec = context.specification(RolloutWorkerSpec)
        self._running: dict[str, Admitted] = {}
        """Order by uid."""
        self._routing: dict[str, dict[str, float]] = {}
        """Statistics of what runs, by uid."""
        self._answering: dict[str, HeldOutProblem] = {}
        """By uid."""
        self._refusal = Allocation()
        """Why there was no other prompt when the manager spoke last."""
        self._no_server = ""
        """Why no server may answer, as the manager said last."""
        self._has_reported = asyncio.Event()
        """Set while no report is on its way. The manager hears of an end after the report that still names the prompt:
        in the other order it would count the prompt as held for good."""
        self._verdicts: asyncio.Queue[tuple[str, Outcome]] = asyncio.Queue()
        self._servers = context.workers("generation_server")
        self._server_by_url: dict[str, str] = {}
        self._judges = Judges()

    def run(self) -> None:
        run_async(self._main(), self.context.stopping)

    async def _main(self) -> None:
        self._has_reported.set()
        async with AsyncExitStack() as stack:
            await self._set_up(stack)
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._take_prompts(tasks))
                tasks.create_task(self._settle_verdicts(tasks))
                keys = self.context.keys
                looks = {
                    keys.trajectory_receivers_root(): self._look_for_receivers,
                    keys.trainer_root(): self._look_for_commits,
                }
                if self._spec.rollout.judge is not None:
                    looks[keys.judges_root()] = self._look_for_judges
                tasks.create_task(self.follow(looks, at_least_every_s=_LONGEST_BLINDNESS_S))
                tasks.create_task(self.every(_SENDER_LOOK_S, self._look_at_sender))

    async def _set_up(self, stack: AsyncExitStack) -> None:
        context, spec = self.context, self._spec
        self._load_data()
        # Its records outlive this worker: the next worker of its index delivers them.
        spool = stack.enter_context(Spool(context.trial.spool_path(spec.index)))
        self._manager = await stack.enter_async_context(
            ServerClient[ManagerRequest, ManagerReply](
                context.security, ManagerReply, lambda: context.names.get(context.keys.manager()), server=MANAGER
            )
        )
        self._sender = await stack.enter_async_context(
            TrajectorySender(context.security, spool, on_verdict=self._on_verdict)
        )
        self._committed = CommittedLedger(context.trial, self._rows)
        await self._committed.look()
        # Their commits came while this worker was away.
        await self._sender.remove([uid for uid in self._sender.uids() if self._committed.ledger.consumed(uid)])
        headers = {"Authorization": f"Bearer {context.secrets.http_api_key.reveal()}"}
        session = await stack.enter_async_context(
            open_session(context.trust.client(), headers=headers, max_connections=_MAX_CONNECTIONS)
        )
        client = GenerationClient(
            session,
            self._route,
            sampling=spec.rollout.sampling,
            tokenizer=self._prompts.tokenizer,
            stop_token_ids=self._stop_token_ids,
            token_timeout_s=spec.token_timeout_s,
            experts=spec.experts,
            num_servers=len(self._servers),
            record=self._record,
        )
        reward: RewardConfig = spec.rollout
        if spec.rollout.judge is not None:
            asking = asking_judges(spec.rollout.judge, reward, client, self._judges)
            reward = await stack.enter_async_context(asking)
        judge = RewardJudge(
            reward,
            self._prompts.tokenizer,
            stop_token_ids=self._prompts.answer_ends,
            hidden=[context.trial.secrets_path],
            record=context.presence.record,
            on_change=self._show,
        )
        stack.callback(judge.close)
        has_judged = self._committed.ledger.trained_count > 0
        try:
            await asyncio.to_thread(judge.start)
        except HostError as error:
            raise verdict_on(error, has_run=has_judged) from error
        self._groups = GroupMaker(
            judge,
            client,
            self._prompts,
            await open_player(
                stack,
                spec.rollout,
                judge,
                self._prompts,
                planned=spec.environment,
                journal=TurnJournal(context.trial.turns_path),
                has_played=has_judged,
            ),
            rows=self._rows,
            config=spec.rollout,
            group_size=spec.group_size,
            max_prompt_tokens=spec.dataset.config.max_prompt_tokens,
            num_prompts=max(1, len(self._rows) // spec.num_rollout_workers),
            has_judged=has_judged,
            says_reward=spec.dataset.config.sampler is not None,
            takes_temperatures=spec.dataset.config.names_temperatures,
            teachers=self._served_teachers(),
            teacher_prompt_tokens=spec.teacher_prompt_tokens,
        )
        if spec.held_out is not None:
            config, rows = spec.held_out.config, self._held_out_rows
            asks = replace(client, sampling=config.sampling, experts=None)
            self._held_out = HeldOutProblems(config, rows, self._groups, asks, seed=context.plan.seed)

    def _served_teachers(self) -> ServedTeachers | None:
        if not (endpoints := self._spec.rollout.served_teachers):
            return None
        return ServedTeachers(
            endpoints, show_wait=lambda text: self._show_wait(text, ()), record=self.context.presence.record
        )

    def _load_data(self) -> None:
        spec = self._spec
        self._rows = Dataset.planned(spec.dataset)
        held_out = {} if spec.held_out is None else spec.held_out.datasets
        self._held_out_rows = {name: Dataset.planned(dataset) for name, dataset in held_out.items()}
        self._prompts = PromptEncoder(spec.tokenizer, spec.dataset.config.chat_template_kwargs)
        self._stop_token_ids = eos_token_ids(spec.tokenizer)

    # Prompts

    async def _take_prompts(self, tasks: asyncio.TaskGroup) -> None:
        worker, incarnation = self.context.worker_id, self.context.incarnation
        last: int | None = None
        while not self.context.stopping.is_set():
            knows = self._refusal.waiting_for
            answering = list(self._answering.values())
            request = Allocate(worker=worker, incarnation=incarnation, last=last, knows=knows, held_out=answering)
            try:
                allocation = await self._ask_manager(request, slow_after_s=LONGEST_TURN_S + LATE_BY_S)
            except StreamTimeoutError as error:
                logger.warning("%s", error)
                continue
            assert isinstance(allocation, Allocation)
            if allocation.must_report:
                await self._report()
            elif (problem := allocation.held_out) is not None:
                self._answering[problem.uid] = problem
                tasks.create_task(self._answer(problem))
                self._show()
            elif allocation.order is None:
                self._refusal = allocation
                self._show()
            else:
                self._refusal, last = Allocation(), allocation.order
                prompt = Admitted(allocation.uid, allocation.order, allocation.due_step)
                self._running[prompt.uid] = prompt
                tasks.create_task(self._roll_out(prompt, allocation.tries))
                self._show()

    async def _report(self) -> None:
        """Tell a manager that may know nothing of us what we run and what we have finished."""
        self._has_reported.clear()
        await self._tell_manager(
            lambda: Report(
                worker=self.context.worker_id,
                incarnation=self.context.incarnation,
                running=list(self._running.values()),
                finished=[Admitted(uid, order) for uid, order in self._sender.orders("finished").items()],
                dropped=list(self._sender.orders("dropped")),
            )
        )
        self._has_reported.set()

    async def _roll_out(self, prompt: Admitted, tries: int) -> None:
        """One group, from admission to the spool."""
        uid, order = prompt.uid, prompt.order
        dataset_epoch, row_id = split_uid(uid)
        seeds = AnswerSeeds(self.context.plan.seed, uid, prompt.due_step, tries)
        routing = self._routing[uid] = {"routing/seconds": 0.0}
        header_of = partial(TrajectoryHeader, uid=delivery_id(uid, order), dataset_epoch=dataset_epoch, order=order)
        [made] = await self._groups.make([(uid, row_id, seeds)])
        tensors: dict[str, Any] = {}
        if isinstance(made, PromptFailedError):
            scalars = dict(made.statistics)
            header = header_of(num_answers=0, status="dropped", reason=made.reason, scalars=scalars)
        else:
            tensors = dict(made.sample.data)
            branches = [branch for episode in made.episodes for branch in episode.sequences()]
            header = header_of(
                num_answers=len(branches),
                status="finished",
                seqlens={key: lengths[0] for key, lengths in made.sample.seqlens.items()},
                version_spans=[version_spans(branch) for branch in branches],
                scalars=dict(made.statistics) | routing,
            )
        await self._sender.put(header, tensors)
        self.context.presence.beat()
        await self._tell_end(uid, order, header.status)

    async def _answer(self, problem: HeldOutProblem) -> None:
        """One held-out problem, until the manager has heard what came out of it: till then it is said to be here."""
        answered = await self._held_out.answer(problem)
        self.context.presence.beat()
        await self._tell_manager(lambda: answered)
        del self._answering[problem.uid]
        self._show()

    async def _tell_end(self, uid: str, order: int, outcome: Outcome) -> None:
        """Until the manager has heard it: nobody else would ever issue the prompt again."""
        self._running.pop(uid, None)
        self._routing.pop(uid, None)
        self._show()
        await self._has_reported.wait()
        end = Finish(worker=self.context.worker_id, uid=uid, order=order, outcome=outcome)
        await self._tell_manager(lambda: end)

    async def _route(self, uid: str, tokens: int, oldest_version: str, setback: FailedTry | None) -> str | None:
        asked = time.monotonic()
        left = {} if setback is None else {f"{setback.kind}_url": setback.url}
        prompt = self._running.get(uid, Admitted(uid, 0))
        if not oldest_version and (problem := self._answering.get(uid)) is not None:
            oldest_version = problem.version  # as if a token of it were there: older weights would be no news of it
        request = Schedule(
            uid=uid,
            tokens=tokens,
            order=prompt.order,
            due_step=prompt.due_step,
            oldest_version=oldest_version,
            **left,
            knows=self._no_server,
            worker=self.context.worker_id,
        )
        try:
            slow_after_s = LONGEST_WAIT_FOR_SERVER_S + LATE_BY_S if self._no_server else _SLOW_ANSWER_S
            route = await self._ask_manager(request, slow_after_s=slow_after_s)
        except StreamError as error:
            logger.warning("%s; it is asked again", error)  # what the answers have they keep meanwhile
            return None
        assert isinstance(route, Route)
        self._no_server = route.reason
        if (routing := self._routing.get(uid)) is not None:
            routing["routing/seconds"] += time.monotonic() - asked
        if route.url is None:
            self._show_wait(route.reason, route.waits_for)
        else:
            self._server_by_url[route.url] = route.server
            if routing is not None:  # of several places in a row the last one's
                routing |= {"routing/groups": float(route.groups), "routing/kv_share": route.kv_share}
        return route.url

    # The trainer's side

    async def _look_for_receivers(self) -> None:
        root = self.context.keys.trajectory_receivers_root()
        records = await asyncio.to_thread(self.context.names.get_subtree, root)
        if records:  # an emptied Redis is no news of the receivers
            self._sender.set_receivers({int(name.rpartition("/")[2]): address for name, address in records.items()})

    async def _look_for_judges(self) -> None:
        records = await asyncio.to_thread(self.context.names.get_subtree, self.context.keys.judges_root())
        if records:  # as above
            self._judges.urls = [json.loads(record)["url"] for record in records.values()]

    async def _look_at_sender(self) -> None:
        self._sender.raise_failure()

    async def _look_for_commits(self) -> None:
        news = await self._committed.look()
        await self._sender.remove(news.covered)

    def _on_verdict(self, delivery: str, kind: VerdictKind) -> None:
        """The trainer will not train on a record; unless it has, or holds a copy, the prompt is issued again. If the
        prompt was dropped, the record has no place any more among those that may be trained."""
        if kind not in UNTIL_A_COMMIT:
            logger.info("record %s was rejected as %s; its prompt is issued again", delivery, kind)
            self._verdicts.put_nowait((delivery, "otherwise" if kind == "not_finite" else "again"))
        elif kind == "dropped":
            self._verdicts.put_nowait((delivery, "dropped"))

    async def _settle_verdicts(self, tasks: asyncio.TaskGroup) -> None:
        while not self.context.stopping.is_set():
            delivery, outcome = await self._verdicts.get()
            if not self._sender.holds(delivery):
                continue
            order, uids = order_of_delivery(delivery), [uid_of_delivery(delivery)]
            for uid in uids if outcome == "dropped" else await self._sender.remove(uids):
                tasks.create_task(self._tell_end(uid, order, outcome))

    # Helpers

    async def _tell_manager(self, news: Callable[[], Finish | Report | Answered]) -> None:
        """Until it has heard it, however long it is away; each time what `news` is then."""
        while True:
            try:
                await self._ask_manager(news())
            except StreamTimeoutError as error:
                logger.warning("%s; the report is sent again", error)
            else:
                return

    async def _ask_manager(self, request: ManagerRequest, *, slow_after_s: float = _SLOW_ANSWER_S) -> ManagerReply:
        """The manager's answer; if it takes its time, that is what rl-status shows, and no earlier answer of it.

        Raises:
            StreamTimeoutError: if there is none within `REQUEST_DEADLINE_S`.
        """
        loop = asyncio.get_running_loop()
        slow = loop.call_later(slow_after_s, partial(self._show_wait, "its answer", [MANAGER]))
        try:
            answer = await self._manager.request(request, deadline_s=REQUEST_DEADLINE_S)
        finally:
            slow.cancel()
        if loop.time() >= slow.when():
            self._show()
        return answer

    def _record(self, span: Span) -> None:
        """Of an answer that waited for the URL of its server."""
        servers = tuple(map(self._server_by_url.__getitem__, span.waits_for))
        self.context.presence.record(msgspec.structs.replace(span, waits_for=servers))

    def _show(self) -> None:
        """What it does, or why there is no prompt for it."""
        num_groups, num_judged = len(self._running) + len(self._answering), self._groups.judge.num_waiting
        if not num_groups:
            self._show_wait(self._refusal.reason, self._refusal.waits_for)
            return
        things = f"of {num_groups} groups" if self._groups.player is None else "episodes"
        self._show_wait(f"{num_judged} {things} wait for their reward" if num_judged else "", ())

    def _show_wait(self, waiting_for: str, waits_for: Sequence[str]) -> None:
        num_tasks = (len(self._running) + len(self._answering)) * (
            self._groups.group_size if self._groups.player else 1
        )
        phase, works_with = "generate", self._servers
        if not num_tasks:
            phase = "wait for the trainer" if self._refusal.waiting_for == "prompts" else "wait for admission"
            works_with = ()
        elif self._groups.judge.num_waiting >= num_tasks:
            phase, works_with = "judge", ()
        self.context.presence.enter(phase, waiting_for=waiting_for, waits_for=waits_for, works_with=works_with)
