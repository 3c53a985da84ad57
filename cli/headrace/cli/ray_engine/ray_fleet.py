"""The actors of a Ray cluster that host preprocessors: as many as are wanted, each in place of one that is lost."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import ray
from ray.exceptions import ActorUnavailableError, RayError

from headrace.child_process import how_ended
from headrace.cli.ray_engine.hosted_fleet import Hosted, Pauses, surplus
from headrace.cli.ray_engine.ray_actor import ActorState, HostedPreprocessor
from headrace.cli.ray_engine.ray_options import RaySettings
from headrace.errors import HeadraceError, UserError

STOP_S = 10.0  # that a preprocessor may take to end in order
PENDING_S = 30.0  # without a node before that is said, and between one time and the next
USER_ERROR = 2  # exit code of a preprocessor that was started wrongly
Say = Callable[..., None]


@dataclass(slots=True)
class _Actor:
    handle: Any
    hosted: Hosted
    asked: Any = None
    """The reply that is awaited."""


class RayFleet:
    """The actors of one driver. Call all methods from one thread."""

    def __init__(self, settings: RaySettings, environment: Mapping[str, str], say: Say) -> None:
        """`environment`: of each preprocessor, added to its node's. `say`: called with an event and its fields."""
        self._settings = settings
        self._environment = dict(environment)
        self._say = say
        self._wanted = 0
        self._started = 0
        self._actors: dict[int, _Actor] = {}
        self._ending: dict[Any, tuple[Any, float]] = {}  # reply of `stop` -> actor, until when to wait for it
        self._pauses = Pauses()
        self._said_pending_s = float("-inf")

    @property
    def endpoints(self) -> set[str]:
        """Where its preprocessors listen."""
        return {actor.hosted.endpoint for actor in self._actors.values() if actor.hosted.endpoint}

    def want(self, count: int) -> None:
        """Have so many from now on. Those that are too many end in order."""
        self._wanted = count
        for hosted in surplus([actor.hosted for actor in self._actors.values()], count):
            actor = self._actors.pop(hosted.number)
            self._say("ending", preprocessor=hosted.number, node=hosted.node or "none", endpoint=hosted.endpoint or "none")
            self._end(actor)

    def look_after(self) -> None:
        """Hear the actors, replace those that have ended or are lost, and start those that lack.

        Raises UserError or HeadraceError where none listens and one after the other ends as soon as it is started.
        """
        now_s = time.monotonic()
        for actor in list(self._actors.values()):
            self._hear(actor, now_s)
        self._await_ends(now_s)
        while len(self._actors) < self._wanted and self._pauses.may_start(now_s):
            self._start(now_s)
        self._tell_pending(now_s)

    def close(self) -> None:
        """End all preprocessors in order, and their actors."""
        for actor in self._actors.values():
            self._end(actor)
        self._actors.clear()
        if self._ending:
            ray.wait(list(self._ending), num_returns=len(self._ending), timeout=STOP_S + 1)
        self._await_ends(float("inf"))

    def _start(self, now_s: float) -> None:
        self._started += 1
        options = {
            "num_cpus": self._settings.cpus,
            "resources": dict(self._settings.resources),
            "scheduling_strategy": "SPREAD",
            "max_restarts": 0,  # those that are lost are replaced here, where it is known how often, and how soon
        }
        actor_class = ray.remote(HostedPreprocessor).options(**options)
        handle = actor_class.remote(list(self._settings.arguments), self._settings.listen, self._environment)
        self._actors[self._started] = _Actor(handle, Hosted(number=self._started, started_s=now_s))
        self._say("starting", preprocessor=self._started)

    def _hear(self, actor: _Actor, now_s: float) -> None:
        """Ask the actor, or take its answer to what it was asked before."""
        if actor.asked is None:
            actor.asked, actor.hosted = actor.handle.state.remote(), actor.hosted.asked(now_s)
            return  # no answer comes at once, and how long this one takes tells only a later round
        if ray.wait([actor.asked], timeout=0)[0]:
            asked, actor.asked = actor.asked, None
            try:
                state: ActorState = ray.get(asked)
            except ActorUnavailableError:
                pass  # it may come back, or is silent for too long
            except RayError as err:
                self._lost(actor, now_s, str(err).strip().partition("\n")[0], is_ours=False)
                return
            else:
                self._note(actor, state, now_s)
                return
        if actor.hosted.is_silent(now_s):
            self._lost(actor, now_s, "its node does not answer any more", is_ours=False)

    def _note(self, actor: _Actor, state: ActorState, now_s: float) -> None:
        former = actor.hosted
        actor.hosted = former.answered(now_s, node=state.node, endpoint=state.endpoint)
        if state.exit_code is not None:
            is_ours = state.exit_code == USER_ERROR
            self._lost(actor, now_s, f"it {how_ended(state.exit_code)}: {state.last_words}", is_ours=is_ours)
        elif state.endpoint and not former.endpoint:
            self._pauses.note_success()
            self._say("started", preprocessor=former.number, node=state.node, endpoint=state.endpoint)

    def _lost(self, actor: _Actor, now_s: float, why: str, *, is_ours: bool) -> None:
        """Drop an actor; another one takes its place. Raises HeadraceError where that is in vain."""
        hosted = actor.hosted
        del self._actors[hosted.number]
        ray.kill(actor.handle, no_restart=True)
        self._pauses.note_end(now_s - hosted.started_s, now_s)
        self._say("lost", preprocessor=hosted.number, node=hosted.node or "none", why=why)
        if self._pauses.is_hopeless and not self.endpoints:
            sentence = f"preprocessors end as soon as they are started, the last one on {hosted.node or 'no node'}: {why}"
            raise UserError(sentence) if is_ours else HeadraceError(sentence)

    def _end(self, actor: _Actor) -> None:
        """Have a preprocessor end in order; of an actor that has not answered so far there is none to wait for."""
        if actor.hosted.heard_s is None:
            ray.kill(actor.handle, no_restart=True)
            return
        self._ending[actor.handle.stop.remote(STOP_S)] = actor.handle, time.monotonic() + STOP_S + 1

    def _await_ends(self, now_s: float) -> None:
        """Drop the actors whose preprocessors have ended, or have had their time."""
        if not self._ending:
            return
        ended = ray.wait(list(self._ending), num_returns=len(self._ending), timeout=0)[0]
        for reply in list(self._ending):
            handle, until_s = self._ending[reply]
            if reply in ended or now_s > until_s:
                del self._ending[reply]
                ray.kill(handle, no_restart=True)

    def _tell_pending(self, now_s: float) -> None:
        """Say that Ray has no place for some, once in a while."""
        since = [actor.hosted.started_s for actor in self._actors.values() if actor.hosted.heard_s is None]
        if since and now_s - max(min(since), self._said_pending_s) > PENDING_S:
            self._said_pending_s = now_s
            needs = {"CPU": self._settings.cpus, **self._settings.resources}
            self._say(
                "pending", preprocessors=len(since), needs=needs, why="Ray has no node free for them, or takes long to start them"
            )
