"""What a run is: its folder and id. Ranks that believe otherwise, copies of other runs, files that change meanwhile."""

from __future__ import annotations

import os
import random
import re
import shutil
import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch.distributed as dist
from restarts_for_tests import assert_same_end
from runs_for_tests import Silent, events, losses, make_run, train_on_ranks, write_run_file

from weft.checkpoint import Checkpoint, steps
from weft.comm import Axis, Ledger
from weft.commands import app as cli
from weft.commands import train as train_command
from weft.commands.run_planning import has_layout
from weft.errors import CheckpointError, LaunchError
from weft.launch.environment import RankInfo
from weft.launch.fork_server import ForkServer
from weft.launch.local_ranks import LocalError, run_local
from weft.mesh import Mesh
from weft.models import DecoderConfig, build, save_folder
from weft.plan import Plan
from weft.resilience import shared_memory
from weft.run_file import Run, load_run
from weft.train import agreement, loop, resume, setup
from weft.train.agreement import agree, text_of_rank_0
from weft.train.local_job import run_of_job
from weft.train.run_identity import known_run_id, make_run_id

pytestmark = pytest.mark.processes

NUM_STEPS = 12
COPIES = ["plan.data=2", f"train.steps={NUM_STEPS}", "checkpoint.memory_every=1", "checkpoint.every=100"]


@pytest.fixture
def run_file(tmp_path: Path) -> Path:
    return write_run_file(tmp_path)


@pytest.fixture
def memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Shared memory of this test's own, and the job's name that torchrun gives with --master-port."""
    folder = tmp_path / "shared memory"
    folder.mkdir()
    monkeypatch.setattr(shared_memory, "SHARED_MEMORY", folder)
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    return folder


@contextmanager
def failing_after(num_steps: int) -> Iterator[None]:
    """All ranks of the job fail, and leave their copies in memory, as those of a job that is killed do."""
    done, train_step = [0], loop.train_step

    def step(*arguments: Any, **named: Any) -> Any:
        done[0] += 1
        if done[0] > num_steps:
            raise RuntimeError("enough")
        return train_step(*arguments, **named)

    with patch.object(loop, "train_step", step), pytest.raises(LocalError, match="enough"):
        yield


@contextmanager
def noted(path: Path) -> Iterator[None]:
    """What ranks say goes to a file."""

    def say(self: Silent, message: str) -> None:
        with open(path, "a") as file:
            file.write(f"{message}\n")

    with patch.object(Silent, "say", say):
        yield


def train_each(runs: Sequence[Run], at_start: Callable[[int], None] = lambda rank: None) -> list[dict[str, Any]]:
    """`train` on forked ranks, each of which believes in a run of its own."""

    def rank(index: int) -> dict[str, Any]:
        at_start(index)
        place = RankInfo(index, len(runs), index, len(runs))
        with patch.object(loop, "world", lambda run, place, store: nullcontext(Mesh(run.plan))):
            return asdict(loop.train(runs[index], place, Silent()))

    return run_local(rank, len(runs), 120.0)


# --- copies in memory


def test_a_run_does_not_go_on_from_the_copies_of_another(run_file: Path, memory: Path) -> None:
    """Both jobs have the name "none"; the second has an empty folder and another learning rate."""
    first = make_run(run_file, "first", *COPIES)
    with failing_after(5):
        train_on_ranks(first)
    (copies,) = memory.iterdir()
    second = make_run(run_file, "second", *COPIES, "train.learning_rate=3e-3")
    train_on_ranks(second)
    assert [event["step"] for event in events(second.folder)] == list(range(1, NUM_STEPS + 1))
    assert list(memory.iterdir()) == [copies]  # not removed by the other run, which has removed its own
    assert shared_memory.complete_steps(copies)


def test_a_run_goes_on_from_its_own_copies(run_file: Path, memory: Path, tmp_path: Path) -> None:
    whole, run = make_run(run_file, "whole", *COPIES), make_run(run_file, "run", *COPIES)
    train_on_ranks(whole)
    with failing_after(5):
        train_on_ranks(run)
    with noted(tmp_path / "said.txt"):
        train_on_ranks(run)
    assert "from memory" in (tmp_path / "said.txt").read_text()
    assert losses(run.folder) == losses(whole.folder)
    assert_same_end(run, whole)


@pytest.mark.parametrize("removed", ["the folder", "its checkpoints"])
def test_a_run_that_starts_anew_in_its_folder_has_another_id(removed: str, run_file: Path, memory: Path) -> None:
    run = make_run(run_file, "run", *COPIES)
    with failing_after(5):
        train_on_ranks(run)
    before = known_run_id(run.folder)
    shutil.rmtree(run.folder if removed == "the folder" else run.folder / "checkpoints")
    (run.folder / "metrics.jsonl").unlink(missing_ok=True)
    train_on_ranks(run)
    assert known_run_id(run.folder) not in (None, before)
    assert [event["step"] for event in events(run.folder)] == list(range(1, NUM_STEPS + 1))


def test_copies_say_whose_they_are(run_file: Path, memory: Path) -> None:
    """A folder that has the right name by whatever way is still refused if its copies are another run's."""
    first, second = (make_run(run_file, name, *COPIES) for name in ("first", "second"))
    for run in (first, second):
        with failing_after(5):
            train_on_ranks(run)
    theirs, ours = (setup.folder_of(os.environ, run.folder, known_run_id(run.folder) or "") for run in (first, second))
    assert theirs is not None
    assert ours is not None
    shutil.rmtree(ours)
    theirs.rename(ours)
    with pytest.raises(LocalError, match=r"is of run [0-9a-f]{32}, and this is run [0-9a-f]{32}"):
        train_on_ranks(second)


