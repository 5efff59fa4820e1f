"""The batches of a run: each rank's samples at each step are a function of (seed, step) only.

So no plan changes the data, any plan can resume in the middle of an epoch, and two plans see the same loss curve.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from weft.comm import Axis
from weft.data.chat import Packer, PairPacker, packed_chats
from weft.data.chat_template import load_template, training_time
from weft.data.config import ChatConfig, DataConfig, ImagesConfig, PreferenceConfig, SlidesConfig
from weft.data.conversations import ChatRenderer
from weft.data.images import ImageRegion, Images, can_hash, contents_hash, open_folder, read_labels
from weft.data.order import batch_indices, coin, epochs_of, local_indices
from weft.data.slides import slide_folder
from weft.data.sources import documents
from weft.data.tokenizer import identity_of, marks_in_words
from weft.data.tokens import Sequences, token_cache
from weft.errors import DataError
from weft.inspection.parameter_cut import share
from weft.mesh import Mesh
from weft.models import VisionConfig
from weft.models.loss import IGNORE
from weft.run_file import Run
from weft.sharding.layout import COMPUTE_DTYPE
from weft.step.batch import Batch

Progress = Callable[[int, int], None]


class Samples(Protocol):
    """Numbered samples of text or images."""

    def __len__(self) -> int: ...

    def get(self, indices: NDArray[np.integer[Any]]) -> tuple[torch.Tensor, ...]:
        """Returns inputs and labels of the samples with these indices; the first dimension is the sample.

        Pairs of answers have more tensors (`train/reference.py`).
        """


@dataclass(frozen=True)
class TrainingData:
    """Training and held-out samples, and a fingerprint of their source.

    `skipped` maps the names of samples that are left out to the reasons. `files` are those whose bytes the fingerprint
    covers in part only, and `contents` is a hash of all of them, or "" (`with_contents`).
    """

    train: Samples
    held_out: Samples | None
    fingerprint: str
    description: str
    skipped: Mapping[str, str] = field(default_factory=dict)
    files: tuple[Path, ...] = ()
    contents: str = ""
    made_with: Mapping[str, str] = field(default_factory=dict)  # what the tokenizer and the chat template are known by

    def with_contents(self, folder: Path) -> TrainingData:
        """Returns the data with the hash of its files, which the run in `folder` compares when it resumes."""
        try:
            return replace(self, contents=contents_hash(self.files, folder))
        except OSError as error:
            raise DataError(f"{error.filename or 'an image'}: {error.strerror or error}; it was there before") from None

    def on_tile(self, mesh: Mesh) -> TrainingData:
        """Returns the data with only this rank's tile of each image; unchanged if images are not tiled."""
        if mesh["tile"].degree == 1:
            return self
        held_out = None if self.held_out is None else _on_tile(self.held_out, mesh)
        return replace(self, train=_on_tile(self.train, mesh), held_out=held_out)

    def batches(self, run: Run, step: int, axis: Axis, device: torch.device) -> list[Batch]:
        """Returns the micro-batches of one step for the rank at `axis.index` of the axis `batch`."""
        return [to_device(batch, device) for batch in self.host_batches(run, step, axis)]

    def host_batches(self, run: Run, step: int, axis: Axis) -> list[Batch]:
        """Returns the same micro-batches in host memory, with floating-point inputs in the compute dtype."""
        split = run.split
        indices = batch_indices(step, split.batch, len(self.train), run.train.seed)
        rows = local_indices(indices, split.micro_batch, axis.degree, axis.index)
        samples = (self.train.get(chosen) for chosen in rows)
        if isinstance(run.data, SlidesConfig | ImagesConfig) and run.data.mirror:
            drawn = coin(indices, run.train.seed, epochs_of(step, split.batch, len(self.train)))
            bits = local_indices(drawn, split.micro_batch, axis.degree, axis.index)
            samples = (_mirrored(batch, one) for batch, one in zip(samples, bits, strict=True))
        goldfish = run.train.goldfish
        if goldfish is not None:
            samples = ((inputs, goldfish.apply(labels)) for inputs, labels, *_ in samples)
        return [_in_compute_dtype(batch, run) for batch in samples]

    def evaluation_batches(self, run: Run, axis: Axis, device: torch.device) -> list[Batch]:
        """Returns this rank's batches of the first held-out samples.

        All ranks get the same number of batches: the last ones are padded with a repeated sample whose labels are all
        ignored.
        """
        if self.held_out is None:
            return []
        micro_batch = run.split.micro_batch
        num = min(run.train.evaluate_sequences, len(self.held_out))
        padded = -(-num // (micro_batch * axis.degree)) * micro_batch * axis.degree
        batches = []
        for chosen in local_indices(np.arange(padded), micro_batch, axis.degree, axis.index):
            inputs, labels, *more = self.held_out.get(np.minimum(chosen, num - 1))
            repeats = torch.from_numpy(chosen >= num).view(-1, *[1] * (labels.dim() - 1))
            batch = _in_compute_dtype((inputs, labels.masked_fill(repeats, IGNORE), *more), run)
            batches.append(to_device(batch, device))
        return batches


def _on_tile(samples: Samples, mesh: Mesh) -> Samples:
    assert isinstance(samples, Images), "tiles of text were refused"
    intervals = (
        share(size, mesh[name].degree, mesh[name].index)
        for name, size in zip(("rows", "columns"), samples.shape[:2], strict=True)
    )
    return ImageRegion(samples, *intervals)


def refuse_missing_data(run: Run) -> None:
    """Raises DataError if the data is not where the run file says. Reads none of it."""
    if isinstance(run.data, DataConfig):
        documents(run.data.source)
    elif isinstance(run.data, ImagesConfig):
        assert isinstance(run.model, VisionConfig), "the run file was checked"
        read_labels(Path(run.data.source), run.model.num_classes)


def prepare_data(run: Run, progress: Progress | None = None) -> TrainingData:
    """Finds or makes the run's data and checks it, before any rank starts."""
    try:
        if isinstance(run.data, ChatConfig):
            return _prepare_chats(run, run.data, progress)
        if isinstance(run.data, DataConfig):
            return _prepare_text(run, run.data, progress)
        return _prepare_images(run, progress)
    except OSError as error:
        raise DataError(
            f"cannot prepare the data: {error.filename or 'a file'}: {error.strerror or error}; give the folder of "
            f"data.source or data.cache permission and space, or choose another"
        ) from error


def sample_prompt(run: Run, data: TrainingData) -> list[int] | None:
    """Returns the tokens before the first answer of held-out conversations or preferences, or else of those to train
    on; None for other data.
    """
    if not isinstance(run.data, ChatConfig):
        return None
    samples = data.train if data.held_out is None else data.held_out
    inputs, labels, *_ = (tensor[0] for tensor in samples.get(np.arange(1)))
    if isinstance(run.data, PreferenceConfig):
        inputs, labels = inputs[0], labels[0]
    tokens = inputs[: int((labels != IGNORE).int().argmax()) + 1]
    found: list[int] = torch.where(tokens < 0, ~tokens, tokens).tolist()
    return found


def _prepare_chats(run: Run, data: ChatConfig, progress: Progress | None) -> TrainingData:
    source = documents(data.source)
    renderer = ChatRenderer(run.tokenizer, load_template(data.template, data.tokenizer, training_time))
    packer = PairPacker if isinstance(data, PreferenceConfig) else Packer
    found = packed_chats(source, renderer, packer, data.sequence, data.held_out, Path(data.cache), progress)
    held_out = found.held_out if len(found.held_out) else None
    about = _joined(source.description, found.note, marks_in_words(renderer.tokenizer))
    made_with = {"tokenizer": identity_of(renderer.tokenizer)}
    if renderer.template is not None:
        made_with["template"] = renderer.template.identity
    return TrainingData(found.train, held_out, found.fingerprint, about, made_with=made_with)


def _prepare_text(run: Run, data: DataConfig, progress: Progress | None) -> TrainingData:
    source = documents(data.source, text_field=data.text_field)
    tokenizer = run.tokenizer
    tokens = token_cache(source, tokenizer, data.held_out, Path(data.cache), progress)
    train, held_out = Sequences(tokens.train, data.sequence), None
    if data.held_out > 0:
        held_out = Sequences(tokens.held_out, data.sequence, name="held-out data")
    about = _joined(source.description, marks_in_words(tokenizer))
    return TrainingData(train, held_out, tokens.fingerprint, about, made_with={"tokenizer": identity_of(tokenizer)})


def _joined(*texts: str) -> str:
    return "; ".join(text for text in texts if text)


def _prepare_images(run: Run, progress: Progress | None) -> TrainingData:
    data, model = run.data, run.model
    assert isinstance(model, VisionConfig), "the run file was checked"
    assert not isinstance(data, DataConfig)
    shape = data.shape(model.in_channels)
    if isinstance(data, SlidesConfig):
        folder = slide_folder(Path(data.cache), data.images, data.size, data.seed, progress)
        found = open_folder(folder, shape, model.num_classes, held_out=data.held_out)
        found = replace(found, files=())  # they follow from the seed
    else:
        folder = Path(data.source)
        found = open_folder(
            folder, shape, model.num_classes, held_out=data.held_out, level=data.level, on_bad=data.on_bad
        )
    note = "" if can_hash(found.files) else "too large to hash: a resume compares sizes and a few bytes of each image"
    about = _joined(str(folder), note)
    return TrainingData(found.train, found.held_out, found.fingerprint, about, found.bad, found.files)


def _mirrored(batch: Batch, chosen: NDArray[np.int64]) -> Batch:
    """Returns a batch of images [samples, channels, rows, columns] with the chosen ones mirrored."""
    inputs, *targets = batch
    return (torch.where(torch.from_numpy(chosen).bool()[:, None, None, None], inputs.flip(-1), inputs), *targets)


def _in_compute_dtype(batch: Batch, run: Run) -> Batch:
    """Returns a batch with floating-point inputs in the compute dtype."""
    inputs, *targets = batch
    return (inputs.to(COMPUTE_DTYPE[run.plan.precision]) if inputs.is_floating_point() else inputs, *targets)


def to_device(batch: Batch, device: torch.device) -> Batch:
    """Moves a batch to the device, through pinned memory if it is a GPU."""
    if device.type == "cuda":
        return tuple(as_on_gpus(tensor.pin_memory().to(device, non_blocking=True)) for tensor in batch)
    return batch


def as_on_gpus(tensor: torch.Tensor) -> torch.Tensor:
    """Returns images in channels-last memory format, which GPU kernels prefer; other tensors unchanged."""
    is_image = tensor.dim() == 4 and tensor.is_floating_point()
    return tensor.contiguous(memory_format=torch.channels_last) if is_image else tensor
