"""Write ``flash_attn_signatures.json`` from the source of published flash-attn packages.

Nothing of theirs is imported. Get the packages, unpack each (``flash-attn`` is a source archive,
``flash-attn-4`` a wheel), and name the interfaces:

    export FLASH_ATTENTION_SKIP_CUDA_BUILD=TRUE
    pip download --no-deps --no-binary :all: --no-build-isolation flash-attn==2.6.3
    pip download --no-deps flash-attn-4==4.0.0b36
    python tests/data/parse_flash_attn_signatures.py \
        "flash-attn 2.6.3=flash_attn-2.6.3/flash_attn/flash_attn_interface.py" \
        "flash-attn-4 4.0.0b36=flash_attn/cute/interface.py" > tests/data/flash_attn_signatures.json

For each function: its parameters in order, each with the source of its default or null, and what its last
``return`` gives. flash-attn 3 is the folder ``hopper`` of a flash-attn release, or of the repository at a
commit.
"""

from __future__ import annotations

import ast
import json
import sys
from pathlib import Path

FUNCTIONS = ("_flash_attn_forward", "_flash_attn_backward", "_flash_attn_fwd", "_flash_attn_bwd")


def parse_signatures(source: str) -> dict[str, dict[str, list]]:
    """Return the signatures of the private attention functions that a module defines."""
    functions = [node for node in ast.parse(source).body if isinstance(node, ast.FunctionDef)]
    return {
        function.name: {"parameters": _parameters(function), "returns": _returns(function)}
        for function in functions
        if function.name in FUNCTIONS
    }


def _parameters(function: ast.FunctionDef) -> list[list[str | None]]:
    names = [argument.arg for argument in function.args.args]
    defaults = [ast.unparse(default) for default in function.args.defaults]
    return [list(pair) for pair in zip(names, [None] * (len(names) - len(defaults)) + defaults, strict=True)]


def _returns(function: ast.FunctionDef) -> list[str]:
    returns = [node for node in ast.walk(function) if isinstance(node, ast.Return) and node.value is not None]
    value = max(returns, key=lambda node: node.lineno).value
    if isinstance(value, ast.IfExp):
        value = value.body
    return [ast.unparse(item) for item in (value.elts if isinstance(value, ast.Tuple) else [value])]


if __name__ == "__main__":
    labelled = dict(argument.split("=", 1) for argument in sys.argv[1:])
    signatures = {label: parse_signatures(Path(path).read_text()) for label, path in labelled.items()}
    # One function a line: a new release is then a readable difference.
    lines = [
        f"  {json.dumps(label)}: {{\n"
        + ",\n".join(f"    {json.dumps(name)}: {json.dumps(entry)}" for name, entry in functions.items())
        + "\n  }"
        for label, functions in signatures.items()
    ]
    sys.stdout.write("{\n" + ",\n".join(lines) + "\n}\n")
