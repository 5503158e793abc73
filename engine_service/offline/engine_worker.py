"""An engine in a thread of this process, for requests of any other thread."""

from __future__ import annotations

import logging
import os
import queue
import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future

from engine_service.compute_thread import ComputeThread
from engine_service.engine import Engine
from engine_service.main import load_served_model
from engine_service.offline.failures import EngineFailedError
from engine_service.offline.offline_request import OfflineRequest
from engine_service.refusal import Refusal
from engine_service.served_model import build_engine, overlaps_steps
from engine_service.step_execution import OverlappedExecution
from shared.config import ModelConfig
from shared.identifiers import RequestId
from shared.messages import ModelCard, SequenceUpdate, Submit
from shared.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

_GRAMMAR_CHECK_S = 0.1  # the time limits of grammars are looked at in steps; this often when there are none
_END_TIMEOUT_S = 30.0  # for the step that is being computed


class EngineWorker:
    """Owns the engine: it is made, used and closed in the compute thread, as the service does it.

    Requests are run in the order in which they were submitted, all that fit at once. Those that the
    engine's queue has no room for are kept here. After `close`, or a step that failed, every request
    that had not ended has a `failure`.
    """

    def __init__(self, config: ModelConfig) -> None:
        """Loads the model. Raises ConfigError."""
        self._pid = os.getpid()
        self._thread = ComputeThread("engine")
        self._commands: queue.SimpleQueue[Callable[[_Desk], None]] = queue.SimpleQueue()
        self._lock = threading.Lock()  # nothing is submitted to a desk that has closed
        self._ended_by: BaseException | None = None
        ready: Future[tuple[ModelCard, Tokenizer]] = Future()
        # One job from the loading to the end: the model is a local of it, and so is gone when it is done.
        # Freed later, by a thread that nobody waits for, it could meet the end of the interpreter.
        self._thread.start(lambda: self._run(config, ready))
        self._thread.close()
        try:
            self.card, self.tokenizer = ready.result()
        except BaseException:  # Ctrl-C while it loads
            self._commands.put(lambda desk: desk.close())
            raise

    def submit(self, requests: Sequence[OfflineRequest]) -> None:
        """Raises EngineFailedError."""
        if os.getpid() != self._pid:
            raise EngineFailedError("the engine stayed in the process that made it: make one after a fork")
        with self._lock:
            if self._ended_by is not None:
                raise EngineFailedError(f"the engine has ended: {self._ended_by}") from self._ended_by
            self._commands.put(lambda desk: desk.accept(requests))

    def abort(self, requests: Sequence[OfflineRequest]) -> None:
        """Ends those that have not ended, with `finish_reason` "abort"; returns at once."""
        self._commands.put(lambda desk: desk.abort(requests))

    def close(self) -> None:
        """Ends everything. Idempotent; waits for the step that is being computed."""
        self._commands.put(lambda desk: desk.close())
        self._thread.join(_END_TIMEOUT_S)  # the garbage collector may call this in that very thread

    def _run(self, config: ModelConfig, ready: Future[tuple[ModelCard, Tokenizer]]) -> None:
        compute = ComputeThread() if overlaps_steps(config) else None
        try:
            self._load_and_serve(config, ready, compute)
        finally:
            if compute is not None:
                compute.close()
                compute.join(_END_TIMEOUT_S)

    def _load_and_serve(
        self,
        config: ModelConfig,
        ready: Future[tuple[ModelCard, Tokenizer]],
        compute: ComputeThread | None,
    ) -> None:
        try:
            served = compute.call(lambda: load_served_model(config)) if compute else load_served_model(config)
            execution = OverlappedExecution(compute) if compute else None
            desk = _Desk(build_engine(config, served, execution=execution))
            ready.set_result((served.card, Tokenizer(served.text_bundle)))
        except BaseException as error:  # belongs to whoever makes the worker
            ready.set_exception(error)
            return
        desk.engine.wake_with(lambda: self._commands.put(lambda _: None))
        reason: BaseException = EngineFailedError("it was shut down")
        try:
            while not desk.is_closed:
                for command in self._take_commands(desk):
                    command(desk)
                desk.step()
        except BaseException as error:  # whatever failed in a step: those who wait are told
            logger.exception("the engine failed")
            reason = error.with_traceback(None)  # lest its frames keep the model
        with self._lock:
            self._ended_by = reason
        desk.close()
        while not self._commands.empty():
            self._commands.get()(desk)  # what was submitted meanwhile fails with the others
        desk.fail_all(reason)
        desk.engine.close()

    def _take_commands(self, desk: _Desk) -> Iterable[Callable[[_Desk], None]]:
        """All that have come; waits for one while there is nothing to compute."""
        if not desk.has_work or desk.engine.only_awaits_grammars:
            try:
                yield self._commands.get(timeout=_GRAMMAR_CHECK_S if desk.has_work else None)
            except queue.Empty:
                return
        while not self._commands.empty():  # this thread is the only one that takes
            yield self._commands.get()


