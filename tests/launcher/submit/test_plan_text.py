"""What `rl-submit --dry-run` says of a trial before it starts, and the graph as a chart."""

from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from corral.experiments.config.rollout import SglangConfig
from corral.experiments.errors import display_path
from corral.experiments.inputs.other_pythons import sglang_python
from corral.experiments.plan import RunPlan, TrialIdentity, make_run_plan
from corral.experiments.registry import load_experiment
from corral.experiments.worker_specs import GenerationServerSpec
from corral.launcher.page.graph import graph_of, render_mermaid
from corral.launcher.submit.plan_text import render_plan
from corral.scheduling.model_function_call import ModelName, OffloadHook, PushWeightsHook
from tests.experiments.broken_yaml import VALID_PPO, VALID_SFT, write_inputs


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir("/usr/lib")  # from near the folder its paths would be shown as seen from there
    write_inputs(tmp_path)
    (tmp_path / "ppo.yaml").write_text(VALID_PPO)
    (tmp_path / "sft.yaml").write_text(VALID_SFT)
    return tmp_path


def _plan(path: Path, *overrides: str) -> RunPlan:
    experiment = load_experiment(path, overrides)
    identity = TrialIdentity(
        experiment=experiment.name, trial="trial-1", uuid="ab" * 16, directory=path.parent / "trial-1"
    )
    return make_run_plan(experiment, identity, "slurm")


def _with_ref(folder: Path, *overrides: str) -> RunPlan:
    return _plan(folder / "ppo.yaml", f"ref.path={folder / 'model'}", "ppo.kl.coef=0.1", *overrides)


def _sections(plan: RunPlan, folder: Path) -> list[list[str]]:
    """The parts of the screen, by the empty lines between them; paths below the folder are shown as FOLDER."""
    screen = render_plan(plan, nodes=["plan       two nodes"]).replace(str(folder), "FOLDER")
    return [part.splitlines() for part in screen.split("\n\n")]


def test_what_is_trained_and_what_stays_is_counted(folder: Path) -> None:
    shapes = {"model.embed_tokens.weight": (14, 8), "model.layers.0.mlp.up_proj.weight": (200, 8)}
    tensors = {name: np.zeros(shape, np.float32) for name, shape in shapes.items()}
    save_file(tensors, folder / "model" / "model.safetensors")
    with_lora = _sections(_with_ref(folder, "actor.lora={rank: 5, alpha: 5}", "ppo.n_minibatches=2"), folder)[3]
    assert with_lora[1].split("  ")[3:5] == ["1,040 trained (lora, rank 5), 1,712 frozen", "d0 on 0"]
    assert with_lora[2].split("float32")[1].startswith("  1,712 not trained  ")
    assert "float32  1,712 trained  " in _sections(_with_ref(folder, "ppo.n_minibatches=2"), folder)[3][1]


def test_supervised_training_on_one_screen(folder: Path) -> None:
    heading, groups, nodes, *dataflow = _sections(
        _plan(folder / "sft.yaml", "allocation=fsdp:d2", "model.recompute=full"), folder
    )
    assert heading[:2] == ["trial      small-sft/trial-1   (sft, slurm, seed 1)", "folder     FOLDER/trial-1"]
    assert heading[3:] == [
        "steps      5 of 8 rows; 40 of 1 x 40",
        "commits    after every step, 2 are kept; weights that stay: at the end",
    ]
    assert groups[0].startswith("GROUP") and nodes == ["plan       two nodes"]
    assert dataflow == [
        [
            "MODEL    TRAINED BY                       DTYPE    PARAMETERS  SHARDS ON MODEL WORKERS  WEIGHTS",
            "actor/0  adamw, lr 0.001, recompute full  float32  ?           d0-1 on 0-1              FOLDER/model",
        ],
        [
            "CALL         MODEL    TYPE        ROWS  PER DP RANK  MICRO-BATCH      UPDATES",
            "actor_train  actor/0  train_step  8     4            <= 16384 tokens  1",
        ],
        [
            "FROM           KEYS                    TO",
            "samples (0-1)  input_ids, prompt_mask  actor_train (0-1)",
            "actor/0 (0-1)  weights                 trial folder after actor_train",
        ],
    ]


