"""Every shipped launch file is one that accelerate itself accepts, and complete for train.py."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from accelerate.commands.config.config_args import load_config_from_file

CONFIGS = Path(__file__).parent.parent / "accelerate_configs"
YAML = sorted(CONFIGS.glob("*.yaml"))
JSON = sorted(CONFIGS.glob("*.json"))


def test_the_promised_files_are_there():
    assert {path.name for path in YAML + JSON} >= {
        "cpu.yaml",
        "single_gpu.yaml",
        "single_node.yaml",
        "two_node.yaml",
        "deepspeed_inference.yaml",
        "zero3_offload.json",
        "zero3_offload_inference.json",
    }


@pytest.mark.parametrize("path", YAML, ids=lambda path: path.name)
def test_accelerate_reads_the_launch_file_and_knows_every_key(path):
    config = load_config_from_file(str(path))
    assert config.num_processes >= 1
    assert config.num_processes % config.num_machines == 0


@pytest.mark.parametrize("path", YAML, ids=lambda path: path.name)
def test_the_deepspeed_file_that_a_launch_file_names_exists(path):
    settings = getattr(load_config_from_file(str(path)), "deepspeed_config", None) or {}
    named = settings.get("deepspeed_config_file")
    assert named is None or (CONFIGS.parent / named).is_file()


def test_cpu_processes_are_launched_in_the_way_that_connects_them():
    config = load_config_from_file(str(CONFIGS / "cpu.yaml"))
    assert str(config.distributed_type).endswith("MULTI_GPU") and config.use_cpu


@pytest.mark.parametrize("path", JSON, ids=lambda path: path.name)
def test_a_deepspeed_file_leaves_nothing_to_edit_by_hand(path):
    settings = json.loads(path.read_text())
    assert isinstance(settings["train_micro_batch_size_per_gpu"], int)  # "auto" needs a prepared loader
    assert "optimizer" not in settings and "scheduler" not in settings  # the command line decides
    assert settings["zero_optimization"]["stage"] == 3


def test_zero3_can_save_what_it_trained():
    settings = json.loads((CONFIGS / "zero3_offload.json").read_text())
    assert settings["zero_optimization"]["stage3_gather_16bit_weights_on_model_save"]
    assert isinstance(settings["gradient_clipping"], float)  # else accelerate clips at 1 without a word
