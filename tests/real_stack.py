"""`headrace up` with the default model, beside a tiny embedding model and a tenant with a limit.

The fixture `real_stack` is one for the session, since its start takes seconds. Tests leave it idle and
complete.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from compose.run_directory import StackRecord, read_secrets, read_stack
from compose.temporary_stack import temporary_stack
from shared.config import DEFAULT_MODEL_NAME, DEFAULT_MODEL_SOURCE
from tests.stack import RunningStack

MODEL = DEFAULT_MODEL_NAME
EMBEDDER = "tiny-embedder"
ABSENT = "absent"  # a model that no engine serves
HASTY = "hasty"  # the tenant that may ask once a second
_CONFIGURATION = f"""\
[[models]]
name = "{MODEL}"
source = "{DEFAULT_MODEL_SOURCE}"
max_model_len = 2048
num_threads = 2  # else each of the two engines gets half of the cores

[[models]]
name = "{EMBEDDER}"
source = "%s"
runner = "pooling"
num_threads = 1

[[models]]
name = "{ABSENT}"
source = "fake:"
engines = 0

[[tenants]]
name = "default"

[[tenants]]
name = "{HASTY}"
requests_per_minute = 60
burst = 1
"""


class RealStack(RunningStack):
    """`key`: of a tenant without limits."""

    def __init__(self, record: StackRecord) -> None:
        self.run_directory = Path(record.run_dir)
        secrets = read_secrets(self.run_directory)
        assert secrets is not None, "a stack that runs has secrets"
        super().__init__(
            record.redis_url, record.namespace, pepper=secrets.pepper, admin_token=record.admin_token
        )
        self.url = record.url
        self.key = record.demo_key

    def engine_pid(self, model: str) -> int:
        """Of the model's only engine, as it runs now."""
        record = read_stack(self.run_directory)
        assert record is not None, "the stack runs until the end of the session"
        [pid] = (pid for engine_id, pid in record.pids.engines.items() if engine_id == f"{model}-0")
        return pid

    def count(self, name: str, model: str = MODEL) -> int:
        """What /metrics shows of the model's engine."""
        exposition = self.get("/metrics")[1].decode()
        pattern = rf'^{re.escape(name)}\{{[^}}]*model_name="{re.escape(model)}"[^}}]*\}} (\S+)$'
        [value] = re.findall(pattern, exposition, re.MULTILINE)
        return int(float(value))


@contextmanager
def running_real_stack(directory: Path) -> Iterator[RealStack]:
    """`directory`: for the files that it is made of."""
    from tests.models import write_tiny_bert  # here: torch takes seconds

    write_tiny_bert(directory / EMBEDDER)
    configuration = directory / "headrace.toml"
    configuration.write_text(_CONFIGURATION % (directory / EMBEDDER))
    with temporary_stack("--config", str(configuration)) as record:
        stack = RealStack(record)
        try:
            yield stack
        finally:
            stack.redis.close()
