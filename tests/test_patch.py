"""Patches come and go without a trace, serve what they name and nothing else, and refuse the rest."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers.models.llama.modeling_llama as modeling_llama
import transformers.models.mistral.modeling_mistral as modeling_mistral
from ranks import run_ranks
from spies import spy_on_traffic
from tiny_models import (
    SEQ_LEN,
    explicit_mask,
    gradients,
    ordinary_loss,
    relative_error,
    tiny_batch,
    tiny_model,
)
from torch import Tensor
from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig, Qwen3NextConfig

from easy_context import (
    apply_seq_parallel_monkey_patch,
    apply_zigzag_ring_attn_monkey_patch_llama,
    apply_zigzag_ring_attn_monkey_patch_mistral,
    available_strategies,
    init_sequence_parallel_mesh,
    prepare_seq_parallel_inputs,
    sequence_parallel_cross_entropy,
)

STRATEGIES = available_strategies()


def stock_state() -> dict[str, Any]:
    state = {}
    for module in (modeling_llama, modeling_mistral):
        state |= {(module.__name__, name): value for name, value in vars(module).items()}
        for name, value in vars(module).items():
            if isinstance(value, type):
                state[module.__name__, name, "forward"] = value.__dict__.get("forward")
    return state


def logits_of(model, input_ids, position_ids=None, **kwargs) -> Tensor:
    with torch.no_grad():
        return model(input_ids, position_ids=position_ids, **kwargs).logits


class TestOneRank:
    """A world of one, without a process group, equals the unpatched model."""

    @pytest.mark.parametrize("attn", ["eager", "sdpa", "flex_attention"])
    @pytest.mark.parametrize("strategy", STRATEGIES)
    def test_a_family_patch_serves_models_built_before_and_after(self, strategy, attn):
        input_ids, position_ids, _ = tiny_batch()
        expected = logits_of(tiny_model(), input_ids, position_ids)
        before = tiny_model(attn=attn)
        with apply_seq_parallel_monkey_patch(strategy, "llama"):
            after = tiny_model(attn=attn)
            for model in (before, after):
                torch.testing.assert_close(logits_of(model, input_ids, position_ids), expected)

    @pytest.mark.parametrize("strategy", STRATEGIES)
    def test_positions_may_be_left_out(self, strategy):
        input_ids, position_ids, _ = tiny_batch()
        model = tiny_model()
        expected = logits_of(model, input_ids, position_ids)
        with apply_seq_parallel_monkey_patch(strategy, model):
            torch.testing.assert_close(logits_of(model, input_ids), expected)

    @pytest.mark.parametrize("strategy", STRATEGIES)
    def test_labels_and_generation_work_as_ever(self, strategy):
        input_ids, _, _ = tiny_batch(12)
        model = tiny_model().eval()
        expected_loss = model(input_ids, labels=input_ids).loss.detach()
        expected_ids = model.generate(input_ids, max_new_tokens=4, do_sample=False, pad_token_id=0)
        with apply_seq_parallel_monkey_patch(strategy, model):
            torch.testing.assert_close(model(input_ids, labels=input_ids).loss.detach(), expected_loss)
            generated = model.generate(input_ids, max_new_tokens=4, do_sample=False, pad_token_id=0)
        assert torch.equal(generated, expected_ids)

    def test_a_forward_skip_of_positions_stays_in_its_document(self):
        input_ids, position_ids, target_ids = tiny_batch()
        position_ids[:, 20:] += 1000
        model = tiny_model()
        expected = ordinary_loss(model, input_ids, position_ids, target_ids).detach()
        with apply_seq_parallel_monkey_patch("data_parallel", model):
            logits = model(input_ids, position_ids=position_ids).logits
            torch.testing.assert_close(sequence_parallel_cross_entropy(logits, target_ids).detach(), expected)

    def test_a_layer_called_alone_is_a_stock_layer(self):
        model = tiny_model()
        hidden, layer = torch.randn(2, 6, 64), model.model.layers[0]
        rope = model.model.rotary_emb(hidden, torch.arange(6)[None])
        expected = layer(hidden, position_embeddings=rope, foo=None)
        with apply_seq_parallel_monkey_patch("zigzag_ring_attn", model):
            assert torch.equal(layer(hidden, position_embeddings=rope, foo=None), expected)

    def test_autocast_runs_attention_in_its_dtype(self):
        input_ids, position_ids, _ = tiny_batch()
        model = tiny_model()
        expected = logits_of(model, input_ids, position_ids)
        with apply_seq_parallel_monkey_patch("data_parallel", model), torch.autocast("cpu", torch.bfloat16):
            logits = logits_of(model, input_ids, position_ids)
        assert 0 < relative_error(logits, expected) < 0.05

    def test_a_compiled_model_gives_the_same_result(self):
        input_ids, position_ids, _ = tiny_batch()
        model = tiny_model()
        with apply_seq_parallel_monkey_patch("zigzag_ring_attn", model):
            expected = logits_of(model, input_ids, position_ids)
            compiled = torch.compile(model, backend="eager")
            torch.testing.assert_close(logits_of(compiled, input_ids, position_ids), expected)


class TestLifetime:
    def test_undo_restores_every_name_of_the_modeling_file(self):
        before = stock_state()
        patch = apply_zigzag_ring_attn_monkey_patch_llama()
        other = apply_zigzag_ring_attn_monkey_patch_mistral()
        assert stock_state() != before
        patch.undo()
        other.undo()
        assert stock_state() == before

    def test_patch_and_undo_leave_the_model_bit_equal(self):
        batch = tiny_batch()
        model = tiny_model(attn="sdpa")
        loss = ordinary_loss(model, *batch)
        loss.backward()
        expected = gradients(model)
        with apply_seq_parallel_monkey_patch("zigzag_ring_attn", "llama"):
            pass
        with apply_seq_parallel_monkey_patch("zigzag_ring_attn", model):
            pass
        again = ordinary_loss(model, *batch)
        again.backward()
        assert torch.equal(loss, again)
        assert all(torch.equal(grad, expected[name]) for name, grad in gradients(model).items())

    def test_another_family_is_untouched(self):
        before = {key: value for key, value in stock_state().items() if "mistral" in key[0]}
        with apply_seq_parallel_monkey_patch("zigzag_ring_attn", "llama"):
            assert {key: value for key, value in stock_state().items() if "mistral" in key[0]} == before

    @pytest.mark.parametrize("by_instance", [False, True])
    def test_applying_twice_is_applying_once(self, by_instance):
        before = stock_state()
        target = tiny_model() if by_instance else "llama"
        first = apply_seq_parallel_monkey_patch("zigzag_ring_attn", target)
        second = apply_seq_parallel_monkey_patch("zigzag_ring_attn", target)
        assert second is first
        second.undo()
        assert stock_state() == before

    @pytest.mark.parametrize("first_undone", [0, 1])
    @pytest.mark.parametrize("by_instance", [False, True])
    def test_two_patches_undone_in_any_order_end_with_the_stock_model(self, by_instance, first_undone):
        before = stock_state()
        model = tiny_model()
        target = model if by_instance else "llama"
        patches = [apply_seq_parallel_monkey_patch(name, target) for name in STRATEGIES[:2]]
        used = patches[1]
        logits_of(model, *tiny_batch()[:2])
        assert used.kernel_name != "auto" and patches[0].kernel_name == "auto"
        patches[first_undone].undo()
        left = patches[1 - first_undone]
        logits_of(model, *tiny_batch()[:2])
        assert left.kernel_name != "auto"
        left.undo()
        left.undo()
        assert stock_state() == before

    def test_an_instance_patch_leaves_a_model_with_the_same_config_alone(self):
        config = LlamaConfig(
            hidden_size=64, intermediate_size=96, num_hidden_layers=1, num_attention_heads=8, vocab_size=97
        )
        patched, other = AutoModelForCausalLM.from_config(config), AutoModelForCausalLM.from_config(config)
        input_ids, position_ids, _ = tiny_batch()
        expected = logits_of(other, input_ids, position_ids)
        with apply_seq_parallel_monkey_patch("zigzag_ring_attn", patched) as patch:
            assert torch.equal(logits_of(other, input_ids, position_ids), expected)
            assert patch.kernel_name == "auto"
            logits_of(patched, input_ids, position_ids)
            assert patch.kernel_name != "auto"
            with pytest.raises(NotImplementedError, match="output_attentions=False"):
                patched(input_ids, output_attentions=True)
            other(input_ids, position_ids=position_ids, output_attentions=False)

    def test_a_model_goes_before_its_family(self):
        model = tiny_model()
        with (
            apply_seq_parallel_monkey_patch("data_parallel", "llama") as family,
            apply_seq_parallel_monkey_patch("zigzag_ring_attn", model) as own,
        ):
            logits_of(model, *tiny_batch()[:2])
            assert own.kernel_name != "auto" and family.kernel_name == "auto"

    def test_a_patch_by_somebody_else_on_top_survives_undo(self):
        patch = apply_seq_parallel_monkey_patch("zigzag_ring_attn", "llama")
        ours = modeling_llama.LlamaForCausalLM.forward
        try:
            modeling_llama.LlamaForCausalLM.forward = theirs = lambda self, *args, **kwargs: "theirs"
            patch.undo()
            assert modeling_llama.LlamaForCausalLM.forward is theirs
        finally:
            modeling_llama.LlamaForCausalLM.forward = ours.__wrapped__

    def test_the_signature_that_trainers_inspect_is_kept(self):
        import inspect

        stock = inspect.signature(modeling_llama.LlamaForCausalLM.forward)
        with apply_seq_parallel_monkey_patch("zigzag_ring_attn", "llama"):
            assert inspect.signature(modeling_llama.LlamaForCausalLM.forward) == stock


class TestRefusalsAtSetup:
    def test_an_unknown_strategy_lists_what_exists(self):
        with pytest.raises(ValueError, match="got 'ring'; choose one of: zigzag_ring_attn, data_parallel"):
            apply_seq_parallel_monkey_patch("ring", "llama")

    def test_an_unknown_kernel_lists_what_exists(self):
        with pytest.raises(ValueError, match="'cuda_magic'; choose one of: auto, .*reference, cpu_flash"):
            apply_seq_parallel_monkey_patch("zigzag_ring_attn", "llama", kernel="cuda_magic")

    def test_a_kernel_that_is_not_installed_gives_the_pip_line(self):
        with pytest.raises(ImportError, match="pip install"):
            apply_seq_parallel_monkey_patch("zigzag_ring_attn", "llama", kernel="flash_attn_2")

    @pytest.mark.parametrize("family", ["lama", "llama.modeling_llama"])
    def test_an_unknown_family_is_named(self, family):
        with pytest.raises(ValueError, match=f"needs a model family of transformers, got '{family}'"):
            apply_seq_parallel_monkey_patch("zigzag_ring_attn", family)

    @pytest.mark.parametrize("family", ["bloom", "auto"])
    def test_a_family_without_a_causal_attention_interface_is_refused(self, family):
        with pytest.raises(NotImplementedError, match=f"got '{family}'; its modeling file does not use"):
            apply_seq_parallel_monkey_patch("zigzag_ring_attn", family)

    def test_a_module_that_is_no_such_model_is_refused(self):
        with pytest.raises(NotImplementedError, match="got Linear; none of its modeling files"):
            apply_seq_parallel_monkey_patch("zigzag_ring_attn", torch.nn.Linear(2, 2))

    def test_something_that_is_no_model_is_refused(self):
        with pytest.raises(ValueError, match="a family name or a model, got LlamaConfig"):
            apply_seq_parallel_monkey_patch("zigzag_ring_attn", LlamaConfig())

    def test_a_hybrid_model_is_refused_by_its_layer_types(self):
        config = Qwen3NextConfig(
            vocab_size=97, hidden_size=32, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2,
            head_dim=8, intermediate_size=32, num_experts=2, num_experts_per_tok=1, moe_intermediate_size=16,
            shared_expert_intermediate_size=16, linear_num_key_heads=2, linear_num_value_heads=2,
            linear_key_head_dim=8, linear_value_head_dim=8,
        )  # fmt: skip
        model = AutoModelForCausalLM.from_config(config)
        with pytest.raises(NotImplementedError, match="got \\['linear_attention'\\] in Qwen3NextForCausalLM"):
            apply_seq_parallel_monkey_patch("zigzag_ring_attn", model)

    def test_a_convolution_over_tokens_is_refused(self):
        model = tiny_model()
        model.model.layers[0].mixer = torch.nn.Conv1d(64, 64, 3)
        with pytest.raises(NotImplementedError, match="got a Conv1d in LlamaForCausalLM"):
            apply_seq_parallel_monkey_patch("zigzag_ring_attn", model)


class TestRefusalsInTheForwardPass:
    """On one rank, what no world size can do."""

    def test_attention_dropout_in_training_is_refused_and_evaluation_is_exact(self):
        input_ids, position_ids, _ = tiny_batch()
        model = tiny_model(attention_dropout=0.5)
        expected = logits_of(model.eval(), input_ids, position_ids)
        with apply_seq_parallel_monkey_patch("zigzag_ring_attn", model):
            torch.testing.assert_close(logits_of(model.eval(), input_ids, position_ids), expected)
            with pytest.raises(NotImplementedError, match="dropout 0 in training, got 0.5"):
                model.train()(input_ids, position_ids=position_ids)

    @pytest.mark.parametrize("padding", ["left", "right"])
    def test_a_mask_with_zeros_is_refused_and_one_of_ones_accepted(self, padding):
        input_ids, position_ids, _ = tiny_batch()
        model = tiny_model()
        mask = torch.ones_like(input_ids)
        expected = logits_of(model, input_ids, position_ids)
        with apply_seq_parallel_monkey_patch("zigzag_ring_attn", model):
            logits = logits_of(model, input_ids, position_ids, attention_mask=mask)
            torch.testing.assert_close(logits, expected)
            mask[0, slice(0, 2) if padding == "left" else slice(-2, None)] = 0
            with pytest.raises(
                ValueError, match="attention_mask of ones only, got 2 zeros; pad on the right"
            ):
                logits_of(model, input_ids, position_ids, attention_mask=mask)

    def test_a_four_dimensional_mask_is_refused(self):
        input_ids, position_ids, _ = tiny_batch()
        model = tiny_model()
        mask = explicit_mask(position_ids, window=None, dtype=torch.float32)
        with (
            apply_seq_parallel_monkey_patch("zigzag_ring_attn", model),
            pytest.raises(ValueError, match=f"a 2-D one of ones, got \\(3, 1, {SEQ_LEN}, {SEQ_LEN}\\)"),
        ):
            logits_of(model, input_ids, position_ids, attention_mask=mask)

    @pytest.mark.parametrize("keyword", ["s_aux", "softcap"])
    def test_an_attention_keyword_that_changes_the_result_is_refused_by_name(self, keyword):
        input_ids, position_ids, _ = tiny_batch()
        model = tiny_model()
        with (
            apply_seq_parallel_monkey_patch("zigzag_ring_attn", model),
            pytest.raises(
                NotImplementedError, match=f"plain softmax attention, got {keyword} from LlamaAttention"
            ),
        ):
            logits_of(model, input_ids, position_ids, **{keyword: 30.0})

    def test_bidirectional_attention_is_refused(self):
        input_ids, position_ids, _ = tiny_batch()
        model = tiny_model()
        model.model.layers[0].self_attn.is_causal = False
        with (
            apply_seq_parallel_monkey_patch("zigzag_ring_attn", model),
            pytest.raises(NotImplementedError, match="causal attention, got is_causal=False"),
        ):
            logits_of(model, input_ids, position_ids)

    def test_positions_of_another_length_are_refused(self):
        input_ids, position_ids, _ = tiny_batch()
        model = tiny_model()
        with (
            apply_seq_parallel_monkey_patch("zigzag_ring_attn", model.model),
            pytest.raises((ValueError, RuntimeError), match="position_ids of shape|must match the size"),
        ):
            model.model(input_ids, position_ids=position_ids[:2])


_REFUSED_ON_RANKS = {
    "labels": (
        dict(labels=True),
        "sequence_parallel_cross_entropy or sequence_parallel_linear_cross_entropy",
    ),
    "no_positions": (dict(position_ids=None), "needs position_ids on LlamaForCausalLM's forward, got None"),
    "use_cache": (dict(use_cache=True), "use_cache=False and no cache, got use_cache=True"),
    "cache": (dict(past_key_values=True), "use_cache=False and no cache, got"),
    "mask_on_one_rank": (dict(attention_mask="rank 1"), "attention_mask of ones only"),
    "uneven_shards": (dict(shard="rank 1"), "equal shards on all ranks, got \\(batch, length\\) "),
    "other_layout": (
        dict(shard="contiguous"),
        "shards in its own layout, got positions 0..47 in another order",
    ),
    "odd_shard": (dict(shard="odd"), "divisible by 2 \\* num_ranks = 4, got 46; pad the batch to 48"),
    "generate": (dict(generate=True), "generate\\(\\) needs an unpatched model"),
    "generate_without_cache": (dict(generate=False), "generate\\(\\) needs an unpatched model"),
    "layer_alone": (dict(layer=True), "within the forward pass of a whole base model"),
    "dynamic_rope": (dict(rope="dynamic"), "got rope_type 'dynamic'"),
    "classification": (dict(head="classification"), "got LlamaForSequenceClassification; it pools"),
}


def refused_call(what: dict[str, Any]) -> tuple[str, int]:
    """Text of the error that a call of a patched model raises, and the bytes that attention sent before."""
    rope = {"rope_type": what["rope"], "rope_theta": 1e4, "factor": 2.0} if "rope" in what else None
    model = tiny_model(rope_parameters=rope).eval() if rope else tiny_model().eval()
    if what.get("head"):
        model = modeling_llama.LlamaForSequenceClassification(model.config)
    rank, size = dist.get_rank(), dist.get_world_size()
    input_ids, position_ids, _ = tiny_batch()
    local = prepare_seq_parallel_inputs("zigzag_ring_attn", input_ids, position_ids, None, rank, size, "cpu")
    ids, positions = local["local_input_ids"], local["local_position_ids"]
    if what.get("shard") == "contiguous":
        ids, positions = input_ids.chunk(size, 1)[rank], position_ids.chunk(size, 1)[rank]
    elif what.get("shard") == "odd" or (what.get("shard") == "rank 1" and rank == 1):
        ids, positions = ids[:, :-1], positions[:, :-1]
    kwargs: dict[str, Any] = {"position_ids": what.get("position_ids", positions)}
    if what.get("labels"):
        kwargs["labels"] = ids
    if what.get("use_cache"):
        kwargs["use_cache"] = True
    if what.get("past_key_values"):
        from transformers import DynamicCache

        kwargs["past_key_values"] = DynamicCache()
    if what.get("attention_mask"):
        kwargs["attention_mask"] = torch.ones_like(ids)
        kwargs["attention_mask"][0, 0] = rank == 0
    with apply_seq_parallel_monkey_patch("zigzag_ring_attn", "llama"), spy_on_traffic() as traffic:
        try:
            if "generate" in what:
                model.generate(
                    ids, max_new_tokens=2, do_sample=False, use_cache=what["generate"], pad_token_id=0
                )
            elif what.get("layer"):
                hidden = torch.randn(2, 6, 64)
                rope_values = model.model.rotary_emb(hidden, torch.arange(6)[None])
                model.model.layers[0](hidden, position_embeddings=rope_values)
            else:
                model(ids, **kwargs)
        except (ValueError, NotImplementedError, RuntimeError) as error:
            return f"{type(error).__name__}: {error}", traffic.bytes_sent
    return "nothing was refused", traffic.bytes_sent


@pytest.mark.parametrize("case", _REFUSED_ON_RANKS)
def test_what_shards_cannot_honour_is_refused_on_every_rank_before_anything_is_sent(case):
    import re

    what, text = _REFUSED_ON_RANKS[case]
    answers = run_ranks(refused_call, 2, what, timeout=30.0)
    assert all(sent == 0 for _, sent in answers)
    if case == "mask_on_one_rank":
        assert "got refused ones on sequence rank [1]" in answers[0][0]
        answers = answers[1:]
    for answer, _ in answers:
        assert re.search(text, answer), answer


def default_use_cache(family: bool) -> bool:
    model = tiny_model()
    batch = tiny_batch()
    rank, size = dist.get_rank(), dist.get_world_size()
    local = prepare_seq_parallel_inputs("zigzag_ring_attn", *batch, rank, size, "cpu")
    with apply_seq_parallel_monkey_patch("zigzag_ring_attn", "llama" if family else model):
        output = model(local["local_input_ids"], position_ids=local["local_position_ids"])
    return output.past_key_values is None


@pytest.mark.parametrize("family", [True, False])
def test_a_default_use_cache_keeps_no_cache(family):
    assert run_ranks(default_use_cache, 2, family) == [True, True]


def patch_before_the_process_group(strategy: str) -> float:
    """Patching may come first; the world is looked at in the first forward pass."""
    group_rank, size = dist.get_rank(), dist.get_world_size()
    store = dist.distributed_c10d._get_default_store()
    dist.barrier()
    dist.destroy_process_group()
    patch = apply_seq_parallel_monkey_patch(strategy, "llama")
    dist.init_process_group("gloo", store=dist.PrefixStore("again", store), rank=group_rank, world_size=size)
    batch, model = tiny_batch(), tiny_model()
    local = prepare_seq_parallel_inputs(strategy, *batch, group_rank, size, "cpu")
    logits = model(local["local_input_ids"], position_ids=local["local_position_ids"]).logits
    loss = sequence_parallel_cross_entropy(logits, local["local_target_ids"]).detach()
    patch.undo()
    dist.all_reduce(loss)
    return relative_error(loss / size, ordinary_loss(model, *batch).detach())


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_family_may_be_patched_before_the_process_group_exists(strategy):
    assert max(run_ranks(patch_before_the_process_group, 2, strategy)) < 1e-5


def subgroups(strided: bool) -> tuple[float, tuple[int, ...]]:
    """Two sequence groups with different samples at once; each has to match its own reference."""
    from torch.distributed.device_mesh import DeviceMesh

    table = torch.arange(4).view(2, 2)
    layout = DeviceMesh("cpu", table.T if strided else table, mesh_dim_names=("dp", "sp"))
    mesh = init_sequence_parallel_mesh(device_mesh=layout)
    batch, model = tiny_batch(seed=10 + mesh.dp_rank), tiny_model()
    with apply_seq_parallel_monkey_patch("zigzag_ring_attn", model):
        local = prepare_seq_parallel_inputs("zigzag_ring_attn", *batch, mesh.sp_rank, mesh.sp_size, "cpu")
        logits = model(local["local_input_ids"], position_ids=local["local_position_ids"]).logits
    count = (batch[2] != -100).sum()
    loss = sequence_parallel_cross_entropy(
        logits, local["local_target_ids"], num_target_tokens=2 * count
    ).detach()
    dist.all_reduce(loss, group=mesh.sp_group)
    # world_size / (2 * count) times the sum over this group's tokens is twice the group's own mean loss
    return relative_error(loss / 2, ordinary_loss(model, *batch).detach()), tuple(
        dist.get_process_group_ranks(mesh.sp_group)
    )


@pytest.mark.parametrize("strided", [False, True])
def test_two_sequence_groups_do_not_hear_each_other(strided):
    answers = run_ranks(subgroups, 4, strided)
    assert [ranks for _, ranks in answers] == (
        [(0, 2), (1, 3), (0, 2), (1, 3)] if strided else [(0, 1), (0, 1), (2, 3), (2, 3)]
    )
    assert max(error for error, _ in answers) < 1e-5


def test_a_family_without_model_objects_is_checked_at_its_first_forward():
    config = GPT2Config(vocab_size=97, n_embd=32, n_layer=1, n_head=4)
    model = AutoModelForCausalLM.from_config(config).eval()
    input_ids, position_ids, _ = tiny_batch(16)
    expected = logits_of(model, input_ids, position_ids)
    with apply_seq_parallel_monkey_patch("zigzag_ring_attn", "gpt2"):
        torch.testing.assert_close(logits_of(model, input_ids, position_ids), expected)
