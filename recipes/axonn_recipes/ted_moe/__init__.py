"""A GPT with experts under TED and under stock DeepSpeed-MoE: 000, Figure 7.7."""
