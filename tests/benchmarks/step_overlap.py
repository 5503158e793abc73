"""What planning the next step beside the one that computes gains: steps per second with and without it.

    python -m tests.benchmarks.step_overlap            a device that computes for a fixed time
    python -m tests.benchmarks.step_overlap --model    the default model on this machine's cores

Both ways take turns in one run. The ceiling of the first table is a step that takes just the device's time.
"""

from __future__ import annotations

import argparse
import functools
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from engine_service.compute_thread import ComputeThread
from engine_service.engine import Engine
from engine_service.main import load_served_model
from engine_service.runner import Runner
from engine_service.served_model import ServedModel, build_engine
from engine_service.step_execution import OverlappedExecution
from shared.config import ModelConfig, default_model
from shared.identifiers import RequestId, TenantId
from shared.messages import Submit
from shared.sampling import SamplingParams
from tests.benchmarks.step_overhead import IdleRunner, make_engine

DEVICE_STEP_S = (0.002, 0.005, 0.02)
NUM_RUNNING = (64, 256)
NUM_STEPS = 60
NUM_ROUNDS = 5
MODEL_BATCHES = (1, 8, 32)
MODEL_STEPS = 20


class DeviceRunner(IdleRunner):
    """Waits, as a host does for a GPU."""

    def __init__(self, step_s: float) -> None:
        self._step_s = step_s

    def execute(self, step, await_history: Callable[[], None] = lambda: None):  # type: ignore[no-untyped-def]
        time.sleep(self._step_s)
        return super().execute(step, await_history)


def step_ms(engine: Engine, num_steps: int) -> float:
    engine.step()
    began = time.perf_counter()
    for _ in range(num_steps):
        engine.step()
        engine.load()
    return (time.perf_counter() - began) / num_steps * 1e3


@contextmanager
def device_engine(num_running: int, step_s: float, *, overlaps: bool) -> Iterator[Engine]:
    execution = OverlappedExecution(ComputeThread()) if overlaps else None
    engine = make_engine(num_running, 0, runner=DeviceRunner(step_s), execution=execution)
    yield engine
    engine.close()


def measure_device() -> None:
    print("| device, ms | running | one after the other, ms | overlapped, ms | gain |")
    print("|---:|---:|---:|---:|---:|")
    for step_s in DEVICE_STEP_S:
        for num_running in NUM_RUNNING:
            times: dict[bool, list[float]] = {False: [], True: []}
            for _ in range(NUM_ROUNDS):
                for overlaps, found in times.items():
                    with device_engine(num_running, step_s, overlaps=overlaps) as engine:
                        found.append(step_ms(engine, NUM_STEPS))
            plain, overlapped = (statistics.median(found) for found in times.values())
            print(
                f"| {step_s * 1e3:g} | {num_running} | {plain:.2f} | {overlapped:.2f} "
                f"| {plain / overlapped - 1:+.0%} |"
            )


def fill(engine: Engine, num_running: int) -> None:
    for number in range(num_running):
        sampling = SamplingParams(max_tokens=500, seed=number, temperature=0.8, ignore_eos=True)
        prompt = [(number * 37 + index) % 1000 + 100 for index in range(32)]
        engine.add(Submit(RequestId(str(number)), prompt, sampling, TenantId("bench")))
    while engine.load().num_waiting:
        engine.step()
    for _ in range(3):
        engine.step()


def measure_model() -> None:
    config: ModelConfig = default_model()
    compute = ComputeThread()
    served = compute.call(lambda: load_served_model(config))
    print("| running | one after the other, ms | overlapped, ms | gain |")
    print("|---:|---:|---:|---:|")
    for num_running in MODEL_BATCHES:
        times: dict[bool, list[float]] = {False: [], True: []}
        for _ in range(NUM_ROUNDS):
            inline = functools.partial(_model_step_ms, config, served, num_running, None)
            times[False].append(compute.call(inline))
            execution = OverlappedExecution(compute)
            times[True].append(_model_step_ms(config, served, num_running, execution))
        plain, overlapped = (statistics.median(found) for found in times.values())
        print(f"| {num_running} | {plain:.1f} | {overlapped:.1f} | {plain / overlapped - 1:+.1%} |")


def _model_step_ms(
    config: ModelConfig, served: ServedModel, num_running: int, execution: OverlappedExecution | None
) -> float:
    runner: Runner[object] = served.runner
    engine = build_engine(config, ServedModel(runner, served.card, served.text_bundle), execution=execution)
    fill(engine, num_running)
    found = step_ms(engine, MODEL_STEPS)
    for number in range(num_running):
        engine.abort(RequestId(str(number)))
    while engine.has_work:
        engine.step()
    engine.close()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", action="store_true", help="the default model, no waiting device")
    if parser.parse_args().model:
        measure_model()
    else:
        measure_device()


if __name__ == "__main__":
    main()
