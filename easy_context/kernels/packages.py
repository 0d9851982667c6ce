"""How a kernel meets a package that may be absent, broken or of another version.

Nothing is imported here until a kernel asks. Knows imports and signatures; knows no attention.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Mapping, Sequence
from types import ModuleType
from typing import Any


class KernelNotInstalled(ImportError):
    """The package of a kernel is not installed. Any other ``ImportError``: it is, and does not work."""


def import_package(module: str, *, kernel: str, install: str) -> ModuleType:
    """Import ``module`` for a kernel.

    Args:
        module: dotted name of the module.
        kernel: name of the kernel that needs it, for the error.
        install: what to do about it, for the error.
    Raises: :class:`KernelNotInstalled` if that very package is absent; ``ImportError`` if it is there and
        cannot be imported (a missing dependency, an undefined symbol). Both quote the original failure.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        absent = (
            isinstance(error, ModuleNotFoundError)
            and error.name
            and f"{module}.".startswith(f"{error.name}.")
        )
        if absent:
            raise KernelNotInstalled(
                f"{kernel} needs {module}, which is not installed ({error}); {install}"
            ) from error
        raise ImportError(
            f"{kernel} needs {module}, which is installed but broken ({type(error).__name__}: {error}); "
            f"reinstall it for this torch, or remove it: {install}"
        ) from error


class PackageFunction:
    """A package's private function, called by keyword, with those arguments that its signature has.

    Such functions gain, split and rename parameters between releases. What a call offers beyond the signature
    is left out: so, beyond what ``needed`` lists, offer neutral values only (no window, no soft-capping).
    """

    def __init__(
        self,
        module: ModuleType,
        name: str,
        *,
        offered: Sequence[str],
        needed: Sequence[str | tuple[str, ...]],
        who: str,
    ):
        """Look at the signature and check it.

        Args:
            offered: every parameter that a call will give a value for.
            needed: parameters that must exist, since without them the result would be another; a tuple means
                one of them.
            who: the kernel, the package and its version, and what is supported, for the error.
        Raises: ``ImportError`` if the function is absent, lacks a needed parameter or adds an unknown one
            without a default.
        """
        function = getattr(module, name, None)
        if function is None:
            raise ImportError(f"{who}, whose {module.__name__} has no {name}")
        has_default = _parameters(function)
        missing = [
            " or ".join(names)
            for names in ((n,) if isinstance(n, str) else n for n in needed)
            if not any(n in has_default for n in names)
        ]
        unknown = [n for n, default in has_default.items() if not default and n not in offered]
        if missing or unknown:
            raise ImportError(
                f"{who}, whose {name}({', '.join(has_default)}) "
                f"lacks {', '.join(missing) or 'nothing'} and adds {', '.join(unknown) or 'nothing'}"
            )
        self._function: Callable[..., Any] = function
        self._names = frozenset(has_default)

    def has(self, parameter: str) -> bool:
        """Return whether the signature has that parameter."""
        return parameter in self._names

    def __call__(self, **arguments: Any) -> Any:
        """Call it with those of the arguments that its signature has."""
        return self._function(**{name: value for name, value in arguments.items() if name in self._names})


def _parameters(function: Callable[..., Any]) -> Mapping[str, bool]:
    """Names of the parameters, each with whether it has a default."""
    # torch.library.custom_op hides the Python signature behind (*args, **kwargs); its schema has the names.
    schema = getattr(getattr(function, "_opoverload", None), "_schema", None)
    if schema is not None:
        return {argument.name: argument.has_default_value() for argument in schema.arguments}
    parameters = inspect.signature(function).parameters.values()
    return {parameter.name: parameter.default is not parameter.empty for parameter in parameters}
