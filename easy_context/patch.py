"""Put a strategy under Hugging Face models: the only file that knows how their attention is called.

A model of today asks two module-level objects of its modeling file: ``create_causal_mask`` once per forward
pass, and ``ALL_ATTENTION_FUNCTIONS`` in every layer. A patch replaces both (and wraps the models'
``forward``, to see the arguments). The mask that a patched forward pass creates is not a tensor but a note of
what the pass agreed upon, a :class:`_LayerMask`; a layer that is handed such a note computes by the strategy,
any other layer as ever. So nothing is looked up per layer, activation checkpointing replays layers without
further help, and unpatched models of the same family are left alone.

All state of a patch lives in the objects it puts into the modeling file, and leaves with them.
"""

from __future__ import annotations

import functools
import inspect
import logging
import sys
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType, TracebackType
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from easy_context.comm.gather import all_gather_tensors
from easy_context.comm.mesh import SequenceParallelMesh, default_mesh
from easy_context.kernels import require_kernel, select_kernel
from easy_context.kernels.base import Kernel
from easy_context.layouts import inverse_order
from easy_context.masks import SequenceMask, document_starts
from easy_context.registry import HeadShape, Strategy
from easy_context.strategies import get_strategy

logger = logging.getLogger("easy_context")

_FUNCTIONS = "ALL_ATTENTION_FUNCTIONS"
_CAUSAL_MASK, _WINDOW_MASK = "create_causal_mask", "create_sliding_window_causal_mask"
_LAYER_TYPES = {"full_attention", "sliding_attention"}
# What models tell their attention function beyond tensors, mask and scale, and what does not change the
# result.
_HARMLESS_KEYWORDS = {
    "position_ids",
    "cache_position",
    "cache",
    "past_key_values",
    "past_key_value",
    "use_cache",
    "output_attentions",
    "output_hidden_states",
    "return_dict",
    "num_items_in_batch",
    "logits_to_keep",
    "position_embeddings",
}
# What a forward pass may carry that a shard cannot honour. Values that are None or False are nothing.
_CACHES = ("cache", "past_key_values", "past_key_value")


def apply_seq_parallel_monkey_patch(
    seq_algo: str,
    model: str | nn.Module,
    *,
    mesh: SequenceParallelMesh | None = None,
    kernel: str = "auto",
) -> SeqParallelPatch:
    """Let Hugging Face models compute their attention by a sequence-parallel strategy.

    Args:
        seq_algo: name of a strategy, see ``available_strategies()``.
        model: a family such as ``"llama"`` or ``"mistral"`` (any whose models use transformers' attention
            interface; the name of its folder in ``transformers.models``), which patches all its models, built
            before or after; or one model, which patches that instance alone.
        mesh: the ranks that share a sequence; None is the default mesh, taken at the first forward pass.
        kernel: ``"auto"`` or the name of a kernel, see ``easy_context.kernels.available_kernels()``.

    Returns: a handle with ``undo()`` and ``kernel_name``, also usable in a ``with`` statement. Applying the
    same patch again returns the handle that is in force. A patch on top of another replaces it until undone.

    Raises: ``ValueError`` for an unknown strategy, kernel or family, ``ImportError`` for a kernel whose
    package is missing or broken, ``NotImplementedError`` for a family or model whose attention cannot be
    served.
    """
    strategy = get_strategy(seq_algo)
    require_kernel(kernel)
    if isinstance(model, str):
        modules, target = [_modeling_module(model)], None
    elif isinstance(model, nn.Module):
        modules, target = _modeling_modules_of(model), model
        _refuse_mixing_layers(model)
    else:
        raise ValueError(
            f"apply_seq_parallel_monkey_patch needs a family name or a model, got {type(model).__name__}; "
            'pass for example "llama" or the loaded model'
        )
    dispatchers = [_Dispatcher.of(module) for module in modules]
    patch = SeqParallelPatch(strategy, dispatchers, target=target, mesh=mesh, kernel=kernel)
    return patch._install()


