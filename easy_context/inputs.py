"""Cut batches into the shards that ranks hold, and put shards together again: index maps, no algorithms."""

from __future__ import annotations

import hashlib
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.data import DataLoader, RandomSampler

from easy_context.comm.gather import all_gather_tensors
from easy_context.comm.mesh import SequenceParallelMesh, chosen_default_mesh, default_mesh
from easy_context.registry import IGNORE_INDEX, Strategy
from easy_context.strategies import get_strategy


def prepare_seq_parallel_inputs(
    seq_algo: str,
    input_ids: Tensor,
    position_ids: Tensor,
    target_ids: Tensor | None,
    rank: int,
    world_size: int,
    device: torch.device | str,
    *,
    ring_degree: int | None = None,
    mesh: SequenceParallelMesh | None = None,
) -> dict[str, Any]:
    """Return the shard of a batch that one rank of a sequence group holds.

    Args:
        seq_algo: name of a strategy, see ``available_strategies()``.
        input_ids: (B, S_global) token ids; every rank of the group passes the same batch.
        position_ids: (B, S_global) or (1, S_global), what RoPE sees; it restarts where a new document begins.
        target_ids: (B, S_global), ``input_ids`` shifted left by one, with -100 where nothing is to be
            predicted, or None. Shifting has to come first: the right neighbour within a shard is not the next
            token.
        rank, world_size: place in the sequence group and its size (``mesh.sp_rank``, ``mesh.sp_size``;
            without data parallelism the process's rank and the world size). A strategy that keeps sequences
            whole ignores both.
        device: where the shard goes.
        ring_degree: ring size of ``usp_attn``; None is the mesh's.
        mesh: what the sizes are compared with; None is the mesh made by ``init_sequence_parallel_mesh``, if
            any.

    Returns: ``local_input_ids``, ``local_position_ids``, ``local_target_ids`` (None if ``target_ids`` is),
        each (B, S_global / world_size).
    Raises: ``ValueError`` for an unknown strategy, a length that the strategy cannot cut (names the multiple
        and the padded length), shapes that differ, or sizes that are not the mesh's.
    """
    strategy = get_strategy(seq_algo)
    seq_len = _common_length(seq_algo, input_ids, position_ids, target_ids)
    held = _held_positions(strategy, seq_len, rank, world_size, ring_degree, mesh=mesh)

    def take(tensor: Tensor | None) -> Tensor | None:
        return None if tensor is None else tensor.index_select(1, held.to(tensor.device)).to(device)

    return {
        "local_input_ids": take(input_ids),
        "local_position_ids": take(position_ids),
        "local_target_ids": take(target_ids),
    }


def unshard_sequence(
    seq_algo: str, gathered: Tensor, world_size: int, *, dim: int = 1, ring_degree: int | None = None
) -> Tensor:
    """Put the shards of all ranks back into global order: the exact inverse of the sharding, differentiable.

    Args:
        seq_algo: the strategy that cut them.
        gathered: shards of ranks 0 to ``world_size - 1``, concatenated along ``dim``.
        world_size: number of ranks in the sequence group.
        dim: the sequence dimension.
        ring_degree: as in :func:`prepare_seq_parallel_inputs`.

    Returns: ``gathered`` with ``dim`` in global order; for a strategy that keeps sequences whole, rank 0's
    copy.
    """
    strategy = get_strategy(seq_algo)
    total = gathered.shape[dim]
    seq_len = total if strategy.mesh_axes else total // world_size
    degree = _ring_size(strategy, ring_degree, world_size, None)
    held = [
        strategy.layout(seq_len, num_ranks=world_size, rank=rank, ring_size=degree)
        for rank in range(world_size)
    ]
    # A stable sort, so that of several copies of a position the first rank's is taken.
    order = torch.cat(held).argsort(stable=True)
    if not strategy.mesh_axes:
        order = order[::world_size]
    return gathered.index_select(dim, order.to(gathered.device))


