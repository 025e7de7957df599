"""Predictions of samples that a source reads: as full samples, or window by window.

Called by ``distconv predict``. Output is written while samples are predicted, and can be resumed.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from mpi4py import MPI

from distconv.communication.agreement import try_on_all_ranks
from distconv.data.channel_statistics import moments
from distconv.data.coordinates import AFFINE, SPACE_ATTRIBUTES, VariableLabels
from distconv.data.formats.nifti import VOLUME, is_nifti
from distconv.data.loader import Field, Loader
from distconv.data.opening import is_source_path, open_source
from distconv.data.source import SampleSource, StoredSource
from distconv.errors import DataError
from distconv.grid import ProcessGrid
from distconv.jobs import progress
from distconv.output import Output
from distconv.tensor import DistTensor
from distconv.writing import count_written_rows, open_output

from .network import TrainedNetwork
from .windows import Blend, WindowSource

DATASET = "prediction"
_GROUPS = ("heldout/", "test/", "", "train/")
"""Groups of a file in which samples are sought. The first one that has the dataset is used."""
_AXES = "dhw"

NIFTI = "nii.gz"
"""Format of predictions as a folder of volumes."""


@dataclass(frozen=True)
class PredictionInputs:
    """Samples to predict, and their labels if there are any."""

    source: StoredSource
    name: str
    """Dataset of samples in ``source``."""
    labels: StoredSource | None
    label: str
    """Dataset of labels in ``labels``."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape (N, C, ...) of the dataset of samples."""
        return self.source.shape(self.name)

    def close(self) -> None:
        """Close both sources."""
        self.source.close()
        if self.labels is not None:
            self.labels.close()


def open_inputs(options: argparse.Namespace, trained: TrainedNetwork, comm: MPI.Intracomm) -> PredictionInputs:
    """Open the samples and, if there are any, their labels. Collective: call on every rank.

    Parameters
    ----------
    options : argparse.Namespace
        Options of ``distconv predict``.
    trained : TrainedNetwork
        The network, with the names of the datasets of its training.
    comm : mpi4py.MPI.Intracomm

    Returns
    -------
    PredictionInputs

    Raises
    ------
    DataError
        On all ranks, if there is no dataset of samples, or no dataset with the given label name.
    """
    image, label = trained.names
    source, name = _open_first(options.data, options.image_name, image, comm, options.readers)
    prefix = name.rpartition("/")[0]
    wanted = options.label_name or (f"{prefix}/{label}" if prefix else label)
    # Collective, and raised on all ranks or on none: all ranks continue with labels, or all without.
    try:
        labels: StoredSource | None = open_source(options.data, [wanted], comm)
    except DataError:
        if options.label_name:
            raise
        labels = None
    if len(source.shape(name)) < 3:
        raise DataError(
            f"{source.path}: the shape of dataset {name!r} is {source.shape(name)}, but samples are (N, C, ...)"
        )
    return PredictionInputs(source, name, labels, wanted)


def _open_first(
    path: Path, given: str | None, name: str, comm: MPI.Intracomm, readers: int
) -> tuple[StoredSource, str]:
    """Open the first existing dataset of the candidates, and return its name. Collective."""
    reasons = []
    for each in [given] if given else [f"{group}{name}" for group in _GROUPS]:
        try:
            return open_source(path, [each], comm, readers=readers), each
        except DataError as error:
            reasons.append(error)
    # Of the candidates, the name without a group is the one that users know.
    raise reasons[0] if given else reasons[_GROUPS.index("")]


def loader_field(
    options: argparse.Namespace, trained: TrainedNetwork, inputs: PredictionInputs, dtype: torch.dtype
) -> Field:
    """Return the field of the loader, with the normalization used in training. Collective: call on every rank.

    Parameters
    ----------
    options : argparse.Namespace
        Options of ``distconv predict``.
    trained : TrainedNetwork
    inputs : PredictionInputs
    dtype : torch.dtype
        Dtype of the loaded samples.

    Returns
    -------
    Field

    Raises
    ------
    DataError
        On all ranks, if the number of channels differs from training, or samples have more than three extents.
    """
    shape = inputs.shape
    dims = {3: "ncw", 4: "nchw", 5: "ncdhw"}.get(len(shape))
    if dims is None:
        raise DataError(
            f"{inputs.source.path}: the shape of dataset {inputs.name!r} is {shape}, but samples have one to "
            "three spatial dimensions"
        )
    if trained.task == "classify":
        dims = dims.replace("c", "-")  # as in training: a layer that splits its channels takes its block of them
    if options.normalise_as is not None:
        other, name = _open_first(options.normalise_as, None, inputs.name.rpartition("/")[2], inputs.source.comm, 1)
        with closing(other):
            statistics = moments(other, name)
        mean, std = statistics.mean, statistics.std
    elif "mean" in trained.notes:
        mean, std = np.array(trained.notes["mean"]), np.array(trained.notes["std"])
    else:
        return Field(inputs.name, dims, dtype)
    if len(mean) != shape[1]:
        raise DataError(
            f"{inputs.source.path}: dataset {inputs.name!r} has {shape[1]} channels, but the network was "
            f"trained with {len(mean)}"
        )
    return Field(inputs.name, dims, dtype, mean, std)


