"""Which kernel is chosen, what is said about it, and what is refused."""

from __future__ import annotations

import logging
import subprocess
import sys

import pytest
import torch
from fake_flash_attn import (
    install_broken_flash_attn,
    install_flash_attn_2,
    install_flash_attn_3,
    install_flash_attn_4,
    uninstall_flash_attn,
)

from easy_context.kernels import _choose, available_kernels, require_kernel, select_kernel
from easy_context.kernels.reference import ReferenceKernel
from easy_context.masks import CAUSAL, block_mask, first_visible_index

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)


@pytest.fixture(autouse=True)
def nothing_chosen_and_nothing_installed(monkeypatch):
    uninstall_flash_attn(monkeypatch)
    _choose.cache_clear()
    yield
    _choose.cache_clear()


@pytest.fixture
def gpu(monkeypatch):
    """Pretend that there is a GPU of some compute capability; the kernels are chosen, not run."""

    def pretend(major: int, minor: int = 0) -> None:
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (major, minor))
        monkeypatch.setattr(torch.backends.cuda, "is_flash_attention_available", lambda: True)
        monkeypatch.setattr(torch.backends.cudnn, "is_available", lambda: True)

    return pretend


@pytest.fixture
def install(monkeypatch, tmp_path):
    """Make generations of flash-attn importable."""

    def install(*generations: int) -> None:
        if 2 in generations:
            install_flash_attn_2(monkeypatch, "2.8.3")
        if 3 in generations:
            install_flash_attn_3(monkeypatch, "flash-attn 2.8.3 hopper")
        if 4 in generations:
            install_flash_attn_4(monkeypatch, tmp_path, "flash-attn-4 4.0.0b36")

    return install


def chosen(device: torch.device, *, name: str = "auto", dtype=torch.bfloat16, head_dim: int = 128) -> str:
    return select_kernel(name, device=device, dtype=dtype, head_dim=head_dim).name


class TestAuto:
    """What "auto" takes."""

    @pytest.mark.parametrize("capability", [9, 10, 12])
    def test_on_hopper_and_newer_the_order_is_flash_attn_4_3_cudnn_2_torch(
        self, gpu, install, capability, monkeypatch
    ):
        gpu(capability)
        install(2, 3, 4)
        assert chosen(GPU) == "flash_attn_4"
        monkeypatch.setitem(sys.modules, "flash_attn.cute.interface", None)
        _choose.cache_clear()
        assert chosen(GPU) == ("flash_attn_3" if capability == 9 else "cudnn")
        monkeypatch.setitem(sys.modules, "flash_attn_interface", None)
        _choose.cache_clear()
        assert chosen(GPU) == "cudnn"
        monkeypatch.setattr(torch.backends.cudnn, "is_available", lambda: False)
        _choose.cache_clear()
        assert chosen(GPU) == "flash_attn_2"
        monkeypatch.setitem(sys.modules, "flash_attn.flash_attn_interface", None)
        _choose.cache_clear()
        assert chosen(GPU) == "torch_flash"

    @pytest.mark.parametrize("minor", [0, 6, 9])
    def test_on_ampere_and_ada_the_order_is_flash_attn_2_torch(self, gpu, install, minor, monkeypatch):
        gpu(8, minor)
        install(2, 3, 4)
        assert chosen(GPU) == "flash_attn_2"
        monkeypatch.setitem(sys.modules, "flash_attn.flash_attn_interface", None)
        _choose.cache_clear()
        assert chosen(GPU) == "torch_flash"

    @pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
    def test_on_the_cpu_it_is_cpu_flash(self, dtype):
        assert chosen(CPU, dtype=dtype, head_dim=80) == "cpu_flash"

    @pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
    def test_full_precision_on_a_gpu_is_left_to_the_reference(self, gpu, install, dtype):
        gpu(9)
        install(2, 3, 4)
        assert chosen(GPU, dtype=dtype) == "reference"

    def test_an_old_gpu_or_another_device_is_left_to_the_reference(self, gpu):
        gpu(7, 5)
        assert chosen(GPU) == "reference"
        assert chosen(torch.device("meta")) == "reference"

    def test_a_head_dim_too_large_for_all_is_left_to_the_reference(self, gpu, install):
        gpu(9)
        install(2, 3, 4)
        assert chosen(GPU, head_dim=512) == "reference"

    def test_rocm_numbers_its_devices_differently_and_is_not_taken_for_hopper(self, gpu, monkeypatch):
        gpu(9, 4)
        monkeypatch.setattr(torch.version, "hip", "6.4")
        assert chosen(GPU) == "torch_flash"

    def test_cudnn_is_skipped_when_determinism_is_asked_for(self, gpu, caplog):
        gpu(9)
        assert chosen(GPU) == "cudnn"
        torch.use_deterministic_algorithms(True)
        with caplog.at_level(logging.INFO, logger="easy_context"):
            assert chosen(GPU) == "torch_flash"
        assert "not cudnn: needs torch.use_deterministic_algorithms(False)" in caplog.text

    def test_nothing_serves_integers(self):
        with pytest.raises(ValueError, match="needs a floating dtype, got torch.int64"):
            chosen(CPU, dtype=torch.int64)


