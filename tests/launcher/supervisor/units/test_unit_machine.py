"""Restart units: what is restarted, what ends a trial, and that every path ends."""

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from corral.experiments.exit_codes import WorkerExit
from corral.launcher.supervisor.units.actions import (
    Action,
    AppendStop,
    CheckNodes,
    EndTrial,
    GiveUpUnit,
    LeaveUnit,
    Outcome,
    RestartPolicy,
    RestartUnit,
    SignalTask,
    StartUnit,
    UnitSpec,
)
from corral.launcher.supervisor.units.machine import Supervision, TrialPhase
from corral.launcher.trial.exits import ExitKind

REDIS = UnitSpec(name="redis", tasks=("redis",), is_service=True)
MASTER = UnitSpec(name="master_worker/0", tasks=("master_worker/0",))
GANG = UnitSpec(name="model_worker", tasks=("model_worker/0", "model_worker/1"))
ROLLOUT = UnitSpec(name="rollout_worker/0", tasks=("rollout_worker/0",))
UNITS = (MASTER, GANG, ROLLOUT, REDIS)
POLICY = RestartPolicy(max_restarts=2, pause_s=1.0, healthy_after_s=100.0, terminate_grace_s=10.0, kill_grace_s=5.0)


def started(policy: RestartPolicy = POLICY) -> Supervision:
    supervision = Supervision(UNITS, policy)
    supervision.tick(0.0)
    return supervision


def test_services_start_before_workers() -> None:
    actions = Supervision(UNITS, POLICY).tick(0.0)
    assert actions[0] == StartUnit("redis")
    assert {action.unit for action in actions if isinstance(action, StartUnit)} == {unit.name for unit in UNITS}


def test_a_dead_rollout_worker_is_restarted_alone_after_a_pause() -> None:
    supervision = started()
    assert supervision.exited("rollout_worker/0", -9, 10.0) == [
        RestartUnit("rollout_worker/0", "rollout_worker/0 signal 9", 1.0, 1)
    ]
    assert supervision.tick(10.5) == []
    assert supervision.tick(11.0) == [StartUnit("rollout_worker/0")]


@pytest.mark.parametrize("kind", [kind for kind in ExitKind if kind is not ExitKind.OWN])
def test_what_could_not_be_started_is_tried_again_at_growing_pauses_and_at_no_cost(kind: ExitKind) -> None:
    supervision, now, pauses = started(), 0.0, []
    for _ in range(10 * POLICY.max_restarts):
        (restart,) = supervision.exited("rollout_worker/0", 127, now, kind=kind)
        assert isinstance(restart, RestartUnit)
        pauses.append(restart.pause_s)
        now += restart.pause_s
        assert supervision.tick(now) == [StartUnit("rollout_worker/0")]
    assert pauses == sorted(pauses) and pauses[-1] == POLICY.max_pause_s


def test_a_gang_that_slurms_notice_reached_before_it_could_listen_starts_again_at_no_cost() -> None:
    supervision, now = started(), 0.0
    for _ in range(POLICY.max_restarts + 1):
        supervision.exited("model_worker/0", -15, now, kind=ExitKind.NOTICED)
        (restart,) = supervision.exited("model_worker/1", -15, now, kind=ExitKind.NOTICED)
        assert isinstance(restart, RestartUnit) and "SLURM's notice" in restart.cause
        now += restart.pause_s
        assert supervision.tick(now) == [StartUnit("model_worker")]


def test_one_dead_rank_takes_its_gang_along_and_all_start_together() -> None:
    supervision = started()
    assert supervision.exited("model_worker/1", 1, 10.0) == [SignalTask("model_worker/0", kill=True)]
    assert supervision.tick(20.0) == []  # not before the old gang is gone
    assert supervision.exited("model_worker/0", -9, 20.0) == [
        RestartUnit("model_worker", "model_worker/1 exit 1", 1.0, 1)
    ]
    assert supervision.tick(21.0) == [StartUnit("model_worker")]


def test_the_cause_is_the_rank_that_died_not_the_peer_that_noticed_first() -> None:
    supervision = started()
    supervision.exited("model_worker/0", WorkerExit.GANG_BROKEN, 10.0)
    supervision_actions = [action for action in supervision.exited("model_worker/1", -9, 10.0)]
    # model_worker/1 had been sent SIGKILL by then, so the two cannot be told apart: the first exit stands.
    assert [type(action) for action in supervision_actions] == [RestartUnit]


