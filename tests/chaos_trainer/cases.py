"""What is done to the nodes of a job. Pure: knows no process."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass

from tests.chaos_trainer.faults import RECOVERY, Fault, Kind, Place, Where, num_losses

FOR_A_MOMENT_S = 0.4  # a node that stops for less than its lease is not lost
FOR_LONG_S = 1.6  # longer than that


@dataclass(frozen=True, slots=True, kw_only=True)
class Act:
    """Something from outside: a node begins (again)."""

    node: str
    step: int = -1
    """As soon as some node has applied this one ..."""
    generation: int = 0
    """... and some node trains in this one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A job, and what becomes of its nodes."""

    name: str
    faults: tuple[Fault, ...] = ()
    starts: tuple[Act, ...] = ()
    """Beside those at the beginning."""
    nodes: int = 5
    """At the beginning: n0, n1, ..."""
    gpus_per_node: int = 1
    """Processes of each node."""
    adapted: bool = False
    """Whether the llm is one of Hugging Face's transformers, with an embedding that is its head too."""
    microbatches: int = 2
    """Half of those of a step: there are no more pipelines than microbatches."""
    max_failures: int = 1
    on_loss: str = "rebuild"
    computes_once: bool = False
    """Whether no node begins a sample of a step twice."""
    steps: int = 5
    evaluate_every: int | None = None
    """Steps from one evaluation of the validation set to the next; None: there is none."""
    recovers: bool = True
    """Else all nodes end by saying that they cannot go on."""
    is_whole: bool = True
    """Else a part of the model is lost, and what is left was saved."""

    @property
    def strikes_services(self) -> bool:
        """Which other cases may need just then."""
        return any(fault.leader for fault in self.faults)

    @property
    def allowed_replays(self) -> int:
        """Steps that may be begun again, in all."""
        return num_losses(self.faults)


# Where nodes are, of five: the encoder and two stages of the LLM beside the encoder and one.
LONG = [Where(pipeline=0, unit="encoder"), Where(pipeline=0, unit="llm"), Where(pipeline=0, unit="llm", stage=-1)]
SHORT = [Where(pipeline=1, unit="encoder"), Where(pipeline=1, unit="llm")]
IN_STEP = {
    Place.FORWARD: [1, 2],
    Place.BACKWARD: [1, 2],
    Place.SEND: [1, 2],
    Place.RECEIVE: [1, 2],
    Place.GRADIENTS: [1],
    Place.VOTE: [1],
    Place.VOTING: [1],
    Place.UPDATE: [1],
    Place.UPDATED: [1],
    Place.COMPARE: [1],
}
"""Places of a step that every node comes to, and how often it is struck there."""


def cases() -> list[Case]:
    """All, in order: the quick ones last."""
    return [
        *_in_steps(),
        *_in_recoveries(),
        *_returns(),
        *_joins(),
        *_two_at_once(),
        *_departures(),
        *_in_evaluations(),
        *_with_the_leader(),
        *_rerouted(),
        *_to_the_end(),
        *_while_saving(),
        *_in_rescues(),
        *_of_two_processes(),
        *_adapted(),
        many_generations(25),
    ]


def _kill(place: Place, where: Where, **fields: object) -> Fault:
    return Fault(place=place, where=where, **fields)  # type: ignore[arg-type]


def _hold(step: int, generation: int = 1) -> Fault:
    """The step waits until a node has joined."""
    return Fault(kind=Kind.HOLD, place=Place.BEGIN, where=Where(rank=0), step=step, generation=generation)


def _in_steps() -> Iterator[Case]:
    for place, occurrences in IN_STEP.items():
        for number, where in enumerate(LONG + SHORT):
            fault = _kill(place, where, occurrence=occurrences[number % len(occurrences)])
            yield Case(name=str(fault), faults=(fault,), steps=4)
    for where in (LONG[0], SHORT[0]):
        for occurrence in (1, 2):
            fault = _kill(Place.BROKER, where, occurrence=occurrence)
            yield Case(name=str(fault), faults=(fault,))
    for place in (Place.COMMIT, Place.COMMITTED):
        fault = _kill(place, Where(rank=0))
        yield Case(name=str(fault), faults=(fault,))
    for step in (0, 3):
        for place in (Place.BACKWARD, Place.UPDATED):
            fault = _kill(place, LONG[2], step=step)
            yield Case(name=str(fault), faults=(fault,))