class TestLog:
    """One line for each distinct choice."""

    def test_the_choice_is_logged_once_with_why_each_better_kernel_was_not_taken(self, gpu, install, caplog):
        gpu(9)
        install(2)
        with caplog.at_level(logging.INFO, logger="easy_context"):
            for _ in range(3):
                chosen(GPU, head_dim=256)
        (line,) = caplog.messages
        assert line == (
            "attention kernel: flash_attn_2 for cuda:0, torch.bfloat16, head_dim 256 "
            "(not flash_attn_4: not installed; not flash_attn_3: not installed; "
            "not cudnn: needs head_dim up to 128, got 256)"
        )

    def test_another_dtype_is_another_choice(self, caplog):
        with caplog.at_level(logging.INFO, logger="easy_context"):
            chosen(CPU, dtype=torch.float32)
            chosen(CPU, dtype=torch.float64)
        assert len(caplog.messages) == 2

    def test_the_reasons_say_what_is_not_supported(self, gpu, install, caplog):
        gpu(9)
        install(2, 3, 4)
        with caplog.at_level(logging.INFO, logger="easy_context"):
            chosen(GPU, dtype=torch.float32)
        for name in ("flash_attn_4", "flash_attn_3", "cudnn", "flash_attn_2", "torch_flash"):
            assert f"not {name}: needs torch.float16 or torch.bfloat16, got torch.float32" in caplog.text


