"""`convert SRC DST`: quantise a checkpoint while it is read. DST is written completely or not at all."""

import argparse
import errno
import hashlib
import json
import os
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import GenerationConfig

from .. import __version__
from .._text import in_unit, split_gguf
from .._weight_formats import ROWS
from ..checkpoints.activations import chosen, range_of
from ..checkpoints.calibration import importance_for
from ..checkpoints.layouts.files import LARGEST, Shards, checkpoint_files, progress_file
from ..checkpoints.mlx.names import check_architecture
from ..checkpoints.mlx.older_keys import with_older_keys
from ..checkpoints.mlx.writing import save_mlx, sizes_in_mlx
from ..checkpoints.mtp import MTP, converted_mtp, has_mtp, left_out_mtp, planned_mtp
from ..checkpoints.quantize.importance import Importance
from ..checkpoints.source import Source
from ..checkpoints.write.parts import Parts
from ..checkpoints.write.plan import LoadPlan, planned
from ..checkpoints.write.saving import save_parts
from ..macs import machine_memory
from ..transformers import QuantizationReport
from ..transformers.loading import from_pretrained
from .card import CARD, model_card
from .option_checks import check_packed, requests_format
from .recipes import arguments_of
from .results import locked, unfinished, write_json, written_whole
from .sources import folder_of, loading_options, small_files, tokenizer_of, usable_device

_HELD = 0.75  # part of the memory that a model's weights may take
# Files that are written anew, not copied.
_WRITTEN = ("config.json", "generation_config.json", "model.safetensors.index.json")


def run(options: argparse.Namespace) -> None:
    """Raises: ValueError, OSError, RuntimeError, SafetensorError with a one-line message."""
    destination = Path(options.destination)
    gguf = options.source.endswith(".gguf")
    local = Path(options.source).is_dir() or gguf
    source = folder_of(options.source, options.revision, weights=local)
    about = Source(source, loading_options(options))
    model = about.skeleton()
    if packed := (gguf or about.is_packed) and not requests_format(options):
        check_packed(options)
    if options.to == "mlx":
        check_architecture(model.config)
        with_older_keys(_config(source, model))  # raises for a config that lacks keys, before the work
    copied = [file for file in small_files(source) if str(file) not in _WRITTEN]
    if not local and (not options.dry_run or "mlx" in about.stored):
        # Gigabytes: after what can be checked without them.
        source = folder_of(options.source, options.revision)
    tokenizer = tokenizer_of(source) if gguf else None
    recipe = None if packed else arguments_of(options, model)
    speculative = _drafts(source, model, options.to == "mlx")
    plan = _planned(about, model, source, recipe, speculative, options.to == "mlx")
    if options.dry_run:
        print(plan.table())
    print(_sizes(plan))
    if options.importance is None:
        _print_hint_of_importance(plan)
    errors: list[list[Any]] = []
    if not options.dry_run:
        _check_space(destination, plan.after)
        importance = _importance(options, source, recipe)
        errors = _convert(source, copied, options, recipe, importance, tokenizer, speculative)
        print(f"wrote {destination}, {_size_of_files(destination)}")
    write_json(options.json, plan.as_json(errors))


def _planned(
    about: Source, model: Any, source: str, recipe: dict[str, Any] | None, speculative: bool, to_mlx: bool
) -> LoadPlan:
    """The plan of a conversion, MTP layers included.

    Raises: ValueError for formats that MLX does not have.
    """
    files, sizes_of = [str(file) for file in _weights(source)], sizes_in_mlx if to_mlx else None
    plan = planned(about, model, files, recipe, sizes_of)
    foreign = {name for name, row in ROWS.items() if not row.is_of_mlx}
    if to_mlx and (others := foreign & {weight.format for weight in plan.weights}):
        has_not = " and ".join(sorted(others))
        raise ValueError(f"--to mlx needs --bits, and a --mode of MLX's, which does not have {has_not}")
    if speculative:
        before, after = planned_mtp(source, model)
        return plan._replace(before=plan.before + before, after=plan.after + after)
    return plan


def _drafts(source: str, model: Any, to_mlx: bool) -> bool:
    """True if a checkpoint's MTP layers are converted, too; prints why not, if it has some."""
    if not _weights(source) or not has_mtp(model, source):
        return False
    reason = "mlx-lm has none" if to_mlx else left_out_mtp(source, model)
    if reason is not None:
        print(f"torch-moe-mps: MTP layers are left out: {reason}", file=sys.stderr)
    return reason is None