class SeqParallelPatch:
    """A patch in force: which strategy serves which models. ``undo()`` or the end of a ``with`` ends it."""

    def __init__(
        self,
        strategy: Strategy,
        dispatchers: list[_Dispatcher],
        *,
        target: nn.Module | None,
        mesh: SequenceParallelMesh | None,
        kernel: str,
    ) -> None:
        self.strategy = strategy
        self._dispatchers = dispatchers
        self._target = None if target is None else weakref.ref(target)
        self._mesh = mesh
        self._requested_kernel = kernel
        self._kernels_used: set[str] = set()
        self._checked_models: weakref.WeakSet[nn.Module] = weakref.WeakSet()

    def __enter__(self) -> SeqParallelPatch:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.undo()

    @property
    def kernel_name(self) -> str:
        """Name of the kernel in use; with ``kernel="auto"`` it is ``"auto"`` until the first forward pass."""
        return ", ".join(sorted(self._kernels_used)) or self._requested_kernel

    @property
    def mesh(self) -> SequenceParallelMesh:
        """The ranks that share a sequence; without one of its own, the patch follows the default mesh."""
        return default_mesh() if self._mesh is None else self._mesh

    @property
    def sp_size(self) -> int:
        """Number of ranks over which this strategy spreads a sequence."""
        return self.mesh.sp_size if self.strategy.mesh_axes else 1

    def undo(self) -> None:
        """Take the patch away. Twice is the same as once; the order among several patches does not matter."""
        for dispatcher in self._dispatchers:
            dispatcher.remove(self)

    def kernel_for(self, q: Tensor) -> Kernel:
        """Return the kernel that serves tensors like ``q`` (B, S, H, D)."""
        kernel = select_kernel(self._requested_kernel, device=q.device, dtype=q.dtype, head_dim=q.shape[-1])
        self._kernels_used.add(kernel.name)
        return kernel

    def check_model(self, model: nn.Module) -> None:
        """Refuse, once per model, what a model's configuration makes impossible; on every rank alike."""
        if model not in self._checked_models:
            _refuse_mixing_layers(model)
            if self.sp_size > 1:
                _refuse_length_dependent_rope(model)
            self._checked_models.add(model)

    def _install(self) -> SeqParallelPatch:
        current = [dispatcher.current(self.target) for dispatcher in self._dispatchers]
        if (
            current[0] is not None
            and all(patch is current[0] for patch in current)
            and current[0]._equals(self)
        ):
            return current[0]
        for dispatcher in self._dispatchers:
            dispatcher.add(self)
        return self

    @property
    def target(self) -> nn.Module | None:
        """The one model that is patched, or None for a whole family."""
        return None if self._target is None else self._target()

    def _equals(self, other: SeqParallelPatch) -> bool:
        return (self.strategy, self._mesh, self._requested_kernel) == (
            other.strategy,
            other._mesh,
            other._requested_kernel,
        )