def output_labels(inputs: PredictionInputs, shape: Sequence[int]) -> VariableLabels:
    """Return dimensions and coordinates of a prediction: those of the samples. Collective: call on every rank.

    Parameters
    ----------
    inputs : PredictionInputs
    shape : sequence of int
        Shape (N, C, ...) of the prediction.

    Returns
    -------
    VariableLabels
        Without dimensions, if the samples have no names of dimensions or others than the prediction.
    """
    known = inputs.source.labels(inputs.name)
    # An affine matrix holds for the voxels of the samples only.
    same_space = tuple(shape[2:]) == inputs.shape[2:]
    attributes = {key: known.attributes[key] for key in SPACE_ATTRIBUTES if same_space and key in known.attributes}
    numbers = attributes.get(AFFINE)
    if isinstance(numbers, list) and numbers == numbers[:16] * (len(numbers) // 16):
        attributes[AFFINE] = numbers[:16]  # the same for all samples
    if known.dims is None or len(known.dims) != len(shape) or DATASET in known.dims:
        return VariableLabels(attributes=attributes)
    samples, _, *space = known.dims
    dims = (samples, "channel" if "channel" not in (samples, *space) else "output_channel", *space)
    # The prediction may have another resolution.
    coords = {
        name: coordinate
        for name, extent in zip(dims, shape, strict=True)
        if (coordinate := known.coords.get(name)) is not None
        and coordinate.values.shape == (extent,)
        and name != dims[1]
    }
    return VariableLabels(dims, coords, attributes)


def prediction_path(options: argparse.Namespace) -> Path:
    """Return the path of the predictions: a file, or a folder of NIfTI volumes."""
    out: Path = options.out
    return out / (DATASET if options.format == NIFTI else f"{DATASET}.{options.format}")


def volume_names(inputs: PredictionInputs) -> list[str]:
    """Return the name of the predicted volume of each sample: that of the sample's file, if it has its own.

    Parameters
    ----------
    inputs : PredictionInputs

    Returns
    -------
    list of str

    Raises
    ------
    DataError
        If the samples are not volumes.
    """
    if len(inputs.shape) != 5:
        raise DataError(f"--format {NIFTI}: samples must be volumes (N, C, D, H, W), not {inputs.shape}")
    files, samples = inputs.source.files, inputs.shape[0]
    names = [re.sub(r"\.nii(\.gz)?$", "", str(file).rpartition("/")[2], flags=re.IGNORECASE) for file in files]
    if len(files) != samples or not all(map(is_nifti, files)):
        names = [f"sample-{number:06}" for number in range(samples)]
    elif len(set(names)) < samples:
        names = [f"{number:06}-{name}" for number, name in enumerate(names)]
    return [f"{name}.{NIFTI}" for name in names]


def open_predictions(path: Path, inputs: PredictionInputs, comm: MPI.Intracomm) -> tuple[StoredSource, str]:
    """Open written predictions. Collective: call on every rank.

    Parameters
    ----------
    path : pathlib.Path
        File or folder of predictions.
    inputs : PredictionInputs
        The predicted samples.
    comm : mpi4py.MPI.Intracomm

    Returns
    -------
    (StoredSource, str)
        The predictions, and the name of their dataset.
    """
    if path.is_dir() and not is_source_path(path):
        return open_source([path / name for name in volume_names(inputs)], [VOLUME], comm), VOLUME
    return open_source(path, [DATASET], comm), DATASET


@dataclass(frozen=True)
class PredictionRun:
    """A network, the samples to predict, and the options of the prediction."""

    options: argparse.Namespace
    trained: TrainedNetwork
    inputs: PredictionInputs
    field: Field
    grid: ProcessGrid
    model: Callable[..., Any]

    def write(self) -> Path:
        """Predict the samples that an earlier run has not predicted, and write them. Collective: call on every rank.

        Returns
        -------
        pathlib.Path
            The file in the folder ``options.out``.

        Raises
        ------
        DataError
            On all ranks, if samples cannot be read, or predictions written.
        """
        options, comm, samples = self.options, self.grid.world, self.inputs.shape[0]
        path, note = prediction_path(options), self._note
        if options.format == NIFTI:
            note["files"] = volume_names(self.inputs)
        try_on_all_ranks(comm, lambda: options.out.mkdir(parents=True, exist_ok=True), DataError)
        # The last sample is predicted again if only the end of the file is missing: its row defines the output's shape.
        begun = max(0, min(count_written_rows(path, comm), samples - 1))
        output: Output | None = None
        predicted = (
            self._predict_full_samples(begun) if self.window is None else self._predict_by_windows(begun, self.window)
        )
        with progress.progress_bar(
            rank=comm.rank, total=samples, initial=begun, unit="sample", desc="predicting"
        ) as bar:
            for begin, values in predicted:
                rows = values if options.raw else probabilities(values)
                if output is None:
                    shape = (samples, *rows.shape[1:])
                    labels = output_labels(self.inputs, shape)
                    if options.format == NIFTI:
                        labels = VariableLabels(attributes=labels.attributes)
                    output = open_output(path, DATASET, shape, rows.dtype, comm, note=note, labels=labels)
                output.write(begin, rows)
                bar.update(len(rows))
        if output is not None:
            output.finish()
        return path

    @property
    def _note(self) -> dict[str, Any]:
        """Values that must be the same when an output is resumed."""
        options = self.options
        return {
            "weights": self.trained.digest,
            "data": f"{options.data}: {self.inputs.name}",
            "window": None if self.window is None else list(self.window),
            "overlap": options.overlap,
            "raw": options.raw,
            "model": options.model,
            "normalise_as": None if options.normalise_as is None else str(options.normalise_as),
        }

    @property
    def window(self) -> tuple[int, ...] | None:
        """Extents of the windows, or None if full samples are predicted.

        Raises
        ------
        DataError
            If ``--window`` names an axis that samples do not have.
        """
        wanted, space = self.options.window, self.inputs.shape[2:]
        if wanted is None:
            return None
        axes = _AXES[-len(space) :]
        other = sorted(set(wanted) - set(axes))
        if other:
            raise DataError(f"--window: samples of {space} have the axes {', '.join(axes)}, not {other[0]}")
        return tuple(min(wanted.get(axis, extent), extent) for axis, extent in zip(axes, space, strict=True))

    def _loader(self, source: SampleSource) -> Loader:
        options = self.options
        return Loader(source, [self.field], self.grid, options.batch, shuffle=False, device=options.device)

    @torch.no_grad()
    def _outputs(self, inputs: DistTensor) -> DistTensor:
        outputs = self.model(inputs)
        if not isinstance(outputs, DistTensor) or outputs.dim() < 2:
            raise DataError(
                f"the network returns {type(outputs).__name__}, but a prediction is a tensor (samples, channels, ...)"
            )
        return outputs

    def _predict_full_samples(self, begun: int) -> Iterator[tuple[int, DistTensor]]:
        # From the batch in which the first missing sample lies; rows of its other samples are written again.
        for batch in self._loader(self.inputs.source).epoch(0, begun // self.options.batch):
            yield batch.samples[0], self._outputs(batch.tensors[0])

    def _predict_by_windows(self, begun: int, window: tuple[int, ...]) -> Iterator[tuple[int, DistTensor]]:
        windows = WindowSource(self.inputs.source, self.inputs.name, window, self.options.overlap)
        each, blend = len(windows.places), Blend(self.grid, windows.space, window)
        # A batch may hold windows of several samples. The first batch may begin in a sample that is written already.
        for batch in self._loader(windows).epoch(0, begun * each // self.options.batch):
            outputs = self._outputs(batch.tensors[0])
            if tuple(outputs.shape[2:]) != window:
                raise DataError(
                    f"--window: the network returns {tuple(outputs.shape)} for windows of {window}, but windows "
                    "require outputs with the spatial size of the inputs. Leave --window out."
                )
            for row, number in enumerate(batch.samples):
                sample, place = divmod(number, each)
                if sample < begun:
                    continue
                part = outputs[row : row + 1]
                assert isinstance(part, DistTensor)
                blend.add(windows.places[place], part)
                if place == each - 1:
                    yield sample, blend.result()
                    blend = Blend(self.grid, windows.space, window)


def probabilities(outputs: DistTensor) -> DistTensor:
    """Return class probabilities of outputs (N, C, ...): softmax over C, or sigmoid if C is 1. Collective."""
    result = torch.sigmoid(outputs) if outputs.shape[1] == 1 else torch.softmax(outputs, 1)
    assert isinstance(result, DistTensor)
    return result
