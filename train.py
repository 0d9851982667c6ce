r"""Train a causal language model on long sequences, each spread over several processes.

On this machine's CPU, two processes, no network:

    accelerate launch --config_file accelerate_configs/cpu.yaml train.py --model tiny --dataset stdlib \
        --seq-length 4096 --max-train-steps 100 --learning-rate 1e-3 --output-dir output/zigzag

Llama-2-7B on 8 GPUs with ZeRO-3 and offload to the host:

    accelerate launch --config_file accelerate_configs/single_node.yaml train.py --model
    meta-llama/Llama-2-7b-hf \
        --dataset PY007/slimpajama_llama_tokenized_upsample_4096_chunk_1M --parallel_mode zigzag_ring_attn \
        --seq-length 700000 --rope-theta 100000000 --dtype bf16 --checkpointing full
        --gradient-accumulate-every 8 \ --max-train-steps 90 --learning-rate 2e-5 --output-dir output/7B-0.7M

Writes into --output-dir: the model, its configuration and tokenizer, metrics.jsonl (one line an update),
summary.json and loss.png.
"""

from __future__ import annotations

import argparse
import json
import logging
import statistics
import sys
from pathlib import Path
from typing import Any


def parse_arguments(argv: list[str]) -> argparse.Namespace:
    """Read the flags; hyphens and underscores are the same. Every rank ends alike on a value out of range."""
    from easy_context.strategies import available_strategies

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    add = parser.add_argument
    add("--model", default="tiny", help='hub name or folder; "tiny": a small random Llama on bytes')
    add("--dataset", default="stdlib", help="hub name, file or folder; stdlib: Python's own library source")
    add(
        "--eval-dataset",
        help="whose loss is taken at the end (default: the held-out part of stdlib, or none)",
    )
    add("--eval-rows", type=_positive, default=16, help="sequences of the evaluation dataset that are used")
    add("--output-dir", default="output", help="folder for model, metrics, summary and picture")
    add("--parallel-mode", default="zigzag_ring_attn", choices=available_strategies(), help="strategy")
    add("--sp-size", type=_positive, help="processes that share a sequence (default: all)")
    add("--ring-degree", type=_positive, help="of those, how many form the ring of usp_attn")
    add("--kernel", default="auto", help="attention kernel (default: the fastest one that is installed)")
    add("--seq-length", type=_positive, default=4096, help="tokens in a sequence, over all processes")
    add("--batch-size", type=_positive, default=1, help="sequences in a micro-batch, per sequence group")
    add("--gradient-accumulate-every", type=_positive, default=1, help="micro-batches in an update")
    add("--max-train-steps", type=_positive, default=100, help="updates")
    add("--learning-rate", type=_non_negative, default=2e-5, help="peak learning rate of AdamW")
    add("--warmup-steps", type=_non_negative_int, default=0, help="updates of linear rise to the peak")
    add("--lr-schedule", default="constant", choices=("cosine", "linear", "constant"), help="after the rise")
    add("--weight-decay", type=_non_negative, default=0.0, help="of AdamW, per update and learning rate")
    add("--adam-betas", type=_fraction, nargs=2, default=(0.9, 0.95), help="decay rates of AdamW's averages")
    add(
        "--max-grad-norm", type=_non_negative, default=1.0, help="norm that gradients are clipped to; 0: none"
    )
    add("--rope-theta", type=_base, help="base of RoPE's frequencies, above 1 (default: the model's)")
    add("--dtype", default="fp32", choices=("fp32", "bf16"), help="of computation; weights stay in fp32")
    add("--checkpointing", default="none", choices=("none", "full"), help="full: recompute every layer")
    add("--seed", type=_non_negative_int, default=42, help="of initial weights and of the order of the data")
    add("--num-workers", type=_non_negative_int, default=0, help="data loading processes, per process")
    add("--wandb", metavar="NAME", help="report to Weights & Biases under this run name")
    add("--tracker", help='another tracker of accelerate, for example "tensorboard"')
    arguments = parser.parse_args([_with_hyphens(argument) for argument in argv])
    if arguments.warmup_steps > arguments.max_train_steps:
        parser.error(
            f"--warmup-steps needs at most --max-train-steps = {arguments.max_train_steps} updates, "
            f"got {arguments.warmup_steps}"
        )
    return arguments


