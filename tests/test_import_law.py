"""The architecture as a test: who may import whom, and what importing the package may do."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "easy_context"

# Floor of each room, by the first part of the module path below easy_context. A backend's shims stand higher
# than it.
_FLOORS = {
    "registry": 0,
    "layouts": 0,
    "masks": 0,
    "kernels": 1,
    "comm": 1,
    "zigzag_ring_attn": 2,
    "dist_flash_attn": 2,
    "ulysses_attn": 2,
    "usp_attn": 2,
    "data_parallel": 2,
    "peers": 2,
    "strategies": 3,
    "patch": 4,
    "inputs": 4,
    "loss": 4,
    "checkpointing": 4,
    "rope": 4,
    "unsloth_offloaded_gradient_checkpoint": 5,
    "data": 6,
    "models": 6,
    "training": 6,
    "evaluation": 6,
    "plotting": 6,
    "planner": 6,
}
_SHIMS = {"monkey_patch", "prepare_inputs"}  # floor 5, inside a backend's folder
_ALLOWED_SIBLINGS = {("usp_attn", "zigzag_ring_attn"), ("usp_attn", "ulysses_attn")}
_OUTSIDE = {"transformers": 4, "accelerate": 6, "deepspeed": 6, "datasets": 6, "pandas": 6, "matplotlib": 6}
# accelerate's loader classes are what prepare_dataloader has to recognize and return.
_WRITTEN_EXCEPTIONS = {("inputs", "accelerate")}


def _room_and_floor(module: str) -> tuple[str, int]:
    parts = module.split(".")
    return parts[0], 5 if parts[-1] in _SHIMS else _FLOORS[parts[0]]


def _imports(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            whole = node.module == "easy_context"
            found |= {f"{node.module}.{alias.name}" for alias in node.names} if whole else {node.module}
    return found


_MODULES = sorted(path for path in PACKAGE.rglob("*.py") if path != PACKAGE / "__init__.py")


@pytest.mark.parametrize("path", _MODULES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_a_module_imports_from_lower_floors_only(path):
    module = ".".join(path.relative_to(PACKAGE).with_suffix("").parts).removesuffix(".__init__")
    room, floor = _room_and_floor(module)
    for imported in _imports(path):
        top, _, rest = imported.partition(".")
        if top in _OUTSIDE and (room, top) not in _WRITTEN_EXCEPTIONS:
            assert floor >= _OUTSIDE[top], (
                f"{module} imports {top}, which is for floors {_OUTSIDE[top]} and above"
            )
        if top == "easy_context" and rest:
            other_room, other_floor = _room_and_floor(rest)
            fine = other_room == room or other_floor < floor or (room, other_room) in _ALLOWED_SIBLINGS
            assert fine, f"{module} (floor {floor}) imports {rest} (floor {other_floor})"


def test_importing_the_package_is_light_and_silent():
    program = (
        "import sys, easy_context; from easy_context import strategies, kernels, layouts\n"
        "import torch; assert not torch.cuda.is_initialized()\n"
        "heavy = {'transformers', 'accelerate', 'datasets', 'matplotlib', 'pandas', 'flash_attn'}\n"
        "assert not heavy & set(sys.modules), heavy & set(sys.modules)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT, timeout=120
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_importing_the_patch_changes_nothing_in_transformers():
    program = (
        "import transformers.models.llama.modeling_llama as m\n"
        "before = dict(vars(m)), m.LlamaModel.forward\n"
        "import easy_context.patch, easy_context.inputs, easy_context.loss\n"
        "assert (dict(vars(m)), m.LlamaModel.forward) == before\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT, timeout=120
    )
    assert (done.returncode, done.stdout) == (0, ""), done.stderr


def test_every_public_name_can_be_imported():
    import easy_context

    for name in easy_context.__all__:
        assert getattr(easy_context, name) is not None


def test_an_unknown_public_name_is_an_attribute_error():
    import easy_context

    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        easy_context.nonsense  # noqa: B018