def _in_recoveries() -> Iterator[Case]:
    """A second one is lost while the others recover from the first; there are two failures to survive."""
    for place in RECOVERY:
        for where in [Where()] if place == Place.MOVING else [Where(rank=0), Where(pipeline=0, unit="llm", stage=-1)]:
            first = _kill(Place.GRADIENTS, Where(pipeline=1, unit="llm"))
            second = _kill(place, where, generation=2)
            yield Case(name=f"{second}", faults=(first, second), nodes=8, max_failures=2, steps=4)
        hangs = Fault(kind=Kind.STOP, place=place, where=Where() if place == Place.MOVING else Where(rank=2), generation=2)
        yield Case(name=f"{hangs}", faults=(first, hangs), nodes=8, max_failures=2, steps=4)


def _returns() -> Iterator[Case]:
    for place in (Place.FORWARD, Place.VOTING, Place.UPDATE):
        for where in (LONG[1], Where(rank=0)):
            for lasts_s in (FOR_A_MOMENT_S, FOR_LONG_S):
                fault = Fault(kind=Kind.STOP, place=place, where=where, lasts_s=lasts_s)
                holds = [_hold(3, generation=2)] if fault.is_loss else []
                yield Case(name=str(fault), faults=(fault, *holds), steps=5)
    hangs = dict.fromkeys((Place.BACKWARD, Place.SEND, Place.RECEIVE, Place.GRADIENTS, Place.VOTE, Place.UPDATED), LONG[2])
    for place, where in (hangs | {Place.BROKER: LONG[0], Place.COMMIT: Where(rank=0)}).items():
        for_good = Fault(kind=Kind.STOP, place=place, where=where)
        yield Case(name=str(for_good), faults=(for_good,))
    fault = _kill(Place.BACKWARD, Where(node="n1"))
    faults, starts = (fault, _hold(3, generation=2)), (Act(node="n1", step=2),)
    yield Case(name=f"{fault}, back again", faults=faults, starts=starts, steps=5)
    yield from _missed()
    yield from _disconnected()
    slow = Fault(kind=Kind.STOP, place=Place.VOTING, where=Where(node="n2"), lasts_s=FOR_A_MOMENT_S)
    fault = _kill(Place.UPDATED, Where(node="n4"))
    yield Case(name=f"{slow}, {fault}", faults=(slow, fault))


def _missed() -> Iterator[Case]:
    """Not all see the outcome of the vote on a step."""

    def miss(*ranks: int) -> tuple[Fault, ...]:
        return tuple(Fault(kind=Kind.MISS, place=Place.VOTED, where=Where(rank=rank)) for rank in ranks)

    lost = _kill(Place.UPDATED, Where(rank=4))
    yield Case(name="one misses the outcome, another one is lost", faults=(*miss(1), lost))
    yield Case(name="only the lost one sees the outcome", faults=(*miss(0, 1, 2, 3), lost))
    faults = (*miss(1, 2, 3, 4), _kill(Place.UPDATED, Where(rank=0)))
    yield Case(name="only the first node sees the outcome, and is lost before it commits", faults=faults)
    for place in (Place.AGREE, Place.MOVE, Place.BARRIER):
        faults = (*miss(0, 1, 2, 4, 5, 6), _kill(Place.UPDATED, Where(rank=7)), _kill(place, Where(rank=3), generation=2))
        yield Case(name=f"only one sees the outcome and is lost at {place}", faults=faults, nodes=8, max_failures=2)


def _disconnected() -> Iterator[Case]:
    """After the last step, before all say that they have applied it: nobody would notice by a message that does not come."""
    for where in (Where(rank=0), Where(rank=3)):
        fault = Fault(kind=Kind.CUT, place=Place.UPDATED, where=where, step=4)
        yield Case(name=str(fault), faults=(fault,))


