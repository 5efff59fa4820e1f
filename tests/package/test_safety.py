"""What weft must never do: unpickle, run code from files, or talk to other ranks behind the ledger's back.

The sources are read as syntax trees, so that words in comments and names like `model.eval` do not count.
"""

from __future__ import annotations

import ast
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from weft.checkpoint import Checkpoint
from weft.errors import CheckpointError
from weft.serve.loading import load_for_generation

pytestmark = pytest.mark.processes

PACKAGE = Path(__file__).parents[2] / "weft"
SOURCES = sorted(PACKAGE.rglob("*.py"))

# Modules that unpickle or run what they read.
FORBIDDEN_MODULES = {"pickle", "cPickle", "_pickle", "dill", "cloudpickle", "joblib", "marshal", "shelve", "torch.jit"}
# Calls by the end of their dotted name: these pickle, unpickle or run code wherever they come from.
FORBIDDEN_CALLS = {
    *("torch.load", "torch.save", "eval", "exec", "compile", "__import__", "os.system", "os.popen"),
    *("all_gather_object", "gather_object", "broadcast_object_list", "scatter_object_list"),
    *("send_object_list", "recv_object_list", "torch.hub.load", "yaml.load", "np.fromfile"),
}
FORBIDDEN_KEYWORDS = {"trust_remote_code": None, "weights_only": False, "allow_pickle": True, "shell": True}
# Functions that move data between ranks; `dist` is how every module of weft calls torch.distributed.
COLLECTIVES = {
    *("all_reduce", "reduce", "broadcast", "all_gather", "all_gather_into_tensor", "all_gather_single", "gather"),
    *("scatter", "reduce_scatter", "reduce_scatter_tensor", "reduce_scatter_single", "all_to_all"),
    *("all_to_all_single", "send", "recv", "isend", "irecv", "batch_isend_irecv", "barrier", "monitored_barrier"),
}
GROUP_MAKERS = {"new_group", "new_subgroups", "split_group", "init_device_mesh", "DeviceMesh"}
WORLD_MAKERS = {"init_process_group", "destroy_process_group"}


def dotted(node: ast.AST) -> str:
    """`a.b.c` of an expression; what is no name, a call for instance, is `()`."""
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else "()"


def broken_rules(tree: ast.AST, name: str) -> Iterator[str]:
    """Every rule that a source breaks; `name` is its path inside the package."""
    in_comm, in_mesh = name.startswith("comm/"), name == "mesh.py"
    starts_worlds = name in ("launch/environment.py", "launch/local_ranks.py")
    for node in ast.walk(tree):
        at = f"{name}:{getattr(node, 'lineno', 0)}"
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            base = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            names = [alias.name for alias in node.names]
            for module in [*base, *names, *(f"{b}.{n}" for b in base for n in names)]:
                if module in FORBIDDEN_MODULES or module.split(".")[0] in FORBIDDEN_MODULES:
                    yield f"{at}: imports {module}"
            if base and base[0].startswith("torch.distributed") and COLLECTIVES & set(names) and not in_comm:
                yield f"{at}: imports a collective"
            if "_functional_collectives" in " ".join([*base, *names]) and not in_comm:
                yield f"{at}: imports functional collectives"
        if isinstance(node, ast.Call):
            called = dotted(node.func)
            last = called.rpartition(".")[2]
            plain = isinstance(node.func, ast.Name)
            for word in FORBIDDEN_CALLS:
                if called == word or (called.endswith(f".{word}") and ("." in word or "object" in word)):
                    yield f"{at}: calls {called}"
            for keyword in node.keywords:
                if keyword.arg in FORBIDDEN_KEYWORDS:
                    bad = FORBIDDEN_KEYWORDS[keyword.arg]
                    value = keyword.value.value if isinstance(keyword.value, ast.Constant) else "not a constant"
                    if bad is None or value is bad or value == "not a constant":
                        yield f"{at}: passes {keyword.arg}"
            if last in WORLD_MAKERS and called.startswith("dist.") and not starts_worlds:
                yield f"{at}: calls {called}"
            if last in GROUP_MAKERS and not in_mesh and (plain or called.startswith(("dist.", "torch.distributed."))):
                yield f"{at}: makes a group by {called}"
        if isinstance(node, ast.Attribute) and node.attr in COLLECTIVES and not in_comm:
            owner = dotted(node.value)
            if owner in ("dist", "torch.distributed", "c10d") or owner.endswith("process_group"):
                yield f"{at}: uses the collective {owner}.{node.attr}"


