"""Restart units: what is restarted, what ends a trial, and that every path ends."""

from collections.abc import Sequence
from typing import TypeGuard

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from corral.experiments.config.cluster import SupervisionConfig
from corral.experiments.exit_codes import WorkerExit
from corral.experiments.trial.attempts import EndState
from corral.launcher.supervisor.units import (
    CHECK_TIMEOUT_S,
    FIRST_PAUSE_S,
    MAX_PAUSE_S,
    Action,
    AppendStop,
    CheckNodes,
    EndTrial,
    GiveUpUnit,
    SignalTask,
    StartUnit,
    TrialPhase,
    UnitMachine,
    UnitNews,
    UnitSpec,
)
from corral.launcher.trial.ends import ExitKind, TaskExit

REDIS = UnitSpec(name="redis", tasks=("redis",), is_service=True)
MASTER = UnitSpec(name="master_worker/0", tasks=("master_worker/0",))
GANG = UnitSpec(name="model_worker", tasks=("model_worker/0", "model_worker/1"))
ROLLOUT = UnitSpec(name="rollout_worker/0", tasks=("rollout_worker/0",))
UNITS = (MASTER, GANG, ROLLOUT, REDIS)
BUDGETS = SupervisionConfig(max_restarts=2, healthy_after_s=100.0)


def started() -> UnitMachine:
    machine = UnitMachine(UNITS, BUDGETS)
    machine.tick(0.0)
    return machine


def restarting(unit: str, cause: str, *, pause_s: float, restarts: int) -> UnitNews:
    return UnitNews("unit_restarting", unit, cause, {"pause_s": pause_s, "restarts": restarts})


def is_restarting(action: Action) -> TypeGuard[UnitNews]:
    return isinstance(action, UnitNews) and action.event == "unit_restarting"


def is_left(action: Action) -> bool:
    return isinstance(action, UnitNews) and action.event == "unit_left"


def test_services_start_before_workers() -> None:
    actions = UnitMachine(UNITS, BUDGETS).tick(0.0)
    assert actions[0] == StartUnit("redis")
    assert {action.unit for action in actions if isinstance(action, StartUnit)} == {unit.name for unit in UNITS}


def test_a_dead_rollout_worker_is_restarted_alone_after_a_pause() -> None:
    machine = started()
    assert machine.exited(TaskExit("rollout_worker/0", -9), 10.0) == [
        restarting("rollout_worker/0", "rollout_worker/0 SIGKILL", pause_s=FIRST_PAUSE_S, restarts=1)
    ]
    assert machine.tick(10.1) == []
    assert machine.tick(11.0) == [StartUnit("rollout_worker/0")]


@pytest.mark.parametrize("kind", [kind for kind in ExitKind if kind is not ExitKind.OWN])
def test_what_could_not_be_started_is_tried_again_at_growing_pauses_and_at_no_cost(kind: ExitKind) -> None:
    machine, now, pauses = started(), 0.0, []
    for _ in range(10 * BUDGETS.max_restarts):
        (restart,) = machine.exited(TaskExit("rollout_worker/0", 127, kind), now)
        assert is_restarting(restart)
        pauses.append(restart.fields["pause_s"])
        now += restart.fields["pause_s"]
        assert machine.tick(now) == [StartUnit("rollout_worker/0")]
    assert pauses == sorted(pauses) and pauses[-1] == MAX_PAUSE_S


def test_a_gang_that_slurms_notice_reached_before_it_could_listen_starts_again_at_no_cost() -> None:
    machine, now = started(), 0.0
    for _ in range(BUDGETS.max_restarts + 1):
        machine.exited(TaskExit("model_worker/0", -15, ExitKind.NOTICED), now)
        (restart,) = machine.exited(TaskExit("model_worker/1", -15, ExitKind.NOTICED), now)
        assert is_restarting(restart) and "SLURM's notice" in restart.cause
        now += restart.fields["pause_s"]
        assert machine.tick(now) == [StartUnit("model_worker")]


