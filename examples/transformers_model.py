"""An unedited model of transformers in your own loop, on one process or on several.

python examples/transformers_model.py                                     # one process
torchrun --nproc-per-node 2 examples/transformers_model.py --data 2       # two, each with half of every batch
torchrun --nproc-per-node 2 examples/transformers_model.py --x 2          # two, each with a part of every matmul
"""

import argparse

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import weft

CONFIG = LlamaConfig(vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4)
SAMPLES, SEQUENCE = 8, 16


def make_model() -> LlamaForCausalLM:
    """The model. All processes build it with the same values."""
    torch.manual_seed(0)
    return LlamaForCausalLM(CONFIG)


def make_batch(step: int) -> dict[str, torch.Tensor]:
    """The whole batch of a step, as the model's keyword arguments: sequences that count up, the second half padded."""
    starts = torch.randint(1, 48, (SAMPLES, 1), generator=torch.Generator().manual_seed(step))
    tokens = starts + torch.arange(SEQUENCE)
    mask = torch.ones_like(tokens)
    mask[SAMPLES // 2 :, SEQUENCE // 2 :] = 0
    return {"input_ids": tokens * mask, "attention_mask": mask, "labels": tokens.masked_fill(mask == 0, -100)}


def train(mesh: weft.Mesh, steps: int) -> list[float]:
    """Trains on this process' part of each batch. Returns the losses of the steps, and the last held-out loss."""
    example = {name: one[:1] for name, one in make_batch(0).items() if name != "labels"}
    model = weft.parallelize(make_model(), mesh.plan, mesh, example=lambda: example)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

    def own(step: int) -> dict[str, torch.Tensor]:
        axis = mesh["batch"]  # the processes with different samples
        return {name: one[axis.index :: axis.degree].to(mesh.device) for name, one in make_batch(step).items()}

    losses = [weft.train_step(model, optimizer, [own(step)], mesh).loss.item() for step in range(steps)]
    return [*losses, weft.evaluate(model, [own(steps)], mesh).item()]


def main() -> None:
    """Reads the plan and the device from the command line, trains and prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for axis in ("data", "shard", "x", "pipe"):
        parser.add_argument(f"--{axis}", type=int, default=1)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    given = parser.parse_args()
    plan = weft.Plan(data=given.data, shard=given.shard, tensor=given.x, pipe=given.pipe)
    mesh = weft.Mesh(plan, given.device)  # joins the processes that torchrun has started
    *losses, held_out = train(mesh, given.steps)
    if mesh.is_first:
        print(f"loss {losses[0]:.4f} -> {losses[-1]:.4f}, held-out {held_out:.4f} on {plan.describe_axes()}")


if __name__ == "__main__":
    main()
