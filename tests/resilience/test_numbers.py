"""Bad numbers: NaN, infinite losses and spikes are judged alike on all ranks, and stop, skip or roll back as asked."""

from __future__ import annotations

import errno
import math
import os
import shutil
import signal
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from runs_for_tests import DEEP, events, make_run, train_on_ranks, write_run_file
from sampled_for_tests import one_in

from weft.checkpoint import Checkpoint, Saver, steps
from weft.checkpoint.folder import step_name
from weft.checkpoint.manifest import MANIFEST
from weft.errors import ConfigError
from weft.launch.local_ranks import LocalError, run_local
from weft.mesh import Mesh
from weft.optim.update import update
from weft.plan import Plan
from weft.resilience import shared_memory
from weft.resilience.bad_numbers import GOOD, NOT_FINITE, SPIKE, Bad, Guard, Policy, join
from weft.run_file import Run, load_run
from weft.run_tables import NumbersConfig
from weft.step.objective import Objective
from weft.step.train_step import Checks, StepResult, train_step
from weft.train import loop, setup
from weft.train.batches import TrainingData
from weft.train.checkpoints import Checkpoints

pytestmark = pytest.mark.processes

Factors = dict[int, float]  # what the losses of a batch, by its number, are multiplied with on one rank


@pytest.fixture(scope="module")
def run_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_run_file(tmp_path_factory.mktemp("numbers"))


@pytest.fixture(scope="module")
def deep_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_run_file(tmp_path_factory.mktemp("deep"), DEEP)


def times(objective: Objective, factor: float) -> Objective:
    return replace(objective, total=lambda model, batch: objective.total(model, batch) * factor)


@contextmanager
def bad_batches(factors: Factors, rank: int = 0, leave: Callable[[int], bool] = lambda batch: False) -> Iterator[None]:
    """Batches whose losses a rank gets wrong; steps of batches to `leave` do nothing at all."""
    batches, used = TrainingData.batches, [-1]

    def noted(self: TrainingData, run: Run, number: int, *rest: Any) -> Any:
        used[0] = number
        return batches(self, run, number, *rest)

    def step(model: Any, optimizer: Any, given: Any, mesh: Mesh, objective: Objective, *rest: Any) -> StepResult:
        if leave(used[0]):
            zero = torch.zeros((), dtype=torch.float64)
            return StepResult(zero, zero, zero, zero)
        factor = factors.get(used[0]) if mesh.rank == rank else None
        return train_step(
            model, optimizer, given, mesh, objective if factor is None else times(objective, factor), *rest
        )

    with patch.object(TrainingData, "batches", noted), patch.object(loop, "train_step", step):
        yield


def final_state(run: Run, step: int | None = None) -> dict[str, list[float]]:
    checkpoint = Checkpoint(run.folder / "checkpoints" / step_name(step or run.train.steps))
    return {f"{e.kind} {e.name}": checkpoint.read(e.name, e.kind).flatten().tolist() for e in checkpoint.entries()}


