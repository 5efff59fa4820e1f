"""Values that weft stores on modules and tensors: typed, in one attribute, copied with their object."""

import copy
import re
from pathlib import Path

import torch
from torch import nn

from weft.inspection.annotations import Annotation

WEFT = Path(__file__).parents[2] / "weft"
SIZES, NAMES = Annotation[tuple[int, int]]("test_sizes"), Annotation[list[str]]("test_names")


def test_values_are_set_read_and_removed() -> None:
    for owner in (nn.Linear(2, 2), torch.zeros(2)):
        assert SIZES.get(owner) is None
        SIZES.set(owner, (1, 2))
        NAMES.set(owner, ["a"])
        assert (SIZES.get(owner), NAMES.get(owner)) == ((1, 2), ["a"])
        assert SIZES.pop(owner) == (1, 2)
        assert SIZES.pop(owner) is None
        assert NAMES.setdefault(owner, []) == ["a"]
        assert SIZES.setdefault(owner, (3, 4)) == SIZES.get(owner) == (3, 4)


def test_a_deep_copy_of_a_model_has_copies_of_the_values() -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    NAMES.set(model[0], ["a"])
    other = copy.deepcopy(model)
    NAMES.setdefault(other[0], []).append("b")
    assert (NAMES.get(model[0]), NAMES.get(other[0])) == (["a"], ["a", "b"])


def test_a_shallow_copy_has_values_of_its_own() -> None:
    model = nn.Linear(2, 2)
    SIZES.set(model, (1, 2))
    other = copy.copy(model)
    SIZES.set(other, (3, 4))
    NAMES.set(other, ["a"])
    assert SIZES.get(model) == (1, 2)
    assert NAMES.get(model) is None
    assert SIZES.pop(other) == (3, 4)
    assert SIZES.get(model) == (1, 2)


def test_values_are_not_part_of_a_models_state() -> None:
    model = nn.Linear(2, 2)
    SIZES.set(model, (1, 2))
    assert set(model.state_dict()) == {"weight", "bias"}
    model.load_state_dict(nn.Linear(2, 2).state_dict())


def test_each_annotation_of_weft_has_a_name_of_its_own() -> None:
    text = "".join(path.read_text() for path in sorted(WEFT.rglob("*.py")))
    names = re.findall(r"= Annotation\[.+\]\(\"(\w+)\"\)", text)
    assert len(names) > 10
    assert len(names) == len(set(names))


def test_weft_stores_nothing_else_on_modules_and_tensors() -> None:
    hidden = [str(path) for path in sorted(WEFT.rglob("*.py")) if re.search(r"[\"'.]_weft_\w+", path.read_text())]
    assert hidden == []
