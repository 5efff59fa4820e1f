"""Shapes of the decoders that published tables name.

Sources: the models' own configurations, as the frameworks of the tables carry them: NVIDIA/NeMo-Framework-Launcher
`launcher_scripts/conf/training` (gpt3, nemotron) and NVIDIA/NeMo `nemo/collections/llm/gpt/model/nemotron.py`; Meta's
for Llama 2 and 3; KempnerInstitute/KempnerForge `benchmarks/` for the two that only it has.
"""

from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass(frozen=True)
class Model:
    """A decoder's shape; `inner` is set for Llama (gated, without biases), 0 for GPT-2. Not `gated`: of Llama's kind,
    but with one projection into the MLP (Nemotron, whose activation is the square of a relu). With `experts`, `inner`
    is that of an expert, a token goes to `chosen` of them, and to an MLP of `shared` beside them if it is not 0.
    """

    hidden: int
    heads: int
    layers: int
    sequence: int
    vocabulary: int
    key_value_heads: int = 0
    inner: int = 0
    dropout: bool = False
    gated: bool = True
    experts: int = 0
    chosen: int = 0
    shared: int = 0

    @property
    def numel(self) -> float:
        """Parameters of GPT-2, nearly."""
        return 12 * self.layers * self.hidden**2 + self.vocabulary * self.hidden


# (hidden, heads, layers, key and value heads, inner, vocabulary), inner 0 for GPT-2.
NAMED = {
    "gpt3-5b": (4096, 32, 24, 0, 0, 51200),
    "gpt3-20b": (6144, 48, 44, 0, 0, 51200),
    "gpt3-175b": (12288, 96, 96, 0, 0, 51200),
    "llama2-7b": (4096, 32, 32, 32, 11008, 32000),
    "llama2-13b": (5120, 40, 40, 40, 13824, 32000),
    "llama2-34b": (8192, 64, 48, 8, 22016, 32000),
    "llama2-70b": (8192, 64, 80, 8, 28672, 32000),
    "llama3-8b": (4096, 32, 32, 8, 14336, 128256),
    "llama3-70b": (8192, 64, 80, 8, 28672, 128256),
    "llama3-405b": (16384, 128, 126, 8, 53248, 128256),
    "kempner-13b": (5120, 40, 40, 8, 17920, 128256),
    "kempner-175b": (12288, 96, 96, 8, 39680, 128256),
    "nemotron-8b": (4096, 32, 32, 32, 16384, 256000),
    "nemotron-15b": (6144, 48, 32, 8, 24576, 256000),
    "nemotron-22b": (6144, 48, 40, 48, 24576, 256000),
    "nemotron-340b": (18432, 96, 96, 8, 73728, 256000),
}

# (hidden, heads, layers, key and value heads, inner, vocabulary, experts, chosen, shared). Mixtral and Qwen2 are those
# of their config.json. G8T8 has eight experts of an eighth for each of Mixtral's (arXiv 2410.07524), and Llama3-8x70B
# eight copies of the MLP of Llama 3 70B, of which a token takes two (arXiv 2412.09952: E8T2, assumed).
WITH_EXPERTS = {
    "mixtral-8x22b": (6144, 48, 56, 8, 16384, 32000, 8, 2, 0),
    "mixtral-8x22b-g8t8": (6144, 48, 56, 8, 2048, 32000, 64, 8, 0),
    "qwen2-57b-a14b": (3584, 28, 28, 4, 2560, 151936, 64, 8, 20480),
    "llama3-8x70b": (8192, 64, 80, 8, 28672, 128256, 8, 2, 0),
}


def named(name: str, sequence: int, layers: int = 0) -> Model:
    """A model by the name a table has for it (LLAMA3.1-8B is llama3-8b), with other `layers` if given."""
    key = re.sub(r"^(llama3|nemotron)(?:\.?[0-9])?", r"\1", name.lower().replace("_", "-"))
    if key not in NAMED:
        raise ValueError(f"model '{name}' is none of {', '.join(NAMED)}")
    hidden, heads, its_layers, key_value_heads, inner, vocabulary = NAMED[key]
    is_gated = not key.startswith("nemotron")
    dropout = not inner  # 0.1 in NeMo's configurations of GPT-3
    return Model(hidden, heads, layers or its_layers, sequence, vocabulary, key_value_heads, inner, dropout, is_gated)


def named_with_experts(name: str, sequence: int) -> Model:
    """A model with experts by the name a table has for it."""
    if name.lower() not in WITH_EXPERTS:
        raise ValueError(f"model '{name}' is none of {', '.join(WITH_EXPERTS)}")
    hidden, heads, layers, keys, inner, vocabulary, *experts = WITH_EXPERTS[name.lower()]
    return Model(hidden, heads, layers, sequence, vocabulary, keys, inner, False, True, *experts)
