"""As much of megatron.training.arguments as our flags meet, for where only megatron.core is installed."""

import argparse
import os

_SIZES = {
    "tensor_model_parallel_size": 1,
    "pipeline_model_parallel_size": 1,
    "context_parallel_size": 1,
    "expert_model_parallel_size": 1,
    "expert_tensor_parallel_size": None,
    "num_distributed_optimizer_instances": 1,
    "num_layers": None,
    "num_layers_per_virtual_pipeline_stage": None,
    "hidden_size": None,
    "num_attention_heads": None,
    "num_query_groups": 1,
    "ffn_hidden_size": None,
    "kv_channels": None,
    "seq_length": None,
    "micro_batch_size": None,
    "global_batch_size": None,
    "vocab_size": None,
    "padded_vocab_size": None,
    "num_experts": None,
    "moe_ffn_hidden_size": None,
    "moe_shared_expert_intermediate_size": None,
    "mtp_num_layers": None,
    "q_lora_rank": None,
    "kv_lora_rank": 32,
    "qk_head_dim": 128,
    "qk_pos_emb_head_dim": 64,
    "v_head_dim": 128,
    "cpu_offloading_num_layers": 0,
    "make_vocab_size_divisible_by": 128,
    "save_interval": None,
    "check_weight_hash_across_dp_replicas_interval": None,
    "save_wgrads_interval": None,
}
_WORDS = {
    "transformer_impl": "transformer_engine",
    "moe_token_dispatcher_type": "allgather",
    "cuda_graph_impl": "none",
    "ckpt_format": "torch_dist",
    "ckpt_convert_format": None,
    "optimizer": "adam",
    "muon_tp_mode": "blockwise",
    "fp8_format": None,
    "fp8_recipe": "delayed",
    "recompute_granularity": None,
    "distributed_backend": "nccl",
    "softmax_type": "vanilla",
    "position_embedding_type": "learned_absolute",
    "heterogeneous_layers_config_path": None,
    "yaml_cfg": None,
    "te_precision_config_file": None,
    "save": None,
    "load": None,
    "pretrained_checkpoint": None,
    "non_persistent_ckpt_type": None,
    "nccl_communicator_config_path": None,
}
_SWITCHES = (
    *("moe_layer_recompute", "quick_geglu"),
    *("group_query_attention", "swiglu", "bf16", "fp16", "use_distributed_optimizer", "decrease_batch_size_if_needed"),
    *("sequence_parallel", "use_megatron_fsdp", "use_torch_fsdp2", "tp_comm_overlap", "enable_cuda_graph"),
    *("distribute_saved_activations", "defer_embedding_wgrad_compute", "delay_wgrad_compute", "flash_decode"),
    *("inference_dynamic_batching", "perform_rl_step", "use_legacy_models", "multi_latent_attention"),
    *("use_tp_pp_dp_mapping", "use_mp_args_from_checkpoint_args"),
    *("attention_output_gate", "overlap_param_gather", "overlap_param_gather_with_optimizer_step"),
    *("cross_entropy_loss_fusion", "use_sharp", "batch_invariant_mode", "deterministic_mode", "grad_reduce_in_bf16"),
    *("init_method_xavier_uniform", "use_cpu_initialization", "inference_rng_tracker", "log_max_attention_logit"),
    *("moe_grouped_gemm", "log_params_norm", "untie_embeddings_and_output_weights", "sft"),
    *("ckpt_assume_constant_structure", "fake_process_group", "qk_clip"),
)


def add_megatron_arguments(parser):
    for name, default in _SIZES.items():
        parser.add_argument(_flag(name), type=int, default=default)
    for name, default in _WORDS.items():
        parser.add_argument(_flag(name), default=default, dest="fp8" if name == "fp8_format" else name)
    for name in _SWITCHES:
        parser.add_argument(_flag(name), action="store_true")
    parser.add_argument("--no-gradient-accumulation-fusion", action="store_false", dest="gradient_accumulation_fusion")
    parser.add_argument("--no-persist-layer-norm", action="store_true")
    parser.add_argument("--apply-layernorm-1p", action="store_true", dest="layernorm_zero_centered_gamma")
    parser.add_argument("--rampup-batch-size", nargs="*")
    parser.add_argument("--recompute-modules", nargs="*")
    parser.add_argument("--cp-comm-type", nargs="+", default=["p2p"])
    parser.add_argument("--spec", nargs="*")
    parser.add_argument("--high-priority-stream-groups", nargs="*", default=[])
    parser.add_argument("--use-nccl-ub", action="store_true", dest="nccl_ub")
    parser.add_argument("--attention-dropout", type=float, default=0.1)
    return parser


def parse_args(extra_args_provider=None, ignore_unknown_args=False):
    parser = add_megatron_arguments(argparse.ArgumentParser(description="Megatron-LM Arguments", allow_abbrev=False))
    args = parser.parse_known_args()[0] if ignore_unknown_args else parser.parse_args()
    args.rank, args.world_size = int(os.getenv("RANK", "0")), int(os.getenv("WORLD_SIZE", "1"))
    return args


def validate_args(args, defaults=None):
    model = args.tensor_model_parallel_size * args.pipeline_model_parallel_size * args.context_parallel_size
    assert args.world_size % model == 0
    if args.tensor_model_parallel_size > 1 and args.distributed_backend != "gloo":
        assert os.getenv("CUDA_DEVICE_MAX_CONNECTIONS") == "1", "set CUDA_DEVICE_MAX_CONNECTIONS to 1"
    assert not args.overlap_param_gather, "--overlap-param-gather only\nwith more"
    args.data_parallel_size = args.world_size // model
    if args.num_layers_per_virtual_pipeline_stage is not None:
        assert args.num_layers % args.num_layers_per_virtual_pipeline_stage == 0
    if args.global_batch_size is None:
        args.global_batch_size = args.micro_batch_size * args.data_parallel_size
    if args.ffn_hidden_size is None:
        args.ffn_hidden_size = 4 * args.hidden_size
    if args.kv_channels is None:
        args.kv_channels = args.hidden_size // args.num_attention_heads
    return args


def _flag(name):
    return "--" + name.replace("_", "-")
