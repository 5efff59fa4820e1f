"""What each key of a run file means, in one line. Types and defaults are those of the dataclasses."""

from __future__ import annotations

RUN = {
    "name": "the run's name, a plain word; by default that of the file",
    "folder": "where the run keeps its checkpoints and metrics; by default runs/NAME",
    "cluster": 'the machine: "local", or a name of the catalog as name:nodesxdevices',
}

_HEADS = "attention heads of a layer"
_EPSILON = "the epsilon of its norms"
_TIED = "does the head use the embedding's weights?"
DECODER = {
    "architecture": "the kind of model; the other keys of [model] depend on it",
    "vocab_size": "tokens of the vocabulary; in a run, by default those of the tokenizer",
    "hidden_size": "the width of the residual stream",
    "intermediate_size": "the width inside the MLPs; 0: 8/3 of hidden_size, rounded up to 256",
    "num_hidden_layers": "the number of layers",
    "num_attention_heads": _HEADS,
    "num_key_value_heads": "heads of keys and values; 0: as many as attention heads",
    "head_dim": "the width of a head; 0: hidden_size / num_attention_heads",
    "max_position_embeddings": "the longest sequence that the model is meant for",
    "rms_norm_eps": _EPSILON,
    "rope_theta": "the base of the rotary frequencies",
    "rope_scaling": "Llama 3's scaling of the rotary frequencies",
    "tie_word_embeddings": _TIED,
    "attention_bias": "biases on all projections of attention (llama, qwen3)",
    "qkv_bias": "biases on q, k and v; follows from the architecture",
    "mlp_bias": "biases in the MLPs (llama)",
    "qk_norm": "a norm on each head of q and k; follows from the architecture",
    "sliding_window": "how many tokens back attention sees (mistral)",
    "rope_scaling.factor": "by how much the frequencies of long wavelengths are divided",
    "rope_scaling.low_freq_factor": "wavelengths above the original length / this are scaled",
    "rope_scaling.high_freq_factor": "wavelengths below the original length / this are kept",
    "rope_scaling.original_max_position_embeddings": "the length before scaling",
}
GPT2 = {
    "architecture": "GPT-2",
    "vocab_size": "tokens of the vocabulary; in a run, by default those of the tokenizer",
    "n_positions": "the longest sequence: one learned position each",
    "n_embd": "the width of the residual stream",
    "n_layer": "the number of layers",
    "n_head": _HEADS,
    "n_inner": "the width inside the MLPs; by default 4 × n_embd",
    "layer_norm_epsilon": _EPSILON,
    "resid_pdrop": "the probability of dropout on the residual stream",
    "embd_pdrop": "the probability of dropout on embeddings",
    "attn_pdrop": "the probability of dropout on attention weights",
    "tie_word_embeddings": _TIED,
}
VISION = {
    "architecture": "the kind of image model",
    "depth": "layers of the published network; of a U-Net, how often the size is halved",
    "version": "1: norms after convolutions; 2: before",
    "num_classes": "classes of the labels; of slides by default 2",
    "in_channels": "channels of an image",
    "width": "channels of the first stage",
    "groups": "groups of the 3 × 3 convolutions (ResNeXt)",
    "width_per_group": "channels of a group in a stage of 64 channels",
    "layers": "normal cells, a multiple of 3",
    "filters": "channels of the first cells, a multiple of 4",
    "up": "how a U-Net upsamples",
    "norm": "batch norm, or group norm, which does not mix images",
}

_HELD_OUT = "the share of samples that is not trained on, for evaluation"
_CACHE = "the folder of prepared data"
TEXT = {
    "kind": "text, the default",
    "source": 'a file, a folder, or "stdlib": the text of Python\'s standard library',
    "sequence": "tokens of a sequence",
    "tokenizer": '"bytes", a tokenizer.json, or a folder with one',
    "end_token": "the token that ends a document; by default found in the tokenizer's file",
    "text_field": "the field of JSON lines and tables that holds the text",
    "documents": "do documents of one sequence attend to each other (joined) or not (separate)?",
    "held_out": _HELD_OUT,
    "cache": _CACHE,
}
SLIDES = {
    "kind": "synthetic slides",
    "images": "the number of images",
    "size": "rows and columns of an image",
    "seed": "of the images",
    "held_out": _HELD_OUT,
    "cache": _CACHE,
}
IMAGES = {
    "kind": "a folder of images",
    "source": "the folder, with a labels.csv",
    "height": "rows of every image",
    "width": "columns of every image",
    "level": "the level of a pyramidal TIFF",
    "on_bad": "what to do with an image that cannot be used",
    "held_out": _HELD_OUT,
}

