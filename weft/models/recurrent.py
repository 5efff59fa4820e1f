"""Recurrent language models: an embedding, layers of torch's LSTM or GRU, and a head.

`weft train` trains them from a run file, and so does any other training loop. `weft serve` and `weft generate` read
their runs and folders (`save_folder`), and compute faster steps (`serve/model/recurrent.py`).
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from weft.architectures.language import RecurrentConfig
from weft.models.decoder import TiedHead

# cuDNN copies parameters that do not lie end to end, in every call, and warns. Here they do not: each can be replaced.
warnings.filterwarnings("ignore", message="RNN module weights are not part of single contiguous chunk")

State = tuple[Tensor, ...]  # hidden [1, batch, hidden], and for an LSTM the cell


class RecurrentLayer(nn.Module):
    """One layer of torch's LSTM or GRU. Unlike `nn.LSTM`, it reads its parameters in each forward, so that they can be
    replaced, and it returns the hidden states only.
    """

    def __init__(self, config: RecurrentConfig) -> None:
        super().__init__()
        self.is_lstm, self.size = config.architecture == "lstm", config.hidden_size
        rows = config.num_gates * self.size
        self.weight_ih, self.weight_hh = (nn.Parameter(torch.empty(rows, self.size)) for _ in range(2))
        self.bias_ih, self.bias_hh = (nn.Parameter(torch.empty(rows)) for _ in range(2))
        for parameter in self.parameters():  # as torch's layers
            nn.init.uniform_(parameter, -1 / math.sqrt(self.size), 1 / math.sqrt(self.size))

    def forward(self, rows: Tensor) -> Tensor:
        """Returns hidden states [batch, sequence, hidden] of inputs of the same shape, from a state of zeros."""
        zeros = rows.new_zeros(1, len(rows), self.size)
        return self.run(rows, (zeros, zeros) if self.is_lstm else (zeros,))[0]

    def run(self, rows: Tensor, state: State) -> tuple[Tensor, State]:
        """Returns hidden states of inputs [batch, sequence, hidden] after a state, and the last state."""
        if rows.dtype == torch.bfloat16 and rows.device.type == "cpu":
            return self.run_by_token(rows, state)
        weights = [self.weight_ih, self.weight_hh, self.bias_ih, self.bias_hh]
        # Biases, one layer, no dropout, training, one direction, batch first.
        options = (True, 1, 0.0, self.training, False, True)
        if self.is_lstm:
            hidden, *after = _without_onednn(torch.lstm, rows, state, weights, *options)
        else:
            hidden, *after = _without_onednn(torch.gru, rows, state[0], weights, *options)
        return hidden, tuple(after)

    def run_by_token(self, rows: Tensor, state: State) -> tuple[Tensor, State]:
        """Computes what `run` does without torch's layers. For bf16 on a CPU these initialise CUDA, to find that cuDNN
        is not for it, and after that no rank can be forked.
        """
        own = [one[0] for one in state]
        hidden = []
        for given in F.linear(rows, self.weight_ih, self.bias_ih).unbind(1):
            before = F.linear(own[0], self.weight_hh, self.bias_hh)
            own = lstm_state(given + before, own[1]) if self.is_lstm else [gru_state(given, before, own[0])]
            hidden.append(own[0])
        return torch.stack(hidden, 1), tuple(one[None] for one in own)


def lstm_state(gates: Tensor, cell: Tensor) -> list[Tensor]:
    """Returns the hidden state and the cell after a token, from the sums [batch, 4 * hidden] of its gates."""
    keep, forget, new, out = gates.chunk(4, 1)
    cell = forget.sigmoid() * cell + keep.sigmoid() * new.tanh()
    return [out.sigmoid() * cell.tanh(), cell]


def gru_state(given: Tensor, before: Tensor, hidden: Tensor) -> Tensor:
    """Returns the hidden state after a token, from products [batch, 3 * hidden] with the token and the state before."""
    (reset, keep, new), (own_reset, own_keep, own_new) = given.chunk(3, 1), before.chunk(3, 1)
    new = (new + (reset + own_reset).sigmoid() * own_new).tanh()
    return new + (keep + own_keep).sigmoid() * (hidden - new)


def _without_onednn(function: Callable[..., Any], rows: Tensor, *args: Any) -> Any:
    """Calls a function of torch, on a CPU without oneDNN. That LSTM took up to six times the time of torch's own on an
    ARM CPU (on x86 they have not been compared), saves twice the bytes for backward, and reports neither to a profile.
    """
    was_enabled = torch._C._get_mkldnn_enabled()
    if rows.device.type != "cpu" or not was_enabled:
        return function(rows, *args)
    torch._C._set_mkldnn_enabled(False)
    try:
        return function(rows, *args)
    finally:
        torch._C._set_mkldnn_enabled(was_enabled)


class RecurrentModel(TiedHead):
    """Logits of each next token, by layers of LSTM or GRU."""

    def __init__(self, config: RecurrentConfig) -> None:
        super().__init__()
        self.config = config
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(RecurrentLayer(config) for _ in range(config.num_hidden_layers))
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.tied_to = config.embedding_name if config.tie_word_embeddings else None
        self.tie()

    def forward(self, tokens: Tensor) -> Tensor:
        """Returns logits [batch, sequence, vocab] after tokens [batch, sequence]."""
        hidden = self.embed_tokens(tokens)
        for layer in self.layers:
            hidden = layer(hidden)
        logits: Tensor = self.lm_head(hidden)
        return logits