def test_one_dead_rank_takes_its_gang_along_and_all_start_together() -> None:
    machine = started()
    assert machine.exited(TaskExit("model_worker/1", 1), 10.0) == [SignalTask("model_worker/0", kill=True)]
    assert machine.tick(20.0) == []  # not before the old trainer group is gone
    assert machine.exited(TaskExit("model_worker/0", -9), 20.0) == [
        restarting("model_worker", "model_worker/1 exit 1", pause_s=FIRST_PAUSE_S, restarts=1)
    ]
    assert machine.tick(21.0) == [StartUnit("model_worker")]


def test_the_cause_is_the_rank_that_died_not_the_peer_that_noticed_first() -> None:
    machine = started()
    machine.exited(TaskExit("model_worker/0", WorkerExit.PEERS_FAILED), 10.0)
    supervision_actions = [action for action in machine.exited(TaskExit("model_worker/1", -9), 10.0)]
    # model_worker/1 had been sent SIGKILL by then, so the two cannot be told apart: the first exit stands.
    assert [type(action) for action in supervision_actions] == [UnitNews]


def test_a_unit_out_of_budget_fails_the_trial_with_the_cause() -> None:
    machine = started()
    now = 0.0
    for _ in range(2):
        machine.exited(TaskExit("rollout_worker/0", 3), now)
        now += 40.0
        machine.tick(now)
    machine.exited(TaskExit("rollout_worker/0", 3), now)
    ended = _drain(machine, now)
    assert ended.outcome is EndState.FAILED
    assert "rollout_worker/0 exit 3" in ended.cause and "2 restarts" in ended.cause


def test_pauses_double_and_a_healthy_run_gives_the_budget_back() -> None:
    machine = started()
    pauses = []
    now = 0.0
    for run_s in (5.0, 5.0, 500.0, 5.0):
        now += run_s
        (restart,) = machine.exited(TaskExit("rollout_worker/0", 1), now)
        assert is_restarting(restart)
        pauses.append(restart.fields["pause_s"])
        now += restart.fields["pause_s"]
        machine.tick(now)
    assert pauses == [FIRST_PAUSE_S, 2 * FIRST_PAUSE_S] * 2


@pytest.mark.parametrize("returncode", [WorkerExit.SUPERSEDED, WorkerExit.NO_ROOM])
def test_a_worker_whose_end_is_no_crash_is_restarted_without_spending_the_budget(returncode: WorkerExit) -> None:
    machine = started()
    now = 0.0
    for _ in range(10):
        assert is_restarting(machine.exited(TaskExit("master_worker/0", returncode), now)[0])
        now += 40.0
        assert machine.tick(now) == [StartUnit("master_worker/0")]


@pytest.mark.parametrize(
    ("worker", "returncode", "words"),
    [
        ("rollout_worker/0", WorkerExit.BAD_CONFIGURATION, "refused its configuration"),
        ("master_worker/0", WorkerExit.NOT_FINITE, "loss or gradient stays not finite"),
        ("master_worker/0", WorkerExit.CANNOT_CONTINUE, "its log says why"),
    ],
)
def test_what_another_try_cannot_change_ends_the_trial_at_once(worker: str, returncode: int, words: str) -> None:
    machine = started()
    machine.exited(TaskExit(worker, returncode), 1.0)
    end = _drain(machine, 1.0)
    assert end.outcome is EndState.FAILED and words in end.cause


def test_done_in_the_log_ends_the_others_politely_and_redis_last() -> None:
    machine = started()
    asked = machine.end_trial(EndState.COMPLETE, "", 5.0)
    workers = ["master_worker/0", "model_worker/0", "model_worker/1", "rollout_worker/0"]
    assert asked == [SignalTask(worker, kill=False) for worker in workers]
    for worker in workers[:-1]:
        assert machine.exited(TaskExit(worker, 0), 6.0) == []
    assert machine.exited(TaskExit("rollout_worker/0", 0), 6.0) == [SignalTask("redis", kill=True)]
    assert machine.exited(TaskExit("redis", -9), 6.1) == [EndTrial(EndState.COMPLETE, "")]