def test_a_unit_out_of_budget_fails_the_trial_with_the_cause() -> None:
    supervision = started()
    now = 0.0
    for _ in range(2):
        supervision.exited("rollout_worker/0", 3, now)
        now += 40.0
        supervision.tick(now)
    supervision.exited("rollout_worker/0", 3, now)
    ended = _drain(supervision, now)
    assert ended.outcome is Outcome.FAILED
    assert "rollout_worker/0 exit 3" in ended.cause and "2 restarts" in ended.cause


def test_pauses_double_and_a_healthy_run_gives_the_budget_back() -> None:
    supervision = started()
    pauses = []
    now = 0.0
    for run_s in (5.0, 5.0, 500.0, 5.0):
        now += run_s
        (restart,) = supervision.exited("rollout_worker/0", 1, now)
        assert isinstance(restart, RestartUnit)
        pauses.append(restart.pause_s)
        now += restart.pause_s
        supervision.tick(now)
    assert pauses == [1.0, 2.0, 1.0, 2.0]


def test_a_superseded_worker_is_restarted_without_spending_the_budget() -> None:
    supervision = started()
    now = 0.0
    for _ in range(10):
        assert isinstance(supervision.exited("master_worker/0", WorkerExit.SUPERSEDED, now)[0], RestartUnit)
        now += 40.0
        assert supervision.tick(now) == [StartUnit("master_worker/0")]


@pytest.mark.parametrize(
    ("worker", "returncode", "words"),
    [
        ("rollout_worker/0", WorkerExit.BAD_CONFIGURATION, "refused its configuration"),
        ("master_worker/0", WorkerExit.NOT_FINITE, "loss or gradient stays not finite"),
        ("master_worker/0", WorkerExit.CANNOT_CONTINUE, "its log says why"),
    ],
)
def test_what_another_try_cannot_change_ends_the_trial_at_once(worker: str, returncode: int, words: str) -> None:
    supervision = started()
    supervision.exited(worker, returncode, 1.0)
    end = _drain(supervision, 1.0)
    assert end.outcome is Outcome.FAILED and words in end.cause


def test_done_in_the_log_ends_the_others_politely_and_redis_last() -> None:
    supervision = started()
    asked = supervision.log_ended(Outcome.COMPLETE, "", 5.0)
    workers = ["master_worker/0", "model_worker/0", "model_worker/1", "rollout_worker/0"]
    assert asked == [SignalTask(worker, kill=False) for worker in workers]
    for worker in workers[:-1]:
        assert supervision.exited(worker, 0, 6.0) == []
    assert supervision.exited("rollout_worker/0", 0, 6.0) == [SignalTask("redis", kill=True)]
    assert supervision.exited("redis", -9, 6.1) == [EndTrial(Outcome.COMPLETE, "")]


def test_a_worker_that_ignores_the_request_to_end_is_killed_after_its_grace() -> None:
    supervision = started()
    supervision.log_ended(Outcome.COMPLETE, "", 5.0)
    assert supervision.tick(14.9) == []
    assert SignalTask("rollout_worker/0", kill=True) in supervision.tick(15.0)


def test_an_unkillable_worker_is_named_and_does_not_hold_the_end_up() -> None:
    supervision = started()
    supervision.log_ended(Outcome.COMPLETE, "", 5.0)
    supervision.tick(15.0)
    (end,) = supervision.tick(20.0)
    assert isinstance(end, EndTrial) and "rollout_worker/0" in end.cause


def test_stop_waits_for_the_master_within_the_grace_period() -> None:
    supervision = started()
    assert supervision.stop_requested(reason="stopped by me", grace_s=60.0, immediately=False, now=1.0) == []
    assert supervision.tick(60.9) == []
    actions = supervision.tick(61.0)
    assert isinstance(actions[0], AppendStop) and "grace period" in actions[0].reason


def test_stop_now_fences_before_it_kills() -> None:
    actions = started().stop_requested(reason="stopped by me", grace_s=60.0, immediately=True, now=1.0)
    assert actions[0] == AppendStop("stopped by me")
    assert all(isinstance(action, SignalTask) and action.kill for action in actions[1:])


