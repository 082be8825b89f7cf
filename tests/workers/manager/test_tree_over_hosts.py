"""A real manager and seven hosts, each a worker's real control server: who reads a version, who has it from whom."""

import asyncio
import json
import shutil
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from corral.experiments.config.rollout import RolloutConfig
from corral.experiments.trial.directory import TrialDirectory
from corral.experiments.trial.secrets import Secret, TrialSecrets
from corral.experiments.trial.trust import Trust
from corral.experiments.worker_specs import GserverManagerSpec
from corral.name_resolve.keys import TrialKeys
from corral.scheduling.policy_version import PolicyVersion
from corral.workers.checkpoint.published_weights import PublishedWeights, Refusal, read_refusal
from corral.workers.manager.fleet import MAX_READERS
from corral.workers.manager.gserver_manager import _NO_ROOM, GserverManager, Waiting, WaitingLine
from corral.workers.manager.servers import Server, ServerState
from corral.workers.requests.manager_messages import Finish, Report, Route, Schedule
from corral.workers.streams.router import Peer
from corral.workers.weight_transport.filling import Filling, FindSource, whole
from tests.launcher.trials import make_plan
from tests.name_services import MemoryNameService
from tests.workers.generation.hosts import Host, Hosts, running_hosts
from tests.workers.generation.servers import ADMIN_KEY, API_KEY, DEADLINE_S, wait_until
from tests.workers.rollout.rollout_rig import prompt_dataset
from tests.workers.trusted import trust
from tests.workers.weight_transport.versions import content_of, flip_a_byte
from tests.workers.worker_context import worker_context

NUM_HOSTS = 7
PEER = Peer(b"1", "rollout_worker")


class Trial:
    """A manager, and what is told to it."""

    def __init__(self, folder: Path, hosts: Hosts) -> None:
        self.hosts = hosts
        self.names = MemoryNameService()
        self._trial = TrialDirectory(folder / "exp" / "trial")
        self._trial.create()
        secrets = TrialSecrets.create(self._trial.secrets_path)
        shutil.copy(trust().path, Trust(self._trial.secrets_path).path)  # that of the hosts
        self._secrets = msgspec.structs.replace(secrets, http_api_key=Secret(API_KEY), http_admin_key=Secret(ADMIN_KEY))
        rollout = RolloutConfig.model_validate({"reward": "tests.workers.rollout.some_rewards:judge"})
        spec = GserverManagerSpec(
            dataset=prompt_dataset(folder, ["1+1="]),
            train_batch_size=8,
            total_train_epochs=1,
            rollout=rollout,
        )
        self._plan = make_plan(self._trial.path).model_copy(update={"workers": [spec]})
        self._keys = TrialKeys(self._plan.trial.uuid)

    @contextmanager
    def running_manager(self) -> Iterator[GserverManager]:
        with ExitStack() as stack:
            context = stack.enter_context(
                worker_context(self._plan, "gserver_manager", names=self.names, secrets=self._secrets)
            )
            manager = GserverManager(context)
            running: list[asyncio.Task[None]] = []

            async def start() -> None:
                running.append(asyncio.create_task(manager._main()))

            async def stop() -> None:
                running[0].cancel()
                await asyncio.gather(*running, return_exceptions=True)

            self.hosts.run(start())
            stack.callback(lambda: self.hosts.run(stop()))
            yield manager

    def add_host(self, *, kv_tokens: int = 0) -> Host:
        host = self.hosts.add()
        record = host.record() | {"kv_tokens": kv_tokens}
        self.names.add(self._keys.generation_server(len(self.hosts.all) - 1), json.dumps(record))
        return host

    def remove(self, host: Host) -> None:
        self.names.delete(self._keys.generation_server(self.hosts.all.index(host)))

    def refusal(self) -> Refusal | None:
        """What the trainer would hear."""
        return read_refusal(self.names, self._keys.weights_in_use())

    def publish(self, seed: int, *, is_damaged: bool = False) -> PublishedWeights:
        published = self.hosts.publish(seed)
        if is_damaged:
            flip_a_byte(published.directory / "model-00000.bin")
        return self.tell(published)

    def tell(self, published: PublishedWeights) -> PublishedWeights:
        self.names.add(self._keys.policy_version(), published.to_json())
        return published


@pytest.fixture
def trial(tmp_path: Path) -> Iterator[Trial]:
    with running_hosts(tmp_path) as hosts:
        yield Trial(tmp_path, hosts)


def wait_for(manager: GserverManager, hosts: list[Host], version: str) -> None:
    wait_until(lambda: all(host.server.tag == version for host in hosts), f"{len(hosts)} hosts at {version}")
    ready = (ServerState.READY, PolicyVersion.parse(version))
    wait_until(
        lambda: [(server.state, server.version) for server in servers_of(manager)].count(ready) >= len(hosts),
        "the manager to know",
    )