def test_a_worker_that_ignores_the_request_to_end_is_killed_after_its_grace() -> None:
    machine = started()
    machine.end_trial(EndState.COMPLETE, "", 5.0)
    assert machine.tick(14.9) == []
    assert SignalTask("rollout_worker/0", kill=True) in machine.tick(15.0)


def test_an_unkillable_worker_is_named_and_does_not_hold_the_end_up() -> None:
    machine = started()
    machine.end_trial(EndState.COMPLETE, "", 5.0)
    machine.tick(15.0)
    (end,) = machine.tick(20.0)
    assert isinstance(end, EndTrial) and "rollout_worker/0" in end.cause


def test_stop_waits_for_the_master_within_the_grace_period() -> None:
    machine = started()
    assert machine.stop_requested(reason="stopped by me", grace_s=60.0, immediately=False, now=1.0) == []
    assert machine.tick(60.9) == []
    actions = machine.tick(61.0)
    assert isinstance(actions[0], AppendStop) and "grace period" in actions[0].reason


def test_stop_now_fences_before_it_kills() -> None:
    actions = started().stop_requested(reason="stopped by me", grace_s=60.0, immediately=True, now=1.0)
    assert actions[0] == AppendStop("stopped by me")
    assert all(isinstance(action, SignalTask) and action.kill for action in actions[1:])


def test_a_master_that_dies_while_it_should_checkpoint_ends_the_stop_at_once() -> None:
    machine = started()
    machine.stop_requested(reason="stopped by me", grace_s=60.0, immediately=False, now=1.0)
    assert isinstance(machine.exited(TaskExit("master_worker/0", -9), 2.0)[0], AppendStop)
    assert machine.phase is TrialPhase.TERMINATING


def test_nobody_waits_for_a_checkpoint_of_a_trainer_that_is_down() -> None:
    machine = started()
    machine.exited(TaskExit("master_worker/0", -9), 1.0)
    assert isinstance(
        machine.stop_requested(reason="stopped by me", grace_s=60.0, immediately=False, now=1.1)[0], AppendStop
    )


def test_redis_is_restarted_even_while_the_trial_stops() -> None:
    machine = started()
    machine.stop_requested(reason="stopped by me", grace_s=60.0, immediately=False, now=1.0)
    machine.exited(TaskExit("redis", -9), 2.0)
    assert machine.tick(3.0) == [StartUnit("redis")]


SERVER = UnitSpec(name="generation_server/1", tasks=("generation_server/1",), needs_nodes=True, is_optional=True)
FAR_TRAINERS = UnitSpec(name="model_worker", tasks=("model_worker/0", "model_worker/1"), needs_nodes=True)
WAITING_MASTER = UnitSpec(name="master_worker/0", tasks=("master_worker/0",), waits_for=("model_worker",))


def with_nodes(*units: UnitSpec) -> UnitMachine:
    """All nodes granted, all units running."""
    machine = UnitMachine(units, BUDGETS)
    for unit in units:
        if unit.needs_nodes:
            machine.nodes_granted(unit.name)
    machine.tick(0.0)
    return machine


def test_a_unit_without_its_nodes_is_not_started_and_holds_nothing_up() -> None:
    machine = UnitMachine((MASTER, SERVER), BUDGETS)
    assert machine.tick(0.0) == [StartUnit("master_worker/0")]
    assert machine.tick(10_000.0) == []
    machine.nodes_granted("generation_server/1")
    assert machine.tick(10_000.0) == [StartUnit("generation_server/1")]


