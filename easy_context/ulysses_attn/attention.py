"""Ulysses attention: trade a part of the sequence for a part of the heads, attend, trade back.

Before the exchange a rank holds every head of its part of the sequence, after it some heads of the whole
sequence, which is what an ordinary attention kernel wants. Key/value heads that are fewer than ranks go to
every rank whose query heads use them, once each. This file knows heads; what attends in between is handed in.

Letters: B batch, S local sequence, H query heads, H_kv key/value heads, D head_dim, n ranks.

Source: DeepSpeed-Ulysses, https://arxiv.org/abs/2309.14509.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from easy_context.comm.all_to_all import HeadPlan, gather_heads, scatter_heads

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


def kv_heads_of(rank: int, *, num_ranks: int, num_heads: int, num_kv_heads: int) -> list[int]:
    """Return the key/value heads that the query heads of ``rank`` use, ascending, each once.

    Query heads are dealt out in consecutive runs, ``num_heads / num_ranks`` a rank.
    """
    per_rank, group = num_heads // num_ranks, num_heads // num_kv_heads
    return sorted({head // group for head in range(rank * per_rank, (rank + 1) * per_rank)})


def ulysses_attention(
    q: Tensor, k: Tensor, v: Tensor, *, group: dist.ProcessGroup | None, attend: Attend
) -> Tensor:
    """Return attention of this rank's queries, computed by ``attend`` on whole sequences of some heads.

    Args:
        q: (B, S, H, D); H is a multiple of the number of ranks.
        k, v: (B, S, H_kv, D).
        group: ranks that hold consecutive parts of the sequence, in group order.
        attend: given (B, n * S, H / n, D) queries, and keys and values of as few heads as serve them, returns
            (B, n * S, H / n, D).

    Returns: (B, S, H, D).

    Communication per rank: one all-to-all each way. Forward sends ``(n - 1) / n`` of the elements of q and of
    out, and of k and v each key/value head once to each rank that uses it; backward sends the same again.
    """
    num_ranks = dist.get_world_size(group) if group is not None else 1
    num_heads, num_kv_heads = q.shape[2], k.shape[2]
    queries = [
        list(range(rank * num_heads // num_ranks, (rank + 1) * num_heads // num_ranks))
        for rank in range(num_ranks)
    ]
    shared = [
        kv_heads_of(rank, num_ranks=num_ranks, num_heads=num_heads, num_kv_heads=num_kv_heads)
        for rank in range(num_ranks)
    ]
    # q, k and v travel together: their heads are numbered one after another.
    together = [
        [*own, *(num_heads + head for head in kv), *(num_heads + num_kv_heads + head for head in kv)]
        for own, kv in zip(queries, shared, strict=True)
    ]
    plan = HeadPlan(together, num_heads + 2 * num_kv_heads, group)
    num_own, num_own_kv = len(queries[plan.rank]), len(shared[plan.rank])
    arrived = scatter_heads(torch.cat([q, k, v], dim=2), plan)
    own_q, own_k, own_v = arrived.split([num_own, num_own_kv, num_own_kv], dim=2)
    serving = [shared[plan.rank].index(head * num_kv_heads // num_heads) for head in queries[plan.rank]]
    if num_own % num_own_kv or serving != [index * num_own_kv // num_own for index in range(num_own)]:
        # The run of query heads starts or ends within a group: no kernel knows such groups, so repeat heads
        # here.
        index = torch.tensor(serving, device=q.device)
        own_k, own_v = own_k.index_select(2, index), own_v.index_select(2, index)
    return gather_heads(attend(own_q, own_k, own_v), HeadPlan(queries, num_heads, group))