def _importance(options: argparse.Namespace, source: str, recipe: dict[str, Any] | None) -> Importance | None:
    """Importance that --importance asks for; a text runs through the model now."""
    if options.importance is None:
        return None
    device = usable_device(None)
    loaded = {"device_map": device, **loading_options(options)}

    def load(dense: bool) -> Any:
        return from_pretrained(source, **loaded, **({} if dense else recipe or {}))

    about = Source(source, loading_options(options))
    importance = importance_for("convert", options.importance, about, load)
    if options.save_importance is not None:
        with written_whole(options.save_importance):
            importance.save(options.save_importance)
    return importance


def _weights(source: str) -> list[Path]:
    """The files of the weights; none if they are not here."""
    if Path(source).is_file():
        return [Path(source)]
    return checkpoint_files(source) if any(Path(source).glob("*.safetensors")) else []


def _sizes(plan: LoadPlan) -> str:
    """The sizes of what will be written, which follow from shapes and formats."""
    memory = machine_memory()
    fit = "fits" if plan.after < _HELD * memory else "does not fit"
    size, token = in_unit(plan.before), in_unit(plan.token_before)
    return (
        f"weights: {size(plan.before)} -> {size(plan.after)} ({plan.quantized} modules quantised, "
        f"{plan.dense} left dense)\n"
        f"a token reads {token(plan.token_before)} of the model in SRC, "
        f"{token(plan.token_after)} of the new one\n"
        f"the new model {fit} in three quarters of this machine's {memory / 1e9:.0f} GB"
    )


def _print_hint_of_importance(plan: LoadPlan) -> None:
    """Prints that an importance matrix helps, if weights become so few bits."""
    if (few := _fewest_bits(plan)) is not None:
        print(
            f"{few} bits have less error in as many bytes with --importance auto, which runs the model "
            "over a text first"
        )


def _fewest_bits(plan: LoadPlan) -> int | None:
    """Least bits of newly quantised weights if 2 to 4, where an importance matrix helps; else None."""
    bits = {ROWS[each.format].bits for each in plan.weights if each.format in ROWS.keys() - {each.stored}}
    return min(bits & {2, 3, 4}, default=None)


def _size_of_files(folder: Path) -> str:
    """The size on the disk, tokenizer and configs included."""
    size = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
    return f"{in_unit(size)(size)} of files"


def _check_space(destination: Path, size: int) -> None:
    """Raises: ValueError without disk space for the new files; the largest is written twice."""
    parent = next(folder for folder in destination.absolute().parents if folder.exists())
    needed, free = size + min(size, LARGEST), shutil.disk_usage(parent).free
    begun = unfinished(destination)
    if begun.is_dir():
        needed -= sum(file.stat().st_size for file in begun.glob("*"))
    if free < needed:
        show = in_unit(needed)
        raise ValueError(f"{parent} must have {show(needed)} of free space, got {show(free)}")


@contextmanager
def _written_beside(destination: Path) -> Iterator[Path]:
    """Block that writes a folder, which is then renamed to the destination; resumes a killed process's."""
    folder = unfinished(destination)
    with locked(folder, destination), _finished(folder, destination):
        yield folder


@contextmanager
def _finished(folder: Path, destination: Path) -> Iterator[None]:
    """Block after which a folder gets its name; after an error it is removed unless it has complete files."""
    progress = progress_file(folder)
    try:
        yield
        folder.chmod(0o755)
        _rename(folder, destination)
        progress.unlink(missing_ok=True)
    except BaseException as error:
        if progress.exists():
            print(f"{folder} has what is complete: the same command goes on with it", file=sys.stderr)
            raise
        shutil.rmtree(folder, ignore_errors=True)
        if not isinstance(error, Exception):  # told to end
            print(f"nothing of {destination} is complete: the same command begins anew", file=sys.stderr)
        raise


