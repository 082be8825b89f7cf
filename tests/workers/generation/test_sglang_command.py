"""What SGLang is started with: the trial's settings, the user's flags, no secrets, and stand-ins only without a GPU."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from corral.experiments.config.rollout import (
    SGLANG_FLAGS_OF_PLACES,
    SGLANG_FLAGS_SET_HERE,
    EngineConfig,
    SglangConfig,
)
from corral.workers.generation.sglang import (
    STAND_INS,
    check_gpus,
    cpus_by_rank,
    has_gpu,
    read_progress,
    secret_settings,
    sglang_command,
    sglang_environment,
)
from tests.workers.generation.servers import server_spec


def command(
    flags: dict[str, Any] | None = None, *, with_gpu: bool = True, num_ranks: int = 1, **spec_fields: Any
) -> list[str]:
    spec = server_spec(
        "sglang",
        Path("/models/a"),
        tensor_parallel_size=num_ranks,
        python="/opt/sglang/bin/python",
        flags=flags or {},
    )
    return sglang_command(
        spec.model_copy(update=spec_fields),
        host="10.0.0.7",
        port=4711,
        seed=5,
        descriptor=11,
        identity=Path("/trial/secrets/server.pem"),
        secrets_file=Path("/trial/secrets/sglang-0.yaml"),
        has_gpu=with_gpu,
    )


def value_of(arguments: list[str], flag: str) -> str:
    return arguments[arguments.index(flag) + 1]


def test_the_command_line_says_what_the_trial_says() -> None:
    arguments = command()
    assert arguments[0] == "/opt/sglang/bin/python" and arguments[2] == "11"
    assert value_of(arguments, "--ssl-keyfile") == value_of(arguments, "--ssl-certfile") == "/trial/secrets/server.pem"
    assert value_of(arguments, "--model-path") == "/models/a"
    assert (value_of(arguments, "--host"), value_of(arguments, "--port")) == ("10.0.0.7", "4711")
    assert (value_of(arguments, "--weight-version"), value_of(arguments, "--dtype")) == ("0.0", "float32")
    assert value_of(arguments, "--config") == "/trial/secrets/sglang-0.yaml"
    assert {
        argument.removeprefix("--") for argument in arguments if argument.startswith("--")
    } >= SGLANG_FLAGS_SET_HERE - {
        "api-key",
        "admin-api-key",
        "enable-http2",
        "enable-http-worker-reuseport",
        "enable-return-routed-experts",
        "model",
        "ssl-ca-certs",
        "ssl-keyfile-password",
    }


def test_a_server_of_a_mixture_is_started_so_that_it_can_say_whom_a_token_chose() -> None:
    assert "--enable-return-routed-experts" in command(records_experts=True)
    assert "--enable-return-routed-experts" not in command()


def test_a_machine_without_a_gpu_gets_what_it_lacks_and_one_with_a_gpu_gets_nothing() -> None:
    assert value_of(command(with_gpu=False), "--device") == "cpu" and "--device" not in command()
    inherited = {"PATH": "/bin", "PYTHONPATH": "/mine"}
    bare = sglang_environment(inherited, has_gpu=False, num_ranks=1, cpus=[0, 1])
    assert bare["PYTHONPATH"] == f"{STAND_INS}:/mine" and bare["SGLANG_USE_CPU_ENGINE"] == "1"
    assert "SGLANG_CPU_OMP_THREADS_BIND" not in bare
    assert sglang_environment(inherited, has_gpu=True, num_ranks=2, cpus=[0, 1]) == {
        "PATH": "/bin",
        "PYTHONPATH": "/mine",
        "HF_HUB_OFFLINE": "1",
        "PYTHONUNBUFFERED": "1",
        "PYTHONSAFEPATH": "1",
    }


def test_the_gpus_of_a_server_are_those_of_the_allocation() -> None:
    assert value_of(command(), "--tp-size") == "1" and value_of(command(num_ranks=2), "--tp-size") == "2"
    for visible in ("0,1", "GPU-1, GPU-2", "0,1,2", "", " "):
        check_gpus({"CUDA_VISIBLE_DEVICES": visible}, num_ranks=2)
    check_gpus({}, num_ranks=2)
    with pytest.raises(
        ValueError, match=r"gives this server 2 GPUs \(t2\), and its task has 1: CUDA_VISIBLE_DEVICES=5"
    ):
        check_gpus({"CUDA_VISIBLE_DEVICES": "5,"}, num_ranks=2)


@given(st.sets(st.integers(0, 300), min_size=1, max_size=64), st.integers(1, 16))
def test_without_gpus_ranks_have_equally_many_cpus_and_share_none_that_they_need_not(
    cpus: set[int], num_ranks: int
) -> None:
    shares = [[int(cpu) for cpu in share.split(",")] for share in cpus_by_rank(sorted(cpus), num_ranks).split("|")]
    assert len(shares) == num_ranks and {len(share) for share in shares} == {max(1, len(cpus) // num_ranks)}
    bound = [cpu for share in shares for cpu in share]
    assert cpus >= set(bound) and len(set(bound)) == min(len(bound), len(cpus))
    environment = sglang_environment({}, has_gpu=False, num_ranks=num_ranks, cpus=sorted(cpus))
    assert environment.get("SGLANG_CPU_OMP_THREADS_BIND", "").count("|") == num_ranks - 1


@pytest.mark.parametrize(("visible", "expected"), [("", False), (" ", False), ("0", True), ("GPU-1,GPU-2", True)])
def test_the_gpus_of_a_worker_are_those_that_it_may_see(visible: str, expected: bool, tmp_path: Path) -> None:
    assert has_gpu({"CUDA_VISIBLE_DEVICES": visible}, driver=tmp_path) is expected


def test_without_that_word_the_driver_says_whether_there_is_one(tmp_path: Path) -> None:
    assert not has_gpu({}, driver=tmp_path / "absent") and not has_gpu({}, driver=tmp_path)
    (tmp_path / "0000:00:1e.0").mkdir()
    assert has_gpu({}, driver=tmp_path)


def test_users_flags_come_as_sglang_takes_them_and_replace_our_own_choices() -> None:
    flags = {
        "mem-fraction-static": 0.8,
        "enable-dp-attention": True,
        "sleep-on-idle": False,
        "lora-target-modules": ["q_proj", "k_proj"],
        "log-level-http": "info",
    }
    arguments = command(flags)
    assert value_of(arguments, "--mem-fraction-static") == "0.8"
    assert "--enable-dp-attention" in arguments and "--sleep-on-idle" not in arguments
    start = arguments.index("--lora-target-modules")
    assert arguments[start + 1 : start + 3] == ["q_proj", "k_proj"]
    assert arguments.count("--log-level-http") == 1 and value_of(arguments, "--log-level-http") == "info"


@pytest.mark.parametrize("flag", sorted(SGLANG_FLAGS_SET_HERE))
def test_flags_that_follow_from_the_trial_are_refused(flag: str) -> None:
    with pytest.raises(ValidationError, match=f"--{flag} is set by the trial"):
        SglangConfig(flags={flag: "x"})


@pytest.mark.parametrize("flag", sorted(SGLANG_FLAGS_OF_PLACES) + ["tensor-parallel", "base-gpu"])
def test_flags_that_say_where_a_server_runs_are_refused_also_in_part(flag: str) -> None:
    with pytest.raises(ValidationError, match=f"--{flag} contradicts the allocation"):
        SglangConfig(flags={flag: 2})


@pytest.mark.parametrize("flag", ["disaggregation-mode", "disaggregation", "encoder-only", "use-ray", "is-embed"])
def test_flags_of_servers_that_would_never_answer_are_refused_with_the_reason(flag: str) -> None:
    with pytest.raises(ValidationError, match=f"--{flag} cannot work here: it (makes|starts)"):
        SglangConfig(flags={flag: "prefill"})


def test_the_size_of_the_cache_can_be_left_to_sglang() -> None:
    assert value_of(command(), "--max-total-tokens") == "16384"
    assert "--max-total-tokens" not in command(engine=EngineConfig(max_total_tokens=None))


@pytest.mark.parametrize("flag", ["--tp-size", "tp_size", "", "a b"])
def test_what_is_no_flag_is_refused(flag: str) -> None:
    with pytest.raises(ValidationError, match="no flag of SGLang"):
        SglangConfig(flags={flag: 1})


def test_keys_are_in_the_settings_and_nowhere_else() -> None:
    settings = json.loads(secret_settings(api_key="alpha", admin_key="beta"))
    assert settings == {"api-key": "alpha", "admin-api-key": "beta"}


def test_progress_is_read_from_the_metrics_of_all_ranks() -> None:
    metrics = (
        "# HELP sglang:num_running_reqs The number of running requests\n"
        'sglang:num_running_reqs{model_name="a b",dp_rank="0"} 3.0\n'
        'sglang:num_running_reqs{model_name="a b",dp_rank="1"} 2.0\n'
        'sglang:num_queue_reqs{dp_rank="0"} 1.0\n'
        'sglang:generation_tokens_total{model_name="a b"} 1.5e+03\n'
    )
    assert read_progress(metrics) == {
        "running": 5,
        "queued": 1,
        "tokens_generated": 1500,
    }
    assert read_progress("")["tokens_generated"] == 0