def test_a_master_that_dies_while_it_should_checkpoint_ends_the_stop_at_once() -> None:
    supervision = started()
    supervision.stop_requested(reason="stopped by me", grace_s=60.0, immediately=False, now=1.0)
    assert isinstance(supervision.exited("master_worker/0", -9, 2.0)[0], AppendStop)
    assert supervision.phase is TrialPhase.TERMINATING


def test_nobody_waits_for_a_checkpoint_of_a_trainer_that_is_down() -> None:
    supervision = started()
    supervision.exited("master_worker/0", -9, 1.0)
    assert isinstance(
        supervision.stop_requested(reason="stopped by me", grace_s=60.0, immediately=False, now=1.1)[0], AppendStop
    )


def test_redis_is_restarted_even_while_the_trial_stops() -> None:
    supervision = started()
    supervision.stop_requested(reason="stopped by me", grace_s=60.0, immediately=False, now=1.0)
    supervision.exited("redis", -9, 2.0)
    assert supervision.tick(3.0) == [StartUnit("redis")]


SERVER = UnitSpec(name="generation_server/1", tasks=("generation_server/1",), needs_nodes=True, is_optional=True)
ROAMER = UnitSpec(name="rollout_worker/1", tasks=("rollout_worker/1",), needs_nodes=True, has_fallback=True)
FAR_GANG = UnitSpec(name="model_worker", tasks=("model_worker/0", "model_worker/1"), needs_nodes=True)
WAITING_MASTER = UnitSpec(name="master_worker/0", tasks=("master_worker/0",), waits_for=("model_worker",))


def with_nodes(*units: UnitSpec) -> Supervision:
    """All nodes granted, all units running."""
    supervision = Supervision(units, POLICY)
    for unit in units:
        if unit.needs_nodes:
            supervision.nodes_granted(unit.name, 0.0)
    supervision.tick(0.0)
    return supervision


def test_a_unit_without_its_nodes_is_not_started_and_holds_nothing_up() -> None:
    supervision = Supervision((MASTER, SERVER), POLICY)
    assert supervision.tick(0.0) == [StartUnit("master_worker/0")]
    assert supervision.tick(10_000.0) == []
    supervision.nodes_granted("generation_server/1", 10_000.0)
    assert supervision.tick(10_000.0) == [StartUnit("generation_server/1")]


def test_a_unit_whose_nodes_were_lost_comes_back_with_them_at_no_cost() -> None:
    supervision, now = with_nodes(MASTER, SERVER), 0.0
    for _ in range(10 * POLICY.max_restarts):
        now += 1.0
        assert supervision.nodes_lost("generation_server/1", "preempted", now) == [
            SignalTask("generation_server/1", kill=True)
        ]
        assert supervision.exited("generation_server/1", -9, now) == [LeaveUnit("generation_server/1", "preempted")]
        assert supervision.tick(now + 100.0) == []
        supervision.nodes_granted("generation_server/1", now)
        assert supervision.tick(now) == [StartUnit("generation_server/1")]


def test_an_exit_is_judged_once_slurm_has_said_whether_the_nodes_stay() -> None:
    supervision = with_nodes(MASTER, SERVER)
    assert supervision.exited("generation_server/1", 0, 1.0) == [CheckNodes("generation_server/1")]
    assert supervision.tick(2.0) == []
    assert isinstance(supervision.nodes_stay("generation_server/1", 2.0)[0], RestartUnit)
    supervision.tick(4.0)
    supervision.exited("generation_server/1", 0, 5.0)
    assert supervision.nodes_lost("generation_server/1", "preempted", 6.0) == [
        LeaveUnit("generation_server/1", "preempted")
    ]


def test_an_exit_is_a_crash_if_slurm_does_not_answer() -> None:
    supervision = with_nodes(MASTER, SERVER)
    supervision.exited("generation_server/1", 1, 1.0)
    assert supervision.tick(1.0 + POLICY.check_timeout_s - 0.1) == []
    assert isinstance(supervision.tick(1.0 + POLICY.check_timeout_s)[0], RestartUnit)


