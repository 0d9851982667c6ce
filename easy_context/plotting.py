"""Pictures from result files. matplotlib is loaded when one is drawn, without a display."""

from __future__ import annotations

import json
from pathlib import Path


def plot_loss_curve(metrics_file: Path, picture: Path) -> None:
    """Draw the loss of every update of a run, over the tokens seen.

    Args:
        metrics_file: ``metrics.jsonl`` as the trainer writes it.
        picture: the PNG (or PDF) to write.
    Raises: ``ValueError`` if the file holds no update.
    """
    from matplotlib.figure import Figure  # not pyplot: no global state, no display

    rows = [json.loads(line) for line in metrics_file.read_text().splitlines()]
    if not rows:
        raise ValueError(f"plot_loss_curve needs at least one update, got none in {metrics_file}")
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    axes.plot([row["tokens"] for row in rows], [row["loss"] for row in rows], linewidth=1)
    axes.set(xlabel="tokens", ylabel="loss (nats a token)", title=metrics_file.parent.name)
    axes.grid(alpha=0.3)
    figure.savefig(picture, dpi=120)