class _Desk:
    """The engine and who waits for what; all of it in the compute thread."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.is_closed = False
        self._backlog: deque[Submit] = deque()  # not yet in the engine, whose queue is bounded
        self._request_of: dict[RequestId, OfflineRequest] = {}  # of sequences that have not ended

    @property
    def has_work(self) -> bool:
        return self.engine.has_work or bool(self._backlog)

    def accept(self, requests: Iterable[OfflineRequest]) -> None:
        for request in requests:
            for request_id, continuation in request.continuations.items():
                self._request_of[request_id] = request
                self._backlog.append(continuation.submit)

    def abort(self, requests: Iterable[OfflineRequest]) -> None:
        for request in requests:
            if unfinished := request.give_up():
                self._end(unfinished)
                request.on_change(request)

    def close(self) -> None:
        """The engine is not touched any more."""
        self.is_closed = True

    def step(self) -> None:
        if self.is_closed:
            return
        self._feed()
        if not self.engine.has_work:
            return
        outcome = self.engine.step()
        changed: dict[int, OfflineRequest] = {}
        for request_id, refusal in outcome.refusals:
            self._refuse(request_id, refusal)
        for update in outcome.updates:
            if (request := self._request_of.get(update.request_id)) is not None:
                self._apply(request, update)
                changed[id(request)] = request
        for request in changed.values():
            request.on_change(request)

    def fail_all(self, reason: BaseException) -> None:
        requests = {id(request): request for request in self._request_of.values()}
        for request in requests.values():
            self._end(request.give_up("the engine has ended"))
            request.failure = reason
            request.on_change(request)

    def _apply(self, request: OfflineRequest, update: SequenceUpdate) -> None:
        if request.apply(update):
            self.engine.abort(update.request_id)
        if request.continuations[update.request_id].finish_reason is not None:
            del self._request_of[update.request_id]

    def _feed(self) -> None:
        """Hands over what the engine's queue has room for."""
        while self._backlog:
            submit = self._backlog[0]
            if submit.request_id in self._request_of:  # else it was aborted
                try:
                    self.engine.add(submit)
                except Refusal as refusal:
                    if refusal.code == "queue_full":
                        return
                    self._refuse(submit.request_id, refusal)
            self._backlog.popleft()

    def _refuse(self, request_id: RequestId, refusal: Refusal) -> None:
        """The whole request fails with one of its sequences, since they differ in the seed only."""
        request = self._request_of.get(request_id)
        if request is not None:
            self._end(request.give_up(refusal.message))
            request.on_change(request)

    def _end(self, request_ids: Iterable[RequestId]) -> None:
        for request_id in request_ids:
            self._request_of.pop(request_id, None)
            if not self.is_closed:  # else the engine goes away as a whole, and may be broken
                self.engine.abort(request_id)