def main(argv: list[str]) -> None:
    """Wire model, data and trainer together, train, and write what came out."""
    arguments = parse_arguments(argv)
    # Loaded after the flags are read, so that --help and a wrong flag answer at once.
    import torch

    from easy_context import apply_seq_parallel_monkey_patch, training
    from easy_context.models import load_model, load_tokenizer

    output_dir = training.check_output_dir(arguments.output_dir)
    settings = _settings(arguments)
    accelerator = _accelerator(arguments, settings, output_dir)
    world_size = training.count_live_ranks(accelerator)
    mesh = _mesh(arguments)
    tokenizer = load_tokenizer(arguments.model)
    loader, eval_loader = _loaders(arguments, tokenizer, mesh)
    model = load_model(
        arguments.model, dtype=torch.float32, rope_theta=arguments.rope_theta, seed=arguments.seed
    )
    patch = apply_seq_parallel_monkey_patch(
        arguments.parallel_mode, model, mesh=mesh, kernel=arguments.kernel
    )
    if arguments.checkpointing == "full":
        model.gradient_checkpointing_enable({"use_reentrant": False})
    trainer = training.Trainer(accelerator, model, settings, mesh)
    sequences = arguments.batch_size * settings.gradient_accumulate_every * mesh.dp_size
    accelerator.print(
        f"{arguments.parallel_mode} on {world_size} process(es), as an all-reduce counted them: "
        f"{mesh.dp_size} x {mesh.sp_size} (data x sequence parallel)\n"
        f"{sequences} sequence(s) or {sequences * arguments.seq_length} tokens an update, "
        f"{settings.max_train_steps} updates"
    )
    history = _train(trainer, loader, output_dir / "metrics.jsonl")
    heldout_loss = trainer.evaluate(eval_loader) if eval_loader else None
    training.save_model(accelerator, trainer.model, tokenizer, output_dir)
    accelerator.end_training()
    if accelerator.is_main_process:
        found = {"world_size": world_size, "kernel": patch.kernel_name, "heldout_loss": heldout_loss}
        _report(arguments, history, found, output_dir)


def _accelerator(arguments: argparse.Namespace, settings: Any, output_dir: Path) -> Any:
    import torch
    from accelerate import Accelerator
    from accelerate.utils import set_seed

    from easy_context.training import configure_deepspeed

    trackers = [tracker for tracker in ("wandb" if arguments.wandb else None, arguments.tracker) if tracker]
    accelerator = Accelerator(
        cpu=not torch.cuda.is_available(),  # without it, accelerate leaves CPU processes unconnected
        gradient_accumulation_steps=settings.gradient_accumulate_every,
        mixed_precision="bf16" if arguments.dtype == "bf16" else "no",
        log_with=trackers or None,
        project_dir=str(output_dir),
    )
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    if accelerator.is_main_process:
        logging.getLogger("easy_context").setLevel(logging.INFO)
    configure_deepspeed(accelerator, settings, batch_size=arguments.batch_size)
    set_seed(arguments.seed)
    names = {"wandb": {"name": arguments.wandb}} if arguments.wandb else {}
    accelerator.init_trackers("easy_context", config=_plain(arguments), init_kwargs=names)
    return accelerator


def _mesh(arguments: argparse.Namespace) -> Any:
    from easy_context import get_strategy, init_sequence_parallel_mesh

    keeps_sequences_whole = not get_strategy(arguments.parallel_mode).mesh_axes
    sp_size = 1 if keeps_sequences_whole else arguments.sp_size
    return init_sequence_parallel_mesh(sp_size, ring_degree=arguments.ring_degree)


def _loaders(arguments: argparse.Namespace, tokenizer: Any, mesh: Any) -> tuple[Any, Any]:
    """The loader to train on, and the one to evaluate on or None."""
    from torch.utils.data import Subset

    from easy_context.data import build_dataloader, load_rows

    common: dict[str, Any] = {
        "seq_length": arguments.seq_length,
        "dp_rank": mesh.dp_rank,
        "dp_size": mesh.dp_size,
        "seed": arguments.seed,
        "num_workers": arguments.num_workers,
    }
    rows = load_rows(arguments.dataset, tokenizer=tokenizer, seq_length=arguments.seq_length)
    loader = build_dataloader(rows, batch_size=arguments.batch_size, shuffle=True, **common)
    eval_dataset = arguments.eval_dataset or ("stdlib" if arguments.dataset == "stdlib" else None)
    if eval_dataset is None:
        return loader, None
    split = "heldout" if eval_dataset == "stdlib" else "train"
    eval_rows = load_rows(eval_dataset, tokenizer=tokenizer, seq_length=arguments.seq_length, split=split)
    eval_rows = Subset(eval_rows, range(min(arguments.eval_rows, len(eval_rows))))
    return loader, build_dataloader(eval_rows, batch_size=1, shuffle=False, **common)


