"""The training step and what surrounds it: schedule, accumulation, metrics, evaluation, saving.

Everything here takes settings and objects; flags and wiring are train.py's. Engines come through accelerate.
The unit of time is the update (one optimizer step); the unit of work is the token, counted over all ranks.
"""

from __future__ import annotations

import json
import math
import os
import resource
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from types import MethodType
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers import PreTrainedModel

from easy_context.comm.mesh import SequenceParallelMesh
from easy_context.inputs import check_same_batch, prepare_seq_parallel_inputs
from easy_context.loss import sequence_parallel_linear_cross_entropy
from easy_context.registry import IGNORE_INDEX

LR_SCHEDULES = ("cosine", "linear", "constant")
_FINAL_FACTOR = 0.1  # of the peak learning rate, at the end of the cosine
# Configuration keys of heads that do more than a linear map, and the value with which they do not.
_HEAD_EXTRAS = {
    "final_logit_softcapping": None,
    "logits_scaling": 1.0,
    "logit_scale": 1.0,
    "lm_head_multiplier": 1.0,
}


@dataclass(frozen=True)
class TrainingSettings:
    """How to train.

    Attributes:
        parallel_mode: name of the strategy.
        max_train_steps: number of updates.
        gradient_accumulate_every: micro-batches per update and data-parallel group.
        learning_rate: peak, reached after ``warmup_steps`` updates.
        lr_schedule: one of ``LR_SCHEDULES``, what follows the warm-up.
        weight_decay, adam_betas: of AdamW; vectors (norms, biases) are not decayed.
        max_grad_norm: global norm to which gradients are clipped; 0 does not clip.
    """

    parallel_mode: str
    max_train_steps: int
    gradient_accumulate_every: int = 1
    learning_rate: float = 2e-5
    warmup_steps: int = 0
    lr_schedule: str = "constant"
    weight_decay: float = 0.0
    adam_betas: tuple[float, float] = (0.9, 0.95)
    max_grad_norm: float = 1.0


@dataclass(frozen=True)
class UpdateMetrics:
    """What is known after an update; over all ranks, unless a unit says otherwise.

    Attributes:
        step: number of this update, from 1.
        loss: token-weighted mean over the update, nats a token.
        perplexity: its exponential.
        learning_rate: with which this update was made.
        grad_norm: global norm before clipping.
        tokens: input tokens seen so far.
        tokens_per_second: input tokens of this update over its time.
        peak_memory_gib: GiB, of rank 0: allocated on its GPU, or resident in its process without one.
        epoch: passes over the data that are complete.
    """

    step: int
    loss: float
    perplexity: float
    learning_rate: float
    grad_norm: float
    tokens: int
    tokens_per_second: float
    peak_memory_gib: float
    epoch: int


def learning_rate_factor(update: int, *, warmup_steps: int, total: int, schedule: str) -> float:
    """Return the share of the peak learning rate with which update ``update`` (from 0) is made.

    It rises linearly over ``warmup_steps`` updates, then stays (``"constant"``), falls to 0 (``"linear"``) or
    to a tenth along half a cosine (``"cosine"``) at the end of ``total`` updates.
    """
    if update < warmup_steps:
        return (update + 1) / (warmup_steps + 1)
    progress = (update - warmup_steps) / max(1, total - warmup_steps)
    if schedule == "linear":
        return 1 - progress
    if schedule == "cosine":
        return _FINAL_FACTOR + (1 - _FINAL_FACTOR) * (1 + math.cos(math.pi * progress)) / 2
    return 1.0


