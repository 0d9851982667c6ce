"""Rows of tokens from text or token datasets, and batches that every rank of a sequence group draws alike.

A row has up to L + 1 tokens for a sequence length of L: the inputs are its first L tokens, the targets the
last L. Targets are shifted here, on whole sequences, because the right neighbour within a shard is not the
next token. This file knows datasets, tokenizers and data-parallel ranks; it does not cut sequences.
"""

from __future__ import annotations

import json
import logging
import sysconfig
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Sampler

from easy_context.registry import IGNORE_INDEX

logger = logging.getLogger("easy_context")

_FILE_FORMATS = {".txt": "text", ".jsonl": "json", ".json": "json", ".parquet": "parquet"}
_STDLIB_SKIPPED = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__", "encodings"}
_STDLIB_BYTES = {"heldout": 2**17, "train": 2**22}  # enough to learn from, quick to tokenize


class TokenRows(Dataset):
    """Rows with ``input_ids`` and optionally ``labels``, each checked when it is read."""

    def __init__(self, rows: Any, *, name: str) -> None:
        self._rows = rows
        self._name = name

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> dict[str, Any]:
        row = self._rows[index]
        labels = row.get("labels")
        if len(row["input_ids"]) < 2:
            raise ValueError(
                f"{self._name} needs rows of at least 2 tokens, got {len(row['input_ids'])} in row {index}"
            )
        if labels is not None and len(labels) != len(row["input_ids"]):
            raise ValueError(
                f"{self._name} needs as many labels as input_ids, got {len(labels)} and "
                f"{len(row['input_ids'])} in row {index}; mark what is not to be learned with {IGNORE_INDEX}"
            )
        return {"input_ids": row["input_ids"], **({} if labels is None else {"labels": labels})}


def load_rows(dataset: str, *, tokenizer: Any, seq_length: int, split: str = "train") -> TokenRows:
    """Load a dataset as rows of tokens for sequences of ``seq_length``.

    Args:
        dataset: ``"stdlib"`` (the running Python's own library source, splits ``"train"`` and ``"heldout"``),
            a folder made by ``save_to_disk``, a ``.txt``, ``.jsonl``, ``.json`` or ``.parquet`` file or a
            folder of them, or a name of the hub. Either rows with ``input_ids`` (and optionally ``labels``,
            aligned with them), or rows with ``text``, which is tokenized and packed.
        tokenizer: for text; documents are joined by its end-of-text token.
        seq_length: L, in tokens. Rows of text come out with L + 1 tokens and overlap by one, so that every
            token but the very first is a target.
        split: part of the dataset.

    Raises: ``ValueError`` for a dataset that cannot be found, is empty, has no usable column, or is shorter
        than one sequence.
    """
    texts = _stdlib_texts(split) if dataset == "stdlib" else None
    table = None
    if texts is None:
        table = _load_table(dataset, split)
        columns = list(table.column_names)
        if len(table) == 0:
            raise ValueError(
                f"--dataset needs at least one row, got none in the split {split!r} of {dataset!r}"
            )
        if "input_ids" in columns:
            _tell_unused(dataset, columns, {"input_ids", "labels"})
            return TokenRows(table, name=dataset)
        if "text" not in columns:
            raise ValueError(
                f"--dataset needs a column input_ids or text, got {', '.join(columns)} in {dataset!r}; "
                "rename one"
            )
        _tell_unused(dataset, columns, {"text"})
        texts = table["text"]
    tokens = _tokenize(texts, tokenizer)
    num_rows = (len(tokens) - 1) // seq_length
    if num_rows < 1:
        raise ValueError(
            f"--seq-length needs at most the {max(0, len(tokens) - 1)} tokens that {dataset!r} has, got "
            f"{seq_length}; choose a shorter one or more text"
        )
    packed = [tokens[row * seq_length : row * seq_length + seq_length + 1] for row in range(num_rows)]
    return TokenRows([{"input_ids": row} for row in packed], name=dataset)