def servers_of(manager: GserverManager) -> list[Server]:
    return list(manager._table.servers.values())


def test_two_hosts_read_a_version_and_all_others_have_it_from_hosts_also_who_joins_late(trial: Trial) -> None:
    hosts = [trial.add_host() for _ in range(NUM_HOSTS)]
    published = trial.publish(1)
    with trial.running_manager() as manager:
        wait_for(manager, hosts, "0.1")
        assert sum(host.num_read for host in hosts) == MAX_READERS
        received = [host for host in hosts if host.num_read == 0]
        assert [host.updates.last.bytes_received for host in received if host.updates.last] == [5_000_018] * 5
        late = trial.add_host()
        wait_for(manager, [*hosts, late], "0.1")
        assert late.num_read == 0
        for host in (*hosts, late):
            assert host.content() == content_of(published.directory)


def test_hosts_that_go_between_two_versions_hold_up_nobody(trial: Trial) -> None:
    hosts = [trial.add_host() for _ in range(NUM_HOSTS)]
    trial.publish(1)
    with trial.running_manager() as manager:
        wait_for(manager, hosts, "0.1")
        for host in hosts[:3]:
            trial.remove(host)
        wait_until(lambda: len(servers_of(manager)) == NUM_HOSTS - 3, "the manager to miss them")
        published = trial.publish(2)
        late = trial.add_host()
        wait_for(manager, [*hosts[3:], late], "0.2")
        assert sum(host.num_read for host in trial.hosts.all) <= 2 * MAX_READERS
        assert late.content() == content_of(published.directory)


def test_servers_answer_what_their_version_may_still_answer_while_the_next_one_is_on_its_way(trial: Trial) -> None:
    hosts = [trial.add_host() for _ in range(2)]
    may_go_on = threading.Event()

    def slow(version: Filling) -> FindSource:
        assert may_go_on.wait(DEADLINE_S)
        return whole(version)

    def url_for(*, due_step: int, oldest_version: str = "") -> str | None:
        asked = Schedule(uid="0:a", tokens=8, order=0, due_step=due_step, oldest_version=oldest_version)
        return manager._choose(asked).url

    trial.publish(1)
    with trial.running_manager() as manager:
        wait_for(manager, hosts, "0.1")
        for host in hosts:
            host.encode = slow
        trial.publish(2)
        wait_until(lambda: str(manager._version) == "0.2" and len(manager._fleet._updates) == 2, "the updates to begin")
        assert url_for(due_step=2) is not None, "trained on after step 2, by then one version old, as eta 1 allows"
        assert url_for(due_step=3) is None, "it would be two versions old"
        assert url_for(due_step=3, oldest_version="0.1") is not None, "it has a token as old as that already"
        may_go_on.set()
        wait_for(manager, hosts, "0.2")
        assert url_for(due_step=3) is not None


def test_who_waits_for_a_server_and_knows_why_is_answered_when_one_is_ready(trial: Trial) -> None:
    trial.publish(1)
    with trial.running_manager() as manager:
        wait_until(lambda: manager._version is not None, "the version")
        asked = Schedule(uid="0:a", tokens=8, order=0)
        refused = manager._choose(asked)
        assert refused.url is None and "no generation server" in refused.reason
        answers: list[Route] = []

        async def wait() -> Route:
            answer = manager._route(msgspec.structs.replace(asked, knows=refused.reason))
            return answer if isinstance(answer, Route) else await answer

        def ask() -> None:
            answers.append(trial.hosts.run(wait()))

        waiting = threading.Thread(target=ask)
        waiting.start()
        wait_until(lambda: len(manager._without_server) == 1, "it to wait")
        trial.add_host()
        waiting.join(DEADLINE_S)
        assert answers[0].url is not None and not manager._without_server


