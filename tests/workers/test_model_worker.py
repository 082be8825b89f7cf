"""Which requests a model worker answers, and what it makes of those that it does not know."""

from pathlib import Path
from typing import Any, cast

import msgspec
import pytest

from corral.workers.model.model_worker import ModelWorker
from corral.workers.streams.messages import OkReply, Ping, Shutdown
from tests.workers.master.trials import context_of, trial_of


class UnknownRequest(msgspec.Struct):
    """Stands for a request that a later version of the protocol adds."""


def test_only_a_shutdown_shuts_a_model_worker_down(tmp_path: Path) -> None:
    with context_of(*trial_of(tmp_path), "model_worker") as context:
        worker = ModelWorker(context)
        assert worker._answer_now(Ping(), {}) == OkReply()
        with pytest.raises(ValueError, match="UnknownRequest is not served"):
            worker._answer_now(cast(Any, UnknownRequest()), {})
        assert not context.stopping.is_set()
        worker._answer_now(Shutdown(reason="test"), {})
        assert context.stopping.is_set()