def _joins() -> Iterator[Case]:
    starts = (Act(node="n5", step=1), Act(node="n6", generation=2))
    yield Case(name="two nodes join", faults=(_hold(2), _hold(4, generation=2)), starts=starts, steps=6)
    for place in RECOVERY:
        for where in [Where()] if place == Place.MOVING else [Where(node="n5"), Where(node="n1")]:
            fault = _kill(place, where, generation=2)
            yield Case(name=f"{fault}, a join", faults=(fault, _hold(2)), starts=(Act(node="n5", step=0),))
        hangs = Fault(kind=Kind.STOP, place=place, where=Where() if place == Place.MOVING else Where(node="n5"), generation=2)
        yield Case(name=f"{hangs}, a join", faults=(hangs, _hold(2)), starts=(Act(node="n5", step=0),))
    fault = _kill(Place.BACKWARD, LONG[0])
    faults = (fault, _hold(2, generation=2), _hold(4, generation=3))
    starts = (Act(node="n5", generation=2), Act(node="n6", generation=3))
    yield Case(name=f"{fault}, two join", faults=faults, starts=starts, steps=6)


def _two_at_once() -> Iterator[Case]:
    for pipelines in ((0, 1), (2, 2), (1, 3)):
        for place in (Place.GRADIENTS, Place.VOTE, Place.UPDATED):  # of a microbatch each: it may be empty
            wheres = [Where(pipeline=pipeline, unit=unit) for pipeline, unit in zip(pipelines, ("encoder", "llm"), strict=True)]
            faults = tuple(_kill(place, where) for where in wheres)
            yield Case(name=" and ".join(map(str, faults)), faults=faults, nodes=8, max_failures=2, steps=4)


def _departures() -> Iterator[Case]:
    for place in (Place.FORWARD, Place.VOTE, Place.UPDATED):
        for rank in (0, 3):
            fault = Fault(kind=Kind.LEAVE, place=place, where=Where(rank=rank))
            yield Case(name=str(fault), faults=(fault,))
    leaver = Fault(kind=Kind.LEAVE, place=Place.FORWARD, where=Where(node="n1"))
    fault = _kill(Place.BACKWARD, Where(node="n0"), step=3, generation=2)
    yield Case(name=f"{leaver}, {fault}", faults=(leaver, fault), nodes=6, steps=8)


def _in_evaluations() -> Iterator[Case]:
    for where in (Where(rank=0), LONG[2], SHORT[0]):
        fault = _kill(Place.EVALUATE, where, step=1, occurrence=2)
        yield Case(name=str(fault), faults=(fault,), evaluate_every=2, steps=4)
    hangs = Fault(kind=Kind.STOP, place=Place.EVALUATE, where=LONG[1], step=1, occurrence=2)
    yield Case(name=str(hangs), faults=(hangs,), evaluate_every=2, steps=4)


def _with_the_leader() -> Iterator[Case]:
    for place in (Place.BACKWARD, Place.VOTING, Place.UPDATED, Place.COMMIT):
        fault = _kill(place, Where(rank=0), leader=True)
        yield Case(name=str(fault), faults=(fault,))