def test_a_unit_whose_nodes_were_lost_comes_back_with_them_at_no_cost() -> None:
    machine, now = with_nodes(MASTER, SERVER), 0.0
    for _ in range(10 * BUDGETS.max_restarts):
        now += 1.0
        assert machine.nodes_lost("generation_server/1", "preempted", now) == [
            SignalTask("generation_server/1", kill=True)
        ]
        assert machine.exited(TaskExit("generation_server/1", -9), now) == [
            UnitNews("unit_left", "generation_server/1", "preempted")
        ]
        assert machine.tick(now + 100.0) == []
        machine.nodes_granted("generation_server/1")
        assert machine.tick(now) == [StartUnit("generation_server/1")]


def test_an_exit_is_judged_once_slurm_has_said_whether_the_nodes_stay() -> None:
    machine = with_nodes(MASTER, SERVER)
    assert machine.exited(TaskExit("generation_server/1", 0), 1.0) == [CheckNodes("generation_server/1")]
    assert machine.tick(2.0) == []
    assert is_restarting(machine.nodes_stay("generation_server/1", 2.0)[0])
    machine.tick(4.0)
    machine.exited(TaskExit("generation_server/1", 0), 5.0)
    assert machine.nodes_lost("generation_server/1", "preempted", 6.0) == [
        UnitNews("unit_left", "generation_server/1", "preempted")
    ]


def verdicts(machine: UnitMachine) -> dict[str, tuple[str, bool]]:
    return {ended.task: (ended.why, bool(ended.caused_by)) for ended in machine.take_verdicts()}


def test_the_verdict_on_a_silent_task_is_its_silence() -> None:
    machine = started()
    assert machine.silent("rollout_worker/0", 6.0) == [SignalTask("rollout_worker/0", kill=True)]
    machine.exited(TaskExit("rollout_worker/0", -9), 10.0)
    assert verdicts(machine) == {"rollout_worker/0": ("gave no sign of life for 6 s, and was killed", False)}
    assert machine.take_verdicts() == []


def test_the_verdict_on_a_peer_names_the_rank_that_died() -> None:
    machine = started()
    machine.exited(TaskExit("model_worker/1", 1, message="boom"), 10.0)
    machine.exited(TaskExit("model_worker/0", -9), 10.1)
    assert verdicts(machine) == {
        "model_worker/1": ("exit 1 (boom)", False),
        "model_worker/0": ("SIGKILL (ended by the supervisor: model_worker/1 exit 1 (boom))", True),
    }


def test_a_rank_that_had_died_before_its_peer_said_so_is_the_cause() -> None:
    machine = started()
    ends = [TaskExit("model_worker/0", WorkerExit.PEERS_FAILED), TaskExit("model_worker/1", -9)]
    actions = [machine.exited(end, 10.0, gone=[one.task for one in ends]) for end in ends]
    assert actions == [[], [restarting("model_worker", "model_worker/1 SIGKILL", pause_s=FIRST_PAUSE_S, restarts=1)]]
    assert [(end.task, bool(end.caused_by)) for end in machine.take_verdicts()] == [
        ("model_worker/0", True),
        ("model_worker/1", False),
    ]


@pytest.mark.parametrize("is_lost", [True, False])
def test_the_verdict_on_an_end_waits_until_it_is_known_whether_the_nodes_are_lost(is_lost: bool) -> None:
    machine = with_nodes(MASTER, SERVER)
    machine.exited(TaskExit("generation_server/1", -9), 1.0)
    assert machine.take_verdicts() == []
    if is_lost:
        machine.nodes_lost("generation_server/1", "preempted", 2.0)
        how = "SIGKILL (ended by the supervisor: preempted)"
    else:
        machine.nodes_stay("generation_server/1", 2.0)
        how = "SIGKILL"
    assert verdicts(machine) == {"generation_server/1": (how, is_lost)}


def test_no_end_is_without_a_verdict_when_the_trial_ends() -> None:
    machine = with_nodes(MASTER, SERVER)
    machine.exited(TaskExit("generation_server/1", -9), 1.0)
    machine.end_trial(EndState.COMPLETE, "", 2.0)
    assert verdicts(machine) == {"generation_server/1": ("SIGKILL", False)}


