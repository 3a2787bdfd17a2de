"""The features of Megatron that do not go with AxoNN's layers, the reasons, and the remedies: a table."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Feature:
    """An argument of Megatron's.

    Attributes:
        name: in its namespace; versions that lack it have nothing to refuse.
        why: it does not go with us.
        remedy: what to do.
        allowed: its values that do; None always does.
        flag: as it is written, where that is not its name.
    """

    name: str
    why: str
    remedy: str = "leave it out"
    allowed: tuple[Any, ...] = (False,)
    written: str = ""

    @property
    def flag(self) -> str:
        """As it is written."""
        return self.written or "--" + self.name.replace("_", "-")


_CUT = "sequences are shared by as many ranks in every microbatch, and cut in one way"
_HEADS = "all ranks of a sequence share it in one way, and none within another"
_MIXED = "experts are Megatron's own plain ones, each a layer by itself"
_TOKENS = "tokens travel by TED's dispatch"
_SHARED = "--axonn-gz already shares weights, gradients and optimizer state"
_KERNEL = "Transformer Engine's own linear layers, which do that, are replaced"
_OTHER = "layers of that kind are not split over a grid"
_LOGITS = "a rank's logits are of other words than in Megatron's own split"
_FILES = "a rank's files would hold shares of the grid, which nothing reads"
_ONE = "leave it at 1"

FEATURES = (
    Feature("hybrid_context_parallel", _CUT),
    Feature("hierarchical_context_parallel_sizes", _HEADS, "leave it out", ()),
    Feature("expert_tensor_parallel_num_weight_shards", _MIXED, "leave it out", ()),
    Feature(
        "moe_use_legacy_grouped_gemm",
        f"{_MIXED}, not one matrix of all",
        "leave it out, and use --moe-grouped-gemm",
    ),
    Feature(
        "moe_token_dispatcher_type",
        f"{_TOKENS}, and kernels of DeepEP are for Megatron's own",
        "use allgather or alltoall",
        ("allgather", "alltoall"),
    ),
    Feature("moe_enable_deepep", f"{_TOKENS}, and kernels of DeepEP are for Megatron's own"),
    Feature("moe_permute_fusion", f"{_TOKENS}, and the kernel is for Megatron's own"),
    Feature("moe_shared_expert_overlap", f"{_TOKENS}, to which shared experts do not belong"),
    Feature("moe_latent_size", "its projections are Transformer Engine's, of whole activations", "leave it out", ()),
    Feature("moe_router_force_load_balancing", "tensor ranks would draw other experts for the same tokens"),
    Feature("moe_use_upcycling", "it copies weights of whole layers, and a rank has shares"),
    Feature(
        "sequence_parallel",
        "--axonn-layout scattered, the default, splits the same activations; with it, tokens would be split twice",
    ),
    Feature("gtp_weight_remat_size", "--axonn-gz shares weights", _ONE, (1,)),
    Feature(
        "use_tp_pp_dp_mapping", "z lies inside the data-parallel ranks, which must be next to the tensor-parallel ones"
    ),
    Feature("use_sharp", "it is for one group of Megatron's, and gradients of weights are summed over others"),
    Feature("use_megatron_fsdp", _SHARED, "leave it out, and use --use-distributed-optimizer"),
    Feature("use_custom_fsdp", _SHARED, "leave it out, and use --use-distributed-optimizer"),
    Feature("use_torch_fsdp2", _SHARED, "leave it out, and use --use-distributed-optimizer"),
    Feature("init_model_with_meta_device", "our layers draw their own share of a weight on the device"),
    Feature(
        "fp4",
        "products of its blocks are in 8, 16 or 32 bits",
        "use --fp8-format hybrid --fp8-recipe tensorwise",
        (),
        "--fp4-format",
    ),
    Feature("fp8_param_gather", "weights are gathered over z in the type they are computed in"),
    Feature("fp8_param", "weights are gathered over z in the type they are computed in"),
    Feature("tp_comm_overlap", f"{_KERNEL}", "leave it out, and choose by --axonn-overlap"),
    Feature("symmetric_ar_type", _KERNEL, "leave it out", ()),
    Feature("delay_wgrad_compute", _KERNEL, "leave it out, and choose by --axonn-overlap"),
    Feature("overlap_moe_expert_parallel_comm", f"{_TOKENS}, which Megatron's schedule has not"),
    Feature("defer_embedding_wgrad_compute", "the output layer's weight gradient is summed over z in backward"),
    Feature("fine_grained_activation_offloading", _KERNEL, "leave it out, or use --recompute-granularity"),
    Feature("cpu_offloading_num_layers", _KERNEL, "leave it out, or use --recompute-granularity", (0,)),
    Feature("cpu_offloading", _KERNEL, "leave it out, or use --recompute-granularity"),
    Feature("distribute_saved_activations", "a saved activation is a share already, another one on each rank"),
    Feature("cuda_graph_impl", "collectives of a step are not captured", 'leave it out, or use "none"', ("none",)),
    Feature("enable_cuda_graph", "collectives of a step are not captured"),
    Feature("external_cuda_graph", "collectives of a step are not captured"),
    Feature(
        "transformer_impl", "it is for inference", "use local or transformer_engine", ("local", "transformer_engine")
    ),
    Feature(
        "inference_dynamic_batching", "only training is split", "convert the checkpoint, and serve it with Megatron"
    ),
    Feature("use_legacy_static_engine", "only training is split", "convert the checkpoint, and serve it with Megatron"),
    Feature("flash_decode", "only training is split"),
    Feature(
        "inference_rng_tracker", "without states of their own ranks would begin with the same shares, and drop the same"
    ),
    Feature("use_inference_optimized_layers", "only training is split"),
    Feature("perform_rl_step", "its roll-outs are inference, and only training is split"),
    Feature("use_legacy_models", "only models of megatron.core are split", "leave it out"),
    Feature("experimental_attention_variant", _OTHER, "leave it out", ()),
    Feature("heterogeneous_layers_config_path", "all layers must be alike", "leave it out", ()),
    Feature("heterogeneous_layers_config_encoded_json", "all layers must be alike", "leave it out", ()),
    Feature("heterogeneous_block_specs", "all layers must be alike"),
    Feature("hybrid_layer_pattern", _OTHER, "use pretrain_gpt.py without it", ()),
    Feature(
        "softmax_type",
        "a learnt offset would be one more parameter of the heads",
        "use vanilla",
        ("vanilla", "off-by-one"),
    ),
    Feature("enable_mhc_connections", "the residual stream that is split is one"),
    Feature("use_transformer_engine_op_fuser", _KERNEL),
    Feature("use_grouped_gemm_for_dense_mlp", _KERNEL),
    Feature("fused_residual_rmsnorm", "norms here sum their moments over ranks"),
    Feature("use_kitchen", _KERNEL),
    Feature("te_precision_config_file", _KERNEL, "leave it out", ()),
    Feature("quant_recipe", _KERNEL, "leave it out", ()),
    Feature("batch_invariant_mode", "norms here sum their moments over ranks"),
    Feature("memory_efficient_layer_norm", "norms here sum their moments over ranks"),
    Feature(
        "cross_entropy_loss_fusion",
        f"{_LOGITS}; the loss here has one sum of both numbers of a token, as the fused one",
    ),
    Feature("logit_dtype", "logits are of the type they are computed in", "leave it out", (), "--output-logit-dtype"),
    Feature("logits_save_dir", _LOGITS, "leave it out", ()),
    Feature("logits_load_dir", _LOGITS, "leave it out", ()),
    Feature("use_kitchen_attention", _KERNEL),
    Feature("kitchen_config_file", _KERNEL, "leave it out", ()),
    Feature("kitchen_recipe_number", _KERNEL, "leave it out", ()),
    Feature("qk_clip", "it rescales whole weights, and a rank has a share"),
    Feature("modelopt_enabled", "it replaces layers that are replaced already"),
    Feature(
        "optimizer",
        "a rank has shares of matrices, of which others want all",
        "use adam, sgd or muon",
        ("adam", "sgd", "muon"),
    ),
    Feature(
        "layernorm_zero_centered_gamma", "norms here multiply by the weight itself", written="--apply-layernorm-1p"
    ),
    Feature(
        "overlap_param_gather_with_optimizer_step",
        "weights split over z have an optimizer of their own, which steps after the gather has begun",
        "leave it out, and use --overlap-param-gather",
    ),
    Feature(
        "check_weight_hash_across_dp_replicas_interval",
        "ranks of z are data-parallel ones and hold other shares",
        "leave it out",
        (),
    ),
    Feature("save_wgrads_interval", _FILES, "leave it out", ()),
    Feature("save_dgrads_interval", _FILES, "leave it out", ()),
    Feature("save_params_interval", _FILES, "leave it out", ()),
    Feature("save_activations_interval", _FILES, "leave it out", ()),
    Feature("use_mp_args_from_checkpoint_args", "the grid of this run is given by --axonn-gx, -gy and -gz"),
    Feature(
        "ckpt_format",
        "shares of weights are saved as Megatron's own",
        "use torch or torch_dist",
        ("torch", "torch_dist"),
    ),
)
"""In the order in which they are reported."""

_MATRICES = "its matrices are not those of a grid's layers"
MUON = (
    Feature("num_experts", f"{_MATRICES}, of which each expert's is another", "leave it out, or use adam", (0,)),
    Feature(
        "use_distributed_optimizer",
        "it would share whole matrices out among data-parallel ranks, of which those of z hold shares",
    ),
    Feature(
        "muon_tp_mode",
        "every rank orthogonalises whole matrices, and none a part of the iteration",
        "use duplicated, or leave it out",
        ("duplicated", "blockwise"),
    ),
)
"""Arguments that do not go with Muon."""

_HYBRIDS = "it is for models of several kinds of layers"
ALIKE = (
    Feature("is_hybrid_model", _HYBRIDS, "use pretrain_mamba.py, or leave it out"),
    Feature("hybrid_override_pattern", _HYBRIDS, "use pretrain_mamba.py, or leave it out", ()),
    Feature("spec", "it may name layers that are not replaced", "leave it out", ()),
)
"""Arguments that do not go with models whose layers are alike."""

MIXERS = (
    Feature("fp8", "products of mixers are torch's, in 16 or 32 bits", "leave it out", (), "--fp8-format"),
    Feature(
        "recompute_granularity",
        "Megatron's stack of such layers recomputes attention alone",
        "leave it out, or use selective",
        ("selective",),
    ),
)
"""Arguments that do not go with Mamba mixers."""

_ATTENTION = "scales would be of a rank's heads alone, other ones on each grid"
EIGHT_BITS = (
    Feature(
        "transformer_impl",
        "products in 8 bits are Transformer Engine's",
        "use transformer_engine, the default",
        ("transformer_engine",),
    ),
    Feature(
        "fp8_recipe",
        "layers here scale a tensor by what it holds, while histories of scales are kept, and blocks cut, by Transformer Engine's own",
        "use tensorwise",
        ("tensorwise",),
    ),
    Feature(
        "num_experts",
        "experts are Megatron's own layers, and what they share is scaled otherwise",
        "leave it out",
        (0,),
    ),
    Feature("num_moe_experts", "experts are Megatron's own layers", "leave it out", ()),
    Feature("fp8_dot_product_attention", _ATTENTION),
    Feature("fp8_multi_head_attention", _ATTENTION),
    Feature("fp8_output_proj", "the output layer is not Transformer Engine's"),
    Feature("axonn_tune_matmuls", "it times products in 16 or 32 bits"),
)
"""Features that do not go with --fp8-format."""

SHARED = (
    Feature(
        "cp_comm_type",
        "keys and values go round by a ring or are gathered, or heads are dealt out, alike in all layers, and none of these within another",
        "use p2p, all_gather or a2a, once",
        (["p2p"], ["all_gather"], ["a2a"]),
    ),
    Feature(
        "sft",
        "kernels of Transformer Engine cut each of its packed sequences over all ranks, and attention here knows one cut of them all",
        "leave it out, or leave --context-parallel-size at 1",
    ),
    Feature("log_max_attention_logit", "attention here keeps no logits"),
)
"""Features that do not go with sequences that ranks share."""

_BERT = (
    "BERT",
    "heads of words and of pairs of sentences are plain layers that are not replaced, and would read shares as whole hidden states",
)
_T5 = (
    "T5",
    "attention to the encoder's stream and the decoder's head are modules that are not replaced, and would read shares as whole",
)
_IMAGES = "patches of images enter the residual stream beside the embedding of words, which alone is split"
_HYBRID = (
    "HybridModel of later versions",
    "its layers are not those of MambaStack, in which megatron-core 0.16 has mixers, attention and MLPs",
)
MODELS = {
    "BertModel": _BERT,
    "bert_layer_local_spec": _BERT,
    "T5Model": _T5,
    "LLaVAModel": ("a vision-language model", _IMAGES),
    "model_provider_llava_vlm": ("a multimodal model", _IMAGES),
    "MimoBuildConfig": ("a multimodal model", _IMAGES),
    "HybridModel": _HYBRID,
    "hybrid_builder": _HYBRID,
    "biencoder_model_provider": ("a bi-encoder", _BERT[1]),
    "VitClassificationModel": ("a vision transformer", _IMAGES),
    "VitInpaintingModel": ("a vision transformer", _IMAGES),
    "DINOPretrainModel": ("a vision transformer", _IMAGES),
}
"""Names that the scripts of models which we do not split have in their module: the model, and why."""