def _of_two_processes() -> Iterator[Case]:
    """Nodes of two processes, each a stage, in a pipeline of two nodes and one of one. With a process, its node is lost."""

    def case(*faults: Fault, words: str = "", **fields: object) -> Case:
        name = f"{' then '.join(map(str, faults))}{words}, nodes of two processes"
        options = {"faults": faults, "nodes": 3, "gpus_per_node": 2, "microbatches": 1, "steps": 4} | fields
        return Case(name=name, **options)  # type: ignore[arg-type]

    for number, place in enumerate(IN_STEP):
        for where in (LONG[1:] + SHORT)[number % 2 :: 2]:
            yield case(_kill(place, where))
    for place in (Place.COMMIT, Place.COMMITTED):
        yield case(_kill(place, Where(rank=0)))
    first = _kill(Place.GRADIENTS, Where(pipeline=1, unit="llm"))
    for place in RECOVERY:
        where = Where() if place == Place.MOVING else Where(pipeline=0, unit="llm", stage=-1)
        yield case(first, _kill(place, where, generation=2), nodes=5, max_failures=2, microbatches=2)
    for lasts_s in (FOR_A_MOMENT_S, FOR_LONG_S, None):
        yield case(Fault(kind=Kind.STOP, place=Place.VOTING, where=LONG[1], lasts_s=lasts_s))
    joins = {"starts": (Act(node="n3", step=1),), "steps": 5}
    yield case(_hold(2), words=", a join", **joins)
    yield case(_kill(Place.BARRIER, Where(node="n3"), generation=2), _hold(2), words=", a join", **joins)
    back = {"starts": (Act(node="n1", step=2),), "steps": 5}
    yield case(_kill(Place.BACKWARD, Where(node="n1")), _hold(3, generation=2), words=", back again", **back)
    for rank in (0, 3):
        yield case(Fault(kind=Kind.LEAVE, place=Place.FORWARD, where=Where(rank=rank)))
    yield case(Fault(kind=Kind.CUT, place=Place.UPDATED, where=Where(rank=3), step=3))
    yield case(_kill(Place.VOTE, SHORT[1], leader=True))
    rerouted = {"on_loss": "reroute", "computes_once": True, "nodes": 4, "max_failures": 2, "microbatches": 2}
    yield case(_kill(Place.BACKWARD, Where(pipeline=1, unit="llm")), words=", rerouted", **rerouted)
    for place in (Place.SAVE, Place.SAVED):
        yield case(_kill(place, LONG[2]))
    second = _kill(Place.UPDATED, Where(node="n1"), step=3, generation=2)
    yield case(_kill(Place.FORWARD, Where(node="n2")), second, recovers=False)


def _adapted() -> Iterator[Case]:
    """First and last stage of the llm both have its embedding; a node that joins gets all weights from others."""
    for fault in (_kill(Place.BACKWARD, LONG[2]), _kill(Place.UPDATED, LONG[1])):
        yield Case(name=f"{fault}, an llm of transformers", faults=(fault,), adapted=True, steps=4)
    joins = (Act(node="n5", step=1),)
    yield Case(name="a join, an llm of transformers", faults=(_hold(2),), starts=joins, adapted=True)


def _rerouted() -> Iterator[Case]:
    """The pipelines that are whole finish their share, and do the other one's microbatches. Of seven nodes there are 3+2+2."""

    def case(*faults: Fault, nodes: int = 7, computes_once: bool = False, starts: tuple[Act, ...] = ()) -> Case:
        name = f"{' then '.join(str(fault) for fault in faults if fault.is_loss)}, rerouted{', a join' if starts else ''}"
        options = {"on_loss": "reroute", "computes_once": computes_once, "starts": starts}
        return Case(name=name, faults=faults, nodes=nodes, max_failures=2, **options)  # type: ignore[arg-type]

    second, third = (Where(pipeline=number, unit="llm") for number in (1, 2))
    wheres = {Place.FORWARD: second, Place.BACKWARD: third, Place.RECEIVE: LONG[0], Place.SEND: Where(rank=0)}
    for place, where in wheres.items():
        yield case(_kill(place, where), computes_once=True)
    yield case(Fault(kind=Kind.STOP, place=Place.BACKWARD, where=second), computes_once=True)
    yield case(_kill(Place.BACKWARD, second, leader=True))  # who looks for a new one is not told in time
    yield case(_kill(Place.BACKWARD, second, step=4), computes_once=True)
    joins = (Act(node="n7", generation=3),)
    yield case(_kill(Place.BACKWARD, third), _hold(4, generation=3), computes_once=True, starts=joins)
    for place in (Place.GRADIENTS, Place.VOTE, Place.VOTING, Place.UPDATE, Place.UPDATED):
        yield case(_kill(place, third))
    first = _kill(Place.BACKWARD, second)
    for place in (Place.CONNECT, Place.AGREE, Place.BARRIER, Place.GROUPS):
        yield case(first, _kill(place, Where(rank=0), generation=2), nodes=8)
    for place in (Place.FORWARD, Place.BACKWARD, Place.GRADIENTS, Place.VOTING):
        yield case(first, _kill(place, Where(rank=0), generation=2), nodes=8)


