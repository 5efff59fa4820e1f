"""Writes a checkpoint as a Hugging Face folder that transformers loads, one tensor at a time; of images as one file."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from weft.checkpoint import Checkpoint
from weft.commands.image_runs import export_images
from weft.data.chat_template import TEMPLATE_FILE
from weft.data.config import ChatConfig, DataConfig
from weft.data.special_tokens import SPECIAL_TOKENS_MAP, TOKENIZER_CONFIG
from weft.data.tokenizer import FileTokenizer
from weft.errors import ConfigError
from weft.models import RecurrentConfig, write_weights
from weft.models.adapter import write_adapter
from weft.models.hf import parameter_shapes
from weft.models.hf_config import GENERATION_FILE, generation_config
from weft.models.tuning import is_adapter
from weft.saved_run import (
    load_saved_tokenizer,
    refuse_other_template,
    saved_data,
    saved_end_token,
    saved_model,
    saved_samples,
    saved_template,
    saved_tokenizer,
    saved_tuning,
    saved_values,
    with_intact_checkpoint,
)
from weft.serve.text import end_tokens

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
TOKENIZER = "tokenizer.json"


def export(
    source: Path,
    target: Path,
    dtype: str | None = None,
    progress: Callable[[int, int], None] | None = None,
    adapter: bool = False,
    say: Callable[[str], None] = lambda message: None,
) -> str:
    """Write the newest undamaged checkpoint under `source`, with the run's tokenizer, to the folder `target`. Returns
    the call or command that loads it.

    LoRA's updates are merged into the weights or, with `adapter`, written alone in PEFT's format. Parameters get the
    given dtype, or else stay in that of training. The folder appears when it is complete. `progress` is called with the
    number of tensors written and that of all, `say` with what is left out.
    """
    return with_intact_checkpoint(source, partial(_export, target, dtype, progress, adapter), say)


def _export(
    target: Path,
    dtype: str | None,
    progress: Callable[[int, int], None] | None,
    adapter: bool,
    checkpoint: Checkpoint,
) -> str:
    lora = saved_tuning(checkpoint).lora
    if adapter and lora is None:
        raise ConfigError(f"{checkpoint.path} has no adapter: its run had no [lora]; export it without --adapter")
    if not isinstance(saved_samples(checkpoint), DataConfig):
        return export_images(checkpoint, target, None if dtype is None else DTYPES[dtype], progress)
    config = saved_model(checkpoint)
    read, names = saved_values(checkpoint), list(parameter_shapes(config))
    if adapter:
        names = [entry.name for entry in checkpoint.entries("parameter") if is_adapter(entry.name)]

    def tensors() -> Iterator[tuple[str, Tensor]]:
        for done, name in enumerate(names, 1):
            tensor = read(name)
            yield name, tensor if dtype is None else tensor.to(DTYPES[dtype])
            if progress is not None:
                progress(done, len(names))

    if adapter:
        assert lora is not None
        write_adapter(target, config, lora, tensors())
        return f"PeftModel.from_pretrained(model, '{target}')"
    files = _files(checkpoint)
    write_weights(target, config, tensors(), files=files)
    if isinstance(config, RecurrentConfig):  # transformers has no such model
        return f"weft serve {target}" if TOKENIZER in files else f"weft serve {target} --tokenizer bytes"
    return f"AutoModelForCausalLM.from_pretrained('{target}')"


def _files(checkpoint: Checkpoint) -> dict[str, Path | str]:
    """Returns the files beside the weights, by their names in a Hugging Face folder: those of the tokenizer, of which
    "bytes" has none, the chat template, and the tokens that end an answer.
    """
    data, spec, template = saved_data(checkpoint), saved_tokenizer(checkpoint), saved_template(checkpoint)
    files: dict[str, Path | str] = {}
    folder = None
    if spec != "bytes":
        path = Path(spec) / TOKENIZER if Path(spec).is_dir() else Path(spec)
        _refuse_missing("tokenizer", data.tokenizer, path)
        folder, files[TOKENIZER] = path.parent, path
        beside = {name: folder / name for name in (TOKENIZER_CONFIG, SPECIAL_TOKENS_MAP, TEMPLATE_FILE)}
        files |= {name: other for name, other in beside.items() if other.is_file()}
    if template is not None:
        assert isinstance(data, ChatConfig)
        _refuse_missing("chat template", str(data.template), Path(template))
        files[TEMPLATE_FILE] = Path(template)
    refuse_other_template(checkpoint)
    tokenizer = load_saved_tokenizer(checkpoint)
    if (
        isinstance(tokenizer, FileTokenizer)
        and not tokenizer.adds_special_tokens
        and tokenizer.before + tokenizer.after
    ):
        files[TOKENIZER] = tokenizer.without_special_tokens()  # as the run was trained
    ends = [tokenizer.end, *sorted(end_tokens(tokenizer, folder) - {tokenizer.end})]
    files[GENERATION_FILE] = generation_config(folder, ends, saved_end_token(checkpoint))
    return files


def _refuse_missing(kind: str, stated: str, path: Path) -> None:
    if not path.is_file():
        raise ConfigError(f"the {kind} '{stated}' of the run is not there ({path.absolute()}); put it there")
