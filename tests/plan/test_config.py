"""Run files: what is wrong with one is told in one line, with status 2, before any process is started."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from runs_for_tests import write_run_file

from weft.commands.main import main
from weft.errors import ConfigError
from weft.plan import Context, Pipe, Tensor
from weft.run_file import check_run_file, load_run, run_from_tables
from weft.run_tables import TrainConfig
from weft.schema import parse_toml

pytestmark = pytest.mark.processes

ROOT = Path(__file__).parents[2]
Refuse = Callable[..., str]


@pytest.fixture
def refuse(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Refuse:
    """Calls `weft` in this process and returns its one line; nothing may be started before it is printed."""

    def start(*_: object, **__: object) -> None:
        raise AssertionError("a process or a group was started for a run that cannot work")

    for name in (
        "weft.commands.train.prove",
        "weft.commands.train.start_ranks",
        "weft.train.setup.init_process_group",
    ):
        monkeypatch.setattr(name, start)

    def call(*arguments: object, command: str = "train") -> str:
        monkeypatch.setattr(sys, "argv", ["weft", command, *map(str, arguments)])
        with pytest.raises(SystemExit) as left:
            main()
        assert left.value.code == 2
        lines = capsys.readouterr().err.splitlines()
        assert len(lines) == 1, lines
        assert lines[0].startswith("weft: ")
        return lines[0]

    return call


BAD_OVERRIDES = {
    # unknown names
    "trian.steps=5": "unknown key 'trian'; did you mean 'train'?",
    "train.stpes=5": "unknown key 'train.stpes'; did you mean 'steps'?",
    "plan.dta=2": "unknown key 'plan.dta'; did you mean 'data'?",
    "plan.shard.stge=2": "unknown key 'plan.shard.stge'; did you mean 'stage'?",
    "plan.memory.recomputation=full": "unknown key 'plan.memory.recomputation'; did you mean 'recompute'?",
    "model.hiden_size=64": "unknown key 'model.hiden_size'; did you mean 'hidden_size'?",
    "model.architecture=lama": "unknown 'model.architecture' = 'lama'; did you mean 'llama'?",
    "cluster=h10": "unknown cluster 'h10'; did you mean 'h100'?",
    "plan.precision=fp16": "'plan.precision' = 'fp16' (a string) but it expects one of 'fp64', 'fp32', 'bf16'",
    "train.schedule=cosin": "did you mean 'cosine'?",
    # wrong types
    "train.steps=many": "'train.steps' = 'many' (a string) but it expects an integer",
    "train.steps=1.5": "'train.steps' = 1.5 (a number) but it expects an integer",
    "train.batch=true": "'train.batch' = True (true or false) but it expects an integer",
    "plan.shard=all": "expects an integer or a table { degree, stage }",
    "plan.shard.stage=4": "expects one of 1, 2, 3",
    "train=5": "'train' = 5 but it expects a table [train]",
    "name=5": "'name' = 5 but it expects a string",
    "name=": "'name' is empty",
    "folder=": "'folder' is empty",
    "name=../../x": "name = '../../x' is a path; give a plain name, and the path as folder = ...",
    "name=..": "name = '..' is a path",
    "train.steps.more=2": "override 'train.steps.more=2': 'train.steps' = 15 is no table",
    # syntax
    "train.steps": "override 'train.steps' is not of the form section.key=value",
    "=5": "is not of the form section.key=value",
    "train..steps=5": "is not of the form section.key=value",
    # numbers that do not fit
    "plan.data=0": "plan.data = 0; a degree is at least 1",
    "plan.shard=-4": "plan.shard = -4; a degree is at least 1",
    "plan.data=3": "batch = 16 sequences does not divide over 3 ranks (data 3 × shard 1); use 15 or 18",
    "plan.shard=32": "batch = 16 sequences does not divide over 32 ranks (data 1 × shard 32); use 32",
    "train.batch=0": "a batch of 0 sequences",
    "plan.micro_batch=3": "plan.micro_batch = 3 does not divide the 16 sequences of each rank",
    "plan.micro_batch=0": "plan.micro_batch = 0; a micro-batch holds at least 1 sequence",
    "plan.memory.accumulate=slice": "plan.memory.accumulate = 'slice' needs shard.stage 2 or 3",
    "model.num_attention_heads=7": "num_attention_heads = 7",
    "model.num_key_value_heads=3": "num_key_value_heads = 3 does not divide num_attention_heads = 4",
    "model.vocab_size=100": "has a vocabulary of 100 but tokenizer 'bytes' has 257 tokens",
    "cluster=h100:1x9": "asks for 9 devices per node but",
    "train.batch_tokens=384": "give one of train.batch (sequences per step) and train.batch_tokens",
    "train.steps=0": "train.steps = 0; it must be at least 1",
    "train.warmup_steps=16": "train.warmup_steps = 16 and train.decay_steps = 0 exceed train.steps = 15",
    "train.decay_steps=5": "train.decay_steps belongs to schedule = 'wsd'; given schedule = 'cosine'",
    "train.evaluate_every=0": "train.evaluate_every = 0; it must be at least 1",
    "train.learning_rate=-1.0": "train.learning_rate = -1.0",
    "train.learning_rate=nan": "train.learning_rate = nan",
    "train.beta1=1.0": "train.beta1 = 1.0",
    "train.beta2=-0.5": "train.beta2 = -0.5",
    "train.epsilon=-1e-8": "train.epsilon = -1e-08",
    "train.weight_decay=-0.1": "train.weight_decay = -0.1",
    "train.clip=0": "train.clip = 0.0",
    "train.final_learning_rate=2": "train.final_learning_rate = 2.0",
    "train.seed=99999999999999999999": "train.seed = 99999999999999999999",
    "checkpoint.every=0": "checkpoint.every = 0; it must be at least 1",
    "checkpoint.keep_last=0": "checkpoint.keep_last = 0; it must be at least 1",
    "data.held_out=1": "data.held_out = 1.0; it is a fraction from 0 to below 1",
    "data.sequence=0": "data.sequence = 0; it must be at least 1",
    # sizes that could not even be counted
    "data.sequence=1000000000": "data.sequence = 1000000000; it must be at most 16777216",
    "model.hidden_size=1000000000": "hidden_size = 1000000000 is larger than that of any model; give at most",
    "model.num_hidden_layers=10000000": "num_hidden_layers = 10000000 is larger than that of any model",
    "train.batch=1000000000000": "train.batch = 1000000000000; it must be at most 16777216",
    # data
    'data.kind=["text"]': "unknown 'data.kind' = ['text']",
    "data.source=absent.txt": "there is no data at absent.txt",
    "data.sequence=20000": "needs at least 20001 tokens, but the held-out data holds",
    "data.tokenizer=absent.json": "cannot read the tokenizer absent.json",
    # a device that is not there
    "train.device=cuda": "train.device = 'cuda' but torch sees no GPU",
}


@pytest.mark.parametrize("override", BAD_OVERRIDES)
def test_a_bad_value_is_one_line(run_file: Path, refuse: Refuse, override: str) -> None:
    assert BAD_OVERRIDES[override] in refuse(run_file, override)


@pytest.mark.parametrize("command", ["plan", "verify"])
def test_every_command_that_reads_a_run_file_refuses_alike(run_file: Path, refuse: Refuse, command: str) -> None:
    assert "did you mean 'steps'?" in refuse(run_file, "train.stpes=5", command=command)


def test_the_run_file_itself(tmp_path: Path, refuse: Refuse) -> None:
    assert "absent.toml does not exist" in refuse(tmp_path / "absent.toml")
    assert "Is a directory" in refuse(tmp_path)
    path = tmp_path / "run.toml"
    path.write_text("steps = = 5")
    assert f"{path} is not valid TOML" in refuse(path)
    path.write_bytes(b"\xff\xfe\x00")
    assert "cannot be read as UTF-8 text" in refuse(path)
    path.write_text("")
    assert refuse(path) == (
        "weft: missing keys 'data.source' (expects a string: a file, a folder, or \"stdlib\": the text of Python's "
        "standard library), 'data.sequence' (expects an integer: tokens of a sequence), 'train.steps' (expects an "
        "integer: steps of the run), 'train.batch' (sequences or images per step) or 'train.batch_tokens'"
    )
    path.write_text("[run]\nsteps = 1\n")
    assert "unknown key 'run'" in refuse(path)


def test_numbers_may_be_short(run_file: Path) -> None:
    run = load_run(run_file, ["train.steps=4M", "train.batch=1.6e1", "train.warmup_steps=2k"])
    assert (run.train.steps, run.train.batch, run.train.warmup_steps) == (4 * 1024 * 1024, 16, 2048)


def test_a_plan_that_does_not_fit_is_refused_with_the_remedy(run_file: Path, refuse: Refuse) -> None:
    line = refuse(run_file, "plan.data=1", "model.intermediate_size=99999999")
    assert line.startswith("weft: the plan does not fit: 1 process, micro-batch 16, needs ")
    assert "No plan near it needs less than" in line


def test_files_that_cannot_be_read_or_written_are_one_line(
    run_file: Path, refuse: Refuse, monkeypatch: pytest.MonkeyPatch
) -> None:
    loop = run_file.with_name("loop.toml")
    loop.symlink_to(loop)  # root may read any file, but not this
    assert "loop.toml cannot be read" in refuse(loop)
    assert "/cache" in (line := refuse(run_file, f"data.cache={run_file.name}/cache"))
    assert "weft: cannot prepare the data: " in line
    source = run_file.with_name("texts")
    source.mkdir()
    (source / "a.txt").symlink_to("a.txt")
    (source / "b.txt").write_text("some words " * 100)
    assert "texts" in refuse(run_file, "data.source=texts")
    assert f"{run_file.name}/run" in refuse(run_file, f"folder={run_file.name}/run")
    assert "page.html" in refuse(run_file, "--report", f"{run_file.name}/page.html", command="plan")

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "runs/cache/tokens")

    monkeypatch.setattr("weft.data.tokens.build_folder", full)
    line = refuse(run_file, "data.cache=another")
    assert line.startswith("weft: cannot prepare the data: runs/cache/tokens: No space left on device; give the folder")


def test_neither_batch_nor_batch_tokens(run_file: Path, refuse: Refuse) -> None:
    run_file.write_text(run_file.read_text().replace("batch = 16\n", ""))
    assert "missing key 'train.batch' (sequences or images per step) or 'train.batch_tokens'" in refuse(run_file)
    assert "train.batch_tokens = 100 is not a multiple of data.sequence = 24" in refuse(
        run_file, "train.batch_tokens=100"
    )


def test_empty_data(run_file: Path, tmp_path: Path, refuse: Refuse) -> None:
    (tmp_path / "empty.txt").write_text("")
    assert "holds no text" in refuse(run_file, "data.source=empty.txt")
    (tmp_path / "nothing").mkdir()
    assert "holds no data" in refuse(run_file, "data.source=nothing")


def test_a_model_folder_and_a_model_table(run_file: Path, refuse: Refuse) -> None:
    assert "model.from already says what the model is; remove model.hidden_size" in refuse(run_file, "model.from=x")


TORCHRUN = {"RANK": "0", "WORLD_SIZE": "3", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "3"}
TORCHRUN |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29577", "TORCHELASTIC_RUN_ID": "x"}


@pytest.mark.parametrize(
    ("environ", "override", "words"),
    [
        ({}, "plan.data=2", "the plan needs 2 processes (data = 2) but torchrun started 3; start 2 or change the plan"),
        ({}, "plan.data=1", "the plan needs 1 process but torchrun started 3"),
        ({"RANK": "3"}, "plan.data=2", "torchrun gave rank 3, which is not below 3 ranks"),
        ({"WORLD_SIZE": "two"}, "plan.data=2", "WORLD_SIZE = 'two' is not a whole number"),
        ({"MASTER_PORT": ""}, "plan.data=2", "torchrun's variables are half set: MASTER_PORT missing"),
    ],
)
def test_a_world_that_does_not_match(
    run_file: Path,
    refuse: Refuse,
    monkeypatch: pytest.MonkeyPatch,
    environ: dict[str, str],
    override: str,
    words: str,
) -> None:
    for name, value in (TORCHRUN | environ).items():
        monkeypatch.setenv(name, value)
    assert words in refuse(run_file, override)


def test_under_a_launcher_data_and_flags_are_checked_first(
    run_file: Path, refuse: Refuse, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in (TORCHRUN | {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}).items():
        monkeypatch.setenv(name, value)
    assert "there is no data at" in refuse(run_file, "plan.data=2", "data.source=absent")
    assert "--fresh" in refuse(run_file, "plan.data=2", "--fresh")
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert "unknown cluster" in refuse(run_file, "plan.data=2", "cluster=h10")  # on every rank, not on the first only


@pytest.mark.parametrize(
    ("environ", "arguments", "words"),
    [
        ({}, ["train.stpes=5"], "unknown key 'train.stpes'; did you mean 'steps'?"),
        pytest.param(
            TORCHRUN,
            ["plan.data=2"],
            "the plan needs 2 processes (data = 2) but torchrun started 3",
            marks=pytest.mark.soak,
        ),
    ],
)
def test_a_real_process_leaves_with_status_2(
    run_file: Path, environ: dict[str, str], arguments: list[str], words: str
) -> None:
    command = [sys.executable, "-m", "weft", "train", str(run_file), *arguments]
    left = subprocess.run(
        command, env=os.environ | {"PYTHONPATH": str(ROOT)} | environ, capture_output=True, text=True, timeout=300
    )
    assert left.returncode == 2
    lines = left.stderr.splitlines()
    assert len(lines) == 1
    assert lines[0].startswith("weft: ")
    assert words in lines[0]


# --- what a run is


def test_overrides_change_what_the_file_says(run_file: Path) -> None:
    run = load_run(run_file, ["plan.shard=4", "plan.shard.stage=2", "train.learning_rate=1", "data.source=2 words"])
    assert (run.plan.shard.degree, run.plan.shard.stage) == (4, 2)
    short = ["plan.pipe=2", "plan.pipe.schedule=gpipe", "plan.context=2", "plan.context.kind=all-to-all"]
    plan = load_run(run_file, [*short, "plan.tensor=2", "plan.tensor.sequence=true"]).plan
    assert (plan.pipe, plan.context, plan.tensor) == (Pipe(2, "gpipe"), Context(2, "all-to-all"), Tensor(2, 1, True))
    assert run.train.learning_rate == 1.0
    assert run.data.source == "2 words"
    assert run.name == "tiny"
    assert run.folder == Path("runs/tiny")
    assert load_run(run_file, ["name=other"]).folder == Path("runs/other")


def test_the_vocabulary_is_the_tokenizers_unless_given(run_file: Path) -> None:
    assert load_run(run_file).model.vocab_size == 257
    assert load_run(run_file, ["model.vocab_size=320"]).model.vocab_size == 320


def test_learned_positions_bound_the_sequence(run_file: Path) -> None:
    text = run_file.read_text()
    run_file.write_text('[model]\narchitecture = "gpt2"\nn_positions = 20\n' + text[text.index("[data]") :])
    with pytest.raises(ConfigError, match=r"data\.sequence = 24 exceeds the model's n_positions = 20"):
        load_run(run_file)


def test_every_value_says_where_it_came_from(run_file: Path) -> None:
    lines = load_run(run_file, ["train.steps=20", "plan.data=2"]).to_toml().splitlines()
    assert "steps = 20  # override" in lines
    assert "data = 2  # override" in lines
    assert "batch = 16  # tiny.toml" in lines
    assert "epsilon = 1e-08" in lines  # a default


@given(
    overrides=st.lists(
        st.sampled_from(
            [
                *("plan.data=2", "plan.shard={degree=4, stage=2}", "plan.micro_batch=2", "plan.precision=bf16"),
                *(
                    "train.clip=inf",
                    "train.seed=-3",
                    "train.schedule=wsd",
                    "checkpoint.every=7",
                    "log.tensorboard=true",
                ),
                *('name=quote " and \\ back', "data.held_out=0", "model.rope_theta=5e5", "model.head_dim=8"),
            ]
        ),
        unique=True,
    )
)
def test_a_run_reads_back_what_it_wrote(overrides: list[str], tmp_path_factory: pytest.TempPathFactory) -> None:
    file = tmp_path_factory.getbasetemp() / "round" / "tiny.toml"
    if not file.exists():
        file.parent.mkdir()
        write_run_file(file.parent)
    run = load_run(file, overrides)
    again = run_from_tables(parse_toml(run.to_toml(), "run"), run.origins, "unused")
    assert again == run


@given(steps=st.integers(1, 50), warmup=st.integers(0, 60), decay=st.one_of(st.none(), st.integers(1, 60)))
def test_warmup_and_decay_fit_into_the_steps(steps: int, warmup: int, decay: int | None) -> None:
    def make() -> TrainConfig:
        return TrainConfig(steps=steps, batch=1, schedule="wsd", warmup_steps=warmup, decay_steps=decay)

    if warmup + (decay or 0) <= steps:
        assert make().steps == steps
    else:
        with pytest.raises(ConfigError, match=r"exceed train\.steps"):
            make()


def test_fewer_steps_scale_the_warm_up_of_the_file(tmp_path: Path) -> None:
    """The first override that people try is train.steps=5, on a file with a longer warm-up."""
    file = write_run_file(tmp_path)  # 15 steps, a warm-up of 3
    run = load_run(file, ["train.steps=2"])
    assert (run.train.steps, run.train.warmup_steps) == (2, 0)
    assert run.scaled == ["train.warmup_steps = 0, scaled from 3 of 15 steps, as train.steps = 2"]
    check_run_file(file, ["train.steps=1"])
    assert load_run(file, ["train.steps=3"]).train.warmup_steps == 3  # it fits
    assert load_run(file, ["train.steps=30"]).train.warmup_steps == 3  # training goes on
    text = file.read_text().replace("warmup_steps = 3", 'warmup_steps = 3\ndecay_steps = 12\nschedule = "wsd"')
    file.write_text(text)
    run = load_run(file, ["train.steps=5"])
    assert (run.train.warmup_steps, run.train.decay_steps) == (1, 4)
    assert load_run(file, ["train.steps=1"]).train.decay_steps == 1
    for override in ("train.warmup_steps=9", "train.decay_steps=9"):  # what is said beside it stays
        with pytest.raises(ConfigError, match=r"exceed train\.steps = 2"):
            load_run(file, ["train.steps=2", override])
    with pytest.raises(ConfigError, match="expects an integer"):
        load_run(file, ["train.steps=few"])


def test_steps_to_record_are_those_that_the_run_has(tmp_path: Path) -> None:
    """`--profile 10:20` was refused for a run of fewer than 20 steps."""
    file = write_run_file(tmp_path)  # 15 steps
    assert load_run(file, ["train.profile=10:20"]).train.profile_steps == range(10, 15)
    assert load_run(file, ["train.profile=10:12"]).train.profile_steps == range(10, 12)
    with pytest.raises(ConfigError, match=r"'10:20' is not FIRST:LAST with .* FIRST < train\.steps = 5;"):
        load_run(file, ["train.profile=10:20", "train.steps=5"])  # none of the steps that were asked for is there
    file.write_text(file.read_text().replace("warmup_steps = 3", 'warmup_steps = 3\nprofile = "9:20"'))
    assert load_run(file, ["train.steps=12"]).train.profile_steps == range(9, 12)
    run = load_run(file, ["train.steps=5"])
    assert run.train.profile_steps == range(3, 5)
    assert "train.profile = 3:5, scaled from 9:20 of 15 steps, as train.steps = 5" in run.scaled
    assert load_run(file, ["train.steps=1"]).train.profile_steps == range(1)
    assert load_run(file, ["train.steps=30"]).train.profile_steps == range(9, 20)
    file.write_text(file.read_text().replace("9:20", "9:10"))
    assert load_run(file, ["train.steps=5"]).train.profile_steps == range(3, 4)  # at least one