def test_an_optional_unit_out_of_budget_is_given_up_alone() -> None:
    supervision, now = with_nodes(MASTER, SERVER), 0.0
    for _ in range(POLICY.max_restarts + 1):
        now += 50.0
        supervision.tick(now)
        supervision.exited("generation_server/1", 3, now)
        (action,) = supervision.nodes_stay("generation_server/1", now)
    assert isinstance(action, GiveUpUnit) and "2 restarts" in action.cause
    assert supervision.phase is TrialPhase.RUNNING and supervision.tick(now + 1000.0) == []


def test_a_unit_with_a_fallback_starts_there_and_moves_when_its_nodes_are_granted() -> None:
    supervision = Supervision((MASTER, ROAMER), POLICY)
    assert StartUnit("rollout_worker/1") in supervision.tick(0.0)
    assert supervision.nodes_granted("rollout_worker/1", 5.0) == [SignalTask("rollout_worker/1", kill=False)]
    (left,) = supervision.exited("rollout_worker/1", 0, 6.0)
    assert isinstance(left, LeaveUnit)
    assert supervision.tick(6.0) == [StartUnit("rollout_worker/1")]
    supervision.nodes_lost("rollout_worker/1", "preempted", 7.0)
    supervision.exited("rollout_worker/1", 0, 7.0)
    assert supervision.tick(7.0) == [StartUnit("rollout_worker/1")]  # in its fallback again


def test_what_does_not_move_when_asked_is_killed() -> None:
    supervision = Supervision((MASTER, ROAMER), POLICY)
    supervision.tick(0.0)
    supervision.nodes_granted("rollout_worker/1", 5.0)
    assert supervision.tick(5.0 + POLICY.terminate_grace_s) == [SignalTask("rollout_worker/1", kill=True)]


def test_a_crash_in_the_fallback_is_a_crash() -> None:
    supervision = Supervision((MASTER, ROAMER), POLICY)
    supervision.tick(0.0)
    assert isinstance(supervision.exited("rollout_worker/1", 1, 1.0)[0], RestartUnit)


def test_the_master_starts_with_its_trainer_and_again_after_it_was_away() -> None:
    supervision = Supervision((WAITING_MASTER, FAR_GANG), POLICY)
    assert supervision.tick(0.0) == []
    supervision.nodes_granted("model_worker", 50.0)
    assert supervision.tick(50.0) == [StartUnit("master_worker/0"), StartUnit("model_worker")]
    lost = supervision.nodes_lost("model_worker", "node failed", 60.0)
    assert SignalTask("master_worker/0", kill=False) in lost
    supervision.exited("master_worker/0", 0, 61.0)
    for rank in FAR_GANG.tasks:
        supervision.exited(rank, -9, 61.0)
    assert supervision.tick(1000.0) == []
    supervision.nodes_granted("model_worker", 2000.0)
    assert supervision.tick(2000.0) == [StartUnit("master_worker/0"), StartUnit("model_worker")]


def test_the_master_leaves_with_ranks_that_ended_before_slurm_said_that_their_nodes_are_gone() -> None:
    supervision = Supervision((WAITING_MASTER, FAR_GANG), POLICY)
    supervision.nodes_granted("model_worker", 0.0)
    supervision.tick(0.0)
    for rank in FAR_GANG.tasks:
        asked = supervision.exited(rank, 0, 10.0)
    assert asked == [CheckNodes("model_worker")]
    lost = supervision.nodes_lost("model_worker", "requeued", 11.0)
    assert lost == [LeaveUnit("model_worker", "requeued"), SignalTask("master_worker/0", kill=False)]


def test_a_unit_that_is_kept_down_rests_until_that_is_undone() -> None:
    supervision = started()
    assert supervision.keep_down("rollout_worker/0", is_kept_down=True, now=1.0) == [
        SignalTask("rollout_worker/0", kill=False)
    ]
    assert isinstance(supervision.exited("rollout_worker/0", 0, 2.0)[0], LeaveUnit)
    assert supervision.tick(1000.0) == []
    assert supervision.keep_down("rollout_worker/0", is_kept_down=False, now=1000.0) == []
    assert supervision.tick(1000.0) == [StartUnit("rollout_worker/0")]


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
            elif isinstance(action, RestartUnit):
                self.restarts[action.unit] = action.restarts
            elif isinstance(action, EndTrial):
                self.end = action