def test_no_source_breaks_a_rule() -> None:
    assert len(SOURCES) > 40
    found: list[str] = []
    for path in SOURCES:
        found += broken_rules(ast.parse(path.read_text()), path.relative_to(PACKAGE).as_posix())
    assert found == []


@pytest.mark.parametrize(
    "code",
    [
        "import pickle",
        "from pickle import loads",
        "from torch import jit",
        "import torch\ntorch.load('x')",
        "import torch as t\nimport torch\ntorch.save({}, 'x')",
        "import torch.distributed as dist\ndist.all_gather_object([], 1)",
        "import torch.distributed as dist\ndist.broadcast_object_list([])",
        "import torch.distributed as dist\ndist.all_reduce(x)",
        "import torch.distributed as dist\nf = dist.barrier",
        "import torch\ntorch.distributed.broadcast(x, 0)",
        "from torch.distributed import all_reduce",
        "import torch.distributed._functional_collectives as funcol",
        "import torch.distributed as dist\ndist.new_group([0])",
        "from torch.distributed.device_mesh import init_device_mesh\ninit_device_mesh('cpu', (2,))",
        "import torch.distributed as dist\ndist.init_process_group('gloo')",
        "eval('1')",
        "exec('1')",
        "AutoModel.from_pretrained('x', trust_remote_code=True)",
        "np.load('x', allow_pickle=True)",
        "np.load('x', allow_pickle=maybe)",
        "load('x', weights_only=False)",
        "subprocess.run('x', shell=True)",
    ],
)
def test_the_rules_see_what_they_forbid(code: str) -> None:
    assert list(broken_rules(ast.parse(code), "train/loop.py"))


@pytest.mark.parametrize(
    "code",
    [
        "model.eval()",
        "model.double().eval()",
        "np.load('x', allow_pickle=False)",
        "re.compile('x')",
        "axis.broadcast",
        "# eval('1')",
    ],
)
def test_the_rules_allow_what_is_harmless(code: str) -> None:
    assert list(broken_rules(ast.parse(code), "train/loop.py")) == []


# --- pickled files


@pytest.mark.parametrize("name", ["model.pt", "weights.pth", "pytorch_model.bin", "state.pkl", "x.ckpt", "0.distcp"])
def test_a_folder_with_a_pickled_file_is_refused_with_advice(tmp_path: Path, name: str) -> None:
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    with zipfile.ZipFile(folder / name, "w") as file:  # as torch.save writes
        file.writestr("archive/data.pkl", b"cos\nsystem\n(S'exit 1'\ntR.")
    for open_folder in (Checkpoint, load_for_generation):
        with pytest.raises(CheckpointError, match="weft never unpickles; export it with safetensors first") as caught:
            open_folder(folder)
        assert str(folder / name) in str(caught.value)


def test_a_pickled_file_beside_a_good_checkpoint_is_refused_too(tmp_path: Path) -> None:
    from weft.checkpoint import Saver

    saver = Saver(tmp_path, 0, 1, "token")
    saver.save(1, [], {}, asynchronous=False)
    Checkpoint(tmp_path / "step-00000001")
    (tmp_path / "step-00000001" / "optimizer.pt").write_bytes(b"\x80\x04N.")
    with pytest.raises(CheckpointError, match=r"optimizer\.pt: weft never unpickles"):
        Checkpoint(tmp_path / "step-00000001")