def sequence_length_multiple(seq_algo: str, world_size: int, *, ring_degree: int | None = None) -> int:
    """Return what the length of a sequence has to be a multiple of, in tokens."""
    strategy = get_strategy(seq_algo)
    return strategy.length_multiple(world_size, _ring_size(strategy, ring_degree, world_size, None))


class PaddedBatch(NamedTuple):
    """A batch padded on the right; all (B, S)."""

    input_ids: Tensor
    position_ids: Tensor
    target_ids: Tensor


def pad_to_multiple(
    input_ids: Tensor, position_ids: Tensor, target_ids: Tensor, *, multiple: int, pad_token_id: int = 0
) -> PaddedBatch:
    """Pad a batch on the right until its length is a multiple, without changing any loss.

    Padding carries the target -100 and positions that go on counting, so that it starts no document, and
    under a causal mask no real token sees it.

    Args:
        input_ids, position_ids, target_ids: (B, S) each.
        multiple: see :func:`sequence_length_multiple`.
        pad_token_id: any id of the vocabulary.
    """
    seq_len = _common_length("pad_to_multiple", input_ids, position_ids, target_ids)
    missing = -seq_len % multiple
    position_ids = position_ids.expand(input_ids.shape)
    counting_on = position_ids[:, -1:] + torch.arange(1, missing + 1, device=position_ids.device)
    return PaddedBatch(
        torch.nn.functional.pad(input_ids, (0, missing), value=pad_token_id),
        torch.cat([position_ids, counting_on], dim=1),
        torch.nn.functional.pad(target_ids, (0, missing), value=IGNORE_INDEX),
    )


def prepare_dataloader(
    seq_algo: str, dataloader: DataLoader, accelerator: Any, *, mesh: SequenceParallelMesh | None = None
) -> DataLoader:
    """Make every rank of a sequence group draw the same batches, and different groups different ones.

    With one sequence group this works in place (a shuffling loader is given a generator that all ranks seed
    alike), so that the result may be ignored. With several groups, and for a strategy that keeps sequences
    whole, each group gets its part of the data through the returned loader.

    Args:
        seq_algo: name of a strategy.
        dataloader: a loader that no engine has split over processes yet.
        accelerator: the ``accelerate.Accelerator`` of this process.
        mesh: None is the default mesh.

    Raises: ``ValueError`` if the loader was already split over processes (as ``accelerator.prepare`` does),
        or draws from a sampler whose order this function cannot align.
    """
    from accelerate.data_loader import (
        BatchSamplerShard,
        DataLoaderDispatcher,
        IterableDatasetShard,
        prepare_data_loader,
    )

    strategy = get_strategy(seq_algo)
    parts = (dataloader, getattr(dataloader, "batch_sampler", None), getattr(dataloader, "dataset", None))
    if any(
        isinstance(part, (BatchSamplerShard, DataLoaderDispatcher, IterableDatasetShard)) for part in parts
    ):
        raise ValueError(
            "prepare_dataloader needs a loader that is not split over processes, got "
            f"{type(dataloader).__name__}; do not give the loader to accelerator.prepare: ranks of a "
            "sequence group have to see one batch"
        )
    if strategy.mesh_axes:
        mesh = default_mesh() if mesh is None else mesh
        num_parts, part = mesh.dp_size, mesh.dp_rank
    else:
        num_parts, part = accelerator.num_processes, accelerator.process_index
    _align_shuffling(dataloader)
    if num_parts == 1:
        return dataloader
    return prepare_data_loader(
        dataloader, device=None, num_processes=num_parts, process_index=part, put_on_device=False
    )


