"""A recurrent model as the engine computes it: tokens of many requests at once, each with its state in its row.

Gates are fused: the weights of a layer's input and state lie side by side, so that a decode is one product for each
layer of an LSTM. Products with inputs are hoisted out of the recurrence: those of a prompt are one matmul for all
tokens (long prompts use torch's own layers, which do the same), and where the vocabulary is small, those of the first
layer are a table with a row for each token, which a decode looks up in place of the product. The state of a request is
all that is kept of its tokens, so what needs their keys and values (drafts, shared prefixes, formats of the cache) does
not exist here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from weft.models.recurrent import RecurrentLayer, RecurrentModel
from weft.serve.attention.batch import PagedBatch
from weft.serve.attention.formats import CacheFormat, CacheLayer
from weft.serve.model.paged_model import PagedBlock

# From so many tokens of a prompt on, torch's own layers take less time. Its LSTM packs its weights in every call.
TORCH_TOKENS = {"lstm": 32, "gru": 2}
TABLE_BYTES = 64 << 20  # the most that the table of the first layer's products takes

State = tuple[Tensor, Tensor]  # hidden and cell [rows, hidden]; a GRU has no cell
Multiply = Callable[[Tensor, Tensor, Tensor], Tensor]  # rows · weight' + added


class FusedLSTM:
    """One layer of an LSTM, whose weights are one matrix [4 * hidden, input + hidden]. Those of a layer whose products
    with inputs are in a table are two: a CPU reads a part of each row at half the rate of whole rows.
    """

    def __init__(self, layer: RecurrentLayer, has_table: bool = False) -> None:
        self._weight = None if has_table else _joined(layer)
        self._of_input, self._of_state = layer.weight_ih.detach(), layer.weight_hh.detach()
        self._bias = layer.bias_ih.detach() + layer.bias_hh.detach()
        self.size = len(self._bias) // 4
        self.multiply: Multiply = row_product

    def inputs(self, rows: Tensor) -> Tensor:
        """Return the part of the gates [rows, 4 * hidden] that follows from inputs alone."""
        return F.linear(rows, self._of_input, self._bias)

    def step(self, rows: Tensor, state: State) -> State:
        """Return the next state after inputs [rows, input]."""
        if self._weight is None:
            return self.step_hoisted(self.inputs(rows), state)
        return self._next(self.multiply(torch.cat([rows, state[0]], dim=1), self._weight, self._bias), state[1])

    def step_hoisted(self, inputs: Tensor, state: State) -> State:
        """Return the next state, where `inputs` are the products of the inputs (`FusedLSTM.inputs`)."""
        return self._next(self.multiply(state[0], self._of_state, inputs), state[1])

    def _next(self, gates: Tensor, cell: Tensor) -> State:
        size = self.size  # gates are input, forget, candidate, output
        opened = gates.sigmoid()
        candidate = gates[:, 2 * size : 3 * size].tanh()
        cell = opened[:, size : 2 * size] * cell + opened[:, :size] * candidate
        return opened[:, 3 * size :] * cell.tanh(), cell


class FusedGRU:
    """One layer of a GRU. Its candidate multiplies the state's product by a gate, so state and input have products of
    their own.
    """

    def __init__(self, layer: RecurrentLayer, has_table: bool = False) -> None:
        self._input, self._state, self._input_bias, self._state_bias = (
            one.detach() for one in (layer.weight_ih, layer.weight_hh, layer.bias_ih, layer.bias_hh)
        )
        self.size = len(self._input_bias) // 3
        self.multiply: Multiply = row_product

    def inputs(self, rows: Tensor) -> Tensor:
        return F.linear(rows, self._input, self._input_bias)

    def step(self, rows: Tensor, state: State) -> State:
        return self.step_hoisted(self.multiply(rows, self._input, self._input_bias), state)

    def step_hoisted(self, inputs: Tensor, state: State) -> State:
        size, hidden = self.size, state[0]
        of_state = self.multiply(hidden, self._state, self._state_bias)
        opened = (inputs[:, : 2 * size] + of_state[:, : 2 * size]).sigmoid()  # reset, update
        candidate = torch.addcmul(inputs[:, 2 * size :], opened[:, :size], of_state[:, 2 * size :]).tanh()
        return torch.lerp(candidate, hidden, opened[:, size:]), state[1]


class RowStates:
    """The states of all layers of requests that run: hidden and cell [layers, rows + 1, hidden]; the last row is that
    of padding. It stands where models with keys and values have a cache.
    """

    def __init__(self, num_layers: int, num_rows: int, size: int, like: Tensor) -> None:
        self.hidden, self.cell = like.new_zeros(2, num_layers, num_rows + 1, size).unbind()
        self.pages: Sequence[Tensor] = ()


class RecurrentRows:
    """A RecurrentModel that computes tokens of many requests at once. The engine uses it as it uses a PagedModel."""

    keeps_pages = False

    def __init__(self, model: RecurrentModel) -> None:
        self.model, self.body = model, model
        self.cache_format = CacheFormat()
        self.vocab_size = model.config.vocab_size
        self.blocks: Sequence[PagedBlock] = ()
        self.has_prompt_kernel = False
        self._torch_tokens = TORCH_TOKENS[model.config.architecture]
        weight = model.lm_head.weight
        self.device, self.dtype = weight.device, weight.dtype
        kind = FusedLSTM if model.config.architecture == "lstm" else FusedGRU
        table_bytes = model.config.num_gates * model.config.hidden_size * self.vocab_size * self.dtype.itemsize
        has_table = table_bytes <= TABLE_BYTES
        with torch.no_grad():
            self.layers = [
                kind(cast(RecurrentLayer, layer), has_table and index == 0) for index, layer in enumerate(model.layers)
            ]
            self._table = self.layers[0].inputs(model.embed_tokens.weight) if has_table else None

    @property
    def bytes_per_token(self) -> float:
        return 0.0

    def bytes_beside_pages(self, num_rows: int) -> int:
        config = self.model.config
        return (num_rows + 1) * 2 * config.num_hidden_layers * config.hidden_size * self.dtype.itemsize

    def new_cache(self, num_blocks: int, block_size: int, num_rows: int) -> list[CacheLayer]:
        config = self.model.config
        sizes = (config.num_hidden_layers, num_rows, config.hidden_size)
        return [cast(CacheLayer, RowStates(*sizes, self.model.lm_head.weight))]

    def residual(self, batch: PagedBatch, cache: Sequence[CacheLayer]) -> Tensor:
        """Return the last layer's hidden states [tokens, hidden]. A request's first token begins with a state
        of zeros.
        """
        states = cast(RowStates, cache[0])
        parts, number = [], batch.num_decodes
        if number:
            rows, is_first = batch.rows[:number].long(), batch.positions[:number] == 0
            parts.append(self._decode(batch.tokens[:number], rows, is_first, states))
        begin = number
        for index, count in enumerate(batch.prompt_queries, number):
            begins = batch.prompt_lengths[index - number] == count
            tokens = batch.tokens[begin : begin + count]
            parts.append(self._prompt(tokens, int(batch.rows[index]), begins, states))
            begin += count
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def logits(self, residual: Tensor) -> Tensor:
        out: Tensor = self.model.lm_head(residual)
        return out

    def hidden_states(self, residual: Tensor) -> Tensor:
        return residual

    def _decode(self, tokens: Tensor, rows: Tensor, is_first: Tensor, states: RowStates) -> Tensor:
        hidden: Tensor | None = None
        for index, layer in enumerate(self.layers):
            before = (states.hidden[index, rows], states.cell[index, rows])
            if bool(is_first.any()):
                before = (before[0].masked_fill(is_first[:, None], 0), before[1].masked_fill(is_first[:, None], 0))
            if hidden is None and self._table is not None:
                hidden, cell = layer.step_hoisted(self._table[tokens], before)
            else:
                given = F.embedding(tokens, self.model.embed_tokens.weight) if hidden is None else hidden
                hidden, cell = layer.step(given, before)
            states.hidden[index, rows], states.cell[index, rows] = hidden, cell
        assert hidden is not None
        return hidden

    def _prompt(self, tokens: Tensor, row: int, is_first: bool, states: RowStates) -> Tensor:
        """Tokens of one request: each layer's products with inputs are one matmul."""
        given = F.embedding(tokens, self.model.embed_tokens.weight)
        hidden, cell = states.hidden[:, row : row + 1], states.cell[:, row : row + 1]
        if is_first:
            hidden, cell = torch.zeros_like(hidden), torch.zeros_like(cell)
        if len(tokens) >= self._torch_tokens:
            for index, own in enumerate(self.model.layers):
                before = (hidden[index : index + 1].contiguous(), cell[index : index + 1].contiguous())
                found, after = cast(RecurrentLayer, own).run(given[None], before)
                given = found[0]
                for kept, one in zip((states.hidden, states.cell), after, strict=False):  # a GRU has no cell
                    kept[index, row] = one[0, 0]
            return given
        for index, layer in enumerate(self.layers):
            state = (hidden[index], cell[index])
            results = []
            for inputs in layer.inputs(given).split(1):
                state = layer.step_hoisted(inputs, state)
                results.append(state[0])
            given = torch.cat(results)
            states.hidden[index, row], states.cell[index, row] = state[0][0], state[1][0]
        return given


def _joined(layer: RecurrentLayer) -> Tensor:
    """Return a layer's weights of input and state side by side.

    On a CPU the module's parameters become views of the matrix; cuDNN takes no views, so a GPU holds them twice.
    """
    joined = torch.cat([layer.weight_ih.detach(), layer.weight_hh.detach()], dim=1)
    width = layer.weight_ih.shape[1]
    if not joined.is_cuda:
        layer.weight_ih = nn.Parameter(joined[:, :width], requires_grad=False)
        layer.weight_hh = nn.Parameter(joined[:, width:], requires_grad=False)
    return joined


def row_product(rows: Tensor, weight: Tensor, added: Tensor) -> Tensor:
    """rows · weight' + added. One row is a product of a matrix with a vector, which starts faster."""
    if len(rows) == 1:
        return torch.addmv(added.view(-1), weight, rows[0])[None]
    return torch.addmm(added, rows, weight.T)