def test_the_python_of_sglang_is_shown_and_kept_in_the_plan(folder: Path) -> None:
    plan = _plan(folder / "ppo.yaml", "allocation=sglang:d1+fsdp:d1")
    python = sglang_python(SglangConfig())
    assert f"generate   1 server of SGLang, float32; {display_path(python)}" in render_plan(plan).splitlines()
    server = plan.worker("generation_server", 0)
    assert isinstance(server, GenerationServerSpec) and (server.backend, server.sglang.python) == ("sglang", python)


@pytest.mark.parametrize(("gpu", "size"), [(2, "2 GPUs each"), (0, "2 processes without a GPU each")])
def test_servers_of_several_gpus_say_of_how_many(folder: Path, gpu: int, size: str) -> None:
    servers = f"groups.generation_server.scheduling={{gpu: {gpu}}}"
    plan = _plan(folder / "ppo.yaml", "allocation=sglang:d4t2+fsdp:d8", servers, "train_batch_size=8")
    assert f"generate   4 servers of SGLang, {size}, float32; " in render_plan(plan)
    group = plan.scheduling["generation_server"]
    # A process per GPU, and three beside them.
    assert (group.count, group.scheduling.gpu, group.scheduling.cpu) == (4, gpu, 5)
    server = plan.worker("generation_server", 3)
    assert isinstance(server, GenerationServerSpec) and server.tensor_parallel_size == 2


def test_asynchronous_ppo_with_a_reference_fits_one_screen(folder: Path) -> None:
    plan = _with_ref(folder, "allocation=hf:d2+fsdp:d2", "train_batch_size=7", "ppo.n_minibatches=3")
    heading, groups, _, models, calls, keys = _sections(plan, folder)
    assert heading[3:] == [
        "steps      12 of 7 prompts = 28 answers, 5.714 per epoch; 80 of 2 x 40; the last step has 3",
        "generate   2 servers of the embedded engine, float32",
        "memory     of its 1 GiB a server takes at least 658 MiB: 400 MiB for its processes + 258 MiB for 2 versions "
        "of the weights in /dev/shm",
        "staleness  eta 1: no token is trained on that is older by more versions",
        "commits    after every step, 2 are kept; weights that stay: at the end",
        "held-out   FOLDER/heldout.jsonl   answered by generation servers, 64 at a time; before the first step, "
        "every 2 steps, after the last",
    ]
    assert [line.split()[:2] for line in groups[1:]] == [
        ["master_worker", "1"],
        ["model_worker", "2"],
        ["generation_server", "2"],
        ["gserver_manager", "1"],
        ["rollout_worker", "2"],
        ["all", "8"],
    ]
    assert models[2] == "ref/0    -                 float32  ?           d0-1 on 0-1              FOLDER/model"
    assert calls == [
        "CALL         MODEL    TYPE        PROMPTS  PER DP RANK      MICRO-BATCH      UPDATES",
        "actor_inf    actor/0  inference   7        3.5, 14 answers  <= 16384 tokens  -",
        "ref_inf      ref/0    inference   7        3.5, 14 answers  <= 16384 tokens  -",
        "actor_train  actor/0  train_step  7        3.5, 14 answers  <= 16384 tokens  3",
    ]
    assert keys == [
        "FROM             KEYS                                              TO",
        "samples (0-1)    input_ids, prompt_mask                            actor_inf, ref_inf, actor_train (0-1)",
        "samples (0-1)    old_logprobs, versions, rewards, seq_no_eos_mask  actor_train (0-1)",
        "actor_inf (0-1)  proximal_logprobs                                 actor_train (0-1)",
        "ref_inf (0-1)    ref_logprobs                                      actor_train (0-1)",
        "actor/0 (0-1)    weights                                           generation servers after actor_train",
    ]
    assert len(render_plan(plan).splitlines()) <= 35