def make_optimizer(model: nn.Module, settings: TrainingSettings) -> torch.optim.Optimizer:
    """Return AdamW over the trainable parameters; those with fewer than two dims are not decayed."""
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups = [
        {"params": [p for p in trainable if p.dim() >= 2], "weight_decay": settings.weight_decay},
        {"params": [p for p in trainable if p.dim() < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=settings.learning_rate, betas=settings.adam_betas)


def put_loss_into_forward(model: PreTrainedModel, mesh: SequenceParallelMesh) -> None:
    """Let ``model(input_ids=, position_ids=, target_ids=, num_target_tokens=)`` return the fused loss.

    Engines wrap and hook a model's forward, so the loss has to happen inside it. Without ``target_ids`` the
    model's own forward runs as ever.

    Raises: ``NotImplementedError`` for a model whose head does more than a linear map.
    """
    for name, neutral in _HEAD_EXTRAS.items():
        value = getattr(model.config, name, neutral)
        if value != neutral and value is not None:
            raise NotImplementedError(
                f"the fused loss needs a head that is a linear map alone, got {name}={value} in "
                f"{type(model).__name__}; take sequence_parallel_cross_entropy of its logits in a loop of "
                "your own"
            )
    own_forward = model.forward

    def forward(
        self: PreTrainedModel,
        *args: Any,
        target_ids: Tensor | None = None,
        num_target_tokens: Tensor | None = None,
        **kwargs: Any,
    ) -> Any:
        if target_ids is None:
            return own_forward(*args, **kwargs)
        hidden = self.base_model(*args, **kwargs).last_hidden_state
        head = self.get_output_embeddings()
        return sequence_parallel_linear_cross_entropy(
            hidden, head, target_ids, num_target_tokens=num_target_tokens, mesh=mesh
        )

    model.forward = MethodType(forward, model)


def count_live_ranks(accelerator: Accelerator) -> int:
    """Return the number of processes that an all-reduce reaches.

    Raises: ``RuntimeError`` if that is not the number that was launched: some launch settings start processes
        that do not know of each other, each of which would train alone with a loss that looks perfect.
    """
    count = torch.ones((), dtype=torch.int64, device=accelerator.device)
    if dist.is_initialized():
        dist.all_reduce(count)
    launched = int(os.environ.get("WORLD_SIZE", "1"))
    if int(count) != launched or accelerator.num_processes != launched:
        raise RuntimeError(
            f"training needs the {launched} launched processes in one group, got {int(count)}; on CPUs use "
            "accelerate_configs/cpu.yaml (distributed_type: MULTI_GPU with use_cpu: true)"
        )
    return int(count)


def refuse_second_sharding(accelerator: Accelerator) -> None:
    """Raise ``ValueError`` if accelerate was told to cut sequences itself: they would be cut twice."""
    config = getattr(accelerator, "parallelism_config", None)
    for name in ("cp_size", "sp_size"):
        if getattr(config, name, 1) not in (None, 1):
            raise ValueError(
                f"training needs sequences cut once, got {name}={getattr(config, name)} in accelerate's "
                "ParallelismConfig; remove it, --parallel_mode and --sp-size decide"
            )


class Trainer:
    """Trains a patched model on sharded sequences, one update at a time, through whatever engine accelerate
    has.

    Args:
        accelerator: made with ``gradient_accumulation_steps=settings.gradient_accumulate_every``.
        model: a causal language model, already patched.
        settings: how to train.
        mesh: which ranks share a sequence.
    """

    def __init__(
        self,
        accelerator: Accelerator,
        model: PreTrainedModel,
        settings: TrainingSettings,
        mesh: SequenceParallelMesh,
    ) -> None:
        refuse_second_sharding(accelerator)
        put_loss_into_forward(model, mesh)
        self.accelerator, self.settings, self.mesh = accelerator, settings, mesh
        self.model, self.optimizer = accelerator.prepare(model, make_optimizer(model, settings))
        self.tokens = 0

    def train(self, loader: DataLoader) -> Iterator[UpdateMetrics]:
        """Make all updates, going over the data as often as that takes, and yield the metrics of each.

        Raises: ``RuntimeError`` on every rank if ranks of a sequence group hold different batches, or if the
            loss is not finite (names the update).
        """
        self.model.train()
        batches = _endless(loader)
        for update in range(self.settings.max_train_steps):
            started = time.perf_counter()
            drawn = [next(batches) for _ in range(self.settings.gradient_accumulate_every)]
            whole = torch.cat([batch["input_ids"] for _, batch in drawn])
            check_same_batch(whole.to(self.accelerator.device), self.mesh)
            learning_rate = self._set_learning_rate(update)
            loss, grad_norm = self._update([batch for _, batch in drawn])
            if not math.isfinite(loss):
                raise RuntimeError(
                    f"training needs a finite loss, got {loss} at update {update + 1}; nothing was saved. "
                    "Lower --learning-rate, raise --warmup-steps or look at that batch"
                )
            seen = sum(batch["input_ids"].numel() for _, batch in drawn) * self.mesh.dp_size
            self.tokens += seen
            yield UpdateMetrics(
                step=update + 1,
                loss=loss,
                perplexity=math.exp(min(loss, 700.0)),
                learning_rate=learning_rate,
                grad_norm=grad_norm,
                tokens=self.tokens,
                tokens_per_second=seen / (time.perf_counter() - started),
                peak_memory_gib=peak_memory_gib(self.accelerator.device),
                epoch=drawn[-1][0],
            )

    @torch.no_grad()
    def evaluate(self, loader: DataLoader) -> float:
        """Return the token-weighted mean loss over a loader, in nats a token, the same on every rank.

        Raises: ``ValueError`` if it holds no target at all.
        """
        self.model.eval()
        totals = torch.zeros(2, dtype=torch.float64, device=self.accelerator.device)
        for batch in loader:
            local = self._shard(batch)
            # With a count of 1 the loss is the world size times the sum of this rank's token losses.
            one = torch.ones((), dtype=torch.int64, device=self.accelerator.device)
            total = self.model(**local, num_target_tokens=one) / self.mesh.world_size
            totals += torch.stack([total.double(), (local["target_ids"] != IGNORE_INDEX).sum().double()])
        if dist.is_initialized():
            dist.all_reduce(totals)
        self.model.train()
        if not totals[1]:
            raise ValueError("evaluation needs at least one target, got none in the whole evaluation set")
        return float(totals[0] / totals[1])

    def _update(self, batches: list[dict[str, Tensor]]) -> tuple[float, float]:
        """Make one optimizer step over micro-batches; return loss over all ranks and gradient norm."""
        shards = [self._shard(batch) for batch in batches]
        count = torch.stack([(shard["target_ids"] != IGNORE_INDEX).sum() for shard in shards]).sum()
        if dist.is_initialized():
            dist.all_reduce(count)
        loss, grad_norm = torch.zeros((), device=self.accelerator.device), 0.0
        for shard in shards:
            with self.accelerator.accumulate(self.model):
                part = self.model(**shard, num_target_tokens=count)
                # accelerate and DeepSpeed divide by the number of micro-batches, to average equal ones. Ours
                # are weighted by their tokens already and have to be added.
                self.accelerator.backward(part * len(shards))
                if self.accelerator.sync_gradients:
                    grad_norm = self._clip()
                self.optimizer.step()
                self.optimizer.zero_grad()
            loss += part.detach()
        if dist.is_initialized():
            dist.all_reduce(loss)
        return float(loss) / self.mesh.world_size, grad_norm

    def _clip(self) -> float:
        limit = self.settings.max_grad_norm or math.inf
        norm = self.accelerator.clip_grad_norm_(self.model.parameters(), limit)
        return float("nan") if norm is None else float(norm)

    def _set_learning_rate(self, update: int) -> float:
        settings = self.settings
        rate = settings.learning_rate * learning_rate_factor(
            update,
            warmup_steps=settings.warmup_steps,
            total=settings.max_train_steps,
            schedule=settings.lr_schedule,
        )
        # Not a scheduler prepared by accelerate, which would step once for each process.
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        return rate

    def _shard(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        local = prepare_seq_parallel_inputs(
            self.settings.parallel_mode,
            batch["input_ids"],
            batch["position_ids"],
            batch["target_ids"],
            self.mesh.sp_rank,
            self.mesh.sp_size,
            self.accelerator.device,
            mesh=self.mesh,
        )
        return {name.removeprefix("local_"): tensor for name, tensor in local.items()}


def _endless(loader: DataLoader) -> Iterator[tuple[int, dict[str, Tensor]]]:
    """Batches with their epoch; a group of micro-batches may begin in one epoch and end in the next."""
    epoch = 0
    while True:
        if hasattr(loader.sampler, "set_epoch"):
            loader.sampler.set_epoch(epoch)  # pyright: ignore[reportAttributeAccessIssue]
        for batch in loader:
            yield epoch, batch
        epoch += 1


def peak_memory_gib(device: torch.device) -> float:
    """Return the most memory so far in GiB: allocated on a GPU, or resident in this process on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20  # KiB on Linux


def check_output_dir(output_dir: str) -> Path:
    """Make the output folder and prove that it can be written to, before any work is done.

    Raises: ``ValueError`` naming the folder and what the system said.
    """
    folder = Path(output_dir)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe = folder / f".writable-{os.getpid()}"
        probe.write_text("")
        probe.unlink()
    except OSError as error:
        raise ValueError(
            f"--output-dir needs a folder that can be written to, got {output_dir!r} ({error}); choose "
            "another"
        ) from error
    return folder


def configure_deepspeed(accelerator: Accelerator, settings: TrainingSettings, *, batch_size: int) -> None:
    """Give DeepSpeed, if it is the engine, the settings that are decided by train.py and by nobody else."""
    plugin = accelerator.state.deepspeed_plugin
    if plugin is None:
        return
    plugin.deepspeed_config |= {
        "train_micro_batch_size_per_gpu": batch_size,
        "gradient_accumulation_steps": settings.gradient_accumulate_every,
        "gradient_clipping": settings.max_grad_norm,
    }


def append_metrics(path: Path, metrics: UpdateMetrics) -> None:
    """Append one update as a line of JSON."""
    with path.open("a") as file:
        file.write(json.dumps(asdict(metrics)) + "\n")


def save_model(accelerator: Accelerator, model: nn.Module, tokenizer: Any, output_dir: Path) -> None:
    """Save weights, configuration and tokenizer as transformers reads them; every rank has to call it."""
    state = accelerator.get_state_dict(model)  # of the wrapped model: engines gather their shards here
    if accelerator.is_main_process:
        unwrapped = accelerator.unwrap_model(model)
        unwrapped.save_pretrained(output_dir, state_dict=state)
        tokenizer.save_pretrained(output_dir)
    accelerator.wait_for_everyone()
