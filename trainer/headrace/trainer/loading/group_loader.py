"""The loader of a process that shares its microbatches with others: one of them has the session, the others get what it gets.

Processes of a group call `open`, `has_next` and `commit`, and take steps and microbatches, alike and in the same order: each of
these is a collective of the group. Whatever error the one with the session meets is raised in all of them.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Self

import torch

from headrace.errors import ConflictError, UserError
from headrace.message_codec import rejection_message, rejection_value
from headrace.spec import JobSpec
from headrace.trainer.loading.buffers import BufferPool
from headrace.trainer.loading.group_channel import GroupChannel, Message
from headrace.trainer.loading.loader_state import LoaderState, Opened
from headrace.trainer.loading.packs import padding_token
from headrace.trainer.loading.parallel import Parallel
from headrace.trainer.loading.slices import Balanced, padded_to_slices, rows_of_slices, slice_of, targets_of_slices
from headrace.trainer.loading.statistics import LoaderStatistics
from headrace.trainer.loading.step_loader import StepLoader
from headrace.trainer.loading.steps import Microbatch, Step
from headrace.v1 import sessions_pb2

MOST_STATES = 16  # of which `load_newest_common` takes the newest that all have


class GroupLoader(StepLoader):
    """The loader of one process of a group, all of which get the microbatches of one data-parallel rank."""

    def __init__(
        self,
        job: str,
        parallel: Parallel,
        connect: Callable[[BufferPool | None], StepLoader],
        channel: GroupChannel | None = None,
    ) -> None:
        """`connect`: makes the loader with the session, in the process that has it, which packs microbatches into the pool's
        buffers, if there is one. `channel`: that of another loader of the group, which is not used meanwhile; None: its own."""
        super().__init__(job)
        self._job, self._parallel, self._connect = job, parallel, connect
        self._channel = channel or GroupChannel(parallel.group)
        self._borrows_channel = channel is not None
        self._source: StepLoader | None = None
        self._taken: dict[int, Step] = {}  # the source's steps that are not committed
        self._next_step = 0
        self._is_open = False
        self._data_wait_s = 0.0

    def _open(self, states: Sequence[LoaderState]) -> StepLoader:
        if self._is_open:
            return self
        common = self._meet(states)

        def begin() -> Message:
            source = self._source = self._source or self._connect(self._channel.buffers)
            if len(common) == 1:
                source.load_state_dict(common[0].to_dict())
            elif common:
                source.load_newest_common([state.to_dict() for state in common])
            source.open()
            state = LoaderState.of(source.state_dict(), self._job)
            vocabulary = source.vocabulary
            opened = sessions_pb2.OpenReply(
                spec_json=source.spec.to_json(), generation=source.generation, next_step=source.next_step, state=state.message()
            )
            opened.vocabulary.size, opened.vocabulary.image_token = vocabulary.size, vocabulary.image_token
            opened.vocabulary.audio_token = vocabulary.audio_token
            return Message(text=opened.SerializeToString(), numbers=[state.step is not None])

        message = self._channel.share(begin)
        opened = Opened.of(sessions_pb2.OpenReply.FromString(message.text), self._job, common)
        self.spec, self.vocabulary, self.generation = opened.spec, opened.vocabulary, opened.generation
        self._state, self._next_step = opened.state, opened.next_step
        self._is_open = True
        return self

    def _meet(self, states: Sequence[LoaderState]) -> Sequence[LoaderState]:
        """Meet the other processes of the group. Return those of `states` that all of them have; none to go on after the last
        commit. Raises UserError or ConflictError, in all of them, where they do not fit each other."""
        parallel = self._parallel
        steps = [state.step for state in states if state.step is not None][:MOST_STATES]
        mine = [parallel.dp_rank, parallel.dp_size, *parallel.cp, *parallel.pp, parallel.pad_to, len(steps)]
        of_all = self._channel.gather([*mine, *steps, *[-1] * (MOST_STATES - len(steps))])
        for what, at in {"dp_rank": 0, "dp_size": 1, "cp size": 3, "pp size": 5, "pad_to": 6}.items():
            if len(said := sorted({int(one[at]) for one in of_all})) > 1:
                raise UserError(
                    f"processes of one group have {what} {said[0]} and {said[1]}: all processes of `group` are of one "
                    "data-parallel rank, and differ in nothing but their ranks"
                )
        places = [(int(one[4]), int(one[2])) for one in of_all]
        if len({places.count((p, c)) for p in range(parallel.pp[1]) for c in range(parallel.cp[1])}) > 1:
            raise UserError(f"processes of one group have the (pp, cp) ranks {places}: each of these is in it equally often")
        first_stage = [rank for rank, (stage, _) in enumerate(places) if stage == 0]
        self._channel.sender = first_stage[0]
        if parallel.pp[1] > 1:
            self._channel.send_media_to(first_stage)
        self._channel.share_memory()
        had = [{int(step) for step in one[8 : 8 + int(one[7])]} for one in of_all]
        if any(had) and not (common := set.intersection(*had)):
            resumed = [" or ".join(map(str, sorted(one))) or "none" for one in had]
            raise ConflictError(
                f"processes of data-parallel rank {parallel.dp_rank} resume from different steps ({', '.join(resumed)}): "
                "load the same checkpoint in all of them"
            )
        return [state for state in states if any(had) and state.step in common]

    def close(self) -> None:
        if self._source is not None:
            self._source.close()
        if not self._borrows_channel:
            self._channel.close()

    @property
    def next_step(self) -> int:
        self.open()
        return self._next_step

    def has_next(self) -> bool:
        self.open()
        source = self._source

        def ask() -> Message:
            assert source is not None
            return Message(numbers=[source.has_next()])

        return bool(self._channel.share(ask).numbers[0])

    def _loader_of(self, spec: JobSpec) -> Self:
        def connect(_: BufferPool | None) -> StepLoader:
            assert self._source is not None
            return self._source.evaluation(spec)

        return type(self)(spec.name, self._parallel, connect, self._channel)

    def _end_session(self) -> None:
        self._is_open = False

    def __iter__(self) -> Iterator[Step]:
        self.open()
        steps = iter(self._source) if self._source is not None else iter(())
        while (step := self._next(steps)) is not None:
            self._handed_out = True
            self._next_step = step.index + 1
            yield step

    def _next(self, steps: Iterator[Step]) -> Step | None:
        """Return the next of the source's steps as this process gets it; None behind the last one."""

        def take() -> Message:
            if (step := next(steps, None)) is None:
                return Message()
            self._taken[step.index] = step
            return Message(text=step.totals().SerializeToString(), numbers=[step.num_microbatches])

        began_s = time.perf_counter()
        message = self._channel.share(take)
        if not message.numbers:
            return None
        totals = sessions_pb2.RankPlan.FromString(message.text)
        step = Step.of(totals, [])
        step.num_microbatches, step.started_s = message.numbers[0], began_s
        step._microbatches = self._microbatches(step)
        self._waited(step, began_s)
        return step

    def _microbatches(self, step: Step) -> Iterator[Microbatch]:
        source = self._taken.get(step.index)
        iterator = iter(source) if source is not None else iter(())
        num_rejected = 0

        def take() -> Message:
            nonlocal num_rejected
            assert source is not None
            microbatch = next(iterator)
            rejected = map(rejection_message, source.rejected[num_rejected:])
            num_rejected = len(source.rejected)
            return self._message(step.index, microbatch, sessions_pb2.CommitRequest(rejections=rejected))

        for number in range(1, step.num_microbatches + 1):
            began_s = time.perf_counter()
            message = self._channel.share(take)
            found = sessions_pb2.CommitRequest.FromString(message.text).rejections
            step.rejected.extend(map(rejection_value, found))
            microbatch = self._own(message)
            self._waited(step, began_s)
            step.consumed = number == step.num_microbatches
            yield microbatch

    def _message(self, step: int, microbatch: Microbatch, found: sessions_pb2.CommitRequest) -> Message:
        """Return what the others need of a microbatch: it is padded for its slices, whose targets are counted on the host."""
        parallel, data = self._parallel, microbatch.data
        size = parallel.cp[1]
        data = padded_to_slices(data, size, parallel.order, parallel.pad_to, padding_token(self.vocabulary))
        if size > 1 and isinstance(parallel.order, Balanced):
            data = parallel.order.with_mask(data, self.spec, self.vocabulary)
        targets = targets_of_slices(data, rows_of_slices(data, size, parallel.order)) if size > 1 else [data.num_targets]
        sources = microbatch._sources.tolist() if microbatch._sources is not None else []
        numbers = [microbatch.replica, microbatch.index, microbatch.is_filler, microbatch._sources is not None]
        return Message(text=found.SerializeToString(), numbers=[*numbers, *targets, *sources], data=data, step=step)

    def _own(self, message: Message) -> Microbatch:
        """Return the microbatch of a message as this process gets it: its slice of it."""
        parallel, data = self._parallel, message.data
        assert data is not None
        rank, size = parallel.cp
        replica, index, is_filler, has_sources, *others = message.numbers
        if size > 1:
            data = slice_of(data, rows_of_slices(data, size, parallel.order)[rank], others[rank])
        sources = torch.tensor(others[size:], dtype=torch.int64) if has_sources else None
        return Microbatch(replica=replica, index=index, is_filler=bool(is_filler), data=data, _sources=sources)

    def _waited(self, step: Step, since_s: float) -> None:
        waited_s = time.perf_counter() - since_s
        step.data_wait_s += waited_s
        self._data_wait_s += waited_s

    def commit(self, step: Step, *, loss: float = math.nan) -> None:
        if not step.consumed:
            raise ConflictError(f"step {step.index} cannot be committed before all of its microbatches were consumed")
        losses = [one[0] for one in self._channel.gather([loss])]  # all have applied the step when they meet here
        self._channel.forget(step.index)
        source, known = self._source, [one for one in losses if not math.isnan(one)]

        def settle() -> Message:
            assert source is not None
            source.commit(self._taken[step.index], loss=known[0] if known else math.nan)
            del self._taken[step.index]
            return Message()

        self._channel.share(settle)
        if step.index >= (self._state.step or 0):
            self._state = replace(self._state, step=step.index + 1, content=step.content)

    def statistics(self) -> LoaderStatistics:
        if self._source is not None:
            return replace(self._source.statistics(), data_wait_s=self._data_wait_s)
        return LoaderStatistics.of_receiver(self._data_wait_s)