@settings(max_examples=200, deadline=None)
@given(st.lists(EVENTS, max_size=40))
def test_whatever_happens_units_never_overlap_and_every_stop_ends(events: list[tuple[str, float, int]]) -> None:
    supervision, world, now = Supervision(UNITS, POLICY), World(), 0.0
    world.apply(supervision.tick(now))
    for kind, argument, code in events:
        if world.end:
            break
        if kind == "exit" and world.running:
            task = sorted(world.running)[int(argument) % len(world.running)]
            world.running.discard(task)
            world.apply(supervision.exited(task, code, now))
        elif kind == "tick":
            now += float(argument)
            world.apply(supervision.tick(now))
        elif kind == "stop":
            world.apply(supervision.stop_requested(reason="asked", grace_s=30.0, immediately=bool(argument), now=now))
        elif kind == "log":
            world.apply(supervision.log_ended(Outcome.COMPLETE if argument else Outcome.STOPPED, "", now))
    if world.end is None:
        world.apply(supervision.stop_requested(reason="asked", grace_s=30.0, immediately=False, now=now))
        for _ in range(10):  # nobody reacts to anything: grace, terminate, kill, given up
            if world.end is None:
                now += 31.0
                world.apply(supervision.tick(now))
    assert world.end is not None
    if world.end.outcome is not Outcome.FAILED:
        assert "used up" not in world.end.cause


FAR_UNITS = (SERVER, ROAMER, FAR_GANG)
NODES_EVENTS = st.tuples(
    st.sampled_from(["exit", "grant", "lose", "answer", "tick"]), st.integers(0, 9), st.sampled_from([0, 1, -9, -15])
)


@settings(max_examples=300, deadline=None)
@given(st.lists(NODES_EVENTS, max_size=60))
def test_whatever_becomes_of_nodes_nothing_starts_without_them_and_their_loss_costs_nothing(
    events: list[tuple[str, int, int]],
) -> None:
    units = (WAITING_MASTER, *FAR_UNITS, REDIS)
    supervision, world, now = Supervision(units, POLICY), World(units), 0.0
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
                    assert not unit.needs_nodes or unit.has_fallback or name in granted
                    assert "model_worker" in granted or name != "master_worker/0"
                case CheckNodes(name):
                    checking.add(name)
                case LeaveUnit(name):
                    checking.discard(name)

    apply(supervision.tick(now))
    for kind, number, code in events:
        now += 0.1
        far_unit = FAR_UNITS[number % len(FAR_UNITS)].name
        if kind == "exit" and world.running:
            task = sorted(world.running)[number % len(world.running)]
            world.running.discard(task)
            if not unit_by_task[task].needs_nodes:
                crashes[unit_by_task[task].name] += 1
            elif unit_by_task[task].has_fallback:
                crashes[unit_by_task[task].name] += 1  # in its fallback it has no nodes to lose
            apply(supervision.exited(task, code, now))
        elif kind == "grant" and far_unit not in granted:
            granted.add(far_unit)
            apply(supervision.nodes_granted(far_unit, now))
        elif kind == "lose" and far_unit in granted:
            granted.discard(far_unit)
            apply(supervision.nodes_lost(far_unit, "lost", now))
            if far_unit in checking:
                checking.discard(far_unit)
        elif kind == "answer" and far_unit in granted and far_unit in checking:
            checking.discard(far_unit)
            crashes[far_unit] += 1
            apply(supervision.nodes_stay(far_unit, now))
        elif kind == "tick":
            now += number / 3.0  # never as long as SLURM may take to answer
            apply(supervision.tick(now))
        if world.end is not None or supervision.phase is not TrialPhase.RUNNING:
            break
        for name, restarts in world.restarts.items():
            assert restarts <= crashes[name], f"{name} was charged for what was no crash of its own"
    if supervision.phase is not TrialPhase.RUNNING:
        assert any(crashes[unit.name] > POLICY.max_restarts for unit in units if not unit.is_optional)


def _drain(supervision: Supervision, now: float) -> EndTrial:
    """Lets every process die at once, and returns the end."""
    for task in [task for unit in UNITS for task in unit.tasks]:
        for action in supervision.exited(task, -15, now):
            if isinstance(action, EndTrial):
                return action
    raise AssertionError("the trial did not end")