def _to_the_end() -> Iterator[Case]:
    for place in (Place.FORWARD, Place.VOTING, Place.UPDATED):
        faults = (_kill(place, Where(node="n4")), _kill(place, Where(node="n3"), step=3, generation=2))
        yield Case(name=" then ".join(map(str, faults)), faults=faults, recovers=False)
    faults = (_kill(Place.FORWARD, Where(node="n4")), _kill(Place.COMMIT, Where(rank=0), step=3, generation=2))
    yield Case(name=" then ".join(map(str, faults)), faults=faults, recovers=False)


def _while_saving() -> Iterator[Case]:
    """After the last step."""
    for place in (Place.SAVE, Place.SAVED):
        for where in (Where(rank=0), LONG[2]):
            for kind in (Kind.KILL, Kind.STOP):
                fault = Fault(kind=kind, place=place, where=where)
                yield Case(name=str(fault), faults=(fault,))
    for fault in (
        _kill(Place.PUBLISH, Where(rank=0)),
        Fault(kind=Kind.STOP, place=Place.PUBLISH, where=Where(rank=0)),
        Fault(kind=Kind.STOP, place=Place.PUBLISH, where=Where(rank=0), lasts_s=FOR_LONG_S),
        Fault(kind=Kind.STOP, place=Place.SAVE, where=SHORT[0], lasts_s=FOR_LONG_S),
        Fault(kind=Kind.STOP, place=Place.SAVE, where=SHORT[1], lasts_s=FOR_A_MOMENT_S),
        _kill(Place.SAVE, Where(rank=0), leader=True),
    ):
        yield Case(name=str(fault), faults=(fault,))
    for place in (Place.CONNECT, Place.AGREE, Place.SAVED):
        faults = (_kill(Place.SAVE, Where(pipeline=1, unit="llm")), _kill(place, Where(rank=0), generation=2))
        yield Case(name=" then ".join(map(str, faults)), faults=faults, nodes=8, max_failures=2)


def _in_rescues() -> Iterator[Case]:
    """Too few are left, and another one is lost while they save what they have."""
    of_first = _kill(Place.FORWARD, SHORT[1]), _kill(Place.VOTE, SHORT[1], step=3, generation=2)
    for place in (Place.CONNECT, Place.AGREE, Place.SAVE, Place.SAVED):
        fault = _kill(place, SHORT[0], generation=3)
        yield Case(name=f"{fault}, a rescue", faults=(*of_first, fault), recovers=False)
    fault = Fault(kind=Kind.STOP, place=Place.SAVE, where=SHORT[0], generation=3)
    yield Case(name=f"{fault}, a rescue", faults=(*of_first, fault), recovers=False)
    fault = _kill(Place.SAVE, LONG[1], generation=3)
    yield Case(name=f"{fault}, a rescue without its layers", faults=(*of_first, fault), recovers=False, is_whole=False)
    first, second = (_kill(Place.FORWARD, Where(pipeline=pipeline, unit="encoder")) for pipeline in (0, 1))
    yield Case(name=f"{first} and {second}", faults=(first, second), nodes=6, recovers=False, is_whole=False)
    second = _kill(Place.AGREE, Where(pipeline=1, unit="encoder"), generation=2)
    yield Case(name=f"{second} with its layers", faults=(first, second), nodes=6, recovers=False, is_whole=False)


def many_generations(count: int) -> Case:
    """One node is lost in every generation of an odd number, and another one joins in the next. n0 lives through all."""
    num_losses = count // 2
    kills = [_kill(Place.BACKWARD, Where(node=f"n{k}"), step=None, generation=2 * k - 1) for k in range(1, num_losses + 1)]
    holds = [
        Fault(kind=Kind.HOLD, place=Place.BEGIN, where=Where(node="n0"), step=None, generation=2 * k)
        for k in range(1, num_losses + 1)
    ]
    starts = tuple(Act(node=f"n{4 + k}", generation=2 * k) for k in range(1, num_losses + 1))
    return Case(name=f"{count} generations", faults=(*kills, *holds), starts=starts, steps=num_losses + 4)


def shuffled(seed: int) -> list[Case]:
    """All, in an order of the seed: what one leaves behind meets another one."""
    found = cases()
    random.Random(seed).shuffle(found)
    return found