def _convert(
    source: str,
    copied: list[Path],
    options: argparse.Namespace,
    recipe: dict[str, Any] | None,
    importance: Importance | None,
    tokenizer: Any,
    speculative: bool,
) -> list[list[Any]]:
    """Writes the checkpoint, with MTP layers or without.

    Returns: the rows of the report.
    """
    destination = Path(options.destination)
    with _written_beside(destination) as folder:
        began = progress_file(folder).exists()
        format = "mlx" if options.to == "mlx" else "pt"
        shards = Shards(folder, format, _key(source, options, recipe, importance))
        if began:
            done = len(shards.done)
            print(
                f"goes on behind {done} parts" if done else "begins anew: what was there is of other options"
            )
        how = loading_options(options) | {"dtype": _dtype(source, options, recipe)}
        with Parts(Source(source, how), recipe=recipe, importance=importance) as parts:
            packed: dict[str, str] = {}
            beside = converted_mtp(source, parts.model, packed) if speculative else ()
            if options.to == "mlx":
                config = _config(source, parts.model)
                save_mlx(parts.model, shards, config, parts.into(shards))
            else:
                runs_in = Source(source, loading_options(options)).skeleton().dtype
                save_parts(parts.model, shards, parts.into(shards), beside, runs_in=runs_in)
            if speculative:
                _note_mtp(folder / "config.json", packed)
            _save_generation_config(parts.model, folder, source)
            report = parts.report or QuantizationReport()
        text = str(report)
        print(text)
        if tokenizer is not None:
            tokenizer.save_pretrained(folder)
        for file in copied:
            (folder / file).parent.mkdir(exist_ok=True)
            shutil.copyfile(Path(source) / file, folder / file)
        if how["dtype"] != options.dtype:
            _measure(folder, options)
        base = None if Path(options.source).exists() else split_gguf(options.source)[0]
        (folder / CARD).write_text(model_card(destination.name, source, base, options.to, text))
    return report.rows()


def _note_mtp(file: Path, packed: dict[str, str]) -> None:
    """Adds the formats of MTP layers to the quantisation of a config, if any."""
    config = json.loads(file.read_text())
    if (quantization := config.get("quantization_config")) is not None:
        quantization[MTP] = packed
    file.write_text(json.dumps(config, indent=2) + "\n")


def _dtype(source: str, options: argparse.Namespace, recipe: dict[str, Any] | None) -> str:
    """Dtype of scales, and of what stays dense: float16, where bfloat16 would lose as much as 8 bits do.

    mlx-lm computes in the dtype of the scales, where activations may overflow.
    """
    about = Source(source, loading_options(options))
    quantises = recipe is not None or about.gguf is not None or bool(about.stored)
    may_change = options.dtype == "auto" and options.to != "mlx" and quantises
    is_bfloat16 = about.skeleton().dtype is torch.bfloat16
    return "float16" if may_change and is_bfloat16 else options.dtype


def _measure(folder: Path, options: argparse.Namespace) -> None:
    """Measures the range of a checkpoint's activations, and writes their dtype to config.json.

    It stays for a checkpoint that this machine cannot hold or that has no tokenizer.
    """
    if sum(file.stat().st_size for file in folder.glob("*.safetensors")) > _HELD * machine_memory():
        return
    device = "mps" if torch.backends.mps.is_available() else "cpu"
    about = Source(str(folder), loading_options(options))

    def load(dtype: torch.dtype) -> Any:
        return from_pretrained(str(folder), device_map=device, **loading_options(options) | {"dtype": dtype})

    found = range_of(about, device, load)
    if found is not None:
        activations = chosen(found)
        file = folder / "config.json"
        config = json.loads(file.read_text())
        config["dtype"] = str(activations.dtype).removeprefix("torch.")
        file.write_text(json.dumps(config, indent=2) + "\n")
        print(activations)


def _config(source: str, model: Any) -> dict[str, Any]:
    """config.json, or of a GGUF file what transformers makes of its header."""
    if Path(source).is_file():
        return {**model.config.to_dict(), "architectures": [type(model).__name__]}
    return json.loads((Path(source) / "config.json").read_text())


def _key(
    source: str, options: argparse.Namespace, recipe: dict[str, Any] | None, importance: Importance | None
) -> str:
    """Digest of everything that the files of a conversion depend on."""
    files = [(file.name, (about := file.stat()).st_size, about.st_mtime_ns) for file in _weights(source)]
    config = "" if Path(source).is_file() else (Path(source) / "config.json").read_text()
    parts = [__version__, os.path.realpath(source), files, config, recipe, options.dtype, options.to]
    parts.append(None if importance is None else importance.digest())
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


def _rename(folder: Path, destination: Path) -> None:
    try:
        folder.rename(destination)
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
            raise
        raise ValueError(
            f"{destination} was written by something else while this ran; it was not changed"
        ) from None


def _save_generation_config(model: nn.Module, folder: Path, source: str) -> None:
    generates: Any = model
    if generates.can_generate():
        has_config = (Path(source) / "generation_config.json").exists()
        config = GenerationConfig.from_pretrained(source) if has_config else generates.generation_config
        config.save_pretrained(folder)