class _Dispatcher:
    """Stands in one modeling file while any patch needs it, and decides which patch serves which model."""

    def __init__(self, module: ModuleType) -> None:
        self._module = module
        self._family: list[SeqParallelPatch] = []
        self._instances: weakref.WeakKeyDictionary[nn.Module, list[SeqParallelPatch]] = (
            weakref.WeakKeyDictionary()
        )
        self._originals: dict[str, Any] = {}
        self._wrapped: list[tuple[type, str, Callable[..., Any], Callable[..., Any] | None]] = []
        self._running = threading.local()

    @staticmethod
    def of(module: ModuleType) -> _Dispatcher:
        """Return the dispatcher that is installed in a modeling file, or a new one, not yet installed."""
        functions = getattr(module, _FUNCTIONS)
        return functions.dispatcher if isinstance(functions, _AttentionFunctions) else _Dispatcher(module)

    def current(self, target: nn.Module | None) -> SeqParallelPatch | None:
        """Return the patch on top for one model, or for the family (``target`` None)."""
        stack = self._family if target is None else self._instances.get(target, [])
        return stack[-1] if stack else None

    def patch_of(self, module: nn.Module) -> SeqParallelPatch | None:
        """Return the patch that serves a model or one of its layers: its own before its family's."""
        return self.current(module) or self.current(None)

    def add(self, patch: SeqParallelPatch) -> None:
        if not self._originals:
            self._replace()
        if patch.target is None:
            self._family.append(patch)
            return
        for part in patch.target.modules():
            self._instances.setdefault(part, []).append(patch)

    def remove(self, patch: SeqParallelPatch) -> None:
        if patch in self._family:
            self._family.remove(patch)
        for part, stack in list(self._instances.items()):
            if patch in stack:
                stack.remove(patch)
            if not stack:
                del self._instances[part]
        if self._originals and not self._family and not self._instances:
            self._restore()

    def _replace(self) -> None:
        for name, value in list(vars(self._module).items()):
            if name == _FUNCTIONS:
                replacement: Any = _AttentionFunctions(self, value)
            elif name.startswith("create_") and name.endswith("_mask") and callable(value):
                replacement = self._mask_function(name, value)
            else:
                continue
            self._originals[name] = value
            setattr(self._module, name, replacement)
        for cls in list(vars(self._module).values()):
            if (
                isinstance(cls, type)
                and issubclass(cls, PreTrainedModel)
                and cls.__module__ == self._module.__name__
            ):
                self._wrap_forward(cls)
                if hasattr(cls, "generate"):
                    self._wrap_generate(cls)

    def _restore(self) -> None:
        for name, value in self._originals.items():
            setattr(self._module, name, value)
        self._originals = {}
        for cls, name, wrapper, original in self._wrapped:
            if cls.__dict__.get(name) is not wrapper:
                continue  # somebody patched the class after us: theirs stays
            if original is None:
                delattr(cls, name)  # it was inherited
            else:
                setattr(cls, name, original)
        self._wrapped = []

    def _wrap(self, cls: type, name: str, wrapper: Callable[..., Any]) -> None:
        self._wrapped.append((cls, name, wrapper, cls.__dict__.get(name)))
        setattr(cls, name, wrapper)

    def _wrap_forward(self, cls: Any) -> None:
        original = cls.forward
        signature = inspect.signature(original)

        @functools.wraps(original)
        @functools.partial(torch.compiler.disable, recursive=False)  # this frame only: the model is compiled
        def forward(model: PreTrainedModel, *args: Any, **kwargs: Any) -> Any:
            started = self._start(model, signature, args, kwargs)
            if started is None:
                return original(model, *args, **kwargs)
            call, forward_pass = started
            with self._running_pass(forward_pass):
                return original(model, *call.args, **call.kwargs)

        self._wrap(cls, "forward", forward)

    @torch.compiler.disable
    def _start(
        self,
        model: PreTrainedModel,
        signature: inspect.Signature,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> tuple[_Call, _ForwardPass | None] | None:
        patch = self.patch_of(model)
        if patch is None:
            return None
        call = _Call(model, signature, args, kwargs)
        return call, _begin_forward_pass(patch, call)

    def _wrap_generate(self, cls: Any) -> None:
        original = cls.generate

        @functools.wraps(original)
        def generate(model: PreTrainedModel, *args: Any, **kwargs: Any) -> Any:
            patch = self.patch_of(model)
            if patch is not None and patch.sp_size > 1:
                raise ValueError(
                    f"{patch.strategy.name} needs whole forward passes over sharded sequences, got "
                    "generate(); generate() needs an unpatched model, so call undo() on the patch first"
                )
            return original(model, *args, **kwargs)

        self._wrap(cls, "generate", generate)

    @contextmanager
    def _running_pass(self, forward_pass: _ForwardPass | None) -> Iterator[None]:
        outer = getattr(self._running, "forward_pass", None)
        self._running.forward_pass = forward_pass
        try:
            yield
        finally:
            self._running.forward_pass = outer

    def _mask_function(self, name: str, stock: Callable[..., Any]) -> Callable[..., Any]:
        signature = inspect.signature(stock)

        @functools.wraps(stock)
        @torch.compiler.disable
        def create_mask(*args: Any, **kwargs: Any) -> Any:
            forward_pass = getattr(self._running, "forward_pass", None)
            if forward_pass is None:
                return stock(*args, **kwargs)
            return forward_pass.layer_mask(name, signature.bind(*args, **kwargs).arguments)

        return create_mask

    def attention(
        self,
        stock: Callable[..., Any],
        layer: nn.Module,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: Any,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """Stand in for an attention function of transformers: ``q`` (B, H, S, D), result (B, S, H, D)."""
        if isinstance(mask, _LayerMask):
            return mask.attention(layer, q, k, v, **kwargs), None
        patch = self.patch_of(layer)
        if patch is not None and patch.sp_size > 1:
            raise RuntimeError(
                f"{patch.strategy.name} needs attention to run within the forward pass of a whole base "
                f"model, got a call of {type(layer).__name__} alone; call the model, or undo the patch"
            )
        return stock(layer, q, k, v, mask, **kwargs)


class _AttentionFunctions(Mapping[str, Callable[..., Any]]):
    """Stands in for a modeling file's ``ALL_ATTENTION_FUNCTIONS``, for any ``attn_implementation``."""

    def __init__(self, dispatcher: _Dispatcher, stock: Any) -> None:
        self.dispatcher = dispatcher
        self._stock = stock

    def get_interface(self, attn_implementation: str, default: Callable[..., Any]) -> Callable[..., Any]:
        return functools.partial(
            self.dispatcher.attention, self._stock.get_interface(attn_implementation, default)
        )

    def __getitem__(self, key: str) -> Callable[..., Any]:
        return functools.partial(self.dispatcher.attention, self._stock[key])

    def __iter__(self) -> Iterator[str]:
        return iter(self._stock)

    def __len__(self) -> int:
        return len(self._stock)


class _Call:
    """One call of a model's forward, its arguments by name and ready to be changed."""

    def __init__(
        self,
        model: PreTrainedModel,
        signature: inspect.Signature,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> None:
        self.model = model
        bound = signature.bind_partial(model, *args, **kwargs)
        self.args: tuple[Any, ...] = ()
        self.kwargs: dict[str, Any] = {}
        for name, value in list(bound.arguments.items())[1:]:
            kind = signature.parameters[name].kind
            if kind is inspect.Parameter.VAR_KEYWORD:
                self.kwargs.update(value)
            elif kind is inspect.Parameter.VAR_POSITIONAL:
                self.args = value
            else:
                self.kwargs[name] = value
        self.takes = frozenset(signature.parameters)

    def get(self, name: str) -> Any:
        return self.kwargs.get(name)


def _begin_forward_pass(patch: SeqParallelPatch, call: _Call) -> _ForwardPass | None:
    """Check a call of a patched model and settle its arguments. None: this call takes the stock path."""
    patch.check_model(call.model)
    cache = next((name for name in _CACHES if call.get(name) is not None), None)
    if patch.sp_size == 1 and (cache or call.get("use_cache")):
        return None  # decoding with a cache on whole sequences: nothing here would be different
    if patch.sp_size > 1:
        _refuse_arguments(patch.strategy.name, call, cache)
    if call.get("output_attentions") or (getattr(call.model.config, "output_attentions", False)):
        raise NotImplementedError(
            f"{patch.strategy.name} needs output_attentions=False, got True; "
            "attention weights are never formed, undo the patch to look at them"
        )
    if "use_cache" in call.takes:
        call.kwargs["use_cache"] = False
    return _ForwardPass(patch)


def _refuse_arguments(who: str, call: _Call, cache: str | None) -> None:
    name = type(call.model).__name__
    if call.get("labels") is not None:
        raise ValueError(
            f"{who} needs a model called without labels=, got labels; {name} would shift them inside the "
            "shard. Shard shifted targets with prepare_seq_parallel_inputs and take the loss from "
            "sequence_parallel_cross_entropy or sequence_parallel_linear_cross_entropy"
        )
    if call.get("use_cache") or cache is not None:
        raise ValueError(
            f"{who} needs use_cache=False and no cache, got {cache or 'use_cache=True'}; "
            "a cache would hold one shard of the keys only, so generate() needs an unpatched model"
        )
    if name.endswith("ForSequenceClassification"):
        raise NotImplementedError(
            f"{who} needs a model that reads every position, got {name}; "
            "it pools the last token of each shard, take the base model and gather instead"
        )
    if "position_ids" in call.takes and call.get("position_ids") is None:
        raise ValueError(
            f"{who} needs position_ids on {name}'s forward, got None; without them every shard would count "
            "from 0. Pass local_position_ids from prepare_seq_parallel_inputs"
        )


class _ForwardPass:
    """One forward pass of a patched model: what all ranks of the sequence group have agreed upon."""

    def __init__(self, patch: SeqParallelPatch) -> None:
        self.patch = patch
        self._agreed: SequenceMask | None = None

    def layer_mask(self, name: str, arguments: dict[str, Any]) -> _LayerMask:
        """Stand in for one of transformers' mask functions, called with ``arguments``."""
        if name not in (_CAUSAL_MASK, _WINDOW_MASK):
            raise NotImplementedError(
                f"{self.patch.strategy.name} needs causal attention, got a model that calls {name}"
            )
        for extra in ("or_mask_function", "and_mask_function", "block_sequence_ids"):
            if arguments.get(extra) is not None:
                raise NotImplementedError(
                    f"{self.patch.strategy.name} needs a plain causal mask, got {name}({extra}=...); "
                    "this model's mask cannot be computed"
                )
        if self._agreed is None:
            embeds = arguments.get("inputs_embeds", arguments.get("input_embeds"))
            self._agreed = _agree_on_sequence(
                self.patch, embeds, arguments.get("position_ids"), arguments.get("attention_mask")
            )
        window = arguments["config"].sliding_window if name == _WINDOW_MASK else None
        return _LayerMask(self.patch, SequenceMask(self._agreed.seq_len, window, self._agreed.documents))


@dataclass(frozen=True)
class _LayerMask:
    """Travels through the model as its ``attention_mask``: by which patch, and over what, a layer attends."""

    patch: SeqParallelPatch
    sequence: SequenceMask

    @torch.compiler.disable
    def attention(
        self,
        layer: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        scaling: float | None = None,
        **kwargs: Any,
    ) -> Tensor:
        """Return (B, S, H, D) for ``query`` (B, H, S, D), ``key`` and ``value`` (B, H_kv, S, D)."""
        patch = self.patch
        _refuse_attention(patch.strategy.name, layer, query, key, kwargs)
        window = kwargs.get("sliding_window")
        if window is not None and window != self.sequence.window:
            raise NotImplementedError(
                f"{patch.strategy.name} needs one sliding window per layer, got {window} from the layer and "
                f"{self.sequence.window} from its mask"
            )
        if torch.is_autocast_enabled(query.device.type):
            dtype = torch.get_autocast_dtype(query.device.type)
            query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
        # (B, H, S, D) -> (B, S, H, D)
        q, k, v = query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)
        heads = HeadShape(num_heads=q.shape[2], num_kv_heads=k.shape[2], head_dim=q.shape[3])
        patch.strategy.validate(heads, patch.mesh if patch.strategy.mesh_axes else None)
        with torch.autocast(query.device.type, enabled=False):
            return patch.strategy.attention(
                q,
                k,
                v,
                softmax_scale=heads.head_dim**-0.5 if scaling is None else scaling,
                mask=self.sequence,
                mesh=patch.mesh if patch.strategy.mesh_axes else None,
                kernel=patch.kernel_for(q),
            )


def _refuse_attention(
    who: str, layer: nn.Module, query: Tensor, key: Tensor, keywords: dict[str, Any]
) -> None:
    if keywords.get("dropout"):
        raise NotImplementedError(
            f"{who} needs attention dropout 0 in training, got {keywords['dropout']}; "
            "set config.attention_dropout = 0 or call model.eval()"
        )
    is_causal = keywords.get("is_causal")
    if not (getattr(layer, "is_causal", True) if is_causal is None else is_causal):
        raise NotImplementedError(
            f"{who} needs causal attention, got is_causal=False in {type(layer).__name__}"
        )
    if query.shape[2] != key.shape[2]:
        raise NotImplementedError(
            f"{who} needs self-attention over one sequence, got {query.shape[2]} queries and {key.shape[2]} "
            f"keys in {type(layer).__name__}; cross attention and caches cannot be computed"
        )
    known = _HARMLESS_KEYWORDS | {"dropout", "is_causal", "sliding_window"}
    unknown = sorted(name for name, value in keywords.items() if name not in known and value is not None)
    if unknown:
        raise NotImplementedError(
            f"{who} needs plain softmax attention, got {', '.join(unknown)} from {type(layer).__name__}; "
            "undo the patch for this model"
        )


def _agree_on_sequence(
    patch: SeqParallelPatch, embeds: Tensor, position_ids: Tensor | None, attention_mask: Any
) -> SequenceMask:
    """Compare shapes and checks over the sequence group, and learn the global order of positions.

    Every rank takes part whatever it found, so that a fault seen by one rank is an error on all of them.
    """
    mesh, who, num_ranks = patch.mesh if patch.sp_size > 1 else None, patch.strategy.name, patch.sp_size
    batch_size, local_len = embeds.shape[:2]
    problem = _problem_of_mask(attention_mask) or _problem_of_positions(position_ids, batch_size, local_len)
    if mesh is None:
        if problem:
            raise ValueError(f"{who} needs {problem}")
        return SequenceMask(local_len, documents=_documents(position_ids, batch_size, local_len))
    header = torch.tensor([batch_size, local_len, int(problem is not None)], device=embeds.device)
    headers = torch.stack(all_gather_tensors(header, mesh.sp_group)).tolist()
    faulty = [rank for rank, (_, _, failed) in enumerate(headers) if failed]
    if faulty:
        reason = (
            problem
            or f"inputs that all ranks accept, got refused ones on sequence rank {faulty}; see their error"
        )
        raise ValueError(f"{who} needs {reason}")
    if any(row[:2] != headers[0][:2] for row in headers):
        raise ValueError(
            f"{who} needs equal shards on all ranks, got (batch, length) "
            f"{[tuple(row[:2]) for row in headers]}; shard one batch with prepare_seq_parallel_inputs and "
            "pad it to a multiple"
        )
    seq_len = local_len * num_ranks
    held = [
        patch.strategy.layout(seq_len, num_ranks=num_ranks, rank=rank, ring_size=mesh.ring_size)
        for rank in range(num_ranks)
    ]
    assert position_ids is not None
    shards = all_gather_tensors(
        position_ids.expand(batch_size, -1).to(embeds.device, torch.int64), mesh.sp_group
    )
    ordered = torch.cat(shards, dim=1)[:, inverse_order(torch.cat(held)).to(embeds.device)]
    _refuse_misplaced_shards(who, ordered)
    return SequenceMask(seq_len, documents=_documents(ordered, batch_size, seq_len))


def _documents(position_ids: Tensor | None, batch_size: int, seq_len: int) -> Tensor | None:
    """Document starts on the CPU, where block masks are classified without waiting for the device."""
    if position_ids is None:
        return None
    starts = document_starts(position_ids.expand(batch_size, seq_len))
    return None if starts is None else starts.cpu()


def _problem_of_mask(attention_mask: Any) -> str | None:
    if attention_mask is None:
        return None
    if not isinstance(attention_mask, Tensor) or attention_mask.dim() != 2:
        shape = (
            tuple(attention_mask.shape)
            if isinstance(attention_mask, Tensor)
            else type(attention_mask).__name__
        )
        return (
            f"no attention_mask or a 2-D one of ones, got {shape}; causality is implied, leave the mask out"
        )
    if not bool(attention_mask.all()):
        zeros = attention_mask.numel() - int(attention_mask.count_nonzero())
        return (
            f"an attention_mask of ones only, got {zeros} zeros; pad on the right and set the targets there "
            "to -100 (see pad_to_multiple), or restart position_ids where a new document begins"
        )
    return None


def _problem_of_positions(position_ids: Tensor | None, batch_size: int, local_len: int) -> str | None:
    if position_ids is None or position_ids.shape in ((1, local_len), (batch_size, local_len)):
        return None
    return f"position_ids of shape ({batch_size}, {local_len}), got {tuple(position_ids.shape)}"


def _refuse_misplaced_shards(who: str, ordered: Tensor) -> None:
    """A whole run of positions in a wrong order is not packing but a shard made for another layout."""
    row = ordered[0]
    if bool((row.diff() == 1).all()):
        return
    if torch.equal(row.sort().values, torch.arange(len(row), device=row.device) + row.min()):
        raise ValueError(
            f"{who} needs shards in its own layout, got positions 0..{len(row) - 1} in another order; "
            f"shard with prepare_seq_parallel_inputs({who!r}, ...) and the degrees of the patch's mesh"
        )


def _modeling_module(family: str) -> ModuleType:
    name = f"transformers.models.{family}.modeling_{family}"
    if not family.isidentifier() or not _module_exists(name):
        raise ValueError(
            f"apply_seq_parallel_monkey_patch needs a model family of transformers, got {family!r}; "
            'pass the name of its folder in transformers.models, for example "llama", "mistral" or "qwen3"'
        )
    module = import_module(name)
    if not _uses_the_interface(module):
        raise NotImplementedError(
            "apply_seq_parallel_monkey_patch needs a family with transformers' causal attention interface, "
            f"got {family!r}; its modeling file does not use {_FUNCTIONS} and {_CAUSAL_MASK}"
        )
    return module


def _module_exists(name: str) -> bool:
    try:
        return find_spec(name) is not None
    except ModuleNotFoundError:  # a parent package is missing
        return False


def _uses_the_interface(module: ModuleType) -> bool:
    return hasattr(module, _FUNCTIONS) and hasattr(module, _CAUSAL_MASK)


def _modeling_modules_of(model: nn.Module) -> list[ModuleType]:
    """The modeling files that define a model's parts and call attention through the interface."""
    # Along the MRO, because engines swap a module's class for a subclass of their own.
    names = {cls.__module__ for part in model.modules() for cls in type(part).__mro__}
    modules = [sys.modules[name] for name in sorted(names) if name in sys.modules]
    modules = [module for module in modules if _uses_the_interface(module)]
    if not modules:
        raise NotImplementedError(
            "apply_seq_parallel_monkey_patch needs a model with transformers' causal attention interface, "
            f"got {type(model).__name__}; none of its modeling files uses {_FUNCTIONS} and {_CAUSAL_MASK}"
        )
    return modules


def _refuse_mixing_layers(model: nn.Module) -> None:
    """Refuse models in which anything but attention moves information between tokens."""
    name = type(model).__name__
    for part in model.modules():
        config = getattr(part, "config", None)
        for attribute in ("layer_types", "layers_block_type", "block_types"):
            types = set(getattr(config, attribute, None) or ())
            if types - _LAYER_TYPES:
                raise NotImplementedError(
                    f"sequence parallelism needs layers of {sorted(_LAYER_TYPES)}, got "
                    f"{sorted(types - _LAYER_TYPES)} in {name}; such layers mix tokens in ways that a shard "
                    "cannot see"
                )
        if isinstance(part, nn.Conv1d):
            raise NotImplementedError(
                f"sequence parallelism needs attention alone to mix tokens, got a Conv1d in {name}; "
                "a convolution would not see beyond its shard"
            )


def _refuse_length_dependent_rope(model: nn.Module) -> None:
    config = getattr(model, "config", None)
    parameters = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    for entry in (parameters, *(value for value in parameters.values() if isinstance(value, dict))):
        if entry.get("rope_type") in ("dynamic", "longrope"):
            raise NotImplementedError(
                f"sequence parallelism needs a RoPE that does not depend on the length, got rope_type "
                f"{entry['rope_type']!r}; each shard would choose frequencies for its own length. Use "
                "linear, yarn or llama3"
            )
