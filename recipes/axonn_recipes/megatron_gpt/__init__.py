"""A GPT on megatron.core alone, with Megatron's own tensor parallelism or ours."""