def test_what_a_stop_ends_is_its_consequence_and_what_ends_the_trial_is_named() -> None:
    machine = started()
    machine.stop_requested(reason="stopped by me", grace_s=0.0, immediately=True, now=1.0)
    machine.exited(TaskExit("master_worker/0", -9), 1.0)
    assert verdicts(machine) == {
        "master_worker/0": ("SIGKILL (ended by the supervisor: the attempt ends, STOPPED)", True)
    }
    machine = started()
    machine.exited(TaskExit("rollout_worker/0", WorkerExit.BAD_CONFIGURATION, message="no data"), 1.0)
    ends = [machine.exited(TaskExit(task, 0), 2.0) for unit in UNITS for task in unit.tasks]
    assert EndTrial(EndState.FAILED, "rollout_worker/0 exit 2 (no data)", "rollout_worker/0") in ends[-1]


def test_an_exit_is_a_crash_if_slurm_does_not_answer() -> None:
    machine = with_nodes(MASTER, SERVER)
    machine.exited(TaskExit("generation_server/1", 1), 1.0)
    assert machine.tick(1.0 + CHECK_TIMEOUT_S - 0.1) == []
    assert is_restarting(machine.tick(1.0 + CHECK_TIMEOUT_S)[0])


def test_an_optional_unit_out_of_budget_is_given_up_alone() -> None:
    machine, now = with_nodes(MASTER, SERVER), 0.0
    for _ in range(BUDGETS.max_restarts + 1):
        now += 50.0
        machine.tick(now)
        machine.exited(TaskExit("generation_server/1", 3), now)
        (action,) = machine.nodes_stay("generation_server/1", now)
    assert isinstance(action, GiveUpUnit) and "2 restarts" in action.cause
    assert machine.phase is TrialPhase.RUNNING and machine.tick(now + 1000.0) == []


@pytest.mark.parametrize("returncode", [1, -9, WorkerExit.BAD_CONFIGURATION, WorkerExit.CANNOT_CONTINUE])
def test_what_is_beside_the_trial_is_given_up_alone_however_it_ends(returncode: int) -> None:
    tracker = UnitSpec(name="tracker/0", tasks=("tracker/0",), is_beside=True)
    machine, now = UnitMachine((*UNITS, tracker), BUDGETS), 0.0
    for _ in range(BUDGETS.max_restarts + 1):
        machine.tick(now)
        (action,) = machine.exited(TaskExit("tracker/0", returncode), now)
        now += 50.0
    assert isinstance(action, GiveUpUnit) and action.unit == "tracker/0"
    assert machine.phase is TrialPhase.RUNNING and machine.tick(now + 1000.0) == []


def test_the_master_starts_with_its_trainer_and_again_after_it_was_away() -> None:
    machine = UnitMachine((WAITING_MASTER, FAR_TRAINERS), BUDGETS)
    assert machine.tick(0.0) == []
    machine.nodes_granted("model_worker")
    assert machine.tick(50.0) == [StartUnit("master_worker/0"), StartUnit("model_worker")]
    lost = machine.nodes_lost("model_worker", "node failed", 60.0)
    assert SignalTask("master_worker/0", kill=False) in lost
    machine.exited(TaskExit("master_worker/0", 0), 61.0)
    for rank in FAR_TRAINERS.tasks:
        machine.exited(TaskExit(rank, -9), 61.0)
    assert machine.tick(1000.0) == []
    machine.nodes_granted("model_worker")
    assert machine.tick(2000.0) == [StartUnit("master_worker/0"), StartUnit("model_worker")]


def test_the_master_leaves_with_ranks_that_ended_before_slurm_said_that_their_nodes_are_gone() -> None:
    machine = UnitMachine((WAITING_MASTER, FAR_TRAINERS), BUDGETS)
    machine.nodes_granted("model_worker")
    machine.tick(0.0)
    for rank in FAR_TRAINERS.tasks:
        asked = machine.exited(TaskExit(rank, 0), 10.0)
    assert asked == [CheckNodes("model_worker")]
    lost = machine.nodes_lost("model_worker", "requeued", 11.0)
    assert lost == [UnitNews("unit_left", "model_worker", "requeued"), SignalTask("master_worker/0", kill=False)]