@pytest.fixture
def _copies(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Ranks keep copies in memory, in a folder that is removed."""
    memory = Path(tempfile.mkdtemp(prefix="weft-test-", dir=shared_memory.SHARED_MEMORY))
    monkeypatch.setattr(shared_memory, "SHARED_MEMORY", memory)
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "numbers")
    yield
    shutil.rmtree(memory)


@pytest.mark.usefixtures("_copies")
def test_a_step_that_is_repeated_where_the_run_stops_is_saved(run_file: Path) -> None:
    """The ranks agree to stop in step 4, which is bad: what is left is the copy of step 3 in memory."""
    options = ["plan.data=2", "numbers.on_bad=repeat", "checkpoint.every=15", "checkpoint.memory_every=1"]
    run, count = make_run(run_file, "stops", *options), [0]

    def step(model: Any, optimizer: Any, given: Any, mesh: Mesh, objective: Objective, *rest: Any) -> StepResult:
        count[0] += 1
        if count[0] == 3:
            os.kill(os.getpid(), signal.SIGTERM)
        own = times(objective, math.nan) if count[0] == 4 and mesh.rank == 1 else objective
        return train_step(model, optimizer, given, mesh, own, *rest)

    with patch.object(loop, "train_step", step):
        outcome = train_on_ranks(run)
    assert (outcome["step"], outcome["finished"]) == (3, False)
    assert steps(run.folder / "checkpoints") == [0, 3]


@pytest.mark.usefixtures("_copies")
def test_a_last_step_that_only_memory_holds_is_saved_at_the_next_start(run_file: Path) -> None:
    run = make_run(run_file, "last", "plan.data=2", "train.steps=4", "checkpoint.memory_every=1", "checkpoint.every=4")
    with (
        patch.object(Checkpoints, "_save", lambda *_, **__: 1 // 0),  # the ranks die before it is on disk
        pytest.raises(LocalError, match="ZeroDivisionError"),
    ):
        train_on_ranks(run)
    assert not steps(run.folder / "checkpoints")
    assert train_on_ranks(run)["finished"]
    assert steps(run.folder / "checkpoints") == [4]
    assert len(events(run.folder)) == 4  # none was done again


# --- skip

SKIP_LAYOUTS = {
    "1 process": [],
    "2 data": ["plan.data=2", "plan.micro_batch=4"],
    "2 shard-3": ["plan.shard=2"],
    "2 x, no clipping": ["plan.tensor.x=2", "train.clip=inf"],
    "2 data bf16 int8": ["plan.data=2", "plan.precision=bf16", 'plan.memory.state="int8"', "plan.exact=false"],
    "2 pipe (gems)": ['plan.pipe={degree=2, schedule="gems"}', "plan.micro_batch=4"],
}


@pytest.mark.parametrize("layout", one_in(2, list(SKIP_LAYOUTS)))
def test_a_bad_batch_on_one_rank_is_skipped_as_if_it_had_never_been(deep_file: Path, layout: str) -> None:
    options = [*SKIP_LAYOUTS[layout], "numbers.on_bad=skip", "train.steps=5", "checkpoint.every=5"]
    skipped = make_run(deep_file, f"skip {layout}", *options)
    never = make_run(deep_file, f"never {layout}", *options)
    factors = {1: math.nan, 3: math.inf}
    with bad_batches(factors):  # rank 0 has a last stage, and a first
        train_on_ranks(skipped)
    with bad_batches({}, leave=factors.__contains__):
        train_on_ranks(never)
    assert final_state(skipped) == final_state(never)
    first, second = events(skipped.folder, "numbers")
    assert (first["step"], first["num_bad"], second["step"], second["num_bad"]) == (2, 1, 4, 2)
    assert "no finite number in step 2 (loss nan, gradient norm nan)" in first["what"]


@pytest.mark.parametrize("layout", ["1 process", "2 x, no clipping"])
def test_a_label_that_is_no_class_is_named(run_file: Path, layout: str) -> None:
    run = make_run(run_file, f"label {layout}", *SKIP_LAYOUTS[layout], "train.steps=3")
    batches = TrainingData.batches

    def spoiled(self: TrainingData, run: Run, number: int, *rest: Any) -> Any:
        found = batches(self, run, number, *rest)
        if number == 1:
            found[0][1][0, 3] = -1
        return found

    with patch.object(TrainingData, "batches", spoiled), pytest.raises(LocalError) as raised:
        train_on_ranks(run)
    assert "no finite number in step 2 (loss nan, gradient norm nan): 1 of" in str(raised.value)
    assert "labels are none of the model's 257 classes, -1 first; use 0 to 256, or -100" in str(raised.value)


def test_without_the_judge_the_same_batch_ruins_the_run(run_file: Path) -> None:
    """The negative control of the test above."""
    run = make_run(run_file, "ruined", "train.steps=3", "checkpoint.every=3")
    with bad_batches({1: math.nan}), patch.object(Guard, "judge", lambda *_: torch.zeros((), dtype=torch.float64)):
        train_on_ranks(run)
    assert any(math.isnan(value) for values in final_state(run).values() for value in values)


def test_a_delayed_update_is_skipped_when_its_turn_comes(run_file: Path) -> None:
    options = ["plan.data=2", "plan.precision=bf16", "plan.memory={offload=1.0, delay=true}", "plan.exact=false"]
    options += ["numbers.on_bad=skip"]
    run = make_run(run_file, "delay", *options, "train.steps=5", "checkpoint.every=5")
    with bad_batches({2: math.nan}):
        train_on_ranks(run)
    state = final_state(run)
    assert all(math.isfinite(value) for values in state.values() for value in values)
    assert {values[0] for name, values in state.items() if name.startswith("step ")} == {
        3.0
    }  # 5, less 1 put off, less 1


def test_running_statistics_do_not_see_a_skipped_batch() -> None:
    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(4, 3), torch.nn.BatchNorm1d(3))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    objective = Objective(
        count=lambda batch: torch.tensor(len(batch[0])), total=lambda model, batch: model(batch[0]).square().sum()
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    mesh = Mesh(Plan())
    guard = Guard(NumbersConfig(), mesh)

    def step(value: float) -> StepResult:
        batch = (torch.randn(5, 4) * value,)
        return train_step(model, optimizer, [batch], mesh, objective, checks=Checks(guard.judge))

    result = step(math.nan)
    assert result.verdict == NOT_FINITE
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert step(1.0).verdict == GOOD
    assert not any(torch.equal(value, before[name]) for name, value in model.state_dict().items() if "2.b" not in name)


def test_a_kernel_with_a_scale_that_is_no_number_changes_nothing() -> None:
    """What a GPU runs: weights, moments and their copies stay, in every format of state."""
    numbers = torch.tensor([0.9, 0.1, 0.95, 0.05, 1e-8, 0.1, 0.5], dtype=torch.float64)
    for dtype in (torch.float32, torch.bfloat16):
        weight, gradient = torch.randn(512).to(dtype), torch.full((512,), math.nan)
        plain = (torch.rand(512).to(dtype), torch.rand(512).to(dtype))
        scales = (torch.rand(2), torch.rand(2))
        signed, squares = torch.randint(-99, 99, (512,), dtype=torch.int8), torch.randint(0, 99, (512,)).to(torch.uint8)
        codes = (signed, scales[0], squares, scales[1])
        for state in (plain, codes):
            whole = torch.zeros(512, dtype=torch.bfloat16)
            held = [tensor.clone() for tensor in (weight, *state)]
            scale = torch.tensor(math.nan, dtype=torch.float64)
            update(weight, gradient, state, whole, scale, numbers, torch.tensor(7))
            assert all(torch.equal(tensor, old) for tensor, old in zip((weight, *state), held, strict=True))
            assert torch.equal(whole, weight.to(torch.bfloat16))
            update(weight, torch.ones(512), state, whole, torch.ones((), dtype=torch.float64), numbers, torch.tensor(7))
            assert not torch.equal(weight, held[0])


def test_too_many_bad_steps_in_a_row_end_the_run(run_file: Path) -> None:
    run = make_run(run_file, "row", "numbers.on_bad=skip", "numbers.limit=2", "plan.data=2")
    with bad_batches(dict.fromkeys((1, 2, 4, 5, 6), math.nan)), pytest.raises(LocalError) as raised:
        train_on_ranks(run)
    assert "in step 7 (loss nan" in str(raised.value)
    assert "more than numbers.limit = 2 bad steps in a row" in str(raised.value)


# --- stop


def test_a_bad_step_stops_by_default_and_nothing_of_it_is_saved(run_file: Path) -> None:
    run = make_run(run_file, "stop", "plan.data=2", "train.steps=6")
    with bad_batches({2: math.nan}, rank=1), pytest.raises(LocalError) as raised:
        train_on_ranks(run)
    assert "NumbersError: no finite number in step 3 (loss nan, gradient norm nan); its update" in str(raised.value)
    assert not (run.folder / "checkpoints" / step_name(3)).exists()


# --- spikes


@pytest.mark.parametrize("layout", [[], ["plan.data=2"]], ids=str)
def test_a_spike_is_skipped(run_file: Path, layout: list[str]) -> None:
    options = [*layout, "numbers.on_bad=skip", "numbers.spike=15", "numbers.window=5", "train.steps=10"]
    options += ["checkpoint.every=10"]
    skipped = make_run(run_file, f"spike {layout}", *options)
    never = make_run(run_file, f"no spike {layout}", *options)
    with bad_batches({2: 30.0, 7: 30.0}):  # the first comes before there are enough losses
        train_on_ranks(skipped)
    with bad_batches({2: 30.0}, leave=lambda batch: batch == 7):
        train_on_ranks(never)
    (event,) = events(skipped.folder, "numbers")
    assert "a spike of the loss in step 8" in event["what"]
    assert final_state(skipped) == final_state(never)


def test_the_rule_for_spikes_is_median_plus_k_deviations() -> None:
    guard = Guard(NumbersConfig(spike=3.0, window=5), Mesh(Plan()))
    for loss in (1.0, 5.0, 2.0, 4.0):
        assert judged(guard, loss) == GOOD
    assert judged(guard, 100.0) == GOOD  # four losses are not enough
    guard.losses = [1.0, 5.0, 2.0, 4.0, 3.0]  # median 3, deviations 2 2 1 1 0: median 1, so the limit is 6
    assert judged(guard, 6.1) == SPIKE
    assert guard.losses == [1.0, 5.0, 2.0, 4.0, 3.0]
    assert judged(guard, math.nan) == NOT_FINITE
    assert judged(guard, 6.0) == GOOD
    assert guard.losses == [5.0, 2.0, 4.0, 3.0, 6.0]


def judged(guard: Guard, loss: float) -> int:
    return int(guard.judge(torch.tensor(loss), torch.tensor(1.0)))


def test_ranks_take_the_worst_verdict_of_all() -> None:
    def rank(index: int) -> int:
        guard = Guard(NumbersConfig(), Mesh(Plan(data=3)))
        return int(guard.judge(torch.tensor(1.0), torch.tensor(math.inf if index == 2 else 1.0)))

    assert run_local(rank, 3) == [NOT_FINITE] * 3


# --- repeat


REPEAT = ["numbers.on_bad=repeat", "train.steps=7", "checkpoint.every=3"]


@contextmanager
def bad_once(batch: int, num_times: int = 1) -> Iterator[None]:
    """A batch whose loss is NaN on rank 0 for the first so many times that it is used, as by chance."""
    factors = {batch: math.nan}
    left = [num_times]
    batches = TrainingData.batches

    def counted(self: TrainingData, run: Run, number: int, *rest: Any) -> Any:
        if number == batch:
            left[0] -= 1
            if left[0] < 0:
                factors.clear()
        return batches(self, run, number, *rest)

    with patch.object(TrainingData, "batches", counted), bad_batches(factors):
        yield


@pytest.mark.parametrize("copies", [False, True], ids=["disk", "memory"])
def test_a_step_that_was_bad_by_chance_is_done_again(run_file: Path, tmp_path: Path, copies: bool) -> None:
    options = [*REPEAT, "plan.data=2", *(["checkpoint.memory_every=1"] if copies else [])]
    whole, run = (make_run(run_file, f"{name} {copies}", *options) for name in ("repeat whole", "repeat"))
    train_on_ranks(whole)
    with bad_once(4), patch.object(setup, "folder_of", lambda *_: tmp_path / "copies"):
        train_on_ranks(run)
    (event,) = events(run.folder, "numbers")
    assert (event["step"], event["bad"], event["left_out"]) == (4 if copies else 3, 5, [])
    assert final_state(run) == final_state(whole)


def test_a_step_that_is_bad_twice_is_skipped(run_file: Path) -> None:
    repeated = make_run(run_file, "repeat twice", *REPEAT, "plan.data=2")
    with bad_once(4, num_times=99):
        train_on_ranks(repeated)
    assert [event["bad"] for event in events(repeated.folder, "numbers")] == [5, 5]
    skipped = make_run(run_file, "repeat skip", *REPEAT, "numbers.on_bad=skip", "plan.data=2")
    with bad_batches({4: math.nan}):
        train_on_ranks(skipped)
    assert final_state(repeated) == final_state(skipped)


def test_a_run_whose_steps_are_all_bad_ends_though_they_are_repeated(run_file: Path) -> None:
    run = make_run(run_file, "repeat endless", *REPEAT, "numbers.limit=3")
    with bad_batches(dict.fromkeys(range(4, 99), math.nan)), pytest.raises(LocalError) as raised:
        train_on_ranks(run)
    assert "more than numbers.limit = 3 bad steps in a row" in str(raised.value)


# --- rollback


ROLLBACK = ["numbers.on_bad=rollback", "numbers.leave_out=2", "train.steps=9", "checkpoint.every=3"]


@pytest.mark.parametrize("layout", [[], ["plan.shard=2"]], ids=str)
def test_a_rollback_leaves_out_the_batches_and_a_resumed_run_repeats_it(run_file: Path, layout: list[str]) -> None:
    whole = make_run(run_file, f"rollback {layout}", *ROLLBACK, *layout)
    with bad_batches({4: math.nan}):
        train_on_ranks(whole)
    (event,) = events(whole.folder, "numbers")
    assert (event["step"], event["bad"], event["left_out"]) == (3, 5, [[3, 5]])
    # Without the judge, on data in which those batches never were: the same parameters.
    never = make_run(run_file, f"left out {layout}", *layout, "train.steps=9", "checkpoint.every=3")
    with patch.object(Policy, "batch_of", lambda self, step: step if step < 3 else step + 2):
        train_on_ranks(never)
    assert final_state(whole) == final_state(never)
    # Gone on after step 6, from the checkpoint alone it knows what to leave out; after step 3, it finds it out again.
    for step, num_events in ((6, 0), (3, 1)):
        parts = make_run(run_file, f"rollback {layout}, from {step}", *ROLLBACK, *layout)
        saved = Path("checkpoints") / step_name(step)
        shutil.copytree(whole.folder / saved, parts.folder / saved)
        with bad_batches({4: math.nan}):
            train_on_ranks(parts)
        assert len(events(parts.folder, "numbers")) == num_events
        assert final_state(parts) == final_state(whole)


def test_a_rollback_before_the_first_checkpoint_goes_back_to_the_beginning(run_file: Path) -> None:
    run = make_run(run_file, "early", *ROLLBACK, "plan.data=2")
    with bad_batches({1: math.inf, 3: math.nan}):
        train_on_ranks(run)
    first, second = events(run.folder, "numbers")
    assert (first["step"], first["left_out"]) == (0, [[0, 2]])
    assert (second["step"], second["left_out"]) == (0, [[0, 4]])
    never = make_run(run_file, "late", "plan.data=2", "train.steps=9", "checkpoint.every=9")
    with patch.object(Policy, "batch_of", lambda self, step: step + 4):
        train_on_ranks(never)
    assert final_state(run) == final_state(never)


@contextmanager
def failed_save(number: int, failing: str) -> Iterator[None]:
    """No room for one of a run's saves: for the manifest, which rank 0 writes, or for rank 1's part and its mark."""
    write_file, write_part = Saver._write_file, Saver._write_part

    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    def file(saver: Saver, path: Path, data: bytes) -> None:
        if failing == "publishing" and path.name == MANIFEST and saver.num_saves == number:
            full()
        write_file(saver, path, data)

    def part(saver: Saver, *rest: Any) -> Any:
        if failing == "a part" and saver._rank == 1 and saver.num_saves == number:
            full()
        return write_part(saver, *rest)

    with (
        patch.object(Saver, "_write_file", file),
        patch.object(Saver, "_write_part", part),
        patch("weft.checkpoint.save.failed_name", lambda rank: "no/such/folder"),
    ):
        yield


@pytest.mark.parametrize(
    ("failing", "asynchronous"), [("publishing", "true"), ("publishing", "false"), ("a part", "true")]
)
def test_a_rollback_after_a_failed_save_goes_to_the_checkpoint_before(
    run_file: Path, failing: str, asynchronous: str
) -> None:
    overrides = [*ROLLBACK, "plan.data=2", f"checkpoint.asynchronous={asynchronous}"]
    run = make_run(run_file, f"failed {failing} {asynchronous}", *overrides)
    with bad_batches({7: math.nan}), failed_save(3, failing):
        train_on_ranks(run)
    (event,) = events(run.folder, "numbers")
    assert (event["step"], event["bad"], event["left_out"]) == (3, 8, [[6, 8]])
    never = make_run(run_file, f"never failed {failing} {asynchronous}", "plan.data=2", "train.steps=9")
    with patch.object(Policy, "batch_of", lambda self, step: step if step < 6 else step + 2):
        train_on_ranks(never)
    assert final_state(run) == final_state(never)


def test_a_rollback_with_nothing_to_go_back_to_is_an_error(run_file: Path) -> None:
    run = make_run(run_file, "nothing", *ROLLBACK)
    with (
        bad_batches({1: math.nan}),
        patch("weft.train.resume.steps", lambda *_: []),
        pytest.raises(LocalError, match=r"there is no checkpoint in .* to go back to"),
    ):
        train_on_ranks(run)


def test_rollbacks_to_the_same_checkpoint_have_an_end(run_file: Path) -> None:
    run = make_run(run_file, "endless", *ROLLBACK, "numbers.limit=2")
    with bad_batches(dict.fromkeys(range(4, 99), math.nan)), pytest.raises(LocalError) as raised:
        train_on_ranks(run)
    assert "more than numbers.limit = 2 bad steps since the same checkpoint" in str(raised.value)


def test_a_rollback_forgets_copies_in_memory_that_are_newer(run_file: Path, tmp_path: Path) -> None:
    run = make_run(run_file, "copies", *ROLLBACK, "checkpoint.memory_every=1", "plan.data=2")
    copies = tmp_path / "copies"
    with bad_batches({4: math.nan}), patch.object(setup, "folder_of", lambda *_: copies):
        train_on_ranks(run)
    whole = make_run(run_file, "no copies", *ROLLBACK, "plan.data=2")
    with bad_batches({4: math.nan}):
        train_on_ranks(whole)
    assert final_state(run) == final_state(whole)


@given(st.lists(st.tuples(st.integers(0, 40), st.integers(1, 5)), max_size=6), st.integers(0, 60))
def test_the_batch_of_a_step_is_the_next_that_is_not_left_out(windows: list[tuple[int, int]], step: int) -> None:
    policy = Policy(NumbersConfig())
    policy.left_out = join([(first, first + size) for first, size in windows])
    left_out = {batch for first, size in windows for batch in range(first, first + size)}
    assert policy.batch_of(step) == [batch for batch in range(200) if batch not in left_out][step]


def test_a_rollback_leaves_out_no_batch_from_before_its_checkpoint() -> None:
    """`leave_out` is 8, and the checkpoint that the run goes back to is of step 7."""
    policy, guard = Policy(NumbersConfig(on_bad="rollback", leave_out=8)), SimpleNamespace(losses=[])
    bad = Bad(10, NOT_FINITE, math.nan, 1.0, "rollback")
    policy.went_back(bad, 7, {"losses": [1, 2]}, guard)  # type: ignore[arg-type]
    assert policy.left_out == [(7, 10)]
    assert guard.losses == [1.0, 2.0]


# --- run files


@pytest.mark.parametrize(
    ("override", "message"),
    [
        (
            "numbers.on_bad=ignore",
            "'numbers.on_bad' = 'ignore' (a string) but it expects one of 'stop', 'skip', 'repeat'",
        ),
        ("numbers.spike=0", "numbers.spike = 0.0; it counts median absolute deviations"),
        ("numbers.spike=nan", "numbers.spike = nan; it counts"),
        ("numbers.window=3", "numbers.window = 3; it must be at least 4"),
        ("numbers.leave_out=0", "numbers.leave_out = 0; it must be at least 1"),
        ("numbers.limit=0", "numbers.limit = 0; it must be at least 1"),
        ("numbers.compare_every=0", "numbers.compare_every = 0; it must be at least 1"),
        ("numbers.repeat_every=5", "give train.deterministic = true"),
        ("numbers.on_bat=skip", "unknown key 'numbers.on_bat'; did you mean 'on_bad'?"),
    ],
)
def test_bad_values_are_refused(run_file: Path, override: str, message: str) -> None:
    with pytest.raises(ConfigError) as raised:
        load_run(run_file, [override])
    assert message in str(raised.value)


def test_what_cannot_work_together_is_refused(run_file: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="leave it out \\(compare_every works\\)"):
        load_run(run_file, ["numbers.repeat_every=5", "train.deterministic=true", "plan.pipe=2", "plan.micro_batch=4"])
    file = tmp_path / "run.toml"
    file.write_text(run_file.read_text().replace("every = 3", ""))
    with pytest.raises(ConfigError, match=r"goes back to a checkpoint; give checkpoint\.every"):
        load_run(file, ["numbers.on_bad=rollback"])


def test_the_table_survives_its_run_file(run_file: Path, tmp_path: Path) -> None:
    run = load_run(run_file, ["numbers.on_bad=skip", "numbers.spike=12.5", "numbers.compare_every=50"])
    (tmp_path / "again.toml").write_text(run.to_toml())
    assert load_run(tmp_path / "again.toml").numbers == run.numbers == NumbersConfig("skip", 12.5, compare_every=50)
