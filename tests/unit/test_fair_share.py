"""Who is next: by class, by what a tenant was served, and by how long a sequence has waited."""

from __future__ import annotations

import random

from engine_service.fair_share import AGEING_S, FairShare
from engine_service.sequence import Sequence
from shared.identifiers import RequestId, TenantId
from shared.sampling import SamplingParams

INTERACTIVE, STANDARD, BATCH = 0, 1, 2


class World:
    """A queue in which every sequence is served whole as soon as it is its turn."""

    def __init__(self) -> None:
        self.now = 0.0
        self.policy = FairShare(lambda: self.now)
        self._num_made = 0

    def add(self, tenant: str, *, priority: int = STANDARD, prompt: int = 10, output: int = 10) -> Sequence:
        self._num_made += 1
        sequence = Sequence(
            request_id=RequestId(f"{tenant}-{self._num_made}"),
            token_ids=[1] * prompt,
            num_prompt_tokens=prompt,
            sampling=SamplingParams(max_tokens=output, seed=0),
            tenant=TenantId(tenant),
            priority=priority,
            arrival_s=self.now,
        )
        self.policy.add(sequence)
        return sequence

    def admit(self) -> Sequence:
        sequence = self.policy.head()
        assert sequence is not None
        self.policy.remove(sequence)
        self.policy.admitted(sequence)
        return sequence

    def serve(self) -> Sequence:
        sequence = self.admit()
        self.policy.generated(sequence, sequence.sampling.max_tokens)
        self.policy.ended(sequence)
        return sequence


def test_inside_a_tenant_the_first_to_come_is_the_first_served():
    world = World()
    made = [world.add("a") for _ in range(5)]
    assert [world.serve() for _ in range(5)] == made
    assert world.policy.head() is None
    assert len(world.policy) == 0


def test_a_tenant_that_sends_ten_times_as_much_gets_no_more():
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    rng = random.Random(seed)
    world = World()
    for _ in range(2000):
        world.add("loud", prompt=rng.randint(1, 200), output=rng.randint(1, 200))
    for _ in range(200):
        world.add("quiet", prompt=rng.randint(1, 200), output=rng.randint(1, 200))
    served = {TenantId("loud"): 0.0, TenantId("quiet"): 0.0}
    for _ in range(300):  # both are backlogged all the time
        sequence = world.serve()
        served[sequence.tenant] += sequence.num_prompt_tokens + 2 * sequence.sampling.max_tokens
    loud, quiet = served.values()
    assert abs(loud - quiet) < 0.1 * max(loud, quiet)


def test_a_tenant_that_returns_has_saved_up_no_credit():
    world = World()
    world.add("sleeper")
    world.serve()
    for _ in range(100):
        world.add("busy")
    for _ in range(50):
        world.serve()
    for _ in range(50):
        world.add("sleeper")
    next_ten = [world.serve().tenant for _ in range(10)]
    assert next_ten.count(TenantId("sleeper")) <= 6


def test_a_new_tenant_does_not_wait_behind_the_backlog_of_another():
    world = World()
    for _ in range(100):
        world.add("busy")
    for _ in range(10):
        world.serve()
    newcomer = world.add("new")
    assert newcomer in [world.serve() for _ in range(2)]


def test_a_higher_class_goes_first_whatever_its_tenant_was_served():
    world = World()
    for _ in range(20):
        world.add("a", priority=INTERACTIVE)
    for _ in range(20):
        world.serve()
    world.add("b", priority=BATCH)
    urgent = world.add("a", priority=INTERACTIVE)
    assert world.serve() is urgent


def test_nothing_starves():
    world = World()
    patient = world.add("batch", priority=BATCH)
    for second in range(int(3 * AGEING_S)):
        world.now = float(second)
        world.add("rush", priority=INTERACTIVE)
        world.add("rush", priority=INTERACTIVE)
        if world.serve() is patient:
            break
    else:
        raise AssertionError("the batch request was never served")
    assert world.now <= 2 * AGEING_S + 1


def test_the_victim_is_of_the_lowest_class_and_the_newest_of_it():
    world = World()
    running = [world.add("a", priority=p) for p in (BATCH, INTERACTIVE, BATCH, STANDARD)]
    assert world.policy.victim(running) is running[2]
    assert world.policy.victim(running[:2]) is running[0]


def test_a_sequence_that_yielded_often_is_spared_while_another_can_yield():
    world = World()
    tired, fresh = world.add("a", priority=BATCH), world.add("a", priority=STANDARD)
    tired.num_preemptions = 4
    assert world.policy.victim([fresh, tired]) is fresh
    assert world.policy.victim([tired]) is tired


def test_only_a_strictly_higher_class_pushes_somebody_out():
    world = World()
    batch = world.add("a", priority=BATCH)
    assert world.policy.yields_to(world.add("b", priority=INTERACTIVE), [batch]) is batch
    assert world.policy.yields_to(world.add("b", priority=BATCH), [batch]) is None
    batch.num_preemptions = 4
    assert world.policy.yields_to(world.add("b", priority=INTERACTIVE), [batch]) is None


def test_a_preempted_sequence_is_the_next_of_its_tenant_and_is_charged_once():
    world = World()
    first = world.add("a", prompt=100)
    world.add("a")
    assert world.admit() is first
    charged = world.policy.served(TenantId("a"))
    first.num_preemptions = 1
    world.policy.put_back(first)
    assert world.admit() is first
    assert world.policy.served(TenantId("a")) == charged
