"""Kernels, graphs and queues of a GPU where only a GPU can show that they are right."""

from __future__ import annotations

from pathlib import Path

import pytest
from gpu_for_tests import ROOT, run_program, succeeded, weft, write_run

LIMITS = {"between_matmuls": 1e-2, "caches": 1e-2, "packed": 1e-2, "losses": 1e-2}  # rounding of bf16; else 1e-6


@pytest.mark.xdist_group("large")
def test_kernels_reach_beyond_two_to_the_31st_element() -> None:
    left = succeeded(run_program(ROOT / "tests" / "helpers" / "large_for_tests.py"))
    for case, differences in left.json.items():
        for name, difference in differences.items():
            assert difference <= LIMITS.get(case, 1e-6), (case, name, difference)


def test_norms_are_right_after_a_graph_an_odd_step_and_a_replay(tmp_path: Path) -> None:
    """A step of another shape is computed without the graph; the replay after it must not see its gradients."""
    program = tmp_path / "graph.py"
    program.write_text(
        "import torch, weft\n"
        "from weft.models import build\n"
        "from weft.models.vision import ResNetConfig\n"
        "from weft.step.cuda_graph import WARM_STEPS, Graph\n"
        "from weft.step.objective import CLASSIFICATION\n"
        "from weft.step.train_step import train_step\n"
        "torch.backends.cudnn.deterministic = True\n"
        "def train(precision, with_graph):\n"
        "    torch.manual_seed(0)\n"
        "    plan = weft.Plan(precision=precision)\n"
        "    mesh = weft.Mesh(plan, 'cuda')\n"
        "    config = ResNetConfig(depth=10, width=8, num_classes=4, norm='group')\n"
        "    model = weft.parallelize(build(config).cuda(), plan, mesh)\n"
        "    alone = precision == 'fp32'\n"
        "    optimizer = torch.optim.AdamW(model.parameters(), 1e-2) if alone else weft.AdamW(model, lr=1e-2)\n"
        "    said, found = [], []\n"
        "    graph = Graph(model, said.append) if with_graph else None\n"
        "    for number, size in enumerate([32] * (WARM_STEPS + 2) + [48, 32, 40, 32, 32]):\n"
        "        draws = torch.Generator().manual_seed(number)\n"
        "        batch = torch.randn(2, 3, size, size, generator=draws).cuda(), torch.tensor([number % 3, 1]).cuda()\n"
        "        result = train_step(model, optimizer, [batch], mesh, CLASSIFICATION, clip=0.1, graph=graph)\n"
        "        found += [float(result.loss), float(result.grad_norm)]\n"
        "    assert not said, said\n"
        "    return found\n"
        "torch.cuda.set_stream(torch.cuda.Stream())\n"
        "for precision, bound in (('fp32', 1e-4), ('bf16', 3e-2)):\n"
        "    for ours, theirs in zip(train(precision, True), train(precision, False), strict=True):\n"
        "        assert abs(ours - theirs) <= bound * abs(theirs), (precision, ours, theirs)\n"
    )
    succeeded(run_program(program))


def test_an_infinite_gradient_changes_no_weight(tmp_path: Path) -> None:
    program = tmp_path / "infinite.py"
    program.write_text(
        "import torch, weft\n"
        "from weft.models import Decoder, DecoderConfig\n"
        "torch.manual_seed(0)\n"
        "model = Decoder(DecoderConfig(vocab_size=61, hidden_size=32, num_hidden_layers=2, num_attention_heads=4))\n"
        "plan = weft.Plan(precision='bf16', micro_batch=4)\n"
        "mesh = weft.Mesh(plan, 'cuda')\n"
        "model = weft.parallelize(model, plan, mesh)\n"
        "optimizer = weft.AdamW(model, lr=1e-2)\n"
        "tokens = torch.randint(61, (4, 17), device='cuda')\n"
        "batches = [(tokens[:, :-1], tokens[:, 1:])]\n"
        "weft.train_step(model, optimizer, batches, mesh, clip=1.0)\n"
        "before = [one.detach().clone() for one in model.parameters()]\n"
        "def grow(module, given, result):\n"
        "    result.register_hook(lambda gradient: gradient * torch.inf)\n"
        "next(one for one in model.modules() if isinstance(one, torch.nn.Embedding)).register_forward_hook(grow)\n"
        "result = weft.train_step(model, optimizer, batches, mesh, clip=1.0)\n"
        "assert not result.grad_norm.isfinite(), result.grad_norm\n"
        "for old, new in zip(before, model.parameters(), strict=True):\n"
        "    assert torch.equal(old, new)\n"
    )
    succeeded(run_program(program))


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_an_expanded_gradient_goes_through_attention(dtype: str, tmp_path: Path) -> None:
    """The gradient of a sum has strides of 0, which some attention kernels have read as if it had its own memory."""
    program = tmp_path / "expanded.py"
    program.write_text(
        "import torch\n"
        "from weft.models import Decoder, DecoderConfig\n"
        "torch.manual_seed(0)\n"
        f"hidden, found = torch.randn(2, 128, 256, device='cuda').to(torch.{dtype}), []\n"
        "for spread in (True, False):\n"
        "    given = hidden.clone().requires_grad_()\n"
        "    query, key, value = (given.view(2, 128, 4, 64).transpose(1, 2) for _ in range(3))\n"
        "    mixed = torch.nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)\n"
        "    ones = torch.ones((), device='cuda', dtype=mixed.dtype).expand(mixed.shape)\n"
        "    mixed.backward(ones if spread else ones.contiguous())\n"
        "    found.append(given.grad)\n"
        "torch.testing.assert_close(*found, rtol=1e-2, atol=1e-2)\n"
        "config = DecoderConfig(vocab_size=61, hidden_size=256, num_hidden_layers=1, num_attention_heads=4)\n"
        f"model = Decoder(config).to('cuda', torch.{dtype})\n"
        "model(torch.randint(61, (2, 64), device='cuda')).sum().backward()\n"
        "assert all(one.grad is None or one.grad.isfinite().all() for one in model.parameters())\n"
    )
    succeeded(run_program(program))


def test_a_pipeline_with_one_hardware_queue(tmp_path: Path) -> None:
    """Where CUDA starts everything in one order, a schedule that stands is proved, and none hangs."""
    run = write_run(tmp_path, more="\n[plan]\npipe = 4\nmicro_batch = 2\n")
    left = weft("verify", run, "--device", "cuda", "--json", CUDA_DEVICE_MAX_CONNECTIONS="1")
    assert left.json["passed"], left
