"""Where the engine gets its grammars: kept ones at once, others when they have been compiled."""

from __future__ import annotations

import logging
import queue
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field

from engine_service.refusal import Refusal
from engine_service.structured_output.grammar import Grammar, GrammarCompiler, refused
from engine_service.structured_output.large_stack import start_large_stack_thread
from shared.identifiers import RequestId
from shared.sampling import StructuredOutput

logger = logging.getLogger(__name__)

NUM_WORKERS = 2  # so that one slow grammar does not hold up all others
COMPILE_TIMEOUT_S = 10.0  # from the order, time in the queue included
MAX_KEPT = 256
MAX_KEPT_BYTES = 2 * 1024 * 1024  # of forms; what they become was measured at up to 200 times as much


@dataclass(slots=True, eq=False)
class _Job:
    """One form to be compiled, for all who wait for it."""

    form: StructuredOutput
    deadlines_s: dict[RequestId, float] = field(default_factory=dict)
    has_begun: bool = False  # set by a worker, read only to word a refusal
    is_unwanted: bool = False  # set by the desk; a worker that sees it in time skips the job
    result: Grammar | Refusal | None = None


class GrammarDesk:
    """Orders, workers and kept grammars. All methods are for the thread that steps.

    A grammar is compiled once for all who want it meanwhile. What was refused is kept like what was
    compiled, lest a bad form that comes again and again occupies the workers. A worker that never
    returns is lost; when all are, every new form is refused after COMPILE_TIMEOUT_S.
    """

    def __init__(
        self,
        compiler: GrammarCompiler,
        *,
        compile_timeout_s: float = COMPILE_TIMEOUT_S,
        num_workers: int = NUM_WORKERS,
    ) -> None:
        self._compiler = compiler
        self._compile_timeout_s = compile_timeout_s
        self._num_workers = num_workers
        self._has_workers = False
        self._to_do: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._done: queue.SimpleQueue[_Job] = queue.SimpleQueue()
        self._jobs: dict[StructuredOutput, _Job] = {}
        self._job_of: dict[RequestId, _Job] = {}
        self._kept: OrderedDict[StructuredOutput, Grammar | Refusal] = OrderedDict()
        self._num_kept_bytes = 0
        self._wake: Callable[[], None] = lambda: None

    def wake_with(self, wake: Callable[[], None]) -> None:
        """`wake` is called, by a worker, whenever `take_ready` has something new."""
        self._wake = wake

    def find(self, form: StructuredOutput) -> Grammar | None:
        """The grammar, if it is there. Raises Refusal if the form is known to be bad."""
        kept = self._kept.get(form)
        if kept is None:
            return None
        self._kept.move_to_end(form)
        if isinstance(kept, Refusal):
            raise Refusal(kept.code, kept.message, kept.param)  # not the kept one: tracebacks add up in it
        return kept

    def order(self, request_id: RequestId, form: StructuredOutput, now_s: float) -> None:
        """Has the form compiled; `take_ready` tells how that went."""
        job = self._jobs.get(form)
        if job is None or job.is_unwanted:
            job = self._jobs[form] = _Job(form)
            self._start_workers()
            self._to_do.put(job)
        job.deadlines_s[request_id] = now_s + self._compile_timeout_s
        self._job_of[request_id] = job

    def cancel(self, request_id: RequestId) -> None:
        """The request has ended. Harmless for one that waits for nothing."""
        job = self._job_of.pop(request_id, None)
        if job is not None:
            del job.deadlines_s[request_id]
            job.is_unwanted = not job.deadlines_s and not job.has_begun

    def take_ready(self, now_s: float) -> list[tuple[RequestId, Grammar | Refusal]]:
        """Requests whose wait is over, in the order in which they came for each form."""
        if not self._jobs:
            return []
        ready: list[tuple[RequestId, Grammar | Refusal]] = []
        while not self._done.empty():  # the stepping thread alone takes from it
            job = self._done.get()
            if self._jobs.get(job.form) is job:
                del self._jobs[job.form]
            if job.result is not None:
                self._keep(job.form, job.result)
                ready += [(request_id, job.result) for request_id in job.deadlines_s]
        for job in self._jobs.values():
            ready += [
                (request_id, self._too_late(job))
                for request_id, deadline_s in job.deadlines_s.items()
                if deadline_s <= now_s
            ]
        for request_id, _ in ready:
            self.cancel(request_id)
        return ready

    def close(self) -> None:
        """Ends the workers, as soon as they have finished what they are at."""
        for _ in range(self._num_workers if self._has_workers else 0):
            self._to_do.put(None)
        self._compiler.close()

    def _too_late(self, job: _Job) -> Refusal:
        if job.has_begun:
            return refused(f"the {job.form.kind} was not compiled within {self._compile_timeout_s:g} s")
        return Refusal("queue_full", "too many grammars wait to be compiled")

    def _keep(self, form: StructuredOutput, result: Grammar | Refusal) -> None:
        if isinstance(result, Refusal) and result.code != "invalid_request":
            return  # not the form's fault: it may go well the next time
        self._kept[form] = result
        self._num_kept_bytes += len(form.text)
        while len(self._kept) > MAX_KEPT or self._num_kept_bytes > MAX_KEPT_BYTES:
            oldest, _ = self._kept.popitem(last=False)
            self._num_kept_bytes -= len(oldest.text)

    def _start_workers(self) -> None:
        if not self._has_workers:
            self._has_workers = True
            for number in range(self._num_workers):
                start_large_stack_thread(self._work, f"grammar-{number}")

    def _work(self) -> None:
        while (job := self._to_do.get()) is not None:
            if not job.is_unwanted:
                job.has_begun = True
                job.result = self._compile(job.form)
            self._done.put(job)
            self._wake()
            del job  # lest the last grammar lives as long as this thread waits

    def _compile(self, form: StructuredOutput) -> Grammar | Refusal:
        try:
            return self._compiler.compile(form)
        except Refusal as refusal:
            return refusal
        except BaseException as error:  # a panic of the library is no Exception; the worker has to go on
            logger.exception("a grammar could not be compiled")
            return Refusal("internal_error", f"the {form.kind} could not be compiled: {type(error).__name__}")