def test_folders_of_copies_differ_by_job_folder_and_id(tmp_path: Path) -> None:
    found = {
        shared_memory.folder_of({"TORCHELASTIC_RUN_ID": job}, tmp_path / folder, run_id)
        for job in ("none", "other")
        for folder in ("a", "b")
        for run_id in ("1", "2")
    }
    assert len(found) == 8
    (tmp_path / "a").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "a")
    environ = {"TORCHELASTIC_RUN_ID": "none"}
    assert shared_memory.folder_of(environ, tmp_path / "link", "1") in found  # one folder under two names
    assert shared_memory.folder_of({}, tmp_path / "a", "1") is None


def test_a_folder_of_copies_that_is_another_users_is_done_without(run_file: Path, tmp_path: Path) -> None:
    """Anybody may make a folder in shared memory, under any name."""
    run = make_run(run_file, "run", *COPIES)
    (tmp_path / "taken").symlink_to(tmp_path)
    with patch.object(setup, "folder_of", lambda *_: tmp_path / "taken"), noted(tmp_path / "said.txt"):
        train_on_ranks(run)
    said = (tmp_path / "said.txt").read_text()
    assert "no copies are kept in memory: " in said
    assert "belongs to somebody else" in said
    assert steps(run.folder / "checkpoints") == [NUM_STEPS]


def test_an_id_is_made_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert known_run_id(tmp_path / "run") is None
    first = make_run_id(tmp_path / "run")
    assert make_run_id(tmp_path / "run") == first == known_run_id(tmp_path / "run")
    assert os.listdir(tmp_path / "run" / "checkpoints") == ["run-id"]
    (tmp_path / "run" / "checkpoints" / "run-id").write_text("")  # as a power cut may leave it
    second = make_run_id(tmp_path / "run")
    assert second == known_run_id(tmp_path / "run") != first

    link = os.link

    def another_was_first(source: Any, target: Path) -> None:
        target.write_text("f" * 32 + "\n")
        link(source, target)

    monkeypatch.setattr(os, "link", another_was_first)
    assert make_run_id(tmp_path / "raced") == "f" * 32
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match="cannot save to"):
        make_run_id(tmp_path / "file")


# --- what all ranks compare