@dataclass(frozen=True)
class RowCollator:
    """Make a batch of rows: inputs, positions and targets, (B, L) int64 each. Can be sent to loader
    processes.

    Rows are cut to L + 1 tokens; a row of L has no target for its last token; a shorter one is padded on the
    right. Positions run from 0 to L - 1. What has no target carries -100.

    Attributes:
        seq_length: L.
        pad_token_id: any id of the vocabulary.
    """

    seq_length: int
    pad_token_id: int = 0

    def __call__(self, rows: Sequence[dict[str, Any]]) -> dict[str, Tensor]:
        """Return ``input_ids``, ``position_ids`` and ``target_ids``."""
        shape = (len(rows), self.seq_length)
        input_ids = torch.full(shape, self.pad_token_id, dtype=torch.int64)
        target_ids = torch.full(shape, IGNORE_INDEX, dtype=torch.int64)
        for index, row in enumerate(rows):
            tokens = torch.as_tensor(row["input_ids"], dtype=torch.int64)[: self.seq_length + 1]
            labels = torch.as_tensor(row.get("labels", tokens), dtype=torch.int64)[: self.seq_length + 1]
            num_inputs = min(len(tokens), self.seq_length)
            input_ids[index, :num_inputs] = tokens[:num_inputs]
            target_ids[index, : len(labels) - 1] = labels[1:]
        position_ids = torch.arange(self.seq_length).repeat(len(rows), 1)
        return {"input_ids": input_ids, "position_ids": position_ids, "target_ids": target_ids}


class SequenceGroupSampler(Sampler[int]):
    """Deals out rows to data-parallel groups: all ranks of a sequence group draw the same, groups different
    ones.

    The order follows from the seed and the epoch alone, never from global random state, so that ranks agree.
    In an epoch each group draws ``num_rows // dp_size`` rows; a remainder is left out, another one each epoch
    if shuffled.

    Args:
        num_rows: rows of the dataset.
        dp_rank, dp_size: place among the data-parallel groups.
        shuffle: whether to draw in random order, a new one each epoch.
        seed: of that order.
    """

    def __init__(self, num_rows: int, *, dp_rank: int, dp_size: int, shuffle: bool, seed: int) -> None:
        self._num_rows = num_rows
        self._dp_rank, self._dp_size = dp_rank, dp_size
        self._shuffle, self._seed = shuffle, seed
        self._epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """Choose the order of an epoch, counted from 0."""
        self._epoch = epoch

    def __len__(self) -> int:
        return self._num_rows // self._dp_size

    def __iter__(self) -> Iterator[int]:
        order = torch.arange(self._num_rows)
        if self._shuffle:
            generator = torch.Generator().manual_seed(self._seed + 2**20 * self._epoch)
            order = torch.randperm(self._num_rows, generator=generator)
        return iter(order[self._dp_rank :: self._dp_size][: len(self)].tolist())


def build_dataloader(
    rows: Dataset,
    *,
    batch_size: int,
    seq_length: int,
    dp_rank: int,
    dp_size: int,
    shuffle: bool,
    seed: int,
    num_workers: int = 0,
    pad_token_id: int = 0,
) -> DataLoader:
    """Return a loader of this rank's batches, the same on all ranks of its sequence group.

    Args:
        rows: a sized dataset of rows, see :func:`load_rows`.
        batch_size: rows in a batch; what does not fill one is left out.
        seq_length, pad_token_id: see :class:`RowCollator`.
        dp_rank, dp_size, shuffle, seed: see :class:`SequenceGroupSampler`.
        num_workers: processes that prepare batches.

    Raises: ``ValueError`` if there are fewer rows than one batch for every group.
    """
    num_rows = len(rows)  # pyright: ignore[reportArgumentType]
    if num_rows < batch_size * dp_size:
        raise ValueError(
            f"training needs at least {batch_size * dp_size} rows for a batch of {batch_size} in each of "
            f"{dp_size} data-parallel group(s), got {num_rows}; lower --batch-size or --seq-length"
        )
    return DataLoader(
        rows,
        batch_size=batch_size,
        sampler=SequenceGroupSampler(num_rows, dp_rank=dp_rank, dp_size=dp_size, shuffle=shuffle, seed=seed),
        collate_fn=RowCollator(seq_length, pad_token_id),
        drop_last=True,
        num_workers=num_workers,
        multiprocessing_context="spawn" if num_workers else None,  # forked children of gloo processes hang
        persistent_workers=num_workers > 0,
    )