def test_a_unit_that_is_kept_down_rests_until_that_is_undone() -> None:
    machine = started()
    assert machine.keep_down("rollout_worker/0", is_kept_down=True, now=1.0) == [
        SignalTask("rollout_worker/0", kill=False)
    ]
    assert is_left(machine.exited(TaskExit("rollout_worker/0", 0), 2.0)[0])
    assert machine.tick(1000.0) == []
    assert machine.keep_down("rollout_worker/0", is_kept_down=False, now=1000.0) == []
    assert machine.tick(1000.0) == [StartUnit("rollout_worker/0")]


EVENTS = st.one_of(
    st.tuples(st.just("exit"), st.integers(0, 4), st.sampled_from([0, 1, 2, -9, 75, 76])),
    st.tuples(st.just("tick"), st.floats(0.0, 200.0), st.just(0)),
    st.tuples(st.just("stop"), st.booleans(), st.just(0)),
    st.tuples(st.just("log"), st.booleans(), st.just(0)),
)


class World:
    """Processes as the shell would hold them: what was started and has not ended."""

    def __init__(self, units: Sequence[UnitSpec] = UNITS) -> None:
        self.units = units
        self.running: set[str] = set()
        self.end: EndTrial | None = None
        self.starts: dict[str, int] = {}
        self.restarts: dict[str, int] = {}

    def apply(self, actions: list[Action]) -> None:
        for action in actions:
            assert self.end is None, f"{action} after the end"
            if isinstance(action, StartUnit):
                unit = next(unit for unit in self.units if unit.name == action.unit)
                assert not self.running & set(unit.tasks), "two incarnations of a unit at once"
                self.running |= set(unit.tasks)
                self.starts[unit.name] = self.starts.get(unit.name, 0) + 1
            elif isinstance(action, SignalTask):
                assert action.task in self.running, "signalled what does not run"
            elif is_restarting(action):
                self.restarts[action.unit] = int(action.fields["restarts"])
            elif isinstance(action, EndTrial):
                self.end = action


@settings(max_examples=200, deadline=None)
@given(st.lists(EVENTS, max_size=40))
def test_whatever_happens_units_never_overlap_and_every_stop_ends(events: list[tuple[str, float, int]]) -> None:
    machine, world, now = UnitMachine(UNITS, BUDGETS), World(), 0.0
    world.apply(machine.tick(now))
    for kind, argument, code in events:
        if world.end:
            break
        if kind == "exit" and world.running:
            task = sorted(world.running)[int(argument) % len(world.running)]
            world.running.discard(task)
            world.apply(machine.exited(TaskExit(task, code), now))
        elif kind == "tick":
            now += float(argument)
            world.apply(machine.tick(now))
        elif kind == "stop":
            world.apply(machine.stop_requested(reason="asked", grace_s=30.0, immediately=bool(argument), now=now))
        elif kind == "log":
            world.apply(machine.end_trial(EndState.COMPLETE if argument else EndState.STOPPED, "", now))
    if world.end is None:
        world.apply(machine.stop_requested(reason="asked", grace_s=30.0, immediately=False, now=now))
        for _ in range(10):  # nobody reacts to anything: grace, terminate, kill, given up
            if world.end is None:
                now += 31.0
                world.apply(machine.tick(now))
    assert world.end is not None
    if world.end.outcome is not EndState.FAILED:
        assert "used up" not in world.end.cause


FAR_UNITS = (SERVER, FAR_TRAINERS)
NODES_EVENTS = st.tuples(
    st.sampled_from(["exit", "grant", "lose", "answer", "tick"]), st.integers(0, 9), st.sampled_from([0, 1, -9, -15])
)


