"""Plans and tables: strict reading with the remedy in the message, exact writing, and the batch identity."""

from __future__ import annotations

import string
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from weft.errors import ConfigError, PlanError
from weft.plan import MAX_RANKS, Context, Memory, Pipe, Plan, Shard, Tensor, load_plan, split_batch
from weft.schema import dump_toml, parse_override, parse_toml


def read(tmp_path: Path, text: str) -> Plan:
    """The plan of a file with this text in its [plan] table."""
    path = tmp_path / "plan.toml"
    path.write_text(f"[plan]\n{text}\n", encoding="utf-8")
    return load_plan(path)


# --- reading


def test_reads_every_key(tmp_path: Path) -> None:
    text = """
        data = 2
        pipe = { degree = 2, schedule = "interleaved", chunks = 3, balance = "memory", split = ["a", "b"] }
        shard = { degree = 4, stage = 2 }
        tensor = { x = 2, y = 3, sequence = true }
        context = { degree = 5, kind = "all-to-all" }
        micro_batch = 3
        memory = { recompute = "selective", accumulate = "slice" }
        precision = "bf16"
        exact = false
    """
    assert read(tmp_path, text) == Plan(
        data=2,
        pipe=Pipe(2, "interleaved", chunks=3, balance="memory", split=("a", "b")),
        shard=Shard(4, 2),
        tensor=Tensor(2, 3, True),
        context=Context(5, "all-to-all"),
        micro_batch=3,
        memory=Memory("selective", "slice"),
        precision="bf16",
        exact=False,
    )


def test_what_is_left_out_has_its_default_and_a_number_is_a_degree(tmp_path: Path) -> None:
    assert read(tmp_path, "") == Plan()
    assert read(tmp_path, "shard = 4") == Plan(shard=Shard(4, 3))


def test_what_a_plan_of_the_tensor_axes_says_of_itself(tmp_path: Path) -> None:
    plan = read(tmp_path, "tensor = { x = 4, y = 2, sequence = true, regather = true, chunks = 3 }")
    assert plan == Plan(tensor=Tensor(4, 2, True, True, 3))
    assert plan.describe_axes() == "x 4 (sequence, regather, 3 chunks) × y 2"
    assert Plan(tensor=Tensor(4, sequence=True)).describe_axes() == "x 4 (sequence)"
    assert read(tmp_path, plan.to_toml().removeprefix("[plan]\n")) == plan


BAD_TABLES = {
    "dta = 2": "unknown key 'plan.dta'; did you mean 'data'?",
    "shard = { degre = 2 }": "unknown key 'plan.shard.degre'; did you mean 'degree'?",
    'memory = { recompute = "selectiv" }': "'plan.memory.recompute' = 'selectiv' (a string) but it expects one of "
    "'none', 'selective', 'full'; did you mean 'selective'?",
    "zzz = 1": "unknown key 'plan.zzz'; known: branch, communication, context, data, exact, expert, expert_over, "
    "hierarchical, matmul, memory, micro_batch, pipe, precision, ranks_per_device, shard, statistics, tensor",
    'data = "2"': "'plan.data' = '2' (a string) but it expects an integer",
    "data = 2.5": "'plan.data' = 2.5 (a number) but it expects an integer",
    "data = true": "'plan.data' = True (true or false) but it expects an integer",
    "shard = true": "'plan.shard' = True but it expects an integer or a table { degree, stage }",
    "shard = { degree = true }": "'plan.shard.degree' = True (true or false) but it expects an integer",
    "shard = { stage = 4 }": "'plan.shard.stage' = 4 (an integer) but it expects one of 1, 2, 3",
    "shard = { stage = true }": "'plan.shard.stage' = True (true or false) but it expects one of 1, 2, 3",
    "exact = 1": "'plan.exact' = 1 (an integer) but it expects true or false",
    "memory = 3": "'plan.memory' = 3 (an integer) but it expects a table",
    'precision = "fp16"': "'plan.precision' = 'fp16' (a string) but it expects one of 'fp64', 'fp32', 'bf16'",
    "data = 0": "plan.data = 0; a degree is at least 1",
    "data = -3": "plan.data = -3; a degree is at least 1",
    "shard = 0": "plan.shard = 0; a degree is at least 1",
    "micro_batch = 0": "plan.micro_batch = 0; a micro-batch holds at least 1 sequence",
    "data = 2048\nshard = 1024": "the plan asks for 2097152 ranks (data 2048 × shard 1024 (stage 3)); at most 1048576",
    "tensor = true": "'plan.tensor' = True but it expects an integer or a table { x, y, sequence, regather, "
    "chunks, ... }",
    "tensor = { x = 2, chunks = 2 }": "chunks = 2 cuts what tensor.sequence = true gathers and scatters, and sequence "
    "is false; set sequence = true, or chunks = 1",
    "tensor = { x = 2, chunks = 0 }": "plan.tensor.chunks = 0; it must be at least 1",
    "tensor = { x = 2, regather = true }": "gathers again what tensor.sequence = true splits, and sequence is false",
    'tensor = { sequence = true, regather = true }\nmemory = { recompute = "full" }': "recompute = 'full' already "
    "gathers the inputs of a block's matmuls again; use regather = false",
    'memory = { accumulate = "slice" }': "plan.memory.accumulate = 'slice' needs shard.stage 2 or 3",
    'shard = { degree = 2, stage = 1 }\nmemory = { accumulate = "slice" }': "given stage 1, degree 2",
}