def test_meshes_apart_show_who_gives_to_whom_and_what_runs_beside_what(folder: Path) -> None:
    plan = _with_ref(folder, "allocation=hf:d1+actor=fsdp:d2,ref=fsdp:d4", "ppo.n_minibatches=2")
    *_, models, calls, keys = _sections(plan, folder)
    assert "d0-1 on 0-1" in models[1] and "d0-3 on 2-5" in models[2]
    assert calls == [
        "CALL         MODEL    TYPE        PROMPTS  PER DP RANK    MICRO-BATCH      UPDATES  CAN RUN BESIDE",
        "actor_inf    actor/0  inference   8        4, 16 answers  <= 16384 tokens  -        ref_inf",
        "ref_inf      ref/0    inference   8        2, 8 answers   <= 16384 tokens  -        actor_inf",
        "actor_train  actor/0  train_step  8        4, 16 answers  <= 16384 tokens  2        -",
    ]
    assert keys[1].endswith("actor_inf, actor_train (0-1); ref_inf (2-5)")
    assert keys[4].startswith("ref_inf (2-5)") and keys[4].endswith("actor_train (0-1)")


def _changed(plan: RunPlan) -> RunPlan:
    """With an average of the actor as reference, which leaves for host memory, and an actor trained in three goes."""
    calls = []
    for call in plan.master.calls:
        if call.name == "actor_train":
            push = PushWeightsHook(target=ModelName("ref"), eta=0.25)
            call = call.model_copy(update={"n_seqs": 3, "post_hooks": (*call.post_hooks, push)})
        elif call.name == "ref_inf":
            call = call.model_copy(update={"post_hooks": (OffloadHook(),)})
        calls.append(call)
    master = plan.master.model_copy(update={"calls": calls})
    workers = [master if worker == plan.master else worker for worker in plan.workers]
    return plan.model_copy(update={"workers": workers})


def test_goes_updates_and_weights_that_move_are_shown(folder: Path) -> None:
    plan = _changed(_with_ref(folder, "allocation=hf:d1+actor=fsdp:d2,ref=fsdp:d1", "ppo.n_minibatches=2"))
    *_, calls, keys = _sections(plan, folder)
    assert calls[3].split("  ")[2:] == [
        "train_step", "2 x 3 + 2", "1.5, 6 answers", "<= 16384 tokens", "3 x 2 = 6", "-"
    ]  # fmt: skip
    assert [line.split("  ")[-1].strip() for line in keys[5:]] == [
        "generation servers after actor_train",
        "ref/0 (2), which keeps 0.75 of its own, after actor_train",
        "host memory after ref_inf",
    ]
    assert "0.25 of its weights" in keys[6]


def test_steps_that_max_steps_leaves_out_are_not_promised(folder: Path) -> None:
    screen = render_plan(_plan(folder / "sft.yaml", "control.max_steps=2", "control.save_every=1 step"))
    assert "2 of 8 rows; 16 of 1 x 40 (control.max_steps ends it early)" in screen
    assert "weights that stay: after every step and at the end" in screen


def test_the_graph_is_a_mermaid_chart_with_numbers_for_names(folder: Path) -> None:
    plan = _changed(_with_ref(folder, "allocation=hf:d1+actor=fsdp:d2,ref=fsdp:d1", "ppo.n_minibatches=2"))
    graph = graph_of(plan.master.step_plan, samples="rollout workers", published_to="generation servers")
    assert render_mermaid(graph).splitlines() == [
        "flowchart LR",
        '  n0(["rollout workers"])',
        '  n1["actor_inf<br/>actor/0 inference<br/>d2 on 0-1"]',
        '  n2["ref_inf<br/>ref/0 inference<br/>d1 on 2"]',
        '  n3["actor_train<br/>actor/0 train_step<br/>d2 on 0-1<br/>3 slices of 3"]',
        '  n4(["generation servers"])',
        '  n0 -->|"input_ids, prompt_mask"| n1',
        '  n0 -->|"input_ids, prompt_mask"| n2',
        '  n0 -->|"input_ids, prompt_mask"| n3',
        '  n0 -->|"old_logprobs, versions, rewards, seq_no_eos_mask"| n3',
        '  n1 -->|"proximal_logprobs"| n3',
        '  n2 -->|"ref_logprobs"| n3',
        '  n3 -.->|"weights"| n4',
        '  n3 -.->|"0.25 of the weights"| n2',
    ]