@settings(max_examples=300, deadline=None)
@given(st.lists(NODES_EVENTS, max_size=60))
def test_whatever_becomes_of_nodes_nothing_starts_without_them_and_their_loss_costs_nothing(
    events: list[tuple[str, int, int]],
) -> None:
    units = (WAITING_MASTER, *FAR_UNITS, REDIS)
    machine, world, now = UnitMachine(units, BUDGETS), World(units), 0.0
    granted: set[str] = set()
    crashes = dict.fromkeys([unit.name for unit in units], 0)
    checking: set[str] = set()
    unit_by_task = {task: unit for unit in units for task in unit.tasks}

    def apply(actions: list[Action]) -> None:
        world.apply(actions)
        for action in actions:
            match action:
                case StartUnit(name):
                    unit = next(unit for unit in units if unit.name == name)
                    assert not unit.needs_nodes or name in granted
                    assert "model_worker" in granted or name != "master_worker/0"
                case CheckNodes(name):
                    checking.add(name)
                case UnitNews("unit_left", name):
                    checking.discard(name)

    apply(machine.tick(now))
    for kind, number, code in events:
        now += 0.1
        far_unit = FAR_UNITS[number % len(FAR_UNITS)].name
        if kind == "exit" and world.running:
            task = sorted(world.running)[number % len(world.running)]
            world.running.discard(task)
            if not unit_by_task[task].needs_nodes:
                crashes[unit_by_task[task].name] += 1
            apply(machine.exited(TaskExit(task, code), now))
        elif kind == "grant" and far_unit not in granted:
            granted.add(far_unit)
            machine.nodes_granted(far_unit)
        elif kind == "lose" and far_unit in granted:
            granted.discard(far_unit)
            apply(machine.nodes_lost(far_unit, "lost", now))
            if far_unit in checking:
                checking.discard(far_unit)
        elif kind == "answer" and far_unit in granted and far_unit in checking:
            checking.discard(far_unit)
            crashes[far_unit] += 1
            apply(machine.nodes_stay(far_unit, now))
        elif kind == "tick":
            now += number / 3.0  # never as long as SLURM may take to answer
            apply(machine.tick(now))
        if world.end is not None or machine.phase is not TrialPhase.RUNNING:
            break
        for name, restarts in world.restarts.items():
            assert restarts <= crashes[name], f"{name} was charged for what was no crash of its own"
    if machine.phase is not TrialPhase.RUNNING:
        assert any(crashes[unit.name] > BUDGETS.max_restarts for unit in units if not unit.is_optional)


def _drain(machine: UnitMachine, now: float) -> EndTrial:
    """Lets every process die at once, and returns the end."""
    for task in [task for unit in UNITS for task in unit.tasks]:
        for action in machine.exited(TaskExit(task, -15), now):
            if isinstance(action, EndTrial):
                return action
    raise AssertionError("the trial did not end")


def test_a_silent_task_is_killed_and_started_again_as_its_own_failure_with_its_gang() -> None:
    machine = started()
    assert machine.silent("model_worker/1", 61.0) == [SignalTask("model_worker/1", kill=True)]
    assert machine.exited(TaskExit("model_worker/1", -9), 10.1) == [SignalTask("model_worker/0", kill=True)]
    (restart,) = machine.exited(TaskExit("model_worker/0", -9), 10.2)
    assert is_restarting(restart)
    assert restart.cause == "model_worker/1 gave no sign of life for 61 s, and was killed"
    assert machine.silent("model_worker/1", 63.0) == []  # it does not run


def test_a_task_that_falls_silent_again_and_again_spends_its_budget() -> None:
    machine, now = started(), 0.0
    for _ in range(BUDGETS.max_restarts):
        machine.silent("rollout_worker/0", 61.0)
        (restart,) = machine.exited(TaskExit("rollout_worker/0", -9), now)
        assert is_restarting(restart)
        now += restart.fields["pause_s"]
        machine.tick(now)
    machine.silent("rollout_worker/0", 61.0)
    machine.exited(TaskExit("rollout_worker/0", -9), now)
    assert machine.phase is TrialPhase.TERMINATING