TRAIN = {
    "steps": "steps of the run",
    "batch": "sequences or images of a step, over all ranks; or give batch_tokens",
    "batch_tokens": "tokens of a step, over all ranks",
    "learning_rate": "the highest learning rate",
    "schedule": "the course of the learning rate after the warm-up",
    "warmup_steps": "steps in which the learning rate rises",
    "decay_steps": "the last steps, in which it falls (wsd)",
    "final_learning_rate": "the last learning rate, as a part of the highest",
    "weight_decay": "AdamW's decay of weights",
    "beta1": "AdamW's decay of the first moment",
    "beta2": "AdamW's decay of the second moment",
    "epsilon": "AdamW's epsilon",
    "clip": "the largest norm of the gradient",
    "seed": "of the initial weights, the order of samples and dropout",
    "deterministic": "use only kernels that repeat their bits",
    "compile": "compile blocks with torch.compile; by default on GPUs",
    "graph": "record steps as a CUDA graph; by default for images on one GPU",
    "z_loss": "the weight of the squared log of the softmax's denominator",
    "goldfish": "leave targets out of the loss, against memorising",
    "goldfish.k": "one in k targets is left out",
    "goldfish.h": "by a hash of so many targets before it",
    "layer_drop": "skip deep blocks at random, more often later",
    "layer_drop.theta": "the final probability that the deepest block is kept",
    "layer_drop.gamma": "how fast the probability falls to it",
    "device": "cpu, cuda, or what is there",
    "share_gpus": "allow more ranks than GPUs, for tests",
    "timeout_seconds": "the longest wait for another rank",
    "log_every": "steps between two lines of the metrics",
    "evaluate_every": "steps between two evaluations on held-out samples",
    "evaluate_sequences": "held-out sequences or images of an evaluation",
    "timeline": "a file to draw the last step of a pipeline to",
}

PLAN = {
    "data": "replicas of the model, each with its samples",
    "pipe": "stages of the model's chain of blocks; a number sets degree",
    "pipe.degree": "ranks that the chain is split over",
    "pipe.schedule": "the order of forwards and backwards",
    "pipe.chunks": "stages of each rank (interleaved)",
    "pipe.batches": "parts of a step that alternate (gems)",
    "pipe.in_flight": "micro-batches between a stage's forward and backward (message)",
    "pipe.balance": "what stages have equal parts of",
    "pipe.split": "the modules at which stages begin, in place of balance",
    "pipe.shadow": "each rank also keeps the next one's stage, and takes it over if it is lost",
    "shard": "ranks that share the state (ZeRO, FSDP); a number sets degree",
    "shard.degree": "ranks that the state is split over",
    "shard.stage": "1: optimizer state is split; 2: also gradients; 3: also parameters",
    "tensor": "splits of every matmul; a number sets x",
    "tensor.x": "ranks that outputs of matmuls are split over",
    "tensor.y": "ranks that inputs of matmuls are split over",
    "tensor.sequence": "split activations between blocks along the sequence, too",
    "tensor.regather": "gather inputs of matmuls again in backward: less memory, more traffic",
    "tensor.chunks": "pieces of each gather and scatter, sent while others are multiplied",
    "context": "ranks that a sequence is split over; a number sets degree",
    "context.degree": "ranks that a sequence is split over",
    "context.kind": "how attention gets keys of other ranks",
    "tile": "tiles of an image",
    "tile.rows": "ranks that rows of an image are split over",
    "tile.columns": "ranks that columns of an image are split over",
    "tile.until": "the module before which tiles end; empty: the first that needs whole images",
    "tile.hand_over": "what ranks get there: all images, or those of their share of the batch",
    "tile.fused": "layers that share one exchange of a wider halo",
    "micro_batch": "samples of one forward of a rank; by default all of a step",
    "memory": "how memory is saved",
    "memory.recompute": "activations that are computed again in backward",
    "memory.accumulate": "reduce gradients once a step (whole), or after each micro-batch (slice)",
    "memory.master": "keep fp32 weights beside those in bf16",
    "memory.state": "the bits of AdamW's moments",
    "memory.offload": "the share of optimizer state in host memory, 0 to 1",
    "memory.delay": "update on the host during the next step, which uses weights before it",
    "memory.activations": "the share of saved activations in host memory, 0 to 1",
    "memory.weights": "the share of weights and state in host memory, 0 to 1",
    "precision": "of parameters and activations; by default what suits the machine",
    "matmul": "fp8: linears of blocks multiply in fp8; needs exact = false",
    "exact": "refuse what changes the mathematics",
    "hierarchical": "collectives across nodes in two levels",
    "statistics": "batch norms over a rank's micro-batch, or over those of all ranks",
}

CHECKPOINT = {
    "every": "steps between checkpoints on disk; one is always saved at the end",
    "memory_every": "steps between copies in the memory of other ranks",
    "keep_last": "newest checkpoints that are kept",
    "keep_every": "multiples of so many steps are kept as well",
    "asynchronous": "write while training goes on",
}
RESTART = {
    "limit": "restarts after a rank died, at most, within window_seconds",
    "window_seconds": "the time in which restarts are counted",
    "hang_seconds": "ranks without progress for so long, and for ten steps, are started again",
}
NUMBERS = {
    "on_bad": "what to do after a step whose loss or gradient is NaN, infinite or a spike",
    "spike": "a loss so many median deviations above the median is bad",
    "window": "losses that the median is taken of",
    "leave_out": "batches that a rollback leaves out",
    "limit": "bad steps without a good one, at most",
    "compare_every": "steps between comparisons of state that several ranks hold",
    "repeat_every": "steps between micro-batches that are computed twice and compared",
}
LOG = {"tensorboard": "write TensorBoard's files to the run folder", "wandb": "the project in Weights & Biases"}