def _tokenize(texts: Any, tokenizer: Any) -> list[int]:
    """All texts in one run of tokens, each ended by the tokenizer's end-of-text token if it has one."""
    tokens: list[int] = []
    for text in texts:
        ids = tokenizer(text, verbose=False)[
            "input_ids"
        ]  # not verbose: longer than the model's window is meant
        tokens += ids
        if tokenizer.eos_token_id is not None and (not ids or ids[-1] != tokenizer.eos_token_id):
            tokens.append(tokenizer.eos_token_id)
    return tokens


def _stdlib_texts(split: str) -> list[str]:
    """Source files of the running Python's library, mixed by an order that depends on names alone."""
    if split not in _STDLIB_BYTES:
        raise ValueError(f"the stdlib dataset has the splits {', '.join(_STDLIB_BYTES)}, got {split!r}")
    root = Path(sysconfig.get_paths()["stdlib"])
    names = [path.relative_to(root) for path in root.rglob("*.py")]
    names = [name for name in names if not _STDLIB_SKIPPED & set(name.parts[:-1])]
    names.sort(key=lambda name: (zlib.crc32(name.as_posix().encode()), name))
    heldout, rest = _take_bytes(root, names, _STDLIB_BYTES["heldout"])
    if split == "heldout":
        return heldout
    return _take_bytes(root, rest, _STDLIB_BYTES["train"])[0]


def _take_bytes(root: Path, names: list[Path], num_bytes: int) -> tuple[list[str], list[Path]]:
    """Texts of the first files that reach ``num_bytes`` together, and the names of the others."""
    texts: list[str] = []
    while names and num_bytes > 0:
        text = (root / names[0]).read_text(encoding="utf-8", errors="replace")
        texts.append(text)
        num_bytes -= len(text.encode())
        names = names[1:]
    return texts, names


def _load_table(dataset: str, split: str) -> Any:
    """A datasets table from a folder, a file, or the hub."""
    import datasets

    path = Path(dataset)
    if not path.exists():
        return _load_from_hub(dataset, split)
    if (path / "state.json").exists() or (path / "dataset_dict.json").exists():
        loaded = datasets.load_from_disk(dataset)
        if not isinstance(loaded, datasets.DatasetDict):
            return loaded
        if split not in loaded:
            raise ValueError(f"--dataset needs a split {split!r}, got {', '.join(loaded)} in {dataset!r}")
        return loaded[split]
    files = [path] if path.is_file() else sorted(path.rglob("*"))
    files = [file for file in files if file.suffix in _FILE_FORMATS and file.is_file()]
    if not files:
        raise ValueError(
            f"--dataset needs files that end in {', '.join(_FILE_FORMATS)}, got none in {dataset!r}"
        )
    if len({_FILE_FORMATS[file.suffix] for file in files}) > 1:
        found = sorted({file.suffix for file in files})
        raise ValueError(
            f"--dataset needs files of one format, got {', '.join(found)} in {dataset!r}; keep one"
        )
    return _load_files(datasets, files)


def _load_files(datasets: Any, files: list[Path]) -> Any:
    kind = _FILE_FORMATS[files[0].suffix]
    if kind == "text":
        return datasets.Dataset.from_dict({"text": [file.read_text(encoding="utf-8") for file in files]})
    if kind == "parquet":
        return datasets.concatenate_datasets([datasets.Dataset.from_parquet(str(file)) for file in files])
    rows: list[dict[str, Any]] = []
    for file in files:
        text = file.read_text(encoding="utf-8")
        try:
            parsed = (
                json.loads(text)
                if file.suffix == ".json"
                else [json.loads(line) for line in text.splitlines()]
            )
        except json.JSONDecodeError as error:
            raise ValueError(
                f"--dataset needs one JSON object a line, got {error} in {str(file)!r}"
            ) from error
        rows += parsed if isinstance(parsed, list) else [parsed]
    return datasets.Dataset.from_list(rows)


def _load_from_hub(dataset: str, split: str) -> Any:
    import datasets

    try:
        return datasets.load_dataset(dataset, split=split)
    except (OSError, ValueError, datasets.exceptions.DatasetNotFoundError) as error:
        raise ValueError(
            f"--dataset needs stdlib, a file, a folder or a name of the hub, got {dataset!r}, which could "
            f"not be loaded: {error}"
        ) from error


def _tell_unused(dataset: str, columns: list[str], used: set[str]) -> None:
    unused = [column for column in columns if column not in used]
    if unused:
        logger.info("%s: columns %s are not used", dataset, ", ".join(unused))