@pytest.mark.parametrize(("text", "message"), BAD_TABLES.items())
def test_a_bad_table_says_what_was_given_and_what_to_change(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read(tmp_path, text)
    assert message in str(caught.value)


def test_files_that_are_no_plans_are_named(tmp_path: Path) -> None:
    path = tmp_path / "p.toml"
    with pytest.raises(ConfigError, match=r"p\.toml does not exist; check the path"):
        load_plan(path)
    path.write_text("[model]\n")
    with pytest.raises(ConfigError, match=r"p\.toml has no \[plan\] table"):
        load_plan(path)
    path.write_text("plan = 3\n")
    with pytest.raises(ConfigError, match=r"'plan' = 3|p\.toml has no \[plan\] table"):
        load_plan(path)
    path.write_text("[plan\n")
    with pytest.raises(ConfigError, match=r"p\.toml is not valid TOML: "):
        load_plan(path)
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match=r"p\.toml cannot be read as UTF-8 text"):
        load_plan(path)
    with pytest.raises(ConfigError, match="cannot be read as UTF-8 text"):
        load_plan(tmp_path)


def test_as_many_ranks_as_there_may_be() -> None:
    assert Plan(data=MAX_RANKS).num_ranks == MAX_RANKS
    with pytest.raises(PlanError, match=f"at most {MAX_RANKS}"):
        Plan(data=MAX_RANKS + 1)


# --- the value

plans = st.builds(
    Plan,
    data=st.integers(1, 32),
    pipe=st.builds(
        Pipe,
        st.integers(1, 8),
        st.sampled_from(["gpipe", "1f1b", "interleaved", "zero-bubble", "gems", "bidirectional", "message"]),
        chunks=st.none() | st.integers(1, 4),
        split=st.lists(st.text("abc.", min_size=1), max_size=3).map(tuple),
    ),
    shard=st.builds(Shard, st.integers(1, 32), st.sampled_from([1, 2, 3])),
    expert=st.integers(1, 4),
    tensor=st.builds(Tensor, st.integers(1, 8), st.integers(1, 4), st.booleans()),
    context=st.builds(Context, st.integers(1, 4), st.sampled_from(["ring", "all-to-all"])),
    micro_batch=st.none() | st.integers(1, 1000),
    memory=st.builds(Memory, st.sampled_from(["none", "selective", "full"])),
    precision=st.sampled_from(["fp64", "fp32", "bf16"]),
    exact=st.booleans(),
)


@given(plans)
def test_a_plan_that_is_written_reads_back(tmp_path_factory: pytest.TempPathFactory, plan: Plan) -> None:
    path = tmp_path_factory.getbasetemp() / "written.toml"
    path.write_text(plan.to_toml(), encoding="utf-8")
    assert load_plan(path) == plan


