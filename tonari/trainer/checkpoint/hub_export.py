"""Write a checkpoint as a directory in Hugging Face's layout, one file in memory at a time."""

import json
import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from dataio.source.text.tokenizer import FILE, Tokenizer
from tonari.trainer.checkpoint.export import (
    AVERAGE,
    MODEL,
    StoredTensor,
    no_average,
    read_tensors,
    stored_tensors,
    write_safetensors,
)
from tonari.trainer.checkpoint.state import OWN
from tonari.trainer.checkpoint.weights import CONFIG, INDEX, ONE_FILE
from tonari.trainer.errors import CheckpointError
from tonari.trainer.models import Adapted, HubFormat, StagedModel

KEPT = ("bos_token_id", "eos_token_id", "pad_token_id", "max_position_embeddings")
"""What ``config.json`` of the weights that a run started from knows better than the run."""


def write_hub(
    out: Path,
    checkpoint: Path,
    model: StagedModel,
    *,
    max_file_bytes: int,
    published: Mapping[str, object] | None = None,
    notes: Mapping[str, object] | None = None,
    average: bool = False,
    trusted: bool = False,
    write_beside: Callable[[Path], None] = lambda directory: None,
) -> tuple[int, int]:
    """Write the weights of a checkpoint, and ``config.json`` where the model's format has one.

    Args:
        out: The directory to make; it may be there if it is empty.
        checkpoint: What ``Checkpoints.save`` wrote, on any mesh.
        model: The whole model that it is of; may be on the meta device.
        max_file_bytes: A file is larger only where one tensor is.
        published: The ``config.json`` of the weights that the run started from.
        notes: Kept in the header of each file.
        average: Whether to write the averaged weights in the place of the last ones.
        trusted: As of `read_checkpoint`.
        write_beside: Writes what else belongs into the directory.

    Returns:
        How many tensors were written, and how many numbers.

    Raises:
        CheckpointError: If the checkpoint is damaged, is not of this model, or has no averaged
            weights.
        OSError: If the directory cannot be written.
    """
    form, stored = model.hub_format(), stored_tensors(checkpoint, trusted=trusted)
    names = _names(checkpoint, model, form, stored)
    if average and not any(name.startswith(AVERAGE) for name in stored):
        raise no_average(checkpoint)
    # What is averaged are floating numbers, and not what counts.
    there_as = {
        name: (AVERAGE if average and AVERAGE + name.removeprefix(OWN) in stored else MODEL)
        + name.removeprefix(OWN)
        for name in names
    }
    partial = out.with_name(out.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir()
    files = _divide(names, stored, max_file_bytes)
    weight_map: dict[str, str] = {}
    num_bytes = 0
    for number, mine in enumerate(files, 1):
        file = (
            ONE_FILE if len(files) == 1 else f"model-{number:05d}-of-{len(files):05d}.safetensors"
        )
        wanted = [there_as[name] for name in mine]
        read = read_tensors(checkpoint, wanted, stored, trusted=trusted)
        there = {
            form.stored(name).name: form.stored(name).there(value)
            for name in mine
            if isinstance(value := read.pop(there_as[name]), Tensor)
        }
        write_safetensors(partial / file, there, notes or {})
        weight_map |= dict.fromkeys(there, file)
        num_bytes += sum(value.nbytes for value in there.values())
    if len(files) > 1:
        index = {"metadata": {"total_size": num_bytes}, "weight_map": weight_map}
        _write(partial / INDEX, index)
    if form.config:
        dtype = str(_tensor(stored, names[0]).properties.dtype).removeprefix("torch.")
        kept = {key: published[key] for key in KEPT if published and key in published}
        # Both ways that its versions write it.
        _write(partial / CONFIG, {**form.config, **kept, "dtype": dtype, "torch_dtype": dtype})
    write_beside(partial)
    # An empty directory of that name is replaced.
    os.replace(partial, out)
    sizes = [_tensor(stored, name).size.numel() for name in names]
    return len(sizes), sum(sizes)


def write_library_files(
    directory: Path, *, model: StagedModel, tokenizer: Tokenizer | None = None,
    eos_token_id: int | None = None,
) -> None:  # fmt: skip
    """Write the configs of a model of transformers, and the tokenizer of the text it learnt.

    Beside a tokenizer no config names a token to begin, end or pad with that is none of its own.

    Args:
        directory: Where the weights are.
        model: The model, adapted if it is a module of one's own.
        tokenizer: Of the text; None, or without a file of its own: none is written.
        eos_token_id: Of the token behind each document; None: there is none.
    """
    of_generation: dict[str, object] = {}
    wrapped = model.wrapped if isinstance(model, Adapted) else None
    config: Any = getattr(wrapped, "config", None)
    if hasattr(config, "save_pretrained"):
        config.architectures = [type(wrapped).__name__]
        config.eos_token_id = config.eos_token_id if eos_token_id is None else eos_token_id
        config.save_pretrained(directory)
        its = getattr(wrapped, "generation_config", None)
        of_generation = its.to_diff_dict() if its is not None else {}
    if eos_token_id is not None:
        of_generation |= {"eos_token_id": eos_token_id}
    if of_generation:
        _write(directory / "generation_config.json", of_generation)
    if tokenizer is None or tokenizer.document is None:
        return
    (directory / FILE).write_bytes(tokenizer.document)
    settings = {"tokenizer_class": "PreTrainedTokenizerFast"}
    if eos_token_id is not None:
        settings["eos_token"] = tokenizer.decode(np.array([eos_token_id]))
    _write(directory / "tokenizer_config.json", settings)
    added = json.loads(tokenizer.document).get("added_tokens", ())
    known = [eos_token_id, *(token["id"] for token in added if token["special"])]
    for path in filter(Path.exists, (directory / CONFIG, directory / "generation_config.json")):
        config = json.loads(path.read_text())
        others = (k for k in KEPT[:3] if isinstance(config.get(k), int) and config[k] not in known)
        _write(path, config | dict.fromkeys(others))


def _names(
    checkpoint: Path, model: StagedModel, form: HubFormat, stored: Mapping[str, StoredTensor]
) -> list[str]:
    """List our names of what is written, and see that the checkpoint has each as the model does."""
    names = []
    for name, value in model.state_dict().items():
        if name in form.aliases:
            continue
        its = stored.get(MODEL + name.removeprefix(OWN))
        found = "no such tensor" if its is None else str(list(its.size))
        if found != str(list(value.shape)):
            raise CheckpointError(
                f"{checkpoint}: {name} is {found}, expected {list(value.shape)} as the run's "
                "config.json describes its model; give the run.directory that wrote the checkpoint"
            )
        names.append(name)
    return names


def _tensor(stored: Mapping[str, StoredTensor], name: str) -> TensorStorageMetadata:
    its = stored[MODEL + name.removeprefix(OWN)]
    assert its is not None, "checked when the names were listed"
    return its


def _divide(
    names: list[str], stored: Mapping[str, StoredTensor], max_file_bytes: int
) -> list[list[str]]:
    """Put tensors into files, in order."""
    files: list[list[str]] = [[]]
    held = 0
    for name in names:
        its = _tensor(stored, name)
        num_bytes = its.size.numel() * torch.empty((), dtype=its.properties.dtype).element_size()
        if files[-1] and held + num_bytes > max_file_bytes:
            files.append([])
            held = 0
        files[-1].append(name)
        held += num_bytes
    return files


def _write(path: Path, content: object) -> None:
    path.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n")