def test_ranks_with_different_data_are_refused(run_file: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.txt"
    other.write_text(" ".join(random.Random(1).choices(["warp", "weft", "loom"], k=20_000)))
    runs = [make_run(run_file, "run", "plan.data=2", *more) for more in ([], [f"data.source={other}"])]
    with pytest.raises(LocalError) as caught:
        train_each(runs)
    line = str(caught.value).splitlines()[0]
    assert "the ranks do not agree on what they train: " in line
    for words in (
        r"data\.fingerprint is [0-9a-f]{64} on rank 0, [0-9a-f]{64} on rank 1",
        r"the number of samples to train on is \d+ on rank 0, \d+ on rank 1",
    ):
        assert re.search(words, line), line
    assert steps(runs[0].folder / "checkpoints") == []


DIFFERENCES = {
    "train.learning_rate": (["train.learning_rate=1e-3"], "train.learning_rate is 0.01 on rank 0, 0.001 on rank 1"),
    "train.seed": (["train.seed=4"], "train.seed is 0 on rank 0, 4 on rank 1"),
    "model": (["model.rope_theta=5000.0"], "model.rope_theta is 10000.0 on rank 0, 5000.0 on rank 1"),
    "plan": (["plan.shard.stage=2"], "plan.shard.stage is 3 on rank 0, 2 on rank 1"),
    "held out": (["data.held_out=0.2"], "data.fingerprint is "),
    "a key that only one has": (["checkpoint.keep_every=2"], "checkpoint.keep_every is not given on rank 0, 2 on rank"),
}


@pytest.mark.parametrize("what", DIFFERENCES)
def test_ranks_with_different_runs_are_refused(what: str, run_file: Path) -> None:
    overrides, words = DIFFERENCES[what]
    runs = [make_run(run_file, "run", "plan.shard=2", *more) for more in ([], overrides)]
    with pytest.raises(LocalError, match="do not agree") as caught:
        train_each(runs)
    assert words in str(caught.value)


def test_ranks_that_see_different_folders_are_refused(run_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same relative name in another working folder, or a folder that is not shared between hosts."""
    monkeypatch.setattr(agreement, "SEEN_SECONDS", 0.0)
    runs = [make_run(run_file, name, "plan.data=2") for name in ("here", "there")]
    with pytest.raises(LocalError, match=r"run id is [0-9a-f]{32} on rank 0, none in .*/there/checkpoints on rank 1"):
        train_each(runs)


def test_ranks_that_start_from_different_weights_are_refused(run_file: Path, tmp_path: Path) -> None:
    config = DecoderConfig(vocab_size=259, hidden_size=16, intermediate_size=24, num_hidden_layers=1,
                           num_attention_heads=2)  # fmt: skip
    for name in ("a", "b"):
        save_folder(tmp_path / name, build(config))
    text = run_file.read_text()
    run_file.write_text('[model]\nfrom = "FOLDER"\n' + text[text.index("[data]") :])
    runs = [
        make_run(run_file, "run", "plan.data=2", "data.tokenizer=bytes", f"model.from={tmp_path / name}")
        for name in ("a", "b")
    ]
    with pytest.raises(LocalError, match=r"weights to start from is [0-9a-f]{64} on rank 0, [0-9a-f]{64} on rank 1"):
        train_each(runs)


def test_places_of_the_same_data_may_differ(run_file: Path, tmp_path: Path) -> None:
    """Hosts may have copies of their own."""
    shutil.copy(tmp_path / "text.txt", tmp_path / "copy.txt")
    more = [[], [f"data.source={tmp_path / 'copy.txt'}", f"data.cache={tmp_path / 'cache of another host'}"]]
    runs = [make_run(run_file, "run", "plan.data=2", "train.steps=3", *one) for one in more]
    assert [outcome["step"] for outcome in train_each(runs)] == [3, 3]


def test_different_plans_are_refused_before_groups_are_made(run_file: Path) -> None:
    """Ranks that make different groups would wait for each other."""
    runs = [make_run(run_file, "run", *plan) for plan in (["plan.data=2"], ["plan.shard=2"])]

    def rank(index: int) -> str:
        with (
            patch.object(setup, "init_process_group", lambda *_: "cpu"),
            patch.object(setup, "Mesh", lambda *_: pytest.fail("too late")),
            patch.object(setup, "shutdown", lambda: None),
            pytest.raises(LaunchError) as caught,
            setup.world(runs[index], RankInfo(index, 2, index, 2)),
        ):
            pass
        return str(caught.value)

    said = run_local(rank, 2)
    assert said[0] == said[1]
    assert "plan.data is 2 on rank 0, 1 on rank 1; plan.shard.degree is 1 on rank 0, 2 on rank 1" in said[0]


def test_a_difference_names_ranks_and_values_and_few_of_many(tmp_path: Path) -> None:
    def rank(index: int) -> str:
        world = Axis("world", 4, index, None, Ledger())
        agree({"a": "1", "b": "\u00e9" * 5000}, world)
        assert text_of_rank_0(f"from {index}\u00e9", world) == "from 0\u00e9"
        settings: Mapping[str, str] = {"alike": "x", **{f"key {n}": str(index // 2) for n in range(20)}}
        if index == 3:
            settings = {**settings, "long": "z" * 9999 + "\x1b[2J"}
        with pytest.raises(LaunchError) as caught:
            agree(settings, world)
        return str(caught.value)

    said = run_local(rank, 4)
    assert len(set(said)) == 1
    assert "key 0 is 0 on ranks 0, 1, 1 on ranks 2, 3; " in said[0]
    assert "alike" not in said[0]
    assert "and 13 more" in said[0]
    assert len(said[0]) < 2000
    assert said[0].isprintable()


# --- the step that ranks go on from


@pytest.mark.parametrize("behind", [0, 1])
def test_ranks_go_on_from_the_step_that_rank_0_has_found(behind: int, run_file: Path) -> None:
    """A listing of a shared folder may be old: one rank does not see the newest checkpoint yet."""
    options = ["plan.data=2", "train.schedule=constant"]
    whole, run = make_run(run_file, "whole", *options), make_run(run_file, "run", *options)
    train_on_ranks(whole)
    train_on_ranks(make_run(run_file, "run", *options, "train.steps=9"))

    def stale(folder: Path) -> list[int]:
        found = steps(folder)
        return found[:-1] if dist.get_rank() == behind else found

    with patch.object(resume, "steps", stale):
        train_on_ranks(run)
    assert losses(run.folder) == losses(whole.folder)
    ours, theirs = (Checkpoint(one.folder / "checkpoints" / "step-00000015") for one in (run, whole))
    for entry in ours.entries():
        assert ours.read(entry.name, entry.kind).equal(theirs.read(entry.name, entry.kind)), entry.name


def test_a_checkpoint_that_one_rank_never_sees_is_not_damaged(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"rank 0 has found .*step-00000003, which this rank does not") as caught:
        resume.wait_until_seen(tmp_path / "step-00000003", 0.0)
    assert type(caught.value) is CheckpointError


# --- a restart


def test_a_restart_goes_on_with_the_run_that_was_checked(
    run_file: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """The run file is edited while ranks train; then one is killed."""
    memory = tmp_path / "shared memory"
    memory.mkdir()
    options = ["plan.data=2", f"train.steps={NUM_STEPS}", "checkpoint.every=2", "restart.limit=1"]
    whole = make_run(run_file, "whole", *options)
    train_on_ranks(whole)

    def as_rank(arguments: list[str]) -> None:
        train_step, done = loop.train_step, [0]

        def step(*given: Any, **named: Any) -> Any:
            done[0] += 1
            if done[0] == 5 and os.environ["RANK"] == "1" and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
                text = run_file.read_text().replace("learning_rate = 1e-2", "learning_rate = 1e-5")
                run_file.write_text(text.replace(str(tmp_path / "run"), str(tmp_path / "elsewhere")))
                os.kill(os.getpid(), signal.SIGKILL)
            return train_step(*given, **named)

        with patch.object(loop, "train_step", step):
            cli._run_as_rank(arguments)

    run_file.write_text(f'folder = "{tmp_path / "run"}"\n' + run_file.read_text())
    with patch.object(shared_memory, "SHARED_MEMORY", memory), ForkServer(as_rank) as fork_server:
        train_command.train_here(fork_server, run_file, options, verify=False, fresh=False, as_json=True)
    assert "rank 1 was killed by SIGKILL" in capfd.readouterr().err
    assert not (tmp_path / "elsewhere").exists()
    run = replace(whole, folder=tmp_path / "run")
    assert losses(run.folder) == losses(whole.folder)
    assert_same_end(run, whole)


def test_a_frozen_run_is_the_run(run_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = DecoderConfig(vocab_size=300, hidden_size=16, intermediate_size=24, num_hidden_layers=1,
                           num_attention_heads=2)  # fmt: skip
    save_folder(tmp_path / "model", build(config))
    text = run_file.read_text()
    pretrained = tmp_path / "pretrained.toml"
    data = text[text.index("[data]") :].replace("[data]", '[data]\ntokenizer = "bytes"')
    pretrained.write_text(f'[model]\nfrom = "{tmp_path / "model"}"\n' + data)
    examples = sorted((Path(__file__).parents[2] / "examples").glob("*.toml"))
    assert examples
    monkeypatch.chdir(Path(__file__).parents[2])
    odd = ["train.clip=inf", 'name="a \\"b\\" \\u00e9"', "train.epsilon=1e-13", "plan.tensor={x=2, sequence=true}"]
    runs = [load_run(path) for path in (*examples, pretrained)] + [load_run(run_file, odd)]
    runs.append(replace(runs[-1], plan=Plan(data=2), origins={"plan.data": "planner"}))
    for run in runs:
        path = tmp_path / "any name.frozen"
        path.write_text(run.to_json())
        found = load_run(path)
        assert found == run
        assert found.to_toml() == run.to_toml()
        assert has_layout(found) == has_layout(run)
    (tmp_path / "model" / "config.json").unlink()  # nothing but the copy is asked what the model is
    path.write_text(runs[len(examples)].to_json())
    assert load_run(path) == runs[len(examples)]


# --- a restart by a launcher


ELASTIC = {"TORCHELASTIC_MAX_RESTARTS": "3", "TORCHELASTIC_RUN_ID": "none"}
OF_TORCHRUN = RankInfo(0, 2, 0, 2, 1, "torchrun")


def rate_in_a_child(run_file: Path, environ: Mapping[str, str], fails: bool = True) -> float:
    """The learning rate of a rank that is a child of this process, as those of torchrun are of its agent."""

    def rank(_: int) -> float:
        try:
            with run_of_job(run_file, [], environ, OF_TORCHRUN) as run:
                found = run.train.learning_rate
                if fails:
                    raise RuntimeError("lost a rank")
        except RuntimeError:
            pass
        return found

    answer: float = run_local(rank, 1)[0]
    return answer


def test_ranks_that_torchrun_starts_again_go_on_with_the_run_that_the_first_have_read(
    run_file: Path, memory: Path
) -> None:
    assert rate_in_a_child(run_file, ELASTIC) == 1e-2
    text = run_file.read_text()
    run_file.write_text(text.replace("learning_rate = 1e-2", "learning_rate = 1e-5"))
    assert rate_in_a_child(run_file, ELASTIC) == 1e-2
    run_file.write_text("nonsense")
    assert rate_in_a_child(run_file, ELASTIC, fails=False) == 1e-2  # and ends as it should
    assert not list(memory.iterdir())
    run_file.write_text(text.replace("learning_rate = 1e-2", "learning_rate = 1e-5"))
    assert rate_in_a_child(run_file, ELASTIC) == 1e-5  # another job
    assert rate_in_a_child(run_file, {**ELASTIC, "TORCHELASTIC_RUN_ID": "other"}) == 1e-5


def test_jobs_of_different_agents_read_the_file_themselves(run_file: Path, memory: Path) -> None:
    assert rate_in_a_child(run_file, ELASTIC) == 1e-2
    run_file.write_text(run_file.read_text().replace("learning_rate = 1e-2", "learning_rate = 1e-5"))

    def agent(_: int) -> float:
        return rate_in_a_child(run_file, ELASTIC)

    assert run_local(agent, 1) == [1e-5]
    assert rate_in_a_child(run_file, {"TORCHELASTIC_RUN_ID": "none"}) == 1e-5  # nobody starts it again