class TestMasks:
    """Every chosen kernel serves every mask."""

    INDEX = torch.arange(9)
    WINDOW = block_mask(INDEX, INDEX, first_visible_index(INDEX, window=3, documents=None))

    @pytest.mark.parametrize("name", ["cudnn", "torch_flash", "flash_attn_2", "flash_attn_3", "flash_attn_4"])
    def test_windows_are_computed_by_the_reference_and_that_is_logged_once(self, gpu, install, caplog, name):
        gpu(9)
        install(2, 3, 4)
        kernel = select_kernel(name, device=GPU, dtype=torch.bfloat16, head_dim=16)
        self.assert_serves_windows(kernel, caplog)

    def test_also_on_the_cpu(self, caplog):
        self.assert_serves_windows(select_kernel(device=CPU, dtype=torch.bfloat16, head_dim=16), caplog)

    def assert_serves_windows(self, kernel, caplog):
        assert kernel.mask_kinds >= {"full", "causal", "interval"}
        assert self.WINDOW.kind == "interval"
        dout, q, k, v = (torch.randn(2, 9, 4, 16).bfloat16() for _ in range(4))
        with caplog.at_level(logging.INFO, logger="easy_context"):
            for _ in range(2):
                part = kernel.forward(q, k, v, softmax_scale=0.3, mask=self.WINDOW)
                grads = kernel.backward(dout, q, k, v, *part, softmax_scale=0.3, mask=self.WINDOW)
        (line,) = [line for line in caplog.messages if "masks" in line]
        assert line == f"attention kernel: reference for masks that {kernel.name} does not compute (interval)"
        wanted = ReferenceKernel().forward(q, k, v, softmax_scale=0.3, mask=self.WINDOW)
        assert torch.equal(part.out, wanted.out) and torch.equal(part.lse, wanted.lse)
        wanted = ReferenceKernel().backward(dout, q, k, v, *part, softmax_scale=0.3, mask=self.WINDOW)
        assert all(torch.equal(grad, want) for grad, want in zip(grads, wanted, strict=True))

    @pytest.mark.parametrize("name", [None, "reference"])
    def test_a_query_that_sees_no_key_is_exact_whatever_the_kernel(self, name):
        kernel = select_kernel(name or "auto", device=CPU, dtype=torch.float32, head_dim=8)
        mask = block_mask(torch.tensor([0, 5]), torch.tensor([2, 3, 4]), None)
        dout, q = (torch.randn(1, 2, 2, 8) for _ in range(2))
        k, v = (torch.randn(1, 3, 2, 8) for _ in range(2))
        part = kernel.forward(q, k, v, softmax_scale=1.0, mask=mask)
        assert part.out[:, 0].eq(0).all() and part.lse[:, :, 0].eq(-torch.inf).all()
        assert part.lse[:, :, 1].isfinite().all()
        grads = kernel.backward(dout, q, k, v, *part, softmax_scale=1.0, mask=mask)
        assert grads.dq[:, 0].eq(0).all() and all(grad.isfinite().all() for grad in grads)

    def test_the_chosen_kernel_itself_computes_what_it_can(self, install, gpu, monkeypatch):
        gpu(9)
        install(2)
        kernel = select_kernel("flash_attn_2", device=GPU, dtype=torch.bfloat16, head_dim=16)
        monkeypatch.setattr(
            ReferenceKernel, "forward", lambda *args, **kwargs: pytest.fail("reference was asked")
        )
        q, k, v = (torch.randn(2, 9, 4, 16).bfloat16() for _ in range(3))
        assert kernel.forward(q, k, v, softmax_scale=0.3, mask=CAUSAL).out.shape == q.shape