def _train(trainer: Any, loader: Any, metrics_file: Path) -> list[Any]:
    """Make all updates under a progress bar; the metrics of each go to the file and the trackers."""
    from tqdm import tqdm

    from easy_context.training import append_metrics

    accelerator, history = trainer.accelerator, []
    if accelerator.is_main_process:
        metrics_file.write_text("")
    total = trainer.settings.max_train_steps
    with tqdm(total=total, disable=not accelerator.is_main_process, unit="update") as bar:
        for metrics in trainer.train(loader):
            history.append(metrics)
            accelerator.log(vars(metrics), step=metrics.step)
            if accelerator.is_main_process:
                append_metrics(metrics_file, metrics)
                bar.update()
                bar.set_postfix_str(
                    f"loss {metrics.loss:.3f}, ppl {metrics.perplexity:.2f}, "
                    f"{metrics.tokens_per_second:.0f} tokens/s, peak {metrics.peak_memory_gib:.2f} GiB"
                )
    return history


def _report(
    arguments: argparse.Namespace, history: list[Any], found: dict[str, Any], output_dir: Path
) -> None:
    """Write and print the summary, and draw the loss curve."""
    from easy_context.plotting import plot_loss_curve

    settled = history[len(history) // 5 :]  # the first updates are slower
    summary = {
        "parallel_mode": arguments.parallel_mode,
        **found,
        "final_loss": history[-1].loss,
        "median_tokens_per_second": statistics.median(entry.tokens_per_second for entry in settled),
        "peak_memory_gib": history[-1].peak_memory_gib,
        "arguments": _plain(arguments),
    }
    text = json.dumps(summary, indent=2)
    (output_dir / "summary.json").write_text(text + "\n")
    plot_loss_curve(output_dir / "metrics.jsonl", output_dir / "loss.png")
    print(f"{text}\nmodel, metrics.jsonl, summary.json and loss.png are in {output_dir}")  # noqa: T201


def _settings(arguments: argparse.Namespace) -> Any:
    from easy_context.training import TrainingSettings

    return TrainingSettings(
        parallel_mode=arguments.parallel_mode,
        max_train_steps=arguments.max_train_steps,
        gradient_accumulate_every=arguments.gradient_accumulate_every,
        learning_rate=arguments.learning_rate,
        warmup_steps=arguments.warmup_steps,
        lr_schedule=arguments.lr_schedule,
        weight_decay=arguments.weight_decay,
        adam_betas=tuple(arguments.adam_betas),
        max_grad_norm=arguments.max_grad_norm,
    )


def _plain(arguments: argparse.Namespace) -> dict[str, Any]:
    """The flags in a form that trackers and JSON take."""
    return {
        name: value if isinstance(value, (int, float, str)) else str(value)
        for name, value in vars(arguments).items()
    }


def _with_hyphens(argument: str) -> str:
    name, equals, value = argument.partition("=")
    return name.replace("_", "-") + equals + value if argument.startswith("--") else argument


def _positive(text: str) -> int:
    if int(text) < 1:
        raise argparse.ArgumentTypeError(f"needs a whole number of at least 1, got {text}")
    return int(text)


def _non_negative_int(text: str) -> int:
    if int(text) < 0:
        raise argparse.ArgumentTypeError(f"needs a whole number of at least 0, got {text}")
    return int(text)


def _non_negative(text: str) -> float:
    if not 0 <= float(text) < float("inf"):
        raise argparse.ArgumentTypeError(f"needs a number of at least 0, got {text}")
    return float(text)


def _base(text: str) -> float:
    if not 1 < float(text) < float("inf"):
        raise argparse.ArgumentTypeError(f"needs a number above 1, got {text}")
    return float(text)


def _fraction(text: str) -> float:
    if not 0 <= float(text) < 1:
        raise argparse.ArgumentTypeError(f"needs a number in [0, 1), got {text}")
    return float(text)


if __name__ == "__main__":
    main(sys.argv[1:])
