"""The flash-attn adapters against stand-ins that have the signatures of the published packages."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from types import ModuleType

import pytest
import torch
from data.parse_flash_attn_signatures import parse_signatures
from fake_flash_attn import (
    SIGNATURES,
    install_broken_flash_attn,
    install_flash_attn_2,
    install_flash_attn_3,
    install_flash_attn_4,
    published_signature,
    stand_in,
    uninstall_flash_attn,
)
from plain_attention import plain_attention
from torch import Tensor

from easy_context.kernels.base import Kernel
from easy_context.kernels.flash_attn_2 import FlashAttn2Kernel
from easy_context.kernels.flash_attn_3 import FlashAttn3Kernel
from easy_context.kernels.flash_attn_4 import FlashAttn4Kernel
from easy_context.kernels.packages import KernelNotInstalled, PackageFunction
from easy_context.kernels.reference import ReferenceKernel
from easy_context.masks import CAUSAL, FULL

SCALE = 0.2
RELEASES = {
    "flash-attn 2.5.9.post1": FlashAttn2Kernel,
    "flash-attn 2.6.3": FlashAttn2Kernel,
    "flash-attn 2.7.4.post1": FlashAttn2Kernel,
    "flash-attn 2.8.3": FlashAttn2Kernel,
    "flash-attn 2.7.4.post1 hopper": FlashAttn3Kernel,
    "flash-attn 2.8.3 hopper": FlashAttn3Kernel,
    "flash-attention 01afd16 hopper": FlashAttn3Kernel,
    "flash-attn-4 4.0.0b36": FlashAttn4Kernel,
}
ABSENT = {
    FlashAttn2Kernel: ("flash_attn", "pip install"),
    FlashAttn3Kernel: ("flash_attn_interface", "pip install ./hopper"),
    FlashAttn4Kernel: ("flash-attn-4", "pip install --pre flash-attn-4"),
}


@pytest.fixture(autouse=True)
def nothing_installed(monkeypatch):
    uninstall_flash_attn(monkeypatch)


@pytest.fixture
def install(monkeypatch, tmp_path) -> Callable[[str], ModuleType]:
    """Make the stand-in of a release importable; gives the module that has its functions."""

    def install(label: str) -> ModuleType:
        if label.endswith("hopper"):
            return install_flash_attn_3(monkeypatch, label)
        if label.endswith("cute") or label.startswith("flash-attn-4"):
            return install_flash_attn_4(monkeypatch, tmp_path, label)
        return install_flash_attn_2(monkeypatch, label.split()[1])

    return install


def inputs(num_queries: int, num_keys: int, *, dtype=torch.bfloat16, head_dim: int = 16) -> list[Tensor]:
    """Random ``dout``, ``q``, ``k``, ``v`` with 4 query and 2 key/value heads."""
    queries, keys = (3, num_queries, 4, head_dim), (3, num_keys, 2, head_dim)
    return [torch.randn(shape).to(dtype) for shape in (queries, queries, keys, keys)]


def assert_equals_reference(kernel: Kernel, mask, dout: Tensor, q: Tensor, k: Tensor, v: Tensor) -> None:
    reference = ReferenceKernel()
    part = kernel.forward(q, k, v, softmax_scale=SCALE, mask=mask)
    expected = reference.forward(q, k, v, softmax_scale=SCALE, mask=mask)
    assert part.out.dtype == q.dtype and part.out.shape == q.shape
    assert part.lse.dtype == torch.float32 and part.lse.is_contiguous()
    torch.testing.assert_close(part.out, expected.out, rtol=2e-2, atol=1e-2)
    torch.testing.assert_close(part.lse, expected.lse, rtol=1e-5, atol=1e-5)
    grads = kernel.backward(dout, q, k, v, *expected, softmax_scale=SCALE, mask=mask)
    wanted = reference.backward(dout, q, k, v, *expected, softmax_scale=SCALE, mask=mask)
    for grad, want, tensor in zip(grads, wanted, (q, k, v), strict=True):
        assert grad.dtype == tensor.dtype
        torch.testing.assert_close(grad, want, rtol=2e-2, atol=1e-2)


@pytest.mark.parametrize("label", RELEASES)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_every_release_gives_the_references_numbers(install, label, dtype):
    install(label)
    kernel = RELEASES[label]()
    assert_equals_reference(kernel, CAUSAL, *inputs(9, 9, dtype=dtype))
    assert_equals_reference(kernel, FULL, *inputs(4, 9, dtype=dtype))
    assert_equals_reference(kernel, FULL, *inputs(9, 4, dtype=dtype))


@pytest.mark.parametrize("label", RELEASES)
@pytest.mark.parametrize("head_dim", [12, 80])
def test_a_head_dim_between_two_steps_is_padded_and_cut_again(install, label, head_dim):
    install(label)
    assert_equals_reference(RELEASES[label](), CAUSAL, *inputs(9, 9, head_dim=head_dim))


@pytest.mark.parametrize("label", RELEASES)
def test_inputs_need_not_be_contiguous(install, label):
    install(label)
    kernel = RELEASES[label]()
    dout, *qkv = inputs(9, 9)
    assert_equals_reference(kernel, CAUSAL, dout, *(t.mT.contiguous().mT for t in qkv))
    assert_equals_reference(kernel, CAUSAL, torch.ones(1, 1, 1, 1).bfloat16().expand_as(dout), *qkv)


@pytest.mark.parametrize("label", RELEASES)
def test_a_blocks_share_comes_from_slices_of_out_and_lse_over_all_keys(install, label):
    install(label)
    dout, q, k, v = inputs(12, 20)
    out, lse = plain_attention(q.float(), k.float(), v.float(), softmax_scale=SCALE)
    rows, keys = slice(6, 12), slice(3, 15)
    block = (dout[:, rows], q[:, rows], k[:, keys], v[:, keys], out[:, rows].bfloat16(), lse[:, :, rows])
    grads = RELEASES[label]().backward(*block, softmax_scale=SCALE, mask=FULL)
    wanted = ReferenceKernel().backward(*block, softmax_scale=SCALE, mask=FULL)
    for grad, want in zip(grads, wanted, strict=True):
        torch.testing.assert_close(grad, want, rtol=2e-2, atol=1e-2)


@pytest.mark.parametrize("label", RELEASES)
def test_full_precision_is_refused_by_the_package_not_silently_lowered(install, label):
    install(label)
    _, q, k, v = inputs(9, 9, dtype=torch.float32)
    with pytest.raises(RuntimeError, match="only support fp16 and bf16"):
        RELEASES[label]().forward(q, k, v, softmax_scale=SCALE, mask=CAUSAL)


@pytest.mark.parametrize("label", RELEASES)
def test_a_deterministic_backward_is_asked_for_when_torch_asks_for_it(install, label, monkeypatch):
    module, asked = install(label), []
    name = next(name for name in SIGNATURES[label] if name.endswith(("backward", "bwd")))
    original = getattr(module, name)

    def watch(*args, **kwargs):
        asked.append(kwargs["deterministic"])
        return original(*args, **kwargs)

    watch.__signature__ = original.__signature__
    monkeypatch.setattr(module, name, watch)
    kernel = RELEASES[label]()
    dout, q, k, v = inputs(9, 9)
    for deterministic in (False, True):
        torch.use_deterministic_algorithms(deterministic)
        part = kernel.forward(q, k, v, softmax_scale=SCALE, mask=CAUSAL)
        kernel.backward(dout, q, k, v, *part, softmax_scale=SCALE, mask=CAUSAL)
    assert asked == [False, True]


@pytest.mark.parametrize("label", SIGNATURES)
def test_stand_ins_have_the_published_signatures(label):
    for function, published in SIGNATURES[label].items():
        parameters = inspect.signature(stand_in(label, function)).parameters
        assert list(parameters) == [name for name, _ in published["parameters"]]
        required = [name for name, parameter in parameters.items() if parameter.default is parameter.empty]
        assert required == [name for name, default in published["parameters"] if default is None]
    assert published_signature("flash-attn 2.8.3", "_flash_attn_forward").parameters["softcap"]


def test_signatures_are_parsed_from_source_without_running_it():
    source = (
        "import nothing_of_that_name\n"
        "@wrapper('x')\n"
        "def _flash_attn_forward(q: Tensor, scale, window=(-1, -1), rng=None) -> Tensor:\n"
        "    if early:\n        return None\n"
        "    return out, lse, *rest\n"
        "def _flash_attn_bwd(dout):\n    return (dq, dk) if x else (dq, dk, dx)\n"
        "def other(): return 1\n"
    )
    assert parse_signatures(source) == {
        "_flash_attn_forward": {
            "parameters": [["q", None], ["scale", None], ["window", "(-1, -1)"], ["rng", "None"]],
            "returns": ["out", "lse", "*rest"],
        },
        "_flash_attn_bwd": {"parameters": [["dout", None]], "returns": ["dq", "dk"]},
    }


class TestRefusals:
    """Packages that are absent, broken or of another version."""

    @pytest.mark.parametrize("kernel_class", ABSENT)
    def test_an_absent_package_is_named_with_the_way_to_install_it(self, kernel_class):
        package, remedy = ABSENT[kernel_class]
        with pytest.raises(KernelNotInstalled, match="is not installed") as caught:
            kernel_class()
        assert kernel_class.name in str(caught.value)
        assert package in str(caught.value) and remedy in str(caught.value)

    def test_an_absent_package_quotes_the_original_failure(self):
        with pytest.raises(KernelNotInstalled, match="None in sys.modules"):
            FlashAttn3Kernel()

    def test_flash_attn_4_alone_is_not_taken_for_flash_attn_2(self, install):
        install("flash-attn-4 4.0.0b36")
        FlashAttn4Kernel()
        with pytest.raises(KernelNotInstalled, match="flash_attn.flash_attn_interface"):
            FlashAttn2Kernel()

    def test_the_early_copy_inside_flash_attn_2_is_not_taken_for_flash_attn_4(self, install, monkeypatch):
        install("flash-attn 2.8.3")
        monkeypatch.setitem(sys.modules, "flash_attn.cute", ModuleType("flash_attn.cute"))
        with pytest.raises(KernelNotInstalled, match="flash-attn-4"):
            FlashAttn4Kernel()

    @pytest.mark.parametrize(
        ("source", "error"),
        [
            ("raise ImportError('undefined symbol: x')", "ImportError: undefined symbol: x"),
            ("import flash_attn_2_cuda", "ModuleNotFoundError: No module named 'flash_attn_2_cuda'"),
        ],
    )
    def test_a_broken_package_is_an_error_that_quotes_the_import_failure(
        self, tmp_path, monkeypatch, source, error
    ):
        install_broken_flash_attn(monkeypatch, tmp_path, source)
        with pytest.raises(ImportError, match=error) as caught:
            FlashAttn2Kernel()
        assert not isinstance(caught.value, KernelNotInstalled)
        assert "flash_attn_2" in str(caught.value) and "installed but broken" in str(caught.value)

    @pytest.mark.parametrize(
        ("label", "kernel_class", "names"),
        [
            ("flash-attn 2.6.3 hopper", FlashAttn3Kernel, "flash-attn 3 .*num_splits"),
            ("flash-attn 2.8.3 cute", FlashAttn4Kernel, "4.0.0b36.*return_lse"),
        ],
    )
    def test_releases_with_another_contract_are_refused(self, install, label, kernel_class, names):
        install(label)
        with pytest.raises(ImportError, match=names):
            kernel_class()

    def test_an_unknown_signature_is_an_error_that_names_the_version(self, install, monkeypatch):
        module = install("flash-attn 2.8.3")
        sys.modules["flash_attn"].__version__ = "2.99"
        required = stand_in("flash-attn 2.8.3", "_flash_attn_forward")
        required.__signature__ = inspect.Signature(
            [
                *required.__signature__.parameters.values(),
                inspect.Parameter("novelty", inspect.Parameter.KEYWORD_ONLY),
            ]
        )
        monkeypatch.setattr(module, "_flash_attn_forward", required)
        with pytest.raises(ImportError, match=r"flash-attn 2\.5 to 2\.8, got version 2\.99.*adds novelty"):
            FlashAttn2Kernel()
        monkeypatch.delattr(module, "_flash_attn_forward")
        with pytest.raises(ImportError, match=r"version 2\.99.*has no _flash_attn_forward"):
            FlashAttn2Kernel()


class TestPackageFunction:
    """Calling a private function by keyword with what its signature has."""

    def test_it_reads_the_names_of_a_torch_operator_from_its_schema(self):
        """flash-attn since 2.7 wraps its functions so, which hides their signature from ``inspect``."""

        def double(x: Tensor, window_size_left: int, softcap: float = 0.0) -> Tensor:
            return x * 2 + window_size_left

        module = ModuleType("package")
        module.double = torch.library.custom_op("easy_context_tests::double", double, mutates_args=())
        assert "x" not in inspect.signature(module.double).parameters
        call = PackageFunction(
            module,
            "double",
            offered=("x", "window_size_left"),
            needed=("x", ("window_size", "window_size_left")),
            who="",
        )
        assert call.has("window_size_left") and not call.has("window_size")
        assert torch.equal(call(x=torch.ones(2), window_size_left=-1, window_size=(-1, -1)), torch.ones(2))

    def test_it_refuses_a_function_that_lacks_all_of_the_alternatives(self):
        module = ModuleType("package")
        module.attend = lambda q: q
        with pytest.raises(
            ImportError, match="me, whose attend.q. lacks causal or is_causal and adds nothing"
        ):
            PackageFunction(module, "attend", offered=("q",), needed=("q", ("causal", "is_causal")), who="me")