def check_same_batch(input_ids: Tensor, mesh: SequenceParallelMesh | None = None) -> None:
    """Raise on every rank if the ranks of a sequence group do not hold one and the same batch.

    Args:
        input_ids: (B, S_global), the whole batch before it is cut.
        mesh: None is the default mesh.
    Raises: ``RuntimeError`` that lists the ranks by what they hold.
    """
    mesh = default_mesh() if mesh is None else mesh
    if mesh.sp_size == 1:
        return
    content = hashlib.sha256(input_ids.detach().cpu().contiguous().numpy().tobytes())
    content.update(str(tuple(input_ids.shape)).encode())
    digest = int.from_bytes(content.digest()[:7], "big")
    digests = torch.cat(
        all_gather_tensors(torch.tensor([digest], device=input_ids.device), mesh.sp_group)
    ).tolist()
    if len(set(digests)) > 1:
        same = [
            [rank for rank, other in enumerate(digests) if other == value] for value in dict.fromkeys(digests)
        ]
        raise RuntimeError(
            "a sequence group needs one batch on all its ranks, got different ones on sequence ranks "
            f"{same}; draw batches with prepare_dataloader or a sampler over data-parallel ranks"
        )


def _align_shuffling(dataloader: DataLoader) -> None:
    """Give a shuffling sampler a generator with rank 0's seed, so that the order is one at any world size."""
    sampler = dataloader.sampler
    if isinstance(sampler, RandomSampler):
        seed = torch.tensor([torch.initial_seed() % 2**62])
        if torch.distributed.is_initialized():
            if "nccl" in torch.distributed.get_backend():
                seed = seed.cuda()
            torch.distributed.broadcast(seed, src=0)
        sampler.generator = torch.Generator().manual_seed(int(seed))


def _common_length(who: str, input_ids: Tensor, position_ids: Tensor, target_ids: Tensor | None) -> int:
    batch_size, seq_len = input_ids.shape
    if position_ids is None:
        raise ValueError(
            f"{who} needs position_ids of the whole sequence, got None; "
            f"pass torch.arange({seq_len}).unsqueeze(0) for one document a row"
        )
    if tuple(position_ids.shape) not in ((batch_size, seq_len), (1, seq_len)):
        raise ValueError(
            f"{who} needs position_ids shaped like input_ids {tuple(input_ids.shape)}, got "
            f"{tuple(position_ids.shape)}"
        )
    if target_ids is not None and target_ids.shape != input_ids.shape:
        raise ValueError(
            f"{who} needs target_ids shaped like input_ids {tuple(input_ids.shape)}, got "
            f"{tuple(target_ids.shape)}; shift them left by one and fill the end with -100"
        )
    return seq_len


def _held_positions(
    strategy: Strategy,
    seq_len: int,
    rank: int,
    world_size: int,
    ring_degree: int | None,
    *,
    mesh: SequenceParallelMesh | None,
) -> Tensor:
    mesh = chosen_default_mesh() if mesh is None else mesh
    if strategy.mesh_axes:
        if not 0 <= rank < world_size:
            raise ValueError(f"prepare_seq_parallel_inputs needs a rank in 0..{world_size - 1}, got {rank}")
        if mesh is not None and world_size != mesh.sp_size:
            raise ValueError(
                f"prepare_seq_parallel_inputs needs the size of the sequence group, {mesh.sp_size}, got "
                f"{world_size}; pass mesh.sp_rank and mesh.sp_size"
            )
    degree = _ring_size(strategy, ring_degree, world_size, mesh)
    return strategy.layout(seq_len, num_ranks=world_size, rank=rank, ring_size=degree)


def _ring_size(
    strategy: Strategy, ring_degree: int | None, world_size: int, mesh: SequenceParallelMesh | None
) -> int | None:
    if ring_degree is not None and mesh is not None and ring_degree != mesh.ring_size:
        raise ValueError(
            f"{strategy.name} needs one ring degree for sharding and patch, got {ring_degree} and the mesh's "
            f"{mesh.ring_size}; leave ring_degree out"
        )
    if ring_degree is not None and (ring_degree < 1 or world_size % ring_degree):
        raise ValueError(f"{strategy.name} needs a ring_degree that divides {world_size}, got {ring_degree}")
    return ring_degree if ring_degree is not None or mesh is None else mesh.ring_size