@given(plans)
def test_ranks_are_the_product_of_degrees_and_inner_is_the_stride(plan: Plan) -> None:
    inside = plan.context.degree * plan.tensor.x * plan.tensor.y
    assert plan.num_batch_ranks == plan.data * plan.shard.degree * plan.expert
    assert plan.num_ranks == plan.num_batch_ranks * plan.pipe.degree * inside
    assert list(plan.degrees) == ["data", "pipe", "shard", "expert", "branch", "rows", "columns", "context", "x", "y"]
    assert (plan.inner("pipe"), plan.inner("shard")) == (plan.shard.degree * plan.inner("shard"), plan.expert * inside)
    assert plan.inner("data") == plan.pipe.degree * plan.inner("pipe")
    assert (plan.inner("context"), plan.inner("x"), plan.inner("y")) == (
        plan.tensor.x * plan.tensor.y,
        plan.tensor.y,
        1,
    )


def test_a_changed_plan_is_a_replaced_one_and_is_checked() -> None:
    plan = Plan(data=2, tensor=Tensor(2, 2), micro_batch=3)
    assert plan.num_ranks == 8  # its degrees are cached
    changed = plan.changed(data=4, pipe=Pipe(2))
    assert changed == replace(plan, data=4, pipe=Pipe(2))
    assert changed.degrees == replace(plan, data=4, pipe=Pipe(2)).degrees
    assert (plan.data, plan.num_ranks, changed.num_ranks) == (2, 8, 32)
    with pytest.raises(PlanError, match=r"plan\.data = 0; a degree is at least 1"):
        plan.changed(data=0)
    with pytest.raises(PlanError, match=r"accumulate = 'slice' needs shard\.stage 2 or 3"):
        plan.changed(memory=Memory(accumulate="slice"))


def test_plans_in_words() -> None:
    assert Plan().describe_axes() == "1 process"
    assert Plan(data=2).describe_axes() == "data 2"
    assert Plan(data=2, shard=Shard(4, 1)).describe_axes() == "data 2 × shard 4 (stage 1)"


# --- the batch identity


@given(plans, st.integers(1, 10_000), st.integers(1, 10_000))
def test_a_split_batch_multiplies_back_or_says_what_would(plan: Plan, batch: int, sequence: int) -> None:
    plan, ranks = replace(plan, pipe=Pipe(plan.pipe.degree)), plan.num_batch_ranks
    sequence *= 2 * plan.context.degree  # what context wants is tested below
    if batch % ranks == 0 and (batch // ranks) % (plan.micro_batch or 1) == 0:
        split = split_batch(plan, batch, sequence)
        assert split.num_batch_ranks * split.micro_batch * split.accumulation == split.batch == batch
        assert split.micro_batch == (plan.micro_batch or batch // ranks)
        assert split.tokens == batch * sequence
        return
    with pytest.raises(PlanError) as caught:
        split_batch(plan, batch, sequence)
    remedy = str(caught.value).rsplit("use ", 1)[1].removeprefix("one of ")
    for word in remedy.replace(" or ", ", ").split(", "):
        if batch % ranks:
            assert int(word) % ranks == 0
            assert int(word) > 0
        else:
            assert (batch // ranks) % int(word) == 0


def test_messages_of_batches_that_do_not_divide() -> None:
    plan = Plan(data=2, shard=Shard(3), micro_batch=4)
    with pytest.raises(PlanError, match=r"batch = 20 sequences does not divide over 6 ranks .*use 18 or 24$"):
        split_batch(plan, 20, 8)
    with pytest.raises(PlanError, match=r"batch = 5 .*use 6$"):
        split_batch(plan, 5, 8)
    with pytest.raises(PlanError, match=r"micro_batch = 4 does not divide the 6 sequences .*use one of 1, 2, 3, 6$"):
        split_batch(plan, 36, 8)
    for batch, sequence in ((0, 8), (8, 0), (-6, 8)):
        with pytest.raises(PlanError, match=f"a batch of {batch} sequences of {sequence} tokens is empty"):
            split_batch(plan, batch, sequence)


def test_the_identity_is_printed_with_its_numbers() -> None:
    plan = Plan(data=2, shard=Shard(3), micro_batch=4)
    assert split_batch(plan, 48, 1000).identity(plan) == (
        "48 sequences/step = 2 data × 3 shard × 4 micro-batch × 2 accumulation; × 1000 tokens = 48,000 tokens/step"
    )


# --- tables as text

keys = st.text(string.ascii_letters + string.digits + "_-", min_size=1, max_size=8)
scalars: st.SearchStrategy[Any] = (
    st.booleans() | st.integers(-(2**63), 2**63 - 1) | st.floats(allow_nan=False) | st.text(max_size=20)
)
values = st.recursive(scalars, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(keys, inner, max_size=3))


@given(st.dictionaries(keys, scalars | st.dictionaries(keys, values, max_size=4), max_size=4))
@settings(max_examples=2 * settings.default.max_examples)
def test_tables_that_are_written_read_back(table: dict[str, Any]) -> None:
    assert parse_toml(dump_toml(table), "text") == table


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("plan.data=2", (["plan", "data"], 2)),
        ("train.rate=1e-3", (["train", "rate"], 1e-3)),
        ("a = true", (["a"], True)),
        ("a.b.c=[1, 2]", (["a", "b", "c"], [1, 2])),
        ('a.b="x y"', (["a", "b"], "x y")),
        ("a.b=x y", (["a", "b"], "x y")),
        ("data.path=/tmp/x=y", (["data", "path"], "/tmp/x=y")),
        ("plan.shard={ degree = 2 }", (["plan", "shard"], {"degree": 2})),
        ("a=", (["a"], "")),
    ],
)
def test_overrides(text: str, expected: tuple[list[str], Any]) -> None:
    assert parse_override(text) == expected


@pytest.mark.parametrize("text", ["plan.data", "=3", "a..b=3", ".a=1", ""])
def test_overrides_of_another_form_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=r"is not of the form section\.key=value, e\.g\. train\.steps=100"):
        parse_override(text)


