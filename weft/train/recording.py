"""Records the communication of some steps of a run (`train.profile`) into its folder, for `weft profile`."""

from __future__ import annotations

import logging
import math
import socket
from contextlib import suppress

from weft.comm.clocks import clock_offset
from weft.comm.recorder import DeviceTimer, HostTimer, Recorder
from weft.errors import PlanError
from weft.planner.predict import link_of, run_cluster
from weft.recording.rank_file import (
    FOLDER,
    MeasuredLink,
    NicTraffic,
    RankRecording,
    read_counters,
    since,
    write_rank,
)
from weft.train.parts import TrainingPart
from weft.train.state import TrainState

logger = logging.getLogger("weft")


class CommunicationProfile(TrainingPart):
    """Records the steps of `train.profile`. All ranks write their own files when the last of them is done."""

    def __init__(self, state: TrainState) -> None:
        self._state, self._steps = state, state.run.train.profile_steps
        self._recorder: Recorder | None = None
        self._first = self._last = 0
        self._nics: dict[str, NicTraffic] = {}  # when the recording began

    def before_step(self, step: int) -> None:
        if step not in self._steps:
            return
        state = self._state
        if self._recorder is None:
            timer = DeviceTimer() if state.mesh.device.type == "cuda" else HostTimer()
            self._recorder = state.mesh.ledger.recorder = Recorder(state.status, timer)
            self._first, self._nics = step + 1, read_counters()
        self._recorder.step = self._last = step + 1

    def pauses_after(self, step: int) -> bool:
        return self._recorder is not None and step not in self._steps

    def after_step(self, step: int, stops: bool) -> bool:
        if not self.pauses_after(step):
            self._write_some(step)
            return False
        self.end()
        return True

    def _write_some(self, step: int) -> None:
        """Write what is recorded so far after 1, 2, 4, 8, ... recorded steps, for `weft profile --live`."""
        recorder, count = self._recorder, step - self._first + 1
        if recorder is None or count < 1 or count & (count - 1):
            return
        recorder.convert()
        self._write(self._recording(recorder))

    def end(self) -> None:
        state, recorder = self._state, self._recorder
        if recorder is None:
            if self._steps and state.step < self._steps.stop:
                state.say(f"nothing was recorded: train.profile = {state.run.train.profile} was not reached")
            return
        self._recorder = state.mesh.ledger.recorder = None
        recorder.finish()
        self._steps = range(0)
        if self._write(self._recording(recorder)):
            folder = state.run.folder
            state.say(f"recorded the communication of steps {self._first} to {self._last}: weft profile {folder}")

    def _write(self, found: RankRecording) -> bool:
        """Writes this rank's file. Returns whether it could: a full disk does not end the run."""
        folder = self._state.run.folder / FOLDER
        try:
            write_rank(folder, found)
        except OSError as error:
            reason = error.strerror or error
            logger.warning("weft: the recording of rank %d cannot be written to %s (%s)", found.rank, folder, reason)
            return False
        return True

    def _recording(self, recorder: Recorder) -> RankRecording:
        mesh, plan = self._state.mesh, self._state.run.plan
        cluster = run_cluster(self._state.run, math.ceil(plan.num_ranks / mesh.num_local_ranks))
        degrees = {call.axis: len(call.ranks) for call in recorder.calls}
        links = {}
        for axis, degree in degrees.items():
            with suppress(PlanError, KeyError):  # a cluster whose nodes are not those of this run: nothing is predicted
                link = link_of(axis, plan, cluster)
                links[axis] = MeasuredLink(degree, link.bandwidth_bytes_per_second, link.latency_seconds)
        return RankRecording(
            calls=recorder.calls,
            phases=recorder.phases,
            rank=mesh.rank,
            num_ranks=plan.num_ranks,
            device=str(mesh.device.type),
            plan=plan.describe_axes(),
            first_step=self._first,
            last_step=self._last,
            clock_offset_seconds=clock_offset(mesh["world"]),
            links=links,
            host=socket.gethostname(),
            nics=since(self._nics, read_counters()),
        )