class TestRefusals:
    """Text of the errors."""

    @pytest.mark.parametrize("ask", [require_kernel, lambda name: chosen(CPU, name=name)])
    def test_an_unknown_name_lists_the_names(self, ask):
        with pytest.raises(ValueError, match="got 'flash'; choose one of: auto, flash_attn_4, ") as caught:
            ask("flash")
        assert all(name in str(caught.value) for name in available_kernels())

    def test_the_names_are_these(self):
        names = "flash_attn_4 flash_attn_3 cudnn flash_attn_2 torch_flash reference cpu_flash"
        assert available_kernels() == tuple(names.split())

    @pytest.mark.parametrize("ask", [require_kernel, lambda name: chosen(CPU, name=name)])
    @pytest.mark.parametrize("name", ["flash_attn_2", "flash_attn_3", "flash_attn_4"])
    def test_a_named_kernel_that_is_absent_is_an_import_error_with_the_pip_line(self, ask, name):
        with pytest.raises(
            ImportError, match=rf"^{name} needs .* which is not installed \(.+\); .*pip install"
        ):
            ask(name)

    @pytest.mark.parametrize("name", ["auto", "flash_attn_2"])
    def test_an_installed_but_broken_kernel_is_an_error_never_a_silent_fall_back(
        self, gpu, name, tmp_path, monkeypatch
    ):
        gpu(8)
        install_broken_flash_attn(monkeypatch, tmp_path, "raise ImportError('undefined symbol: _ZN2at4_ops')")
        with pytest.raises(
            ImportError, match="flash_attn_2 needs .* installed but broken .*undefined symbol: _ZN2at4"
        ):
            chosen(GPU, name=name)

    def test_a_missing_dependency_of_an_installed_kernel_is_broken_too(self, gpu, tmp_path, monkeypatch):
        gpu(8)
        install_broken_flash_attn(monkeypatch, tmp_path, "import flash_attn_2_cuda")
        with pytest.raises(ImportError, match="installed but broken .*No module named 'flash_attn_2_cuda'"):
            chosen(GPU)

    def test_a_broken_kernel_does_not_matter_where_it_would_not_be_used(self, tmp_path, monkeypatch):
        install_broken_flash_attn(monkeypatch, tmp_path, "raise ImportError('undefined symbol')")
        assert chosen(CPU) == "cpu_flash"

    @pytest.mark.parametrize(
        ("name", "asked", "text"),
        [
            ("flash_attn_2", {"device": CPU}, "flash_attn_2 needs a CUDA GPU, got device cpu"),
            (
                "cudnn",
                {"dtype": torch.float32},
                "cudnn needs torch.float16 or torch.bfloat16, got torch.float32",
            ),
            ("flash_attn_4", {"head_dim": 264}, "flash_attn_4 needs head_dim up to 256, got 264"),
            ("torch_flash", {"head_dim": 264}, "torch_flash needs head_dim up to 256, got 264"),
            ("cpu_flash", {}, "cpu_flash needs the CPU, got device cuda:0"),
            (
                "cpu_flash",
                {"device": CPU, "dtype": torch.int64},
                "cpu_flash needs float32, .* got torch.int64",
            ),
        ],
    )
    def test_a_named_kernel_that_cannot_serve_says_what_it_needs(self, gpu, install, name, asked, text):
        gpu(9)
        install(2, 3, 4)
        with pytest.raises(ValueError, match=rf"^{text}; choose another kernel"):
            chosen(asked.pop("device", GPU), name=name, **asked)

    @pytest.mark.parametrize(
        ("name", "capability", "text"),
        [
            ("flash_attn_3", (10, 0), r"compute capability 9\.x, got 10\.0"),
            ("flash_attn_4", (8, 6), r"compute capability 9\.0 to 12\.x, got 8\.6"),
            ("flash_attn_2", (7, 5), r"compute capability 8\.0 to 12\.x, got 7\.5"),
        ],
    )
    def test_a_gpu_of_another_generation_is_named(self, gpu, install, name, capability, text):
        gpu(*capability)
        install(2, 3, 4)
        with pytest.raises(ValueError, match=text):
            chosen(GPU, name=name)

    def test_flash_attn_4_takes_large_heads_on_hopper_only(self, gpu, install):
        install(4)
        gpu(9)
        assert chosen(GPU, name="flash_attn_4", head_dim=256) == "flash_attn_4"
        gpu(10)
        _choose.cache_clear()
        with pytest.raises(ValueError, match="needs head_dim up to 128 on this GPU, got 256"):
            chosen(GPU, name="flash_attn_4", head_dim=256)

    def test_require_kernel_accepts_what_is_there(self, install):
        install(2, 3, 4)
        for name in ("auto", *available_kernels()):
            require_kernel(name)


def test_importing_the_kernels_imports_no_package_of_theirs():
    """Each is imported when it is asked for: the library works, and shows its help, without any of them."""
    code = (
        "import sys\n"
        "for name in ('flash_attn', 'flash_attn_interface', 'cutlass', 'triton_kernels'):\n"
        "    sys.modules[name] = None\n"
        "import easy_context.kernels, torch\n"
        "assert not torch.cuda.is_initialized()\n"
        "cpu = torch.device('cpu')\n"
        "kernel = easy_context.kernels.select_kernel(device=cpu, dtype=torch.float32, head_dim=8)\n"
        "assert kernel.name == 'cpu_flash'\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