@given(st.text(max_size=12), st.text(max_size=12))
def test_an_override_sets_one_value_whatever_its_text(name: str, raw: str) -> None:
    # A value is TOML, but it must not smuggle in a second key.
    assume("=" not in name and all(part.strip() for part in name.split(".")))
    found, _ = parse_override(f"{name}={raw}")
    assert found == [part.strip() for part in name.split(".")]


def test_an_override_with_a_second_line_is_one_string() -> None:
    assert parse_override("a=1\nb=2") == (["a"], "1\nb=2")


def test_a_sequence_that_context_does_not_divide_is_refused() -> None:
    with pytest.raises(PlanError, match="sequence of 12 tokens does not divide into 2 × context = 8 equal parts"):
        split_batch(Plan(context=Context(4)), 4, 12)
    assert split_batch(Plan(context=Context(4)), 4, 16).tokens == 64


# --- in Python


@pytest.mark.parametrize("name", ["pipe", "shard", "tensor", "context", "branch"])
def test_a_number_sets_the_degree_in_python_as_in_a_file(name: str, tmp_path: Path) -> None:
    assert Plan(**{name: 2}) == read(tmp_path, f"{name} = 2")
    assert Plan(**{name: 2}).num_ranks == 2


def test_a_table_of_a_plan_may_be_a_dict() -> None:
    assert Plan(tensor={"x": 2}, expert_over=["x"], expert=2) == Plan(tensor=Tensor(2), expert_over=("x",), expert=2)  # type: ignore[arg-type]
    assert Memory(offload=1) == Memory(offload=1.0)


@pytest.mark.parametrize(
    "make",
    [
        lambda: Plan(tile=2),  # type: ignore[arg-type]
        lambda: Plan(data="2"),  # type: ignore[arg-type]
        lambda: Plan(data=True),
        lambda: Plan(pipe=2.5),  # type: ignore[arg-type]
        lambda: Plan(pipe=None),  # type: ignore[arg-type]
        lambda: Plan(memory="full"),  # type: ignore[arg-type]
        lambda: Plan(precision="fp16"),  # type: ignore[arg-type]
        lambda: Plan(shard=Shard(2, 4)),  # type: ignore[arg-type]
        lambda: Plan(tensor=Tensor("2")),  # type: ignore[arg-type]
        lambda: Plan(tensor={"z": 2}),  # type: ignore[arg-type]
        lambda: Memory("ful"),  # type: ignore[arg-type]
    ],
)
def test_a_value_of_another_type_is_refused_in_python_as_in_a_file(make: Callable[[], object]) -> None:
    with pytest.raises(ConfigError, match=r"'plan\."):
        make()