def test_who_waits_for_room_gets_it_when_a_group_ends_and_the_oldest_prompt_first(trial: Trial) -> None:
    trial.publish(1)
    host = trial.add_host(kv_tokens=100)
    with trial.running_manager() as manager:
        wait_for(manager, [host], "0.1")

        async def ask(uid: str, order: int, tokens: int) -> Route | asyncio.Future[Route]:
            return manager._route(
                Schedule(uid=uid, tokens=tokens, order=order, knows=_NO_ROOM, worker="rollout_worker/0")
            )

        async def end(uid: str) -> None:
            manager._answer(PEER, Finish(worker="rollout_worker/0", uid=uid, order=0, outcome="finished"))

        async def lose() -> None:
            report = Report(worker="rollout_worker/0", incarnation="b", running=[], finished=[], dropped=[])
            await manager._note_report(report)

        def wait(uid: str, order: int, tokens: int) -> asyncio.Future[Route]:
            answer = trial.hosts.run(ask(uid, order, tokens))
            assert isinstance(answer, asyncio.Future)
            return answer

        assert isinstance(trial.hosts.run(ask("0:a", 0, 80)), Route)
        waiting = [wait("0:d", 3, 40), wait("0:b", 1, 40), wait("0:c", 2, 40), wait("0:e", 4, 10)]
        assert not any(answer.done() for answer in waiting), "the last would fit, and overtake"
        trial.hosts.run(end("0:a"))
        assert [answer.done() for answer in waiting] == [False, True, True, False]
        trial.hosts.run(end("0:b"))
        assert all(answer.result().url == host.url for answer in waiting)
        assert not manager._without_room

        gone = wait("0:f", 5, 80)
        trial.hosts.run(lose())
        assert gone.result().url is None, "nobody takes room for a worker that is not there any more"
        assert not manager._without_room and servers_of(manager)[0].tokens == 0


def test_a_manager_that_starts_again_has_no_host_read_what_it_holds(trial: Trial) -> None:
    hosts = [trial.add_host() for _ in range(NUM_HOSTS)]
    trial.publish(1)
    with trial.running_manager() as manager:
        wait_for(manager, hosts, "0.1")
    with trial.running_manager() as manager:
        wait_for(manager, [*hosts, trial.add_host()], "0.1")
    assert sum(host.num_read for host in trial.hosts.all) == MAX_READERS


def test_a_source_that_is_reported_is_asked_once(trial: Trial, caplog: pytest.LogCaptureFixture) -> None:
    hosts = [trial.add_host() for _ in range(2)]
    published = trial.publish(1)
    with trial.running_manager() as manager:
        wait_for(manager, hosts, "0.1")
        flip_a_byte(Path(hosts[0].server.path) / "model-00000.bin")
        for _ in range(3):
            late = trial.add_host()
            wait_for(manager, [*hosts, late], "0.1")
            assert late.num_read == 0 and late.content() == content_of(published.directory)
    assert caplog.text.count(f"did not get version 0.1 from {hosts[0].control}") == 1


def test_a_damaged_version_is_read_twice_by_each_server_and_told_to_the_trainer(
    trial: Trial, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    hosts = [trial.add_host() for _ in range(2)]
    trial.publish(1)
    with trial.running_manager() as manager:
        wait_for(manager, hosts, "0.1")
        for host in hosts:
            host.num_read = 0
        damaged = trial.publish(2, is_damaged=True)
        wait_until(
            lambda: caplog.text.count("could not be brought to version 0.2") == 4, "both hosts to refuse it twice"
        )
        refusal = trial.refusal()
        assert refusal is not None and not refusal.is_served
        assert refusal.weights == damaged.weights and "model-00000.bin: expected BLAKE3" in refusal.reason
        waiting = manager.context.presence
        wait_until(lambda: "expected BLAKE3" in waiting.snapshot().waiting_for, "rl-status to say why")
        shutil.copytree(damaged.directory, tmp_path / "again")
        flip_a_byte(tmp_path / "again" / "model-00000.bin")
        trial.tell(msgspec.structs.replace(damaged, weights=str(tmp_path / "again")))
        wait_for(manager, hosts, "0.2")
        assert [host.num_read for host in hosts] in ([3, 2], [2, 3], [3, 3])  # and the third time all is well
        assert caplog.text.count("could not be brought to version 0.2") == 4


# --- who waits for a server -----------------------------------------------------------------------------------------


@given(
    st.lists(st.tuples(st.integers(0, 5), st.integers(0, 9)), max_size=20),
    st.lists(st.sampled_from(["take", 2, 5, 8]), max_size=6),
)
def test_a_line_is_a_sorted_list(added: list[tuple[int, int]], events: list[str | int]) -> None:
    loop = asyncio.new_event_loop()
    line = WaitingLine()
    listed = list[Waiting]()
    for number, (order, until) in enumerate(added):
        waiting = Waiting(loop.create_future(), Schedule(uid=f"0:{number}", tokens=1, order=order), float(until))
        line.add(waiting)
        listed.append(waiting)
    loop.close()
    listed.sort(key=lambda waiting: waiting.request.order)
    for event in events:
        assert line.first() is (listed[0] if listed else None)
        if event == "take":
            if listed:
                assert line.take() is listed.pop(0)
        else:
            gone = [waiting for waiting in listed if waiting.until <= int(event)]
            listed = [waiting for waiting in listed if waiting.until > int(event)]
            assert line.let_go(lambda waiting, now=int(event): waiting.until <= now) == gone
        assert len(line) == len(listed)
